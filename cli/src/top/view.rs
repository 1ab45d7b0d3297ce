//! Draws the screen.

use mqblk_admin::model::Stat;
use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Borders, Clear, Paragraph, Row, Table, TableState, Wrap};

use super::app::{App, TopView};
use super::rows::{DataRow, NAME, headings};
use crate::explain;
use crate::stat::rates::Report;

/// The smallest terminal.
const COLUMNS: u16 = 60;
const LINES: u16 = 12;
/// Lines of the pane with reasons, its border included.
const REASONS: u16 = 7;
/// The least width of names, and the part of the terminal that they may have.
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

/// Draws everything.
pub(super) fn draw(app: &App, frame: &mut Frame<'_>) {
    let area = frame.area();
    if area.width < COLUMNS || area.height < LINES {
        let text =
            format!("found a terminal of {}x{}, expected {COLUMNS}x{LINES} or more; q quits", area.width, area.height);
        frame.render_widget(Paragraph::new(text).wrap(Wrap { trim: true }), area);
        return;
    }
    let [heading, tabs, table, reasons, keys] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Min(3),
        Constraint::Length(REASONS),
        Constraint::Length(1),
    ])
    .areas(area);
    let rows = app.rows();
    let selected = app.selected_row(&rows);
    draw_heading(app, frame, heading);
    frame.render_widget(Paragraph::new(tab_line(app)), tabs);
    draw_table(app, frame, table, &rows, selected);
    draw_reasons(app, frame, reasons, rows.get(selected));
    frame.render_widget(Paragraph::new(KEYS).style(Style::new().add_modifier(Modifier::DIM)), keys);
    if app.shows_help {
        draw_help(frame, area);
    }
}

fn draw_heading(app: &App, frame: &mut Frame<'_>, area: Rect) {
    let (text, style) = match (&app.error, &app.now, &app.report) {
        (Some(why), ..) => (why.clone(), Style::new().fg(Color::Red).add_modifier(Modifier::BOLD)),
        (None, Some(stat), Some(report)) => {
            (summary(stat, report, app.paused), Style::new().add_modifier(Modifier::BOLD))
        }
        _ => (String::new(), Style::new()),
    };
    frame.render_widget(Paragraph::new(text).style(style), area);
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

fn tab_line(app: &App) -> Line<'static> {
    let mut spans = Vec::new();
    for (view, number) in TopView::ALL.into_iter().zip(1..) {
        let style = if view == app.view { Style::new().add_modifier(Modifier::REVERSED) } else { Style::new() };
        spans.push(Span::styled(format!(" {number} {} ", view.title()), style));
    }
    let order = if app.reverse { ", reversed" } else { "" };
    let idle = if app.skip_idle { ", without idle ones" } else { "" };
    spans.push(Span::raw(format!("  by {}{order}{idle}; times in ms", app.sort_column())));
    Line::from(spans)
}

fn draw_table(app: &App, frame: &mut Frame<'_>, area: Rect, rows: &[DataRow], selected: usize) {
    let width = usize::from(area.width);
    let longest = rows.iter().map(|row| row.name.chars().count()).max().unwrap_or(0);
    let name_width = longest.clamp(NAME_WIDTH, (width / NAME_SHARE).max(NAME_WIDTH));
    let room = width.saturating_sub(name_width);
    let columns = headings(app.view, room);
    let marked = |name: &str| {
        if name == app.sort_column() { Style::new().add_modifier(Modifier::UNDERLINED) } else { Style::new() }
    };
    let right = |text: String| Line::from(text).alignment(Alignment::Right);
    // A list of devices reads from the left.
    let cell = |text: String, name: &str| if name == "of" { Line::from(text) } else { right(text) };
    let name = Line::from(app.view.title().trim_end_matches('s')).style(marked(NAME));
    let head =
        [name].into_iter().chain(columns.iter().map(|(name, _)| cell((*name).to_owned(), name).style(marked(name))));
    let head = Row::new(head).style(Style::new().add_modifier(Modifier::BOLD));
    let body = rows.iter().map(|row| {
        let cells = row.cells(room).into_iter().zip(&columns).map(|(text, (name, _))| cell(text, name));
        Row::new([Line::from(shortened(&row.name, name_width))].into_iter().chain(cells))
    });
    let widths = [name_width].into_iter().chain(columns.iter().map(|(_, width)| *width));
    let widths = widths.map(|width| Constraint::Length(u16::try_from(width).unwrap_or(u16::MAX)));
    let table = Table::new(body, widths).header(head).column_spacing(1);
    let table = table.row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    let mut state = TableState::default().with_selected((!rows.is_empty()).then_some(selected));
    frame.render_stateful_widget(table, area, &mut state);
}

/// Returns a name of at most so many characters: its begin and its end, which differ most often.
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

fn draw_reasons(app: &App, frame: &mut Frame<'_>, area: Rect, row: Option<&DataRow>) {
    let (title, sentences) = match (row, &app.now, &app.report) {
        (Some(DataRow { subject: Some(id), .. }), Some(stat), Some(report)) => {
            (format!(" {id} "), explain::sentences(stat, report, id))
        }
        (Some(row), ..) => (format!(" {} ", row.name), Vec::new()),
        _ => (String::new(), Vec::new()),
    };
    let lines: Vec<Line<'_>> = sentences.iter().map(|sentence| Line::from(format!("* {sentence}"))).collect();
    let block = Block::new().borders(Borders::TOP).title(title);
    frame.render_widget(Paragraph::new(lines).wrap(Wrap { trim: false }).block(block), area);
}

fn draw_help(frame: &mut Frame<'_>, area: Rect) {
    let lines = HELP.lines().count() as u16;
    let width = HELP.lines().map(str::len).max().unwrap_or(0) as u16;
    let (width, height) = ((width + 4).min(area.width), (lines + 2).min(area.height));
    let middle = Rect { x: (area.width - width) / 2, y: (area.height - height) / 2, width, height };
    frame.render_widget(Clear, middle);
    frame.render_widget(Paragraph::new(HELP).block(Block::bordered().title(" keys ")), middle);
}
