//! Result files: the JSON array that `mqblk bench --json` writes (its keys are those of [`crate::report::ResultRow`]), checked
//! key by key, since a person may have edited it or put several files together.

use std::fmt::Display;
use std::io::Read;
use std::ops::RangeInclusive;
use std::path::Path;

use serde_json::{Map, Value};

use super::PlotError;
use super::keys::UNKNOWN;
use super::series::TimeSeries;

/// Most bytes of a result file: some ten thousand rows.
const MAX_FILE: u64 = 16 << 20;
/// Most rows of all files together.
pub(super) const MAX_ROWS: usize = 20_000;
/// Most percentiles of a row.
const MAX_PERCENTILES: usize = 1000;
/// Most characters of a label; longer ones are cut.
const MAX_LABEL: usize = 160;
/// Largest measured value. Far above any real one, and sums and products of such values stay finite.
const MAX_VALUE: f64 = 1e15;
/// Largest count and block size: exact as a floating-point number.
const MAX_COUNT: u64 = 1 << 53;

/// One row of a result file, as far as it is drawn.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct PlotRow {
    /// Short name of its file.
    pub file: String,
    /// The target's label.
    pub target: String,
    /// Guest interface.
    pub interface: String,
    /// Storage backend.
    pub storage: String,
    /// fio's word for the access pattern.
    pub rw: String,
    /// Poll policy of the server.
    pub poll: String,
    /// Request merging in the server.
    pub merge: String,
    /// What the server does with granted pages; `unknown` where the interface has none.
    pub grants: String,
    /// The pool that caches granted pages; `unknown` where the interface has none.
    pub grants_pool: String,
    /// Pages of a ring, as a power of two's exponent, if that is known.
    pub ring_order: Option<u64>,
    /// Layout of a ring's requests; `unknown` where the interface leaves no choice.
    pub abi: String,
    /// I/Os per second that each job starts, of an open-loop load.
    pub rate_iops: Option<u64>,
    /// Writes after which a job flushes, if it does.
    pub fsync: Option<u64>,
    /// Which blocks a random load prefers; `unknown` in files that do not say it.
    pub distribution: String,
    /// Worker threads of the server, if they were chosen.
    pub workers: Option<u64>,
    /// Microseconds that the storage takes, if that was chosen.
    pub storage_latency: Option<u64>,
    /// Name of the experiment it is part of.
    pub experiment: Option<String>,
    /// Bytes of a request; of the smallest if sizes are mixed.
    pub bs: u64,
    /// Bytes of the largest request.
    pub bs_max: u64,
    /// Targets; 1 where the interface has none.
    pub targets: u64,
    /// Logical units of each; 1 where the interface has none.
    pub luns: u64,
    /// Which queue a command is put on; `unknown` where the interface leaves no choice.
    pub steer: String,
    /// Queues.
    pub queues: u64,
    /// Jobs.
    pub jobs: u64,
    /// Requests in flight of each job.
    pub iodepth: u64,
    /// Requests submitted and waited for at once.
    pub batch: u64,
    /// Runs.
    pub runs: u64,
    /// Requests per second, mean over the runs, and its standard error.
    pub iops: (f64, f64),
    /// Bytes per second, mean over the runs, and its standard error.
    pub bandwidth: (f64, f64),
    /// Percentile (0 to 100) and latency in microseconds, ascending.
    pub percentiles: Vec<(f64, f64)>,
    /// Median and 99th percentile of the latency, in microseconds.
    pub latency: (f64, f64),
    /// CPU time of the server for a request, in microseconds, if it is known.
    pub server_cpu: Option<f64>,
    /// Merged requests per second (iostat's rrqm/s and wrqm/s), if they were counted.
    pub merges: Option<f64>,
    /// Requests of an I/O.
    pub requests_per_io: u64,
    /// Requests that failed or did not verify.
    pub errors: u64,
    /// Its time series: of all runs and operations; of one where these are drawn.
    pub series: Vec<TimeSeries>,
    /// Run of the time series that is drawn.
    pub run: Option<u64>,
    /// Operation of the time series that is drawn; `unknown` where none is.
    pub op: String,
}

impl PlotRow {
    /// Returns the share of the requests that the server merged into others, in percent; `None` if they were not counted.
    pub(super) fn merged_percent(&self) -> Option<f64> {
        let requests = self.iops.0 * self.requests_per_io as f64;
        // Both are rates of times that differ by milliseconds.
        self.merges.map(|merges| if requests > 0.0 { (merges / requests * 100.0).min(100.0) } else { 0.0 })
    }
}

/// Reads the rows of `path`. `file`: its short name.
///
/// # Errors
/// When it cannot be read, is too large, or is not what the benchmark writes. The error names the row, the key, what was found
/// and what was expected.
pub(super) fn read(path: &Path, file: &str) -> Result<Vec<PlotRow>, PlotError> {
    let wrong = |what: String| PlotError::Input(format!("{}: {what}", path.display()));
    let mut text = Vec::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(MAX_FILE + 1).read_to_end(&mut text))
        .map_err(|error| wrong(error.to_string()))?;
    if text.len() as u64 > MAX_FILE {
        return Err(wrong(format!("found more than {} MiB, expected a result file", MAX_FILE >> 20)));
    }
    parse(&text, file).map_err(wrong)
}

fn parse(text: &[u8], file: &str) -> Result<Vec<PlotRow>, String> {
    const EXPECTED: &str = "expected the JSON array that `mqblk bench --json` writes";
    let value: Value = serde_json::from_slice(text).map_err(|error| format!("not JSON: {error}; {EXPECTED}"))?;
    let Value::Array(values) = value else { return Err(format!("found {}, {EXPECTED}", describe(Some(&value)))) };
    if values.is_empty() {
        return Err("found an empty array, expected at least one row".into());
    }
    if values.len() > MAX_ROWS {
        return Err(format!("found {} rows, expected at most {MAX_ROWS}", values.len()));
    }
    let row = |(at, value): (usize, &Value)| {
        let fields = value.as_object().ok_or(format!("found {}, expected an object", describe(Some(value))));
        fields
            .and_then(|fields| Fields { under: "", fields }.row(file))
            .map_err(|why| format!("row {} of {}: {why}", at + 1, values.len()))
    };
    values.iter().enumerate().map(row).collect()
}

/// The keys of a row, or of an object in it. Errors name the key, what was found and what was expected.
pub(super) struct Fields<'a> {
    /// Prefix of a key in an error.
    pub under: &'static str,
    /// The keys.
    pub fields: &'a Map<String, Value>,
}

impl Fields<'_> {
    fn row(&self, file: &str) -> Result<PlotRow, String> {
        let latency = match self.fields.get("lat_us") {
            Some(Value::Object(fields)) => Fields { under: "lat_us.", fields },
            _ => return Err(self.wrong("lat_us", "an object with p50, p99, p999 and max")),
        };
        let [p50, p99] = [latency.measured("p50")?, latency.measured("p99")?];
        let tail = [(50.0, p50), (99.0, p99), (99.9, latency.measured("p999")?), (100.0, latency.measured("max")?)];
        let (bs, iops) = (self.count("bs", 1)?, (self.measured("iops_mean")?, self.measured("iops_stderr")?));
        let unknown_if_absent = |key: &str| if self.absent(key) { Ok(UNKNOWN.into()) } else { self.text(key) };
        let if_present = |key: &str| if self.absent(key) { Ok(None) } else { self.count(key, 0).map(Some) };
        let one_if_absent = |key: &str| if self.absent(key) { Ok(1) } else { self.count(key, 1) };
        // Files from before mixed sizes lack it.
        let bandwidth_error = self.optional("bw_stderr")?.unwrap_or(iops.1 * bs as f64);
        let merges = [self.optional("rrqm_per_s")?, self.optional("wrqm_per_s")?];
        Ok(PlotRow {
            file: file.to_owned(),
            target: self.text("target")?,
            interface: self.text("interface")?,
            storage: self.text("storage")?,
            rw: self.text("rw")?,
            poll: self.text("poll")?,
            merge: self.text("merge")?,
            grants: unknown_if_absent("grants")?,
            grants_pool: unknown_if_absent("grants_pool")?,
            ring_order: if_present("ring_order")?,
            abi: unknown_if_absent("abi")?,
            rate_iops: if_present("rate_iops")?,
            fsync: if_present("fsync")?.filter(|writes| *writes > 0),
            distribution: unknown_if_absent("random_distribution")?,
            workers: if_present("server_workers")?,
            storage_latency: if_present("storage_latency_us")?,
            experiment: if self.absent("experiment") { None } else { Some(self.text("experiment")?) },
            bs,
            bs_max: if self.absent("bs_max") { bs } else { self.count("bs_max", bs)? },
            targets: one_if_absent("targets")?,
            luns: one_if_absent("luns")?,
            steer: unknown_if_absent("steer")?,
            queues: self.count("queues", 1)?,
            jobs: self.count("jobs", 1)?,
            iodepth: self.count("iodepth", 1)?,
            batch: self.count("batch", 0)?,
            runs: self.count("runs", 1)?,
            iops,
            bandwidth: (self.measured("bw_bytes_per_s")?, bandwidth_error),
            percentiles: self.percentiles()?.unwrap_or_else(|| tail.to_vec()),
            latency: (p50, p99),
            server_cpu: self.optional("server_cpu_us_per_io")?,
            merges: merges.iter().any(Option::is_some).then(|| merges.iter().flatten().sum()),
            requests_per_io: one_if_absent("requests_per_io")?,
            errors: if self.absent("errors") { 0 } else { self.count("errors", 0)? },
            series: self.series()?,
            run: None,
            op: UNKNOWN.into(),
        })
    }

    pub(super) fn wrong(&self, key: &str, expected: impl Display) -> String {
        let found = describe(self.fields.get(key));
        format!("{}{key}: found {found}, expected {expected}", self.under)
    }

    pub(super) fn absent(&self, key: &str) -> bool {
        matches!(self.fields.get(key), None | Some(Value::Null))
    }

    fn text(&self, key: &str) -> Result<String, String> {
        self.fields.get(key).and_then(Value::as_str).map(label).ok_or_else(|| self.wrong(key, "a string"))
    }

    pub(super) fn count(&self, key: &str, least: u64) -> Result<u64, String> {
        let range = least..=MAX_COUNT;
        let count = self.fields.get(key).and_then(Value::as_u64).filter(|count| range.contains(count));
        count.ok_or_else(|| self.wrong(key, format!("a whole number from {least} to 2^53")))
    }

    pub(super) fn measured(&self, key: &str) -> Result<f64, String> {
        number(self.fields.get(key), 0.0..=MAX_VALUE).ok_or_else(|| self.wrong(key, "a number from 0 to 1e15"))
    }

    pub(super) fn optional(&self, key: &str) -> Result<Option<f64>, String> {
        if self.absent(key) { Ok(None) } else { self.measured(key).map(Some) }
    }

    /// Returns `[[percentile, microseconds], ...]`, if the file has them.
    fn percentiles(&self) -> Result<Option<Vec<(f64, f64)>>, String> {
        const KEY: &str = "percentiles";
        if self.absent(KEY) {
            return Ok(None);
        }
        let expected = format!("1 to {MAX_PERCENTILES} pairs of a percentile and microseconds");
        let pairs = self.fields.get(KEY).and_then(Value::as_array);
        let pairs = pairs.filter(|pairs| (1..=MAX_PERCENTILES).contains(&pairs.len()));
        let pairs = pairs.ok_or_else(|| self.wrong(KEY, &expected))?;
        let mut read: Vec<(f64, f64)> = vec![];
        for pair in pairs {
            let values = pair.as_array().filter(|values| values.len() == 2);
            let percentile = values.and_then(|values| number(values.first(), 0.0..=100.0));
            let micros = values.and_then(|values| number(values.last(), 0.0..=MAX_VALUE));
            let next = percentile.zip(micros).filter(|next| read.last().is_none_or(|last| last.0 < next.0));
            let found = || describe(Some(pair));
            read.push(next.ok_or_else(|| {
                format!("{KEY}: found {}, expected a percentile (ascending, up to 100) and microseconds", found())
            })?);
        }
        Ok(Some(read))
    }
}

fn number(value: Option<&Value>, range: RangeInclusive<f64>) -> Option<f64> {
    // -0.0 is in the range, and would be printed with its sign.
    value.and_then(Value::as_f64).filter(|number| range.contains(number)).map(f64::abs)
}

/// Returns a value for an error: its kind, or as much of it as fits in a line.
pub(super) fn describe(value: Option<&Value>) -> String {
    match value {
        None => "nothing".into(),
        Some(Value::Object(_)) => "an object".into(),
        Some(Value::Array(values)) => format!("an array of {}", values.len()),
        Some(Value::String(text)) => format!("{:?}", truncate(text, 40)),
        Some(value) => value.to_string(),
    }
}

/// Returns text for a picture: characters that are not printable, that XML does not allow, or that turn the direction of text
/// are escaped. It has a bounded length, and is not empty.
pub(super) fn label(text: &str) -> String {
    let hidden = |c: char| {
        c.is_control()
            || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
            || matches!(c, '\u{fffe}' | '\u{ffff}')
    };
    let mut escaped = String::new();
    for c in text.chars().take(MAX_LABEL + 1) {
        if hidden(c) { escaped.extend(c.escape_default()) } else { escaped.push(c) }
    }
    if escaped.trim().is_empty() { "(empty)".into() } else { truncate(&escaped, MAX_LABEL) }
}

/// Returns `text`, or its first `most` characters and an ellipsis.
fn truncate(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> Value {
        serde_json::json!({
            "interface": "virtio-blk", "storage": "null", "target": "a", "rw": "read", "bs": 4096, "queues": 1, "jobs": 2,
            "iodepth": 32, "batch": 1, "poll": "off", "merge": "on", "runs": 3, "iops_mean": 1e5, "iops_stderr": 10,
            "bw_bytes_per_s": 4e8, "lat_us": {"mean": 3.0, "p50": 2.5, "p99": 7, "p999": 9.5, "max": 40},
            "server_cpu_us_per_io": null, "client_cpu_us_per_io": 1.0, "kicks_per_io": 0, "calls_per_io": 0, "errors": 0,
        })
    }

    fn read(value: &Value) -> Result<PlotRow, String> {
        parse(value.to_string().as_bytes(), "x.json").map(|rows| rows[0].clone())
    }

    #[test]
    fn a_row_of_an_old_and_of_a_new_file() {
        let old = read(&Value::Array(vec![row()])).unwrap();
        assert_eq!((old.bs, old.iops, old.latency), (4096, (1e5, 10.0), (2.5, 7.0)));
        assert_eq!(old.percentiles, [(50.0, 2.5), (99.0, 7.0), (99.9, 9.5), (100.0, 40.0)]);
        assert_eq!((old.merges, old.server_cpu, old.experiment), (None, None, None));
        let mut new = row();
        new["percentiles"] = serde_json::json!([[50, 2.5], [99.99, 8]]);
        new["rrqm_per_s"] = 5.into();
        new["wrqm_per_s"] = 2.into();
        new["experiment"] = "block sizes".into();
        let new = read(&Value::Array(vec![new])).unwrap();
        assert_eq!(new.percentiles, [(50.0, 2.5), (99.99, 8.0)]);
        assert_eq!((new.bs_max, new.targets, new.luns, new.steer.as_str()), (4096, 1, 1, "unknown"));
        assert_eq!((new.grants.as_str(), new.grants_pool.as_str()), ("unknown", "unknown"));
        assert_eq!(new.bandwidth, (4e8, 40960.0));
        let mut scsi = row();
        for (key, value) in [("targets", 32), ("luns", 2), ("bs_max", 65536), ("bw_stderr", 5)] {
            scsi[key] = value.into();
        }
        for (key, value) in [("steer", "fixed"), ("grants", "copy"), ("grants_pool", "shared")] {
            scsi[key] = value.into();
        }
        let scsi = read(&Value::Array(vec![scsi])).unwrap();
        assert_eq!((scsi.bs, scsi.bs_max, scsi.targets, scsi.luns), (4096, 65536, 32, 2));
        assert_eq!((scsi.steer.as_str(), scsi.bandwidth), ("fixed", (4e8, 5.0)));
        assert_eq!((scsi.grants.as_str(), scsi.grants_pool.as_str()), ("copy", "shared"));
        assert_eq!((new.merges, new.experiment.as_deref()), (Some(7.0), Some("block sizes")));
    }

    #[test]
    fn errors_name_row_key_and_value() {
        type Change = fn(&mut Value);
        let cases: [(Change, &str); 16] = [
            (|row| row["bs_max"] = 512.into(), "bs_max: found 512, expected a whole number from 4096"),
            (|row| row["iops_mean"] = (-5).into(), "iops_mean: found -5, expected a number from 0"),
            (|row| row["iops_mean"] = Value::Null, "iops_mean: found null, expected a number"),
            (|row| row["iops_mean"] = 1e300.into(), "iops_mean: found 1e+300, expected"),
            (|row| row["bw_bytes_per_s"] = "many".into(), "bw_bytes_per_s: found \"many\", expected"),
            (|row| row["queues"] = 0.into(), "queues: found 0, expected a whole number from 1"),
            (|row| row["jobs"] = 1.5.into(), "jobs: found 1.5, expected a whole number"),
            (|row| row["bs"] = u64::MAX.into(), "bs: found 18446744073709551615, expected a whole number"),
            (|row| row["target"] = 7.into(), "target: found 7, expected a string"),
            (|row| row["lat_us"] = 7.into(), "lat_us: found 7, expected an object"),
            (|row| row["lat_us"]["p999"] = true.into(), "lat_us.p999: found true, expected a number"),
            (|row| drop(row.as_object_mut().unwrap().remove("rw")), "rw: found nothing, expected a string"),
            (|row| row["percentiles"] = serde_json::json!([]), "percentiles: found an array of 0, expected 1 to"),
            (
                |row| row["percentiles"] = serde_json::json!([[9, 1], [9, 1]]),
                "percentiles: found an array of 2, expected a",
            ),
            (|row| row["server_cpu_us_per_io"] = (-1).into(), "server_cpu_us_per_io: found -1, expected"),
            (|row| *row = 3.into(), "found 3, expected an object"),
        ];
        for (change, expected) in cases {
            let mut wrong = row();
            change(&mut wrong);
            let error = parse(Value::Array(vec![row(), wrong]).to_string().as_bytes(), "x").unwrap_err();
            assert!(error.starts_with(&format!("row 2 of 2: {expected}")), "{error}");
        }
        assert!(parse(b"[NaN]", "x").unwrap_err().starts_with("not JSON: "));
        assert!(parse(b"{}", "x").unwrap_err().starts_with("found an object, expected the JSON array"));
        assert!(parse(b"[]", "x").unwrap_err().starts_with("found an empty array"));
        assert!(parse(&[b'['; 1 << 20], "x").unwrap_err().starts_with("not JSON: recursion"));
    }

    fn with_series() -> Value {
        let point = |start: f64| serde_json::json!({"start_ms": start, "iops": 10, "mean_us": 5.5, "max_us": 7});
        let pause = serde_json::json!({"start_ms": 200, "iops": 0, "mean_us": null, "max_us": null});
        let read = [point(0.0), point(100.0), pause];
        let series = serde_json::json!({"interval_ms": 100, "end_ms": 270.5, "read": read, "write": null, "flush": []});
        let mut row = row();
        row["each_run"] = serde_json::json!([{"errors": 2}, {"errors": 3, "series": series}, {"series": null}]);
        row
    }

    #[test]
    fn time_series_are_of_runs_and_operations() {
        let series = read(&Value::Array(vec![with_series()])).unwrap().series;
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
            (
                |row| row["each_run"][1]["series"]["read"] = 3.into(),
                "each_run[1].series.read: found 3, expected an array",
            ),
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
            let error = read(&Value::Array(vec![wrong])).unwrap_err();
            assert!(error.starts_with(&format!("row 1 of 1: {expected}")), "{error}");
        }
    }

    #[test]
    fn labels_are_escaped_and_cut() {
        assert_eq!(label("a\u{1b}[1m\n\u{202e}b\u{ffff}"), "a\\u{1b}[1m\\n\\u{202e}b\\u{ffff}");
        assert_eq!((label("é <&>"), label(" "), label("\0")), ("é <&>".into(), "(empty)".into(), "\\u{0}".into()));
        assert_eq!(label(&"ä".repeat(1000)), format!("{}…", "ä".repeat(MAX_LABEL)));
    }
}
