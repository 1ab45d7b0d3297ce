//! Faults of guest memory.

/// Reason why a piece of guest memory cannot be in a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BufferFault {
    /// A byte of it is not mapped.
    Unmapped,
    /// The buffer has as many segments as it may have: those of one vectored transfer of the host.
    TooManySegments,
}

impl BufferFault {
    /// Returns the reason in words, for the log.
    pub const fn why(self) -> &'static str {
        match self {
            BufferFault::Unmapped => "an address that is no memory of the guest",
            BufferFault::TooManySegments => "more segments than the host transfers at once",
        }
    }
}
