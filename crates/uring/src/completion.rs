//! Clients of a context and their completions.

use std::collections::VecDeque;

use mqblk_memory::Buffer;

/// A client of a context: each has a completion queue of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ClientId(pub(crate) u32);

/// The completion of an operation.
#[derive(Debug)]
pub struct IoCompletion {
    /// The client's cookie from the submission.
    pub cookie: u64,
    /// Bytes transferred (or the operation's own result), or a negative errno.
    pub result: i32,
    /// The buffer that was moved in.
    pub buffer: Option<Buffer>,
    /// The buffer of a message's header.
    pub header: Option<Buffer>,
    /// True if more completions of the same (multishot) operation follow.
    pub more: bool,
}

/// The in-flight table is full: submit again after taking completions. Holds the buffer.
#[derive(Debug)]
pub struct Refused(pub Option<Buffer>);

/// User data of entries whose completions are dropped.
pub(crate) const IGNORED: u64 = u64::MAX;
/// User data of the poll of the port. All others are smaller.
pub(crate) const PORT: u64 = u64::MAX - 1;

/// Initial capacity of a completion queue. It grows to the highest number that arrived in one turn.
const QUEUE_CAPACITY: usize = 256;

/// The completions of one client.
#[derive(Debug)]
pub(crate) struct CompletionQueue {
    pub(crate) used: bool,
    /// Distinguishes a client from a later one with the same index.
    pub(crate) generation: u32,
    pub(crate) completions: VecDeque<IoCompletion>,
}

impl CompletionQueue {
    /// Returns a queue without a client.
    pub(crate) fn new() -> CompletionQueue {
        CompletionQueue { used: false, generation: 0, completions: VecDeque::with_capacity(QUEUE_CAPACITY) }
    }

    /// Returns true if it belongs to the client of this generation.
    pub(crate) fn is_of(&self, generation: u32) -> bool {
        self.used && self.generation == generation
    }
}
