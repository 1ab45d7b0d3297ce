//! Options of a queue at its attachment to a worker.

use std::sync::Arc;

use mqblk_core::DiskSlot;
use mqblk_uring::Kick;

use crate::AnyDisk;
use crate::errors::DiskHealth;
use crate::options::{PlugOptions, QueuePolicy};

/// A disk for a queue: its slot and its plug options.
#[derive(Clone)]
pub struct QueueDisk {
    /// Its slot among the queue's disks.
    pub slot: DiskSlot,
    /// The disk.
    pub disk: Arc<AnyDisk>,
    /// Its plug options, until [`DiskHealth::set_plug`]. The first of a disk's queues on a worker decides.
    pub plug: PlugOptions,
    /// The policy for its failed requests, its limits, and its stop. All queues of a disk share it; no two disks do.
    pub health: Arc<DiskHealth>,
}

/// A fault of the guest's driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueFault<'a> {
    /// The ring violates the protocol: the queue is retired.
    BrokenRing(&'a str),
    /// The queue's first malformed request, which has failed. Further ones are only counted.
    MalformedRequest(&'static str),
}

/// Called on the worker's thread with each fault of a queue.
pub type FaultHandler = Box<dyn FnMut(QueueFault<'_>) + Send>;

/// Options of a queue for its worker.
pub struct QueueOptions {
    /// The disks it serves.
    pub disks: Vec<QueueDisk>,
    /// Becomes readable when the guest kicks; `None`: requests are found only while the queue is polled. An eventfd is
    /// never read. If a descriptor must be read before it reports the next kick, the queue reads it in
    /// [`disarm`](mqblk_core::GuestQueue::disarm), which follows each kick.
    pub kick: Option<Kick>,
    /// Its polling, and the coalescing of its calls.
    pub policy: QueuePolicy,
    /// True if the queue is not pulled from until [`QueueHandle::set_enabled`](crate::QueueHandle::set_enabled).
    pub paused: bool,
    /// Reports faults of the guest's driver.
    pub on_fault: FaultHandler,
}
