//! Time series: what completed in each interval of a run, over time. Each operation of each run is a row of its own.

use std::collections::BTreeSet;

use serde_json::Value;

use super::PlotError;
use super::axis::{AxisScale, Quantity, measured};
use super::chart::{HorizontalAxis, Sample, SeriesLine};
use super::keys::RowTable;
use super::metric::Metric;
use super::rows::{Fields, PlotRow, describe};
use crate::worker::MAX_INTERVALS;

/// Most points of a line: about as many as it has pixels.
const MAX_POINTS: usize = 1000;
/// The operations that are I/Os, by their keys in a file.
const OPERATIONS: [&str; 3] = ["read", "write", "trim"];

/// The time series of one operation of a run.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TimeSeries {
    /// Number of the run, from 1.
    pub run: u64,
    /// Key of the operation: read, write or trim.
    pub op: &'static str,
    /// Requests of the run that failed.
    pub errors: u64,
    /// Length of an interval in milliseconds; the last one has its own.
    pub interval_ms: f64,
    /// Ascending.
    pub points: Vec<SeriesPoint>,
}

/// An interval, or several together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct SeriesPoint {
    /// Start and end in milliseconds from the start of the measurement.
    pub time_ms: (f64, f64),
    /// Requests that completed in it, per second.
    pub iops: f64,
    /// Mean and greatest of their latencies in microseconds, if there were any.
    pub latency: Option<(f64, f64)>,
}

impl Fields<'_> {
    /// Returns the time series of all runs, if the file has some.
    pub(super) fn series(&self) -> Result<Vec<TimeSeries>, String> {
        const KEY: &str = "each_run";
        if self.absent(KEY) {
            return Ok(vec![]);
        }
        let runs = self.fields.get(KEY).and_then(Value::as_array).ok_or_else(|| self.wrong(KEY, "an array"))?;
        let mut found = vec![];
        for (at, run) in runs.iter().enumerate() {
            let in_run = |why: String| format!("{KEY}[{at}].{why}");
            let run = run
                .as_object()
                .ok_or_else(|| format!("{KEY}[{at}]: found {}, expected an object", describe(Some(run))))?;
            let run = Fields { under: "", fields: run };
            if run.absent("series") {
                continue;
            }
            let fields = run.fields.get("series").and_then(Value::as_object);
            let fields = fields
                .ok_or_else(|| in_run(run.wrong("series", "an object with interval_ms, end_ms and operations")))?;
            let series = Fields { under: "series.", fields };
            let errors = if run.absent("errors") { 0 } else { run.count("errors", 0).map_err(in_run)? };
            let interval_ms = series.measured("interval_ms").map_err(in_run)?;
            for op in OPERATIONS.into_iter().filter(|op| !series.absent(op)) {
                let points = series.points(op).map_err(in_run)?;
                found.push(TimeSeries { run: at as u64 + 1, op, errors, interval_ms, points });
            }
        }
        Ok(found)
    }

    /// Returns the points of an operation's series.
    fn points(&self, op: &str) -> Result<Vec<SeriesPoint>, String> {
        let values = self.fields.get(op).and_then(Value::as_array).filter(|values| values.len() <= MAX_INTERVALS);
        let values = values.ok_or_else(|| self.wrong(op, format!("an array of at most {MAX_INTERVALS}")))?;
        let mut points: Vec<SeriesPoint> = vec![];
        for (at, value) in values.iter().enumerate() {
            let here = |why: String| format!("{}{op}[{at}].{why}", self.under);
            let fields = value.as_object().ok_or_else(|| {
                format!("{}{op}[{at}]: found {}, expected an object", self.under, describe(Some(value)))
            })?;
            let point = Fields { under: "", fields };
            let start = point.measured("start_ms").map_err(here)?;
            if let Some(before) = points.last_mut() {
                if start <= before.time_ms.0 {
                    return Err(here(point.wrong("start_ms", "a time after the one before")));
                }
                before.time_ms.1 = start;
            }
            let [mean, max] = [point.optional("mean_us").map_err(here)?, point.optional("max_us").map_err(here)?];
            let iops = point.measured("iops").map_err(here)?;
            points.push(SeriesPoint { time_ms: (start, start), iops, latency: mean.zip(max) });
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
        all.into_iter().filter(|series| !series.points.is_empty()).map(move |series| PlotRow {
            run: Some(series.run),
            op: series.op.to_owned(),
            errors: series.errors,
            series: vec![series],
            ..row.clone()
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

/// Returns how many intervals a point is: more than 1 where a line would have more points than pixels.
fn intervals_per_point(table: &RowTable) -> usize {
    let longest = table.rows.iter().flat_map(|row| &row.series).map(|series| series.points.len()).max();
    longest.unwrap_or(0).div_ceil(MAX_POINTS).max(1)
}

/// Returns `count` points as one.
fn as_one(points: &[SeriesPoint]) -> SeriesPoint {
    let length = |point: &SeriesPoint| point.time_ms.1 - point.time_ms.0;
    let requests = |point: &SeriesPoint| point.iops * length(point);
    let sum = |value: &dyn Fn(&SeriesPoint) -> f64| points.iter().map(value).sum::<f64>();
    let (time, all) = (sum(&length), sum(&requests));
    let latencies = || points.iter().filter_map(|point| point.latency.map(|latency| (latency, requests(point))));
    let mean = latencies().map(|((mean, _), requests)| mean * requests).sum::<f64>() / all;
    let most = latencies().map(|((_, max), _)| max).reduce(f64::max);
    match points {
        [only] => *only,
        _ => SeriesPoint {
            time_ms: (points[0].time_ms.0, points[points.len() - 1].time_ms.1),
            iops: if time > 0.0 { all / time } else { 0.0 },
            latency: most.filter(|_| all > 0.0).map(|most| (mean, most)),
        },
    }
}

/// Returns what a point is.
pub(super) fn caption(table: &RowTable) -> String {
    let lengths: BTreeSet<String> = table
        .rows
        .iter()
        .flat_map(|row| &row.series)
        .map(|series| measured(series.interval_ms * 1e3, Quantity::Micros))
        .collect();
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

/// Returns the lines of `rows`, each with the index of its series. A latency has a gap where nothing completed.
pub(super) fn lines(
    table: &RowTable,
    metric: Metric,
    rows: &mut dyn Iterator<Item = (usize, usize)>,
) -> Vec<SeriesLine> {
    let per_point = intervals_per_point(table);
    let mut lines = vec![];
    for (row, series) in rows {
        let points = table.rows[row].series.iter().flat_map(|series| series.points.chunks(per_point).map(as_one));
        let points: Vec<SeriesPoint> = points.collect();
        let mut line = |dashed: bool, what: &str, value: &dyn Fn(&SeriesPoint) -> Option<f64>| {
            for part in points.chunk_by(|a, b| value(a).is_some() == value(b).is_some()) {
                let sample = |point: &SeriesPoint| value(point).map(|value| sample(point, value, metric, what));
                let samples: Vec<Sample> = part.iter().filter_map(sample).collect();
                if !samples.is_empty() {
                    lines.push(SeriesLine { series, dashed, samples });
                }
            }
        };
        match metric {
            Metric::LatencySeries => {
                line(false, "mean ", &|point| point.latency.map(|latency| latency.0));
                line(true, "greatest ", &|point| point.latency.map(|latency| latency.1));
            }
            _ => line(false, "", &|point| Some(point.iops)),
        }
    }
    lines
}

fn sample(point: &SeriesPoint, value: f64, metric: Metric, what: &str) -> Sample {
    let short = measured(value, metric.quantity());
    let [start, end] = [point.time_ms.0, point.time_ms.1].map(|ms| measured(ms * 1e3, Quantity::Micros));
    let label = format!("{start} to {end}: {what}{short}{}", metric.unit());
    Sample { x: (point.time_ms.0 + point.time_ms.1) / 2e3, y: value, error: 0.0, short, label }
}
