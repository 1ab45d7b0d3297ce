//! The place of reports: one below the other, or one over the other on a terminal.

use std::io::{IsTerminal, Write};
use std::time::SystemTime;

use rustix::termios::tcgetwinsize;

/// The width and height of an unknown terminal.
const WIDTH: usize = 80;
const HEIGHT: usize = 24;
/// The largest width in use: a line of all columns is shorter.
const MAX_WIDTH: usize = 1000;

/// Moves to the upper left corner; erases from there to the end of the screen; erases to the end of the line.
const HOME: &str = "\x1b[H";
const ERASE_BELOW: &str = "\x1b[J";
const ERASE_LINE: &str = "\x1b[K";

/// Standard output.
pub(super) struct Screen {
    /// The requested width.
    width: Option<usize>,
    /// True if each report replaces the one before.
    redraws: bool,
    is_first: bool,
}

impl Screen {
    /// `redraw`: reports replace each other if standard output is a terminal that can do so.
    pub(super) fn new(width: Option<usize>, redraw: bool) -> Screen {
        let is_dumb = std::env::var_os("TERM").is_none_or(|term| term.is_empty() || term == "dumb");
        Screen { width, redraws: redraw && std::io::stdout().is_terminal() && !is_dumb, is_first: true }
    }

    /// Returns the width for reports: the requested one, that of the terminal, `COLUMNS`, or 80.
    pub(super) fn width(&self) -> usize {
        let from_environment = || std::env::var("COLUMNS").ok()?.parse().ok().filter(|width| *width > 0);
        let terminal = || Some(size()?.0);
        self.width.or_else(terminal).or_else(from_environment).unwrap_or(WIDTH).min(MAX_WIDTH)
    }

    /// Prints a report.
    pub(super) fn print(&mut self, text: &str) -> std::io::Result<()> {
        let shown = match self.redraws {
            true => redrawn(text, size().map_or(HEIGHT, |(_, height)| height), self.is_first),
            false => text.to_owned(),
        };
        self.is_first = false;
        let mut stdout = std::io::stdout().lock();
        stdout.write_all(shown.as_bytes())?;
        stdout.flush()
    }
}

/// Returns the columns and lines of standard output's terminal.
fn size() -> Option<(usize, usize)> {
    let size = tcgetwinsize(std::io::stdout()).ok()?;
    (size.ws_col > 0 && size.ws_row > 0).then_some((size.ws_col.into(), size.ws_row.into()))
}

/// Returns the text that draws a report over the one before. Counts the lines that do not fit on a terminal of this
/// height.
fn redrawn(text: &str, height: usize, is_first: bool) -> String {
    let lines: Vec<&str> = text.trim_end_matches('\n').lines().collect();
    // The last line of the screen stays empty, for the cursor.
    let room = height.saturating_sub(1).max(1);
    let mut drawn = HOME.to_owned();
    if is_first {
        drawn.push_str(ERASE_BELOW);
    }
    let shown = if lines.len() > room { room - 1 } else { lines.len() };
    lines[..shown].iter().for_each(|line| drawn.extend([line, ERASE_LINE, "\n"]));
    if shown < lines.len() {
        drawn.push_str(&format!("{} more lines: a higher terminal, --disk or -z{ERASE_LINE}\n", lines.len() - shown));
    }
    drawn + ERASE_BELOW
}

/// Returns the time of day in UTC, as in RFC 3339.
pub(super) fn timestamp() -> String {
    humantime::format_rfc3339_seconds(SystemTime::now()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_drawn_over_the_one_before() {
        assert_eq!(redrawn("a\n\nb\n\n", 24, false), "\x1b[Ha\x1b[K\n\x1b[K\nb\x1b[K\n\x1b[J");
        assert!(redrawn("a\n", 24, true).starts_with("\x1b[H\x1b[J"));
    }

    #[test]
    fn a_report_never_scrolls_the_screen() {
        let text: String = (0..30).map(|number| format!("{number}\n")).collect();
        let drawn = redrawn(&text, 10, false);
        assert_eq!(drawn.matches('\n').count(), 9);
        assert!(drawn.contains("\n22 more lines"), "{drawn:?}");
        assert_eq!(redrawn(&text, 1, false).matches('\n').count(), 1);
        assert_eq!(redrawn(&text, 31, false).matches('\n').count(), 30);
    }
}
