//! The content of the screen.

use mqblk_admin::model::Stat;

use super::app::App;
use super::rows::{DataRow, NAME, TopView, headings};
use super::terminal::{ALARM, BOLD, DIM, PLAIN, REVERSED, ScreenLine, TextStyle, UNDERLINED};
use crate::explain;
use crate::stat::rates::Report;

/// The smallest terminal.
const COLUMNS: usize = 60;
const LINES: usize = 12;
/// Lines of the pane with reasons, its border included.
const REASONS: usize = 7;
/// The least width of names, and their share of the terminal.
const NAME_WIDTH: usize = 11;
const NAME_SHARE: usize = 7;

const KEYS: &str = "1 2 3 view  up/down select  < > sort  r reverse  z idle  p pause  h help  q quit";
const HELP: &str = "1, 2, 3, Tab    disks, queues, workers
up, down, page  select a row
<, >            sort by the column to the left or right
r               reverse the order
z               leave out what has nothing to do
p, space        pause
q, Esc, Ctrl-C  quit";

/// Returns the lines of a screen of this size.
pub(super) fn lines(app: &App, width: usize, height: usize) -> Vec<ScreenLine> {
    if width < COLUMNS || height < LINES {
        let text = format!("found a terminal of {width}x{height}, expected {COLUMNS}x{LINES} or more; q quits");
        return wrapped(&text, width.max(1)).into_iter().take(height).map(|line| vec![(line, PLAIN)]).collect();
    }
    let rows = app.rows();
    let selected = app.selected_row(&rows);
    let mut lines = vec![heading(app), tabs(app)];
    lines.extend(table(app, width, height - REASONS - 3, &rows, selected));
    lines.resize(height - REASONS - 1, vec![]);
    lines.extend(reasons(app, width, rows.get(selected)));
    lines.resize(height - 1, vec![]);
    lines.push(vec![(KEYS.to_owned(), DIM)]);
    if app.shows_help {
        show_help(&mut lines, width);
    }
    lines
}

fn heading(app: &App) -> ScreenLine {
    match (&app.error, &app.now, &app.report) {
        (Some(why), ..) => vec![(why.clone(), ALARM)],
        (None, Some(stat), Some(report)) => vec![(summary(stat, report, app.paused), BOLD)],
        _ => vec![],
    }
}

fn summary(stat: &Stat, report: &Report, paused: bool) -> String {
    let seconds = stat.uptime_ns / 1_000_000_000;
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    let count = |number: usize, noun: &str| format!("{number} {noun}{}", if number == 1 { "" } else { "s" });
    let mut devices = vec![count(stat.disks.len(), "disk")];
    if !stat.controllers.is_empty() {
        devices.push(count(stat.controllers.len(), "controller"));
    }
    devices.push(count(stat.workers.len(), "worker"));
    let paused = if paused { "  PAUSED" } else { "" };
    format!(
        "mqblk {}  up {days}d {hours:02}:{minutes:02}:{:02}  {}  over {:.1} s{paused}",
        stat.version,
        seconds % 60,
        devices.join(", "),
        report.interval_ns as f64 / 1e9
    )
}

fn tabs(app: &App) -> ScreenLine {
    let tab = |(view, number): (TopView, usize)| {
        (format!(" {number} {} ", view.title()), if view == app.view { REVERSED } else { PLAIN })
    };
    let order = if app.reverse { ", reversed" } else { "" };
    let idle = if app.skip_idle { ", without idle ones" } else { "" };
    let order = (format!("  by {}{order}{idle}; times in ms", app.sort_column()), PLAIN);
    TopView::ALL.into_iter().zip(1..).map(tab).chain([order]).collect()
}

/// Returns the headings and as many rows as fit, including the selected one.
fn table(app: &App, width: usize, height: usize, rows: &[DataRow], selected: usize) -> Vec<ScreenLine> {
    let longest = rows.iter().map(|row| row.name.chars().count()).max().unwrap_or(0);
    let name_width = longest.clamp(NAME_WIDTH, (width / NAME_SHARE).max(NAME_WIDTH));
    let room = width.saturating_sub(name_width);
    let columns = headings(app.view, room);
    let marked = |name: &str| if name == app.sort_column() { UNDERLINED } else { BOLD };
    // A list of devices is left-aligned.
    let cell = |text: &str, (name, width): (&str, usize)| match name {
        "of" => format!(" {text:<width$}"),
        _ => format!(" {:>width$}", text.chars().take(width).collect::<String>()),
    };
    let name = app.view.title().trim_end_matches('s');
    let mut head: ScreenLine = vec![(name.to_owned(), marked(NAME)), (" ".repeat(name_width - name.len()), PLAIN)];
    for column in &columns {
        let text = cell(column.0, *column);
        let blanks = text.len() - text.trim_start().len();
        head.extend([(text[..blanks].to_owned(), PLAIN), (text[blanks..].to_owned(), marked(column.0))]);
    }
    let shown = height - 1;
    let first = (selected + 1).saturating_sub(shown);
    let line = |(at, row): (usize, &DataRow)| {
        let mut text = format!("{:<name_width$}", shortened(&row.name, name_width));
        row.cells(room).iter().zip(&columns).for_each(|(value, column)| text.push_str(&cell(value, *column)));
        let style: TextStyle = if at == selected { REVERSED } else { PLAIN };
        vec![(format!("{text:<width$}"), style)]
    };
    let body = rows.iter().enumerate().skip(first).take(shown).map(line);
    std::iter::once(head).chain(body).collect()
}

/// Returns a name of at most this many characters: its beginning and its end, which differ most often.
fn shortened(name: &str, width: usize) -> String {
    let count = name.chars().count();
    if count <= width {
        return name.to_owned();
    }
    let end = width / 2;
    let begin: String = name.chars().take(width - end - 1).collect();
    let rest: String = name.chars().skip(count - end).collect();
    format!("{begin}~{rest}")
}

/// Returns the sentences on the selected row, below a line with its name.
fn reasons(app: &App, width: usize, row: Option<&DataRow>) -> Vec<ScreenLine> {
    let (title, sentences) = match (row, &app.now, &app.report) {
        (Some(DataRow { subject: Some(id), .. }), Some(stat), Some(report)) => {
            (format!(" {id} "), explain::sentences(stat, report, id))
        }
        (Some(row), ..) => (format!(" {} ", row.name), Vec::new()),
        _ => (String::new(), Vec::new()),
    };
    let rule = "─".repeat(width.saturating_sub(title.chars().count()));
    let sentences = sentences.iter().flat_map(|sentence| wrapped(&format!("* {sentence}"), width));
    std::iter::once(title + &rule).chain(sentences).take(REASONS).map(|line| vec![(line, PLAIN)]).collect()
}

/// Puts the keys into a box in the middle of the screen.
fn show_help(lines: &mut [ScreenLine], width: usize) {
    let widest = HELP.lines().map(str::len).max().unwrap_or(0);
    let mut boxed = vec![format!("┌{:─<1$}┐", " keys ", widest + 2)];
    boxed.extend(HELP.lines().map(|line| format!("│ {line:<widest$} │")));
    boxed.push(format!("└{}┘", "─".repeat(widest + 2)));
    let (left, top) = ((width - widest - 4) / 2, lines.len().saturating_sub(boxed.len()) / 2);
    for (line, text) in lines.iter_mut().skip(top).zip(boxed) {
        let before: String =
            line.iter().flat_map(|(part, _)| part.chars()).chain(std::iter::repeat(' ')).take(left).collect();
        let after: String = line.iter().flat_map(|(part, _)| part.chars()).skip(left + widest + 4).collect();
        *line = vec![(before + &text + &after, PLAIN)];
    }
}

/// Returns text in lines of at most `width` characters, broken at blanks where possible.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let used = lines.last().map_or(0, |line| line.chars().count());
        let length = word.chars().count();
        match lines.last_mut() {
            Some(line) if used > 0 && used + 1 + length <= width => line.extend([" ", word]),
            Some(line) if used == 0 && length <= width => line.push_str(word),
            _ => {
                let letters: Vec<char> = word.chars().collect();
                lines.extend(letters.chunks(width).map(|part| part.iter().collect::<String>()));
                lines.retain(|line| !line.is_empty());
            }
        }
    }
    lines
}
