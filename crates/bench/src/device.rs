//! A device as the load uses it: disks, and a set of queues for each thread. Guest interfaces implement the traits, and
//! the load is compiled for each of them.

use std::sync::Arc;
use std::time::Duration;

use mqblk_core::{BlockSize, ByteLen, Sector512};
use mqblk_driver::{DeviceError, DriverError, SubmitError, Waker};
use mqblk_memory::{GuestAddress, GuestMemory};

use crate::BenchError;
use crate::plan::Combination;

/// Most requests of one I/O. A driver may need this many values to distinguish them.
pub(crate) const MAX_PARTS: u32 = 1 << 12;

/// A disk of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceDisk {
    /// Its name in errors.
    pub name: String,
    /// Its size.
    pub capacity: ByteLen,
    /// Logical block size.
    pub block: BlockSize,
    /// Writes are refused.
    pub read_only: bool,
    /// Most bytes of a request: whole blocks. A larger I/O is several requests.
    pub max_request: u64,
    /// Most bytes of a trim, or the feature that the device lacks for it.
    pub max_trim: Result<u64, &'static str>,
    /// The feature that the device lacks for a flush.
    pub flush: Result<(), &'static str>,
}

/// Detects the end of a server: waits for it, at most for the given time, and returns true if the server has ended.
pub(crate) type ServerMonitor = Box<dyn Fn(Duration) -> bool + Send + Sync>;

/// A connected device.
///
/// # Errors
/// [`BenchError`]: the device lacks the disks, or describes itself inconsistently. [`DriverError`]: the system refuses,
/// or the server does not reply.
pub(crate) trait Device: Sized {
    /// The queues of a thread.
    type Queues: ThreadQueues;

    /// Returns the disks to load.
    fn disks(&mut self, combination: &Combination) -> Result<Vec<DeviceDisk>, BenchError>;

    /// Returns the queues, a set for each thread; call after [`disks`](Self::disks).
    fn take_queues(&mut self) -> Vec<Self::Queues>;

    /// Returns the server's process, if it is known.
    fn server_pid(&self) -> Option<i32> {
        None
    }

    /// Returns a monitor for the end of the server.
    fn monitor(&self) -> Result<ServerMonitor, DriverError>;

    /// Stops all queues.
    fn stop(self, sets: Vec<Self::Queues>) -> Result<(), DriverError>;
}

/// Status of a completed request.
pub(crate) trait TransferStatus: Copy + PartialEq + std::fmt::Debug + Send {
    /// The request succeeded.
    const GOOD: Self;
}

/// Operation of an I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum IoOp {
    Read,
    Write,
    /// Discards: the content is not needed any more.
    Trim,
    /// Makes all completed writes durable.
    Flush,
}

impl IoOp {
    /// Number of operations.
    pub(crate) const COUNT: usize = 4;
}

/// A request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transfer {
    /// Returned with the completion.
    pub user: u32,
    /// Index of the request in its I/O.
    pub part: u32,
    /// Operation.
    pub op: IoOp,
    /// Index of the device's disk.
    pub disk: u16,
    /// Start on the disk.
    pub start: Sector512,
    /// Data in shared memory.
    pub address: GuestAddress,
    /// Bytes.
    pub len: u32,
}

/// A completed request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CompletedTransfer<S> {
    /// The value of the submission.
    pub user: u32,
    /// How it ended.
    pub status: S,
}

/// The queues that one thread owns.
///
/// All calls are static: the load compiles as if written for one interface.
///
/// # Errors
/// [`SubmitError`]: the ring is full, or the transfer does not fit the queue. [`DeviceError`]: the device violates the
/// protocol. [`std::io::Error`]: a kick cannot be written, or an eventfd read or made. [`DriverError`]: the device or
/// the system.
pub(crate) trait ThreadQueues: Send {
    /// Status of its requests.
    type Status: TransferStatus;

    /// True if jobs fewer than the thread's queues spread their I/Os over all of them; else each job has one queue.
    const SPREADS: bool;
    /// True if threads may hand requests over to each other.
    const HANDS_OVER: bool;
    /// Alignment of an I/O's data in the queue's data memory, in bytes.
    const DATA_ALIGN: u64 = 1;

    /// Returns the number of queues; at least one.
    fn queue_count(&self) -> usize;
    /// Returns the memory that holds the data.
    fn memory(&self) -> &Arc<GuestMemory>;
    /// Returns the start of the queue's data memory.
    fn data_start(&self, queue: usize) -> GuestAddress;
    /// Puts a request on `queue`; with [`HANDS_OVER`](Self::HANDS_OVER), on the queue that the steering chooses.
    fn submit(&mut self, queue: usize, transfer: Transfer) -> Result<(), SubmitError>;
    /// Returns true if `queue`, which is full, will have space once a request completes.
    fn will_have_space(&self, queue: usize) -> bool;
    /// Publishes the requests that were put on `queue`.
    fn publish(&mut self, queue: usize) -> std::io::Result<()>;
    /// Publishes the requests that were put on `queue`, if there are at least `batch`.
    fn publish_batch(&mut self, queue: usize, batch: u16) -> std::io::Result<()>;
    /// Reads the queue's index. Returns the number of completions to reap, and of requests in flight.
    fn peek(&mut self, queue: usize) -> Result<(u16, u16), DeviceError>;
    /// Reaps a completion that the last [`peek`](Self::peek) counted.
    fn reap(&mut self, queue: usize) -> Result<Option<CompletedTransfer<Self::Status>>, DeviceError>;
    /// Receives requests and completions that other threads have handed over. Returns the number of completions of own
    /// requests.
    fn receive_handovers(&mut self) -> std::io::Result<usize> {
        Ok(0)
    }
    /// Returns a completion that another thread has handed back.
    fn next_handed_back(&mut self) -> Option<CompletedTransfer<Self::Status>> {
        None
    }
    /// Returns the number of own requests outstanding at other threads.
    fn outstanding_elsewhere(&self) -> u32 {
        0
    }
    /// Returns the number of own requests handed over so far.
    fn handed_over(&self) -> u64 {
        0
    }
    /// Marks this thread as done. Returns true if it may end: others may still need its queues.
    fn try_leave(&mut self) -> bool {
        true
    }
    /// Sleeps until a queue has `count` completions, or all that are in flight on it, at most for `limit`. Without a
    /// limit returns at once if nothing is in flight. May wake up early.
    fn wait(&mut self, count: u16, limit: Option<Duration>) -> Result<(), DriverError>;
    /// Returns the number of kicks so far.
    fn kicks(&self) -> u64;
    /// Returns the number of calls so far.
    fn calls(&mut self) -> std::io::Result<u64>;
    /// Returns a waker that ends a wait from another thread.
    fn waker(&self) -> std::io::Result<Waker>;
}
