//! Makes the chart of rows.

use std::collections::BTreeMap;

use super::axis::{
    AxisScale, AxisTick, Quantity, latency_position, latency_ticks, measured, percentile_position, percentile_ticks,
};
use super::group::{PlotGroup, PublishedSeries};
use super::keys::{KeyValue, RowKey};
use super::metric::{Metric, MetricValue};
use super::options::{AxisChoice, RowFilter};
use super::picture::{Chart, HorizontalAxis, Panel, PanelGroup, Sample, SeriesLine};
use super::row_table::RowTable;
use super::series;

/// Returns the chart of groups, each with its rows.
pub(super) fn chart(title: String, subtitle: String, groups: &[(&RowTable, &PlotGroup)]) -> Chart {
    let groups: Vec<GroupRows> = groups.iter().map(|(table, group)| GroupRows::new(table, group)).collect();
    Chart { title, subtitle, caption: caption(&groups), groups: groups.iter().map(GroupRows::panel_group).collect() }
}

/// Returns the sentences that explain the marks of `groups`.
fn caption(groups: &[GroupRows]) -> Vec<String> {
    if let [GroupRows { table, group: PlotGroup { x: Some(RowKey::Time), .. }, .. }] = groups {
        return vec![series::caption(table)];
    }
    let mut sentences = vec![];
    let metrics = || groups.iter().flat_map(|rows| &rows.group.metrics);
    let mut names: Vec<&str> =
        metrics().filter(|metric| metric.has_error()).map(|metric| metric.words().subject).collect();
    names.dedup();
    if !names.is_empty() {
        let rows = || groups.iter().flat_map(|rows| &rows.table.rows);
        let names = listed(&names);
        let bars = format!("Error bars of {names}: one standard error of the mean of the runs, up and down");
        sentences.push(match rows().filter(|row| row.runs > 1).count() {
            0 => format!("{names}: one run each, so that no error is known."),
            count if count == rows().count() => format!("{bars}."),
            _ => format!("{bars}; rows of a single run have none."),
        });
    }
    if groups.iter().any(|rows| !rows.group.ratio.is_empty()) {
        sentences.push("The error of a ratio is that of both sides together.".into());
    }
    if metrics().any(|metric| metric.is_distribution() || *metric == Metric::Latency) {
        sentences.push("Latencies are of all requests of all runs together.".into());
    }
    if groups.iter().any(|rows| !rows.group.references.is_empty()) {
        sentences.push("Grey: what the document published, as the same ratio.".into());
    }
    sentences
}

/// Returns the default title: `IOPS and latency against block size`.
pub(super) fn heading(groups: &[PlotGroup]) -> String {
    let phrase = |group: &PlotGroup| {
        let metrics = listed(&group.metrics.iter().map(|metric| metric.words().subject).collect::<Vec<_>>());
        match group.x {
            None => metrics,
            Some(RowKey::Time) => format!("{metrics} over time"),
            Some(x) if x.is_numeric() => format!("{metrics} against {}", x.subject()),
            Some(x) => format!("{metrics} by {}", x.subject()),
        }
    };
    crate::words::capitalised(&groups.iter().map(phrase).collect::<Vec<_>>().join("; "))
}

fn listed(items: &[&str]) -> String {
    match items {
        [] => String::new(),
        [only] => (*only).to_owned(),
        [first @ .., last] => format!("{} and {last}", first.join(", ")),
    }
}

/// Smaller values count as 0, to which nothing is compared: quotients are finite.
const NEGLIGIBLE: f64 = 1e-9;

/// A group with its rows.
struct GroupRows<'a> {
    table: &'a RowTable,
    group: &'a PlotGroup,
    /// The horizontal axis of all panels.
    across: HorizontalAxis,
    /// The identities of the series.
    series: Vec<Vec<usize>>,
}

impl<'a> GroupRows<'a> {
    fn new(table: &'a RowTable, group: &'a PlotGroup) -> GroupRows<'a> {
        let across = match group.x {
            Some(RowKey::Time) => series::axis(table),
            Some(x) => key_axis(table, x),
            None if group.metrics == [Metric::Cdf] => latency_axis(table),
            None => percentile_axis(table),
        };
        GroupRows { table, group, across, series: table.identities(&group.series) }
    }

    fn panel_group(&self) -> PanelGroup {
        let GroupRows { table, group, series, .. } = self;
        PanelGroup {
            series: series.iter().map(|identity| table.name(&group.series, identity)).collect(),
            references: group.references.iter().map(|reference| reference.name.clone()).collect(),
            styles: group.metrics.iter().find_map(|metric| metric.styles(group.x)),
            panels: group.metrics.iter().flat_map(|metric| self.panels(*metric)).collect(),
        }
    }

    /// Returns the panels of one metric: one, or one for each value of the panels' keys. They share their axes.
    fn panels(&self, metric: Metric) -> Vec<Panel> {
        let GroupRows { table, group, across, .. } = self;
        // A distribution has no single value to compare.
        let is_ratio = !group.ratio.is_empty() && !metric.is_distribution();
        let quantity = if is_ratio { Quantity::Ratio } else { metric.words().quantity };
        let identities = table.identities(&group.panels);
        let lines_of = |identity: &Vec<usize>| {
            let is_here = |row: &usize| table.identity(*row, &group.panels) == *identity;
            let rows: Vec<usize> = (0..table.rows.len()).filter(is_here).collect();
            [self.references(&rows), self.lines(metric, quantity, &rows)].concat()
        };
        let lines: Vec<Vec<SeriesLine>> = identities.iter().map(lines_of).collect();
        let samples: Vec<&Sample> = lines.iter().flatten().flat_map(|line| &line.samples).collect();
        let y = scale(metric, group.scale, across.bars, quantity, &samples);
        let bases: Vec<String> = group.ratio.iter().map(RowFilter::phrase).collect();
        let ratio = if is_ratio { format!(", ratio to {}", bases.join(", ")) } else { String::new() };
        let panel = |(identity, lines): (&Vec<usize>, Vec<SeriesLine>)| Panel {
            heading: (!identity.is_empty()).then(|| table.name(&group.panels, identity)),
            x: across.clone(),
            y_title: format!("{}{ratio}", metric.words().title),
            y: y.clone(),
            lines,
            baseline: is_ratio.then_some(1.0),
        };
        identities.iter().zip(lines).map(panel).collect()
    }

    /// Returns the published lines of the panel of `rows`.
    fn references(&self, rows: &[usize]) -> Vec<SeriesLine> {
        let is_here = |only: &RowFilter| rows.iter().any(|row| only.passes(&self.table.rows[*row]));
        let mut lines = vec![];
        for (series, PublishedSeries { name, points, only }) in self.group.references.iter().enumerate() {
            let sample = |(label, y, error): &(String, f64, f64)| {
                let tick = self.across.ticks.iter().find(|tick| tick.label == *label)?;
                Some(Sample::new(tick.at, *y, *error, Quantity::Ratio, format!("{name}, {label}: "), ""))
            };
            let samples: Vec<Sample> = points.iter().filter_map(sample).collect();
            if only.as_ref().is_none_or(is_here) && !samples.is_empty() {
                lines.push(SeriesLine { series, is_reference: true, dashed: false, samples });
            }
        }
        lines
    }

    /// Returns the lines of the panel of `rows`.
    fn lines(&self, metric: Metric, quantity: Quantity, rows: &[usize]) -> Vec<SeriesLine> {
        let GroupRows { table, group, across, series } = self;
        let own = |row: usize| series.binary_search(&table.identity(row, &group.series)).unwrap_or(0);
        if group.x == Some(RowKey::Time) {
            return rows.iter().flat_map(|row| series::lines(table, metric, *row, own(*row))).collect();
        }
        let unit = if quantity == Quantity::Ratio { "" } else { metric.words().unit };
        let mut lines: BTreeMap<(usize, bool), Vec<Sample>> = BTreeMap::new();
        for &row in rows {
            let mut add = |dashed: bool, more: Vec<Sample>| lines.entry((own(row), dashed)).or_default().extend(more);
            let Some(key) = group.x else {
                add(false, distribution(&table.rows[row].percentiles, metric, across));
                continue;
            };
            let Some(MetricValue { value, error, dashed }) = self.value(metric, row) else { continue };
            let sample = |y: f64, error: f64, what: &str| {
                let words = format!("{}: {what}", key.phrase(table.rows[row].key(key)));
                Sample::new(across.ticks[table.code(row, key)].at, y, error, quantity, words, unit)
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

    /// Returns the value of a metric in a row, as a ratio if the group has one. `None` if the row lacks it, or there is
    /// no row to compare it to.
    fn value(&self, metric: Metric, row: usize) -> Option<MetricValue> {
        let GroupRows { table, group, .. } = self;
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
        let of = metric.of(&table.rows[base]).filter(|of| of.value > NEGLIGIBLE)?;
        let relative = |value: MetricValue| if value.value > NEGLIGIBLE { value.error / value.value } else { 0.0 };
        let error = if base == row { 0.0 } else { relative(own).hypot(relative(of)) };
        let value = own.value / of.value;
        let dashed = own.dashed.zip(of.dashed).filter(|(_, of)| *of > NEGLIGIBLE).map(|(own, of)| own / of);
        Some(MetricValue { value, error: value * error, dashed })
    }
}

fn scale(metric: Metric, choice: AxisChoice, bars: bool, quantity: Quantity, samples: &[&Sample]) -> AxisScale {
    let most = samples.iter().map(|sample| sample.y + sample.error).fold(0.0, f64::max);
    // An error bar that goes to 0 or below ends at the axis.
    let ends = samples.iter().map(|sample| (sample.y - sample.error).max(sample.y / 2.0));
    let least = ends.fold(f64::INFINITY, f64::min);
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
    HorizontalAxis { title: x.words().3.to_owned(), ticks, bars: !x.is_numeric() }
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
    let all = || table.rows.iter().flat_map(|row| &row.percentiles).map(|(_, us)| *us);
    let (least, most) = (all().fold(f64::INFINITY, f64::min), all().fold(0.0, f64::max));
    HorizontalAxis { title: "latency, log scale".into(), ticks: latency_ticks(least, most), bars: false }
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
        Sample { x, y, error: 0.0, short: measured(y, metric.words().quantity), label }
    };
    percentiles.iter().map(sample).collect()
}
