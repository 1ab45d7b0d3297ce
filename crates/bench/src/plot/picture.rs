//! A chart without positions: groups of panels of series of samples.

use super::axis::{AxisScale, AxisTick, Quantity, measured};

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

impl Sample {
    /// Creates a sample whose tooltip has these words before the value, and this unit after it.
    pub(super) fn new(x: f64, y: f64, error: f64, quantity: Quantity, words: String, unit: &str) -> Sample {
        let short = measured(y, quantity);
        let bounds = if error > 0.0 { format!(" ± {}", measured(error, quantity)) } else { String::new() };
        Sample { x, y, error, label: format!("{words}{short}{unit}{bounds}"), short }
    }
}
