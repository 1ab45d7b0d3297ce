//! A picture as a list of shapes, independent of the file format. Units are pixels of the SVG; x goes right, y goes down.

use ttf_parser::Face;

/// A point of the picture.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Point {
    /// From the left.
    pub x: f64,
    /// From the top.
    pub y: f64,
}

/// Returns a point.
pub(super) fn at(x: f64, y: f64) -> Point {
    Point { x, y }
}

/// An opaque colour, as 0xRRGGBB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Color(pub u32);

/// How a line is drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Stroke {
    /// Its colour.
    pub color: Color,
    /// Its width.
    pub width: f64,
    /// Its pattern.
    pub dash: LinePattern,
}

/// The pattern of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinePattern {
    /// No gaps.
    Solid,
    /// Dashes.
    Dashed,
    /// Dots.
    Dotted,
    /// A dash and a dot in turn.
    DashDotted,
}

impl LinePattern {
    /// Returns the lengths of strokes and of the gaps after them, in turn; none for a solid line.
    pub(super) fn lengths(self) -> &'static [f64] {
        match self {
            LinePattern::Solid => &[],
            LinePattern::Dashed => &[6.0, 4.0],
            LinePattern::Dotted => &[2.0, 3.0],
            LinePattern::DashDotted => &[8.0, 3.0, 2.0, 3.0],
        }
    }
}

/// The point of a text that its position is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Anchor {
    /// Its start.
    Start,
    /// Its middle.
    Middle,
    /// Its end.
    End,
}

/// A line of text.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TextLine {
    /// Position of the anchor on the base line.
    pub at: Point,
    /// The text.
    pub text: String,
    /// Font size.
    pub size: f64,
    /// Its colour.
    pub color: Color,
    /// The anchor.
    pub anchor: Anchor,
    /// True if it goes up instead of right.
    pub upward: bool,
}

/// The outline of a shape.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Outline {
    /// Connected points; true if the last is connected to the first.
    Path(Vec<Point>, bool),
    /// A circle.
    Circle(Point, f64),
}

/// A shape or a text.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum SceneShape {
    /// An area, a line, or both.
    Figure {
        /// Its outline.
        outline: Outline,
        /// Colour of the fill.
        fill: Option<Color>,
        /// Stroke of the outline.
        stroke: Option<Stroke>,
        /// Class in the SVG: `marker`, `bar`, `line`, `baseline`, `error`, `legend`, `grid`, `axis`, `background`.
        class: &'static str,
        /// Tooltip; may be empty.
        tooltip: String,
    },
    /// A line of text.
    Text(TextLine),
}

/// A picture.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Scene {
    /// Its width.
    pub width: f64,
    /// Its height.
    pub height: f64,
    /// Title for screen readers.
    pub title: String,
    /// Shapes, from back to front.
    pub shapes: Vec<SceneShape>,
}

impl Scene {
    /// Adds a line or an area without a tooltip.
    pub(super) fn figure(
        &mut self,
        class: &'static str,
        outline: Outline,
        fill: Option<Color>,
        stroke: Option<Stroke>,
    ) {
        self.shapes.push(SceneShape::Figure { outline, fill, stroke, class, tooltip: String::new() });
    }

    /// Adds a straight line.
    pub(super) fn line(&mut self, class: &'static str, from: Point, to: Point, stroke: Stroke) {
        self.figure(class, Outline::Path(vec![from, to], false), None, Some(stroke));
    }

    /// Adds a line of text.
    pub(super) fn text(&mut self, text: TextLine) {
        self.shapes.push(SceneShape::Text(text));
    }
}

/// The font of measurements and of PNGs: DejaVu Sans. It is among the widest of the usual sans-serif fonts, so that a text in
/// the viewer's own font fits too.
pub(super) struct Font {
    face: Face<'static>,
}

impl Font {
    /// Returns the embedded font.
    pub(super) fn new() -> Font {
        Font { face: Face::parse(dejavu::sans::regular(), 0).expect("the embedded font is one") }
    }

    /// Returns the font's outlines.
    pub(super) fn face(&self) -> &Face<'static> {
        &self.face
    }

    /// Returns the pixels of a font unit at font size `size`.
    pub(super) fn scale(&self, size: f64) -> f64 {
        size / f64::from(self.face.units_per_em())
    }

    /// Returns the width of a character at font size 1.
    fn advance(&self, c: char) -> f64 {
        let glyph = self.face.glyph_index(c).unwrap_or_default();
        f64::from(self.face.glyph_hor_advance(glyph).unwrap_or(0)) * self.scale(1.0)
    }

    /// Returns the width of `text`.
    pub(super) fn width(&self, text: &str, size: f64) -> f64 {
        text.chars().map(|c| self.advance(c)).sum::<f64>() * size
    }

    /// Returns `text`, or as much of its two ends as `width` holds, with an ellipsis between them.
    pub(super) fn shortened(&self, text: &str, size: f64, width: f64) -> String {
        let chars: Vec<char> = text.chars().collect();
        let kept = |count: usize| -> String {
            let head = count.div_ceil(2);
            let tail = &chars[chars.len() - (count - head)..];
            chars[..head].iter().chain(['…'].iter()).chain(tail).collect()
        };
        if self.width(text, size) <= width {
            return text.to_owned();
        }
        let fits = (0..chars.len()).rev().map(kept).find(|short| self.width(short, size) <= width);
        fits.unwrap_or_else(|| "…".into())
    }

    /// Returns `text` in lines of at most `width`, broken after a space, `,`, `=`, `/`, `:`, `-` or `_` if possible; at most
    /// `most` lines (at least 1), the last one shortened.
    pub(super) fn wrapped(&self, text: &str, size: f64, width: f64, most: usize) -> Vec<String> {
        let mut lines = vec![];
        let mut rest = text.trim();
        while !rest.is_empty() {
            if lines.len() + 1 == most {
                lines.push(self.shortened(rest, size, width));
                break;
            }
            let mut used = 0.0;
            let fits = rest.char_indices().find(|(_, c)| {
                used += self.advance(*c) * size;
                used > width
            });
            let end = match fits {
                None => rest.len(),
                Some((end, ' ')) => end,
                Some((end, _)) => {
                    let good = rest[..end].rfind([' ', ',', '=', '/', ':', '-', '_']).map(|at| at + 1);
                    // At least one character, so that the loop ends.
                    good.unwrap_or(end.max(rest.chars().next().map_or(1, char::len_utf8)))
                }
            };
            lines.push(rest[..end].trim_end().to_owned());
            rest = rest[end..].trim_start();
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_measured_broken_and_shortened() {
        let font = Font::new();
        assert!(font.width("MMMM", 12.0) > 2.0 * font.width("iiii", 12.0) && font.width("", 12.0) == 0.0);
        assert!((font.width("abc", 24.0) - 2.0 * font.width("abc", 12.0)).abs() < 1e-9);
        let text = "storage=file,path=/some/where/a-long-name.img,size=1G";
        for width in [1.0, 30.0, 60.0, 120.0, 1000.0] {
            let lines = font.wrapped(text, 12.0, width, 100);
            assert_eq!(lines.concat(), text);
            assert!(width < 20.0 || lines.iter().all(|line| font.width(line, 12.0) <= width), "{lines:?}");
            let few = font.wrapped(text, 12.0, width, 2);
            assert!(
                few.len() <= 2 && (width < 20.0 || few.iter().all(|line| font.width(line, 12.0) <= width)),
                "{few:?}"
            );
        }
        assert_eq!(font.wrapped("one two", 12.0, font.width("one", 12.0) + 1.0, 9), ["one", "two"]);
        let short = font.shortened(text, 12.0, 100.0);
        assert!(short.starts_with("stor") && short.contains('…') && short.ends_with("1G"), "{short}");
        assert!(font.wrapped("  ", 12.0, 10.0, 3).is_empty());
    }
}
