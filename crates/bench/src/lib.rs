//! `mqblk bench`: a load generator over the userspace drivers.
//!
//! ```text
//! args -> benchmark: the plan of every combination, checked before anything starts
//!      -> preflight: all of them against the disks of the targets; holes
//!      -> sweep: each combination, each run, each target in turn; results survive an error and a signal (interrupt)
//!         -> run: one measurement over a guest interface (interface/)
//!            server: connects, or starts a server
//!            streams (which job works where), worker (a thread with its queues), pattern (the next block),
//!            verification
//!      -> report (rows), machine (where they were measured), table, columns (for people), experiment (published tables)
//!      -> output: the JSON after each run, the tables at the end
//! ```
//!
//! The modules form no circle. The lowest have the values of options (words), the plan as data, and the traits of a
//! device to load (device); all that a run needs is below the interfaces, and the interfaces are below the command
//! line.
#![forbid(unsafe_code)]

mod args;
mod benchmark;
mod columns;
mod connector;
mod control;
mod cpu;
mod defaults;
mod device;
mod experiment;
mod help;
mod holes;
mod interface;
mod interrupt;
mod machine;
mod output;
mod pattern;
mod plan;
pub mod plot;
mod preflight;
mod progress;
mod report;
pub mod reproduce;
mod run;
mod server;
mod streams;
mod sweep;
mod table;
#[cfg(test)]
mod tests;
mod verification;
mod words;
mod worker;

use std::io::Write;
use std::process::ExitCode;

use mqblk_driver::DriverError;

pub use args::BenchArgs;
pub use help::ARRANGEMENTS;

/// Reason why a benchmark has no result.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The options are invalid, or do not fit the disk. Exit code 2.
    #[error("{0}")]
    Usage(String),
    /// The benchmark failed. Exit code 1.
    #[error("{0}")]
    Failed(String),
    /// A signal ended it. Exit code 128 and the signal's number, as a shell has it.
    #[error("ended by signal {0}; the results so far are above")]
    Interrupted(i32),
}

impl BenchError {
    /// Makes a usage error about one option, in mqblk's usual form: the found value, and the expected one.
    fn option(name: &str, found: impl std::fmt::Display, expected: impl std::fmt::Display) -> BenchError {
        BenchError::Usage(format!("--{name}: found {found}, expected {expected}"))
    }

    /// Makes the error of something that failed.
    fn failed(what: impl std::fmt::Display, error: impl std::fmt::Display) -> BenchError {
        BenchError::Failed(format!("{what}: {error}"))
    }

    fn exit_code(&self) -> u8 {
        match self {
            BenchError::Usage(_) => 2,
            BenchError::Failed(_) => 1,
            BenchError::Interrupted(signal) => 128 + *signal as u8,
        }
    }
}

impl From<DriverError> for BenchError {
    fn from(error: DriverError) -> BenchError {
        BenchError::Failed(error.to_string())
    }
}

/// Runs the benchmark. Exit code 0; 1 when a run or a request failed, a verification found a difference, or the results
/// could not be written; 2 for a usage error; 128 and the signal's number when SIGINT, SIGTERM or SIGHUP ended it.
pub fn run(args: &BenchArgs) -> ExitCode {
    let outcome = benchmark::Benchmark::new(args).and_then(|benchmark| {
        benchmark.plan.interrupt.on_signals()?;
        match sweep::run(&benchmark)? {
            0 => Ok(0),
            errors => Err(BenchError::Failed(format!("{errors} requests failed or did not verify"))),
        }
    });
    exit("bench", outcome)
}

/// Returns the exit code of a command's outcome; writes the reason for a failure.
fn exit(command: &str, outcome: Result<u8, BenchError>) -> ExitCode {
    outcome.map_or_else(|error| fail(command, &error.to_string(), error.exit_code()), ExitCode::from)
}

/// Writes the reason for a command's failure to standard error. Returns the exit code.
pub fn fail(command: &str, why: &str, code: u8) -> ExitCode {
    // Standard error may be closed.
    let _ = writeln!(std::io::stderr(), "mqblk: {command}: {}", one_line(why));
    ExitCode::from(code)
}

/// Returns text with its first letter in upper case.
fn capitalised(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or(String::new(), |first| first.to_uppercase().chain(chars).collect())
}

/// Returns `text` with control characters escaped: file names may hold them.
fn one_line(text: &str) -> String {
    text.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect()
}
