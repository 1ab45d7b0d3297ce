//! Colours and markers of series. The shapes of markers are for those who see few colours.

use std::f64::consts::TAU;

use super::scene::{Color, Outline, Point, at};

/// The background.
pub(super) const PAPER: Color = Color(0xffffff);
/// Width of a marker's outline.
pub(super) const OUTLINE: f64 = 1.5;

/// The palette of Okabe and Ito ("Color Universal Design", 2008), which colour-blind people can distinguish, without its
/// yellow, which is too light on white.
const COLORS: [Color; 7] = [
    Color(0x0072b2),
    Color(0xd55e00),
    Color(0x009e73),
    Color(0xcc79a7),
    Color(0xe69f00),
    Color(0x56b4e9),
    Color(0x000000),
];

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
}

/// Returns the style of a series. 7 and 8 have no common factor: the first 56 differ.
pub(super) fn style(series: usize) -> Style {
    Style { color: COLORS[series % COLORS.len()], marker: MARKERS[series % MARKERS.len()] }
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
