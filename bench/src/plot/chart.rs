//! What is drawn, before it has a place: blocks of panels of series of samples.

use super::axis::{AxisScale, AxisTick};

/// All that one picture shows.
#[derive(Debug)]
pub struct Chart {
    /// What is measured, against what.
    pub title: String,
    /// What was constant.
    pub subtitle: String,
    /// One below the other.
    pub groups: Vec<PanelGroup>,
}

/// Panels that share series, and so a legend.
#[derive(Debug)]
pub struct PanelGroup {
    /// Names of the series; a single one may have an empty name, and then has no legend.
    pub series: Vec<String>,
    /// What the solid and the dashed lines of a series are, where it has both.
    pub styles: Option<[&'static str; 2]>,
    /// Row after row.
    pub panels: Vec<Panel>,
}

/// One pair of axes.
#[derive(Debug)]
pub struct Panel {
    /// What tells it apart from the others of the same metric.
    pub heading: Option<String>,
    /// The horizontal axis.
    pub x: HorizontalAxis,
    /// What is measured, with its unit.
    pub y_title: String,
    /// The vertical axis.
    pub y: AxisScale,
    /// What is drawn.
    pub lines: Vec<SeriesLine>,
}

/// A horizontal axis.
#[derive(Clone, Debug, PartialEq)]
pub struct HorizontalAxis {
    /// What it shows, with its unit.
    pub title: String,
    /// Where values were measured, ascending.
    pub ticks: Vec<AxisTick>,
    /// Whether its values are names, with bars over them, 1 apart.
    pub bars: bool,
}

/// The samples of a series.
#[derive(Clone, Debug, PartialEq)]
pub struct SeriesLine {
    /// Which one.
    pub series: usize,
    /// Whether it is the second line of that series.
    pub dashed: bool,
    /// Ascending in x.
    pub samples: Vec<Sample>,
}

/// A measured value.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Place on the horizontal axis.
    pub x: f64,
    /// The value.
    pub y: f64,
    /// Its standard error; 0 where there is none.
    pub error: f64,
    /// The value, short.
    pub short: String,
    /// The value and what it was measured with, in words.
    pub label: String,
}
