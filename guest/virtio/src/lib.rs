//! What all virtio personalities have in common: how a transport sees a device and its queues, and how a chain of
//! descriptors is read as two streams of bytes.
#![forbid(unsafe_code)]

pub mod batch;
pub mod chain;
pub mod features;
pub mod state;

use std::sync::Arc;

use mqblk_core::{Call, GuestQueue, Wake};
pub use mqblk_memory::PooledLane as GuestLane;
use mqblk_memory::{Buffer, LeaseId};
use mqblk_ring::split::{DeviceRing, RingLog, SplitRing, SplitState};

/// What a queue needs to run.
pub struct QueueParts {
    /// The ring, resolved.
    pub ring: DeviceRing,
    /// The worker's lease on the guest's memory.
    pub lease: LeaseId,
    /// How to call the guest, when it wants that at all.
    pub call: Option<Box<dyn Call>>,
    /// The features in force.
    pub features: u64,
    /// Has the queue looked at by its worker, from any thread.
    pub waker: Arc<dyn Wake>,
}

/// What a virtqueue is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueRole {
    /// Its requests go to the device's disks.
    Requests,
    /// It has no requests for disks, and seldom any at all.
    Control,
}

/// Copies a configuration space from `offset`; what lies beyond its end reads as zeroes.
pub fn read_space(space: &[u8], offset: u32, into: &mut [u8]) {
    into.fill(0);
    let start = (offset as usize).min(space.len());
    let len = into.len().min(space.len() - start);
    into[..len].copy_from_slice(&space[start..start + len]);
}

/// Makes a state that was judged the device's. When it fails the state is in force, but not where it has to outlive the process; why.
pub type Apply = Box<dyn FnOnce() -> Result<(), String>>;

/// A virtio device as a transport sees it: feature bits, configuration space, queues.
///
/// Methods run on a control thread; only the queues they make run on workers.
pub trait VirtioDevice<L: GuestLane>: Send + Sync + 'static {
    /// One of its queues.
    type Queue: VirtioQueue<L>;

    /// Feature bits offered. Only what is implemented is offered.
    fn features(&self) -> u64;

    /// The driver accepted these (a subset of what was offered; checked by the transport).
    fn set_features(&self, features: u64);

    /// Copies the configuration space from `offset`; what lies beyond its end reads as zeroes.
    fn read_config(&self, offset: u32, into: &mut [u8]);

    /// The driver writes the configuration space.
    ///
    /// # Errors
    /// When a byte is not writable or the value is not allowed; why, for the log.
    fn write_config(&self, offset: u32, bytes: &[u8]) -> Result<(), String>;

    /// Back to the state before any driver came, as far as a driver negotiates and configures it.
    fn reset(&self);

    /// A driver begins to use the device. `resumed`: it did so before, and has not noticed that whoever served it is another one
    /// now, or that the connection is. Before the first queue is made.
    fn driver_begins(&self, _resumed: bool) {}

    /// A queue was stopped in good order. If it starts again before a [`reset`](Self::reset), the driver goes on with the device as it was.
    fn queue_stopped(&self) {}

    /// These queues were served before, by somebody who left or died, and their requests are about to be taken up again: the
    /// transport has seen it in the in-flight region. None: the driver begins anew. Before the first queue is made.
    fn resumes(&self, _queues: &[u16]) {}

    /// Whatever of those queues has not started by now is not coming soon: nothing waits for it any more.
    fn resume_ended(&self) {}

    /// What the driver has configured and does not configure again when the device is resumed, as bits that
    /// [`restore`](Self::restore) knows; 0 for nothing. It is kept where it outlives the process.
    fn configured(&self) -> u64 {
        0
    }

    /// The device is resumed, after a [`reset`](Self::reset): what [`configured`](Self::configured) gave last. Any bits may come.
    fn restore(&self, _configured: u64) {}

    /// What the device is, as the state of a guest that is migrated says it.
    fn kind(&self) -> &'static str;

    /// All that its driver relies on and that neither the guest's memory nor features carry, for whoever serves the device next: JSON, as
    /// [`state`] writes it. No queue runs.
    fn save_state(&self) -> String;

    /// Judges what [`save_state`](Self::save_state) gave elsewhere, and changes nothing yet. Whoever runs the [`Apply`] makes it this
    /// device's. From then on the driver is one that goes on: features that are set and a [`driver_begins`](Self::driver_begins) with
    /// `resumed` change nothing of it; a [`reset`](Self::reset) does. No queue runs.
    ///
    /// # Errors
    /// When it is not such a state, or one that this device cannot have: field, what was found, what was expected.
    fn load_state(self: &Arc<Self>, state: &str) -> Result<Apply, String>;

    /// Virtqueues.
    fn queues(&self) -> u16;

    /// What queue `index` is for.
    fn role(&self, _index: u16) -> QueueRole {
        QueueRole::Requests
    }

    /// The largest ring.
    fn max_ring_size(&self) -> u16;

    /// Makes queue `index` (below [`queues`](Self::queues)).
    fn queue(self: &Arc<Self>, index: u16, parts: QueueParts) -> Self::Queue;
}

/// A queue of a virtio device.
pub trait VirtioQueue<L: GuestLane>: GuestQueue<Lane = L, Position = SplitState> + Send + 'static {
    /// Replaces the way the guest is called.
    fn set_call(&mut self, call: Option<Box<dyn Call>>);

    /// The lease that the queue works in.
    fn lease(&self) -> LeaseId;

    /// Goes on in a new memory table. Requests in flight keep the old one. Returns the old lease, to be retired.
    fn relocate(&mut self, ring: SplitRing, lease: LeaseId) -> LeaseId;

    /// A request stays unanswered: gives back what its token holds of the lane, and its buffer. Whoever serves the ring next does it
    /// again.
    fn forget(&mut self, lane: &mut L, token: Self::Token, buffer: Option<Buffer>);

    /// Starts, changes or ends the logging of what is written to the ring. What requests write is logged by their lease.
    fn set_log(&mut self, log: Option<RingLog>);

    /// The queue ends: gives back what it holds of the lane, but for its lease. Nothing is in flight.
    fn close(&mut self, _lane: &mut L) {}
}
