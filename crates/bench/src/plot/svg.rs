//! Lays a chart out, and writes it as SVG. Units are pixels; x goes right, y goes down. Text stays text, in the
//! viewer's sans-serif font: its width is estimated.

use std::f64::consts::TAU;
use std::fmt::Write as _;

use super::group::MAX_SERIES;
use super::picture::{Chart, Panel, PanelGroup, Sample, SeriesLine};

/// Colour of titles and names.
const INK: &str = "#222222";
/// Colour of subtitles and labels.
const FAINT_INK: &str = "#555555";
const PAPER: &str = "#ffffff";
const GRID: Style = Style { color: "#e2e2e2", width: 1.0, dashes: "", hollow: false, marker: 0 };
const AXIS: Style = Style { color: "#777777", ..GRID };

const MARGIN: f64 = 20.0;
/// Space between panels.
const GAP: f64 = 24.0;
/// Font sizes: of the title, of headings, of names and sentences, of labels.
const TITLE: f64 = 20.0;
const HEADING: f64 = 14.0;
const NAME: f64 = 13.0;
const LABEL: f64 = 12.0;
/// Space between a label and its axis.
const LABEL_GAP: f64 = 8.0;
/// Length of the sample line before a name of a legend.
const SAMPLE: f64 = 34.0;
/// Most lines of a title, and of a name below a group of bars.
const TITLE_LINES: usize = 3;
const NAME_LINES: usize = 4;
/// Most markers on a line.
const MAX_MARKERS: usize = 60;

/// Colours of series. The first seven are the palette of Okabe and Ito ("Color Universal Design", 2008), which
/// colour-blind people can distinguish, without its yellow, which is too light on white. The others are darker and
/// lighter ones, and their lines are dotted.
const COLORS: [&str; MAX_SERIES] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#1b2f7a", "#7a2d00", "#005540",
    "#7d2d5b", "#8a6400", "#7b61c4", "#9ccc3c",
];
/// Number of colours without dots.
const PLAIN_COLORS: usize = 7;
/// Colours and dashes of published series: greys.
const GREYS: [(&str, &str); 4] = [("#707070", DASHED), ("#999999", DOTTED), ("#555555", DASH_DOTTED), ("#b0b0b0", "")];
const DASHED: &str = "6 4";
const DOTTED: &str = "2 3";
const DASH_DOTTED: &str = "8 3 2 3";

/// The looks of a line, or of a marker or a bar.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Style {
    pub color: &'static str,
    width: f64,
    /// Lengths of strokes and gaps in turn; empty: solid.
    dashes: &'static str,
    /// True for a marker or a bar that is empty inside.
    hollow: bool,
    /// Index of the marker's shape, for readers who see few colours.
    marker: usize,
}

impl Style {
    /// Returns the looks of the edge of a shape.
    fn edge(self, width: f64) -> Style {
        Style { width, dashes: "", ..self }
    }

    fn fill(self) -> &'static str {
        if self.hollow { PAPER } else { self.color }
    }
}

/// Returns the style of a series, or of its second line. Of up to [`MAX_SERIES`] no two have
/// the same colour.
pub(super) fn style(series: usize, second: bool) -> Style {
    let at = series % COLORS.len();
    let dashes = if at < PLAIN_COLORS { ["", DASHED] } else { [DOTTED, DASH_DOTTED] };
    let (dashes, marker) = (dashes[usize::from(second)], series % MARKERS.len());
    Style { color: COLORS[at], width: 2.0, dashes, hollow: second, marker }
}

/// Returns the style of a published series: grey.
pub(super) fn reference_style(reference: usize) -> Style {
    let (color, dashes) = GREYS[reference % GREYS.len()];
    Style { color, width: 2.0, dashes, hollow: false, marker: (reference + 3) % MARKERS.len() }
}

fn style_of(line: &SeriesLine) -> Style {
    if line.is_reference { reference_style(line.series) } else { style(line.series, line.dashed) }
}

/// Shapes of markers: corners, the direction of the first (a fraction of a full turn), and their distances from the
/// middle in turn. No corner is a circle.
const MARKERS: [(usize, f64, &[f64]); 8] = [
    (0, 0.0, &[3.8]),
    (4, 0.125, &[5.2]),
    (3, 0.0, &[5.4]),
    (4, 0.0, &[5.6]),
    (3, 0.5, &[5.4]),
    (8, 0.0, &[5.6, 2.0]),
    (10, 0.0, &[6.2, 2.6]),
    (8, 0.125, &[5.6, 2.0]),
];

/// Returns an upper estimate of a text's width: usual fonts have 0.5 to 0.6.
fn width(text: &str, size: f64) -> f64 {
    text.chars().count() as f64 * size * 0.6
}

/// Returns `text`, or as much of its two ends as `room` holds, with an ellipsis between them.
fn shortened(text: &str, size: f64, room: f64) -> String {
    let chars: Vec<char> = text.chars().collect();
    let most = (room / width(".", size)) as usize;
    if chars.len() <= most {
        return text.to_owned();
    }
    let kept = most.saturating_sub(1);
    let (head, tail) = (kept.div_ceil(2), chars.len() - kept / 2);
    chars[..head].iter().chain(['…'].iter()).chain(&chars[tail..]).collect()
}

/// Returns `text` in lines of at most `room`, broken after a space, `,`, `=`, `/`, `:`, `-` or `_` if possible; at most
/// `most` lines, the last one shortened.
fn wrapped(text: &str, size: f64, room: f64, most: usize) -> Vec<String> {
    let fitting = ((room / width(".", size)) as usize).max(1);
    let mut lines = vec![];
    let mut rest = text.trim();
    while !rest.is_empty() {
        let Some((end, next)) = rest.char_indices().nth(fitting).filter(|_| lines.len() + 1 < most) else {
            lines.push(shortened(rest, size, room));
            break;
        };
        let good = rest[..end].rfind([' ', ',', '=', '/', ':', '-', '_']).map(|at| at + 1);
        let end = if next == ' ' { end } else { good.unwrap_or(end) };
        lines.push(rest[..end].trim_end().to_owned());
        rest = rest[end..].trim_start();
    }
    lines
}

/// Escapes text for SVG and HTML.
pub(crate) fn markup_text(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Rounds to a hundredth of a pixel.
fn round(value: f64) -> f64 {
    // Adding 0 turns -0 into 0.
    (value * 100.0).round() / 100.0 + 0.0
}

/// The elements of a picture so far, from back to front.
struct Drawing {
    elements: String,
    width: f64,
}

impl Drawing {
    /// Adds a shape. `tooltip` may be empty.
    fn shape(&mut self, element: &str, class: &str, fill: &str, style: Style, tooltip: &str) {
        let Style { color, width, dashes, .. } = style;
        let mut text =
            format!("{element} class=\"{class}\" fill=\"{fill}\" stroke=\"{color}\" stroke-width=\"{width}\"");
        if !dashes.is_empty() {
            text.push_str(&format!(" stroke-dasharray=\"{dashes}\""));
        }
        let name = element.split(' ').next().unwrap_or_default();
        // Writing to a String cannot fail.
        let _ = match tooltip.is_empty() {
            true => writeln!(self.elements, "<{text}/>"),
            false => writeln!(self.elements, "<{text}><title>{}</title></{name}>", markup_text(tooltip)),
        };
    }

    fn line(&mut self, class: &str, points: &[(f64, f64)], style: Style) {
        self.shape(&format!("polyline points=\"{}\"", corners(points)), class, "none", style, "");
    }

    /// Adds a text with its start, middle or end (`anchor`) at a point of its base line.
    fn text(&mut self, (x, y): (f64, f64), anchor: &str, size: f64, color: &str, text: &str) {
        self.placed_text(&format!("x=\"{}\" y=\"{}\"", round(x), round(y)), anchor, size, color, text);
    }

    fn placed_text(&mut self, place: &str, anchor: &str, size: f64, color: &str, text: &str) {
        let style = format!("text-anchor=\"{anchor}\" font-size=\"{size}\" fill=\"{color}\"");
        let _ = writeln!(self.elements, "<text {place} {style}>{}</text>", markup_text(text));
    }

    /// Adds a text in lines; returns the base line of the last one.
    fn paragraph(&mut self, mut y: f64, text: &str, size: f64, color: &str) -> f64 {
        for line in wrapped(text, size, self.width - 2.0 * MARGIN, TITLE_LINES) {
            y += size * 1.35;
            self.text((MARGIN, y), "start", size, color, &line);
        }
        y
    }

    fn marker(&mut self, class: &str, (x, y): (f64, f64), style: Style, tooltip: &str) {
        let (count, first, radii) = MARKERS[style.marker];
        let element = match count {
            0 => format!("circle cx=\"{}\" cy=\"{}\" r=\"{}\"", round(x), round(y), radii[0]),
            _ => {
                let corner = |n: usize| {
                    let (angle, radius) = ((first + n as f64 / count as f64) * TAU, radii[n % radii.len()]);
                    (x + radius * angle.sin(), y - radius * angle.cos())
                };
                format!("polygon points=\"{}\"", corners(&(0..count).map(corner).collect::<Vec<_>>()))
            }
        };
        self.shape(&element, class, style.fill(), style.edge(1.5), tooltip);
    }
}

fn corners(points: &[(f64, f64)]) -> String {
    points.iter().map(|(x, y)| format!("{},{}", round(*x), round(*y))).collect::<Vec<_>>().join(" ")
}

/// Returns the picture of a chart.
pub(super) fn svg(chart: &Chart) -> String {
    let columns = chart.groups.iter().map(columns).max().unwrap_or(1);
    let mut drawing = Drawing { elements: String::new(), width: if columns > 1 { 1360.0 } else { 960.0 } };
    let y = drawing.paragraph(MARGIN, &chart.title, TITLE, INK);
    let mut y = drawing.paragraph(y + 3.0, &chart.subtitle, NAME, FAINT_INK) + 14.0;
    // The same for all panels, so that their axes are aligned.
    let ticks = chart.groups.iter().flat_map(|group| &group.panels).flat_map(|panel| &panel.y.ticks);
    let left = NAME * 1.2 + 10.0 + LABEL_GAP + ticks.map(|tick| width(&tick.label, LABEL)).fold(0.0, f64::max);
    for group in &chart.groups {
        y = legend(&mut drawing, group, y);
        y = panels(&mut drawing, group, y, left.ceil());
    }
    y -= if chart.groups.is_empty() { 0.0 } else { GAP };
    for sentence in &chart.caption {
        y = drawing.paragraph(y, sentence, NAME, FAINT_INK);
    }
    let (w, h) = (drawing.width, (y + MARGIN).ceil());
    let size = format!("width=\"{w}\" height=\"{h}\"");
    let title = markup_text(&format!("{}: {}", chart.title, chart.subtitle));
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" {size} viewBox=\"0 0 {w} {h}\" font-family=\"sans-serif\" role=\"img\">\n\
         <title>{title}</title>\n<rect class=\"background\" {size} fill=\"{PAPER}\"/>\n{}</svg>\n",
        drawing.elements
    )
}

/// Returns the number of panels beside each other: only those of one metric.
fn columns(group: &PanelGroup) -> usize {
    group.panels.iter().take_while(|panel| panel.y_title == group.panels[0].y_title).count().min(2)
}

/// Draws the group's panels. Returns their lower end.
fn panels(drawing: &mut Drawing, group: &PanelGroup, top: f64, left: f64) -> f64 {
    let columns = columns(group);
    let width = (drawing.width - 2.0 * MARGIN - GAP * (columns - 1) as f64) / columns as f64;
    let height = match (columns, group.panels.len()) {
        (1, 1) => 400.0,
        (1, _) => 300.0,
        _ => 280.0,
    };
    let mut y = top;
    for same in group.panels.chunk_by(|a, b| a.y_title == b.y_title) {
        for row in same.chunks(columns) {
            let mut bottom = y;
            for (column, panel) in row.iter().enumerate() {
                let x = MARGIN + (width + GAP) * column as f64;
                let mut frame_top = y + 8.0;
                if let Some(heading) = &panel.heading {
                    let text = shortened(heading, HEADING, width - left);
                    drawing.text((x + left, y + HEADING), "start", HEADING, INK, &text);
                    frame_top = y + HEADING + 12.0;
                }
                let frame = PanelFrame::new(panel, [x + left, x + width - 8.0, frame_top, frame_top + height], x);
                bottom = f64::max(bottom, frame.draw(drawing, group));
            }
            y = bottom + GAP;
        }
    }
    y
}

/// Draws the group's legend. Returns its lower end.
fn legend(drawing: &mut Drawing, group: &PanelGroup, top: f64) -> f64 {
    let mut entries: Vec<(&str, Style)> = vec![];
    if group.series.len() > 1 || !group.series[0].is_empty() {
        entries.extend(group.series.iter().enumerate().map(|(at, name)| (name.as_str(), style(at, false))));
    }
    let bars = group.panels.first().is_some_and(|panel| panel.x.bars);
    if let Some(names) = group.styles {
        // Grey, since it is for series of all colours.
        let color = if group.series.len() > 1 || bars { FAINT_INK } else { COLORS[0] };
        entries.extend(names.into_iter().zip([false, true].map(|dashed| Style { color, ..style(0, dashed) })));
    }
    entries.extend(group.references.iter().enumerate().map(|(at, name)| (name.as_str(), reference_style(at))));
    if entries.is_empty() {
        return top;
    }
    let available = drawing.width - 2.0 * MARGIN;
    let names: Vec<String> = entries.iter().map(|entry| shortened(entry.0, NAME, available - SAMPLE - 8.0)).collect();
    let step = SAMPLE + 30.0 + names.iter().map(|name| width(name, NAME)).fold(0.0, f64::max);
    let columns = ((available + 22.0) / step) as usize;
    let columns = columns.clamp(1, entries.len());
    for (at, ((_, style), name)) in entries.iter().zip(names).enumerate() {
        let (x, y) = (MARGIN + (at % columns) as f64 * step, top + 10.0 + (at / columns) as f64 * 20.0);
        if bars {
            let element = format!("rect x=\"{}\" y=\"{}\" width=\"22\" height=\"12\"", round(x + 8.0), round(y - 6.0));
            drawing.shape(&element, "legend", style.fill(), style.edge(2.0), "");
        } else {
            drawing.line("legend", &[(x, y), (x + SAMPLE, y)], *style);
            drawing.marker("legend", (x + SAMPLE / 2.0, y), *style, "");
        }
        drawing.text((x + SAMPLE + 8.0, y + NAME * 0.36), "start", NAME, INK, &name);
    }
    top + entries.len().div_ceil(columns) as f64 * 20.0 + 12.0
}

/// A panel, and the area between its axes.
struct PanelFrame<'a> {
    panel: &'a Panel,
    left: f64,
    right: f64,
    top: f64,
    bottom: f64,
    /// Left end of the space of the vertical axis.
    outer_left: f64,
    /// First horizontal value, its position, and the pixels of 1.
    first: f64,
    start: f64,
    unit: f64,
}

impl PanelFrame<'_> {
    fn new(panel: &Panel, [left, right, top, bottom]: [f64; 4], outer_left: f64) -> PanelFrame<'_> {
        let samples = panel.lines.iter().flat_map(|line| &line.samples).map(|sample| sample.x);
        let all = || panel.x.ticks.iter().map(|tick| tick.at).chain(samples.clone());
        let (first, last) = (all().fold(f64::INFINITY, f64::min), all().fold(f64::NEG_INFINITY, f64::max));
        let width = right - left;
        // Space at both ends: half a group of bars, or enough for a marker.
        let margin = if panel.x.bars { width / (2.0 * (last - first + 1.0)) } else { 28.0 };
        let (start, unit) = match last > first {
            true => (left + margin, (width - 2.0 * margin) / (last - first)),
            false => (left + width / 2.0, 0.0),
        };
        PanelFrame { panel, left, right, top, bottom, outer_left, first, start, unit }
    }

    fn x(&self, value: f64) -> f64 {
        self.start + (value - self.first) * self.unit
    }

    fn y(&self, value: f64) -> f64 {
        self.bottom - self.panel.y.position(value) * (self.bottom - self.top)
    }

    /// Returns the width of a name below the axis, and of its bars.
    fn slot(&self) -> f64 {
        if self.panel.x.ticks.len() > 1 { self.unit } else { self.right - self.left }
    }

    /// Draws axes and lines or bars. Returns the lower end.
    fn draw(&self, drawing: &mut Drawing, group: &PanelGroup) -> f64 {
        self.vertical_axis(drawing);
        let below = self.horizontal_axis(drawing);
        if let Some(baseline) = self.panel.baseline {
            let y = self.y(baseline);
            drawing.line("baseline", &[(self.left, y), (self.right, y)], AXIS.edge(1.4));
        }
        match self.panel.x.bars {
            true => self.bars(drawing, group),
            false => self.lines(drawing),
        }
        below
    }

    fn vertical_axis(&self, drawing: &mut Drawing) {
        for tick in &self.panel.y.ticks {
            let y = self.y(tick.at);
            drawing.line("grid", &[(self.left, y), (self.right, y)], GRID);
            drawing.text((self.left - LABEL_GAP, y + LABEL * 0.36), "end", LABEL, FAINT_INK, &tick.label);
        }
        drawing.line("axis", &[(self.left, self.top), (self.left, self.bottom)], AXIS);
        let (x, y) = (round(self.outer_left + NAME), round((self.top + self.bottom) / 2.0));
        let title = format!("{}{}", self.panel.y_title, if self.panel.y.log { ", log scale" } else { "" });
        let place = format!("transform=\"translate({x} {y}) rotate(-90)\"");
        drawing.placed_text(&place, "middle", NAME, INK, &title);
    }

    /// Draws the axis, its ticks and its title. Returns their lower end.
    fn horizontal_axis(&self, drawing: &mut Drawing) -> f64 {
        let base = |line: usize| self.bottom + LABEL_GAP + LABEL + line as f64 * LABEL * 1.25;
        let mut lines = 1;
        let mut used = f64::NEG_INFINITY;
        for tick in &self.panel.x.ticks {
            let (x, half) = (self.x(tick.at), width(&tick.label, LABEL) / 2.0);
            let mut name = vec![];
            if self.panel.x.bars {
                name = wrapped(&tick.label, LABEL, self.slot() - 12.0, NAME_LINES);
            } else {
                drawing.line("grid", &[(x, self.top), (x, self.bottom)], GRID);
                // A label that would touch the one before it is left out; its grid line remains.
                if x - half > used + 6.0 {
                    name.push(tick.label.clone());
                    used = x + half;
                }
            }
            for (at, line) in name.iter().enumerate() {
                drawing.text((x, base(at)), "middle", LABEL, FAINT_INK, line);
            }
            lines = lines.max(name.len());
        }
        drawing.line("axis", &[(self.left, self.bottom), (self.right, self.bottom)], AXIS);
        let y = base(lines - 1) + NAME * 1.7;
        drawing.text(((self.left + self.right) / 2.0, y), "middle", NAME, INK, &self.panel.x.title);
        y + NAME * 0.4
    }

    fn lines(&self, drawing: &mut Drawing) {
        let position = |sample: &Sample| (self.x(sample.x), self.y(sample.y));
        for line in &self.panel.lines {
            let style = style_of(line);
            if line.samples.len() > 1 {
                let points: Vec<(f64, f64)> = line.samples.iter().map(position).collect();
                drawing.line("line", &points, style);
            }
            line.samples.iter().for_each(|sample| self.error_bar(drawing, sample, self.x(sample.x), style));
        }
        // Markers are above all lines, so that none is hidden.
        for line in &self.panel.lines {
            // A long curve has fewer markers than samples.
            for sample in line.samples.iter().step_by(line.samples.len().div_ceil(MAX_MARKERS)) {
                drawing.marker("marker", position(sample), style_of(line), &sample.label);
            }
        }
    }

    /// Draws one standard error up and down, if there is one.
    fn error_bar(&self, drawing: &mut Drawing, sample: &Sample, x: f64, style: Style) {
        if sample.error > 0.0 {
            let [low, high] = [sample.y - sample.error, sample.y + sample.error].map(|value| self.y(value));
            drawing.line("error", &[(x, low), (x, high)], style.edge(1.2));
            for y in [low, high] {
                drawing.line("error", &[(x - 4.0, y), (x + 4.0, y)], style.edge(1.2));
            }
        }
    }

    /// Draws groups of bars: one for each series, a hollow one beside it for a second value, and grey ones for
    /// published series.
    fn bars(&self, drawing: &mut Drawing, group: &PanelGroup) {
        let (series, names) = (group.series.len(), self.panel.x.ticks.len());
        let each = if self.panel.lines.iter().any(|line| line.dashed) { 2 } else { 1 };
        let all = (series * each + group.references.len()) as f64;
        let width = (self.slot() * 0.8 / all).min(90.0);
        for line in &self.panel.lines {
            let at = if line.is_reference { series * each } else { 0 };
            let at = at + line.series * if line.is_reference { 1 } else { each } + usize::from(line.dashed);
            for sample in &line.samples {
                // A single series has no legend: each of its bars has its own colour while there are enough, since the
                // picture may have curves of the same names.
                let own = series == 1 && group.references.is_empty() && names <= COLORS.len();
                let style = if own { style(sample.x as usize, line.dashed) } else { style_of(line) };
                let left = self.x(sample.x) + width * (at as f64 - all / 2.0 + 0.06);
                let (right, top) = (left + width * 0.88, self.y(sample.y));
                let points = [(left, self.bottom), (left, top), (right, top), (right, self.bottom)];
                let element = format!("polygon points=\"{}\"", corners(&points));
                drawing.shape(&element, "bar", style.fill(), style.edge(1.2), &sample.label);
                let middle = (left + right) / 2.0;
                // Dark, since it lies on its own bar.
                self.error_bar(drawing, sample, middle, Style { color: INK, ..style });
                if self::width(&sample.short, LABEL) <= width {
                    let end = self.y(sample.y + sample.error) - 5.0;
                    drawing.text((middle, end), "middle", LABEL, INK, &sample.short);
                }
            }
        }
    }
}
