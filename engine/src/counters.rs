//! What a queue and a worker count. Written by the worker only, as plain numbers; read by copying them out on its thread.

use mqblk_core::{ByteLen, Op};

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
    /// Reads that were joined to the read before them on the disk (iostat's rrqm).
    pub read_merges: u64,
    /// Writes that were joined to the write before them on the disk (iostat's wrqm).
    pub write_merges: u64,
    /// Ranges of discards and write-zeroes that were joined to the one before them on the disk.
    pub other_merges: u64,
    /// Bytes that discards and write-zeroes named, whether they succeeded or not.
    pub other_bytes: u64,
    /// Calls that were put off so that one could tell of more answers.
    pub calls_put_off: u64,
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

/// All that is known of a queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueueReport {
    /// Counters since it was attached.
    pub counters: QueueCounters,
    /// Latencies since it was attached.
    pub latency: Box<QueueLatency>,
    /// Requests in flight at this moment.
    pub in_flight: u32,
}

/// What a worker thread counts, and its queues.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkerReport {
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
    /// Times that requests were held back for more to join them (`plug-us`).
    pub plug_holds: u64,
    /// How long in all, in nanoseconds.
    pub plug_hold_ns: u64,
    /// Joined requests that the storage failed, so that their members were done one by one.
    pub merge_splits: u64,
    /// The queues it serves.
    pub queues: Vec<(QueueId, QueueReport)>,
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

impl QueueReport {
    /// Adds what another queue, or the same one in an earlier life, counted.
    pub fn add(&mut self, other: &QueueReport) {
        self.counters.add(&other.counters);
        self.latency.reads.add(&other.latency.reads);
        self.latency.writes.add(&other.latency.writes);
        self.latency.others.add(&other.latency.others);
        self.in_flight += other.in_flight;
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
            self.errors += 1;
        }
        kind
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
