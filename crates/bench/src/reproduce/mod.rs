//! `mqblk reproduce`: the published experiments on this machine, as ratios beside the published ones.
//!
//! ```text
//! args -> the commands of the experiments (crate::experiment), all planned before anything starts
//!      -> session: the plans, run by run; rows to results/ after each combination
//!      -> result: tables, claims and their outcomes -> files, page
//! ```

mod args;
mod files;
mod machine;
mod page;
mod result;
mod scratch;
mod session;
#[cfg(test)]
mod tests;

use std::io::Write;
use std::process::ExitCode;

use mqblk_core::ByteLen;

use crate::BenchError;
use crate::experiment::{ALL, ExperimentScale};
use files::ResultFiles;
use machine::MachineDescription;
use result::ExperimentResult;
use scratch::ScratchFile;
use session::ReproductionSession;

pub use args::ReproduceArgs;
/// Sizes of the scratch file.
const SCRATCH: ByteLen = ByteLen(1 << 30);
const QUICK_SCRATCH: ByteLen = ByteLen(256 << 20);

/// Measures the experiments. Exit code 0 with any outcome; 1 when a run or a request failed; 2 for a usage error; 130
/// after Ctrl-C, 143 after SIGTERM.
pub fn run(args: &ReproduceArgs) -> ExitCode {
    if args.list {
        return list();
    }
    match reproduce(args) {
        Ok(code) => ExitCode::from(code),
        Err(error) => crate::fail("reproduce", &error.to_string(), error.exit_code()),
    }
}

fn list() -> ExitCode {
    let mut text = String::new();
    for one in &ALL {
        text.push_str(&format!("{:<14} {}\n{:<14} document: {}\n", one.name, one.about, "", one.document));
    }
    match std::io::stdout().write_all(text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Checks everything, then measures. Returns the exit code.
fn reproduce(args: &ReproduceArgs) -> Result<u8, BenchError> {
    let chosen = args.chosen();
    let needs_disk = chosen.iter().any(|one| one.needs_disk);
    let folder = args.folder.as_deref().unwrap_or(&args.out);
    let size = if args.quick { QUICK_SCRATCH } else { SCRATCH };
    let image = std::path::absolute(scratch::path(folder));
    let image = image.map_err(|error| BenchError::option("folder", folder.display(), format!("a path: {error}")))?;
    let scale = ExperimentScale { quick: args.quick, runs: args.runs, runtime: args.runtime, image };
    let mut files = ResultFiles::check(args)?;
    let mut session = ReproductionSession::new(&chosen, &scale)?;
    if needs_disk {
        scratch::check(folder, size)?;
    }
    let machine = MachineDescription::read(folder);
    session.announce(needs_disk.then_some(size));
    let scratch = needs_disk.then(|| ScratchFile::create(folder, size, |share| session.filling(share))).transpose()?;
    let mut results: Vec<ExperimentResult> = vec![];
    for one in &chosen {
        if session.is_interrupted() {
            break;
        }
        let result = session.measure(one, machine.cores, &mut |result| files.write_experiment(result))?;
        files.say(&result.text())?;
        results.push(result);
    }
    drop(scratch);
    session.finish();
    files.write_whole(&machine, &results)?;
    files.say(&summary(&results, session.is_interrupted(), args))?;
    let failed = results.iter().any(|result| result.failure.is_some() || result.failed_requests() > 0);
    Ok(session.signal().map_or(u8::from(failed), |signal| 128 + signal as u8))
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
