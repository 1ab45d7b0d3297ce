//! Result files: the JSON array that `mqblk bench --json` writes (its keys are those of [`crate::report::ResultRow`]),
//! checked key by key, since a person may have edited it or put several files together.

use std::io::Read;
use std::path::Path;

use clap::ValueEnum;
use mqblk_core::ByteLen;
use serde_json::Value;

use super::intervals::{OperationSeries, series_of_runs};
use super::keys::{KeyFormat, KeyValue, RowKey};
use super::place::{FilePlace, truncate};
use crate::BenchError;
use crate::words::IoSizes;

/// Most bytes of a result file: some ten thousand rows.
const MAX_FILE: u64 = 16 << 20;
/// Most rows of all files together.
pub(super) const MAX_ROWS: usize = 20_000;
/// Most percentiles of a row.
const MAX_PERCENTILES: usize = 1000;
/// Most characters of a label; longer ones are cut.
const MAX_LABEL: usize = 160;

/// One row of a result file, as far as it is drawn.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PlotRow {
    /// The value of each [`RowKey`].
    pub keys: Vec<KeyValue>,
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
pub(super) fn read(path: &Path, file: &str) -> Result<Vec<PlotRow>, BenchError> {
    let wrong = |what: String| BenchError::Usage(format!("{}: {what}", path.display()));
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
    const EXPECTED: &str = "the JSON array that `mqblk bench --json` writes";
    let value: Value =
        serde_json::from_slice(text).map_err(|error| format!("not JSON: {error}; expected {EXPECTED}"))?;
    let rows = value.as_array().ok_or_else(|| FilePlace::whole(&value).wrong(EXPECTED))?;
    if rows.is_empty() {
        return Err("found an empty array, expected at least one row".into());
    }
    let numbered = |(at, value): (usize, &Value)| {
        row(&FilePlace::whole(value), file).map_err(|why| format!("row {} of {}: {why}", at + 1, rows.len()))
    };
    rows.iter().enumerate().map(numbered).collect()
}

fn row(row: &FilePlace, file: &str) -> Result<PlotRow, String> {
    row.object()?;
    let mut keys = RowKey::value_variants().iter().map(|key| key_value(row, *key)).collect::<Result<Vec<_>, _>>()?;
    keys[RowKey::File as usize] = KeyValue::Text(file.to_owned());
    let bs = row.at("bs").count(1)?;
    let bs_max = row.at("bs_max").optional(|bs_max| bs_max.count(bs))?.unwrap_or(bs);
    if bs_max > bs {
        let sizes = IoSizes { min: ByteLen(bs), max: ByteLen(bs_max) };
        keys[RowKey::Bs as usize] = KeyValue::Text(sizes.to_string());
    }
    if keys[RowKey::Fsync as usize] == KeyValue::Number(0) {
        keys[RowKey::Fsync as usize] = KeyValue::unknown();
    }
    let latency = row.at("lat_us");
    latency.object()?;
    let us = |key: &str| latency.at(key).measured();
    let (p50, p99) = (us("p50")?, us("p99")?);
    let tail = vec![(50.0, p50), (99.0, p99), (99.9, us("p999")?), (100.0, us("max")?)];
    let measured = |key: &str| row.at(key).measured();
    let optional = |key: &str| row.at(key).optional(FilePlace::measured);
    let iops = (measured("iops_mean")?, measured("iops_stderr")?);
    // Files from before mixed sizes lack it.
    let bandwidth_error = optional("bw_stderr")?.unwrap_or(iops.1 * bs as f64);
    let merges = [optional("rrqm_per_s")?, optional("wrqm_per_s")?];
    let requests = iops.0 * row.at("requests_per_io").optional(|parts| parts.count(1))?.unwrap_or(1) as f64;
    // Both are rates of times that differ by milliseconds.
    let percent = |merged: f64| if requests > 0.0 { (merged / requests * 100.0).min(100.0) } else { 0.0 };
    Ok(PlotRow {
        keys,
        runs: row.at("runs").count(1)?,
        iops,
        bandwidth: (measured("bw_bytes_per_s")?, bandwidth_error),
        percentiles: row.at("percentiles").optional(percentiles)?.unwrap_or(tail),
        latency: (p50, p99),
        mean_latency: latency.at("mean").optional(FilePlace::measured)?,
        server_cpu: optional("server_cpu_us_per_io")?,
        merged_percent: merges.iter().flatten().copied().reduce(|a, b| a + b).map(percent),
        errors: row.at("errors").optional(|errors| errors.count(0))?.unwrap_or(0),
        series: row.at("each_run").optional(series_of_runs)?.unwrap_or_default(),
    })
}

/// Returns the value of a row's key.
fn key_value(row: &FilePlace, key: RowKey) -> Result<KeyValue, String> {
    let (name, format, ..) = key.words();
    let place = row.at(name);
    let text = |place: &FilePlace| place.text().map(|text| KeyValue::Text(label(text)));
    let count = |least: u64| move |place: &FilePlace| place.count(least).map(KeyValue::Number);
    match format {
        KeyFormat::Text => text(&place),
        KeyFormat::Count(least) => count(least)(&place),
        KeyFormat::TextIfAny => Ok(place.optional(text)?.unwrap_or_else(KeyValue::unknown)),
        KeyFormat::CountIfAny => Ok(place.optional(count(0))?.unwrap_or_else(KeyValue::unknown)),
        KeyFormat::CountOr1 => Ok(place.optional(count(1))?.unwrap_or(KeyValue::Number(1))),
        KeyFormat::Own => Ok(KeyValue::unknown()),
    }
}

/// Returns `[[percentile, microseconds], ...]`.
fn percentiles(place: &FilePlace) -> Result<Vec<(f64, f64)>, String> {
    let pairs = place.items().filter(|pairs| (1..=MAX_PERCENTILES).contains(&pairs.len()));
    let expected = || place.wrong(format!("1 to {MAX_PERCENTILES} pairs of a percentile and microseconds"));
    let mut read: Vec<(f64, f64)> = vec![];
    for pair in pairs.ok_or_else(expected)? {
        let next = pair.percentile().filter(|next| read.last().is_none_or(|last| last.0 < next.0));
        read.push(next.ok_or_else(|| pair.wrong("a percentile (ascending, up to 100) and microseconds"))?);
    }
    Ok(read)
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
