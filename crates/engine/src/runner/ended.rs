//! Requests that have ended, in groups, until their latencies are recorded.

use mqblk_core::Op;

use crate::clock::Ticks;
use crate::counters::{OpClass, QueueLatency};
use crate::tags::Timestamps;

/// Finished requests of one operation, with any flags, and equal timestamps.
pub(super) struct FinishedGroup {
    pub(super) op: Op,
    pub(super) stamps: Timestamps,
    pub(super) times: u64,
    /// Sum of their transferred bytes.
    pub(super) bytes: u64,
}

impl FinishedGroup {
    /// Adds requests of its operation and timestamps.
    #[inline]
    pub(super) fn add(&mut self, times: u64, bytes: u64) {
        self.times += times;
        self.bytes += bytes;
    }
}

/// Requests of one class with equal timestamps: often all of a batch.
pub(super) struct EndedRequests {
    pub(super) class: OpClass,
    pub(super) stamps: Timestamps,
    pub(super) times: u64,
}

impl EndedRequests {
    pub(super) const NONE: EndedRequests =
        EndedRequests { class: OpClass::Read, stamps: Timestamps { pulled: Ticks(0), submitted: Ticks(0) }, times: 0 };

    /// Records their latencies.
    #[inline]
    pub(super) fn record(&self, latency: &mut QueueLatency, finished: Ticks, published: Ticks) {
        let parts = match self.class {
            OpClass::Read => &mut latency.reads,
            OpClass::Write => &mut latency.writes,
            OpClass::Other => &mut latency.others,
        };
        let Timestamps { pulled, submitted } = self.stamps;
        // Most are submitted at once. `stats` adds them to this histogram, with 0.
        if submitted > pulled {
            parts.queued.record(submitted.since(pulled), self.times);
        }
        parts.device.record(finished.since(submitted), self.times);
        parts.publish.record(published.since(finished), self.times);
        parts.total.record(published.since(pulled), self.times);
    }
}

/// Records the latencies of several, and removes them.
#[inline(never)] // a turn mostly ends requests of one kind
pub(super) fn record_all(
    ended: &mut Vec<EndedRequests>,
    latency: &mut QueueLatency,
    finished: Ticks,
    published: Ticks,
) {
    ended.drain(..).for_each(|ended| ended.record(latency, finished, published));
}
