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
//! The files form no circle. The lowest have the values of options (words), the plan as data, and the traits of a
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
mod error;
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

use std::process::ExitCode;

use error::exit;

pub use args::BenchArgs;
pub use error::{BenchError, fail};
pub use help::ARRANGEMENTS;

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
