//! Sentences below the tables: troubles of disks and their storage.

use mqblk_admin::model::{ConnectionsStat, Health, TenantBudgetStat, ThrottleStat};

use super::rates::Report;
use crate::call::settings_text;

/// Formats a line for each trouble of a disk, LUN or controller.
pub(crate) fn notes(report: &Report) -> String {
    out_lines(report)
        + &health_lines(report)
        + &throttle_lines(report)
        + &connection_lines(report)
        + &error_lines(report)
        + &budget_lines(report)
}

/// Formats a line for each disk and LUN that is out.
fn out_lines(report: &Report) -> String {
    report.out.iter().map(|disk| format!("{} is out (tried {} times): {}\n", disk.id, disk.tries, disk.why)).collect()
}

/// Formats a line for each disk, controller and LUN with requests that failed in the interval.
fn error_lines(report: &Report) -> String {
    let disks = report.disks.iter().map(|disk| ("disk", &disk.id, disk.totals.map(|totals| totals.errors)));
    let controllers = report.controllers.iter();
    let controllers = controllers.map(|one| ("controller", &one.id, one.totals.map(|totals| totals.errors)));
    let luns = report.controllers.iter().flat_map(|controller| &controller.luns);
    let luns = luns.map(|lun| ("lun", &lun.id, lun.rates.map(|rates| rates.errors)));
    let failed = disks
        .chain(controllers)
        .chain(luns)
        .filter_map(|(kind, id, errors)| Some((kind, id, errors.filter(|errors| *errors > 0)?)));
    let line = |(kind, id, errors): (&str, &String, u64)| {
        let requests = if errors == 1 { "request" } else { "requests" };
        format!("{kind} {id}: {errors} {requests} failed in the interval\n")
    };
    failed.map(line).collect()
}

/// Formats a line for each disk and LUN that is stopped or retries requests. LUNs that share a logical unit have a line
/// each.
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
    let mean_ms = *throttled_ns as f64 / 1e6 / (*throttled).max(1) as f64;
    let so_far = match throttled {
        0 => "none throttled so far".to_owned(),
        throttled => format!("{throttled} throttled so far, for {mean_ms:.2} ms on average"),
    };
    Some(format!("{kind} {id} is limited ({}): {so_far}, {waiting} waiting\n", settings_text(limits)))
}

/// Formats a line for each disk and LUN with storage that is or was disconnected, or that has replied with errors.
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

/// Formats a line for each disk and controller whose VMM was refused a resource.
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

#[cfg(test)]
mod tests {
    use mqblk_admin::model::{ConnectionCounters, HealthStop, ResourceStat};

    use super::super::rates::{DiskRates, IoRates, Since};
    use super::*;

    fn report() -> Report {
        let disk = |id: &str| DiskRates {
            id: id.to_owned(),
            totals: None,
            health: Health::default(),
            budget: None,
            connections: None,
            grants: None,
            throttle: None,
            queues: Vec::new(),
        };
        let (controllers, workers, out) = (Vec::new(), Vec::new(), Vec::new());
        Report {
            out,
            since: Since::Previous,
            interval_ns: 1,
            restarted: false,
            disks: vec![disk("database"), disk("b")],
            controllers,
            workers,
        }
    }

    #[test]
    fn failed_requests_have_a_line() {
        let mut report = report();
        assert_eq!(notes(&report), "");
        report.disks[1].totals = Some(IoRates { errors: 3, ..IoRates::default() });
        assert_eq!(notes(&report), "disk b: 3 requests failed in the interval\n");
    }

    #[test]
    fn a_stopped_or_retrying_disk_has_a_line() {
        let mut report = report();
        assert_eq!(health_lines(&report), "");
        let stopped = HealthStop { stopped_ns: 12_340_000_000, reason: "write at 4096: why".to_owned(), enospc: true };
        report.disks[0].health = Health { stopped: Some(stopped), parked: 5, ..Health::default() };
        report.disks[1].health = Health { retries: 7, ..Health::default() };
        let want = "disk database is stopped since 12.3 s, 5 requests parked: write at 4096: why\n\
                    disk b runs, 7 retries so far\n";
        assert_eq!(health_lines(&report), want);
        assert!(notes(&report).contains(want));
    }

    #[test]
    fn a_vmm_that_was_refused_memory_has_a_line() {
        let mut report = report();
        assert_eq!(budget_lines(&report), "");
        let refused = ResourceStat { refused: 3, ..ResourceStat::default() };
        report.disks[0].budget = Some(TenantBudgetStat { mappings: refused, ..TenantBudgetStat::default() });
        report.disks[1].budget = Some(TenantBudgetStat::default());
        let want = "disk database: its VMM was refused more memory: max-mappings 3 times\n";
        assert_eq!(budget_lines(&report), want);
        assert!(notes(&report).contains(want));
    }

    #[test]
    fn storage_that_is_or_was_not_reached_has_a_line() {
        let mut report = report();
        let counters = ConnectionCounters { connected: 2, made: 2, ..ConnectionCounters::default() };
        report.disks[0].connections = Some(ConnectionsStat { counters, ..ConnectionsStat::default() });
        assert_eq!(connection_lines(&report), "");
        let lost = ConnectionsStat {
            counters: ConnectionCounters { lost: 3, repeated: 5, ..counters },
            unreachable_ns: None,
            last_failure: Some("nbd://a/: reset".to_owned()),
            last_error: None,
        };
        report.disks[0].connections = Some(ConnectionsStat { unreachable_ns: Some(2_500_000_000), ..lost.clone() });
        report.disks[1].connections = Some(ConnectionsStat {
            counters: ConnectionCounters { errors: 2, ..lost.counters },
            last_error: Some("Flush at 0: no".to_owned()),
            ..lost
        });
        let want = "disk database: its storage is unreachable since 2.5 s: nbd://a/: reset\n\
                    disk b: 3 connections lost so far, 5 requests repeated: nbd://a/: reset; 2 errors of its storage so far: Flush at 0: no\n";
        assert_eq!(connection_lines(&report), want);
        assert!(notes(&report).contains(want));
    }

    #[test]
    fn a_disk_with_limits_has_a_line() {
        let mut report = report();
        let limits = [("bandwidth".to_owned(), "64M".into()), ("iops".to_owned(), 1000.into())].into_iter().collect();
        let throttle = ThrottleStat { limits, throttled: 0, throttled_ns: 0, waiting: 3 };
        report.disks[0].health.throttle = Some(throttle.clone());
        let want = "disk database is limited (bandwidth=64M,iops=1000): none throttled so far, 3 waiting\n";
        assert_eq!(notes(&report), want);
        let throttle = ThrottleStat { throttled: 4, throttled_ns: 10_000_000, waiting: 0, ..throttle };
        report.disks[0].health.throttle = Some(throttle);
        let want = "disk database is limited (bandwidth=64M,iops=1000): 4 throttled so far, for 2.50 ms on average, 0 waiting\n";
        assert_eq!(notes(&report), want);
    }
}
