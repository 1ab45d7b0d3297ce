//! The sweep: every combination, every run, the targets in turn.

use std::io::Write;

use rand::Rng;

use crate::BenchError;
use crate::output::{JsonOutput, write_text};
use crate::plan::{Combination, Plan, Target};
use crate::preflight;
use crate::progress::ProgressDisplay;
use crate::report::{RateSummary, ResultRow};
use crate::run::{RunInput, RunResult};
use crate::table::table;

/// Measures everything and prints the results, as far as they were measured. Returns the number of requests that failed or did not
/// verify.
///
/// # Errors
/// The first [`BenchError`], after the results so far were printed and written.
pub(crate) fn run(plan: &Plan) -> Result<u64, BenchError> {
    let mut json = JsonOutput::open(plan.json.as_deref())?;
    preflight::check(plan)?;
    let mut progress = ProgressDisplay::new(plan.run_count());
    let mut rows: Vec<Vec<ResultRow>> = vec![];
    let mut outcome = Ok(());
    let mut partial = vec![];
    for combination in &plan.combinations {
        let group = measure_group(plan, combination, &mut progress, &mut |current| json.update(&rows, current));
        match group.failure {
            None => rows.push(group.rows),
            Some(error) => {
                (outcome, partial) = (Err(error), group.rows);
                break;
            }
        }
        json.update(&rows, &[]);
    }
    progress.finish();
    let printed = write_text(&json, &tables(plan, &rows, &partial));
    rows.push(partial);
    let written = json.finish(&rows);
    if let (Err(error), true) = (&written, outcome.is_err() || printed.is_err()) {
        // The error that is returned is another one.
        let _ = writeln!(std::io::stderr(), "mqblk: bench: {error}");
    }
    outcome.and(printed).and(written)?;
    Ok(rows.iter().flatten().map(|row| row.errors).sum())
}

/// Returns the tables of the rows of all combinations that were measured, and of one that was not finished.
fn tables(plan: &Plan, rows: &[Vec<ResultRow>], partial: &[ResultRow]) -> String {
    let mut text = match (plan.experiment, rows) {
        (_, []) => String::new(),
        (Some(experiment), rows) => experiment.render(plan, rows),
        (None, rows) => table(plan, rows),
    };
    if !partial.is_empty() {
        // An experiment's table has a cell for each target, and here some have none.
        text.push_str("\nNot finished:\n");
        text.push_str(&table(plan, &[partial.to_vec()]));
    }
    text
}

/// What was measured of one combination.
#[derive(Debug)]
pub(crate) struct MeasuredGroup {
    /// The rows of all targets; after a failure, of those that have a run.
    pub rows: Vec<ResultRow>,
    /// Why it is not finished.
    pub failure: Option<BenchError>,
}

/// Measures all targets and runs of one combination: A B A B. `after_run` gets the rows so far after each run.
pub(crate) fn measure_group(
    plan: &Plan,
    combination: &Combination,
    progress: &mut ProgressDisplay,
    after_run: &mut dyn FnMut(&[ResultRow]),
) -> MeasuredGroup {
    let columns: Vec<(&Target, Combination)> =
        plan.targets.iter().map(|target| (target, target.combination(combination))).collect();
    let mut results: Vec<Vec<RunResult>> = columns.iter().map(|_| vec![]).collect();
    let rows = |results: &[Vec<RunResult>]| -> Vec<ResultRow> {
        let measured = columns.iter().zip(results).filter(|(_, results)| !results.is_empty());
        measured.map(|((target, combination), results)| ResultRow::new(plan, target, combination, results)).collect()
    };
    for run in 1..=plan.runs {
        for (index, (target, combination)) in columns.iter().enumerate() {
            let outcome = measure_run(plan, (target, combination), run, progress);
            let failure = match outcome {
                Ok(result) => {
                    let cut_short = result.cut_short;
                    if !cut_short || result.ios + result.errors > 0 {
                        results[index].push(result);
                        after_run(&rows(&results));
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
    plan: &Plan,
    (target, combination): (&Target, &Combination),
    run: u16,
    progress: &mut ProgressDisplay,
) -> Result<RunResult, BenchError> {
    plan.interrupt.check()?;
    let what = describe(combination, target);
    progress.start(&what);
    // With a seed all targets have the same blocks, and each run others.
    let seed = plan.seed.map_or_else(|| rand::rng().next_u64(), |seed| seed.wrapping_add(u64::from(run) - 1));
    let named = |error| match error {
        BenchError::Failed(text) => BenchError::Failed(format!("{what}: run {run} of {}: {text}", plan.runs)),
        other => other,
    };
    let result = plan.interface.measure(&RunInput { plan, combination, target, seed, progress }).map_err(named)?;
    let verified = match plan.verify {
        Some(_) => format!(", {} blocks verified", result.verified),
        None => String::new(),
    };
    let errors = if result.errors > 0 { format!(", {} errors", result.errors) } else { String::new() };
    let cut_short = if result.cut_short { ", cut short" } else { "" };
    progress.end(&format!(
        "{what}: run {run} of {}: {:.0} IOPS{errors}{verified}{cut_short}",
        plan.runs,
        result.iops()
    ));
    // Standard error may be closed.
    let tell = |text: &str| drop(writeln!(std::io::stderr(), "mqblk: bench: {}: {text}", target.label));
    result.messages.iter().for_each(|message| tell(message));
    if let Some(rate) = combination.rate_iops {
        let summary = RateSummary::new(std::slice::from_ref(&result), rate, combination.jobs);
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
    Ok(result)
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
