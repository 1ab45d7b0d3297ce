//! The time series of a run as it is in the results.

use serde::Serialize;

use crate::device::IoOp;
use crate::worker::{Interval, TimeSeries};

/// The I/Os that completed in each interval of a run, by operation.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct RunSeries {
    /// Length of an interval, in milliseconds. The last one ends with the measurement, and may be shorter or longer by
    /// less than half.
    pub interval_ms: f64,
    /// End of the last interval, in milliseconds from the start of the measurement.
    pub end_ms: f64,
    /// The reads; null if the load has none.
    pub read: Option<Vec<SeriesPoint>>,
    /// The writes; null if the load has none.
    pub write: Option<Vec<SeriesPoint>>,
    /// The trims; null if the load has none.
    pub trim: Option<Vec<SeriesPoint>>,
    /// The flushes; null if the load has none.
    pub flush: Option<Vec<SeriesPoint>>,
}

/// An interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct SeriesPoint {
    /// Its start, in milliseconds from the start of the measurement.
    pub start_ms: f64,
    /// I/Os that completed in it, per second of its length.
    pub iops: f64,
    /// Mean of their latencies, in microseconds; null if there were none.
    pub mean_us: Option<f64>,
    /// The greatest of their latencies, in microseconds; null if there were none.
    pub max_us: Option<f64>,
}

impl RunSeries {
    /// Returns the series of the operations that the load has.
    pub(super) fn new(series: &TimeSeries, has: &dyn Fn(IoOp) -> bool) -> RunSeries {
        let of = |op: IoOp| has(op).then(|| series.of(op).map(SeriesPoint::new).collect());
        RunSeries {
            interval_ms: millis(series.interval_ns),
            end_ms: series.of(IoOp::Read).last().map_or(0.0, |last| millis(last.end_ns)),
            read: of(IoOp::Read),
            write: of(IoOp::Write),
            trim: of(IoOp::Trim),
            flush: of(IoOp::Flush),
        }
    }
}

impl SeriesPoint {
    fn new(interval: Interval) -> SeriesPoint {
        let Interval { start_ns, end_ns, sums } = interval;
        let micros = |ns: f64| (sums.ios > 0).then_some(rounded(ns / 1e3));
        SeriesPoint {
            start_ms: millis(start_ns),
            iops: rounded(sums.ios as f64 * 1e9 / (end_ns - start_ns).max(1) as f64),
            mean_us: micros(sums.latency_sum_ns as f64 / sums.ios.max(1) as f64),
            max_us: micros(sums.latency_max_ns as f64),
        }
    }
}

fn millis(ns: u64) -> f64 {
    ns as f64 / 1e6
}

/// Returns a value with three decimals: files have a hundred thousand of them.
fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}
