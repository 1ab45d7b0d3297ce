//! What a guest interface is to the load: a device with disks, and for each thread a set of queues that reads and writes
//! blocks. The load is compiled for each of them.

use std::sync::Arc;
use std::time::Duration;

use mqblk_core::{BlockSize, ByteLen, Sector512};
use mqblk_driver::{DeviceError, DriverError, Refused, Waker};
use mqblk_memory::{GuestAddress, GuestMemory};

use crate::BenchError;
use crate::plan::Combination;

/// Most requests that one I/O is. A driver may need as many values to tell them apart.
pub const MAX_PARTS: u32 = 1 << 12;

/// A disk of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceDisk {
    /// Which one, where a device has several.
    pub name: String,
    /// Its size.
    pub capacity: ByteLen,
    /// Logical block size.
    pub block: BlockSize,
    /// Writes are refused.
    pub read_only: bool,
    /// Most bytes of a request: whole blocks. An I/O that is larger is several requests.
    pub max_request: u64,
}

/// Something to see the server's end with.
pub trait ServerMonitor: Send + Sync {
    /// Waits until the server is gone, for at most `limit`. Whether it is.
    fn wait_gone(&self, limit: Duration) -> bool;
}

/// A connected device.
pub trait Device: Sized {
    /// The queues of a thread.
    type Queues: ThreadQueues;

    /// The disks to work on.
    ///
    /// # Errors
    /// [`BenchError`]: the device does not have them, or says of itself what cannot be.
    fn disks(&mut self, combination: &Combination) -> Result<Vec<DeviceDisk>, BenchError>;

    /// The queues, a set for each thread; after [`disks`](Self::disks).
    fn take_queues(&mut self) -> Vec<Self::Queues>;

    /// The server's process, if the system says.
    fn server_pid(&self) -> Option<i32>;

    /// Something to see the server's end with.
    ///
    /// # Errors
    /// When the system refuses.
    fn monitor(&self) -> Result<Box<dyn ServerMonitor>, DriverError>;

    /// Stops all queues.
    ///
    /// # Errors
    /// When the server does not answer.
    fn stop(self, sets: Vec<Self::Queues>) -> Result<(), DriverError>;
}

/// How a request ended.
pub trait TransferStatus: Copy + PartialEq + std::fmt::Debug + Send {
    /// All of it happened.
    const GOOD: Self;
}

/// A read or a write.
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    /// Comes back with its end.
    pub user: u32,
    /// Which part of an I/O it is.
    pub part: u32,
    /// Write, or read.
    pub write: bool,
    /// Which of the device's disks.
    pub disk: u16,
    /// Where on the disk.
    pub start: Sector512,
    /// Where in shared memory.
    pub address: GuestAddress,
    /// Bytes.
    pub len: u32,
}

/// A request's end.
#[derive(Clone, Copy, Debug)]
pub struct CompletedTransfer<S> {
    /// What the submission was given.
    pub user: u32,
    /// How it ended.
    pub status: S,
}

/// The queues that one thread owns.
///
/// Nothing of this is called through a pointer: a load over one queue of an interface is the same instructions as if it had
/// been written for it.
pub trait ThreadQueues: Send {
    /// How requests end.
    type Status: TransferStatus;

    /// A thread's jobs that are fewer than its queues spread their requests over all of them; else each has one queue.
    const SPREADS: bool;
    /// Requests may end up with another thread, and others' requests here.
    const HANDS_OVER: bool;
    /// An I/O's data starts at a multiple of this in the queue's data memory, in bytes.
    const DATA_ALIGN: u64 = 1;

    /// Queues; at least one.
    fn queue_count(&self) -> usize;
    /// The memory that data lies in.
    fn memory(&self) -> &Arc<GuestMemory>;
    /// Where the data memory of queue `queue` starts.
    fn data_start(&self, queue: usize) -> GuestAddress;
    /// Puts a request on; with [`HANDS_OVER`](Self::HANDS_OVER), where the steering says.
    ///
    /// # Errors
    /// [`Refused`].
    fn submit(&mut self, queue: usize, transfer: Transfer) -> Result<(), Refused>;
    /// Whether a request that queue `queue` has no room for finds some when something has ended.
    fn will_have_space(&self, queue: usize) -> bool;
    /// Makes visible what was put on queue `queue`.
    ///
    /// # Errors
    /// When a kick cannot be written.
    fn publish(&mut self, queue: usize) -> std::io::Result<()>;
    /// The same, once so many requests have been put on since.
    ///
    /// # Errors
    /// When a kick cannot be written.
    fn publish_batch(&mut self, queue: usize, batch: u16) -> std::io::Result<()>;
    /// Looks at queue `queue`: how many answers are there, and how many requests are in flight.
    ///
    /// # Errors
    /// When the device breaks the protocol.
    fn peek(&mut self, queue: usize) -> Result<(u16, u16), DeviceError>;
    /// Takes an answer that the last look saw.
    ///
    /// # Errors
    /// When the device breaks the protocol.
    fn reap(&mut self, queue: usize) -> Result<Option<CompletedTransfer<Self::Status>>, DeviceError>;
    /// Takes what other threads have left. Returns how many answers to own requests there are among it.
    ///
    /// # Errors
    /// When a kick cannot be written.
    fn receive_handovers(&mut self) -> std::io::Result<usize> {
        Ok(0)
    }
    /// Takes an answer that other threads have left.
    fn next_handed_back(&mut self) -> Option<CompletedTransfer<Self::Status>> {
        None
    }
    /// Own requests that are with other threads.
    fn outstanding_elsewhere(&self) -> u32 {
        0
    }
    /// Own requests handed over to other threads so far.
    fn handed_over(&self) -> u64 {
        0
    }
    /// This thread has nothing more to do. Returns whether it may end: others may still need its queues.
    fn try_leave(&mut self) -> bool {
        true
    }
    /// Sleeps until something may have happened: `count` answers on a queue, or all that are in flight there.
    ///
    /// # Errors
    /// When the device breaks the protocol, or the system refuses.
    fn wait(&mut self, count: u16) -> Result<(), DriverError>;
    /// Kicks so far.
    fn kicks(&self) -> u64;
    /// Calls so far.
    ///
    /// # Errors
    /// When an eventfd cannot be read.
    fn calls(&mut self) -> std::io::Result<u64>;
    /// Something to end a wait with.
    ///
    /// # Errors
    /// When the system refuses.
    fn waker(&self) -> std::io::Result<Waker>;
}
