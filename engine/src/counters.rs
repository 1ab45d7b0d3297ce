//! What a queue and a worker count. Written by the worker only, as plain numbers; read by copying them out on its thread.

use mqblk_core::{ByteLen, DiskSlot, Op};

use crate::latency::LatencyHistogram;

/// Counters of one queue since it was attached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueCounters {
    /// Reads finished.
    pub reads: u64,
    /// Writes finished.
    pub writes: u64,
    /// Flushes finished.
    pub flushes: u64,
    /// Discards finished (guest requests, not ranges).
    pub discards: u64,
    /// Write-zeroes finished (guest requests, not ranges).
    pub write_zeroes: u64,
    /// Requests that the queue answered itself, without the disk.
    pub answered_alone: u64,
    /// Of those, the guest's mistakes.
    pub malformed: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Requests that ended otherwise than done.
    pub errors: u64,
    /// Of those, reads.
    pub read_errors: u64,
    /// Of those, writes.
    pub write_errors: u64,
    /// Times the guest woke us.
    pub kicks: u64,
    /// Calls sent to the guest.
    pub calls: u64,
    /// Publishes for which the guest wanted no call.
    pub calls_suppressed: u64,
    /// Turns that found requests.
    pub turns: u64,
    /// Turns that found none.
    pub empty_turns: u64,
    /// Times the queue was armed for sleep.
    pub arms: u64,
    /// Time spent polling without finding anything, in nanoseconds.
    pub poll_ns: u64,
    /// Requests answered in all.
    pub requests: u64,
    /// Reads that were merged to the read before them on the disk (iostat's rrqm).
    pub read_merges: u64,
    /// Writes that were merged to the write before them on the disk (iostat's wrqm).
    pub write_merges: u64,
    /// Ranges of discards and write-zeroes that were merged to the one before them on the disk.
    pub other_merges: u64,
    /// Bytes that discards and write-zeroes named, whether they succeeded or not.
    pub other_bytes: u64,
    /// Calls that were put off so that one could tell of more answers.
    pub calls_put_off: u64,
}

/// Counters of one of a queue's disks, since it was opened in its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskCounters {
    /// Which.
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
    /// Requests that ended otherwise than done.
    pub errors: u64,
    /// Requests in flight at this moment.
    pub in_flight: u32,
    /// How long the oldest of them has been, in nanoseconds.
    pub oldest_ns: Option<u64>,
    /// How long the reads took in all, from the pull until the guest could see the answer, in nanoseconds.
    pub read_ns: u64,
    /// The writes.
    pub write_ns: u64,
    /// The others.
    pub other_ns: u64,
}

impl DiskCounters {
    /// Nothing counted yet.
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

    /// Those of the first and so far only disk of a queue, by the queue's own. Nothing is in flight.
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

    /// Adds what another queue counted of the same disk.
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

/// How long a queue's requests of one kind took, by where the time went.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LatencyParts {
    /// From the pull to the hand-over to the storage.
    pub queued: LatencyHistogram,
    /// In the storage.
    pub device: LatencyHistogram,
    /// From the storage's answer until the guest could see it and was called, if it was to be called.
    pub publish: LatencyHistogram,
    /// All of it.
    pub total: LatencyHistogram,
}

/// How long a queue's requests took.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueueLatency {
    /// Of reads.
    pub reads: LatencyParts,
    /// Of writes.
    pub writes: LatencyParts,
    /// Of flushes, discards and write-zeroes.
    pub others: LatencyParts,
}

/// How latencies are told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Write,
    Other,
}

impl Kind {
    pub(crate) fn of(op: Op) -> Kind {
        match op {
            Op::Read => Kind::Read,
            Op::Write { .. } => Kind::Write,
            _ => Kind::Other,
        }
    }
}

/// All that is known of a queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueueStats {
    /// Counters since it was attached.
    pub counters: QueueCounters,
    /// Latencies since it was attached.
    pub latency: Box<QueueLatency>,
    /// Requests in flight at this moment.
    pub in_flight: u32,
    /// How long the oldest of them has been, in nanoseconds.
    pub oldest_ns: Option<u64>,
    /// Of each of the queue's disks, in the order of their slots. A disk that was closed stays here with what it counted until
    /// another is opened in its slot, which begins at 0; the queue's own counters go on.
    pub disks: Vec<DiskCounters>,
}

/// What a worker thread counts, and its queues.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkerStats {
    /// Turns in which something happened.
    pub turns: u64,
    /// Turns in which nothing happened.
    pub empty_turns: u64,
    /// Times it slept.
    pub sleeps: u64,
    /// Time asleep, in nanoseconds.
    pub slept_ns: u64,
    /// CPU time that the thread used, in nanoseconds.
    pub cpu_ns: u64,
    /// Merged requests that the storage failed, so that their members were done one by one.
    pub merge_splits: u64,
    /// The queues it serves.
    pub queues: Vec<(QueueId, QueueStats)>,
}

/// Names a queue of an engine, as long as it is attached and ever after.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QueueId {
    /// The worker's number.
    pub worker: u32,
    /// Tells it from all other queues that the worker ever had.
    pub(crate) generation: u32,
}

impl LatencyParts {
    /// Adds what another one counted.
    pub fn add(&mut self, other: &LatencyParts) {
        self.queued.add(&other.queued);
        self.device.add(&other.device);
        self.publish.add(&other.publish);
        self.total.add(&other.total);
    }
}

impl QueueStats {
    /// Adds what another queue, or the same one in an earlier life, counted.
    pub fn add(&mut self, other: &QueueStats) {
        self.counters.add(&other.counters);
        self.latency.reads.add(&other.latency.reads);
        self.latency.writes.add(&other.latency.writes);
        self.latency.others.add(&other.latency.others);
        self.in_flight += other.in_flight;
        self.oldest_ns = self.oldest_ns.max(other.oldest_ns);
        for disk in &other.disks {
            match self.disks.binary_search_by_key(&disk.slot, |disk| disk.slot) {
                Ok(at) => self.disks[at].add(disk),
                Err(at) => self.disks.insert(at, *disk),
            }
        }
    }
}

impl QueueCounters {
    /// Adds what another queue, or the same one in an earlier life, counted.
    pub fn add(&mut self, other: &QueueCounters) {
        self.reads += other.reads;
        self.writes += other.writes;
        self.flushes += other.flushes;
        self.discards += other.discards;
        self.write_zeroes += other.write_zeroes;
        self.answered_alone += other.answered_alone;
        self.malformed += other.malformed;
        self.read_bytes += other.read_bytes;
        self.written_bytes += other.written_bytes;
        self.errors += other.errors;
        self.read_errors += other.read_errors;
        self.write_errors += other.write_errors;
        self.kicks += other.kicks;
        self.calls += other.calls;
        self.calls_suppressed += other.calls_suppressed;
        self.turns += other.turns;
        self.empty_turns += other.empty_turns;
        self.arms += other.arms;
        self.poll_ns += other.poll_ns;
        self.requests += other.requests;
        self.read_merges += other.read_merges;
        self.write_merges += other.write_merges;
        self.other_merges += other.other_merges;
        self.other_bytes = self.other_bytes.saturating_add(other.other_bytes);
        self.calls_put_off += other.calls_put_off;
    }

    /// A request has ended; `done`: how much was transferred, if it succeeded.
    #[inline]
    pub(crate) fn count(&mut self, op: Op, done: Option<ByteLen>) -> Kind {
        self.requests += 1;
        let bytes = done.map_or(0, |len| len.0);
        // The two frequent ones by a branch that is foreseen; a jump table is not.
        let kind = if op == Op::Read {
            self.reads += 1;
            self.read_bytes += bytes;
            Kind::Read
        } else if let Op::Write { .. } = op {
            self.writes += 1;
            self.written_bytes += bytes;
            Kind::Write
        } else {
            self.count_other(op);
            Kind::Other
        };
        if done.is_none() {
            self.count_error(kind);
        }
        kind
    }

    #[cold]
    fn count_error(&mut self, kind: Kind) {
        self.errors += 1;
        match kind {
            Kind::Read => self.read_errors += 1,
            Kind::Write => self.write_errors += 1,
            Kind::Other => {}
        }
    }

    #[cold]
    fn count_other(&mut self, op: Op) {
        match op {
            Op::Flush => self.flushes += 1,
            Op::Discard { .. } => self.discards += 1,
            Op::WriteZeroes { .. } => self.write_zeroes += 1,
            Op::Read | Op::Write { .. } => {}
        }
    }
}
