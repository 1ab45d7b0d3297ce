//! Common parts of all virtio device types: a device and its queues as a transport sees them.
#![forbid(unsafe_code)]

pub mod features;
pub mod state;

use std::sync::Arc;

use mqblk_core::{Call, GuestQueue, Wake};
pub use mqblk_memory::PooledContext as GuestContext;
use mqblk_memory::{DirtyLog, GuestMemory, MemoryShare};
use mqblk_ring::virtqueue::{DeviceRing, MappedRing, RingLog, RingState};

/// The resources of a running queue.
pub struct QueueResources {
    /// The ring, resolved.
    pub ring: DeviceRing,
    /// The guest's memory, and the queue's other resources of its worker.
    pub share: MemoryShare,
    /// Calls the guest. `None`: the guest does not want calls.
    pub call: Option<Box<dyn Call>>,
    /// The negotiated features.
    pub features: u64,
    /// Wakes the queue's worker to check the queue, from any thread.
    pub waker: Arc<dyn Wake>,
}

/// The role of a virtqueue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueRole {
    /// A request queue: its requests go to the device's disks.
    Requests,
    /// A control or event queue: no disk requests, and few of any kind.
    Control,
}

/// Copies a configuration space from `offset`; bytes beyond its end read as zeroes.
pub fn read_config_space(space: &[u8], offset: u32, into: &mut [u8]) {
    into.fill(0);
    let start = (offset as usize).min(space.len());
    let len = into.len().min(space.len() - start);
    into[..len].copy_from_slice(&space[start..start + len]);
}

/// Applies a checked migration state to the device. An error means that the state is applied, but not saved beyond the
/// process.
pub type ApplyState = Box<dyn FnOnce() -> Result<(), String>>;

/// A virtio device as a transport sees it: feature bits, configuration space, queues.
///
/// Methods run on a control thread; only the queues that they create run on workers.
pub trait VirtioDevice<L: GuestContext>: Send + Sync + 'static {
    /// The queue type.
    type Queue: VirtioQueue<L>;

    /// Returns the offered feature bits. Only implemented features are offered.
    fn features(&self) -> u64;

    /// Sets the features that the driver accepted (a subset of the offered ones; checked by the transport).
    fn set_features(&self, features: u64);

    /// Copies the configuration space from `offset`; bytes beyond its end read as zeroes.
    fn read_config(&self, offset: u32, into: &mut [u8]);

    /// Writes the configuration space, for the driver.
    ///
    /// # Errors
    /// When a byte is not writable or the value is not allowed; the reason, for the log.
    fn write_config(&self, offset: u32, bytes: &[u8]) -> Result<(), String>;

    /// Resets all negotiated and configured state.
    fn reset(&self);

    /// Called when a driver starts to use the device. `resumed`: it used the device before and does not know that the
    /// process or the connection is new. Called before the first queue is created.
    fn driver_started(&self, _resumed: bool) {}

    /// Called when a queue was stopped in an orderly way. If it starts again before a [`reset`](Self::reset), the
    /// driver continues with the unchanged device.
    fn queue_stopped(&self) {}

    /// Announces the queues with requests to replay, which the transport found in the in-flight region of an earlier
    /// process. Empty: the driver starts afresh. Called before the first queue is created.
    fn expect_replay(&self, _queues: &[u16]) {}

    /// Stops waiting for queues to replay that have not started: they are not expected soon.
    fn end_replay_wait(&self) {}

    /// Returns the driver's configuration that it does not repeat when the device is resumed, as bits for
    /// [`restore_config_bits`](Self::restore_config_bits); 0 for none. The bits are kept beyond the process.
    fn config_bits(&self) -> u64 {
        0
    }

    /// Restores the last [`config_bits`](Self::config_bits) of a resumed device, after a [`reset`](Self::reset). Any
    /// bits may come.
    fn restore_config_bits(&self, _configured: u64) {}

    /// Returns the device type in a guest's migration state.
    fn device_type(&self) -> &'static str;

    /// Returns the migration state: all state that the driver relies on and that neither the guest's memory nor the
    /// features have. JSON, as [`state`] writes it. No queue runs.
    fn save_state(&self) -> String;

    /// Checks the [`save_state`](Self::save_state) of another process, without changing the device. The returned
    /// [`ApplyState`] applies it. From then on the driver is resumed: setting features and a
    /// [`driver_started`](Self::driver_started) with `resumed` do not change the state; a [`reset`](Self::reset) does.
    /// No queue runs.
    ///
    /// # Errors
    /// When it is invalid, or impossible for this device: the field, the found and the expected value.
    fn load_state(self: &Arc<Self>, state: &str) -> Result<ApplyState, String>;

    /// Returns true if a queue may be stopped with requests in flight, for another host: the device has no state but
    /// rings and features.
    fn can_suspend(&self) -> bool {
        false
    }

    /// Returns the number of virtqueues.
    fn num_queues(&self) -> u16;

    /// Returns the role of queue `index`.
    fn queue_role(&self, _index: u16) -> QueueRole {
        QueueRole::Requests
    }

    /// Returns the maximum queue size.
    fn max_ring_size(&self) -> u16;

    /// Creates queue `index` (below [`num_queues`](Self::num_queues)).
    fn create_queue(self: &Arc<Self>, index: u16, parts: QueueResources) -> Self::Queue;
}

/// A queue of a virtio device.
pub trait VirtioQueue<L: GuestContext>: GuestQueue<Context = L, Position = RingState> {
    /// Replaces the notifier that calls the guest.
    fn set_call(&mut self, call: Option<Box<dyn Call>>);

    /// Switches to a new memory table, in which `ring` is resolved. Requests in flight keep the old one.
    ///
    /// # Errors
    /// As [`MemoryShare::relocate`]: the queue keeps the old table and ring.
    fn relocate(&mut self, context: &mut L, ring: MappedRing, memory: Arc<GuestMemory>) -> Result<(), String>;

    /// Starts, changes or ends dirty logging: of writes to the ring in `ring`, and of writes of requests, also of those
    /// in flight, in `log`.
    fn set_log(&mut self, context: &mut L, ring: Option<RingLog>, log: Option<Arc<DirtyLog>>);
}
