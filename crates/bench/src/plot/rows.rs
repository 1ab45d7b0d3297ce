//! Result files: the JSON array that `mqblk bench --json` writes (its keys are those of [`crate::report::ResultRow`]),
//! checked key by key, since a person may have edited it or put several files together.

use std::fmt::Display;
use std::io::Read;
use std::ops::RangeInclusive;
use std::path::Path;

use serde_json::{Map, Value};

use super::PlotError;
use super::keys::{KEYS, KeyFormat, KeyValue, RowKey};
use super::series::OperationSeries;
use crate::words::IoSizes;
use mqblk_core::ByteLen;

/// Most bytes of a result file: some ten thousand rows.
const MAX_FILE: u64 = 16 << 20;
/// Most rows of all files together.
pub(super) const MAX_ROWS: usize = 20_000;
/// Most percentiles of a row.
const MAX_PERCENTILES: usize = 1000;
/// Most characters of a label; longer ones are cut.
const MAX_LABEL: usize = 160;
/// Largest measured value. Far above any real one; sums and products stay finite.
const MAX_VALUE: f64 = 1e15;
/// Largest count and block size: exact as a floating-point number.
const MAX_COUNT: u64 = 1 << 53;

/// One row of a result file, as far as it is drawn.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PlotRow {
    /// The value of each [`RowKey`].
    pub keys: Vec<KeyValue>,
    /// Runs.
    pub runs: u64,
    /// I/Os per second, mean over the runs, and its standard error.
    pub iops: (f64, f64),
    /// Bytes per second, mean over the runs, and its standard error.
    pub bandwidth: (f64, f64),
    /// Percentile (0 to 100) and latency in microseconds, ascending.
    pub percentiles: Vec<(f64, f64)>,
    /// Median and 99th percentile of the latency, in microseconds.
    pub latency: (f64, f64),
    /// Mean latency in microseconds, if the file has it.
    pub mean_latency: Option<f64>,
    /// CPU time of the server for an I/O, in microseconds, if it is known.
    pub server_cpu: Option<f64>,
    /// Share of the requests that the server merged into others, in percent, if they were counted.
    pub merged_percent: Option<f64>,
    /// I/Os that failed or did not verify.
    pub errors: u64,
    /// Its time series: of all runs and operations; of one where these are drawn.
    pub series: Vec<OperationSeries>,
}

impl PlotRow {
    /// Returns the value of a key.
    pub(crate) fn key(&self, key: RowKey) -> &KeyValue {
        &self.keys[key as usize]
    }

    /// Returns the value of a key, if it is a number.
    pub(crate) fn number(&self, key: RowKey) -> Option<u64> {
        if let KeyValue::Number(number) = self.key(key) { Some(*number) } else { None }
    }

    /// Returns the value of a key; empty if it is a number.
    pub(crate) fn text(&self, key: RowKey) -> &str {
        if let KeyValue::Text(text) = self.key(key) { text } else { "" }
    }
}

/// Reads the rows of `path`. `file`: its short name.
///
/// # Errors
/// When it cannot be read, is too large, or is not what the benchmark writes. The error names the row, the key, the
/// found and the expected value.
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

/// Parses a result file. `file`: its short name. Errors are as those of [`read`], without the file.
pub(super) fn parse(text: &[u8], file: &str) -> Result<Vec<PlotRow>, String> {
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
        let row = Fields::of(value).and_then(|fields| fields.row(file));
        row.map_err(|why| format!("row {} of {}: {why}", at + 1, values.len()))
    };
    values.iter().enumerate().map(row).collect()
}

/// The keys of a row, or of an object in it. Errors name the key, the found and the expected value.
pub(super) struct Fields<'a>(pub &'a Map<String, Value>);

impl<'a> Fields<'a> {
    /// Returns the keys of an object.
    pub(super) fn of(value: &'a Value) -> Result<Fields<'a>, String> {
        value.as_object().map(Fields).ok_or_else(|| format!("found {}, expected an object", describe(Some(value))))
    }

    fn row(&self, file: &str) -> Result<PlotRow, String> {
        let mut keys =
            KEYS.iter().map(|(_, _, name, format, ..)| self.key(name, *format)).collect::<Result<Vec<_>, _>>()?;
        keys[RowKey::File as usize] = KeyValue::Text(file.to_owned());
        let bs = self.count("bs", 1)?;
        let bs_max = if self.is_absent("bs_max") { bs } else { self.count("bs_max", bs)? };
        if bs_max > bs {
            let sizes = IoSizes { min: ByteLen(bs), max: ByteLen(bs_max) };
            keys[RowKey::Bs as usize] = KeyValue::Text(sizes.to_string());
        }
        if keys[RowKey::Fsync as usize] == KeyValue::Number(0) {
            keys[RowKey::Fsync as usize] = KeyValue::unknown();
        }
        let expected = "an object with p50, p99, p999 and max";
        let latency = self.0.get("lat_us").and_then(Value::as_object).ok_or_else(|| self.wrong("lat_us", expected))?;
        let latency = Fields(latency);
        let under = |why: String| format!("lat_us.{why}");
        let [p50, p99, p999, max] = ["p50", "p99", "p999", "max"].map(|key| latency.measured(key).map_err(under));
        let (p50, p99) = (p50?, p99?);
        let tail = vec![(50.0, p50), (99.0, p99), (99.9, p999?), (100.0, max?)];
        let iops = (self.measured("iops_mean")?, self.measured("iops_stderr")?);
        // Files from before mixed sizes lack it.
        let bandwidth_error = self.optional("bw_stderr")?.unwrap_or(iops.1 * bs as f64);
        let merges = [self.optional("rrqm_per_s")?, self.optional("wrqm_per_s")?];
        let parts = if self.is_absent("requests_per_io") { 1 } else { self.count("requests_per_io", 1)? };
        let requests = iops.0 * parts as f64;
        // Both are rates of times that differ by milliseconds.
        let percent = |merged: f64| if requests > 0.0 { (merged / requests * 100.0).min(100.0) } else { 0.0 };
        Ok(PlotRow {
            keys,
            runs: self.count("runs", 1)?,
            iops,
            bandwidth: (self.measured("bw_bytes_per_s")?, bandwidth_error),
            percentiles: self.percentiles()?.unwrap_or(tail),
            latency: (p50, p99),
            mean_latency: latency.optional("mean").map_err(under)?,
            server_cpu: self.optional("server_cpu_us_per_io")?,
            merged_percent: merges.iter().flatten().copied().reduce(|a, b| a + b).map(percent),
            errors: if self.is_absent("errors") { 0 } else { self.count("errors", 0)? },
            series: self.series()?,
        })
    }

    /// Returns the value of a row's key.
    fn key(&self, name: &str, format: KeyFormat) -> Result<KeyValue, String> {
        let is_absent = self.is_absent(name);
        match format {
            KeyFormat::Own(_) => Ok(KeyValue::unknown()),
            KeyFormat::TextIfAny | KeyFormat::Counted if is_absent => Ok(KeyValue::unknown()),
            KeyFormat::CountOr1 if is_absent => Ok(KeyValue::Number(1)),
            KeyFormat::Text | KeyFormat::TextIfAny => {
                let text = self.0.get(name).and_then(Value::as_str);
                text.map(|text| KeyValue::Text(label(text))).ok_or_else(|| self.wrong(name, "a string"))
            }
            KeyFormat::Counted => self.count(name, 0).map(KeyValue::Number),
            KeyFormat::CountOr1 => self.count(name, 1).map(KeyValue::Number),
            KeyFormat::Count(least) => self.count(name, least).map(KeyValue::Number),
        }
    }

    pub(super) fn wrong(&self, key: &str, expected: impl Display) -> String {
        format!("{key}: found {}, expected {expected}", describe(self.0.get(key)))
    }

    pub(super) fn is_absent(&self, key: &str) -> bool {
        matches!(self.0.get(key), None | Some(Value::Null))
    }

    pub(super) fn count(&self, key: &str, least: u64) -> Result<u64, String> {
        let range = least..=MAX_COUNT;
        let count = self.0.get(key).and_then(Value::as_u64).filter(|count| range.contains(count));
        count.ok_or_else(|| self.wrong(key, format!("a whole number from {least} to 2^53")))
    }

    pub(super) fn measured(&self, key: &str) -> Result<f64, String> {
        number(self.0.get(key), 0.0..=MAX_VALUE).ok_or_else(|| self.wrong(key, "a number from 0 to 1e15"))
    }

    pub(super) fn optional(&self, key: &str) -> Result<Option<f64>, String> {
        if self.is_absent(key) { Ok(None) } else { self.measured(key).map(Some) }
    }

    /// Returns `[[percentile, microseconds], ...]`, if the file has them.
    fn percentiles(&self) -> Result<Option<Vec<(f64, f64)>>, String> {
        const KEY: &str = "percentiles";
        if self.is_absent(KEY) {
            return Ok(None);
        }
        let expected = format!("1 to {MAX_PERCENTILES} pairs of a percentile and microseconds");
        let pairs = self.0.get(KEY).and_then(Value::as_array);
        let pairs = pairs.filter(|pairs| (1..=MAX_PERCENTILES).contains(&pairs.len()));
        let mut read: Vec<(f64, f64)> = vec![];
        for pair in pairs.ok_or_else(|| self.wrong(KEY, &expected))? {
            let values = pair.as_array().filter(|values| values.len() == 2);
            let percentile = values.and_then(|values| number(values.first(), 0.0..=100.0));
            let micros = values.and_then(|values| number(values.last(), 0.0..=MAX_VALUE));
            let next = percentile.zip(micros).filter(|next| read.last().is_none_or(|last| last.0 < next.0));
            read.push(next.ok_or_else(|| {
                let found = describe(Some(pair));
                format!("{KEY}: found {found}, expected a percentile (ascending, up to 100) and microseconds")
            })?);
        }
        Ok(Some(read))
    }
}

fn number(value: Option<&Value>, range: RangeInclusive<f64>) -> Option<f64> {
    // -0.0 is in the range, and would be printed with its sign.
    value.and_then(Value::as_f64).filter(|number| range.contains(number)).map(f64::abs)
}

/// Returns a value for an error: its type, or as much of it as fits in a line.
pub(super) fn describe(value: Option<&Value>) -> String {
    match value {
        None => "nothing".into(),
        Some(Value::Object(_)) => "an object".into(),
        Some(Value::Array(values)) => format!("an array of {}", values.len()),
        Some(Value::String(text)) => format!("{:?}", truncate(text, 40)),
        Some(value) => value.to_string(),
    }
}

/// Returns text for a picture: characters that are not printable, that XML does not allow, or that turn the direction
/// of text are escaped. It has a bounded length, and is not empty.
pub(super) fn label(text: &str) -> String {
    let is_hidden = |c: char| {
        c.is_control()
            || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
            || matches!(c, '\u{fffe}' | '\u{ffff}')
    };
    let mut escaped = String::new();
    for c in text.chars().take(MAX_LABEL + 1) {
        if is_hidden(c) { escaped.extend(c.escape_default()) } else { escaped.push(c) }
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
