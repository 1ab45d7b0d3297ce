//! The sweep: every combination, every run, the targets in turn.

use std::io::Write;

use rand::Rng;

use crate::BenchError;
use crate::plan::{Combination, Plan, Target};
use crate::progress::ProgressDisplay;
use crate::report::{ResultRow, write_json};
use crate::run::{RunInput, RunResult};
use crate::table::table;

/// Measures everything and prints the results. Returns the number of requests that failed or did not verify.
///
/// # Errors
/// The first [`BenchError`], after the results so far were printed.
pub(crate) fn run(plan: &Plan) -> Result<u64, BenchError> {
    let runs = plan.combinations.len() * plan.targets.len() * usize::from(plan.runs);
    let mut progress = ProgressDisplay::new(runs as u64);
    let mut rows: Vec<Vec<ResultRow>> = vec![];
    let mut outcome = Ok(());
    for combination in &plan.combinations {
        match measure(plan, combination, &mut progress) {
            Ok(group) => rows.push(group),
            Err(error) => {
                outcome = Err(error);
                break;
            }
        }
    }
    progress.finish();
    if !rows.is_empty() {
        // Standard output may be closed.
        let text = match plan.experiment {
            Some(experiment) => experiment.render(plan, &rows),
            None => table(plan, &rows),
        };
        let _ = std::io::stdout().write_all(text.as_bytes());
    }
    if let Some(path) = plan.json.as_ref().filter(|_| !rows.is_empty()) {
        write_json(path, rows.iter().flatten())?;
    }
    outcome?;
    Ok(rows.iter().flatten().map(|row| row.errors).sum())
}

/// Measures all targets and runs of one combination: A B A B.
fn measure(
    plan: &Plan,
    combination: &Combination,
    progress: &mut ProgressDisplay,
) -> Result<Vec<ResultRow>, BenchError> {
    let columns: Vec<(&Target, Combination)> =
        plan.targets.iter().map(|target| (target, target.combination(combination))).collect();
    let mut results: Vec<Vec<RunResult>> = columns.iter().map(|_| vec![]).collect();
    for run in 1..=plan.runs {
        for ((target, combination), results) in columns.iter().zip(&mut results) {
            let what = describe(combination, target);
            progress.start(&what);
            let seed = rand::rng().next_u64();
            let result = plan.interface.measure(&RunInput { plan, combination, target, seed, progress })?;
            let verified = match plan.verify {
                Some(_) => format!(", {} blocks verified", result.verified),
                None => String::new(),
            };
            progress.end(&format!("{what}: run {run} of {}: {:.0} IOPS{verified}", plan.runs, result.iops()));
            for message in &result.messages {
                let _ = writeln!(std::io::stderr(), "mqblk: bench: {}: {message}", target.label);
            }
            results.push(result);
        }
    }
    let rows = columns.iter().zip(results);
    Ok(rows.map(|((target, combination), results)| ResultRow::new(plan, target, combination, &results)).collect())
}

fn describe(combination: &Combination, target: &Target) -> String {
    let Combination { rw, sizes, queues, targets, luns, jobs, iodepth, batch, .. } = combination;
    let poll = if target.poll == "unknown" { String::new() } else { format!(" poll {}", target.poll) };
    let grants = target.grants.as_ref().filter(|grants| *grants != "unknown");
    let grants = grants.map_or(String::new(), |grants| format!(" grants {grants}"));
    let merge = if target.column.is_some() { format!(" merge {}", target.merge) } else { String::new() };
    let rw = rw.name();
    let disks = if *targets * *luns > 1 { format!(" targets {targets} luns {luns}") } else { String::new() };
    format!(
        "{}{poll}{grants}{merge}: {rw} bs {sizes}{disks} queues {queues} jobs {jobs} iodepth {iodepth} batch {batch}",
        target.label
    )
}
