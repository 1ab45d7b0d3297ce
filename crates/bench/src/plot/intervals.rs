//! The time series in a result file: completions in each interval of a run, by operation.

use super::place::FilePlace;
use crate::worker::MAX_INTERVALS;

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

/// Returns the time series in the results of a row's runs.
pub(super) fn series_of_runs(runs: &FilePlace) -> Result<Vec<OperationSeries>, String> {
    let mut found = vec![];
    for (at, run) in runs.items().ok_or_else(|| runs.wrong("an array"))?.enumerate() {
        run.object()?;
        let series = run.at("series");
        if series.optional(FilePlace::object)?.is_none() {
            continue;
        }
        let errors = run.at("errors").optional(|errors| errors.count(0))?.unwrap_or(0);
        let interval_ms = series.at("interval_ms").measured()?;
        for op in OPERATIONS {
            if let Some(points) = series.at(op).optional(|points| intervals(points, &series.at("end_ms")))? {
                found.push(OperationSeries { run: at as u64 + 1, op, errors, interval_ms, points });
            }
        }
    }
    Ok(found)
}

/// Returns the intervals of an operation. Each ends where the next begins, the last one at `end`.
fn intervals(places: &FilePlace, end: &FilePlace) -> Result<Vec<SeriesInterval>, String> {
    let wrong = || places.wrong(format!("an array of at most {MAX_INTERVALS}"));
    let mut points: Vec<SeriesInterval> = vec![];
    for point in places.items().filter(|all| all.len() <= MAX_INTERVALS).ok_or_else(wrong)? {
        point.object()?;
        let start = point.at("start_ms").measured()?;
        if let Some(before) = points.last_mut() {
            if start <= before.time_ms.0 {
                return Err(point.at("start_ms").wrong("a time after the one before"));
            }
            before.time_ms.1 = start;
        }
        let us = |key: &str| point.at(key).optional(FilePlace::measured);
        let (mean, most) = (us("mean_us")?, us("max_us")?);
        points.push(SeriesInterval {
            time_ms: (start, start),
            iops: point.at("iops").measured()?,
            latency: mean.zip(most),
        });
    }
    let end_ms = end.measured()?;
    if let Some(last) = points.last_mut() {
        if end_ms < last.time_ms.0 {
            return Err(end.wrong(format!("the end of the last interval, at least {}", last.time_ms.0)));
        }
        last.time_ms.1 = end_ms;
    }
    Ok(points)
}
