//! Pictures whose series are given, not selected from rows: those of `mqblk reproduce`, with published curves in grey.

use super::axis::{AxisScale, AxisTick, latency_ticks, measured};
use super::chart::{Chart, HorizontalAxis, Panel, PanelGroup, Sample, SeriesLine};
use super::{layout, render, scene};

pub(crate) use super::axis::Quantity;

/// A picture.
#[derive(Clone, Debug)]
pub(crate) struct Figure {
    /// Title.
    pub title: String,
    /// What all of it was measured with.
    pub subtitle: String,
    /// Groups of panels, from top to bottom.
    pub groups: Vec<FigureGroup>,
}

/// Panels with one legend.
#[derive(Clone, Debug)]
pub(crate) struct FigureGroup {
    /// The panels.
    pub panels: Vec<FigurePanel>,
}

/// A pair of axes.
#[derive(Clone, Debug)]
pub(crate) struct FigurePanel {
    /// Heading, if there are several.
    pub heading: Option<String>,
    /// The horizontal axis.
    pub x: FigureAxis,
    /// Title of the vertical axis.
    pub y_title: String,
    /// How its numbers are written.
    pub y: Quantity,
    /// True if it is logarithmic; where all values are above 0.
    pub log: bool,
    /// Series, by their names the same in all panels of a group.
    pub series: Vec<FigureSeries>,
}

/// A horizontal axis.
#[derive(Clone, Debug)]
pub(crate) struct FigureAxis(HorizontalAxis);

impl FigureAxis {
    /// Returns an axis of numbers: positions and labels, ascending.
    pub(crate) fn numbers(title: &str, ticks: impl IntoIterator<Item = (f64, String)>) -> FigureAxis {
        let ticks = ticks.into_iter().map(|(at, label)| AxisTick { at, label }).collect();
        FigureAxis(HorizontalAxis { title: title.to_owned(), ticks, bars: false })
    }

    /// Returns an axis of names, at positions from 0 on, with bars over them.
    pub(crate) fn names(title: &str, names: impl IntoIterator<Item = String>) -> FigureAxis {
        let ticks = names.into_iter().enumerate().map(|(at, label)| AxisTick { at: at as f64, label });
        FigureAxis(HorizontalAxis { title: title.to_owned(), ticks: ticks.collect(), bars: true })
    }

    /// Returns an axis of latencies: positions are decimal logarithms of microseconds.
    pub(crate) fn decades(title: &str, series: &[FigureSeries]) -> FigureAxis {
        let all = || series.iter().flat_map(|series| &series.points).map(|point| point.x);
        let (first, last) = (all().fold(f64::INFINITY, f64::min), all().fold(f64::NEG_INFINITY, f64::max));
        let ticks = if first <= last { latency_ticks(first, last) } else { vec![] };
        FigureAxis(HorizontalAxis { title: title.to_owned(), ticks, bars: false })
    }
}

/// A series.
#[derive(Clone, Debug)]
pub(crate) struct FigureSeries {
    /// Its name.
    pub name: String,
    /// Its points, ascending in x.
    pub points: Vec<FigurePoint>,
    /// True if it is from elsewhere: grey.
    pub is_reference: bool,
}

/// A point.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct FigurePoint {
    /// Position on the horizontal axis.
    pub x: f64,
    /// The value.
    pub y: f64,
    /// Its standard error; 0 if there is none.
    pub error: f64,
}

impl FigurePoint {
    /// Returns a point without an error.
    pub(crate) fn exact(x: f64, y: f64) -> FigurePoint {
        FigurePoint { x, y, error: 0.0 }
    }
}

impl Figure {
    /// Returns the picture as SVG. Panels without a value are left out.
    pub(crate) fn svg(&self) -> String {
        let font = scene::Font::new();
        render::svg(&layout::scene(&self.chart(), &font))
    }

    fn chart(&self) -> Chart {
        let groups: Vec<PanelGroup> = self.groups.iter().map(group).filter(|group| !group.panels.is_empty()).collect();
        let panels = || groups.iter().flat_map(|group| &group.panels);
        let mut caption = vec![];
        if panels().flat_map(|panel| &panel.lines).flat_map(|line| &line.samples).any(|sample| sample.error > 0.0) {
            caption.push(
                "Error bars: one standard error of the mean of the runs, up and down; of a ratio, those of both sides together.".to_owned(),
            );
        }
        if panels().any(|panel| !panel.references.is_empty()) {
            caption.push("Grey: what the document published, as the same ratio.".into());
        }
        if groups.is_empty() {
            caption.push("Nothing was measured.".into());
        }
        Chart { title: self.title.clone(), subtitle: self.subtitle.clone(), groups, caption }
    }
}

fn group(group: &FigureGroup) -> PanelGroup {
    let names = |is_reference: bool| {
        let mut names: Vec<String> = vec![];
        let series = group.panels.iter().flat_map(|panel| &panel.series);
        for series in series.filter(|series| series.is_reference == is_reference && !series.points.is_empty()) {
            if !names.contains(&series.name) {
                names.push(series.name.clone());
            }
        }
        names
    };
    let (series, references) = (names(false), names(true));
    let is_drawn =
        |panel: &&FigurePanel| panel.series.iter().any(|series| !series.is_reference && !series.points.is_empty());
    let drawn: Vec<&FigurePanel> = group.panels.iter().filter(is_drawn).collect();
    // One scale for all panels of a quantity: what is beside each other is compared.
    let scale = |own: &FigurePanel| scale(drawn.iter().copied().filter(|other| other.y_title == own.y_title));
    let panels = drawn.iter().map(|own| panel(own, scale(own), &series, &references)).collect();
    PanelGroup { series, references, styles: None, panels }
}

/// Returns the vertical axis of panels with the same quantity.
fn scale<'a>(panels: impl Iterator<Item = &'a FigurePanel> + Clone) -> AxisScale {
    let points = || panels.clone().flat_map(|panel| &panel.series).flat_map(|series| &series.points);
    let most = points().map(|point| point.y + point.error).fold(0.0, f64::max);
    // An error bar that goes to 0 or below ends at the axis.
    let end = |point: &FigurePoint| (point.y - point.error).max(point.y / 2.0);
    let least = points().map(end).fold(f64::INFINITY, f64::min);
    let quantity = panels.clone().next().map_or(Quantity::Count, |panel| panel.y);
    match panels.clone().all(|panel| panel.log) && least > 0.0 {
        // Apart, so that a panel of equal values has a height.
        true => AxisScale::log(least / 1.02, most * 1.02, quantity),
        // Space for the value above a bar.
        false => {
            AxisScale::linear(if panels.clone().any(|panel| panel.x.0.bars) { most * 1.08 } else { most }, quantity)
        }
    }
}

fn panel(panel: &FigurePanel, y: AxisScale, series: &[String], references: &[String]) -> Panel {
    let lines = |names: &[String], is_reference: bool| -> Vec<SeriesLine> {
        let own = panel.series.iter().filter(|series| series.is_reference == is_reference && !series.points.is_empty());
        let line = |own: &FigureSeries| {
            let at = names.iter().position(|name| *name == own.name).unwrap_or(0);
            SeriesLine {
                series: at,
                dashed: false,
                samples: own.points.iter().map(|point| sample(panel, own, point)).collect(),
            }
        };
        own.map(line).collect()
    };
    Panel {
        heading: panel.heading.clone(),
        x: panel.x.0.clone(),
        y_title: panel.y_title.clone(),
        y,
        lines: lines(series, false),
        references: lines(references, true),
        baseline: (panel.y == Quantity::Ratio).then_some(1.0),
    }
}

fn sample(panel: &FigurePanel, series: &FigureSeries, point: &FigurePoint) -> Sample {
    let short = measured(point.y, panel.y);
    let error = if point.error > 0.0 { format!(" ± {}", measured(point.error, panel.y)) } else { String::new() };
    let at = panel.x.0.ticks.iter().find(|tick| (tick.at - point.x).abs() < 1e-9).map_or("", |tick| &tick.label);
    let label = format!("{}{}{at}: {short}{error}", series.name, if at.is_empty() { "" } else { ", " });
    Sample { x: point.x, y: point.y, error: point.error, short, label }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(series: Vec<FigureSeries>, log: bool) -> Figure {
        let x = FigureAxis::numbers("queues", [(0.0, "1".to_owned()), (2.0, "4".to_owned())]);
        let panel =
            FigurePanel { heading: None, x, y_title: "IOPS, ratio to 1 queue".into(), y: Quantity::Ratio, log, series };
        Figure { title: "T".into(), subtitle: "S".into(), groups: vec![FigureGroup { panels: vec![panel] }] }
    }

    fn series(name: &str, values: [f64; 2], is_reference: bool) -> FigureSeries {
        let points = vec![FigurePoint::exact(0.0, values[0]), FigurePoint { x: 2.0, y: values[1], error: 0.1 }];
        FigureSeries { name: name.into(), points, is_reference }
    }

    #[test]
    fn published_series_are_grey_and_said_to_be() {
        let svg = figure(vec![series("here", [1.0, 1.5], false), series("2015: <a>", [1.0, 1.7], true)], true).svg();
        let document = roxmltree::Document::parse(&svg).unwrap();
        let texts: Vec<&str> =
            document.descendants().filter(|node| node.has_tag_name("text")).filter_map(|node| node.text()).collect();
        assert!(texts.contains(&"here") && texts.contains(&"2015: <a>"), "{texts:?}");
        assert!(texts.iter().any(|text| text.starts_with("Error bars: one standard error")), "{texts:?}");
        assert!(texts.iter().any(|text| text.starts_with("Grey: what the document")), "{texts:?}");
        assert!(svg.contains("<title>2015: &lt;a&gt;, 4: 1.7 ± 0.1</title>"), "{svg}");
        let lines = document.descendants().filter(|node| node.attribute("class") == Some("line"));
        let strokes: Vec<_> = lines
            .map(|node| (node.attribute("stroke").unwrap(), node.attribute("stroke-dasharray").is_some()))
            .collect();
        assert_eq!(strokes, [("#707070", true), ("#0072b2", false)]);
    }

    #[test]
    fn equal_values_and_no_values_are_drawn() {
        for log in [false, true] {
            assert!(figure(vec![series("here", [1.0, 1.0], false)], log).svg().contains("class=\"marker\""));
            let empty = figure(vec![series("2015", [1.0, 1.0], true)], log).svg();
            assert!(empty.contains("Nothing was measured.") && !empty.contains("NaN"), "{empty}");
        }
    }
}
