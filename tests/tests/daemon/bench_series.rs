//! `mqblk bench --interval` and `mqblk plot --x time` as processes: the series sums up to its run, and can be plotted.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use mqblk_tests::hostile::daemon::mqblk_binary;
use serde_json::Value;

use crate::reproduce::folder;

/// Runs a command of the program in `folder`.
fn mqblk(folder: &Path, arguments: &str) -> Output {
    let mut command = Command::new(mqblk_binary());
    command.current_dir(folder).args(arguments.split_whitespace()).stdin(Stdio::null()).output().expect("mqblk runs")
}

/// Measures with the arguments `line`, and returns the rows.
fn rows(folder: &Path, line: &str, file: &str) -> Vec<Value> {
    let output = mqblk(folder, &format!("bench --disk path=disk.img {line} --allow-write --json {file}"));
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    let rows: Value = serde_json::from_slice(&std::fs::read(folder.join(file)).expect("the results")).expect("JSON");
    rows.as_array().expect("an array").clone()
}

fn number(value: &Value, key: &str) -> f64 {
    value[key].as_f64().unwrap_or_else(|| panic!("{key}: {value}"))
}

/// Returns the I/Os of an operation in a run's series.
fn ios(run: &Value, op: &str) -> f64 {
    let series = &run["series"];
    let points = series[op].as_array().unwrap_or_else(|| panic!("{op}: {series}"));
    let ends = points.iter().skip(1).map(|point| number(point, "start_ms")).chain([number(series, "end_ms")]);
    points.iter().zip(ends).map(|(point, end)| number(point, "iops") * (end - number(point, "start_ms")) / 1e3).sum()
}

#[test]
fn a_series_sums_up_to_the_totals_of_its_run() {
    let folder = folder();
    std::fs::File::create(folder.path().join("disk.img")).and_then(|file| file.set_len(64 << 20)).expect("a disk");
    for line in [
        "--rw randrw --iodepth 16 --queues 1,2 --runtime 300ms --warmup 100ms --runs 2 --interval 20ms",
        "--rw rw --iodepth 16 --jobs 4 --queues 2 --rate-iops 2000 --runtime 250ms --warmup 0 --runs 2 --log_avg_msec 30",
    ] {
        for row in rows(folder.path(), line, "out.json") {
            let runs = row["each_run"].as_array().expect("runs");
            assert_eq!(runs.len(), 2);
            for run in runs {
                let all = number(run, "iops") * number(run, "elapsed_s");
                let found = ios(run, "read") + ios(run, "write");
                assert!(all > 0.0 && (found - all).abs() < 0.5, "{line}: {found} of {all} in {run}");
                assert!(run["series"]["trim"].is_null() && run["series"]["flush"].is_null());
            }
            for op in ["read", "write"] {
                let of_runs: Vec<f64> = runs.iter().map(|run| ios(run, op) / number(run, "elapsed_s")).collect();
                let mean = of_runs.iter().sum::<f64>() / 2.0;
                assert!((mean - number(&row[op], "iops_mean")).abs() < 0.01 * mean + 1.0, "{line}: {op} {mean}");
            }
        }
    }
    // Each block once, so the number of I/Os is known.
    let row = &rows(folder.path(), "--rw write --bs 64k --iodepth 4 --runtime 0 --interval 5ms", "out.json")[0];
    assert!((ios(&row["each_run"][0], "write") - 1024.0).abs() < 0.5, "{row}");
}

#[test]
fn what_was_measured_is_drawn() {
    let folder = folder();
    std::fs::File::create(folder.path().join("disk.img")).and_then(|file| file.set_len(16 << 20)).expect("a disk");
    rows(folder.path(), "--bs 512,4k,64k --queues 1,2 --runtime 0.05 --warmup 0 --runs 2", "r.json");
    for (y, markers) in [("iops", 6), ("bandwidth", 6), ("latency", 12), ("cpu", 6), ("percentiles", 6 * 13)] {
        let output = mqblk(folder.path(), &format!("plot r.json -o r.svg --y {y}"));
        assert!(output.status.success(), "{y}: {}", String::from_utf8_lossy(&output.stderr));
        let svg = std::fs::read_to_string(folder.path().join("r.svg")).expect("the picture");
        assert_eq!(svg.matches("class=\"marker\"").count(), markers, "{y}");
        assert!(svg.contains("2 queues"), "{y}");
    }
}

#[test]
fn a_series_is_drawn_over_time() {
    let folder = folder();
    std::fs::File::create(folder.path().join("disk.img")).and_then(|file| file.set_len(16 << 20)).expect("a disk");
    let load = "--rw randrw --iodepth 4 --queues 1,2 --runtime 200ms --warmup 0 --runs 2";
    rows(folder.path(), &format!("{load} --interval 20ms"), "with.json");
    rows(folder.path(), load, "without.json");
    let plot = |line: &str| {
        let output = mqblk(folder.path(), &format!("plot {line}"));
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    assert_eq!(plot("with.json -o out.svg --x time --y iops,latency"), (Some(0), String::new()));
    let svg = std::fs::read_to_string(folder.path().join("out.svg")).expect("the picture");
    for text in [
        "IOPS and latency over time",
        "time from the start of the measurement (s)",
        "1 queue, run 1",
        "2 queues, run 2",
        "reads",
        "writes",
        "mean latency",
        "greatest latency",
        "A point is an interval of 20 ms, at its middle.",
        "<title>0 to 20 ms: ",
    ] {
        assert!(svg.contains(text), "{text}: {svg}");
    }
    // The series of both files.
    assert_eq!(
        plot("with.json without.json -o reads.svg --x time --only op=read --only run=1"),
        (Some(0), String::new())
    );
    let svg = std::fs::read_to_string(folder.path().join("reads.svg")).expect("the picture");
    assert!(svg.contains("2 queues") && !svg.contains("run 2"), "{svg}");
    let (code, told) = plot("without.json -o none.svg --x time");
    assert_eq!((code, folder.path().join("none.svg").exists()), (Some(2), false));
    assert!(
        told.contains("no row with a time series") && told.contains("mqblk bench --interval 100ms --json FILE"),
        "{told}"
    );
    let (code, told) = plot("with.json -o none.svg --x time --y cdf");
    assert_eq!(code, Some(2));
    assert!(told.contains("--y: found cdf, expected iops or latency with --x time"), "{told}");
    let (code, told) = plot("with.json -o none.svg --x time --ratio queues=1");
    assert_eq!(code, Some(2));
    assert!(told.contains("--ratio: found queues, expected none with --x time"), "{told}");
}
