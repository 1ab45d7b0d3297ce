//! Formats a report as tables.

use mqblk_admin::model::{ConnectionsStat, Health, TenantBudgetStat, ThrottleStat};

use super::grants::GrantRates;
use super::rates::{IoRates, LunRates, QueueRates, Report, Since, TurnRates};
use crate::call::settings_text;
use crate::table::align;

/// The table cell for an unknown value.
const UNKNOWN: &str = "-";

type Column<T> = (&'static str, fn(&T) -> String);

/// The columns of disks and queues. Requests and bytes are the guest's: the storage gets fewer requests where requests were merged.
const IO_COLUMNS: &[Column<IoRates>] = &[
    ("r/s", |rates| number(rates.reads_per_s)),
    ("w/s", |rates| number(rates.writes_per_s)),
    (DISCARDS, |rates| number(rates.discards_per_s)),
    (FLUSHES, |rates| number(rates.flushes_per_s)),
    ("rrqm/s", |rates| number(rates.read_merges_per_s)),
    ("wrqm/s", |rates| number(rates.write_merges_per_s)),
    ("rkB/s", |rates| number(rates.read_bytes_per_s / KIB)),
    ("wkB/s", |rates| number(rates.written_bytes_per_s / KIB)),
    ("avgrq-sz(512B)", |rates| number(rates.request_sectors)),
    ("avgqu-sz", |rates| number(rates.queue_size)),
    ("await-us", |rates| number(rates.await_us)),
    ("queued-us", |rates| number(rates.queued_us)),
    ("device-us", |rates| number(rates.device_us)),
    ("publish-us", |rates| number(rates.publish_us)),
    ("p99-us", |rates| rates.p99_us.map_or(UNKNOWN.to_owned(), number)),
    ("%poll", |rates| number(rates.poll_percent)),
    ("kicks/s", |rates| number(rates.kicks_per_s)),
    ("calls/s", |rates| number(rates.calls_per_s)),
    ("inflight", |rates| rates.in_flight.to_string()),
    ("oldest-ms", |rates| rates.oldest_ms.map_or(UNKNOWN.to_owned(), |ms| ms.to_string())),
    ("errors", |rates| rates.errors.to_string()),
];
/// Columns that are shown only if there are any.
const DISCARDS: &str = "d/s";
const FLUSHES: &str = "f/s";

const GRANT_COLUMNS: &[Column<GrantRates>] = &[
    ("copies/s", |rates| number(rates.copies_per_s)),
    ("per call", |rates| number(rates.copies_per_call)),
    ("maps/s", |rates| number(rates.maps_per_s)),
    ("unmaps/s", |rates| number(rates.unmaps_per_s)),
    ("%hits", |rates| number(rates.hit_percent)),
    ("indirect/s", |rates| number(rates.indirect_per_s)),
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

/// iostat's kB.
const KIB: f64 = 1024.0;
/// Formats the whole report, with an empty line at its end.
pub(super) fn format_report(version: &str, report: &Report) -> String {
    let seconds = report.interval_ns as f64 / 1e9;
    let what = match report.since {
        Since::Start => "averages since the daemon started, over",
        Since::Previous => "averages over",
    };
    let mut text = format!("mqblk {version}: {what} {seconds:.2} s\n");
    text.push_str(&disks(report));
    text.push_str(&health_lines(report));
    text.push_str(&throttle_lines(report));
    text.push_str(&connection_lines(report));
    text.push_str(&budget_lines(report));
    text.push('\n');
    if report.disks.iter().any(|disk| disk.grants.is_some()) {
        text.push_str(&grants(report));
        text.push('\n');
    }
    text.push_str(&workers(report));
    text.push('\n');
    text
}

/// Formats a line for each disk and LUN that is stopped or retries requests. LUNs that share a logical unit have a line each.
fn health_lines(report: &Report) -> String {
    lines_by_health(report, health_line)
}

/// Formats a line for each disk and LUN with limits. LUNs that share a logical unit have a line each.
fn throttle_lines(report: &Report) -> String {
    lines_by_health(report, throttle_line)
}

fn lines_by_health(report: &Report, line: fn(&str, &str, &Health) -> Option<String>) -> String {
    let disks = report.disks.iter().map(|disk| ("disk", &disk.id, &disk.health));
    let luns = report.controllers.iter().flat_map(|controller| &controller.luns);
    let all = disks.chain(luns.map(|lun| ("lun", &lun.id, &lun.health)));
    all.filter_map(|(kind, id, health)| line(kind, id, health)).collect()
}

/// Formats the line of a disk with limits.
fn throttle_line(kind: &str, id: &str, health: &Health) -> Option<String> {
    let ThrottleStat { limits, throttled, throttled_ns, waiting } = health.throttle.as_ref()?;
    let mean_us = *throttled_ns as f64 / 1e3 / (*throttled).max(1) as f64;
    let so_far = match throttled {
        0 => "none throttled so far".to_owned(),
        throttled => format!("{throttled} throttled so far, for {} us on average", number(mean_us)),
    };
    Some(format!("{kind} {id} is limited ({}): {so_far}, {waiting} waiting\n", settings_text(limits)))
}

/// Formats a line for each disk and LUN whose storage is not reached, or was not, or has replied with errors.
fn connection_lines(report: &Report) -> String {
    let disks = report.disks.iter().map(|disk| ("disk", &disk.id, &disk.connections));
    let luns = report.controllers.iter().flat_map(|controller| &controller.luns);
    let all = disks.chain(luns.map(|lun| ("lun", &lun.id, &lun.connections)));
    all.filter_map(|(kind, id, connections)| connection_line(kind, id, connections.as_ref()?)).collect()
}

fn connection_line(kind: &str, id: &str, connections: &ConnectionsStat) -> Option<String> {
    let ConnectionsStat { counters, unreachable_ns, last_failure, last_error } = connections;
    let because = |why: &Option<String>| why.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
    let mut parts = Vec::new();
    if let Some(ns) = unreachable_ns {
        let seconds = *ns as f64 / 1e9;
        parts.push(format!("its storage is unreachable since {seconds:.1} s{}", because(last_failure)));
    } else if counters.lost > 0 {
        let (lost, repeated) = (counters.lost, counters.repeated);
        parts.push(format!("{lost} connections lost so far, {repeated} requests repeated{}", because(last_failure)));
    }
    if counters.errors > 0 {
        parts.push(format!("{} errors of its storage so far{}", counters.errors, because(last_error)));
    }
    (!parts.is_empty()).then(|| format!("{kind} {id}: {}\n", parts.join("; ")))
}

/// Formats a line for each disk and controller whose VMM was refused something.
fn budget_lines(report: &Report) -> String {
    let disks = report.disks.iter().map(|disk| ("disk", &disk.id, &disk.budget));
    let all = disks.chain(report.controllers.iter().map(|one| ("controller", &one.id, &one.budget)));
    all.filter_map(|(kind, id, budget)| {
        let TenantBudgetStat { mappings, address_space_bytes, guest_memory_bytes, .. } = budget.as_ref()?;
        let resources = [
            ("max-mappings", mappings),
            ("max-address-space", address_space_bytes),
            ("mem-budget", guest_memory_bytes),
        ];
        let refused = resources.iter().filter(|(_, resource)| resource.refused > 0);
        let refused: Vec<String> = refused.map(|(key, resource)| format!("{key} {} times", resource.refused)).collect();
        (!refused.is_empty()).then(|| format!("{kind} {id}: its VMM was refused more memory: {}\n", refused.join(", ")))
    })
    .collect()
}

/// Formats the line of a disk that is stopped or retries requests.
fn health_line(kind: &str, id: &str, health: &Health) -> Option<String> {
    let retries = if health.retries > 0 { format!(", {} retries so far", health.retries) } else { String::new() };
    if let Some(stop) = &health.stopped {
        let (seconds, parked, reason) = (stop.stopped_ns as f64 / 1e9, health.parked, &stop.reason);
        return Some(format!(
            "{kind} {id} is stopped since {seconds:.1} s, {parked} requests parked{retries}: {reason}\n"
        ));
    }
    (health.retries > 0).then(|| format!("{kind} {id} runs{retries}\n"))
}

fn grants(report: &Report) -> String {
    let columns: Vec<&Column<GrantRates>> = GRANT_COLUMNS.iter().collect();
    let mut rows = vec![head("grants", &columns)];
    let with_grants = report.disks.iter().filter(|disk| disk.grants.is_some());
    rows.extend(with_grants.map(|disk| row(disk.id.clone(), disk.grants.as_ref(), &columns)));
    align(&rows)
}

fn disks(report: &Report) -> String {
    let totals = report.disks.iter().map(|disk| &disk.totals);
    let totals: Vec<_> = totals.chain(report.controllers.iter().map(|one| &one.totals)).flatten().collect();
    let all = || totals.iter();
    let discards = all().any(|rates| rates.discards_per_s > 0.0);
    let flushes = all().any(|rates| rates.flushes_per_s > 0.0);
    let shown = |name: &str| (name != DISCARDS || discards) && (name != FLUSHES || flushes);
    let columns: Vec<&Column<IoRates>> = IO_COLUMNS.iter().filter(|(name, _)| shown(name)).collect();
    let mut rows = vec![head("disk", &columns)];
    for disk in &report.disks {
        rows.push(row(disk.id.clone(), disk.totals.as_ref(), &columns));
        rows.extend(disk.queues.iter().map(|queue| queue_row(queue, &columns)));
    }
    for controller in &report.controllers {
        rows.push(row(controller.id.clone(), controller.totals.as_ref(), &columns));
        rows.extend(controller.luns.iter().map(|lun| lun_row(lun, &columns)));
        rows.extend(controller.queues.iter().map(|queue| queue_row(queue, &columns)));
    }
    align(&rows)
}

fn queue_row(queue: &QueueRates, columns: &[&Column<IoRates>]) -> Vec<String> {
    let name = match queue.role.as_str() {
        // An older daemon reports no role, and has request queues only.
        "request" | "" => format!("  queue {}", queue.queue),
        role => format!("  {role}"),
    };
    row(format!("{name} worker {}", queue.worker), queue.rates.as_ref(), columns)
}

/// The columns that LUNs have.
const LUN_COLUMNS: [&str; 10] =
    ["r/s", "w/s", "rkB/s", "wkB/s", "avgrq-sz(512B)", "avgqu-sz", "await-us", "inflight", "oldest-ms", "errors"];

fn lun_row(lun: &LunRates, columns: &[&Column<IoRates>]) -> Vec<String> {
    let state = if lun.state == "ready" { String::new() } else { format!(" ({})", lun.state) };
    let lun_rates = lun.rates.map(|rates| IoRates {
        reads_per_s: rates.reads_per_s,
        writes_per_s: rates.writes_per_s,
        read_bytes_per_s: rates.read_bytes_per_s,
        written_bytes_per_s: rates.written_bytes_per_s,
        request_sectors: rates.request_sectors,
        queue_size: rates.queue_size,
        await_us: rates.await_us,
        in_flight: rates.in_flight,
        oldest_ms: rates.oldest_ms,
        errors: rates.errors,
        ..IoRates::default()
    });
    let cell = |(name, show): &&Column<IoRates>| {
        lun_rates.as_ref().filter(|_| LUN_COLUMNS.contains(name)).map_or(UNKNOWN.to_owned(), show)
    };
    [format!("  lun {}{state}", lun.id)].into_iter().chain(columns.iter().map(cell)).collect()
}

fn workers(report: &Report) -> String {
    let columns: Vec<&Column<TurnRates>> = WORKER_COLUMNS.iter().collect();
    let mut rows = vec![head("worker", &columns)];
    rows[0].push("queues".to_owned());
    for worker in &report.workers {
        let mut cells = row(worker.worker.to_string(), worker.rates.as_ref(), &columns);
        cells.push(worker.queues.to_string());
        rows.push(cells);
    }
    align(&rows)
}

fn head<T>(first: &str, columns: &[&Column<T>]) -> Vec<String> {
    [first].into_iter().chain(columns.iter().map(|(name, _)| *name)).map(str::to_owned).collect()
}

fn row<T>(first: String, rates: Option<&T>, columns: &[&Column<T>]) -> Vec<String> {
    let cell = |(_, show): &&Column<T>| rates.map_or(UNKNOWN.to_owned(), show);
    [first].into_iter().chain(columns.iter().map(cell)).collect()
}

/// Formats a number with 0 to 2 decimal places, fewer for larger numbers.
fn number(value: f64) -> String {
    match value {
        value if value >= 1000.0 => format!("{value:.0}"),
        value if value >= 100.0 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    }
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
