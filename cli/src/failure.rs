//! How the program says that it failed: one line on standard error, and an exit code.

use std::fmt::{Display, Write as _};
use std::io::Write as _;
use std::process::ExitCode;

/// Exit code for a command line or configuration that cannot be used.
pub const BAD_USAGE: u8 = 2;
/// Exit code for anything that goes wrong later.
pub const FAILED: u8 = 1;

/// Prints `mqblk: error` and returns `code`.
pub fn report(error: &(impl Display + ?Sized), code: u8) -> ExitCode {
    let line = format!("mqblk: {}\n", one_line(&error.to_string()));
    // Nobody is left to tell when standard error is closed.
    let _ = std::io::stderr().write_all(line.as_bytes());
    ExitCode::from(code)
}

/// Prints what a command has to show, or reports why it failed: with [`BAD_USAGE`] where `is_usage` says so.
pub fn show<E: Display + From<std::io::Error>>(done: Result<String, E>, is_usage: impl Fn(&E) -> bool) -> ExitCode {
    let printed = done.and_then(|text| match std::io::stdout().write_all(text.as_bytes()) {
        // Nobody reads: not an error, it was done.
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(E::from(error)),
        _ => Ok(()),
    });
    match printed {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => report(&error, if is_usage(&error) { BAD_USAGE } else { FAILED }),
    }
}

/// `text` with control characters written as escapes: file names may hold them.
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
    fn a_line_is_one_line() {
        assert_eq!(one_line("a\nb\u{1b}[31m é"), "a\\nb\\u{1b}[31m é");
    }
}
