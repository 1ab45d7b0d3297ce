//! The sweep: every combination, every run, the targets in turn.

use std::io::Write;
use std::time::Duration;

use rand::Rng;

use crate::BenchError;
use crate::benchmark::Benchmark;
use crate::columns::table;
use crate::output::JsonOutput;
use crate::plan::{Case, Combination, Plan};
use crate::preflight;
use crate::progress::ProgressDisplay;
use crate::report::{RateSummary, ResultRow};
use crate::run::RunResult;

/// First estimate of a run's time besides its measurement: start and end of a server.
const OVERHEAD: Duration = Duration::from_millis(200);

/// Measures everything and prints the results, as far as they were measured. Returns the number of requests that failed
/// or did not verify.
///
/// # Errors
/// The first [`BenchError`], after the results so far were printed and written.
pub(crate) fn run(benchmark: &Benchmark) -> Result<u64, BenchError> {
    let plan = &benchmark.plan;
    let mut json = JsonOutput::open(plan.json.as_deref())?;
    preflight::check(benchmark)?;
    let mut sweep = Sweep::new("bench", [plan]);
    let (mut rows, mut partial, mut outcome) = (vec![], vec![], Ok(()));
    for combination in &plan.combinations {
        let (measured, ended) = sweep.measure(benchmark, combination, &mut |current| json.update(&rows, &current));
        match ended {
            Ok(()) => rows.push(measured),
            Err(error) => {
                (outcome, partial) = (Err(error), measured);
                break;
            }
        }
        json.update(&rows, &[]);
    }
    sweep.progress.finish();
    let printed = json.write_table(&tables(benchmark, &rows, &partial));
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

/// Measures the combinations of plans, and shows each run on standard error.
#[derive(Debug)]
pub(crate) struct Sweep {
    /// The command, in messages.
    command: &'static str,
    /// Runs that a signal has cut short count.
    pub counts_cut_short: bool,
    pub progress: ProgressDisplay,
}

impl Sweep {
    /// Creates the sweep of all runs of `plans`.
    pub(crate) fn new<'a>(command: &'static str, plans: impl IntoIterator<Item = &'a Plan>) -> Sweep {
        let time = |plan: &Plan| run_time(plan) * u32::try_from(plan.run_count()).unwrap_or(u32::MAX);
        let progress = ProgressDisplay::new(plans.into_iter().map(time).sum());
        Sweep { command, counts_cut_short: true, progress }
    }

    /// Measures all targets and runs of one combination: A B A B. `each_run` gets the rows after each run that counts.
    /// Returns the rows of all targets; after an error, of those that have a run.
    pub(crate) fn measure(
        &mut self,
        benchmark: &Benchmark,
        combination: &Combination,
        each_run: &mut dyn FnMut(Vec<ResultRow>),
    ) -> (Vec<ResultRow>, Result<(), BenchError>) {
        let plan = &benchmark.plan;
        let cases: Vec<Case> = plan.targets.iter().map(|target| plan.case(target, combination)).collect();
        let holes: Vec<Option<f64>> = cases.iter().map(|case| benchmark.holes(case)).collect();
        let mut results: Vec<Vec<RunResult>> = cases.iter().map(|_| vec![]).collect();
        let rows = |results: &[Vec<RunResult>]| -> Vec<ResultRow> {
            let measured = (0..cases.len()).filter(|at| !results[*at].is_empty());
            measured.map(|at| benchmark.row(&cases[at], holes[at], &results[at])).collect()
        };
        let mut runs = (1..=plan.runs).flat_map(|number| (0..cases.len()).map(move |at| (number, at)));
        let outcome = runs.try_for_each(|(number, at)| {
            let result = self.measure_run(benchmark, &cases[at], number)?;
            let cut_short = result.cut_short;
            if !cut_short || self.counts_cut_short && result.ios() + result.stats.errors > 0 {
                results[at].push(result);
                each_run(rows(&results));
            }
            if cut_short { plan.interrupt.check() } else { Ok(()) }
        });
        (rows(&results), outcome)
    }

    /// Measures once, and shows the result.
    fn measure_run(&mut self, benchmark: &Benchmark, case: &Case<'_>, number: u16) -> Result<RunResult, BenchError> {
        let plan = case.plan;
        plan.interrupt.check()?;
        let name = describe(benchmark, case);
        self.progress.start(&name, run_time(plan));
        // With a seed all targets have the same blocks; each run has others.
        let seed = plan.seed.map_or_else(|| rand::rng().next_u64(), |seed| seed.wrapping_add(u64::from(number) - 1));
        let name = format!("{name}: run {number} of {}", plan.runs);
        let result = benchmark.interface.measure(case, seed, &self.progress).map_err(|error| match error {
            BenchError::Failed(text) => BenchError::Failed(format!("{name}: {text}")),
            other => other,
        })?;
        let verified = plan.verify.map_or(String::new(), |_| format!(", {} blocks verified", result.verified));
        let errors = result.stats.errors;
        let errors = if errors > 0 { format!(", {errors} errors") } else { String::new() };
        let cut_short = if result.cut_short { ", cut short" } else { "" };
        self.progress.end(&format!("{name}: {:.0} IOPS{errors}{verified}{cut_short}", result.iops()));
        self.warn(case, &result);
        Ok(result)
    }

    /// Tells what disturbed a run.
    fn warn(&self, Case { target, combination, .. }: &Case<'_>, result: &RunResult) {
        let name = target.column.as_ref().unwrap_or(&target.label);
        // Standard error may be closed.
        let tell = |text: &str| drop(writeln!(std::io::stderr(), "mqblk: {}: {name}: {text}", self.command));
        result.stats.messages.iter().for_each(|message| tell(message));
        let rate = combination.rate_iops;
        let rate = rate.map(|rate| RateSummary::new(std::slice::from_ref(result), rate, combination.jobs));
        if let Some(summary) = rate.filter(|summary| !summary.is_kept()) {
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

/// Returns the expected time of a run.
fn run_time(plan: &Plan) -> Duration {
    plan.warmup + plan.runtime.unwrap_or_default() + OVERHEAD
}

/// Returns a target under a combination in words.
fn describe(benchmark: &Benchmark, Case { target, combination, .. }: &Case<'_>) -> String {
    let Combination { rw, sizes, queues, targets, luns, jobs, iodepth, batch, rate_iops, .. } = combination;
    let name = match (benchmark.experiment, &target.column) {
        (Some(one), Some(column)) => format!("{}: {column}", one.name),
        _ => target.name(),
    };
    let rw = rw.name();
    let disks = if *targets * *luns > 1 { format!(" targets {targets} luns {luns}") } else { String::new() };
    let rate = rate_iops.map_or(String::new(), |rate| format!(" rate-iops {rate}"));
    format!("{name}: {rw} bs {sizes}{disks} queues {queues} jobs {jobs} iodepth {iodepth} batch {batch}{rate}")
}
