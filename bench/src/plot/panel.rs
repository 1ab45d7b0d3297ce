//! Draws a panel: axes, and lines or bars.

use super::chart::{Panel, Sample, SeriesLine};
use super::layout::{FAINT_INK, INK, NAME};
use super::markers::{OUTLINE, PAPER, Style, reference_style, style};
use super::scene::{Anchor, Color, Font, LinePattern, Outline, Scene, SceneShape, Stroke, TextLine, at};

const TICK: f64 = 12.0;
/// Space between a tick's label and its axis.
const LABEL_GAP: f64 = 8.0;
const GRID: Stroke = Stroke { color: Color(0xe2e2e2), width: 1.0, dash: LinePattern::Solid };
const AXIS: Stroke = Stroke { color: Color(0x777777), width: 1.0, dash: LinePattern::Solid };
/// Most lines of a name below a group of bars.
const NAME_LINES: usize = 4;

/// Most markers on a line.
const MAX_MARKERS: usize = 60;

/// The area between the axes.
pub(super) struct PanelFrame {
    /// Left side.
    pub left: f64,
    /// Right side.
    pub right: f64,
    /// Upper side.
    pub top: f64,
    /// Lower side.
    pub bottom: f64,
    /// Space left of it.
    pub left_margin: f64,
}

/// Returns the space that the vertical axis needs left of the frame.
pub(super) fn left_margin(panel: &Panel, font: &Font) -> f64 {
    let widest = panel.y.ticks.iter().map(|tick| font.width(&tick.label, TICK)).fold(0.0, f64::max);
    (NAME * 1.2 + 10.0 + widest + LABEL_GAP).ceil()
}

/// Positions of horizontal values in a frame.
struct HorizontalScale {
    first: f64,
    start: f64,
    unit: f64,
}

impl HorizontalScale {
    fn new(panel: &Panel, frame: &PanelFrame) -> HorizontalScale {
        let samples = panel.lines.iter().chain(&panel.references).flat_map(|line| &line.samples).map(|sample| sample.x);
        let all = || panel.x.ticks.iter().map(|tick| tick.at).chain(samples.clone());
        let (first, last) = (all().fold(f64::INFINITY, f64::min), all().fold(f64::NEG_INFINITY, f64::max));
        let width = frame.right - frame.left;
        // Space at both ends: half a group of bars, or enough for a marker.
        let margin = if panel.x.bars { width / (2.0 * (last - first + 1.0)) } else { 28.0 };
        match last > first {
            true => {
                HorizontalScale { first, start: frame.left + margin, unit: (width - 2.0 * margin) / (last - first) }
            }
            false => HorizontalScale { first, start: frame.left + width / 2.0, unit: 0.0 },
        }
    }

    fn position(&self, value: f64) -> f64 {
        self.start + (value - self.first) * self.unit
    }
}

/// Draws `panel` in and around `frame`, with the colours of so many series, and greys of so many from elsewhere. Returns its lower end.
pub(super) fn draw(scene: &mut Scene, panel: &Panel, series: [usize; 2], frame: &PanelFrame, font: &Font) -> f64 {
    let across = HorizontalScale::new(panel, frame);
    vertical_axis(scene, panel, frame);
    let below = horizontal_axis(scene, panel, frame, &across, font);
    if let Some(baseline) = panel.baseline {
        let y = height(panel, frame, baseline);
        scene.line("baseline", at(frame.left, y), at(frame.right, y), Stroke { width: 1.4, ..AXIS });
    }
    match panel.x.bars {
        true => bars(scene, panel, series, frame, &across, font),
        false => lines(scene, panel, frame, &across),
    }
    below
}

fn height(panel: &Panel, frame: &PanelFrame, value: f64) -> f64 {
    frame.bottom - panel.y.position(value) * (frame.bottom - frame.top)
}

fn vertical_axis(scene: &mut Scene, panel: &Panel, frame: &PanelFrame) {
    for tick in &panel.y.ticks {
        let y = height(panel, frame, tick.at);
        scene.line("grid", at(frame.left, y), at(frame.right, y), GRID);
        let at = at(frame.left - LABEL_GAP, y + TICK * 0.36);
        let text = tick.label.clone();
        scene.text(TextLine { at, text, size: TICK, color: FAINT_INK, anchor: Anchor::End, upward: false });
    }
    scene.line("axis", at(frame.left, frame.top), at(frame.left, frame.bottom), AXIS);
    let at = at(frame.left - frame.left_margin + NAME, (frame.top + frame.bottom) / 2.0);
    let text = if panel.y.log { format!("{}, log scale", panel.y_title) } else { panel.y_title.clone() };
    scene.text(TextLine { at, text, size: NAME, color: INK, anchor: Anchor::Middle, upward: true });
}

/// Draws the axis, its ticks and its title. Returns their lower end.
fn horizontal_axis(scene: &mut Scene, panel: &Panel, frame: &PanelFrame, across: &HorizontalScale, font: &Font) -> f64 {
    let mut lines = 1;
    let mut used = f64::NEG_INFINITY;
    let slot = if panel.x.ticks.len() > 1 { across.unit } else { frame.right - frame.left };
    for tick in &panel.x.ticks {
        let x = across.position(tick.at);
        let label = |line: &str, at_line: usize| {
            let at = at(x, frame.bottom + LABEL_GAP + TICK + at_line as f64 * TICK * 1.25);
            let text = line.to_owned();
            TextLine { at, text, size: TICK, color: FAINT_INK, anchor: Anchor::Middle, upward: false }
        };
        if panel.x.bars {
            let wrapped = font.wrapped(&tick.label, TICK, slot - 12.0, NAME_LINES);
            lines = lines.max(wrapped.len());
            for (at_line, line) in wrapped.iter().enumerate() {
                scene.text(label(line, at_line));
            }
            continue;
        }
        scene.line("grid", at(x, frame.top), at(x, frame.bottom), GRID);
        // A label that would touch the one before it is left out; its grid line remains.
        let half = font.width(&tick.label, TICK) / 2.0;
        if x - half > used + 6.0 {
            scene.text(label(&tick.label, 0));
            used = x + half;
        }
    }
    scene.line("axis", at(frame.left, frame.bottom), at(frame.right, frame.bottom), AXIS);
    let y = frame.bottom + LABEL_GAP + TICK + (lines - 1) as f64 * TICK * 1.25 + NAME * 1.7;
    let at = at((frame.left + frame.right) / 2.0, y);
    let text = panel.x.title.clone();
    scene.text(TextLine { at, text, size: NAME, color: INK, anchor: Anchor::Middle, upward: false });
    y + NAME * 0.4
}

fn lines(scene: &mut Scene, panel: &Panel, frame: &PanelFrame, across: &HorizontalScale) {
    let position = |sample: &Sample| at(across.position(sample.x), height(panel, frame, sample.y));
    let references = panel.references.iter().map(|line| (line, reference_style(line.series)));
    // Series from elsewhere are behind the measured ones.
    let all: Vec<(&SeriesLine, Style)> =
        references.chain(panel.lines.iter().map(|line| (line, style(line.series)))).collect();
    for (line, Style { color, dashes, .. }) in &all {
        if line.samples.len() > 1 {
            let points = line.samples.iter().map(position).collect();
            let stroke = Stroke { color: *color, width: 2.0, dash: dashes[usize::from(line.dashed)] };
            scene.figure("line", Outline::Path(points, false), None, Some(stroke));
        }
        for sample in line.samples.iter().filter(|sample| sample.error > 0.0) {
            error_bar(scene, panel, frame, sample, across.position(sample.x), *color);
        }
    }
    // Markers are above all lines, so that none is hidden.
    for (line, Style { color, marker, .. }) in all {
        // A long curve has fewer markers than samples.
        for sample in line.samples.iter().step_by(line.samples.len().div_ceil(MAX_MARKERS)) {
            let (outline, fill) = marker.outline(position(sample), line.dashed, color);
            let stroke = Some(Stroke { color, width: OUTLINE, dash: LinePattern::Solid });
            let tooltip = sample.label.clone();
            scene.shapes.push(SceneShape::Figure { outline, fill: Some(fill), stroke, class: "marker", tooltip });
        }
    }
}

/// Draws one standard error up and down.
fn error_bar(scene: &mut Scene, panel: &Panel, frame: &PanelFrame, sample: &Sample, x: f64, color: Color) {
    let ends = [sample.y - sample.error, sample.y + sample.error].map(|value| height(panel, frame, value));
    let stroke = Stroke { color, width: 1.2, dash: LinePattern::Solid };
    scene.line("error", at(x, ends[0]), at(x, ends[1]), stroke);
    for y in ends {
        scene.line("error", at(x - 4.0, y), at(x + 4.0, y), stroke);
    }
}

/// Draws groups of bars, one bar for each series, a hollow one beside it for a second value, and grey ones for series from elsewhere.
fn bars(
    scene: &mut Scene,
    panel: &Panel,
    [count, references]: [usize; 2],
    frame: &PanelFrame,
    across: &HorizontalScale,
    font: &Font,
) {
    let doubled = panel.lines.iter().any(|line| line.dashed);
    let each = if doubled { 2 } else { 1 };
    let all = count * each + references;
    let group = if panel.x.ticks.len() > 1 { across.unit } else { frame.right - frame.left };
    let width = (group * 0.8 / all as f64).min(90.0);
    let first = -width * all as f64 / 2.0;
    let names = panel.x.ticks.len();
    let ours = panel.lines.iter().map(|line| (line, line.series * each + usize::from(line.dashed), false));
    let theirs = panel.references.iter().map(|line| (line, count * each + line.series, true));
    for (SeriesLine { series, dashed, samples }, slot, is_reference) in ours.chain(theirs) {
        for sample in samples {
            let color = match is_reference {
                true => reference_style(*series).color,
                // With grey bars beside them there is a legend.
                false => bar_color(count + references, *series, names, sample),
            };
            let left = across.position(sample.x) + first + width * slot as f64;
            let (left, right) = (left + width * 0.06, left + width * 0.94);
            let top = height(panel, frame, sample.y);
            let corners = vec![at(left, frame.bottom), at(left, top), at(right, top), at(right, frame.bottom)];
            let (outline, fill) = (Outline::Path(corners, true), if *dashed { PAPER } else { color });
            let stroke = Some(Stroke { color, width: 1.2, dash: LinePattern::Solid });
            let tooltip = sample.label.clone();
            scene.shapes.push(SceneShape::Figure { outline, fill: Some(fill), stroke, class: "bar", tooltip });
            let middle = (left + right) / 2.0;
            let mut end = top;
            if sample.error > 0.0 {
                // Dark, since it lies on its own bar.
                error_bar(scene, panel, frame, sample, middle, INK);
                end = height(panel, frame, sample.y + sample.error);
            }
            let text = sample.short.clone();
            if font.width(&text, TICK) <= width {
                let at = at(middle, end - 5.0);
                scene.text(TextLine { at, text, size: TICK, color: INK, anchor: Anchor::Middle, upward: false });
            }
        }
    }
}

/// Returns the colour of a bar. A single series has no legend: each of its bars has a colour of its own while there are enough, since curves
/// of the same names may be in the same picture. They are 1 apart.
fn bar_color(count: usize, series: usize, names: usize, sample: &Sample) -> Color {
    let own = count == 1 && names <= super::select::MAX_SERIES;
    style(if own { sample.x as usize } else { series }).color
}
