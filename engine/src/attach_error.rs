//! Why a worker could not do what a control thread asked for.

use mqblk_core::DiskError;

/// The worker thread has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the worker thread has ended")]
pub struct WorkerGone;

/// Why a queue could not be attached.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The disk could not be opened on that worker.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The queue could not be created.
    #[error("{0}")]
    Queue(String),
    /// The worker thread has ended.
    #[error(transparent)]
    Worker(#[from] WorkerGone),
}
