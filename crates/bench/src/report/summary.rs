//! Numbers of the results: over the runs, and of each.

use hdrhistogram::Histogram;
use serde::Serialize;

use super::series::RunSeries;
use crate::device::IoOp;
use crate::machine;
use crate::run::RunResult;
use crate::worker::{OpStats, PaceStats};

/// Latency in microseconds.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct LatencySummary {
    pub mean: f64,
    /// Median.
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    /// 99.9th percentile.
    pub p999: f64,
    pub max: f64,
}

/// The I/Os of one operation, over all runs.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct OpSummary {
    /// I/Os per second, mean over the runs.
    pub iops_mean: f64,
    /// Its standard error.
    pub iops_stderr: f64,
    /// I/Os per second, median over the runs.
    pub iops_median: f64,
    /// Bytes per second, mean over the runs.
    pub bw_bytes_per_s: f64,
    /// Latency over all runs.
    pub lat_us: LatencySummary,
    /// Points of the latencies' distribution: (percentile, microseconds).
    pub percentiles: Vec<(f64, f64)>,
}

impl OpSummary {
    /// Returns the summary of `op` over all runs.
    pub(super) fn new(results: &[RunResult], op: IoOp) -> OpSummary {
        let of = |value: fn(&OpStats) -> u64| -> Vec<f64> {
            results.iter().map(|result| result.per_second(value(&result.stats.ops[op as usize]))).collect()
        };
        let iops = of(|op| op.ios);
        let (iops_mean, iops_stderr) = mean_and_stderr(&iops);
        let latencies = latencies(results.iter().map(|result| &result.stats.ops[op as usize]));
        OpSummary {
            iops_mean,
            iops_stderr,
            iops_median: median(&iops),
            bw_bytes_per_s: mean_and_stderr(&of(|op| op.bytes)).0,
            lat_us: LatencySummary::new(&latencies),
            percentiles: percentiles(&latencies),
        }
    }
}

/// The values of one run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct RunValues {
    /// Start of the run: RFC 3339, in UTC.
    pub date: String,
    /// Length of the measurement, in seconds.
    pub elapsed_s: f64,
    /// True if a signal ended it early.
    pub cut_short: bool,
    /// I/Os per second.
    pub iops: f64,
    /// Bytes per second.
    pub bw_bytes_per_s: f64,
    pub lat_us: LatencySummary,
    /// CPU time of the server for an I/O; null when it cannot be read.
    pub server_cpu_us_per_io: Option<f64>,
    /// CPU time of the client's threads for an I/O.
    pub client_cpu_us_per_io: f64,
    /// I/Os that failed or did not verify.
    pub errors: u64,
    /// The I/Os that completed in each interval; null if they were not recorded.
    pub series: Option<RunSeries>,
}

impl RunValues {
    /// Returns the values of a run. `has`: the operations of its load.
    pub(super) fn new(result: &RunResult, has: &dyn Fn(IoOp) -> bool) -> RunValues {
        let per_io = |time: std::time::Duration| time.as_secs_f64() * 1e6 / result.ios().max(1) as f64;
        RunValues {
            date: machine::date(result.started),
            elapsed_s: result.stats.elapsed.as_secs_f64(),
            cut_short: result.cut_short,
            iops: result.iops(),
            bw_bytes_per_s: result.bandwidth(),
            lat_us: LatencySummary::new(&latencies(result.transfers())),
            server_cpu_us_per_io: result.used.cpu.map(per_io),
            client_cpu_us_per_io: per_io(result.stats.cpu),
            errors: result.stats.errors,
            series: result.stats.series.as_ref().map(|series| RunSeries::new(series, has)),
        }
    }
}

/// Starts and delays of I/Os at a rate, over all runs.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct RateSummary {
    /// I/Os per second that all jobs together were to start.
    pub asked_iops: f64,
    /// I/Os that were started in the measured time.
    pub started: u64,
    /// I/Os that were due in the measured time and did not start: no slot was free.
    pub unstarted: u64,
    /// Mean time from an I/O's due time to its start, in microseconds; part of the latency.
    pub delay_us_mean: f64,
    /// The longest one.
    pub delay_us_max: f64,
}

impl RateSummary {
    /// Returns the summary of all runs at `rate` for each of `jobs`.
    pub(crate) fn new(results: &[RunResult], rate: u32, jobs: u16) -> RateSummary {
        let mut all = PaceStats::default();
        results.iter().for_each(|result| all.add(&result.stats.pace));
        RateSummary {
            asked_iops: f64::from(rate) * f64::from(jobs),
            started: all.started,
            unstarted: all.unstarted,
            delay_us_mean: all.delay_sum_ns as f64 / 1e3 / all.started.max(1) as f64,
            delay_us_max: all.delay_max_ns as f64 / 1e3,
        }
    }

    /// Returns true unless more than a hundredth of the I/Os were not started.
    pub(crate) fn is_kept(&self) -> bool {
        self.unstarted <= (self.started + self.unstarted) / 100
    }
}

/// The percentiles of the results.
const PERCENTILES: [f64; 13] = [1.0, 5.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.5, 99.9, 99.95, 99.99];

/// Returns the points of a distribution.
pub(super) fn percentiles(latencies: &Histogram<u64>) -> Vec<(f64, f64)> {
    PERCENTILES.iter().map(|at| (*at, micros_at(latencies, *at))).collect()
}

/// Returns the latencies of several counts together, in nanoseconds.
pub(super) fn latencies<'a>(counts: impl IntoIterator<Item = &'a OpStats>) -> Histogram<u64> {
    let mut all = OpStats::default();
    counts.into_iter().for_each(|counts| all.add(counts));
    all.latency
}

fn micros_at(latencies: &Histogram<u64>, percentile: f64) -> f64 {
    latencies.value_at_percentile(percentile) as f64 / 1e3
}

impl LatencySummary {
    /// Returns the summary of latencies in nanoseconds.
    pub(super) fn new(latencies: &Histogram<u64>) -> LatencySummary {
        let at = |percentile| micros_at(latencies, percentile);
        LatencySummary {
            mean: if latencies.is_empty() { 0.0 } else { latencies.mean() / 1e3 },
            p50: at(50.0),
            p90: at(90.0),
            p99: at(99.0),
            p999: at(99.9),
            max: latencies.max() as f64 / 1e3,
        }
    }
}

/// Returns the mean and its standard error: the sample's standard deviation over the square root of the count. 0 for
/// one value.
pub(super) fn mean_and_stderr(values: &[f64]) -> (f64, f64) {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    if values.len() < 2 {
        return (mean, 0.0);
    }
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (mean, (squares / (count - 1.0)).sqrt() / count.sqrt())
}

/// Returns the median.
pub(super) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_errors_and_medians() {
        assert_eq!(mean_and_stderr(&[5.0]), (5.0, 0.0));
        let (mean, stderr) = mean_and_stderr(&[2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]);
        assert!((mean - 5.0).abs() < 1e-12 && (stderr - (32.0_f64 / 7.0).sqrt() / 8.0_f64.sqrt()).abs() < 1e-12);
        assert_eq!((median(&[3.0, 1.0, 2.0]), median(&[4.0, 1.0, 2.0, 3.0])), (2.0, 2.5));
    }
}
