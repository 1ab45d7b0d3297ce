//! What xenstore could not do.

use std::io;

use super::wire::Verb;

/// What was tried, and why it failed.
#[derive(Debug, thiserror::Error)]
#[error("xenstore: {what}: {kind}")]
pub struct StoreError {
    /// The verb and the path.
    pub what: String,
    /// Why.
    pub kind: StoreErrorKind,
}

/// Why xenstore did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreErrorKind {
    /// It refuses, with the name of an error number (`EACCES`). Source: `xsd_errors` of Xen's `public/io/xs_wire.h`.
    #[error("{0}")]
    Refused(String),
    /// It was not asked: what was to be sent is nothing that it takes.
    #[error("{0}")]
    Invalid(String),
    /// The value is there, but it is no text.
    #[error("found a value that is no text (UTF-8)")]
    NotText,
    /// Other writers were quicker, in each of so many attempts.
    #[error("others changed what the transaction had read, in each of {0} attempts")]
    Conflicts(u32),
    /// The connection cannot be used any more: what the server sent breaks the protocol, no answer came in time, or it has
    /// closed the connection. All later calls fail likewise; transactions and watches are gone with it.
    #[error("the connection is lost: {0}")]
    Lost(String),
    /// The system refuses.
    #[error("{0}")]
    System(#[from] io::Error),
}

impl StoreError {
    pub(super) fn new(verb: Verb, path: &str, kind: StoreErrorKind) -> StoreError {
        let what = if path.is_empty() { verb.word().to_owned() } else { format!("{} {path}", verb.word()) };
        StoreError { what, kind }
    }

    /// The name of the error number that says it best, as xenstore writes it: `EACCES`, `ENOENT`, `ENOSPC`, ...
    pub fn errno(&self) -> &str {
        match &self.kind {
            StoreErrorKind::Refused(name) => name,
            StoreErrorKind::Invalid(_) => "EINVAL",
            StoreErrorKind::NotText => "EILSEQ",
            StoreErrorKind::Conflicts(_) => "EAGAIN",
            StoreErrorKind::Lost(_) => "EPIPE",
            StoreErrorKind::System(_) => "EIO",
        }
    }

    /// Whether the connection is of no use any more: a new one is needed.
    pub fn is_lost(&self) -> bool {
        matches!(self.kind, StoreErrorKind::Lost(_))
    }
}
