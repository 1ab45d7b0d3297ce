//! Reasons why a command of the benchmark fails, and its exit code.

use std::io::Write;
use std::process::ExitCode;

use mqblk_driver::DriverError;

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
    pub(crate) fn option(name: &str, found: impl std::fmt::Display, expected: impl std::fmt::Display) -> BenchError {
        BenchError::Usage(format!("--{name}: found {found}, expected {expected}"))
    }

    /// Makes the error of something that failed.
    pub(crate) fn failed(what: impl std::fmt::Display, error: impl std::fmt::Display) -> BenchError {
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

/// Returns the exit code of a command's outcome; writes the reason for a failure.
pub(crate) fn exit(command: &str, outcome: Result<u8, BenchError>) -> ExitCode {
    outcome.map_or_else(|error| fail(command, &error.to_string(), error.exit_code()), ExitCode::from)
}

/// Writes the reason for a command's failure to standard error. Returns the exit code.
pub fn fail(command: &str, why: &str, code: u8) -> ExitCode {
    // Standard error may be closed.
    let _ = writeln!(std::io::stderr(), "mqblk: {command}: {}", one_line(why));
    ExitCode::from(code)
}

/// Returns `text` with control characters escaped: file names may hold them.
fn one_line(text: &str) -> String {
    text.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect()
}
