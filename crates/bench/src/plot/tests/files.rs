//! Result files are checked key by key.

use super::*;

fn read(value: Value) -> Result<PlotRow, String> {
    parse(Value::Array(vec![value]).to_string().as_bytes(), "x.json").map(|mut rows| rows.remove(0))
}

#[test]
fn a_row_of_an_old_and_of_a_new_file() {
    let mut old = json_row();
    for key in ["percentiles", "bw_stderr", "errors"] {
        old.as_object_mut().unwrap().remove(key);
    }
    let old = read(old).unwrap();
    assert_eq!((old.number(RowKey::Bs), old.iops, old.latency), (Some(4096), (1e5, 1e3), (10.0, 30.0)));
    assert_eq!(old.percentiles, [(50.0, 10.0), (99.0, 30.0), (99.9, 90.0), (100.0, 2000.0)]);
    assert_eq!((old.merged_percent, old.bandwidth, old.errors), (None, (4e8, 4096e3), 0));
    assert_eq!(
        (old.number(RowKey::Targets), old.text(RowKey::Steer), old.text(RowKey::Experiment)),
        (Some(1), UNKNOWN, UNKNOWN)
    );
    let new = row(json!({
        "percentiles": [[50, 2.5], [99.99, 8]], "rrqm_per_s": 5e4, "wrqm_per_s": 25e3, "experiment": "block-size", "targets": 32, "luns": 2,
        "bs_max": 65536, "bw_stderr": 5, "steer": "fixed", "grants": "copy", "fsync": 0, "server_cpu_us_per_io": null,
    }));
    assert_eq!((new.percentiles.len(), new.merged_percent, new.bandwidth.1), (2, Some(75.0), 5.0));
    assert_eq!((new.text(RowKey::Bs), new.number(RowKey::Luns), new.text(RowKey::Fsync)), ("4K-64K", Some(2), UNKNOWN));
    assert_eq!((new.text(RowKey::Steer), new.text(RowKey::Grants), new.server_cpu), ("fixed", "copy", None));
}

#[test]
fn errors_name_row_key_and_value() {
    let with = |key: &'static str, value: Value| move |row: &mut Value| row[key] = value.clone();
    type Change = Box<dyn Fn(&mut Value)>;
    let cases: [(Change, &str); 16] = [
        (Box::new(with("bs_max", 512.into())), "bs_max: found 512, expected a whole number from 4096"),
        (Box::new(with("iops_mean", (-5).into())), "iops_mean: found -5, expected a number from 0"),
        (Box::new(with("iops_mean", Value::Null)), "iops_mean: found null, expected a number"),
        (Box::new(with("iops_mean", 1e300.into())), "iops_mean: found 1e+300, expected"),
        (Box::new(with("bw_bytes_per_s", "many".into())), "bw_bytes_per_s: found \"many\", expected"),
        (Box::new(with("queues", 0.into())), "queues: found 0, expected a whole number from 1"),
        (Box::new(with("jobs", 1.5.into())), "jobs: found 1.5, expected a whole number"),
        (Box::new(with("bs", u64::MAX.into())), "bs: found 18446744073709551615, expected a whole number"),
        (Box::new(with("target", 7.into())), "target: found 7, expected a string"),
        (Box::new(with("lat_us", 7.into())), "lat_us: found 7, expected an object"),
        (Box::new(|row| row["lat_us"]["p999"] = true.into()), "lat_us.p999: found true, expected a number"),
        (Box::new(|row| drop(row.as_object_mut().unwrap().remove("rw"))), "rw: found nothing, expected a string"),
        (Box::new(with("percentiles", json!([]))), "percentiles: found an array of 0, expected 1 to"),
        (Box::new(with("percentiles", json!([[9, 1], [9, 1]]))), "percentiles[1]: found an array of 2, expected a"),
        (Box::new(with("server_cpu_us_per_io", (-1).into())), "server_cpu_us_per_io: found -1, expected"),
        (Box::new(|row| *row = 3.into()), "found 3, expected an object"),
    ];
    for (change, expected) in cases {
        let mut wrong = json_row();
        change(&mut wrong);
        let error = parse(json!([json_row(), wrong]).to_string().as_bytes(), "x").unwrap_err();
        assert!(error.starts_with(&format!("row 2 of 2: {expected}")), "{error}");
    }
    assert!(parse(b"[NaN]", "x").unwrap_err().starts_with("not JSON: "));
    assert!(parse(b"{}", "x").unwrap_err().starts_with("found an object, expected the JSON array"));
    assert!(parse(b"[]", "x").unwrap_err().starts_with("found an empty array"));
    assert!(parse(&[b'['; 1 << 20], "x").unwrap_err().starts_with("not JSON: recursion"));
}

fn with_series() -> Value {
    let point = |start: f64| json!({"start_ms": start, "iops": 10, "mean_us": 5.5, "max_us": 7});
    let pause = json!({"start_ms": 200, "iops": 0, "mean_us": null, "max_us": null});
    let series = json!({"interval_ms": 100, "end_ms": 270.5, "read": [point(0.0), point(100.0), pause], "write": null, "flush": []});
    let mut row = json_row();
    row["each_run"] = json!([{"errors": 2}, {"errors": 3, "series": series}, {"series": null}]);
    row
}

#[test]
fn time_series_are_of_runs_and_operations() {
    let series = read(with_series()).unwrap().series;
    let [one] = series.as_slice() else { panic!("{series:?}") };
    assert_eq!((one.run, one.op, one.errors, one.interval_ms), (2, "read", 3, 100.0));
    let points: Vec<_> = one.points.iter().map(|point| (point.time_ms, point.iops, point.latency)).collect();
    let done = Some((5.5, 7.0));
    assert_eq!(points, [((0.0, 100.0), 10.0, done), ((100.0, 200.0), 10.0, done), ((200.0, 270.5), 0.0, None)]);
}

#[test]
fn errors_in_time_series_name_the_place() {
    type Change = fn(&mut Value);
    let cases: [(Change, &str); 7] = [
        (|row| row["each_run"] = 3.into(), "each_run: found 3, expected an array"),
        (|row| row["each_run"][0] = 3.into(), "each_run[0]: found 3, expected an object"),
        (|row| row["each_run"][0]["series"] = 3.into(), "each_run[0].series: found 3, expected an object"),
        (|row| row["each_run"][1]["series"]["read"] = 3.into(), "each_run[1].series.read: found 3, expected an array"),
        (
            |row| row["each_run"][1]["series"]["read"][1]["iops"] = (-3).into(),
            "each_run[1].series.read[1].iops: found -3, expected a number",
        ),
        (
            |row| row["each_run"][1]["series"]["read"][1]["start_ms"] = 0.into(),
            "each_run[1].series.read[1].start_ms: found 0, expected a time after the one before",
        ),
        (
            |row| row["each_run"][1]["series"]["end_ms"] = 150.into(),
            "each_run[1].series.end_ms: found 150, expected the end of the last interval, at least 200",
        ),
    ];
    for (change, expected) in cases {
        let mut wrong = with_series();
        change(&mut wrong);
        let error = read(wrong).unwrap_err();
        assert!(error.starts_with(&format!("row 1 of 1: {expected}")), "{error}");
    }
}

#[test]
fn labels_are_escaped_and_cut() {
    assert_eq!(label("a\u{1b}[1m\n\u{202e}b\u{ffff}"), "a\\u{1b}[1m\\n\\u{202e}b\\u{ffff}");
    assert_eq!((label("é <&>"), label(" "), label("\0")), ("é <&>".into(), "(empty)".into(), "\\u{0}".into()));
    assert_eq!(label(&"ä".repeat(1000)), format!("{}…", "ä".repeat(160)));
}
