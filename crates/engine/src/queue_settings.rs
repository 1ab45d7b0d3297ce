//! Settings of a device's queues, changeable while they are served.

use std::sync::{Mutex, MutexGuard};

use mqblk_core::lock::lock;

use crate::options::QueuePolicy;

/// Settings of the queues of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueueSettings {
    /// The worker of each queue, by the queue's number.
    pub map: Vec<usize>,
    /// Their polling, and the coalescing of their calls.
    pub policy: QueuePolicy,
}

/// The settings of a device's queues, shared by its transport and the verbs that change them. A starting queue uses the
/// current ones.
#[derive(Debug, Default)]
pub struct SharedQueueSettings(Mutex<QueueSettings>);

impl SharedQueueSettings {
    /// Returns settings to share.
    pub fn new(settings: QueueSettings) -> SharedQueueSettings {
        SharedQueueSettings(Mutex::new(settings))
    }

    /// Returns the current settings.
    pub fn get(&self) -> QueueSettings {
        self.lock().clone()
    }

    /// Returns the worker of a queue; past the end of the map, the one of the queue's number.
    pub fn worker(&self, queue: usize) -> usize {
        self.lock().map.get(queue).copied().unwrap_or(queue)
    }

    /// Sets how the queues are polled, and how their calls are coalesced.
    pub fn set_policy(&self, policy: QueuePolicy) {
        self.lock().policy = policy;
    }

    /// Sets the workers of all queues.
    pub fn set_map(&self, map: Vec<usize>) {
        self.lock().map = map;
    }

    /// Sets the worker of a queue. A queue past the end of the map gets none.
    pub fn set_worker(&self, queue: u16, worker: usize) {
        if let Some(place) = self.lock().map.get_mut(usize::from(queue)) {
            *place = worker;
        }
    }

    fn lock(&self) -> MutexGuard<'_, QueueSettings> {
        lock(&self.0)
    }
}

/// Result of moving a queue to another worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueMove {
    /// The other worker serves it.
    Moved,
    /// No guest uses it: it starts at the other worker.
    AtStart,
    /// It stays: its requests in flight took longer than the time-out.
    Busy,
}
