//! What a queue counts. Written by its worker only, as plain numbers; read by copying them out on the worker's thread.

use mqblk_core::{ByteLen, Op};

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
}

impl QueueCounters {
    #[inline]
    pub(crate) fn count(&mut self, op: Op, done: Option<ByteLen>) {
        self.requests += 1;
        let bytes = done.map_or(0, |len| len.0);
        // The two frequent ones by a branch that is foreseen; a jump table is not.
        if op == Op::Read {
            self.reads += 1;
            self.read_bytes += bytes;
        } else if let Op::Write { .. } = op {
            self.writes += 1;
            self.written_bytes += bytes;
        } else {
            self.count_other(op);
        }
        if done.is_none() {
            self.errors += 1;
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
