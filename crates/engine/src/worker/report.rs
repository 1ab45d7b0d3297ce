//! A worker's statistics, taken between two turns.

use std::sync::Arc;
use std::time::Duration;

use mqblk_core::Tag;

use super::attached_queue::with_merges;
use super::{AttachedQueue, Worker};
use crate::counters::{QueueId, WorkerStats};
use crate::errors::DiskHealth;

/// A worker's requests in flight to a disk: their number, and the age of the oldest.
pub(crate) struct Age {
    pub(crate) health: Arc<DiskHealth>,
    pub(crate) oldest: Duration,
    pub(crate) in_flight: usize,
}

impl Worker {
    /// Returns the statistics of the worker and its queues. `number`: the worker's, for the queues' identities.
    pub(crate) fn stats(&self, number: u32) -> WorkerStats {
        let now = self.clock.now();
        let is_wanted = self.offers.is_wanted(now);
        let cpu = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        let queue = |(slot, attached): (usize, &Option<Box<AttachedQueue>>)| {
            let attached = attached.as_ref()?;
            let id = QueueId { worker: number, generation: attached.generation };
            let stats = attached.runner.stats(now, is_wanted);
            Some((id, with_merges(stats, self.channels.merges(slot as u16))))
        };
        WorkerStats {
            cpu_ns: cpu.tv_sec as u64 * 1_000_000_000 + cpu.tv_nsec as u64,
            merge_splits: self.channels.counts().splits,
            queues: self.queues.iter().enumerate().filter_map(queue).collect(),
            ..self.counters.clone()
        }
    }

    /// Returns the number of requests in flight and the age of the oldest, for each disk that has any. Without
    /// throttled requests: the storage does not have them.
    pub(crate) fn ages(&self) -> Vec<Age> {
        let now = self.clock.now();
        let mut throttled: Vec<Tag> = self.channels.all().flat_map(|(_, open)| open.throttled_tags()).collect();
        throttled.sort_unstable();
        let mut ages: Vec<Age> = Vec::new();
        for (slot, attached) in (0..).zip(&self.queues) {
            let Some(attached) = attached else { continue };
            attached.runner.for_each_in_flight(&mut |index, disk, stamps| {
                let Some(open) = attached.disks.channel(disk).and_then(|at| self.channels.find(at)) else { return };
                if throttled.binary_search(&Tag::new(slot, index)).is_ok() {
                    return;
                }
                // With limits the storage may get it long after the pull.
                let since = if open.has_throttle() { stamps.submitted } else { stamps.pulled };
                let oldest = Duration::from_nanos(now.since(since));
                match ages.iter_mut().find(|age| Arc::ptr_eq(&age.health, &open.health)) {
                    Some(age) => {
                        age.oldest = age.oldest.max(oldest);
                        age.in_flight += 1;
                    }
                    None => ages.push(Age { health: Arc::clone(&open.health), oldest, in_flight: 1 }),
                }
            });
        }
        ages
    }
}
