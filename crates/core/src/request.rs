//! Requests and completions: small messages between queues and channels, moved in batches.

use crate::units::{ByteLen, ByteOffset};

/// The operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
// A byte of its own holds the variant: it is tested several times a request. Four bytes are moved at once, three are
// not.
#[repr(u8, align(4))]
pub enum Op {
    /// Fill the buffer from the disk.
    Read,
    /// Store the buffer. With `fua` the data is durable before the request completes; write-through is the same.
    Write {
        /// Durable before it is completed.
        fua: bool,
    },
    /// Make every write durable that was finished before this request was pulled, on any queue.
    Flush,
    /// The range's content is no longer needed. `secure`: it must not be recoverable.
    Discard {
        /// Erase, not only forget.
        secure: bool,
    },
    /// The range reads as zeroes afterwards. With `may_unmap` the backend may free the space.
    WriteZeroes {
        /// The space may be freed.
        may_unmap: bool,
        /// Durable before it is completed.
        fua: bool,
    },
}

impl Op {
    /// Returns true if the request changes the disk's content.
    #[inline]
    pub const fn modifies(self) -> bool {
        !matches!(self, Op::Read | Op::Flush)
    }

    /// Returns true if the request has a data buffer.
    #[inline]
    pub const fn has_data(self) -> bool {
        matches!(self, Op::Read | Op::Write { .. })
    }
}

/// The tag of a request in flight: the worker's slot of its queue, and the index in that queue's tag table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag(u32);

impl Tag {
    /// Returns the tag of index `index` of the queue in worker slot `queue`.
    #[inline]
    pub const fn new(queue: u16, index: u16) -> Tag {
        Tag((queue as u32) << 16 | index as u32)
    }

    /// Returns the worker's slot of the queue.
    #[inline]
    pub const fn queue(self) -> u16 {
        (self.0 >> 16) as u16
    }

    /// Returns the index in the queue's tag table.
    #[inline]
    pub const fn index(self) -> u16 {
        self.0 as u16
    }
}

/// One request to a disk. At most 32 bytes are moved (with a 4-byte buffer handle): a message of 184 bytes was measured
/// to cost 26 to 42 percent of the throughput of the whole path.
#[derive(Debug)]
pub struct Request<B> {
    /// Start of the disk range. 0 for [`Op::Flush`].
    pub start: ByteOffset,
    /// Length of the disk range. For [`Op::Read`] and [`Op::Write`] it equals the buffer's length.
    pub len: ByteLen,
    /// Its tag.
    pub tag: Tag,
    /// The data, for [`Op::Read`] and [`Op::Write`] only. Owned by the channel until the matching [`Completion`].
    pub buffer: Option<B>,
    /// Its operation.
    pub op: Op,
}

/// An errno value from the host's storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Errno(pub i32);

impl Errno {
    /// EFAULT: the memory of a request was lost or is not mapped.
    pub const FAULT: Errno = Errno(14);
    /// EINVAL: a request that no engine should have admitted.
    pub const INVAL: Errno = Errno(22);
}

/// How a request ended. Each guest interface maps these to its own status codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// Success, with the length transferred (for [`Op::Read`]: bytes put in the buffer). A short transfer is never
    /// `Done` with a smaller length: the channel continues it or fails it.
    Done(ByteLen),
    /// The range does not lie on the disk, also when the disk shrank after admission.
    OutOfRange,
    /// The disk is read-only.
    ReadOnly,
    /// The backend cannot do this operation.
    Unsupported,
    /// The host's storage is full.
    NoSpace,
    /// Cancelled by a task management function or a teardown.
    Aborted,
    /// The host's storage failed.
    Failed(Errno),
}

impl Outcome {
    /// Returns true if the request succeeded.
    #[inline]
    pub const fn is_done(self) -> bool {
        matches!(self, Outcome::Done(_))
    }

    /// Returns the outcome for an errno of the host's storage (a positive number, as in `errno.h`).
    pub const fn from_errno(errno: i32) -> Outcome {
        match errno {
            28 | 122 => Outcome::NoSpace,    // ENOSPC, EDQUOT
            30 => Outcome::ReadOnly,         // EROFS
            95 | 25 => Outcome::Unsupported, // EOPNOTSUPP, ENOTTY
            125 => Outcome::Aborted,         // ECANCELED
            other => Outcome::Failed(Errno(other)),
        }
    }
}

/// The completion of a request, on its way from a channel to its queue.
#[derive(Debug)]
pub struct Completion<B> {
    /// How it ended.
    pub outcome: Outcome,
    /// The request's tag.
    pub tag: Tag,
    /// The buffer that came with the request.
    pub buffer: Option<B>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_stay_small() {
        assert!(size_of::<Request<std::num::NonZeroU32>>() <= 32);
        assert!(size_of::<Completion<std::num::NonZeroU32>>() <= 32);
    }

    #[test]
    fn a_tag_keeps_both_halves() {
        let tag = Tag::new(0xfffe, 0x1234);
        assert_eq!((tag.queue(), tag.index()), (0xfffe, 0x1234));
    }
}
