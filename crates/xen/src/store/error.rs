//! Errors of xenstore operations.

use std::io;

use super::wire::Verb;

/// A failed xenstore operation.
#[derive(Debug, thiserror::Error)]
#[error("xenstore: {what}: {kind}")]
pub struct XenstoreError {
    /// The operation and the path.
    pub what: String,
    /// The cause.
    pub kind: XenstoreErrorKind,
}

/// Cause of a failed xenstore operation.
#[derive(Debug, thiserror::Error)]
pub enum XenstoreErrorKind {
    /// An error reply, with the name of an errno (`EACCES`). Source: `xsd_errors` of Xen's `public/io/xs_wire.h`.
    #[error("{0}")]
    Refused(String),
    /// The request is invalid and was not sent, or the reply is invalid.
    #[error("{0}")]
    Invalid(String),
    /// The value is not UTF-8.
    #[error("found a value that is no text (UTF-8)")]
    NotUtf8,
    /// The transaction conflicted with other writers in each of this many attempts.
    #[error("others changed what the transaction had read, in each of {0} attempts")]
    Conflicts(u32),
    /// The connection is lost: the server violated the protocol, did not reply in time, or closed it. All later calls
    /// fail too; transactions and watches are lost with it.
    #[error("the connection is lost: {0}")]
    Lost(String),
    /// A system call failed.
    #[error("{0}")]
    System(#[from] io::Error),
}

impl XenstoreError {
    pub(super) fn new(verb: Verb, path: &str, kind: XenstoreErrorKind) -> XenstoreError {
        let what =
            if path.is_empty() { verb.description().to_owned() } else { format!("{} {path}", verb.description()) };
        XenstoreError { what, kind }
    }

    /// Returns the name of the best matching errno, as xenstore writes it: `EACCES`, `ENOENT`, `ENOSPC`, ...
    pub fn errno(&self) -> &str {
        match &self.kind {
            XenstoreErrorKind::Refused(name) => name,
            XenstoreErrorKind::Invalid(_) => "EINVAL",
            XenstoreErrorKind::NotUtf8 => "EILSEQ",
            XenstoreErrorKind::Conflicts(_) => "EAGAIN",
            XenstoreErrorKind::Lost(_) => "EPIPE",
            XenstoreErrorKind::System(_) => "EIO",
        }
    }

    /// Returns true if the connection is lost and a new one is needed.
    pub fn is_lost(&self) -> bool {
        matches!(self.kind, XenstoreErrorKind::Lost(_))
    }
}
