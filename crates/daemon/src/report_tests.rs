//! No counter is mistaken for another, and sums cover the right queues.

use std::collections::BTreeSet;

use std::sync::Arc;

use mqblk_engine::{PlugOptions, QueueCounters};
use serde_json::Value;

use super::*;

fn about() -> DiskInfo {
    DiskInfo {
        watch_size: true,
        id: "vm1".to_owned(),
        interface: "virtio-blk",
        storage: "file".to_owned(),
        plug: PlugOptions::default(),
        health: Arc::default(),
        disk: None,
        queue_map: vec![1, 0],
        settings: Vec::new(),
    }
}

/// Returns statistics with a distinct number in each field, multiplied by `times`.
pub fn distinct_stats(times: u64) -> QueueStats {
    let counters = QueueCounters {
        reads: times,
        writes: 2 * times,
        flushes: 3 * times,
        discards: 4 * times,
        write_zeroes: 5 * times,
        answered_alone: 6 * times,
        malformed: 7 * times,
        read_bytes: 8 * times,
        written_bytes: 9 * times,
        errors: 10 * times,
        kicks: 11 * times,
        calls: 12 * times,
        calls_suppressed: 13 * times,
        turns: 14 * times,
        empty_turns: 15 * times,
        arms: 16 * times,
        poll_ns: 17 * times,
        busy_ns: 24 * times,
        requests: 18 * times,
        read_merges: 19 * times,
        write_merges: 20 * times,
        other_merges: 21 * times,
        other_bytes: 22 * times,
        calls_put_off: 23 * times,
        read_errors: 2 * times,
        write_errors: 3 * times,
    };
    let mut stats =
        QueueStats { counters, in_flight: 24, slots: 26, oldest_ns: Some(1_999_999 * times), ..QueueStats::default() };
    let latency = &mut stats.latency;
    let parts = [&mut latency.reads, &mut latency.writes, &mut latency.others];
    for (kind, parts) in parts.into_iter().enumerate() {
        let of = [&mut parts.queued, &mut parts.device, &mut parts.publish, &mut parts.total];
        for (part, histogram) in of.into_iter().enumerate() {
            histogram.record(1000 * (1 + 4 * kind as u64 + part as u64), times);
        }
    }
    stats
}

/// Everything.
pub const ALL: StatDetail = StatDetail { queues: true, latency: true };

#[test]
fn counters_are_not_mixed_up() {
    let reported = serde_json::to_value(distinct_stats(1).counters).unwrap();
    let reported = reported.as_object().unwrap();
    let numbers: BTreeSet<u64> = reported.values().map(|value| value.as_u64().unwrap()).collect();
    assert_eq!(numbers, (1..=24).collect());
    for (name, number) in [("reads", 1), ("read_bytes", 8), ("errors", 10), ("read_merges", 19), ("poll_ns", 17)] {
        assert_eq!(reported[name], number, "{name}");
    }
}

#[test]
fn a_disk_is_the_sum_of_its_queues() {
    let disk = disk(&about(), &[1, 0], &[distinct_stats(1), distinct_stats(10)], ALL);
    assert_eq!((disk.id.as_str(), disk.interface.as_str(), disk.storage.as_str()), ("vm1", "virtio-blk", "file"));
    assert_eq!((disk.merge.as_str(), disk.merge_bytes, disk.merge_segments), ("auto", 1 << 20, 1024));
    assert_eq!((disk.queue_count, disk.queues.len()), (2, 2));
    assert_eq!((disk.queues[0].queue, disk.queues[0].worker), (0, 1));
    assert_eq!((disk.queues[1].queue, disk.queues[1].worker), (1, 0));
    assert_eq!(disk.queues[1].load.counters.write_merges, 200);
    assert_eq!((disk.totals.counters.requests, disk.totals.in_flight), (18 * 11, 48));
    assert_eq!((disk.queues[0].load.oldest_ms, disk.totals.oldest_ms), (Some(1), Some(19)));
    let parts = &disk.totals.latency.writes;
    assert_eq!((parts.queued.sum_ns, parts.device.sum_ns), (11 * 5000, 11 * 6000));
    assert_eq!((parts.publish.sum_ns, parts.total.sum_ns), (11 * 7000, 11 * 8000));
    let total = &disk.totals.latency.others.total;
    assert_eq!((total.count, total.buckets.len()), (11, 1));
    let (lower, upper, count) = total.buckets[0];
    assert!(lower <= 12_000 && 12_000 < upper && count == 11, "{total:?}");
    assert!((lower..upper).contains(&total.p50_ns.unwrap()) && total.p50_ns == total.p999_ns);
}

#[test]
fn details_are_included_only_on_request() {
    let reported = |shape| {
        serde_json::to_value(disk(&about(), &[1, 0], &[distinct_stats(1), QueueStats::default()], shape)).unwrap()
    };
    let short = reported(StatDetail { queues: false, latency: false });
    assert!(short.get("queues").is_none());
    let total = &short["totals"]["latency"]["reads"]["total"];
    assert!(total.get("buckets").is_none() && total["p99_ns"].is_u64(), "{total}");
    let queues = reported(StatDetail { queues: true, latency: false });
    assert_eq!(queues["queues"][0]["in_flight"], 24);
    assert_eq!(queues["queues"][1]["latency"]["reads"]["total"]["p99_ns"], Value::Null);
    let whole = reported(ALL);
    assert!(whole["queues"][0]["latency"]["reads"]["total"]["buckets"].is_array());
    let back: DiskStat = serde_json::from_value(whole).unwrap();
    assert_eq!(back, disk(&about(), &[1, 0], &[distinct_stats(1), QueueStats::default()], ALL));
}

#[test]
fn workers() {
    let stats = WorkerStats {
        turns: 1,
        empty_turns: 2,
        sleeps: 3,
        slept_ns: 4,
        yields: 51,
        away_ns: 52,
        cpu_ns: 5,
        merge_splits: 8,
        queues: Vec::new(),
    };
    let want = WorkerStat {
        worker: 9,
        queues: 0,
        turns: 1,
        empty_turns: 2,
        sleeps: 3,
        slept_ns: 4,
        yields: 51,
        away_ns: 52,
        cpu_ns: 5,
        merge_splits: 8,
    };
    assert_eq!(worker(9, &stats), want);
}

#[test]
fn a_disk_reports_its_health() {
    use mqblk_engine::{ErrorPolicy, OnError, OnNoSpace};
    let errors = ErrorPolicy { on_error: OnError::Stop, on_enospc: OnNoSpace::Stop };
    let about = DiskInfo { health: Arc::new(DiskHealth::new("vm1", errors)), ..about() };
    let reported = serde_json::to_value(disk(&about, &[1, 0], &[], ALL)).unwrap();
    let want = serde_json::json!({
        "state": "running", "on_error": "stop", "on_enospc": "stop", "stopped": null, "parked": 0, "stops": 0, "retries": 0, "failed": 0,
        "last_failure": null,
    });
    assert_eq!(reported["health"], want);
}
