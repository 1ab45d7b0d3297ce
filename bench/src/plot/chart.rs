//! What is drawn, without positions: groups of panels of series of samples.

use super::axis::{AxisScale, AxisTick};

/// The content of one picture.
#[derive(Debug)]
pub(super) struct Chart {
    /// Title: what is measured, against what.
    pub title: String,
    /// Subtitle: what was constant.
    pub subtitle: String,
    /// Groups of panels, from top to bottom.
    pub groups: Vec<PanelGroup>,
    /// Sentences below the panels: what the marks mean.
    pub caption: Vec<String>,
}

/// Panels that share series and legend.
#[derive(Debug)]
pub(super) struct PanelGroup {
    /// Names of the series. A single series without a name has no legend.
    pub series: Vec<String>,
    /// Names of the series in grey, from elsewhere.
    pub references: Vec<String>,
    /// Names of the solid and of the dashed lines, if a series has both.
    pub styles: Option<[&'static str; 2]>,
    /// The panels, row by row.
    pub panels: Vec<Panel>,
}

/// One pair of axes with lines or bars.
#[derive(Debug)]
pub(super) struct Panel {
    /// Heading: the value of the panels' key.
    pub heading: Option<String>,
    /// The horizontal axis.
    pub x: HorizontalAxis,
    /// Title of the vertical axis, with the unit.
    pub y_title: String,
    /// The vertical axis.
    pub y: AxisScale,
    /// Lines, or groups of bars.
    pub lines: Vec<SeriesLine>,
    /// Those of the series in grey, behind the others.
    pub references: Vec<SeriesLine>,
    /// The value that ratios are to, drawn as a line.
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
    /// Index of the series.
    pub series: usize,
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
    /// Tooltip: the value, and what it was measured with.
    pub label: String,
}
