//! `mqblk bench`: a load generator over the userspace drivers.
//!
//! ```text
//! args -> plan (every combination, judged before anything starts)
//!      -> for each combination, for each run, for each target in turn: target (connect, or spawn a server)
//!         -> load (streams: which job works where; threads that own queues; job: what is asked for; ledger: what was written),
//!            over any guest interface (interface/)
//!      -> report (a table for people, JSON for programs), or experiment (a published table's form)
//! ```
#![forbid(unsafe_code)]

mod args;
mod control;
mod cpu;
mod defaults;
mod experiment;
mod grid;
mod interface;
mod merges;
mod pattern;
mod plan;
pub mod plot;
mod progress;
mod report;
mod run;
mod streams;
mod sweep;
mod table;
mod target;
#[cfg(test)]
mod tests;
mod verification;
mod worker;

use std::io::Write;
use std::process::ExitCode;

pub use args::BenchArgs;

/// Why a benchmark did not give a result.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The options make no sense, or do not fit the disk. Exit code 2.
    #[error("{0}")]
    Usage(String),
    /// Something went wrong on the way. Exit code 1.
    #[error("{0}")]
    Failed(String),
}

impl BenchError {
    /// A usage error about one option, in the form that all of mqblk's have.
    fn option(name: &str, found: impl std::fmt::Display, expected: impl std::fmt::Display) -> BenchError {
        BenchError::Usage(format!("--{name}: found {found}, expected {expected}"))
    }
}

/// Runs the benchmark. Exit code 0; 1 when a run failed, a request failed, or a verification found a difference; 2 for bad
/// usage.
pub fn run(args: BenchArgs) -> ExitCode {
    let outcome = plan::Plan::new(&args).and_then(|plan| sweep::run(&plan));
    match outcome {
        Ok(0) => ExitCode::SUCCESS,
        Ok(errors) => fail(&format!("{errors} requests failed or did not verify"), 1),
        Err(error @ BenchError::Usage(_)) => fail(&error.to_string(), 2),
        Err(error @ BenchError::Failed(_)) => fail(&error.to_string(), 1),
    }
}

fn fail(why: &str, code: u8) -> ExitCode {
    // Nobody is left to tell when standard error is closed.
    let _ = writeln!(std::io::stderr(), "mqblk: bench: {}", one_line(why));
    ExitCode::from(code)
}

/// `text` with control characters written as escapes: file names may hold them.
fn one_line(text: &str) -> String {
    text.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect()
}
