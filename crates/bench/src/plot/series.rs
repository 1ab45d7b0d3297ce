//! Time series: completions in each interval of a run. Each operation of each run is a row.

use std::collections::BTreeSet;

use serde_json::Value;

use super::PlotError;
use super::axis::{AxisScale, Quantity, measured};
use super::chart::{HorizontalAxis, Sample, SeriesLine};
use super::keys::{KeyValue, RowKey, RowTable};
use super::metric::Metric;
use super::rows::{Fields, PlotRow};
use crate::worker::MAX_INTERVALS;

/// Most points of a line: about its number of pixels.
const MAX_POINTS: usize = 1000;
/// The operations that are I/Os, by their keys in a file.
const OPERATIONS: [&str; 3] = ["read", "write", "trim"];

/// The time series of one operation of a run.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct OperationSeries {
    /// Number of the run, from 1.
    pub run: u64,
    /// Key of the operation: read, write or trim.
    pub op: &'static str,
    /// Requests of the run that failed.
    pub errors: u64,
    /// Length of an interval in milliseconds; the last one has its own.
    pub interval_ms: f64,
    /// Ascending.
    pub points: Vec<SeriesInterval>,
}

/// An interval, or several together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SeriesInterval {
    /// Start and end in milliseconds from the start of the measurement.
    pub time_ms: (f64, f64),
    /// Requests that completed in it, per second.
    pub iops: f64,
    /// Mean and greatest of their latencies in microseconds, if there were any.
    pub latency: Option<(f64, f64)>,
}

impl Fields<'_> {
    /// Returns the time series of all runs, if the file has some.
    pub(super) fn series(&self) -> Result<Vec<OperationSeries>, String> {
        const KEY: &str = "each_run";
        if self.is_absent(KEY) {
            return Ok(vec![]);
        }
        let runs = self.0.get(KEY).and_then(Value::as_array).ok_or_else(|| self.wrong(KEY, "an array"))?;
        let mut found = vec![];
        for (at, run) in runs.iter().enumerate() {
            let run = Fields::of(run).map_err(|why| format!("{KEY}[{at}]: {why}"))?;
            if let Some(value) = run.0.get("series").filter(|value| !value.is_null()) {
                let in_run = |why: String| format!("{KEY}[{at}].{why}");
                let errors = if run.is_absent("errors") { 0 } else { run.count("errors", 0).map_err(in_run)? };
                let series = Fields::of(value).map_err(|why| in_run(format!("series: {why}")))?;
                let in_series = |why: String| in_run(format!("series.{why}"));
                let interval_ms = series.measured("interval_ms").map_err(in_series)?;
                for op in OPERATIONS.into_iter().filter(|op| !series.is_absent(op)) {
                    let points = series.points(op).map_err(in_series)?;
                    found.push(OperationSeries { run: at as u64 + 1, op, errors, interval_ms, points });
                }
            }
        }
        Ok(found)
    }

    /// Returns the points of an operation's series.
    fn points(&self, op: &str) -> Result<Vec<SeriesInterval>, String> {
        let values = self.0.get(op).and_then(Value::as_array).filter(|values| values.len() <= MAX_INTERVALS);
        let values = values.ok_or_else(|| self.wrong(op, format!("an array of at most {MAX_INTERVALS}")))?;
        let mut points: Vec<SeriesInterval> = vec![];
        for (at, value) in values.iter().enumerate() {
            let point = Fields::of(value).map_err(|why| format!("{op}[{at}]: {why}"))?;
            let here = |why: String| format!("{op}[{at}].{why}");
            let start = point.measured("start_ms").map_err(here)?;
            if let Some(before) = points.last_mut() {
                if start <= before.time_ms.0 {
                    return Err(here(point.wrong("start_ms", "a time after the one before")));
                }
                before.time_ms.1 = start;
            }
            let [mean, max] = [point.optional("mean_us").map_err(here)?, point.optional("max_us").map_err(here)?];
            let iops = point.measured("iops").map_err(here)?;
            points.push(SeriesInterval { time_ms: (start, start), iops, latency: mean.zip(max) });
        }
        let end = self.measured("end_ms")?;
        if let Some(last) = points.last_mut() {
            if end < last.time_ms.0 {
                return Err(self.wrong("end_ms", format!("the end of the last interval, at least {}", last.time_ms.0)));
            }
            last.time_ms.1 = end;
        }
        Ok(points)
    }
}

/// Returns a row for each operation of each run. Rows without a time series are left out.
///
/// # Errors
/// When no row has one.
pub(super) fn of_each_run(rows: Vec<PlotRow>) -> Result<Vec<PlotRow>, PlotError> {
    let each = |row: PlotRow| {
        let all = row.series.clone();
        all.into_iter().filter(|series| !series.points.is_empty()).map(move |series| {
            let mut own = PlotRow { errors: series.errors, ..row.clone() };
            own.keys[RowKey::Run as usize] = KeyValue::Number(series.run);
            own.keys[RowKey::Op as usize] = KeyValue::Text(series.op.to_owned());
            own.series = vec![series];
            own
        })
    };
    let rows: Vec<PlotRow> = rows.into_iter().flat_map(each).collect();
    match rows.is_empty() {
        true => Err(PlotError::option(
            "x",
            "time, and no row with a time series (the key series of each_run)",
            "at least one: record it with `mqblk bench --interval 100ms --json FILE`",
        )),
        false => Ok(rows),
    }
}

/// Returns the number of intervals per point: more than 1 if a line would have more points than pixels.
fn intervals_per_point(table: &RowTable) -> usize {
    let longest = table.rows.iter().flat_map(|row| &row.series).map(|series| series.points.len()).max();
    longest.unwrap_or(0).div_ceil(MAX_POINTS).max(1)
}

/// Returns intervals merged into one point.
fn as_one(points: &[SeriesInterval]) -> SeriesInterval {
    if let [only] = points {
        return *only;
    }
    let length = |point: &SeriesInterval| point.time_ms.1 - point.time_ms.0;
    let requests = |point: &SeriesInterval| point.iops * length(point);
    let sum = |value: &dyn Fn(&SeriesInterval) -> f64| points.iter().map(value).sum::<f64>();
    let (time, all) = (sum(&length), sum(&requests));
    let mean = sum(&|point| point.latency.map_or(0.0, |latency| latency.0 * requests(point))) / all;
    let most = points.iter().filter_map(|point| point.latency).map(|latency| latency.1).reduce(f64::max);
    SeriesInterval {
        time_ms: (points[0].time_ms.0, points[points.len() - 1].time_ms.1),
        iops: if time > 0.0 { all / time } else { 0.0 },
        latency: most.filter(|_| all > 0.0).map(|most| (mean, most)),
    }
}

/// Returns the sentence that explains a point.
pub(super) fn caption(table: &RowTable) -> String {
    let series = table.rows.iter().flat_map(|row| &row.series);
    let lengths: BTreeSet<String> = series.map(|one| measured(one.interval_ms * 1e3, Quantity::Micros)).collect();
    let lengths = lengths.into_iter().collect::<Vec<_>>().join(" or ");
    match intervals_per_point(table) {
        1 => format!("A point is an interval of {lengths}, at its middle."),
        count => format!(
            "A point is {count} intervals of {lengths} together, at their middle: mean IOPS, mean latency, greatest latency."
        ),
    }
}

/// Returns the horizontal axis, in seconds.
pub(super) fn axis(table: &RowTable) -> HorizontalAxis {
    let points = table.rows.iter().flat_map(|row| &row.series).filter_map(|series| series.points.last());
    let last = points.map(|point| point.time_ms.1 / 1e3).fold(0.0, f64::max);
    let mut ticks = AxisScale::linear(last, Quantity::Ratio).ticks;
    ticks.retain(|tick| tick.at <= last * (1.0 + 1e-9));
    HorizontalAxis { title: "time from the start of the measurement (s)".into(), ticks, bars: false }
}

/// Returns the lines of a row. A latency has a gap where nothing completed.
pub(super) fn lines(table: &RowTable, metric: Metric, row: usize, series: usize) -> Vec<SeriesLine> {
    let per_point = intervals_per_point(table);
    let all = table.rows[row].series.iter().flat_map(|series| series.points.chunks(per_point).map(as_one));
    let points: Vec<SeriesInterval> = all.collect();
    let mut lines = vec![];
    let mut add = |dashed: bool, what: &str, value: &dyn Fn(&SeriesInterval) -> Option<f64>| {
        let sample = |point: &SeriesInterval| {
            let (y, (start, end)) = (value(point)?, point.time_ms);
            let short = measured(y, metric.quantity());
            let [from, to] = [start, end].map(|ms| measured(ms * 1e3, Quantity::Micros));
            let label = format!("{from} to {to}: {what}{short}{}", metric.unit());
            Some(Sample { x: (start + end) / 2e3, y, error: 0.0, short, label })
        };
        for part in points.chunk_by(|a, b| value(a).is_some() == value(b).is_some()) {
            let samples: Vec<Sample> = part.iter().filter_map(sample).collect();
            if !samples.is_empty() {
                lines.push(SeriesLine { series, is_reference: false, dashed, samples });
            }
        }
    };
    match metric {
        Metric::LatencySeries => {
            add(false, "mean ", &|point| point.latency.map(|latency| latency.0));
            add(true, "greatest ", &|point| point.latency.map(|latency| latency.1));
        }
        _ => add(false, "", &|point| Some(point.iops)),
    }
    lines
}
