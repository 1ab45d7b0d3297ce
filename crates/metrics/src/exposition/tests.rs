//! The whole text of a small sample, the name of each family, and labels of any text.

use std::collections::HashSet;

use mqblk_admin::model::{
    ConnectionsStat, ControllerStat, DiskStat, Distribution, FailedRequest, GrantCounters, HealthStop, LunStat,
    QueueStat, TenantBudgetStat, ThrottleStat,
};
use proptest::prelude::*;

use super::*;

const QUEUES: Detail = Detail { queues: true };

fn text(stat: Stat, format: TextFormat, detail: Detail) -> String {
    encode(stat, ProcessSample { start_time_s: 1000.5, cpu_ns: 2_500_000_000 }, format, detail).unwrap()
}

/// A sample with all values.
fn full() -> Stat {
    let mut disk = DiskStat {
        id: "vm1".to_owned(),
        interface: "virtio-blk".to_owned(),
        storage: "nbd".to_owned(),
        queue_count: 2,
        connections: Some(ConnectionsStat { unreachable_ns: Some(1_500_000_000), ..ConnectionsStat::default() }),
        in_flight_region: Some(true),
        budget: Some(TenantBudgetStat::default()),
        grants: Some(GrantCounters { copies: 4, ..GrantCounters::default() }),
        queues: vec![QueueStat { role: "request".to_owned(), queue: 0, worker: 1, ..QueueStat::default() }],
        ..DiskStat::default()
    };
    disk.totals.counters.read_bytes = 4096;
    disk.totals.counters.busy_ns = 250_000_000;
    disk.totals.oldest_ms = Some(1500);
    disk.totals.latency.reads.total =
        Distribution { count: 1, sum_ns: 5000, buckets: vec![(4608, 5120, 1)], ..Distribution::default() };
    disk.health.stopped = Some(HealthStop { enospc: true, ..HealthStop::default() });
    disk.health.failed = 3;
    disk.health.last_failure = Some(FailedRequest { ago_ns: 2_500_000_000, ..FailedRequest::default() });
    disk.health.throttle =
        Some(ThrottleStat { throttled: 8, throttled_ns: 500_000_000, waiting: 2, ..ThrottleStat::default() });
    let lun =
        LunStat { id: "l".to_owned(), target: 3, connections: Some(ConnectionsStat::default()), ..LunStat::default() };
    let controller = ControllerStat {
        id: "c".to_owned(),
        budget: Some(TenantBudgetStat::default()),
        luns: vec![lun],
        queues: vec![QueueStat { role: "control".to_owned(), ..QueueStat::default() }],
        ..ControllerStat::default()
    };
    let workers = vec![WorkerStat { worker: 1, cpu_ns: 1_000_000_001, ..WorkerStat::default() }];
    Stat { version: "1.2".to_owned(), disks: vec![disk], controllers: vec![controller], workers, ..Stat::default() }
}

#[test]
fn values_have_base_units_and_labels() {
    let text = text(full(), TextFormat::OpenMetrics, QUEUES);
    for line in [
        "# TYPE mqblk_build info",
        "mqblk_build_info{version=\"1.2\"} 1",
        "# UNIT process_start_time_seconds seconds",
        "process_start_time_seconds 1000.5",
        "process_cpu_seconds_total 2.5",
        "mqblk_disk_info{disk=\"vm1\",interface=\"virtio-blk\",storage=\"nbd\",merge=\"\",on_error=\"\",on_enospc=\"\"} 1",
        "# HELP mqblk_disk_read_bytes Bytes read",
        "# TYPE mqblk_disk_read_bytes counter",
        "# UNIT mqblk_disk_read_bytes bytes",
        "mqblk_disk_read_bytes_total{disk=\"vm1\"} 4096",
        "mqblk_disk_busy_seconds_total{disk=\"vm1\"} 0.25",
        "mqblk_disk_oldest_request_age_seconds{disk=\"vm1\"} 1.5",
        "mqblk_disk_latency_seconds_sum{disk=\"vm1\",op=\"read\"} 0.000005",
        "mqblk_disk_latency_seconds_bucket{le=\"0.000008192\",disk=\"vm1\",op=\"read\"} 1",
        "mqblk_disk_latency_seconds_bucket{le=\"+Inf\",disk=\"vm1\",op=\"other\"} 0",
        "mqblk_disk_stopped{disk=\"vm1\"} 1",
        "mqblk_disk_out_of_space{disk=\"vm1\"} 1",
        "mqblk_disk_failed_requests_total{disk=\"vm1\"} 3",
        "mqblk_disk_last_failure_age_seconds{disk=\"vm1\"} 2.5",
        "mqblk_disk_throttled_requests_total{disk=\"vm1\"} 8",
        "mqblk_disk_throttled_seconds_total{disk=\"vm1\"} 0.5",
        "mqblk_disk_throttle_waiting_requests{disk=\"vm1\"} 2",
        "mqblk_lun_failed_requests_total{lun=\"l\",controller=\"c\"} 0",
        "mqblk_disk_in_flight_region{disk=\"vm1\"} 1",
        "mqblk_disk_storage_reachable{disk=\"vm1\"} 0",
        "mqblk_disk_storage_unreachable_seconds{disk=\"vm1\"} 1.5",
        "mqblk_disk_grant_copied_pages_total{disk=\"vm1\"} 4",
        "mqblk_disk_queue_info{disk=\"vm1\",role=\"request\",queue=\"0\",worker=\"1\"} 1",
        "mqblk_controller_queue_requests_total{controller=\"c\",role=\"control\",queue=\"0\"} 0",
        "mqblk_controller_luns{controller=\"c\"} 1",
        "mqblk_lun_info{lun=\"l\",controller=\"c\",target=\"3\",address=\"0\",logical_unit=\"\",storage=\"\",state=\"\"} 1",
        "mqblk_lun_storage_reachable{lun=\"l\",controller=\"c\"} 1",
        "mqblk_tenant_mappings{tenant=\"c\"} 0",
        "mqblk_worker_cpu_seconds_total{worker=\"1\"} 1.000000001",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}\n{text}");
    }
    for none in ["mappings_limit", "mqblk_lun_last_failure", "mqblk_lun_throttle"] {
        assert!(!text.contains(none), "there is no {none}");
    }
    assert!(!super::tests::text(full(), TextFormat::OpenMetrics, Detail::default()).contains("_queue_"));
}

#[test]
fn an_empty_daemon_has_metrics_too() {
    let text = text(Stat::default(), TextFormat::OpenMetrics, QUEUES);
    assert!(text.contains("mqblk_build_info{version=\"\"} 1\n") && text.ends_with("# EOF\n"), "{text}");
    assert!(text.contains("mqblk_disks_out 0\n"), "{text}");
    assert!(!text.contains("mqblk_disk_") && !text.contains("mqblk_worker"), "no family without a metric: {text}");
}

/// Each family is declared once, before its samples, and each series occurs once.
#[test]
fn the_text_is_well_formed() {
    for format in [TextFormat::OpenMetrics, TextFormat::Prometheus] {
        let text = text(full(), format, QUEUES);
        let (mut declared, mut series, mut family) = (HashSet::new(), HashSet::new(), "");
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                family = rest.split(' ').next().unwrap();
                assert!(declared.insert(family), "{family} twice");
                assert!(
                    family.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_'),
                    "{family}"
                );
            } else if !line.starts_with('#') {
                let name = line.split(['{', ' ']).next().unwrap();
                let suffix = name.strip_prefix(family).unwrap_or_else(|| panic!("{line} in {family}"));
                assert!(["", "_total", "_info", "_bucket", "_sum", "_count"].contains(&suffix), "{line} in {family}");
                assert!(series.insert(line.rsplit_once(' ').unwrap().0), "{line} twice");
            }
        }
        assert!(declared.len() > 100, "{}", declared.len());
    }
}

/// docs/metrics.md lists each family.
#[test]
fn every_family_is_documented() {
    let page = include_str!("../../../../docs/metrics.md");
    let text = text(full(), TextFormat::OpenMetrics, QUEUES);
    for family in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let (family, kind) = family.split_once(' ').unwrap();
        let name = match kind {
            "counter" => format!("{family}_total"),
            "info" => format!("{family}_info"),
            _ => family.to_owned(),
        };
        // Queues and controllers have the families of disks.
        let name = name.strip_prefix("mqblk_").unwrap_or(&name);
        let own = ["disk_queue_", "controller_queue_", "controller_", "disk_", "lun_"]
            .iter()
            .find_map(|prefix| name.strip_prefix(prefix));
        let is_there = |name: &str| page.contains(&format!("`{name}`")) || page.contains(&format!("`mqblk_{name}`"));
        assert!(
            is_there(name) || own.is_some_and(|own| is_there(&format!("_{own}"))),
            "{name} is not in docs/metrics.md"
        );
    }
}

/// Undoes the escapes of a label value.
fn unescaped(text: &str) -> String {
    let (mut plain, mut letters) = (String::new(), text.chars());
    while let Some(letter) = letters.next() {
        plain.push(match letter {
            '\\' => match letters.next() {
                Some('n') => '\n',
                Some(other) => other,
                None => panic!("half an escape: {text:?}"),
            },
            other => other,
        });
    }
    plain
}

proptest! {
    #[test]
    fn any_label_is_escaped(id in any::<String>()) {
        let disk = DiskStat { id: id.clone(), ..DiskStat::default() };
        for format in [TextFormat::OpenMetrics, TextFormat::Prometheus] {
            let text = text(Stat { disks: vec![disk.clone()], ..Stat::default() }, format, QUEUES);
            let line = text.split('\n').find(|line| line.starts_with("mqblk_disk_stopped{")).unwrap();
            let value = line.strip_prefix("mqblk_disk_stopped{disk=\"").unwrap().strip_suffix("\"} 0").unwrap();
            prop_assert_eq!(unescaped(value), &*id);
        }
    }
}
