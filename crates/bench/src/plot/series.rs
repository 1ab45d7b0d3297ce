//! Time series: completions in each interval of a run. Each operation of each run is a row.

use std::collections::BTreeSet;

use super::axis::{AxisScale, Quantity, measured};
use super::intervals::SeriesInterval;
use super::keys::{KeyValue, RowKey};
use super::metric::{Metric, MetricWords};
use super::picture::{HorizontalAxis, Sample, SeriesLine};
use super::row_table::RowTable;
use super::rows::PlotRow;
use crate::BenchError;

/// Most points of a line: about its number of pixels.
const MAX_POINTS: usize = 1000;
/// Returns a row for each operation of each run. Rows without a time series are left out.
///
/// # Errors
/// When no row has one.
pub(super) fn of_each_run(rows: Vec<PlotRow>) -> Result<Vec<PlotRow>, BenchError> {
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
        true => Err(BenchError::option(
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
    let MetricWords { quantity, unit, .. } = metric.words();
    let per_point = intervals_per_point(table);
    let all = table.rows[row].series.iter().flat_map(|series| series.points.chunks(per_point).map(as_one));
    let points: Vec<SeriesInterval> = all.collect();
    let line = |dashed: bool, what: &str, value: &dyn Fn(&SeriesInterval) -> Option<f64>| {
        let sample = |point: &SeriesInterval| {
            let (start, end) = point.time_ms;
            let [from, to] = [start, end].map(|ms| measured(ms * 1e3, Quantity::Micros));
            let words = format!("{from} to {to}: {what}");
            Some(Sample::new((start + end) / 2e3, value(point)?, 0.0, quantity, words, unit))
        };
        let parts = points.chunk_by(|a, b| value(a).is_some() == value(b).is_some());
        let parts = parts.map(|part| part.iter().filter_map(sample).collect::<Vec<Sample>>());
        let parts = parts.filter(|samples| !samples.is_empty());
        parts.map(|samples| SeriesLine { series, is_reference: false, dashed, samples }).collect::<Vec<_>>()
    };
    if metric == Metric::Iops {
        return line(false, "", &|point| Some(point.iops));
    }
    let mean = line(false, "mean ", &|point| point.latency.map(|latency| latency.0));
    [mean, line(true, "greatest ", &|point| point.latency.map(|latency| latency.1))].concat()
}
