//! The content of a picture: groups of panels, which are selected, or given by an experiment.

use super::keys::RowKey;
use super::metric::Metric;
use super::options::{AxisChoice, RowFilter};

/// Most series in a panel: the number of colours, those of dotted lines among them.
pub(super) const MAX_SERIES: usize = 14;

/// Panels with one legend: metrics against one key, or distributions, which have an axis of their own.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct PlotGroup {
    /// Metrics, from top to bottom.
    pub metrics: Vec<Metric>,
    /// Key of the horizontal axis; `None` for distributions.
    pub x: Option<RowKey>,
    /// Keys whose values make the series of a panel.
    pub series: Vec<RowKey>,
    /// Keys whose values make the panels of a metric.
    pub panels: Vec<RowKey>,
    /// Draws ratios to the row that passes all of these and agrees in all other drawn keys. Empty: plain values.
    pub ratio: Vec<RowFilter>,
    /// Scale of the vertical axes.
    pub scale: AxisChoice,
    /// Published series, in grey.
    pub references: Vec<PublishedSeries>,
}

/// A series of published values.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PublishedSeries {
    pub name: String,
    /// Label on the horizontal axis, value and its standard error.
    pub points: Vec<(String, f64, f64)>,
    /// The rows whose panels it is in; `None`: all.
    pub only: Option<RowFilter>,
}

impl PlotGroup {
    /// Returns all keys that are drawn.
    pub(super) fn keys(&self) -> impl Iterator<Item = RowKey> + '_ {
        self.x.into_iter().chain(self.series.iter().copied()).chain(self.panels.iter().copied())
    }

    pub(super) fn draws(&self, key: RowKey) -> bool {
        self.keys().any(|drawn| drawn == key)
    }
}
