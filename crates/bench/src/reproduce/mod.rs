//! `mqblk reproduce`: the published experiments on this machine, as ratios beside the published ones.
//!
//! ```text
//! args -> the commands of the experiments (crate::experiment), all planned before anything starts
//!      -> result: their rows, measured by crate::sweep; tables, claims and their outcomes
//!      -> files (to results/ after each combination), page
//! ```

mod args;
mod files;
mod page;
mod result;
mod scratch;
#[cfg(test)]
mod tests;

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use mqblk_core::ByteLen;

use crate::BenchError;
use crate::experiment::{ALL, Experiment};
use crate::interrupt::Interrupt;
use crate::machine::MachineDescription;
use crate::sweep::Sweep;
use files::ResultFiles;
use result::ExperimentResult;
use scratch::ScratchFile;

pub use args::ReproduceArgs;

/// Sizes of the scratch file.
const SCRATCH: ByteLen = ByteLen(1 << 30);
const QUICK_SCRATCH: ByteLen = ByteLen(256 << 20);

/// Measures the experiments. Exit code 0 with any outcome; 1 when a run or a request failed; 2 for a usage error; 130
/// after Ctrl-C, 143 after SIGTERM.
pub fn run(args: &ReproduceArgs) -> ExitCode {
    let outcome = if args.list { files::print(&list()).map(|()| 0) } else { reproduce(args) };
    crate::error::exit("reproduce", outcome)
}

/// Returns the list of all experiments.
fn list() -> String {
    ALL.iter().map(|one| format!("{:<14} {}\n{:<14} document: {}\n", one.name, one.about, "", one.document)).collect()
}

/// Checks everything, then measures. Returns the exit code.
fn reproduce(args: &ReproduceArgs) -> Result<u8, BenchError> {
    let chosen = args.chosen();
    let needs_disk = chosen.iter().any(|one| one.needs_disk());
    let folder = args.folder.as_deref().unwrap_or(&args.out);
    let size = if args.quick { QUICK_SCRATCH } else { SCRATCH };
    let image = std::path::absolute(scratch::path(folder));
    let image = image.map_err(|error| BenchError::option("folder", folder.display(), format!("a path: {error}")))?;
    let files = ResultFiles::check(args)?;
    if needs_disk {
        scratch::check(folder, size)?;
    }
    let machine = MachineDescription::read(folder);
    let interrupt = Interrupt::default();
    interrupt.on_signals()?;
    let plan = |one: &&'static Experiment| {
        let commands = one.commands(args.quick, args.runs, args.runtime, &image);
        ExperimentResult::plan(one, commands, machine.cores, &interrupt)
    };
    let mut results: Vec<ExperimentResult> = chosen.iter().map(plan).collect::<Result<_, _>>()?;
    let plans = results.iter().flat_map(|result| &result.planned).map(|benchmark| &benchmark.plan);
    let mut sweep = Sweep::new("reproduce", plans);
    // Nothing is compared to a run that was cut short.
    sweep.counts_cut_short = false;
    announce(&results, &sweep, needs_disk.then_some(size));
    let fill = |share: f64| {
        sweep.progress.start(&format!("filling the file for block-sizes: {:.0}%", share * 100.0), Duration::ZERO);
        interrupt.signal().is_none()
    };
    let scratch = needs_disk.then(|| ScratchFile::create(folder, size, fill)).transpose()?;
    let mut measured = 0;
    while measured < results.len() && interrupt.signal().is_none() {
        let result = &mut results[measured];
        result.measure(&mut sweep, |result| files.write_experiment(result))?;
        files.say(&result.text())?;
        measured += 1;
    }
    results.truncate(measured);
    drop(scratch);
    sweep.progress.finish();
    files.write_whole(&machine, &results)?;
    files.say(&summary(&results, interrupt.signal().is_some(), args))?;
    let failed = results.iter().any(|result| result.failure.is_some() || result.failed_requests() > 0);
    Ok(interrupt.signal().map_or(u8::from(failed), |signal| 128 + signal as u8))
}

/// Announces the experiments on standard error.
fn announce(planned: &[ExperimentResult], sweep: &Sweep, scratch: Option<ByteLen>) {
    let names: Vec<&str> = planned.iter().map(|result| result.experiment.name).collect();
    let rows: usize = planned.iter().map(|result| result.expected_rows).sum();
    let scratch = scratch.map_or(String::new(), |size| format!(", and a file of {size}B is made first"));
    let text = format!("{}: {rows} rows, about {}{scratch}", names.join(", "), sweep.progress.total());
    // Standard error may be closed.
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Returns the sentences of all experiments, and the paths of the results.
fn summary(results: &[ExperimentResult], interrupted: bool, args: &ReproduceArgs) -> String {
    let mut text = String::from("\n");
    if interrupted {
        text.push_str("Interrupted: the results so far are kept.\n");
    }
    results.iter().for_each(|result| text.push_str(&format!("{}\n", result.sentence())));
    text.push_str(&format!("Results are in {}", args.out.display()));
    if let Some(report) = &args.report {
        text.push_str(&format!(", the report is {}", report.display()));
    }
    text + "\n"
}
