//! A chart without positions: groups of panels of series of samples, made from rows.

use std::collections::BTreeMap;

use mqblk_core::ByteLen;

use super::RowFilter;
use super::axis::{
    AxisScale, AxisTick, Quantity, latency_position, latency_ticks, measured, percentile_position, percentile_ticks,
};
use super::keys::{KeyValue, RowKey, RowTable};
use super::metric::{Metric, MetricValue};
use super::select::{AxisChoice, PlotGroup};
use super::series;

/// The content of one picture.
#[derive(Debug)]
pub(super) struct Chart {
    /// Title: metrics against an axis.
    pub title: String,
    /// Subtitle: the constants of all rows.
    pub subtitle: String,
    /// Groups of panels, from top to bottom.
    pub groups: Vec<PanelGroup>,
    /// Sentences below the panels: the meaning of the marks.
    pub caption: Vec<String>,
}

/// Panels that share series and legend.
#[derive(Debug)]
pub(super) struct PanelGroup {
    /// Names of the series. A single series without a name has no legend.
    pub series: Vec<String>,
    /// Names of the published series, in grey.
    pub references: Vec<String>,
    /// Names of the solid and of the dashed lines, if a series has both.
    pub styles: Option<[&'static str; 2]>,
    /// The panels, row by row.
    pub panels: Vec<Panel>,
}

/// One pair of axes with lines or bars.
#[derive(Debug)]
pub(super) struct Panel {
    /// Heading: the values of the panels' keys.
    pub heading: Option<String>,
    /// The horizontal axis.
    pub x: HorizontalAxis,
    /// Title of the vertical axis, with the unit.
    pub y_title: String,
    /// The vertical axis.
    pub y: AxisScale,
    /// Lines, or groups of bars; published ones first, behind the others.
    pub lines: Vec<SeriesLine>,
    /// The base of ratios, drawn as a line.
    pub baseline: Option<f64>,
}

/// A horizontal axis.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct HorizontalAxis {
    /// Title, with the unit.
    pub title: String,
    /// Measured values, ascending.
    pub ticks: Vec<AxisTick>,
    /// True if its values are names, 1 apart, with bars over them.
    pub bars: bool,
}

/// The samples of a series.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SeriesLine {
    /// Index of the series, or of the published series.
    pub series: usize,
    /// True if it is published.
    pub is_reference: bool,
    /// True for the second line of the series.
    pub dashed: bool,
    /// Ascending in x.
    pub samples: Vec<Sample>,
}

/// A measured value.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Sample {
    /// Position on the horizontal axis.
    pub x: f64,
    /// The value.
    pub y: f64,
    /// Standard error; 0 if there is none.
    pub error: f64,
    /// The value as short text.
    pub short: String,
    /// Tooltip: the value and its keys.
    pub label: String,
}

/// Returns the sentences that explain the marks of `groups`, each with its rows.
pub(super) fn caption(groups: &[(&RowTable, &PlotGroup)]) -> Vec<String> {
    let mut sentences = vec![];
    let metrics = || groups.iter().flat_map(|(_, group)| &group.metrics);
    let mut names: Vec<&str> = metrics().filter(|metric| metric.has_error()).map(|metric| metric.subject()).collect();
    names.dedup();
    if !names.is_empty() {
        let rows = || groups.iter().flat_map(|(table, _)| &table.rows);
        let names = listed(&names);
        let bars = format!("Error bars of {names}: one standard error of the mean of the runs, up and down");
        sentences.push(match rows().filter(|row| row.runs > 1).count() {
            0 => format!("{names}: one run each, so that no error is known."),
            count if count == rows().count() => format!("{bars}."),
            _ => format!("{bars}; rows of a single run have none."),
        });
    }
    if groups.iter().any(|(_, group)| !group.ratio.is_empty()) {
        sentences.push("The error of a ratio is that of both sides together.".into());
    }
    if metrics().any(|metric| metric.is_distribution() || *metric == Metric::Latency) {
        sentences.push("Latencies are of all requests of all runs together.".into());
    }
    if let Some((table, _)) = groups.iter().find(|(_, group)| group.metrics[0].is_series()) {
        sentences.push(series::caption(table));
    }
    if groups.iter().any(|(_, group)| !group.references.is_empty()) {
        sentences.push("Grey: what the document published, as the same ratio.".into());
    }
    sentences
}

/// Returns the default title: `IOPS and latency against block size`.
pub(super) fn heading(groups: &[PlotGroup]) -> String {
    let phrase = |group: &PlotGroup| {
        let metrics = listed(&group.metrics.iter().map(|metric| metric.subject()).collect::<Vec<_>>());
        match group.x {
            Some(x) if x.is_numeric() => format!("{metrics} against {}", x.subject()),
            Some(x) => format!("{metrics} by {}", x.subject()),
            None if group.metrics[0].is_series() => format!("{metrics} over time"),
            None => metrics,
        }
    };
    crate::capitalised(&groups.iter().map(phrase).collect::<Vec<_>>().join("; "))
}

fn listed(items: &[&str]) -> String {
    match items {
        [] => String::new(),
        [only] => (*only).to_owned(),
        [first @ .., last] => format!("{} and {last}", first.join(", ")),
    }
}

/// Returns the panels of a group.
pub(super) fn panel_group(table: &RowTable, group: &PlotGroup) -> PanelGroup {
    let series = table.identities(&group.series);
    let across = match group.x {
        Some(x) => key_axis(table, x),
        None if group.metrics[0].is_series() => series::axis(table),
        None if group.metrics == [Metric::Cdf] => latency_axis(table),
        None => percentile_axis(table),
    };
    let panels = group.metrics.iter().flat_map(|metric| panels(table, group, *metric, &across, &series)).collect();
    PanelGroup {
        series: series.iter().map(|identity| table.name(&group.series, identity)).collect(),
        references: group.references.iter().map(|reference| reference.name.clone()).collect(),
        styles: group.metrics.iter().find_map(|metric| metric.styles()),
        panels,
    }
}

/// Returns the panels of one metric: one, or one for each value of the panels' keys. They share their axes.
fn panels(
    table: &RowTable,
    group: &PlotGroup,
    metric: Metric,
    across: &HorizontalAxis,
    series: &[Vec<usize>],
) -> Vec<Panel> {
    // A distribution has no single value to compare.
    let is_ratio = !group.ratio.is_empty() && !metric.is_distribution();
    let quantity = if is_ratio { Quantity::Ratio } else { metric.quantity() };
    let identities = table.identities(&group.panels);
    let lines_of = |identity: &Vec<usize>| {
        let rows: Vec<usize> =
            (0..table.rows.len()).filter(|row| table.identity(*row, &group.panels) == *identity).collect();
        let mut all = references(table, group, across, &rows);
        all.extend(lines(table, group, metric, quantity, across, &rows, series));
        all
    };
    let lines: Vec<Vec<SeriesLine>> = identities.iter().map(lines_of).collect();
    let y = scale(metric, group.scale, across.bars, quantity, lines.iter().flatten().flat_map(|line| &line.samples));
    let y_title = match is_ratio {
        true => {
            format!("{}, ratio to {}", metric.title(), group.ratio.iter().map(phrase).collect::<Vec<_>>().join(", "))
        }
        false => metric.title().to_owned(),
    };
    let panel = |(identity, lines): (&Vec<usize>, Vec<SeriesLine>)| Panel {
        heading: (!identity.is_empty()).then(|| table.name(&group.panels, identity)),
        x: across.clone(),
        y_title: y_title.clone(),
        y: y.clone(),
        lines,
        baseline: is_ratio.then_some(1.0),
    };
    identities.iter().zip(lines).map(panel).collect()
}

fn phrase(filter: &RowFilter) -> String {
    filter.key.phrase(&KeyValue::Text(filter.values.join(" or ")))
}

fn scale<'a>(
    metric: Metric,
    choice: AxisChoice,
    bars: bool,
    quantity: Quantity,
    samples: impl Iterator<Item = &'a Sample> + Clone,
) -> AxisScale {
    let most = samples.clone().map(|sample| sample.y + sample.error).fold(0.0, f64::max);
    // An error bar that goes to 0 or below ends at the axis.
    let end = |sample: &Sample| (sample.y - sample.error).max(sample.y / 2.0);
    let least = samples.map(end).fold(f64::INFINITY, f64::min);
    let is_log = match choice {
        AxisChoice::Auto => metric.log_span().is_some_and(|span| most > span * least && most > 1e-3),
        AxisChoice::Linear => false,
        AxisChoice::Log => metric != Metric::Cdf,
    };
    // The length of a bar is its value, and 0 has no logarithm.
    match is_log && !bars && least > 0.0 {
        // Apart, so that equal values have a height.
        true => AxisScale::log(least / 1.001, most * 1.001, quantity),
        // Space for the value above a bar.
        false => AxisScale::linear(if bars { most * 1.08 } else { most }, quantity),
    }
}

/// Returns the horizontal axis of a key.
fn key_axis(table: &RowTable, x: RowKey) -> HorizontalAxis {
    let levels = table.levels(x);
    // 0 and mixed block sizes have no logarithm: then all values are 1 apart.
    let log = x.is_numeric() && levels.iter().all(|level| matches!(level, KeyValue::Number(1..)));
    let tick = |(at, value): (usize, &KeyValue)| match value {
        KeyValue::Number(number) if log => AxisTick { at: (*number as f64).log2(), label: x.tick(value) },
        _ => AxisTick { at: at as f64, label: x.tick(value) },
    };
    let ticks = levels.iter().enumerate().map(tick).collect();
    HorizontalAxis { title: x.title().to_owned(), ticks, bars: !x.is_numeric() }
}

/// Distance of the maximum from the last percentile, in nines.
const MAXIMUM_DISTANCE: f64 = 0.5;

/// Returns the horizontal axis of percentiles. The maximum has a position of its own after the last percentile.
fn percentile_axis(table: &RowTable) -> HorizontalAxis {
    let all = || table.rows.iter().flat_map(|row| &row.percentiles).map(|(percentile, _)| *percentile);
    let positions = || all().filter(|percentile| *percentile < 100.0).map(percentile_position);
    let (first, last) = (positions().fold(f64::INFINITY, f64::min), positions().fold(0.0, f64::max));
    let largest = all().any(|percentile| percentile == 100.0).then_some(last + MAXIMUM_DISTANCE);
    let ticks = percentile_ticks(first, last, largest);
    HorizontalAxis { title: "percentile of the requests".into(), ticks, bars: false }
}

/// Returns the horizontal axis of latencies.
fn latency_axis(table: &RowTable) -> HorizontalAxis {
    let all = || table.rows.iter().flat_map(|row| &row.percentiles).map(|(_, us)| latency_position(*us));
    let (first, last) = (all().fold(f64::INFINITY, f64::min), all().fold(f64::NEG_INFINITY, f64::max));
    HorizontalAxis { title: "latency, log scale".into(), ticks: latency_ticks(first, last), bars: false }
}

/// Returns the published lines of the panel of `rows`.
fn references(table: &RowTable, group: &PlotGroup, across: &HorizontalAxis, rows: &[usize]) -> Vec<SeriesLine> {
    let here = |only: &Option<RowFilter>| {
        only.as_ref().is_none_or(|filter| rows.iter().any(|row| filter.passes(&table.rows[*row])))
    };
    let mut lines = vec![];
    for (series, reference) in group.references.iter().enumerate().filter(|(_, reference)| here(&reference.only)) {
        let mut samples = vec![];
        for (label, y, error) in &reference.points {
            let Some(tick) = across.ticks.iter().find(|tick| tick.label == *label) else { continue };
            let short = measured(*y, Quantity::Ratio);
            let label = format!("{}, {label}: {short}{}", reference.name, error_text(*error, Quantity::Ratio));
            samples.push(Sample { x: tick.at, y: *y, error: *error, short, label });
        }
        lines.push(SeriesLine { series, is_reference: true, dashed: false, samples });
    }
    lines.retain(|line| !line.samples.is_empty());
    lines
}

fn error_text(error: f64, quantity: Quantity) -> String {
    if error > 0.0 { format!(" ± {}", measured(error, quantity)) } else { String::new() }
}

/// Returns the lines of the panel of `rows`.
fn lines(
    table: &RowTable,
    group: &PlotGroup,
    metric: Metric,
    quantity: Quantity,
    across: &HorizontalAxis,
    rows: &[usize],
    series: &[Vec<usize>],
) -> Vec<SeriesLine> {
    let own = |row: usize| series.binary_search(&table.identity(row, &group.series)).unwrap_or(0);
    if metric.is_series() {
        return rows.iter().flat_map(|row| series::lines(table, metric, *row, own(*row))).collect();
    }
    let unit = if quantity == Quantity::Ratio { "" } else { metric.unit() };
    let mut lines: BTreeMap<(usize, bool), Vec<Sample>> = BTreeMap::new();
    for &row in rows {
        let mut add = |dashed: bool, samples: Vec<Sample>| lines.entry((own(row), dashed)).or_default().extend(samples);
        let Some(key) = group.x else {
            add(false, distribution(&table.rows[row].percentiles, metric, across));
            continue;
        };
        let Some(MetricValue { value, error, dashed }) = value(table, group, metric, row) else { continue };
        let phrase = key.phrase(table.rows[row].key(key));
        let sample = |y: f64, error: f64, what: &str| {
            let short = measured(y, quantity);
            let label = format!("{phrase}: {what}{short}{unit}{}", error_text(error, quantity));
            Sample { x: across.ticks[table.code(row, key)].at, y, error, short, label }
        };
        add(false, vec![sample(value, error, if dashed.is_some() { "median " } else { "" })]);
        if let Some(second) = dashed {
            add(true, vec![sample(second, 0.0, "99th percentile ")]);
        }
    }
    let line = |((series, dashed), mut samples): ((usize, bool), Vec<Sample>)| {
        samples.sort_by(|a, b| a.x.total_cmp(&b.x));
        SeriesLine { series, is_reference: false, dashed, samples }
    };
    lines.into_iter().map(line).collect()
}

/// Returns the points of a distribution: latencies of percentiles; for [`Metric::Cdf`], the percentage of requests up
/// to each latency.
fn distribution(percentiles: &[(f64, f64)], metric: Metric, across: &HorizontalAxis) -> Vec<Sample> {
    let largest = across.ticks.last().map_or(0.0, |tick| tick.at);
    let sample = |&(percentile, us): &(f64, f64)| {
        let time = measured(us, Quantity::Micros);
        let (x, y, label) = match metric {
            Metric::Cdf => (latency_position(us), percentile, format!("{percentile}% of the requests: at most {time}")),
            _ if percentile < 100.0 => {
                (percentile_position(percentile), us, format!("percentile {percentile}: {time}"))
            }
            _ => (largest, us, format!("largest: {time}")),
        };
        Sample { x, y, error: 0.0, short: measured(y, metric.quantity()), label }
    };
    percentiles.iter().map(sample).collect()
}

/// Returns the value of a metric in a row, as a ratio if the group has one. `None` if the row lacks it, or there is no
/// row to compare it to.
fn value(table: &RowTable, group: &PlotGroup, metric: Metric, row: usize) -> Option<MetricValue> {
    let own = metric.of(&table.rows[row])?;
    if group.ratio.is_empty() {
        return Some(own);
    }
    let is_compared = |key: &RowKey| group.ratio.iter().any(|filter| filter.key == *key);
    let others: Vec<RowKey> = group.keys().filter(|key| !is_compared(key)).collect();
    let is_base = |other: &usize| {
        table.identity(*other, &others) == table.identity(row, &others)
            && group.ratio.iter().all(|filter| filter.passes(&table.rows[*other]))
    };
    let base = (0..table.rows.len()).find(is_base)?;
    let of = metric.of(&table.rows[base]).filter(|of| of.value > 0.0)?;
    let relative = |value: MetricValue| if value.value > 0.0 { value.error / value.value } else { 0.0 };
    let error = if base == row { 0.0 } else { relative(own).hypot(relative(of)) };
    let value = own.value / of.value;
    let dashed = own.dashed.zip(of.dashed).filter(|(_, of)| *of > 0.0).map(|(own, of)| own / of);
    Some(MetricValue { value, error: value * error, dashed })
}

/// Returns a block size as the axis labels it.
pub(crate) fn size_label(bytes: u64) -> String {
    ByteLen(bytes).to_string()
}
