//! Counters of queues and workers: plain numbers. Only the worker writes them; others read a copy taken on its thread.

pub use mqblk_core::counters::QueueCounters;
use mqblk_core::{DiskSlot, Op};

use crate::latency::LatencyHistogram;
use crate::poll::PollReason;

/// Counters of one of a queue's disks, since it was opened in its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskCounters {
    /// The disk's slot.
    pub slot: DiskSlot,
    /// Reads finished.
    pub reads: u64,
    /// Writes finished.
    pub writes: u64,
    /// Flushes, discards and write-zeroes finished.
    pub others: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Requests that did not succeed.
    pub errors: u64,
    /// Requests in flight now.
    pub in_flight: u32,
    /// Age of the oldest request in flight, in nanoseconds.
    pub oldest_ns: Option<u64>,
    /// Total latency of the reads, from the pull to the publish, in nanoseconds.
    pub read_ns: u64,
    /// Total latency of the writes.
    pub write_ns: u64,
    /// Total latency of the others.
    pub other_ns: u64,
}

impl DiskCounters {
    /// Returns counters at 0.
    pub const fn new(slot: DiskSlot) -> DiskCounters {
        DiskCounters {
            slot,
            reads: 0,
            writes: 0,
            others: 0,
            read_bytes: 0,
            written_bytes: 0,
            errors: 0,
            in_flight: 0,
            oldest_ns: None,
            read_ns: 0,
            write_ns: 0,
            other_ns: 0,
        }
    }

    /// Returns the counters of a queue's first disk while it is the only one: the queue's own. Nothing is in flight.
    pub(crate) fn of_only(counters: &QueueCounters, latency: &QueueLatency) -> DiskCounters {
        DiskCounters {
            reads: counters.reads,
            writes: counters.writes,
            others: counters.flushes + counters.discards + counters.write_zeroes,
            read_bytes: counters.read_bytes,
            written_bytes: counters.written_bytes,
            errors: counters.errors,
            read_ns: latency.reads.total.sum_ns(),
            write_ns: latency.writes.total.sum_ns(),
            other_ns: latency.others.total.sum_ns(),
            ..DiskCounters::new(DiskSlot::FIRST)
        }
    }

    /// Adds another queue's counters of the same disk.
    pub fn add(&mut self, other: &DiskCounters) {
        self.reads += other.reads;
        self.writes += other.writes;
        self.others += other.others;
        self.read_bytes += other.read_bytes;
        self.written_bytes += other.written_bytes;
        self.errors += other.errors;
        self.in_flight += other.in_flight;
        self.oldest_ns = self.oldest_ns.max(other.oldest_ns);
        self.read_ns += other.read_ns;
        self.write_ns += other.write_ns;
        self.other_ns += other.other_ns;
    }
}

/// Latencies of a queue's requests of one class, by stage.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LatencyParts {
    /// From the pull to the submission.
    pub queued: LatencyHistogram,
    /// In the storage.
    pub device: LatencyHistogram,
    /// From the storage's completion until the guest can see it and has been called, if it asked for that.
    pub publish: LatencyHistogram,
    /// From the pull to the publish.
    pub total: LatencyHistogram,
}

/// Latencies of a queue's requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueueLatency {
    /// Of reads.
    pub reads: LatencyParts,
    /// Of writes.
    pub writes: LatencyParts,
    /// Of flushes, discards and write-zeroes.
    pub others: LatencyParts,
}

/// The class of operation of a latency.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OpClass {
    Read,
    Write,
    Other,
}

impl OpClass {
    #[inline]
    pub(crate) fn of(op: Op) -> OpClass {
        // The two frequent ones by branches: they are predicted well, a jump table is not.
        if op == Op::Read {
            OpClass::Read
        } else if let Op::Write { .. } = op {
            OpClass::Write
        } else {
            OpClass::Other
        }
    }
}

/// The statistics of a queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueueStats {
    /// Counters since it was attached.
    pub counters: QueueCounters,
    /// Latencies since it was attached.
    pub latency: Box<QueueLatency>,
    /// Requests in flight now.
    pub in_flight: u32,
    /// Requests that its ring has slots for; 0 while it is detached.
    pub slots: u32,
    /// Age of the oldest request in flight, in nanoseconds.
    pub oldest_ns: Option<u64>,
    /// Its current polling; `None` while it is detached.
    pub polling: Option<Polling>,
    /// Of each of the queue's disks, in the order of their slots. The counters of a closed disk stay until another is
    /// opened in its slot, which begins at 0; the queue's own counters go on.
    pub disks: Vec<DiskCounters>,
}

/// The current polling of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Polling {
    /// The reason for polling, or for not polling.
    pub reason: PollReason,
    /// Longest time that it is polled without requests, in nanoseconds; `None`: unlimited.
    pub window_ns: Option<u64>,
    /// Period of the timer that checks its ring while requests come, in nanoseconds; `None`: it is polled
    /// continuously, or armed.
    pub timer_ns: Option<u64>,
}

/// The statistics of a worker thread and of its queues.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkerStats {
    /// Turns in which something happened.
    pub turns: u64,
    /// Turns in which nothing happened.
    pub empty_turns: u64,
    /// Times it slept.
    pub sleeps: u64,
    /// Times it offered its CPU to other threads while it polled.
    pub yields: u64,
    /// Time slices that others used then, in nanoseconds.
    pub away_ns: u64,
    /// Time asleep, in nanoseconds.
    pub slept_ns: u64,
    /// CPU time that the thread used, in nanoseconds.
    pub cpu_ns: u64,
    /// Merged requests that failed, so that their members were repeated one by one.
    pub merge_splits: u64,
    /// The queues it serves, in the order of their identities.
    pub queues: Vec<(QueueId, QueueStats)>,
}

/// The identity of a queue of an engine. Not used again after the queue is detached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QueueId {
    /// The worker's number.
    pub worker: u32,
    /// Distinguishes it from all other queues that the worker ever had.
    pub(crate) generation: u32,
}

impl QueueId {
    /// Returns the identity of the queue that had this number at its worker.
    pub const fn new(worker: u32, generation: u32) -> QueueId {
        QueueId { worker, generation }
    }
}

impl LatencyParts {
    /// Adds other latencies.
    pub fn add(&mut self, other: &LatencyParts) {
        self.queued.add(&other.queued);
        self.device.add(&other.device);
        self.publish.add(&other.publish);
        self.total.add(&other.total);
    }
}

impl QueueStats {
    /// Adds the counters of another queue, or of an earlier attachment of the same one.
    pub fn add(&mut self, other: &QueueStats) {
        self.counters.add(&other.counters);
        self.latency.reads.add(&other.latency.reads);
        self.latency.writes.add(&other.latency.writes);
        self.latency.others.add(&other.latency.others);
        self.in_flight += other.in_flight;
        self.slots += other.slots;
        self.oldest_ns = self.oldest_ns.max(other.oldest_ns);
        self.polling = other.polling.or(self.polling);
        for disk in &other.disks {
            match self.disks.binary_search_by_key(&disk.slot, |disk| disk.slot) {
                Ok(at) => self.disks[at].add(disk),
                Err(at) => self.disks.insert(at, *disk),
            }
        }
    }
}

/// Counts completed requests.
pub(crate) trait CountRequests {
    /// Counts completed requests of one operation, which transferred this many bytes in all.
    fn count(&mut self, op: Op, times: u64, bytes: u64) -> OpClass;
    /// Counts a request that did not succeed.
    fn count_error(&mut self, op: Op);
}

impl CountRequests for QueueCounters {
    #[inline]
    fn count(&mut self, op: Op, times: u64, bytes: u64) -> OpClass {
        self.requests += times;
        let class = OpClass::of(op);
        match class {
            OpClass::Read => {
                self.reads += times;
                self.read_bytes += bytes;
            }
            OpClass::Write => {
                self.writes += times;
                self.written_bytes += bytes;
            }
            OpClass::Other => count_other(self, op, times),
        }
        class
    }

    fn count_error(&mut self, op: Op) {
        self.errors += 1;
        match OpClass::of(op) {
            OpClass::Read => self.read_errors += 1,
            OpClass::Write => self.write_errors += 1,
            OpClass::Other => {}
        }
    }
}

#[inline(never)] // else all would be a jump table
fn count_other(counters: &mut QueueCounters, op: Op, times: u64) {
    match op {
        Op::Flush => counters.flushes += times,
        Op::Discard { .. } => counters.discards += times,
        Op::WriteZeroes { .. } => counters.write_zeroes += times,
        Op::Read | Op::Write { .. } => {}
    }
}
