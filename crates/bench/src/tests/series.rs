//! The time series of a run has all its I/Os.

use mqblk_driver::virtio_blk::model::{BlkBehaviour, BlkFault};
use serde_json::Value;

use super::endings::{interrupted, is_sigint};
use super::loads::{count, number, on_each_interface};
use super::{Rig, json, plan};
use crate::BenchError;

/// Checks an operation's series of a row's only run against its totals. Returns the number of its I/Os.
fn check(row: &Value, op: &str) -> u64 {
    let series = &row["each_run"][0]["series"];
    let (interval, end) = (number(series, "/interval_ms"), number(series, "/end_ms"));
    let points = series[op].as_array().unwrap_or_else(|| panic!("{op}: {series}"));
    let (mut ios, mut sum, mut most) = (0, 0.0, 0.0_f64);
    for (at, point) in points.iter().enumerate() {
        let start = number(point, "/start_ms");
        assert_eq!(start, at as f64 * interval);
        let next = if at + 1 == points.len() { end } else { start + interval };
        let done = number(point, "/iops") * (next - start) / 1e3;
        assert!((done - done.round()).abs() < 0.01, "{op}: {done} I/Os in {point}");
        ios += done.round() as u64;
        if done > 0.5 {
            let (mean, max) = (number(point, "/mean_us"), number(point, "/max_us"));
            assert!(mean > 0.0 && mean <= max, "{point}");
            sum += mean * done.round();
            most = most.max(max);
        } else {
            assert!(point["mean_us"].is_null() && point["max_us"].is_null(), "{point}");
        }
    }
    // The last interval is from half to one and a half as long as the others, or the only one.
    let last = end - (points.len() - 1) as f64 * interval;
    assert!(last < 1.5 * interval && (last >= 0.5 * interval || points.len() == 1), "{last} {interval}");
    assert_eq!(ios, count(row, op), "{op}");
    if ios > 0 {
        // The histogram has three digits.
        let near = |found: f64, expected: f64| (found - expected).abs() <= 0.002 * expected + 0.01;
        let latency = &row[op]["lat_us"];
        assert!(near(sum / ios as f64, number(latency, "/mean")), "{op}: {} {latency}", sum / ios as f64);
        assert!(near(most, number(latency, "/max")), "{op}: {most} {latency}");
    }
    ios
}

#[test]
fn a_series_has_all_ios_of_its_run() {
    for line in [
        "--rw randrw --runtime 0.25 --interval 20ms --warmup 0.05 --iodepth 4",
        "--rw randrw --runtime 0.25 --interval 30ms --warmup 0 --client poll --jobs 2 --queues 2",
        "--rw randrw --runtime 0.2 --log_avg_msec 25 --warmup 0.05 --rate-iops 2000 --iodepth 4 --bsrange 4k-8k",
        // One interval that is never full.
        "--rw randrw --runtime 0.1 --interval 10s --warmup 0",
    ] {
        on_each_interface(&format!("{line} --runs 1 --allow-write"), |interface, row| {
            let reads = check(row, "read");
            assert!(reads > 0 && check(row, "write") > 0, "{interface} {line}");
            let series = &row["each_run"][0]["series"];
            assert!(series["trim"].is_null() && series["flush"].is_null());
        });
    }
    // Each block once: the length is not known before. The fill before it is not in the series.
    let line = "--rw write --fsync 8 --bs 4k --runtime 0 --fill --iodepth 2 --jobs 2 --queues 2 --interval 1ms";
    on_each_interface(&format!("{line} --allow-write"), |interface, row| {
        let disks = if interface == "virtio-scsi" { 2 } else { 1 };
        assert_eq!(check(row, "write"), 256 * disks, "{interface}");
        assert!(check(row, "flush") > 0 && row["each_run"][0]["series"]["read"].is_null());
    });
    on_each_interface("--rw randwrite --verify crc32c --bs 4k --interval 5ms --allow-write", |_, row| {
        assert!(check(row, "write") > 0);
    });
}

#[test]
fn without_an_interval_there_is_no_series() {
    on_each_interface("--runtime 0", |_, row| {
        assert!(row["each_run"][0].as_object().unwrap().contains_key("series"));
        assert!(row["each_run"][0]["series"].is_null());
    });
}

#[test]
fn failed_requests_are_not_in_the_series() {
    let size = 400 << 10;
    let rig = Rig::new(BlkBehaviour { size, fault: BlkFault::FailFrom(40), ..BlkBehaviour::default() });
    let file = rig.path("out.json");
    assert_eq!(rig.run(&format!("--rw read --bs 4k --runtime 0 --interval 1s --json {file}")).unwrap(), 60);
    assert_eq!(check(&json(&file)[0], "read"), 40);
    let rig = Rig::new(BlkBehaviour { fault: BlkFault::FailFrom(0), ..BlkBehaviour::default() });
    let file = rig.path("out.json");
    let line = format!("--runtime 0.1 --warmup 0 --runs 1 --interval 10ms --json {file}");
    assert!(rig.run(&line).unwrap() > 0);
    let row = &json(&file)[0];
    assert_eq!(check(row, "read"), 0);
    assert!(row["each_run"][0]["series"]["read"].as_array().unwrap().len() >= 5, "a pause has its intervals, too");
}

#[test]
fn a_run_that_ends_early_has_its_series_until_then() {
    for client in ["poll", "wait"] {
        let rig = Rig::new(BlkBehaviour::default());
        let file = rig.path("out.json");
        let line = "--runtime 600 --warmup 0 --runs 1 --iodepth 4 --interval 10ms";
        let result = interrupted(&rig, &format!("{line} --client {client} --json {file}"), 20_000, 1);
        assert!(is_sigint(&result), "{result:?}");
        assert!(check(&json(&file)[0], "read") > 0);
    }
    // Each run is 256 requests: the third one meets the end of the server.
    let rig = Rig::new(BlkBehaviour { fault: BlkFault::DisconnectAfter(600), ..BlkBehaviour::default() });
    let file = rig.path("out.json");
    let result = rig.run(&format!("--rw read --runtime 0 --runs 5 --interval 1ms --json {file}"));
    assert!(matches!(result, Err(BenchError::Failed(_))), "{result:?}");
    let rows = json(&file);
    let runs = rows[0]["each_run"].as_array().unwrap();
    assert!(runs.len() == 2 && runs.iter().all(|run| run["series"]["read"].is_array()), "{rows}");
}

#[test]
fn intervals_that_cannot_be_recorded_are_refused() {
    for (line, expected) in [
        ("--interval 0 --json x", "--interval: found 0ns, expected at least 1ms"),
        ("--interval 500us --json x", "--interval: found 500µs, expected at least 1ms"),
        (
            "--interval 2ms --runtime 10m --json x",
            "--interval: found 2ms, expected at least 6ms with --runtime 600s, for at most 100000 intervals",
        ),
        (
            "--log_avg_msec 2 --runtime 10m --json x",
            "--log_avg_msec: found 2ms, expected at least 6ms with --runtime 600s, for at most 100000 intervals",
        ),
        (
            "--interval 100ms",
            "--interval: found 100ms, expected --json FILE with it: the time series is in the results, not in the table",
        ),
    ] {
        let error = plan(&format!("--disk storage=null,size=1G {line}")).unwrap_err();
        assert!(matches!(&error, BenchError::Usage(text) if text == expected), "{line}: {error}");
    }
    for line in ["--interval 1s --log_avg_msec 10", "--log_avg_msec 0", "--interval x"] {
        assert!(plan(&format!("--disk storage=null,size=1G --json x {line}")).is_err(), "{line}");
    }
    for line in ["--interval 6ms --runtime 10m", "--interval 1ms --runtime 0", "--log-avg-msec 100"] {
        assert!(plan(&format!("--disk storage=null,size=1G --json x {line}")).is_ok(), "{line}");
    }
}
