//! The disk side of the waist.

use std::sync::Arc;
use std::time::Instant;

use crate::IoContext;
use crate::request::{Completion, Request, Tag};
use crate::units::{BlockSize, ByteLen};

/// What a disk looks like to a guest. Constant while the disk is open, but for `size`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Capacity.
    pub size: ByteLen,
    /// Smallest unit of addressing.
    pub logical_block: BlockSize,
    /// Smallest unit that the storage writes without reading first, in bytes; a multiple of `logical_block`.
    pub physical_block: BlockSize,
    /// Offset of the first naturally aligned physical block, in logical blocks.
    pub alignment_offset: u8,
    /// Preferred minimum size of random I/O, in bytes; 0 when the storage does not say.
    pub min_io: ByteLen,
    /// Preferred size of streaming I/O, in bytes; 0 when the storage does not say.
    pub opt_io: ByteLen,
    /// Writes are refused.
    pub read_only: bool,
}

/// What discard costs and what it may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiscardLimits {
    /// Ranges smaller than this, or not aligned to it, may be ignored by the storage. In bytes.
    pub granularity: ByteLen,
    /// Largest single range.
    pub max_len: ByteLen,
}

/// What a disk can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Largest data transfer of one request.
    pub max_transfer: ByteLen,
    /// Most memory segments of one request.
    pub max_segments: u32,
    /// Discard, when the storage has it and the user did not turn it off.
    pub discard: Option<DiscardLimits>,
    /// Largest write-zeroes range; `None` when the storage cannot write zeroes without data.
    pub write_zeroes: Option<ByteLen>,
    /// Written data can be lost by a crash of the host before a flush.
    pub volatile_cache: bool,
    /// A request has a cost of its own, so that fewer and larger ones are faster (files, networks; not null or ram).
    pub cost_per_request: bool,
    /// The host's kernel pins guest memory for each transfer (direct I/O). Registering that memory with the worker's ring makes that
    /// cheaper; and a page may stay pinned for a moment after its request has ended.
    pub pins_memory: bool,
}

/// Why a disk could not be opened, or a channel to it.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// The host's operating system said no.
    #[error("{what}: {source}")]
    Os {
        /// What was tried, with the path.
        what: String,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A setting's value does not fit this storage.
    #[error(transparent)]
    Setting(#[from] crate::settings::SettingError),
    /// The disk cannot have this size.
    #[error("size: found {found}, expected {expected}")]
    Size {
        /// What was asked for, or what the host's storage has.
        found: String,
        /// What would have done.
        expected: String,
    },
}

/// Is told what happens to a disk's storage while it is open. Called from any thread, a worker's included, with locks of the backend held:
/// it must neither block nor call the disk.
pub trait DiskObserver: Send + Sync {
    /// The storage may have another size: ask [`Disk::found_size`].
    fn size_changed(&self);

    /// The storage cannot be reached: requests wait or fail.
    fn connection_lost(&self, why: &str);

    /// The storage can be reached again.
    fn connection_restored(&self);
}

/// An open disk. Shared by all workers; holds no state that a request touches.
///
/// Contract: ranges are checked by the engine at admission and again by the channel (a resize may come between). A backend
/// never sees a request for a read-only disk that modifies it, but answers [`Outcome::ReadOnly`](crate::Outcome) if it does.
pub trait Disk<L: IoContext>: Send + Sync {
    /// What it looks like.
    fn geometry(&self) -> Geometry;

    /// What it can do.
    fn limits(&self) -> Limits;

    /// The settings in force after defaults and the storage's own answers were filled in, as `(key, value)`, for
    /// `--print-config`.
    fn resolved(&self) -> Vec<(&'static str, String)>;

    /// Makes all finished writes durable. Blocks: only for control threads, when a disk is closed.
    ///
    /// # Errors
    /// When the storage cannot promise it.
    fn sync(&self) -> std::io::Result<()> {
        Ok(())
    }

    /// How large the host's storage is now, which may not be what [`geometry`](Self::geometry) says: that stays until
    /// [`resize`](Self::resize). Blocks: only for control threads.
    ///
    /// # Errors
    /// When the host does not say.
    fn found_size(&self) -> Result<ByteLen, DiskError> {
        Ok(self.geometry().size)
    }

    /// Makes the disk this large, or with `None` looks again how large the host's storage is. Returns the size, which
    /// [`geometry`](Self::geometry) shows from now on and channels go by from their next batch on; engines are told with
    /// `refresh_disk`. What a larger disk has more reads as zeroes, where the storage is ours to grow. Blocks: only for control
    /// threads.
    ///
    /// # Errors
    /// When the storage cannot have that size; then it is as it was.
    fn resize(&self, size: Option<ByteLen>) -> Result<ByteLen, DiskError>;

    /// Queues that use the disk are about to run: takes what keeps others from running theirs, as far as that is not held anyway, and
    /// forgets what it has cached of the contents. Another [size](Self::found_size) is left to whoever tells the guest. Counted: each is
    /// undone by one [`deactivate`](Self::deactivate). May block for as long as somebody who stops is waited for: only for control threads.
    ///
    /// # Errors
    /// When somebody else uses it; then it is not active.
    fn activate(&self) -> Result<(), DiskError> {
        Ok(())
    }

    /// The queues have stopped, with nothing in flight: after the last, others may run theirs and find all that was written. Blocks.
    fn deactivate(&self) {}

    /// Tells `observer` from now on, and at once if the storage cannot be reached now. There is one observer: another one takes its place.
    /// A backend that never has anything to say need not do anything.
    fn observe(&self, _observer: Arc<dyn DiskObserver>) {}

    /// A worker's own handle. Called on the worker's thread, which serves other disks: what takes time (a connection) is begun here and
    /// ends later. Until then the channel takes nothing from [`submit`](DiskChannel::submit); then it wakes its worker by a completion.
    ///
    /// # Errors
    /// When the host refuses a resource that the channel needs.
    fn open_channel(&self, context: &mut L) -> Result<Box<dyn DiskChannel<L>>, DiskError>;
}

/// A worker's own handle to a disk. Batch shaped: one dynamic call a batch costs nothing from batch 16 on.
///
/// Contract:
/// * Every request taken by [`submit`](Self::submit) comes out in exactly one [`Finished`], with its buffer. Requests may
///   finish in any order; nothing but flush is ordered, and flush only as [`Op::Flush`](crate::Op) says.
/// * A short transfer is continued by the channel or becomes a failure; it is never reported as done.
/// * No method blocks on storage. What blocks is done by another thread, which completes through the context
///   (docs/write-a-backend.md).
/// * Before it is dropped a channel is drained: `outstanding()` is 0, or the context keeps the buffers for ever and says so.
pub trait DiskChannel<L: IoContext> {
    /// Takes a prefix of `batch` (removing it) and returns how many were taken. What is left is back-pressure, not an
    /// error: the engine offers it again. Requests that end at once are put in `finished` directly.
    fn submit(
        &mut self,
        context: &mut L,
        batch: &mut Vec<Request<L::Buffer>>,
        finished: &mut Vec<Completion<L::Buffer>>,
    ) -> usize;

    /// Collects requests that have ended since, into `finished`; returns how many. Called in each turn while requests are outstanding, and
    /// whenever the ring has brought the channel a completion. Reads all completions that there are: the worker does not sleep before.
    fn reap(&mut self, context: &mut L, finished: &mut Vec<Completion<L::Buffer>>) -> usize;

    /// Tries to end requests early that were taken and have not finished: those of `tags`, which are in order. Does not wait. Each
    /// still comes out in exactly one [`Finished`], here in `finished` or later, with its buffer, and not before the kernel has given
    /// that back: with [`Outcome::Aborted`](crate::Outcome) when it was given up, else as it ended. An aborted request may
    /// have done nothing, a part, or all of its work, but does nothing more. Tags that are not (or no more) outstanding are
    /// ignored. A backend whose requests end soon anyway need not do anything.
    fn cancel(&mut self, _context: &mut L, _tags: &[Tag], _finished: &mut Vec<Completion<L::Buffer>>) {}

    /// Requests taken and not yet finished.
    fn outstanding(&self) -> u32;

    /// When the worker must call [`reap`](Self::reap) although the ring brought no completion (a backend that completes by
    /// the clock). `None` when completions alone wake the worker. Asked while requests are outstanding.
    fn deadline(&self) -> Option<Instant> {
        None
    }

    /// Gives back what the channel holds of the context (fixed files). Called once, when `outstanding()` is 0.
    fn close(&mut self, context: &mut L);
}
