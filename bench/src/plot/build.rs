//! From rows and a choice to a chart: samples, axes, titles.

use std::collections::{BTreeMap, BTreeSet};

use super::axis::{AxisScale, AxisTick, measured, percentile_position, percentile_ticks};
use super::chart::{Chart, HorizontalAxis, Panel, PanelGroup, Sample, SeriesLine};
use super::keys::{KeyValue, RowKey, RowTable};
use super::metric::{Metric, MetricValue};
use super::select::{PlotSelection, constants};

/// The chart of `choices`. `title` replaces the one that says what is drawn.
pub fn chart(table: &RowTable, choices: &[PlotSelection], title: Option<String>) -> Chart {
    Chart {
        title: title.unwrap_or_else(|| heading(choices)),
        subtitle: constants(table, choices),
        groups: choices.iter().map(|choice| panel_group(table, choice)).collect(),
    }
}

/// `IOPS and latency against block size`.
fn heading(choices: &[PlotSelection]) -> String {
    let phrase = |choice: &PlotSelection| {
        let metrics = listed(&choice.metrics.iter().map(|metric| metric.subject()).collect::<Vec<_>>());
        match choice.x {
            Some(x) if x.is_numeric() => format!("{metrics} against {}", x.subject()),
            Some(x) => format!("{metrics} by {}", x.subject()),
            None => metrics,
        }
    };
    let text = choices.iter().map(phrase).collect::<Vec<_>>().join("; ");
    let mut chars = text.chars();
    chars.next().map_or(String::new(), |first| first.to_uppercase().chain(chars).collect())
}

fn listed(items: &[impl AsRef<str>]) -> String {
    let items: Vec<&str> = items.iter().map(AsRef::as_ref).collect();
    match items.as_slice() {
        [] => String::new(),
        [only] => (*only).to_owned(),
        [first @ .., last] => format!("{} and {last}", first.join(", ")),
    }
}

fn panel_group(table: &RowTable, choice: &PlotSelection) -> PanelGroup {
    let rows = 0..table.rows.len();
    let identities: BTreeSet<Vec<usize>> = rows.map(|row| table.identity(row, &choice.series)).collect();
    let places: BTreeMap<Vec<usize>, usize> = identities.iter().cloned().enumerate().map(|(at, id)| (id, at)).collect();
    let series = |row: usize| places[&table.identity(row, &choice.series)];
    let across = match choice.x {
        Some(x) => key_axis(table, x),
        None => percentile_axis(table),
    };
    let panels = choice.metrics.iter().flat_map(|metric| panels(table, choice, *metric, &across, &series)).collect();
    PanelGroup {
        series: identities.iter().map(|identity| table.name(&choice.series, identity)).collect(),
        styles: choice.metrics.contains(&Metric::Latency).then_some(["median latency", "99th percentile"]),
        panels,
    }
}

/// The panels of one metric: one, or one for each value of the key that tells panels apart. They share their axes.
fn panels(
    table: &RowTable,
    choice: &PlotSelection,
    metric: Metric,
    across: &HorizontalAxis,
    series: &dyn Fn(usize) -> usize,
) -> Vec<Panel> {
    let levels = choice.panels.map_or(1, |key| table.levels(key).len());
    let lines: Vec<Vec<SeriesLine>> = (0..levels)
        .map(|level| {
            let here = |row: &usize| choice.panels.is_none_or(|key| table.code(*row, key) == level);
            lines(
                table,
                choice.x,
                metric,
                across,
                &mut (0..table.rows.len()).filter(here).map(|row| (row, series(row))),
            )
        })
        .collect();
    let y = scale(metric, across.bars, lines.iter().flatten().flat_map(|line| &line.samples));
    let panel = |(level, lines): (usize, Vec<SeriesLine>)| Panel {
        heading: choice.panels.map(|key| table.name(&[key], &[level])),
        x: across.clone(),
        y_title: metric.title().to_owned(),
        y: y.clone(),
        lines,
    };
    lines.into_iter().enumerate().map(panel).collect()
}

fn scale<'a>(metric: Metric, bars: bool, samples: impl Iterator<Item = &'a Sample> + Clone) -> AxisScale {
    let most = samples.clone().map(|sample| sample.y + sample.error).fold(0.0, f64::max);
    // Above a bar stands its value.
    let most = if bars { most * 1.08 } else { most };
    let least = samples.map(|sample| sample.y).fold(f64::INFINITY, f64::min);
    // A tail is read off a logarithmic axis sooner than two lines are compared.
    let span = if metric == Metric::Percentiles { 10.0 } else { 100.0 };
    // A bar's length must be its value, and 0 has no place on a logarithmic axis.
    match metric.log() && !bars && least > 0.0 && most > span * least && most > 1e-3 {
        true => AxisScale::log(least, most, metric.kilo()),
        false => AxisScale::linear(most, metric.kilo()),
    }
}

/// The axis of a key.
fn key_axis(table: &RowTable, x: RowKey) -> HorizontalAxis {
    let levels = table.levels(x);
    // 0 has no logarithm; then the values are as far apart as names.
    // Mixed block sizes have no place between others.
    let log = x.is_numeric() && levels.iter().all(|level| matches!(level, KeyValue::Number(1..)));
    let place = |(at, value): (usize, &KeyValue)| match value {
        KeyValue::Number(number) if log => (*number as f64).log2(),
        _ => at as f64,
    };
    let ticks = levels.iter().enumerate().map(|(at, value)| AxisTick { at: place((at, value)), label: x.tick(value) });
    HorizontalAxis { title: x.title().to_owned(), ticks: ticks.collect(), bars: !x.is_numeric() }
}

/// The axis of percentiles: the largest value has a place of its own after the last percentile.
fn percentile_axis(table: &RowTable) -> HorizontalAxis {
    let all = || table.rows.iter().flat_map(|row| &row.percentiles).map(|(percentile, _)| *percentile);
    let places = || all().filter(|percentile| *percentile < 100.0).map(percentile_position);
    let (first, last) = (places().fold(f64::INFINITY, f64::min), places().fold(0.0, f64::max));
    let largest = all().any(|percentile| percentile == 100.0).then_some(last + MAXIMUM_DISTANCE);
    HorizontalAxis {
        title: "percentile of the requests".into(),
        ticks: percentile_ticks(first, last, largest),
        bars: false,
    }
}

/// How far after the last percentile the largest value is, in nines.
const MAXIMUM_DISTANCE: f64 = 0.5;

fn lines(
    table: &RowTable,
    x: Option<RowKey>,
    metric: Metric,
    across: &HorizontalAxis,
    rows: &mut dyn Iterator<Item = (usize, usize)>,
) -> Vec<SeriesLine> {
    let mut lines: BTreeMap<(usize, bool), Vec<Sample>> = BTreeMap::new();
    for (row, series) in rows {
        let Some(key) = x else {
            let samples = percentile_samples(&table.rows[row].percentiles, across);
            lines.entry((series, false)).or_default().extend(samples);
            continue;
        };
        let Some(MetricValue { value, error, dashed: second }) = metric.of(&table.rows[row]) else { continue };
        let tick = &across.ticks[table.code(row, key)];
        let phrase = key.phrase(&key_value(table, row, key));
        let sample = |y: f64, error: f64, what: &str| {
            let error_said =
                if error > 0.0 { format!(" ± {}", measured(error, metric.kilo())) } else { String::new() };
            let short = measured(y, metric.kilo());
            let label = format!("{phrase}: {what}{short} {}{error_said}", metric.unit());
            Sample { x: tick.at, y, error, short, label }
        };
        let what = if second.is_some() { "median " } else { "" };
        lines.entry((series, false)).or_default().push(sample(value, error, what));
        if let Some(second) = second {
            lines.entry((series, true)).or_default().push(sample(second, 0.0, "99th percentile "));
        }
    }
    let line = |((series, dashed), mut samples): ((usize, bool), Vec<Sample>)| {
        samples.sort_by(|a, b| a.x.total_cmp(&b.x));
        SeriesLine { series, dashed, samples }
    };
    lines.into_iter().map(line).collect()
}

fn key_value(table: &RowTable, row: usize, key: RowKey) -> KeyValue {
    table.levels(key)[table.code(row, key)].clone()
}

fn percentile_samples(percentiles: &[(f64, f64)], across: &HorizontalAxis) -> Vec<Sample> {
    let largest = across.ticks.last().map_or(0.0, |tick| tick.at);
    let sample = |(percentile, value): &(f64, f64)| {
        let short = measured(*value, Metric::Percentiles.kilo());
        let (x, what) = match *percentile < 100.0 {
            true => (percentile_position(*percentile), format!("percentile {percentile}")),
            false => (largest, "largest".into()),
        };
        Sample { x, y: *value, error: 0.0, label: format!("{what}: {short} us"), short }
    };
    percentiles.iter().map(sample).collect()
}
