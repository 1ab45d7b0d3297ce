//! Lays a chart out: titles, legends, and panels in rows.

use super::chart::{Chart, Panel, PanelGroup};
use super::markers::{Style, reference_style, style};
use super::panel::{self, PanelFrame};
use super::scene::{Anchor, Color, Font, LinePattern, Outline, Point, Scene, SceneShape, Stroke, TextLine, at};

/// Colour of titles and names.
pub(super) const INK: Color = Color(0x222222);
/// Colour of subtitles and labels.
pub(super) const FAINT_INK: Color = Color(0x555555);

const MARGIN: f64 = 20.0;
const TITLE: f64 = 20.0;
const SUBTITLE: f64 = 13.0;
/// Font size of legends and axis titles.
pub(super) const NAME: f64 = 13.0;
const HEADING: f64 = 14.0;
/// Space between panels.
const GAP: f64 = 24.0;
/// Length of the sample line before a name of a legend.
const SAMPLE: f64 = 34.0;

/// Returns the scene of `chart`.
pub(super) fn scene(chart: &Chart, font: &Font) -> Scene {
    let columns = chart.groups.iter().map(columns).max().unwrap_or(1);
    let width = if columns > 1 { 1360.0 } else { 960.0 };
    let title = format!("{}: {}", chart.title, chart.subtitle);
    let mut scene = Scene { width, height: 0.0, title, shapes: vec![] };
    let mut y = MARGIN;
    for (text, size, color) in [(&chart.title, TITLE, INK), (&chart.subtitle, SUBTITLE, FAINT_INK)] {
        y += 3.0;
        for line in font.wrapped(text, size, width - 2.0 * MARGIN, 3) {
            y += size * 1.3;
            scene.text(TextLine { at: at(MARGIN, y), text: line, size, color, anchor: Anchor::Start, upward: false });
        }
    }
    y += 14.0;
    // The same for all panels, so that their axes are aligned.
    let left = chart
        .groups
        .iter()
        .flat_map(|block| &block.panels)
        .map(|panel| panel::left_margin(panel, font))
        .fold(0.0, f64::max);
    for block in &chart.groups {
        y = legend(&mut scene, block, font, y);
        y = panels(&mut scene, block, font, y, left);
    }
    let mut y = y - GAP;
    for sentence in &chart.caption {
        for text in font.wrapped(sentence, SUBTITLE, width - 2.0 * MARGIN, 3) {
            y += SUBTITLE * 1.4;
            let at = at(MARGIN, y);
            scene.text(TextLine { at, text, size: SUBTITLE, color: FAINT_INK, anchor: Anchor::Start, upward: false });
        }
    }
    scene.height = (y + MARGIN).ceil();
    scene
}

/// Returns the number of panels beside each other.
fn columns(block: &PanelGroup) -> usize {
    // Only panels of one metric are in a row.
    let facets = block.panels.iter().take_while(|panel| panel.y_title == block.panels[0].y_title).count();
    facets.min(2)
}

/// Draws the group's panels. Returns their lower end.
fn panels(scene: &mut Scene, block: &PanelGroup, font: &Font, top: f64, left: f64) -> f64 {
    let columns = columns(block);
    let width = (scene.width - 2.0 * MARGIN - GAP * (columns - 1) as f64) / columns as f64;
    let height = match (columns, block.panels.len()) {
        (1, 1) => 400.0,
        (1, _) => 300.0,
        _ => 280.0,
    };
    let mut y = top;
    let mut rest = block.panels.as_slice();
    while !rest.is_empty() {
        // Only panels of one metric are in a row.
        let same = rest.iter().take(columns).take_while(|panel| panel.y_title == rest[0].y_title).count();
        let (row, others) = rest.split_at(same);
        rest = others;
        let mut bottom = y;
        for (column, panel) in row.iter().enumerate() {
            let x = MARGIN + (width + GAP) * column as f64;
            let below = heading(scene, panel, font, at(x + left, y), width - left);
            let frame = PanelFrame {
                left: x + left,
                right: x + width - 8.0,
                top: below,
                bottom: below + height,
                left_margin: left,
            };
            bottom =
                f64::max(bottom, panel::draw(scene, panel, [block.series.len(), block.references.len()], &frame, font));
        }
        y = bottom + GAP;
    }
    y
}

/// Draws the panel's heading. Returns where its frame starts.
fn heading(scene: &mut Scene, panel: &Panel, font: &Font, origin: Point, width: f64) -> f64 {
    let Some(text) = &panel.heading else { return origin.y + 8.0 };
    let y = origin.y + HEADING;
    let text = font.shortened(text, HEADING, width);
    scene.text(TextLine { at: at(origin.x, y), text, size: HEADING, color: INK, anchor: Anchor::Start, upward: false });
    y + 12.0
}

/// A name of a legend, and how it is drawn.
struct LegendEntry<'a> {
    name: &'a str,
    style: Style,
    dashed: bool,
}

/// Draws the group's legend. Returns its lower end.
fn legend(scene: &mut Scene, block: &PanelGroup, font: &Font, top: f64) -> f64 {
    let mut entries: Vec<LegendEntry> = vec![];
    if block.series.len() > 1 || !block.series[0].is_empty() {
        entries.extend(block.series.iter().enumerate().map(|(at, name)| LegendEntry {
            name,
            style: style(at),
            dashed: false,
        }));
    }
    if let Some([solid, dashed]) = block.styles {
        // Grey, since it is for series of all colours.
        let all = block.series.len() > 1 || block.panels.iter().any(|panel| panel.x.bars);
        let style = if all { Style { color: FAINT_INK, ..style(0) } } else { style(0) };
        entries.push(LegendEntry { name: solid, style, dashed: false });
        entries.push(LegendEntry { name: dashed, style, dashed: true });
    }
    entries.extend(block.references.iter().enumerate().map(|(at, name)| LegendEntry {
        name,
        style: reference_style(at),
        dashed: false,
    }));
    if entries.is_empty() {
        return top;
    }
    const SPACE: f64 = 22.0;
    let available = scene.width - 2.0 * MARGIN;
    let names: Vec<String> =
        entries.iter().map(|entry| font.shortened(entry.name, NAME, available - SAMPLE - 8.0)).collect();
    let widest = names.iter().map(|name| font.width(name, NAME)).fold(0.0, f64::max);
    let step = SAMPLE + 8.0 + widest + SPACE;
    let columns = (((available + SPACE) / step) as usize).clamp(1, entries.len());
    let bars = block.panels.first().is_some_and(|panel| panel.x.bars);
    for (index, (entry, name)) in entries.iter().zip(names).enumerate() {
        let x = MARGIN + (index % columns) as f64 * step;
        let y = top + 10.0 + (index / columns) as f64 * 20.0;
        legend_sample(scene, entry, bars, at(x, y));
        let at = at(x + SAMPLE + 8.0, y + NAME * 0.36);
        scene.text(TextLine { at, text: name, size: NAME, color: INK, anchor: Anchor::Start, upward: false });
    }
    top + entries.len().div_ceil(columns) as f64 * 20.0 + 12.0
}

/// Draws a sample of the line, or of the bar.
fn legend_sample(scene: &mut Scene, entry: &LegendEntry, bars: bool, origin: Point) {
    let Style { color, marker, dashes } = entry.style;
    let stroke = Stroke { color, width: 2.0, dash: dashes[usize::from(entry.dashed)] };
    if bars {
        let (left, right, top, bottom) = (origin.x + 8.0, origin.x + SAMPLE - 4.0, origin.y - 6.0, origin.y + 6.0);
        let corners = vec![at(left, top), at(right, top), at(right, bottom), at(left, bottom)];
        let fill = if entry.dashed { super::markers::PAPER } else { color };
        let stroke = Stroke { dash: LinePattern::Solid, ..stroke };
        scene.figure("legend", Outline::Path(corners, true), Some(fill), Some(stroke));
        return;
    }
    scene.line("legend", origin, at(origin.x + SAMPLE, origin.y), stroke);
    let middle = at(origin.x + SAMPLE / 2.0, origin.y);
    let (outline, fill) = marker.outline(middle, entry.dashed, color);
    let stroke = Some(Stroke { color, width: super::markers::OUTLINE, dash: LinePattern::Solid });
    scene.shapes.push(SceneShape::Figure {
        outline,
        fill: Some(fill),
        stroke,
        class: "legend",
        tooltip: String::new(),
    });
}
