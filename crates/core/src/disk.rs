//! The disk side.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::IoContext;
use crate::counters::ConnectionCounters;
use crate::image_opener::OpenImage;
use crate::request::{Completion, Request, Tag};
use crate::units::{BlockSize, ByteLen};

/// The geometry of a disk as its guest sees it. Constant while the disk is open, except for `size`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Capacity.
    pub size: ByteLen,
    /// Smallest unit of addressing.
    pub logical_block: BlockSize,
    /// Smallest unit that the storage writes without a read before, in bytes; a multiple of `logical_block`.
    pub physical_block: BlockSize,
    /// Offset of the first naturally aligned physical block, in logical blocks.
    pub alignment_offset: u8,
    /// Preferred minimum size of random I/O, in bytes; 0 if the storage does not report one.
    pub min_io: ByteLen,
    /// Preferred size of streaming I/O, in bytes; 0 if the storage does not report one.
    pub opt_io: ByteLen,
    /// Writes are refused.
    pub read_only: bool,
}

/// The limits of discard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiscardLimits {
    /// Ranges smaller than this, or not aligned to it, may be ignored by the storage. In bytes.
    pub granularity: ByteLen,
    /// Largest single range.
    pub max_len: ByteLen,
}

/// The limits and properties of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Largest data transfer of one request.
    pub max_transfer: ByteLen,
    /// Most memory segments of one request.
    pub max_segments: u32,
    /// Limits of discard; `None` if the storage has none or the user disabled it.
    pub discard: Option<DiscardLimits>,
    /// Largest write-zeroes range; `None` when the storage cannot write zeroes without data.
    pub write_zeroes: Option<ByteLen>,
    /// Written data can be lost by a crash of the host before a flush.
    pub volatile_cache: bool,
    /// Each request has a cost, so that fewer and larger ones are faster (files, networks; not null or ram).
    pub cost_per_request: bool,
    /// The host's kernel pins guest memory for each transfer (direct I/O). Registering that memory with the worker's
    /// ring makes that cheaper. A page may stay pinned for a moment after its request has completed.
    pub pins_memory: bool,
}

/// Error of opening a disk or a channel.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// The host's operating system refused.
    #[error("{what}: {source}")]
    Os {
        /// The operation and the path.
        what: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// A setting's value does not fit this storage.
    #[error(transparent)]
    Setting(#[from] crate::settings::SettingError),
    /// The disk cannot have this size.
    #[error("size: found {found}, expected {expected}")]
    Size {
        /// The requested size, or that of the host's storage.
        found: String,
        /// The possible sizes.
        expected: String,
    },
}

/// Longest wait for a disk that is in use. A killed daemon keeps its files open until the kernel has completed its I/O
/// and destroyed its rings; a successor that a supervisor starts at once must not fail for that. The wait also keeps
/// the successor from overtaking that I/O.
pub const ACTIVATION_TIMEOUT: Duration = Duration::from_secs(3);

impl DiskError {
    /// Returns true if another user has it.
    pub fn is_in_use(&self) -> bool {
        use std::io::ErrorKind::{ResourceBusy, WouldBlock};
        matches!(self, DiskError::Os { source, .. } if matches!(source.kind(), WouldBlock | ResourceBusy))
    }
}

/// Observes a disk's storage while the disk is open. Called from any thread, a worker's included, with locks of the
/// backend held: it must neither block nor call the disk.
pub trait DiskObserver: Send + Sync {
    /// The storage may have another size: call [`Disk::found_size`].
    fn size_changed(&self);

    /// The storage cannot be reached: requests wait or fail.
    fn connection_lost(&self, why: &str);

    /// The storage can be reached again.
    fn connection_restored(&self);
}

/// A disk's connections to its storage.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConnectionStats {
    /// Its counters.
    pub counters: ConnectionCounters,
    /// For how long the storage has not been reached; `None` while it is.
    pub unreachable: Option<Duration>,
    /// The last reason of a lost connection or a failed attempt to connect.
    pub last_failure: Option<String>,
    /// The last error of the storage's own, with the request.
    pub last_error: Option<String>,
}

/// An open disk. Shared by all workers; holds no state that a request touches.
///
/// Contract: the engine checks ranges at admission, and the channel checks them again (a resize may happen in between).
/// A backend does not get modifying requests for a read-only disk; if it does, it completes them with
/// [`Outcome::ReadOnly`](crate::Outcome).
pub trait Disk<L: IoContext>: Send + Sync {
    /// Returns the geometry.
    fn geometry(&self) -> Geometry;

    /// Returns the limits.
    fn limits(&self) -> Limits;

    /// Returns the settings in force, with defaults and what the storage reports filled in, as `(key, value)`, for
    /// `--print-config`.
    fn resolved(&self) -> Vec<(&'static str, String)>;

    /// Makes all finished writes durable. Blocks: only for control threads, when a disk is closed.
    ///
    /// # Errors
    /// When the storage fails.
    fn sync(&self) -> std::io::Result<()> {
        Ok(())
    }

    /// Returns the current size of the host's storage. It may differ from [`geometry`](Self::geometry), which changes
    /// only with [`resize`](Self::resize). Blocks: only for control threads.
    ///
    /// # Errors
    /// When the host does not report it.
    fn found_size(&self) -> Result<ByteLen, DiskError> {
        Ok(self.geometry().size)
    }

    /// Resizes the disk to `size`, or with `None` to the current size of the host's storage. Returns the size, which
    /// [`geometry`](Self::geometry) returns from now on and channels use from their next batch on; the caller notifies
    /// queues with `refresh_disk`. The added part of a larger disk reads as zeroes if the daemon grows the storage.
    /// Blocks: only for control threads.
    ///
    /// # Errors
    /// When the storage cannot have that size; then it is unchanged.
    fn resize(&self, size: Option<ByteLen>) -> Result<ByteLen, DiskError>;

    /// Activates the disk before queues that use it run. Takes the locks that keep others from running theirs, unless
    /// they are held, and drops cached contents. A changed [size](Self::found_size) is left to the caller. Counted:
    /// each call is undone by one [`deactivate`](Self::deactivate). Blocks, for `timeout` at most while another user
    /// may be stopping: only for control threads.
    ///
    /// # Errors
    /// When another user has activated it. The disk is then not active here.
    fn activate(&self, _timeout: Duration) -> Result<(), DiskError> {
        Ok(())
    }

    /// Deactivates the disk after its queues have stopped, with nothing in flight. After the last call others may run
    /// theirs, and read all that was written. Blocks.
    ///
    /// # Errors
    /// When writes may be missing. The disk is not active, but others are kept out.
    fn deactivate(&self) -> Result<(), DiskError> {
        Ok(())
    }

    /// Returns true if [`activate`](Self::activate) keeps every other process out, on this host or another one, that
    /// has the disk open: its requests in flight end before another process runs queues.
    fn is_passed_on(&self) -> bool {
        false
    }

    /// Releases resources that others may wait for, for example a lock that a server holds for this client. Called
    /// once, after the last flush and when no channel is open, before the process ends; requests and other calls fail
    /// afterwards. Blocks, with a bound of its own. A disk that is dropped without it releases them later, by another
    /// thread.
    fn close(&self) {}

    /// Returns the open images that another process of the host needs to take the disk over. It opens the disk while
    /// this one still has it, and runs its queues after the [`deactivate`](Self::deactivate) here.
    ///
    /// # Errors
    /// When no other process can take it over: content would be lost or used twice. The text follows "its storage".
    fn hand_over(&self) -> Result<Vec<OpenImage>, String> {
        Err("cannot be handed over".to_owned())
    }

    /// Leaves the disk to the other process, which runs its queues from now on. Called with nothing in flight except
    /// requests that the other process repeats. Until the other process has ended, [`activate`](Self::activate) may
    /// fail. Blocks.
    ///
    /// # Errors
    /// When it is active here and would harm the other process. The text follows "its storage".
    fn leave(&self) -> Result<(), String> {
        Ok(())
    }

    /// Returns an identity that distinguishes a raw image from another one under its name; `None` if it is not raw
    /// bytes that a guest fills. Blocks.
    fn raw_identity(&self) -> Option<String> {
        None
    }

    /// Notifies `observer` from now on, and at once if the storage cannot be reached. It replaces the previous
    /// observer. A backend without notifications need not do anything.
    fn observe(&self, _observer: Arc<dyn DiskObserver>) {}

    /// Returns the statistics of its connections; `None` if its storage has none.
    fn connections(&self) -> Option<ConnectionStats> {
        None
    }

    /// Returns the most channels that may be open at a time, if there is a bound: its queues must be on at most this
    /// many workers.
    fn max_channels(&self) -> Option<u16> {
        None
    }

    /// Opens a worker's own handle. Called on the worker's thread, which serves other disks: slow work (a connection)
    /// is begun here and ends later. Until then [`submit`](DiskChannel::submit) takes nothing; then the channel wakes
    /// its worker by a completion.
    ///
    /// # Errors
    /// When the host refuses a resource that the channel needs.
    fn open_channel(&self, context: &mut L) -> Result<Box<dyn DiskChannel<L>>, DiskError>;
}

/// A worker's own handle to a disk. Requests come in batches: one dynamic call per batch costs nothing from batches of
/// 16 on.
///
/// Contract:
/// * Every request taken by [`submit`](Self::submit) gets exactly one [`Completion`], with its buffer. Requests may
///   complete in any order; only flush is ordered, as [`Op::Flush`](crate::Op) says.
/// * A short transfer is continued by the channel or fails; it is never reported as done.
/// * No method blocks on storage. Blocking calls are made by another thread, which completes through the context
///   (docs/write-a-backend.md).
/// * A channel is drained before it is dropped: `outstanding()` is 0, or the context leaks the buffers and logs that.
pub trait DiskChannel<L: IoContext> {
    /// Takes requests from the head of `batch` (removing them) and returns how many. The rest is back-pressure, not an
    /// error: the engine offers it again. Requests that complete at once go to `finished`.
    fn submit(
        &mut self,
        context: &mut L,
        batch: &mut Vec<Request<L::Buffer>>,
        finished: &mut Vec<Completion<L::Buffer>>,
    ) -> usize;

    /// Collects completions into `finished`; returns how many. Called in each turn while requests are outstanding, and
    /// whenever the ring has brought the channel a completion. Reads all completions: the worker does not sleep before.
    fn reap(&mut self, context: &mut L, finished: &mut Vec<Completion<L::Buffer>>) -> usize;

    /// Tries to cancel the outstanding requests of `tags`, which are sorted. Does not block. Each request still gets
    /// exactly one [`Completion`], here in `finished` or later, with its buffer, and not before the kernel has released
    /// it: with [`Outcome::Aborted`](crate::Outcome) if it was cancelled, else with its own outcome. An aborted request
    /// may have done nothing, a part, or all of its work, but does nothing more. Tags that are not (or no longer)
    /// outstanding are ignored. A backend whose requests complete soon anyway need not do anything.
    fn cancel(&mut self, _context: &mut L, _tags: &[Tag], _finished: &mut Vec<Completion<L::Buffer>>) {}

    /// Returns the number of requests taken and not yet completed.
    fn outstanding(&self) -> u32;

    /// Returns when the worker must call [`reap`](Self::reap) even without a completion in the ring (a backend that
    /// completes by the clock). `None` when completions alone wake the worker. Called while requests are outstanding.
    fn deadline(&self) -> Option<Instant> {
        None
    }

    /// Releases the channel's resources of the context (fixed files). Called once, when `outstanding()` is 0.
    fn close(&mut self, context: &mut L);
}
