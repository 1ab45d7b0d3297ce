//! The sweep: every combination, every run, the targets in turn.

use std::io::Write;

use rand::Rng;

use crate::BenchError;
use crate::benchmark::Benchmark;
use crate::output::{JsonOutput, write_text};
use crate::plan::{Combination, Plan, Target};
use crate::preflight;
use crate::progress::ProgressDisplay;
use crate::report::{RateSummary, ResultRow};
use crate::run::{RunInput, RunResult};
use crate::table::table;

/// Measures everything and prints the results, as far as they were measured. Returns the number of requests that failed
/// or did not verify.
///
/// # Errors
/// The first [`BenchError`], after the results so far were printed and written.
pub(crate) fn run(benchmark: &Benchmark) -> Result<u64, BenchError> {
    let plan = &benchmark.plan;
    let json = JsonOutput::open(plan.json.as_deref())?;
    preflight::check(benchmark)?;
    let mut sweep = SweepObserver { progress: ProgressDisplay::new(plan.run_count()), json, rows: vec![] };
    let mut outcome = Ok(());
    let mut partial = vec![];
    for combination in &plan.combinations {
        let group = measure_group(benchmark, combination, &mut sweep);
        match group.failure {
            None => sweep.rows.push(group.rows),
            Some(error) => {
                (outcome, partial) = (Err(error), group.rows);
                break;
            }
        }
        sweep.json.update(&sweep.rows, &[]);
    }
    sweep.progress.finish();
    let SweepObserver { mut json, mut rows, .. } = sweep;
    let printed = write_text(&json, &tables(benchmark, &rows, &partial));
    rows.push(partial);
    let written = json.finish(&rows);
    if let (Err(error), true) = (&written, outcome.is_err() || printed.is_err()) {
        // Another error is returned.
        let _ = writeln!(std::io::stderr(), "mqblk: bench: {error}");
    }
    outcome.and(printed).and(written)?;
    Ok(rows.iter().flatten().map(|row| row.errors).sum())
}

/// Returns the tables of the rows of all combinations that were measured, and of one that was not finished.
fn tables(benchmark: &Benchmark, rows: &[Vec<ResultRow>], partial: &[ResultRow]) -> String {
    let plan = &benchmark.plan;
    let mut text = match (benchmark.experiment, rows) {
        (_, []) => String::new(),
        (Some(experiment), rows) => experiment.text(plan, &rows.concat()),
        (None, rows) => table(plan, rows),
    };
    if !partial.is_empty() {
        // An experiment's table has a cell for each target, and here some have none.
        text.push_str("\nNot finished:\n");
        text.push_str(&table(plan, &[partial.to_vec()]));
    }
    text
}

/// The rows of one combination, and how far they are.
#[derive(Debug)]
pub(crate) struct MeasuredGroup {
    /// The rows of all targets; after a failure, of those that have a run.
    pub rows: Vec<ResultRow>,
    /// Reason why it is not finished.
    pub failure: Option<BenchError>,
}

/// One run of a target under a combination.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RunOfGroup<'a> {
    pub plan: &'a Plan,
    pub target: &'a Target,
    /// The combination, with the target's own queues.
    pub combination: &'a Combination,
    /// Number of the run, from 1.
    pub number: u16,
}

/// Follows the runs of a combination: shows them, and decides which count.
pub(crate) trait RunObserver {
    /// Returns the display of the progress.
    fn progress(&self) -> &ProgressDisplay;

    /// Shows that a run starts.
    fn starts(&mut self, run: &RunOfGroup<'_>);

    /// Shows its result.
    fn ended(&mut self, run: &RunOfGroup<'_>, result: &RunResult);

    /// Returns true if a run that a signal has cut short counts.
    fn counts_cut_short(&self, result: &RunResult) -> bool;

    /// Called after each run that counts. `rows` makes the rows so far.
    fn counted(&mut self, rows: &dyn Fn() -> Vec<ResultRow>);
}

/// Measures all targets and runs of one combination: A B A B.
pub(crate) fn measure_group(
    benchmark: &Benchmark,
    combination: &Combination,
    observer: &mut dyn RunObserver,
) -> MeasuredGroup {
    let plan = &benchmark.plan;
    let columns: Vec<(&Target, Combination)> =
        plan.targets.iter().map(|target| (target, target.combination(combination))).collect();
    let mut results: Vec<Vec<RunResult>> = columns.iter().map(|_| vec![]).collect();
    let rows = |results: &[Vec<RunResult>]| -> Vec<ResultRow> {
        let measured = columns.iter().zip(results).filter(|(_, results)| !results.is_empty());
        measured.map(|((target, combination), results)| benchmark.row(target, combination, results)).collect()
    };
    for number in 1..=plan.runs {
        for (index, (target, combination)) in columns.iter().enumerate() {
            let run = RunOfGroup { plan, target, combination, number };
            let failure = match measure_run(benchmark, &run, observer) {
                Ok(result) => {
                    let cut_short = result.cut_short;
                    if !cut_short || observer.counts_cut_short(&result) {
                        results[index].push(result);
                        observer.counted(&|| rows(&results));
                    }
                    plan.interrupt.check().err().filter(|_| cut_short)
                }
                Err(error) => Some(error),
            };
            if failure.is_some() {
                return MeasuredGroup { rows: rows(&results), failure };
            }
        }
    }
    MeasuredGroup { rows: rows(&results), failure: None }
}

/// Measures once, and shows the result.
fn measure_run(
    benchmark: &Benchmark,
    run: &RunOfGroup<'_>,
    observer: &mut dyn RunObserver,
) -> Result<RunResult, BenchError> {
    let RunOfGroup { plan, target, combination, number } = *run;
    plan.interrupt.check()?;
    observer.starts(run);
    // With a seed all targets have the same blocks; each run has others.
    let seed = plan.seed.map_or_else(|| rand::rng().next_u64(), |seed| seed.wrapping_add(u64::from(number) - 1));
    let named = |error| match error {
        BenchError::Failed(text) => {
            BenchError::Failed(format!("{}: run {number} of {}: {text}", describe(combination, target), plan.runs))
        }
        other => other,
    };
    let disks = benchmark.served_disks(target, combination);
    let input = RunInput { plan, combination, target, disks: &disks, seed, progress: observer.progress() };
    let result = benchmark.interface.measure(&input).map_err(named)?;
    observer.ended(run, &result);
    Ok(result)
}

/// Follows the runs of `mqblk bench`: a line for each, and the JSON after each.
struct SweepObserver {
    progress: ProgressDisplay,
    json: JsonOutput,
    /// The rows of the combinations that are finished.
    rows: Vec<Vec<ResultRow>>,
}

impl RunObserver for SweepObserver {
    fn progress(&self) -> &ProgressDisplay {
        &self.progress
    }

    fn starts(&mut self, run: &RunOfGroup<'_>) {
        self.progress.start(&describe(run.combination, run.target));
    }

    fn ended(&mut self, run: &RunOfGroup<'_>, result: &RunResult) {
        let RunOfGroup { plan, target, combination, number } = *run;
        let verified = match plan.verify {
            Some(_) => format!(", {} blocks verified", result.verified),
            None => String::new(),
        };
        let errors = if result.errors > 0 { format!(", {} errors", result.errors) } else { String::new() };
        let cut_short = if result.cut_short { ", cut short" } else { "" };
        self.progress.end(&format!(
            "{}: run {number} of {}: {:.0} IOPS{errors}{verified}{cut_short}",
            describe(combination, target),
            plan.runs,
            result.iops()
        ));
        // Standard error may be closed.
        let tell = |text: &str| drop(writeln!(std::io::stderr(), "mqblk: bench: {}: {text}", target.label));
        result.messages.iter().for_each(|message| tell(message));
        if let Some(rate) = combination.rate_iops {
            let summary = RateSummary::new(std::slice::from_ref(result), rate, combination.jobs);
            if !summary.is_kept() {
                tell(&format!(
                    "the rate is not kept: {:.0} IOPS were asked for and {:.0} done; {} I/Os were due and not started, the latest start was {:.1} ms late",
                    summary.asked_iops,
                    result.iops(),
                    summary.unstarted,
                    summary.delay_us_max / 1e3
                ));
            }
        }
    }

    fn counts_cut_short(&self, result: &RunResult) -> bool {
        result.ios + result.errors > 0
    }

    fn counted(&mut self, rows: &dyn Fn() -> Vec<ResultRow>) {
        self.json.update(&self.rows, &rows());
    }
}

fn describe(combination: &Combination, target: &Target) -> String {
    let Combination { rw, sizes, queues, targets, luns, jobs, iodepth, batch, rate_iops, .. } = combination;
    let poll = if target.poll == "unknown" { String::new() } else { format!(" poll {}", target.poll) };
    let grants = target.grants.as_ref().filter(|grants| *grants != "unknown");
    let grants = grants.map_or(String::new(), |grants| format!(" grants {grants}"));
    let merge = if target.column.is_some() { format!(" merge {}", target.merge) } else { String::new() };
    let rw = rw.name();
    let disks = if *targets * *luns > 1 { format!(" targets {targets} luns {luns}") } else { String::new() };
    let rate = rate_iops.map_or(String::new(), |rate| format!(" rate-iops {rate}"));
    format!(
        "{}{poll}{grants}{merge}: {rw} bs {sizes}{disks} queues {queues} jobs {jobs} iodepth {iodepth} batch {batch}{rate}",
        target.label
    )
}
