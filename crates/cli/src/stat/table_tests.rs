//! The layout of the tables.

use mqblk_admin::model::{Health, HealthStop};

use super::super::columns::COLUMNS;
use super::super::rates::{ControllerRates, DiskRates, IoRates, LunIoRates, WorkerRates};
use super::*;

fn report() -> Report {
    let load = IoRates {
        reads_per_s: 123_456.7,
        read_bytes_per_s: 1024.0 * 999.94,
        read_request_bytes: 4096.0,
        queue_size: 31.97,
        await_us: 105.25,
        read_await_us: 105.25,
        queued_us: 5.0,
        device_us: 99.5,
        publish_us: 0.75,
        p50_us: Some(100.0),
        p99_us: Some(250.0),
        p999_us: Some(1250.0),
        util_percent: Some(99.97),
        in_flight: 32,
        oldest_ms: Some(12_000),
        errors: 1,
        ..IoRates::default()
    };
    let turns = TurnRates { cpu_percent: 87.5, merge_splits: 2, ..TurnRates::default() };
    Report {
        out: Vec::new(),
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
                throttle: None,
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
                throttle: None,
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

fn format(report: &Report, width: usize) -> String {
    format_report("mqblk 1", report, width)
}

#[test]
fn whole_report() {
    let want = include_str!("table_expected.txt");
    let report = report();
    let found = format(&report, 80) + &format(&report, 120);
    assert_eq!(found, want, "{found}");
}

/// Returns a report with the largest numbers and the longest names.
fn extreme_report() -> Report {
    let mut report = report();
    let large = IoRates {
        reads_per_s: 99_999_999.0,
        writes_per_s: 9_999_999.4,
        discards_per_s: 1.0,
        flushes_per_s: 99_999.4,
        read_bytes_per_s: 9e12,
        written_bytes_per_s: 9e9,
        read_await_us: 999_999_000.0,
        write_await_us: 59_999_000.0,
        p99_us: Some(137_438_953.0),
        queue_size: 65_535.0,
        util_percent: Some(100.0),
        ..IoRates::default()
    };
    report.disks[0].totals = Some(large);
    report.disks[1].id = "x".repeat(64);
    report.disks[1].totals = Some(large);
    report.disks[1].health.stopped = Some(HealthStop {
        reason: "write of 4096 bytes at 123456789: Input/output error (os error 5)".to_owned(),
        ..HealthStop::default()
    });
    report
}

#[test]
fn a_report_is_no_wider_than_it_may_be() {
    for width in [80, 100, 120, 132, 160, 200, 400] {
        let text = format(&extreme_report(), width);
        let widest = text.lines().max_by_key(|line| line.chars().count()).unwrap();
        assert!(widest.chars().count() <= width, "{width}: {widest:?}\n{text}");
    }
    // More room has more columns, and finally all.
    let columns = |width| format(&extreme_report(), width).lines().nth(1).unwrap().split_whitespace().count();
    assert_eq!(columns(80), 10);
    assert!(columns(120) > columns(80) + 3 && columns(160) > columns(120));
    assert_eq!(columns(400), COLUMNS.len() + 1);
}

#[test]
fn a_name_that_is_too_long_has_a_line_of_its_own() {
    let text = format(&extreme_report(), 80);
    let mut lines = text.lines().skip_while(|line| !line.starts_with("xxx"));
    assert_eq!(lines.next(), Some("x".repeat(64).as_str()));
    assert!(lines.next().unwrap().starts_with("             100.0M"), "{text}");
}

#[test]
fn a_controller_has_rows_for_its_luns_and_queues() {
    let queue = |role: &str, queue, worker| QueueRates { role: role.to_owned(), queue, worker, rates: None };
    let rates = LunIoRates {
        reads_per_s: 12.5,
        others_per_s: 3.0,
        read_await_us: 77.0,
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
        throttle: None,
        rates,
    };
    let controller = ControllerRates {
        id: "vm1".to_owned(),
        totals: Some(IoRates { flushes_per_s: 1.0, ..IoRates::default() }),
        budget: None,
        luns: vec![lun("vm1:0:0", "ready", Some(rates)), lun("data", "removing", None)],
        queues: vec![queue("control", 0, 0), queue("event", 0, 0), queue("request", 0, 1), queue("request", 1, 0)],
    };
    let found = devices(&Report { controllers: vec![controller], ..report() }, 400);
    let names: Vec<&str> = found.lines().map(|line| line.split("   ").next().unwrap().trim_end()).collect();
    let want = [
        "disk",
        "database",
        "  q12 w3",
        "b",
        "vm1",
        "  lun vm1:0:0",
        "  lun data (removing)",
        "  control w0",
        "  event w0",
        "  q0 w1",
        "  q1 w0",
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
            "r_await" => "0.077",
            "w_await" => "0.000",
            "inflight" => "5",
            "errors" => "0",
            "oldest-ms" => "70",
            "w/s" | "rkB/s" | "wkB/s" | "rareq-sz" | "wareq-sz" | "aqu-sz" => "0.00",
            _ => "-",
        };
        assert_eq!(cell, want, "{head}");
    }
}

#[test]
fn discards_and_flushes_are_shown_only_if_there_are_any() {
    let heads = |report: &Report| devices(report, 400).lines().next().unwrap().to_owned();
    let mut report = report();
    assert!(!heads(&report).contains("d/s") && !heads(&report).contains("f/s"));
    report.disks[0].totals.as_mut().unwrap().flushes_per_s = 0.1;
    assert!(!heads(&report).contains("d/s") && heads(&report).contains(" f/s "));
    report.disks[0].totals.as_mut().unwrap().discards_per_s = 0.1;
    assert!(heads(&report).contains(" d/s "));
    assert_eq!(
        devices(&report, 400).lines().map(|line| line.chars().count()).max(),
        Some(heads(&report).chars().count())
    );
}

#[test]
fn averages_since_the_start_are_labelled() {
    let found = format(&Report { since: Since::Start, ..report() }, 80);
    assert!(found.starts_with("mqblk 1: averages since the daemon started, over 1.50 s; times in ms\n"), "{found}");
}

#[test]
fn the_help_explains_every_column() {
    let help = include_str!("help.txt");
    for name in COLUMNS.iter().map(|column| column.name).chain(WORKER_COLUMNS.iter().map(|(name, _)| *name)) {
        assert!(help.split_whitespace().any(|word| word == name), "{name} is not in the help");
    }
}

#[test]
fn xen_disks_have_a_table_of_grants() {
    let mut report = Report { disks: Vec::new(), controllers: Vec::new(), workers: Vec::new(), ..report() };
    assert!(!format(&report, 80).contains("grants"));
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
        throttle: None,
        queues: Vec::new(),
    });
    let text = format(&report, 80);
    let lines: Vec<Vec<&str>> = text
        .lines()
        .skip_while(|line| !line.starts_with("grants"))
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(
        lines[0],
        ["grants", "copies/s", "/call", "maps/s", "unmaps/s", "%hits", "indir/s", "held", "over", "errors"]
    );
    assert_eq!(lines[1], ["vm1", "1.50", "16.00", "0.00", "0.00", "99.00", "0.00", "33", "3", "0"]);
}
