//! The end of a daemon's log, for the output of failed tests.

/// Number of lines.
const LINES: usize = 40;

/// Returns the last lines of a log, after the lines about panics further up.
pub fn log_end(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    let (before, end) = lines.split_at(lines.len().saturating_sub(LINES));
    let panics = before.iter().filter(|line| line.contains("panicked at"));
    panics.chain(end).copied().collect::<Vec<_>>().join("\n")
}

/// Prints the end of a log if this thread's test has failed, as part of the test's output, which CI repeats at its end.
#[allow(clippy::print_stderr, reason = "the test harness keeps it with the failed test's message")]
pub fn print_if_failed(log: impl FnOnce() -> String) {
    if std::thread::panicking() {
        eprintln!("the daemon's log ends so:\n{}", log_end(&log()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_has_the_last_lines_and_all_panics() {
        let line = |at: usize| if at == 3 || at == 98 { format!("{at} panicked at x") } else { at.to_string() };
        let log: Vec<String> = (0..100).map(line).collect();
        let end = log_end(&log.join("\n"));
        let lines: Vec<&str> = end.lines().collect();
        assert_eq!((lines.len(), lines[0], lines[1], lines[40]), (41, "3 panicked at x", "60", "99"));
        assert_eq!(log_end("one"), "one");
    }
}
