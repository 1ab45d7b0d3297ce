//! The experiments: one file each.

mod block_sizes;
mod polling;
mod scsi_targets;
mod virtio_queues;
mod xen_queues;

use std::fmt::Debug;
use std::path::PathBuf;

use super::claim::Claim;
use super::command::BenchCommand;
use super::estimate::{MeasuredMean, RatioEstimate};
use super::table::ResultTable;
use crate::plot::figure::Figure;
use crate::report::ResultRow;

/// How much is measured, and where.
#[derive(Clone, Debug)]
pub(super) struct ExperimentScale {
    /// Few runs of a fraction of a second.
    pub quick: bool,
    /// Runs of each row, if they were chosen.
    pub runs: Option<u16>,
    /// Seconds of each run, if they were chosen.
    pub runtime: Option<f64>,
    /// The file on a real disk.
    pub image: PathBuf,
}

impl ExperimentScale {
    /// Returns the options of the length of runs: `full` and `quick` are seconds and numbers of runs.
    fn length(&self, full: (f64, u16), quick: (f64, u16)) -> String {
        let (seconds, runs) = if self.quick { quick } else { full };
        let (seconds, runs) = (self.runtime.unwrap_or(seconds), self.runs.unwrap_or(runs));
        format!("--runtime {seconds} --warmup {} --runs {runs}", (seconds / 4.0 * 1000.0).round() / 1000.0)
    }
}

/// A published experiment, and how it is reproduced.
pub(super) trait Reproduction: Debug + Sync {
    /// Returns the name on the command line and of the result files.
    fn name(&self) -> &'static str;

    /// Returns what it shows, in a line.
    fn about(&self) -> &'static str;

    /// Returns the document, as `docs/references.md` cites it.
    fn document(&self) -> &'static str;

    /// Returns true if it works on a file on a real disk.
    fn needs_disk(&self) -> bool {
        false
    }

    /// Returns the commands that measure its rows.
    fn commands(&self, scale: &ExperimentScale) -> Vec<BenchCommand>;

    /// Returns its tables: measured and published values, as ratios beside each other.
    fn tables(&self, rows: &[ResultRow]) -> Vec<ResultTable>;

    /// Returns what the document shows, beside the measured rows; its main effect first.
    fn claims(&self, rows: &[ResultRow], cores: usize) -> Vec<Claim>;

    /// Returns the picture of the rows, with the published values in grey.
    fn figure(&self, rows: &[ResultRow]) -> Figure;

    /// Returns sentences on how to read it, and what it is not.
    fn notes(&self) -> Vec<&'static str>;
}

/// All experiments, in the order in which they are run.
pub(super) static ALL: [&dyn Reproduction; 5] = [
    &xen_queues::XenQueues,
    &virtio_queues::VirtioQueues,
    &block_sizes::BlockSizes,
    &scsi_targets::ScsiTargets,
    &polling::Polling,
];

/// Returns the ratio of the IOPS of two rows.
fn iops_ratio(value: Option<&ResultRow>, base: Option<&ResultRow>) -> Option<RatioEstimate> {
    RatioEstimate::of(&[(MeasuredMean::iops(value?), MeasuredMean::iops(base?))])
}

/// Returns a claim about the IOPS of two rows.
fn iops_claim(
    what: impl Into<String>,
    published: f64,
    value: Option<&ResultRow>,
    base: Option<&ResultRow>,
    obstacle: Option<String>,
) -> Claim {
    let failed = [value, base].into_iter().flatten().map(|row| row.errors).sum();
    Claim { what: what.into(), published, measured: iops_ratio(value, base), obstacle, failed }
}

/// Returns a ratio as a cell.
fn ratio_cell(ratio: Option<f64>) -> String {
    ratio.map_or_else(|| "-".into(), super::estimate::digits)
}

/// Returns a measured ratio as a cell, with its 95 % confidence interval.
fn estimate_cell(ratio: Option<RatioEstimate>) -> String {
    ratio.map_or_else(|| "-".into(), |ratio| ratio.to_string().trim_start_matches('x').to_owned())
}

/// Returns the standard error of a row's IOPS in percent.
fn error_cell(row: &ResultRow) -> String {
    let share = (row.iops_mean > 0.0 && row.runs > 1).then(|| row.iops_stderr / row.iops_mean * 100.0);
    share.map_or_else(|| "-".into(), |percent| format!("± {percent:.1}%"))
}

/// Returns CPU time for an I/O as a cell.
fn cpu_cell(us: Option<f64>) -> String {
    us.map_or_else(|| "-".into(), |us| format!("{us:.2}"))
}

/// Returns the relative standard error of a ratio.
fn ratio_error(value: &ResultRow, base: &ResultRow) -> f64 {
    let relative = |row: &ResultRow| if row.iops_mean > 0.0 { row.iops_stderr / row.iops_mean } else { 0.0 };
    match std::ptr::eq(value, base) {
        true => 0.0,
        false => relative(value).hypot(relative(base)),
    }
}
