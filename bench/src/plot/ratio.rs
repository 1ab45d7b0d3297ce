//! Values as ratios to those of other rows.

use super::keys::{RowKey, RowTable};
use super::metric::{Metric, MetricValue};
use super::rows::PlotRow;
use super::{RowFilter, has_value};

/// How values are drawn.
#[derive(Clone, Debug, Default)]
pub(super) struct ChartOptions {
    /// Title; `None`: what is drawn.
    pub title: Option<String>,
    /// The rows that values are ratios to.
    pub ratio: Option<RowFilter>,
    /// Scale of the vertical axes.
    pub scale: AxisChoice,
}

/// Scale of the vertical axes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum AxisChoice {
    /// Logarithmic for latencies that span more than two decades, else from 0
    #[default]
    Auto,
    /// From 0
    Linear,
    /// Logarithmic, but for bars and where a value is 0
    Log,
}

/// Returns the value of a metric in a row, as a ratio if one was chosen. `drawn`: the keys of the axis, the series and the panels.
/// `None` if the row lacks it, or there is no row to compare it to.
pub(super) fn value(
    table: &RowTable,
    row: usize,
    metric: Metric,
    drawn: &[RowKey],
    ratio: Option<&RowFilter>,
) -> Option<MetricValue> {
    let own = metric.of(&table.rows[row])?;
    let Some(filter) = ratio else { return Some(own) };
    let base = base(table, row, drawn, filter)?;
    let of = metric.of(&table.rows[base])?;
    if of.value <= 0.0 {
        return None;
    }
    let relative = |value: MetricValue| if value.value > 0.0 { value.error / value.value } else { 0.0 };
    let error = if base == row { 0.0 } else { relative(own).hypot(relative(of)) };
    let value = own.value / of.value;
    let dashed = own.dashed.zip(of.dashed).filter(|(_, of)| *of > 0.0).map(|(own, of)| own / of);
    Some(MetricValue { value, error: value * error, dashed })
}

/// Returns the row with the filter's value that agrees with `row` in all other keys that are drawn.
fn base(table: &RowTable, row: usize, drawn: &[RowKey], filter: &RowFilter) -> Option<usize> {
    let others: Vec<RowKey> = drawn.iter().copied().filter(|key| *key != filter.key).collect();
    let wanted = table.identity(row, &others);
    let is_base = |other: &PlotRow| filter.values.iter().any(|value| has_value(other, filter.key, value));
    (0..table.rows.len()).find(|other| table.identity(*other, &others) == wanted && is_base(&table.rows[*other]))
}
