//! A published experiment, and the words, cells and plots that several of them make.

use std::path::Path;

use clap::builder::PossibleValue;

use super::claim::Claim;
use super::command::{BenchCommand, IMAGE};
use super::estimate::{MeasuredMean, RatioEstimate};
use crate::BenchError;
use crate::columns::{block_size, summary};
use crate::plan::{Plan, Target};
use crate::plot::{Figure, Metric, PlotGroup, PublishedSeries, RowKey};
use crate::report::ResultRow;
use crate::table::{ResultTable, or_dash};

/// The columns of an experiment, each a target; or the reason why its options make none.
pub(crate) type Columns = Result<Vec<Target>, BenchError>;

/// A published experiment.
#[derive(Debug)]
pub struct Experiment {
    /// Name for `mqblk reproduce`, and of its result files.
    pub(crate) name: &'static str,
    /// Name for `--experiment`, and in result rows.
    pub(crate) option: &'static str,
    /// Its subject, in a line.
    pub(crate) about: &'static str,
    /// The document, as `docs/references.md` cites it.
    pub(crate) document: &'static str,
    /// Options that hold where the command line has none.
    pub(crate) defaults: &'static str,
    /// Makes the columns for `--queues` and the targets of the command line, each a target.
    pub(crate) columns: fn(&[u16], &[Target]) -> Columns,
    /// Makes the options of each command of `mqblk reproduce`, quick or not, besides those for its length. `IMAGE` in
    /// them is a file on a real disk.
    pub(crate) loads: fn(bool) -> Vec<String>,
    /// Seconds and runs of each row of `mqblk reproduce`.
    pub(crate) full: (f64, u16),
    /// The same with `--quick`.
    pub(crate) quick: (f64, u16),
    /// Makes the tables of rows: measured and published values beside each other.
    pub(crate) tables: fn(&[ResultRow]) -> Vec<ResultTable>,
    /// Compares rows to the document's effects, the main one first.
    pub(crate) claims: fn(&[ResultRow]) -> Vec<Claim>,
    /// Makes the picture of rows, with the published values in grey.
    pub(crate) figure: fn(&[ResultRow]) -> Figure,
    /// Sentences on its interpretation and limits.
    pub(crate) notes: &'static [&'static str],
}

impl Experiment {
    /// Returns the experiment as the help of `--experiment` lists it.
    pub(crate) fn possible_value(&self) -> PossibleValue {
        let value = PossibleValue::new(self.option).help(format!("{} ({})", self.about, self.defaults));
        if self.name == self.option { value } else { value.alias(self.name) }
    }

    /// Returns the commands of `mqblk reproduce`: with few runs of a fraction of a second if `quick`, or with chosen
    /// runs of each row and seconds of each run. `image`: the file on a real disk.
    pub(crate) fn commands(
        &self,
        quick: bool,
        runs: Option<u16>,
        runtime: Option<f64>,
        image: &Path,
    ) -> Vec<BenchCommand> {
        let usual = if quick { self.quick } else { self.full };
        let (seconds, runs) = (runtime.unwrap_or(usual.0), runs.unwrap_or(usual.1));
        let warmup = (seconds / 4.0 * 1000.0).round() / 1000.0;
        let length = format!("--runtime {seconds} --warmup {warmup} --runs {runs}");
        let image = image.display().to_string().replace(',', ",,");
        let command = |load| BenchCommand::new(&format!("--experiment {} {load} {length}", self.option), &image);
        (self.loads)(quick).iter().map(command).collect()
    }

    /// Returns true if `mqblk reproduce` measures it on a file on a real disk.
    pub(crate) fn needs_disk(&self) -> bool {
        (self.loads)(true).iter().any(|load| load.contains(IMAGE))
    }

    /// Returns the output of `mqblk bench --experiment` for at least one row.
    pub(crate) fn text(&self, plan: &Plan, rows: &[ResultRow]) -> String {
        format!("{}\n{}", summary(plan, settings(plan, rows)), self.tables_text(rows))
    }

    /// Returns the tables of rows as text.
    pub(crate) fn tables_text(&self, rows: &[ResultRow]) -> String {
        (self.tables)(rows).iter().map(|table| format!("\n{}", table.text())).collect()
    }
}

/// Returns the common settings of all rows, in words.
fn settings(plan: &Plan, rows: &[ResultRow]) -> Vec<String> {
    let one = &rows[0];
    let mut words = vec![format!("target {}", one.target)];
    let mut same = |name: &str, value: &dyn Fn(&ResultRow) -> Option<String>| {
        let known = value(one).filter(|known| {
            rows.iter().all(|row| matches!(value(row), Some(own) if own == *known || own == "unknown"))
        });
        words.extend(known.map(|known| format!("{name} {known}")));
    };
    same("poll", &|row| Some(row.poll.clone()));
    same("rw", &|row| Some(row.rw.to_owned()));
    same("bs", &|row| (row.bs != row.bs_max).then(|| block_size(row)));
    same("iodepth", &|row| row.targets.map(|_| row.iodepth.to_string()));
    same("batch", &|row| Some(row.batch.to_string()));
    same("steer", &|row| row.steer.map(str::to_owned));
    same("grants", &|row| row.grants.clone());
    same("ring order", &|row| row.ring_order.map(|order| order.to_string()));
    same("abi", &|row| row.abi.filter(|abi| *abi != "x86_64").map(str::to_owned));
    words.push(format!("errors {}", rows.iter().map(|row| row.errors).sum::<u64>()));
    if plan.fill {
        words.push("filled before".into());
    }
    words
}

/// Returns the words that distinguish a target's columns from those of the others, if there are several.
pub(super) fn prefix(targets: &[Target], target: &Target) -> String {
    if targets.len() < 2 { String::new() } else { format!("{}, ", target.name()) }
}

/// Returns `1 queue` or `8 queues`.
pub(super) fn queue_count(queues: u16) -> String {
    if queues == 1 { "1 queue".into() } else { format!("{queues} queues") }
}

/// Returns a row's load in words.
pub(super) fn load(row: &ResultRow) -> String {
    let ResultRow { rw, jobs, iodepth, batch, .. } = row;
    format!("{rw} bs {}, jobs {jobs}, iodepth {iodepth}, batch {batch}", block_size(row))
}

/// Returns the measured ratio of the IOPS of two rows as a cell, with its 95 % confidence interval.
pub(super) fn iops_ratio_cell(rows: Option<(&ResultRow, &ResultRow)>) -> String {
    let means = rows.map(|(value, base)| (MeasuredMean::iops(value), MeasuredMean::iops(base)));
    let ratio = means.and_then(|means| RatioEstimate::of(&[means]));
    or_dash(ratio.map(|ratio| ratio.to_string().trim_start_matches('x').to_owned()))
}

/// Returns the standard error of a row's IOPS in percent.
pub(super) fn error_cell(row: &ResultRow) -> String {
    let share = (row.iops_mean > 0.0 && row.runs > 1).then(|| row.iops_stderr / row.iops_mean * 100.0);
    or_dash(share.map(|percent| format!("± {percent:.2}%")))
}

/// Returns the heading that an experiment's columns gave a row.
pub(super) fn column(row: &ResultRow) -> String {
    row.column.clone().unwrap_or_default()
}

/// Returns a plot of `metric` against `x`, with a series for each value of the keys `series`.
pub(super) fn plot_of(metric: Metric, x: RowKey, series: &[RowKey]) -> PlotGroup {
    PlotGroup { metrics: vec![metric], x: Some(x), series: series.to_vec(), ..PlotGroup::default() }
}

/// Returns published values as a series: points on the horizontal axis, and ratios.
pub(super) fn published_series(name: &str, points: impl IntoIterator<Item = (impl ToString, f64)>) -> PublishedSeries {
    let points = points.into_iter().map(|(at, ratio)| (at.to_string(), ratio, 0.0));
    PublishedSeries { name: name.to_owned(), points: points.collect(), only: None }
}
