//! What the queues of a device have counted, over all their lives: a guest that resets its device, a VMM or a frontend that
//! reconnects, does not set the figures back.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::counters::{QueueId, QueueStats, WorkerStats};
use mqblk_core::DiskSlot;

/// One queue of the device.
#[derive(Debug, Default)]
struct Stand {
    /// The queue that a worker serves now.
    now: Option<QueueId>,
    /// What its predecessors counted; `None` of a queue that had none, for it is not small.
    before: Option<QueueStats>,
}

/// What the workers say of a queue.
fn find(workers: &[WorkerStats], id: QueueId) -> Option<&QueueStats> {
    workers.iter().flat_map(|worker| &worker.queues).find(|(found, _)| *found == id).map(|(_, report)| report)
}

/// Kept by whoever sets a device's queues up, read by whoever wants to know.
#[derive(Debug)]
pub struct StatsRegistry {
    queues: Mutex<Vec<Stand>>,
}

impl StatsRegistry {
    /// For so many queues.
    pub fn new(queues: usize) -> StatsRegistry {
        StatsRegistry { queues: Mutex::new((0..queues).map(|_| Stand::default()).collect()) }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Stand>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A worker serves queue `index` from now on.
    pub fn attached(&self, index: u16, id: QueueId) {
        if let Some(stand) = self.lock().get_mut(usize::from(index)) {
            stand.now = Some(id);
        }
    }

    /// It does no more.
    pub fn detached(&self, index: u16, last: &QueueStats) {
        if let Some(stand) = self.lock().get_mut(usize::from(index)) {
            stand.before.get_or_insert_default().add(last);
            stand.now = None;
        }
    }

    /// Another disk comes into a slot: what its predecessors there counted is nobody's any more.
    pub fn forget(&self, slot: DiskSlot) {
        let mut stands = self.lock();
        let before = stands.iter_mut().filter_map(|stand| stand.before.as_mut());
        before.for_each(|before| before.disks.retain(|disk| disk.slot != slot));
    }

    /// What each queue has counted, by what the workers say. `None` when they were asked while a queue came or went, so that
    /// it would be missing: ask them again.
    pub fn report(&self, workers: &[WorkerStats]) -> Option<Vec<QueueStats>> {
        let stands = self.lock();
        let total = |stand: &Stand| {
            let mut total = stand.before.clone().unwrap_or_default();
            if let Some(id) = stand.now {
                total.add(find(workers, id)?);
            }
            Some(total)
        };
        stands.iter().map(total).collect()
    }

    /// What each queue that a worker serves has counted since the worker began to serve it, in the queues' order; `None` as in
    /// [`registry::report`].
    pub fn report_served(&self, workers: &[WorkerStats]) -> Option<Vec<(u16, QueueStats)>> {
        let stands = self.lock();
        let served = (0..).zip(stands.iter()).filter_map(|(index, stand)| stand.now.map(|id| (index, id)));
        served.map(|(index, id)| Some((index, find(workers, id)?.clone()))).collect()
    }
}
