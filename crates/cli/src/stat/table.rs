//! Formats a report as tables that are no wider than the terminal.

use super::columns::{DISCARDS, FLUSHES, IoColumn, UNKNOWN, columns_within};
use super::grants::GrantRates;
use super::notes::notes;
use super::rates::{LunRates, QueueRates, Report, Since, TurnRates};
use crate::table::{align, wrap};

type Column<T> = (&'static str, fn(&T) -> String);

const GRANT_COLUMNS: &[Column<GrantRates>] = &[
    ("copies/s", |rates| number(rates.copies_per_s)),
    ("/call", |rates| number(rates.copies_per_call)),
    ("maps/s", |rates| number(rates.maps_per_s)),
    ("unmaps/s", |rates| number(rates.unmaps_per_s)),
    ("%hits", |rates| number(rates.hit_percent)),
    ("indir/s", |rates| number(rates.indirect_per_s)),
    ("held", |rates| rates.held.to_string()),
    ("over", |rates| (rates.over_budget + rates.over_cap).to_string()),
    ("errors", |rates| rates.errors.to_string()),
];

const WORKER_COLUMNS: &[Column<TurnRates>] = &[
    ("%cpu", |rates| number(rates.cpu_percent)),
    ("turns/s", |rates| number(rates.turns_per_s)),
    ("empty/s", |rates| number(rates.empty_turns_per_s)),
    ("sleeps/s", |rates| number(rates.sleeps_per_s)),
    ("%asleep", |rates| number(rates.slept_percent)),
    ("splits", |rates| rates.merge_splits.to_string()),
];

/// The least width of the column of names: the rest of 80 characters beside the nine most important columns.
const NAME_WIDTH: usize = 11;
/// The share of names in the width.
const NAME_SHARE: usize = 7;

/// Formats the whole report, with an empty line at its end. No line is longer than `width`, as long as that is 80 or
/// more.
pub(super) fn format_report(heading: &str, report: &Report, width: usize) -> String {
    let seconds = report.interval_ns as f64 / 1e9;
    let what = match report.since {
        Since::Start => "averages since the daemon started, over",
        Since::Previous => "averages over",
    };
    let mut text = format!("{heading}: {what} {seconds:.2} s; times in ms\n");
    text.push_str(&devices(report, width));
    notes(report).lines().for_each(|line| text.push_str(&wrap(line, width)));
    text.push('\n');
    if report.disks.iter().any(|disk| disk.grants.is_some()) {
        text.push_str(&grants(report, width));
        text.push('\n');
    }
    text.push_str(&workers(report));
    text.push('\n');
    text
}

fn grants(report: &Report, width: usize) -> String {
    let columns: Vec<&Column<GrantRates>> = GRANT_COLUMNS.iter().collect();
    let with_grants = report.disks.iter().filter(|disk| disk.grants.is_some());
    let rows: Vec<NamedRow> = with_grants
        .map(|disk| NamedRow { name: disk.id.clone(), cells: cells(disk.grants.as_ref(), &columns) })
        .collect();
    let heads: Vec<(&str, usize)> = columns.iter().map(|(name, _)| (*name, name.len().max(6))).collect();
    format_rows("grants", &heads, &rows, width)
}

/// A row of a table whose first column has names of any length.
struct NamedRow {
    name: String,
    cells: Vec<String>,
}

/// Formats disks with their queues, and controllers with their LUNs and queues.
fn devices(report: &Report, width: usize) -> String {
    let totals = report.disks.iter().map(|disk| &disk.totals);
    let totals: Vec<_> = totals.chain(report.controllers.iter().map(|one| &one.totals)).flatten().collect();
    let mut hidden = Vec::new();
    if totals.iter().all(|rates| rates.discards_per_s <= 0.0) {
        hidden.push(DISCARDS);
    }
    if totals.iter().all(|rates| rates.flushes_per_s <= 0.0) {
        hidden.push(FLUSHES);
    }
    let names = device_names(report);
    let name_width = name_width(names.iter().map(String::as_str), width);
    let columns = columns_within(width.saturating_sub(name_width), &hidden);
    let mut rows = Vec::new();
    for disk in &report.disks {
        rows.push(NamedRow {
            name: disk.id.clone(),
            cells: columns.iter().map(|it| it.cell(disk.totals.as_ref())).collect(),
        });
        rows.extend(disk.queues.iter().map(|queue| queue_row(queue, &columns)));
    }
    for controller in &report.controllers {
        let cells = columns.iter().map(|it| it.cell(controller.totals.as_ref())).collect();
        rows.push(NamedRow { name: controller.id.clone(), cells });
        rows.extend(controller.luns.iter().map(|lun| lun_row(lun, &columns)));
        rows.extend(controller.queues.iter().map(|queue| queue_row(queue, &columns)));
    }
    let heads: Vec<(&str, usize)> = columns.iter().map(|column| (column.name, column.width)).collect();
    format_rows("disk", &heads, &rows, width)
}

fn device_names(report: &Report) -> Vec<String> {
    let disks =
        report.disks.iter().flat_map(|disk| [disk.id.clone()].into_iter().chain(disk.queues.iter().map(queue_name)));
    let controllers = report.controllers.iter().flat_map(|controller| {
        let luns = controller.luns.iter().map(lun_name);
        [controller.id.clone()].into_iter().chain(luns).chain(controller.queues.iter().map(queue_name))
    });
    disks.chain(controllers).collect()
}

/// Returns the width of the column of these names: that of the longest, limited to leave room for numbers.
fn name_width<'a>(names: impl Iterator<Item = &'a str>, width: usize) -> usize {
    let longest = names.map(|name| name.chars().count()).max().unwrap_or(0);
    longest.clamp(NAME_WIDTH, (width / NAME_SHARE).max(NAME_WIDTH))
}

/// Formats rows with these headings, each with its width. A name that is too long gets its own line.
fn format_rows(first: &str, heads: &[(&str, usize)], rows: &[NamedRow], width: usize) -> String {
    let name_width = name_width(rows.iter().map(|row| row.name.as_str()), width);
    let line = |name: &str, cells: &mut dyn Iterator<Item = &str>| {
        let mut line = format!("{name:<name_width$}");
        for (cell, (_, width)) in cells.zip(heads) {
            line.push_str(&format!(" {cell:>width$}"));
        }
        line.push('\n');
        line
    };
    let mut text = line(first, &mut heads.iter().map(|(name, _)| *name));
    for NamedRow { name, cells } in rows {
        let fits = name.chars().count() <= name_width;
        if !fits {
            text.push_str(&format!("{name}\n"));
        }
        text.push_str(&line(if fits { name } else { "" }, &mut cells.iter().map(String::as_str)));
    }
    text
}

fn queue_name(queue: &QueueRates) -> String {
    let name = match queue.role.as_str() {
        // An older daemon reports no role, and has only request queues.
        "request" | "" => format!("q{}", queue.queue),
        role => role.to_owned(),
    };
    format!("  {name} w{}", queue.worker)
}

fn queue_row(queue: &QueueRates, columns: &[&IoColumn]) -> NamedRow {
    NamedRow { name: queue_name(queue), cells: columns.iter().map(|it| it.cell(queue.rates.as_ref())).collect() }
}

fn lun_name(lun: &LunRates) -> String {
    let state = if lun.state == "ready" { String::new() } else { format!(" ({})", lun.state) };
    format!("  lun {}{state}", lun.id)
}

fn lun_row(lun: &LunRates, columns: &[&IoColumn]) -> NamedRow {
    NamedRow { name: lun_name(lun), cells: columns.iter().map(|it| it.lun_cell(lun.rates.as_ref())).collect() }
}

fn workers(report: &Report) -> String {
    let columns: Vec<&Column<TurnRates>> = WORKER_COLUMNS.iter().collect();
    let mut rows = vec![
        ["worker"].into_iter().chain(columns.iter().map(|(name, _)| *name)).map(str::to_owned).collect::<Vec<_>>(),
    ];
    rows[0].push("queues".to_owned());
    for worker in &report.workers {
        let mut row = vec![worker.worker.to_string()];
        row.extend(cells(worker.rates.as_ref(), &columns));
        row.push(worker.queues.to_string());
        rows.push(row);
    }
    align(&rows)
}

fn cells<T>(rates: Option<&T>, columns: &[&Column<T>]) -> Vec<String> {
    columns.iter().map(|(_, show)| rates.map_or(UNKNOWN.to_owned(), show)).collect()
}

/// Formats a number with 0 to 2 decimal places, fewer for larger numbers.
fn number(value: f64) -> String {
    super::columns::rate(value)
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
