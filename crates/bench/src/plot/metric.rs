//! The metrics of a row that can be drawn.

use std::fmt;

use clap::ValueEnum;

use super::axis::Quantity;
use super::keys::RowKey;
use super::rows::PlotRow;

/// The metric of a vertical axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Metric {
    /// Requests per second, with their standard error
    Iops,
    /// MiB per second, with their standard error
    Bandwidth,
    /// Latency: median, and 99th percentile
    Latency,
    /// CPU time of the server for a request
    Cpu,
    /// Share of the requests that the server merged into others
    Merges,
    /// Latency of each percentile, a curve for each row
    Percentiles,
    /// Share of the requests that took at most so long, a curve for each row
    Cdf,
    /// Mean latency, in the pictures of experiments.
    #[value(skip)]
    Mean,
}

/// The words about a metric, and the notation of its numbers.
pub(super) struct MetricWords {
    /// Title of its axis, with the unit.
    pub title: &'static str,
    /// Its name in a heading.
    pub subject: &'static str,
    /// Suffix of a value without a unit.
    pub unit: &'static str,
    /// Notation of its numbers.
    pub quantity: Quantity,
}

/// The value of a metric.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct MetricValue {
    pub value: f64,
    /// Standard error.
    pub error: f64,
    /// Value of the dashed line.
    pub dashed: Option<f64>,
}

impl Metric {
    /// Returns what is said of it.
    pub(super) fn words(self) -> MetricWords {
        let (title, subject, unit, quantity) = match self {
            Metric::Iops => ("IOPS", "IOPS", " IOPS", Quantity::Count),
            Metric::Bandwidth => ("bandwidth (MiB/s)", "bandwidth", " MiB/s", Quantity::Count),
            Metric::Latency => ("latency", "latency", "", Quantity::Micros),
            Metric::Cpu => ("server CPU per request", "server CPU per request", "", Quantity::Micros),
            Metric::Merges => ("merged requests", "merged requests", " of the requests", Quantity::Percent),
            Metric::Percentiles => ("latency", "latency percentiles", "", Quantity::Micros),
            Metric::Cdf => ("share of requests", "distribution of the latency", "", Quantity::Percent),
            Metric::Mean => ("mean latency", "mean latency", "", Quantity::Micros),
        };
        MetricWords { title, subject, unit, quantity }
    }

    /// Returns true if it has a standard error.
    pub(super) fn has_error(self) -> bool {
        matches!(self, Metric::Iops | Metric::Bandwidth)
    }

    /// Returns true if it is a curve for each row, with an axis of its own.
    pub(super) fn is_distribution(self) -> bool {
        matches!(self, Metric::Percentiles | Metric::Cdf)
    }

    /// Returns the names of its solid and its dashed line against `x`, if it has both.
    pub(super) fn styles(self, x: Option<RowKey>) -> Option<[&'static str; 2]> {
        match (self, x) {
            (Metric::Latency, Some(RowKey::Time)) => Some(["mean latency", "greatest latency"]),
            (Metric::Latency, _) => Some(["median latency", "99th percentile"]),
            _ => None,
        }
    }

    /// Returns the ratio of the greatest to the least value from which the axis is logarithmic; `None`: never.
    pub(super) fn log_span(self) -> Option<f64> {
        match self {
            // Their tail matters.
            Metric::Percentiles => Some(10.0),
            Metric::Latency => Some(100.0),
            _ => None,
        }
    }

    /// Returns the keys that it needs and that a row may lack.
    pub(super) fn keys(self) -> &'static str {
        match self {
            Metric::Cpu => "server_cpu_us_per_io",
            Metric::Merges => "rrqm_per_s or wrqm_per_s",
            _ => "its keys",
        }
    }

    /// Returns its value in `row`; `None` if the row lacks it, and for distributions, which have many.
    pub(super) fn of(self, row: &PlotRow) -> Option<MetricValue> {
        const MIB: f64 = (1 << 20) as f64;
        let plain = |value: f64| MetricValue { value, error: 0.0, dashed: None };
        match self {
            Metric::Iops => Some(MetricValue { error: row.iops.1, ..plain(row.iops.0) }),
            Metric::Bandwidth => Some(MetricValue { error: row.bandwidth.1 / MIB, ..plain(row.bandwidth.0 / MIB) }),
            Metric::Latency => Some(MetricValue { dashed: Some(row.latency.1), ..plain(row.latency.0) }),
            Metric::Mean => row.mean_latency.map(plain),
            Metric::Cpu => row.server_cpu.map(plain),
            Metric::Merges => row.merged_percent.map(plain),
            Metric::Percentiles | Metric::Cdf => None,
        }
    }
}

impl fmt::Display for Metric {
    /// Writes its name on the command line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.to_possible_value().as_ref().map_or(self.words().title, |value| value.get_name()))
    }
}
