//! Errors of the program: one line on standard error, and an exit code.

use std::fmt::{Display, Write as _};
use std::io::Write as _;
use std::process::ExitCode;

/// Exit code for an invalid command line or configuration.
pub(crate) const BAD_USAGE: u8 = 2;
/// Exit code for every other failure.
pub(crate) const FAILED: u8 = 1;

/// Prints `mqblk: error` and returns `code`.
pub(crate) fn report(error: &(impl Display + ?Sized), code: u8) -> ExitCode {
    let line = format!("mqblk: {}\n", one_line(&error.to_string()));
    // An error here means that standard error is closed: there is no other place to report it.
    let _ = std::io::stderr().write_all(line.as_bytes());
    ExitCode::from(code)
}

/// Prints a command's output, or its error. The exit code is [`BAD_USAGE`] if `is_usage` returns true for the error.
pub(crate) fn show<E: Display + From<std::io::Error>>(
    result: Result<String, E>,
    is_usage: impl Fn(&E) -> bool,
) -> ExitCode {
    let printed = result.and_then(|text| match std::io::stdout().write_all(text.as_bytes()) {
        // The reader closed the pipe. The command itself succeeded.
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(E::from(error)),
        _ => Ok(()),
    });
    match printed {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => report(&error, if is_usage(&error) { BAD_USAGE } else { FAILED }),
    }
}

/// Returns `text` with control characters escaped: file names may contain them.
fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for char in text.chars() {
        if char.is_control() {
            // Writing to a String cannot fail.
            let _ = write!(line, "{}", char.escape_default());
        } else {
            line.push(char);
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(one_line("a\nb\u{1b}[31m é"), "a\\nb\\u{1b}[31m é");
    }
}
