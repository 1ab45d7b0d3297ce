//! Errors of verbs.

/// Error of a verb.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VerbError {
    /// A parameter cannot be used. Code -32602.
    #[error("{field}: found {found}, expected {expected}")]
    Params {
        /// The parameter, for example `params.disk`.
        field: String,
        /// The client's value.
        found: String,
        /// Description of valid values.
        expected: String,
    },
    /// The call was valid, but failed. Code -32001.
    #[error("{0}")]
    Failed(String),
}

impl VerbError {
    /// Returns the error for a parameter.
    pub fn params(field: impl Into<String>, found: impl Into<String>, expected: impl Into<String>) -> VerbError {
        VerbError::Params { field: field.into(), found: found.into(), expected: expected.into() }
    }
}
