//! The metrics of a row that can be drawn.

use std::fmt;

use clap::ValueEnum;

use super::rows::PlotRow;

/// The metric of a vertical axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Metric {
    /// Requests per second, with their standard error
    Iops,
    /// MiB per second, with their standard error
    Bandwidth,
    /// Latency: median, and 99th percentile
    Latency,
    /// CPU time of the server for a request
    Cpu,
    /// Merged requests per second
    Merges,
    /// Latency of each percentile, a curve for each row
    Percentiles,
}

/// The value of a metric.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct MetricValue {
    /// The value.
    pub value: f64,
    /// Standard error.
    pub error: f64,
    /// Value of the dashed line.
    pub dashed: Option<f64>,
}

impl Metric {
    /// Returns the title of its axis, with the unit.
    pub(super) fn title(self) -> &'static str {
        match self {
            Metric::Iops => "IOPS",
            Metric::Bandwidth => "bandwidth (MiB/s)",
            Metric::Latency | Metric::Percentiles => "latency (us)",
            Metric::Cpu => "server CPU per request (us)",
            Metric::Merges => "merged requests per second",
        }
    }

    /// Returns its name in a heading.
    pub(super) fn subject(self) -> &'static str {
        match self {
            Metric::Iops => "IOPS",
            Metric::Bandwidth => "bandwidth",
            Metric::Latency => "latency",
            Metric::Cpu => "server CPU per request",
            Metric::Merges => "merged requests",
            Metric::Percentiles => "latency percentiles",
        }
    }

    /// Returns the unit behind a value.
    pub(super) fn unit(self) -> &'static str {
        match self {
            Metric::Iops => "IOPS",
            Metric::Bandwidth => "MiB/s",
            Metric::Latency | Metric::Cpu | Metric::Percentiles => "us",
            Metric::Merges => "merges/s",
        }
    }

    /// Returns from where on its numbers are written with k: later for microseconds.
    pub(super) fn kilo(self) -> f64 {
        if self.unit() == "us" { 1e4 } else { 1e3 }
    }

    /// Returns true if its axis may be logarithmic.
    pub(super) fn log(self) -> bool {
        matches!(self, Metric::Latency | Metric::Percentiles)
    }

    /// Returns the keys that it needs and that a row may lack.
    pub(super) fn keys(self) -> &'static str {
        match self {
            Metric::Cpu => "server_cpu_us_per_io",
            Metric::Merges => "rrqm_per_s or wrqm_per_s",
            _ => "its keys",
        }
    }

    /// Returns true if `row` has it.
    pub(super) fn has(self, row: &PlotRow) -> bool {
        self == Metric::Percentiles || self.of(row).is_some()
    }

    /// Returns its value in `row`; `None` if the row lacks it, and for percentiles, which are many.
    pub(super) fn of(self, row: &PlotRow) -> Option<MetricValue> {
        let plain = |value: f64| MetricValue { value, error: 0.0, dashed: None };
        const MIB: f64 = (1 << 20) as f64;
        match self {
            Metric::Iops => Some(MetricValue { error: row.iops.1, ..plain(row.iops.0) }),
            Metric::Bandwidth => Some(MetricValue { error: row.bandwidth.1 / MIB, ..plain(row.bandwidth.0 / MIB) }),
            Metric::Latency => Some(MetricValue { dashed: Some(row.latency.1), ..plain(row.latency.0) }),
            Metric::Cpu => row.server_cpu.map(plain),
            Metric::Merges => row.merges.map(plain),
            Metric::Percentiles => None,
        }
    }
}

impl fmt::Display for Metric {
    /// Writes its name on the command line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.to_possible_value().as_ref().map_or("", |value| value.get_name()))
    }
}
