//! The layout of the tables.

use mqblk_admin::model::{ConnectionCounters, HealthStop, ResourceStat};

use super::super::rates::{ControllerRates, DiskRates, LunIoRates, LunRates, QueueRates, WorkerRates};
use super::*;

fn report() -> Report {
    let load = IoRates {
        reads_per_s: 123_456.7,
        read_bytes_per_s: 1024.0 * 999.94,
        request_sectors: 8.0,
        queue_size: 31.97,
        await_us: 105.25,
        queued_us: 5.0,
        device_us: 99.5,
        publish_us: 0.75,
        p99_us: Some(250.0),
        in_flight: 32,
        oldest_ms: Some(12_000),
        errors: 1,
        ..IoRates::default()
    };
    let turns = TurnRates { cpu_percent: 87.5, merge_splits: 2, ..TurnRates::default() };
    Report {
        since: Since::Previous,
        interval_ns: 1_500_000_000,
        restarted: false,
        disks: vec![
            DiskRates {
                id: "database".to_owned(),
                totals: Some(load),
                health: Health::default(),
                budget: None,
                connections: None,
                grants: None,
                queues: vec![QueueRates {
                    role: "request".to_owned(),
                    queue: 12,
                    worker: 3,
                    rates: Some(IoRates::default()),
                }],
            },
            DiskRates {
                id: "b".to_owned(),
                totals: None,
                health: Health::default(),
                budget: None,
                connections: None,
                grants: None,
                queues: Vec::new(),
            },
        ],
        controllers: Vec::new(),
        workers: vec![
            WorkerRates { worker: 0, queues: 4, rates: Some(turns) },
            WorkerRates { worker: 1, queues: 0, rates: None },
        ],
    }
}

#[test]
fn whole_report() {
    let want = include_str!("table_expected.txt");
    let found = format_report("1.2", &report());
    assert_eq!(found, want, "{found}");
}

#[test]
fn a_controller_has_rows_for_its_luns_and_queues() {
    let queue = |role: &str, queue, worker| QueueRates { role: role.to_owned(), queue, worker, rates: None };
    let rates = LunIoRates {
        reads_per_s: 12.5,
        others_per_s: 3.0,
        await_us: 77.0,
        in_flight: 5,
        oldest_ms: Some(70),
        ..LunIoRates::default()
    };
    let lun = |id: &str, state: &str, rates| LunRates {
        id: id.to_owned(),
        target: 0,
        lun: 0,
        state: state.to_owned(),
        health: Health::default(),
        connections: None,
        rates,
    };
    let controller = ControllerRates {
        id: "vm1".to_owned(),
        totals: Some(IoRates { flushes_per_s: 1.0, ..IoRates::default() }),
        budget: None,
        luns: vec![lun("vm1:0:0", "ready", Some(rates)), lun("data", "removing", None)],
        queues: vec![queue("control", 0, 0), queue("event", 0, 0), queue("request", 0, 1), queue("request", 1, 0)],
    };
    let found = disks(&Report { controllers: vec![controller], ..report() });
    let names: Vec<&str> = found.lines().map(|line| line.split("   ").next().unwrap().trim_end()).collect();
    let want = [
        "disk",
        "database",
        "  queue 12 worker 3",
        "b",
        "vm1",
        "  lun vm1:0:0",
        "  lun data (removing)",
        "  control worker 0",
        "  event worker 0",
        "  queue 0 worker 1",
        "  queue 1 worker 0",
    ];
    assert_eq!(names, want, "{found}");
    assert!(found.lines().next().unwrap().contains(" f/s "), "the controller's flushes");
    let cells = |row: usize| found.lines().nth(row).unwrap().split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let heads = cells(0);
    let (lun, unknown) = (cells(5).split_off(2), cells(6).split_off(3));
    assert_eq!((lun.len(), unknown.len()), (heads.len() - 1, heads.len() - 1), "{found}");
    assert!(unknown.iter().all(|cell| cell == "-"));
    for (head, cell) in heads.iter().skip(1).zip(&lun) {
        let want = match head.as_str() {
            "r/s" => "12.50",
            "await-us" => "77.00",
            "inflight" => "5",
            "errors" => "0",
            "oldest-ms" => "70",
            "w/s" | "rkB/s" | "wkB/s" | "avgrq-sz(512B)" | "avgqu-sz" => "0.00",
            _ => "-",
        };
        assert_eq!(cell, want, "{head}");
    }
}

#[test]
fn discards_and_flushes_are_shown_only_if_there_are_any() {
    let heads = |report: &Report| disks(report).lines().next().unwrap().to_owned();
    let mut report = report();
    assert!(!heads(&report).contains("d/s") && !heads(&report).contains("f/s"));
    report.disks[0].totals.as_mut().unwrap().flushes_per_s = 0.1;
    assert!(!heads(&report).contains("d/s") && heads(&report).contains(" f/s "));
    report.disks[0].totals.as_mut().unwrap().discards_per_s = 0.1;
    assert!(heads(&report).contains(" d/s "));
    assert_eq!(disks(&report).lines().map(|line| line.chars().count()).max(), Some(heads(&report).chars().count()));
}

#[test]
fn averages_since_the_start_are_labelled() {
    let found = format_report("1", &Report { since: Since::Start, ..report() });
    assert!(found.starts_with("mqblk 1: averages since the daemon started, over 1.50 s\n"), "{found}");
}

#[test]
fn digits() {
    for (value, want) in [(0.0, "0.00"), (99.994, "99.99"), (100.0, "100.0"), (999.94, "999.9"), (1e6, "1000000")] {
        assert_eq!(number(value), want);
    }
}

#[test]
fn the_help_explains_every_column() {
    let help = include_str!("help.txt");
    for name in IO_COLUMNS.iter().map(|(name, _)| *name).chain(WORKER_COLUMNS.iter().map(|(name, _)| *name)) {
        assert!(help.split_whitespace().any(|word| word == name), "{name} is not in the help");
    }
}

#[test]
fn xen_disks_have_a_table_of_grants() {
    let mut report = Report { disks: Vec::new(), controllers: Vec::new(), workers: Vec::new(), ..report() };
    assert!(!format_report("1", &report).contains("grants"));
    let grants = GrantRates {
        copies_per_s: 1.5,
        copies_per_call: 16.0,
        hit_percent: 99.0,
        held: 33,
        over_cap: 1,
        over_budget: 2,
        ..GrantRates::default()
    };
    report.disks.push(DiskRates {
        id: "vm1".to_owned(),
        totals: None,
        health: Health::default(),
        budget: None,
        connections: None,
        grants: Some(grants),
        queues: Vec::new(),
    });
    let text = format_report("1", &report);
    let lines: Vec<Vec<&str>> = text
        .lines()
        .skip_while(|line| !line.starts_with("grants"))
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(
        lines[0],
        ["grants", "copies/s", "per", "call", "maps/s", "unmaps/s", "%hits", "indirect/s", "held", "over", "errors"]
    );
    assert_eq!(lines[1], ["vm1", "1.50", "16.00", "0.00", "0.00", "99.00", "0.00", "33", "3", "0"]);
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
    assert!(format_report("1", &report).contains(want));
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
    assert!(format_report("1", &report).contains(want));
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
    assert!(format_report("1", &report).contains(want));
}

#[test]
fn a_disk_with_limits_has_a_line() {
    let mut report = report();
    assert!(!format_report("1", &report).contains("limited"));
    let limits = [("bandwidth".to_owned(), "64M".into()), ("iops".to_owned(), 1000.into())].into_iter().collect();
    let throttle = ThrottleStat { limits, throttled: 0, throttled_ns: 0, waiting: 3 };
    report.disks[0].health.throttle = Some(throttle.clone());
    let line =
        |report: &Report| format_report("1", report).lines().find(|line| line.contains("limited")).map(str::to_owned);
    let want = "disk database is limited (bandwidth=64M,iops=1000): none throttled so far, 3 waiting";
    assert_eq!(line(&report).as_deref(), Some(want));
    let throttle = ThrottleStat { throttled: 4, throttled_ns: 10_000_000, waiting: 0, ..throttle };
    report.disks[0].health.throttle = Some(throttle);
    let want =
        "disk database is limited (bandwidth=64M,iops=1000): 4 throttled so far, for 2500 us on average, 0 waiting";
    assert_eq!(line(&report).as_deref(), Some(want));
}
