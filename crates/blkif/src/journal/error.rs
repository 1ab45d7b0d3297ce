//! Errors of a journal.

use std::io;

/// Error of resuming a journal. The ring is then resumed by its own content.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The file cannot be read.
    #[error("journal: {0}")]
    Io(#[from] io::Error),
    /// The file is not a journal, or not of this ring.
    #[error("journal: {field}: found {found:#x}, expected {expected:#x}")]
    Field {
        /// Name of the field.
        field: &'static str,
        /// Value found.
        found: u64,
        /// Value expected.
        expected: u64,
    },
    /// The counts contradict each other.
    #[error(
        "journal: counts: found {consumed} requests consumed, {published} published and {publishing} being published, \
         expected each no higher than the one before"
    )]
    Counts {
        /// Requests consumed.
        consumed: u64,
        /// Responses published or being published.
        publishing: u64,
        /// Responses published.
        published: u64,
    },
    /// The ring's response index does not match the journal.
    #[error("journal: the ring's response index: found {found}, expected {published} or {publishing}")]
    RingIndex {
        /// Response index of the ring.
        found: u32,
        /// Index before the last publish.
        published: u32,
        /// Index after the last publish.
        publishing: u32,
    },
    /// The entries contradict the counts.
    #[error("journal: requests without a response: found {found} or one of them twice, expected {expected}")]
    Entries {
        /// Entries without a response.
        found: usize,
        /// Number of these by the counts.
        expected: u64,
    },
}
