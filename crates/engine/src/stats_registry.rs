//! Statistics of a device's queues over all their attachments: a reset of the device, or a reconnect of a VMM or
//! frontend, does not reset them.

use std::sync::{Mutex, MutexGuard};

use mqblk_core::lock::lock;

use crate::counters::{QueueId, QueueStats, WorkerStats};
use mqblk_core::DiskSlot;

/// A queue of the device.
#[derive(Debug, Default)]
struct QueueHistory {
    /// The queue's current attachment.
    current: Option<QueueId>,
    /// Statistics of its earlier attachments; `None` without any, because the type is large.
    earlier: Option<QueueStats>,
}

/// Returns a queue's statistics from the workers', whose queues are in order.
fn find(workers: &[WorkerStats], id: QueueId) -> Option<&QueueStats> {
    workers.iter().find_map(|worker| {
        let at = worker.queues.binary_search_by_key(&id, |(candidate, _)| *candidate).ok()?;
        worker.queues.get(at).map(|(_, report)| report)
    })
}

/// The statistics of a device. Written by the transport, which attaches and detaches the queues.
#[derive(Debug)]
pub struct StatsRegistry {
    queues: Mutex<Vec<QueueHistory>>,
}

impl StatsRegistry {
    /// Returns a registry of this many queues.
    pub fn new(queues: usize) -> StatsRegistry {
        StatsRegistry { queues: Mutex::new((0..queues).map(|_| QueueHistory::default()).collect()) }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<QueueHistory>> {
        lock(&self.queues)
    }

    /// Records that queue `index` is attached.
    pub fn attached(&self, index: u16, id: QueueId) {
        if let Some(history) = self.lock().get_mut(usize::from(index)) {
            history.current = Some(id);
        }
    }

    /// Records that queue `index` is detached, with the statistics of that attachment.
    pub fn detached(&self, index: u16, last: &QueueStats) {
        if let Some(history) = self.lock().get_mut(usize::from(index)) {
            let earlier = history.earlier.get_or_insert_default();
            earlier.add(last);
            earlier.slots = 0;
            history.current = None;
        }
    }

    /// Returns the number of attached queues.
    pub fn attached_count(&self) -> usize {
        self.lock().iter().filter(|history| history.current.is_some()).count()
    }

    /// Returns the attached queues, each by its index.
    pub fn attached_queues(&self) -> Vec<(u16, QueueId)> {
        (0..).zip(&*self.lock()).filter_map(|(index, history)| Some((index, history.current?))).collect()
    }

    /// Drops the earlier counters of the disk in `slot`: another disk is opened there.
    pub fn forget(&self, slot: DiskSlot) {
        let mut histories = self.lock();
        let before = histories.iter_mut().filter_map(|history| history.earlier.as_mut());
        before.for_each(|before| before.disks.retain(|disk| disk.slot != slot));
    }

    /// Returns the statistics of each queue, from the workers'. `None` if a queue is missing, because it was attached
    /// or detached while these were read: read them again.
    pub fn report(&self, workers: &[WorkerStats]) -> Option<Vec<QueueStats>> {
        let histories = self.lock();
        let total = |history: &QueueHistory| {
            let mut total = history.earlier.clone().unwrap_or_default();
            if let Some(id) = history.current {
                total.add(find(workers, id)?);
            }
            Some(total)
        };
        histories.iter().map(total).collect()
    }

    /// Returns the statistics of each queue over its earlier attachments, without the current one. Queries no worker.
    pub fn earlier(&self) -> Vec<QueueStats> {
        self.lock().iter().map(|history| history.earlier.clone().unwrap_or_default()).collect()
    }

    /// Returns the statistics of each attached queue since it was attached, by index; `None` as in
    /// [`report`](Self::report).
    pub fn report_served(&self, workers: &[WorkerStats]) -> Option<Vec<(u16, QueueStats)>> {
        let histories = self.lock();
        let served = (0..).zip(histories.iter()).filter_map(|(index, history)| history.current.map(|id| (index, id)));
        served.map(|(index, id)| Some((index, find(workers, id)?.clone()))).collect()
    }
}
