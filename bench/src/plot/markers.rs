//! Colours and markers of series. The shapes of markers are for those who see few colours.

use std::f64::consts::TAU;

use super::scene::{Color, LinePattern, Outline, Point, at};

/// The background.
pub(super) const PAPER: Color = Color(0xffffff);
/// Width of a marker's outline.
pub(super) const OUTLINE: f64 = 1.5;

/// The first seven are the palette of Okabe and Ito ("Color Universal Design", 2008), which colour-blind people can distinguish, without
/// its yellow, which is too light on white. The others are darker and lighter ones, and their lines are dotted.
const COLORS: [Color; 14] = [
    Color(0x0072b2),
    Color(0xd55e00),
    Color(0x009e73),
    Color(0xcc79a7),
    Color(0xe69f00),
    Color(0x56b4e9),
    Color(0x000000),
    Color(0x1b2f7a),
    Color(0x7a2d00),
    Color(0x005540),
    Color(0x7d2d5b),
    Color(0x8a6400),
    Color(0x7b61c4),
    Color(0x9ccc3c),
];
/// Colours that are told apart without dots.
const PLAIN_COLORS: usize = 7;

/// Greys of series from elsewhere.
const GREYS: [Color; 4] = [Color(0x707070), Color(0x999999), Color(0x555555), Color(0xb0b0b0)];
const GREY_DASHES: [LinePattern; 4] =
    [LinePattern::Dashed, LinePattern::Dotted, LinePattern::DashDotted, LinePattern::Solid];

/// Shape of a marker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Marker {
    /// A circle.
    Circle,
    /// A square on its side.
    Square,
    /// A triangle on its side.
    Triangle,
    /// A square on a corner.
    Diamond,
    /// A triangle on a corner.
    Nabla,
    /// A cross of upright bars.
    Plus,
    /// A star of five points.
    Star,
    /// A cross of slanting bars.
    Cross,
}

const MARKERS: [Marker; 8] = [
    Marker::Circle,
    Marker::Square,
    Marker::Triangle,
    Marker::Diamond,
    Marker::Nabla,
    Marker::Plus,
    Marker::Star,
    Marker::Cross,
];

/// How a series is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Style {
    /// Its colour.
    pub color: Color,
    /// Its marker.
    pub marker: Marker,
    /// Patterns of its line, and of its second one.
    pub dashes: [LinePattern; 2],
}

/// Returns the style of a series. Of up to [`MAX_SERIES`](super::select::MAX_SERIES) no two have the same colour.
pub(super) fn style(series: usize) -> Style {
    let at = series % COLORS.len();
    let dashes = if at < PLAIN_COLORS {
        [LinePattern::Solid, LinePattern::Dashed]
    } else {
        [LinePattern::Dotted, LinePattern::DashDotted]
    };
    Style { color: COLORS[at], marker: MARKERS[series % MARKERS.len()], dashes }
}

/// Returns the style of a series from elsewhere: grey.
pub(super) fn reference_style(reference: usize) -> Style {
    let at = reference % GREYS.len();
    Style { color: GREYS[at], marker: MARKERS[(reference + 3) % MARKERS.len()], dashes: [GREY_DASHES[at]; 2] }
}

impl Marker {
    /// Returns the marker's outline around `center`, and its fill: the background's colour for a `hollow` one.
    pub(super) fn outline(self, center: Point, hollow: bool, color: Color) -> (Outline, Color) {
        let around = |corner: f64, radius: f64| {
            let angle = corner * TAU;
            at(center.x + radius * angle.sin(), center.y - radius * angle.cos())
        };
        // Corners at equal angles from `first` (a fraction of a full turn), with these radii in turn.
        let polygon = |count: usize, first: f64, radii: &[f64]| {
            let corner = |n: usize| around(first + n as f64 / count as f64, radii[n % radii.len()]);
            Outline::Path((0..count).map(corner).collect(), true)
        };
        let outline = match self {
            Marker::Circle => Outline::Circle(center, 3.8),
            Marker::Square => polygon(4, 0.125, &[5.2]),
            Marker::Triangle => polygon(3, 0.0, &[5.4]),
            Marker::Diamond => polygon(4, 0.0, &[5.6]),
            Marker::Nabla => polygon(3, 0.5, &[5.4]),
            Marker::Plus => Outline::Path(cross(center, 0.0), true),
            Marker::Star => polygon(10, 0.0, &[6.2, 2.6]),
            Marker::Cross => Outline::Path(cross(center, 0.125), true),
        };
        (outline, if hollow { PAPER } else { color })
    }
}

/// Returns the corners of a cross, turned right by `turn` of a full turn.
fn cross(center: Point, turn: f64) -> Vec<Point> {
    const LONG: f64 = 5.2;
    const SHORT: f64 = 1.5;
    let (sin, cos) = (turn * TAU).sin_cos();
    let corners = [(SHORT, -LONG), (SHORT, -SHORT), (LONG, -SHORT)];
    let arm = |n: usize| {
        // A quarter turn to the right takes (x, y) to (-y, x).
        corners.map(|(x, y)| match n {
            0 => (x, y),
            1 => (-y, x),
            2 => (-x, -y),
            _ => (y, -x),
        })
    };
    let turned = |(x, y): (f64, f64)| at(center.x + x * cos - y * sin, center.y + x * sin + y * cos);
    (0..4).flat_map(arm).map(turned).collect()
}
