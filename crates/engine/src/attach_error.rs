//! Errors of calls to a worker.

use std::time::Duration;

use mqblk_core::DiskError;

/// Error of a call to a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WorkerError {
    /// The worker thread has ended.
    #[error("the worker thread has ended")]
    Ended,
    /// The worker has not replied in time: it waits in a system call or a page fault. It has not run the call, and will
    /// not.
    #[error(
        "worker {worker} has not answered for {} s: it waits for storage or memory; the daemon's log says since when",
        UNRESPONSIVE_AFTER.as_secs()
    )]
    Unresponsive {
        /// The worker's number.
        worker: u32,
    },
}

/// Time that a control thread waits for a worker, which replies between two turns. Emulated and overloaded machines
/// need a second.
pub(crate) const UNRESPONSIVE_AFTER: Duration = Duration::from_secs(5);

/// Error of attaching a queue.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The disk could not be opened on that worker.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The queue could not be created.
    #[error("{0}")]
    Queue(String),
    /// The worker has ended, or does not answer.
    #[error(transparent)]
    Worker(#[from] WorkerError),
}
