//! Counts of a client thread.

use std::time::Duration;

use hdrhistogram::Histogram;

use super::pace::PaceStats;
use super::series::TimeSeries;
use crate::device::IoOp;

/// Longest latency that is recorded exactly, in nanoseconds.
const MAX_LATENCY_NS: u64 = 100_000_000_000;

/// I/Os of one operation that completed in the measurement.
#[derive(Clone, Debug)]
pub struct OpStats {
    /// Their number. Those that failed are not among them.
    pub ios: u64,
    /// Their bytes. 0 unless I/Os differ in size or disk.
    pub bytes: u64,
    /// Latencies in nanoseconds.
    pub latency: Histogram<u64>,
}

impl Default for OpStats {
    fn default() -> OpStats {
        let latency = Histogram::new_with_max(MAX_LATENCY_NS, 3).expect("bounds that the histogram takes");
        OpStats { ios: 0, bytes: 0, latency }
    }
}

impl OpStats {
    fn reset(&mut self) {
        (self.ios, self.bytes) = (0, 0);
        // Memory that was never written stays unwritten.
        if !self.latency.is_empty() {
            self.latency.reset();
        }
    }

    /// Adds `other`.
    pub(crate) fn add(&mut self, other: &OpStats) {
        self.ios += other.ios;
        self.bytes += other.bytes;
        if !other.latency.is_empty() {
            self.latency.add(&other.latency).expect("all histograms have the same bounds");
        }
    }
}

/// Measurements of a thread, or of all threads of a run.
#[derive(Debug, Default)]
pub struct WorkerStats {
    /// I/Os that completed in the measurement, by [`IoOp`].
    pub ops: [OpStats; IoOp::COUNT],
    /// Their bytes on each disk. 0 unless I/Os differ in size or disk.
    pub bytes: Vec<u64>,
    /// Requests handed over to other threads in it.
    pub handed_over: u64,
    /// Length of the measurement.
    pub elapsed: Duration,
    /// CPU time of this thread in it.
    pub cpu: Duration,
    /// Kicks in it.
    pub kicks: u64,
    /// Calls in it.
    pub calls: u64,
    /// I/Os that failed or did not verify, also outside of the measurement.
    pub errors: u64,
    /// Messages about some of them.
    pub messages: Vec<String>,
    /// Starts and delays at the rate, in the measurement.
    pub pace: PaceStats,
    /// The I/Os that completed in each interval of it, if they were recorded.
    pub series: Option<TimeSeries>,
}

impl WorkerStats {
    /// Creates zero counts of this number of disks.
    pub(crate) fn new(disks: u16) -> WorkerStats {
        WorkerStats { bytes: vec![0; disks.into()], ..WorkerStats::default() }
    }

    /// Resets the counts of the measurement.
    pub(super) fn reset(&mut self) {
        self.ops.iter_mut().for_each(OpStats::reset);
        self.bytes.fill(0);
    }

    /// Adds another thread's.
    pub(crate) fn add(&mut self, other: WorkerStats) {
        self.ops.iter_mut().zip(&other.ops).for_each(|(own, other)| own.add(other));
        self.bytes.iter_mut().zip(&other.bytes).for_each(|(own, other)| *own += other);
        self.handed_over += other.handed_over;
        self.elapsed = self.elapsed.max(other.elapsed);
        self.cpu += other.cpu;
        self.kicks += other.kicks;
        self.calls += other.calls;
        self.errors += other.errors;
        self.messages.extend(other.messages);
        self.pace.add(&other.pace);
        match (&mut self.series, other.series) {
            (Some(series), Some(other)) => series.merge(other),
            (series, other) => *series = series.take().or(other),
        }
    }
}
