//! Builds a chart of rows and a selection: samples, axes, titles.

use std::collections::{BTreeMap, BTreeSet};

use super::RowFilter;
use super::axis::{
    AxisScale, AxisTick, Quantity, latency_position, latency_ticks, measured, percentile_position, percentile_ticks,
};
use super::chart::{Chart, HorizontalAxis, Panel, PanelGroup, Sample, SeriesLine};
use super::keys::{KeyValue, RowKey, RowTable};
use super::metric::{Metric, MetricValue};
use super::ratio::{self, AxisChoice, ChartOptions};
use super::select::{PlotSelection, constants};
use super::series;

/// Returns the chart of `selections`.
pub(super) fn chart(table: &RowTable, selections: &[PlotSelection], options: &ChartOptions) -> Chart {
    Chart {
        title: options.title.clone().unwrap_or_else(|| heading(selections)),
        subtitle: constants(table, selections),
        groups: selections.iter().map(|selection| panel_group(table, selection, options)).collect(),
        caption: caption(table, selections, options),
    }
}

/// Returns what the marks mean.
fn caption(table: &RowTable, selections: &[PlotSelection], options: &ChartOptions) -> Vec<String> {
    let mut sentences = vec![];
    let metrics = || selections.iter().flat_map(|selection| &selection.metrics);
    let of_runs: Vec<&Metric> = metrics().filter(|metric| metric.has_error()).collect();
    if !of_runs.is_empty() {
        let repeated = table.rows.iter().filter(|row| row.runs > 1).count();
        let names = listed(&of_runs.iter().map(|metric| metric.subject()).collect::<Vec<_>>());
        sentences.push(match repeated {
            0 => format!("{names}: one run each, so that no error is known."),
            count if count == table.rows.len() => {
                format!("Error bars of {names}: one standard error of the mean of the runs, up and down.")
            }
            _ => format!("Error bars of {names}: one standard error of the mean of the runs, up and down; rows of a single run have none."),
        });
    }
    if options.ratio.is_some() {
        sentences.push("The error of a ratio is that of both sides together.".into());
    }
    if metrics().any(|metric| metric.is_distribution() || *metric == Metric::Latency) {
        sentences.push("Latencies are of all requests of all runs together.".into());
    }
    if metrics().any(|metric| metric.is_series()) {
        sentences.push(series::caption(table));
    }
    sentences
}

/// Returns the default title: `IOPS and latency against block size`.
fn heading(selections: &[PlotSelection]) -> String {
    let phrase = |selection: &PlotSelection| {
        let metrics = listed(&selection.metrics.iter().map(|metric| metric.subject()).collect::<Vec<_>>());
        match selection.x {
            Some(x) if x.is_numeric() => format!("{metrics} against {}", x.subject()),
            Some(x) => format!("{metrics} by {}", x.subject()),
            None if selection.metrics[0].is_series() => format!("{metrics} over time"),
            None => metrics,
        }
    };
    let text = selections.iter().map(phrase).collect::<Vec<_>>().join("; ");
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

fn panel_group(table: &RowTable, selection: &PlotSelection, options: &ChartOptions) -> PanelGroup {
    let rows = 0..table.rows.len();
    let identities: BTreeSet<Vec<usize>> = rows.map(|row| table.identity(row, &selection.series)).collect();
    let indices: BTreeMap<Vec<usize>, usize> =
        identities.iter().cloned().enumerate().map(|(at, id)| (id, at)).collect();
    let series_of = |row: usize| indices[&table.identity(row, &selection.series)];
    let across = match selection.x {
        Some(x) => key_axis(table, x),
        None if selection.metrics[0].is_series() => series::axis(table),
        None if selection.metrics == [Metric::Cdf] => latency_axis(table),
        None => percentile_axis(table),
    };
    let panels = selection
        .metrics
        .iter()
        .flat_map(|metric| panels(table, selection, options, *metric, &across, &series_of))
        .collect();
    PanelGroup {
        series: identities.iter().map(|identity| table.name(&selection.series, identity)).collect(),
        references: vec![],
        styles: selection.metrics.iter().find_map(|metric| metric.styles()),
        panels,
    }
}

/// Returns the panels of one metric: one, or one for each value of the panels' key. They share their axes.
fn panels(
    table: &RowTable,
    selection: &PlotSelection,
    options: &ChartOptions,
    metric: Metric,
    across: &HorizontalAxis,
    series: &dyn Fn(usize) -> usize,
) -> Vec<Panel> {
    let keys = selection.x.into_iter().chain(selection.series.iter().copied()).chain(selection.panels);
    let keys: Vec<RowKey> = keys.collect();
    // A distribution has no one value to compare.
    let ratio = options.ratio.as_ref().filter(|_| !metric.is_distribution());
    let quantity = if ratio.is_some() { Quantity::Ratio } else { metric.quantity() };
    let drawn = DrawnMetric { metric, quantity, value: &|row| ratio::value(table, row, metric, &keys, ratio) };
    let levels = selection.panels.map_or(1, |key| table.levels(key).len());
    let lines: Vec<Vec<SeriesLine>> = (0..levels)
        .map(|level| {
            let here = |row: &usize| selection.panels.is_none_or(|key| table.code(*row, key) == level);
            lines(
                table,
                selection.x,
                &drawn,
                across,
                &mut (0..table.rows.len()).filter(here).map(|row| (row, series(row))),
            )
        })
        .collect();
    let y = scale(&drawn, options.scale, across.bars, lines.iter().flatten().flat_map(|line| &line.samples));
    let y_title = match ratio {
        Some(RowFilter { key, values }) => format!("{}, ratio to {key} {}", metric.title(), values.join(" or ")),
        None => metric.title().to_owned(),
    };
    let panel = |(level, lines): (usize, Vec<SeriesLine>)| Panel {
        heading: selection.panels.map(|key| table.name(&[key], &[level])),
        x: across.clone(),
        y_title: y_title.clone(),
        y: y.clone(),
        lines,
        references: vec![],
        baseline: ratio.map(|_| 1.0),
    };
    lines.into_iter().enumerate().map(panel).collect()
}

/// A metric as it is drawn.
struct DrawnMetric<'a> {
    metric: Metric,
    /// How its numbers are written.
    quantity: Quantity,
    /// Its value in a row.
    value: &'a dyn Fn(usize) -> Option<MetricValue>,
}

fn scale<'a>(
    drawn: &DrawnMetric<'_>,
    choice: AxisChoice,
    bars: bool,
    samples: impl Iterator<Item = &'a Sample> + Clone,
) -> AxisScale {
    let metric = drawn.metric;
    let most = samples.clone().map(|sample| sample.y + sample.error).fold(0.0, f64::max);
    // Space for the value above a bar.
    let most = if bars { most * 1.08 } else { most };
    let least = samples.map(|sample| sample.y).fold(f64::INFINITY, f64::min);
    // Percentiles become logarithmic sooner: their tail matters.
    let span = if metric == Metric::Percentiles { 10.0 } else { 100.0 };
    let is_log = match choice {
        AxisChoice::Auto => metric.log() && most > span * least && most > 1e-3,
        AxisChoice::Linear => false,
        AxisChoice::Log => metric != Metric::Cdf,
    };
    // The length of a bar is its value, and 0 has no logarithm.
    match is_log && !bars && least > 0.0 {
        // Apart, so that equal values have a height.
        true => AxisScale::log(least / 1.001, most * 1.001, drawn.quantity),
        false => AxisScale::linear(most, drawn.quantity),
    }
}

/// Returns the horizontal axis of a key.
fn key_axis(table: &RowTable, x: RowKey) -> HorizontalAxis {
    let levels = table.levels(x);
    // 0 and mixed block sizes have no logarithm: then all values are 1 apart.
    let log = x.is_numeric() && levels.iter().all(|level| matches!(level, KeyValue::Number(1..)));
    let position = |(at, value): (usize, &KeyValue)| match value {
        KeyValue::Number(number) if log => (*number as f64).log2(),
        _ => at as f64,
    };
    let ticks =
        levels.iter().enumerate().map(|(at, value)| AxisTick { at: position((at, value)), label: x.tick(value) });
    HorizontalAxis { title: x.title().to_owned(), ticks: ticks.collect(), bars: !x.is_numeric() }
}

/// Returns the horizontal axis of percentiles. The maximum has a position of its own after the last percentile.
fn percentile_axis(table: &RowTable) -> HorizontalAxis {
    let all = || table.rows.iter().flat_map(|row| &row.percentiles).map(|(percentile, _)| *percentile);
    let positions = || all().filter(|percentile| *percentile < 100.0).map(percentile_position);
    let (first, last) = (positions().fold(f64::INFINITY, f64::min), positions().fold(0.0, f64::max));
    let largest = all().any(|percentile| percentile == 100.0).then_some(last + MAXIMUM_DISTANCE);
    HorizontalAxis {
        title: "percentile of the requests".into(),
        ticks: percentile_ticks(first, last, largest),
        bars: false,
    }
}

/// Returns the horizontal axis of latencies.
fn latency_axis(table: &RowTable) -> HorizontalAxis {
    let all = || table.rows.iter().flat_map(|row| &row.percentiles).map(|(_, us)| latency_position(*us));
    let (first, last) = (all().fold(f64::INFINITY, f64::min), all().fold(f64::NEG_INFINITY, f64::max));
    HorizontalAxis { title: "latency, log scale".into(), ticks: latency_ticks(first, last), bars: false }
}

/// Returns the points of a distribution: how many percent of the requests took at most so long.
fn distribution_samples(percentiles: &[(f64, f64)]) -> Vec<Sample> {
    let sample = |(percentile, us): &(f64, f64)| {
        let short = measured(*percentile, Quantity::Percent);
        let label = format!("{percentile}% of the requests: at most {}", measured(*us, Quantity::Micros));
        Sample { x: latency_position(*us), y: *percentile, error: 0.0, short, label }
    };
    percentiles.iter().map(sample).collect()
}

/// Distance of the maximum from the last percentile, in nines.
const MAXIMUM_DISTANCE: f64 = 0.5;

fn lines(
    table: &RowTable,
    x: Option<RowKey>,
    drawn: &DrawnMetric<'_>,
    across: &HorizontalAxis,
    rows: &mut dyn Iterator<Item = (usize, usize)>,
) -> Vec<SeriesLine> {
    let DrawnMetric { metric, quantity, value } = *drawn;
    if metric.is_series() {
        return series::lines(table, metric, rows);
    }
    let unit = if quantity == Quantity::Ratio { "" } else { metric.unit() };
    let mut lines: BTreeMap<(usize, bool), Vec<Sample>> = BTreeMap::new();
    for (row, series) in rows {
        let Some(key) = x else {
            let percentiles = &table.rows[row].percentiles;
            let samples = match metric {
                Metric::Cdf => distribution_samples(percentiles),
                _ => percentile_samples(percentiles, across),
            };
            lines.entry((series, false)).or_default().extend(samples);
            continue;
        };
        let Some(MetricValue { value, error, dashed: second }) = value(row) else { continue };
        let tick = &across.ticks[table.code(row, key)];
        let phrase = key.phrase(&key_value(table, row, key));
        let sample = |y: f64, error: f64, what: &str| {
            let error_said = if error > 0.0 { format!(" ± {}", measured(error, quantity)) } else { String::new() };
            let short = measured(y, quantity);
            let label = format!("{phrase}: {what}{short}{unit}{error_said}");
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
        let short = measured(*value, Quantity::Micros);
        let (x, what) = match *percentile < 100.0 {
            true => (percentile_position(*percentile), format!("percentile {percentile}")),
            false => (largest, "largest".into()),
        };
        Sample { x, y: *value, error: 0.0, label: format!("{what}: {short}"), short }
    };
    percentiles.iter().map(sample).collect()
}
