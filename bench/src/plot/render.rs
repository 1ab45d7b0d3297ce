//! Writes a scene as SVG or PNG.

use std::fmt::Write as _;

use tiny_skia::{FillRule, LineCap, LineJoin, Paint, PathBuilder, Pixmap, StrokeDash, Transform};
use ttf_parser::{GlyphId, OutlineBuilder};

use super::scene::{Anchor, Color, Font, LinePattern, Outline, Point, Scene, SceneShape, Stroke, TextLine};

/// Pixels of a PNG for each pixel of the scene, in both directions.
pub(super) const PNG_SCALE: f64 = 2.0;

/// Returns the scene as SVG. Text stays text, in the viewer's sans-serif font.
pub(super) fn svg(scene: &Scene) -> String {
    let mut svg = String::new();
    // Writing to a String cannot fail.
    let _ = writeln!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{w}\" height=\"{h}\" viewBox=\"0 0 {w} {h}\" \
         font-family=\"sans-serif\" role=\"img\">\n<title>{title}</title>\n<rect class=\"background\" width=\"{w}\" \
         height=\"{h}\" fill=\"#ffffff\"/>",
        w = coordinate(scene.width),
        h = coordinate(scene.height),
        title = markup_text(&scene.title),
    );
    for shape in &scene.shapes {
        let _ = match shape {
            SceneShape::Text(text) => writeln!(svg, "{}", svg_text(text)),
            SceneShape::Figure { outline, fill, stroke, class, tooltip } => {
                let fill = fill.map_or("none".into(), css);
                let mut element = format!("{} class=\"{class}\" fill=\"{fill}\"", svg_outline(outline));
                if let Some(Stroke { color, width, dash }) = stroke {
                    let _ = write!(element, " stroke=\"{}\" stroke-width=\"{}\"", css(*color), coordinate(*width));
                    if *dash != LinePattern::Solid {
                        let lengths: Vec<String> = dash.lengths().iter().map(f64::to_string).collect();
                        let _ = write!(element, " stroke-dasharray=\"{}\"", lengths.join(" "));
                    }
                }
                let name = element.split(' ').next().unwrap_or_default();
                match tooltip.is_empty() {
                    true => writeln!(svg, "<{element}/>"),
                    false => writeln!(svg, "<{element}><title>{}</title></{name}>", markup_text(tooltip)),
                }
            }
        };
    }
    svg.push_str("</svg>\n");
    svg
}

fn svg_outline(outline: &Outline) -> String {
    let pair = |point: &Point| format!("{},{}", coordinate(point.x), coordinate(point.y));
    match outline {
        Outline::Circle(Point { x, y }, radius) => {
            format!("circle cx=\"{}\" cy=\"{}\" r=\"{}\"", coordinate(*x), coordinate(*y), coordinate(*radius))
        }
        Outline::Path(points, closed) => {
            let points: Vec<String> = points.iter().map(pair).collect();
            format!("{} points=\"{}\"", if *closed { "polygon" } else { "polyline" }, points.join(" "))
        }
    }
}

fn svg_text(text: &TextLine) -> String {
    let (x, y) = (coordinate(text.at.x), coordinate(text.at.y));
    let position = match text.upward {
        true => format!("transform=\"translate({x} {y}) rotate(-90)\""),
        false => format!("x=\"{x}\" y=\"{y}\""),
    };
    let anchor = match text.anchor {
        Anchor::Start => "start",
        Anchor::Middle => "middle",
        Anchor::End => "end",
    };
    let (size, color, content) = (coordinate(text.size), css(text.color), markup_text(&text.text));
    format!("<text {position} text-anchor=\"{anchor}\" font-size=\"{size}\" fill=\"{color}\">{content}</text>")
}

/// Rounds to a hundredth of a pixel.
fn coordinate(value: f64) -> f64 {
    // Adding 0 turns -0 into 0.
    (value * 100.0).round() / 100.0 + 0.0
}

fn css(Color(rgb): Color) -> String {
    format!("#{rgb:06x}")
}

/// Returns text as SVG and HTML show it.
pub(crate) fn markup_text(text: &str) -> String {
    let mut safe = String::new();
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            c => safe.push(c),
        }
    }
    safe
}

/// Returns the scene as PNG, [`PNG_SCALE`] times as large.
///
/// # Errors
/// When it is too large for memory, or the encoder fails.
pub(super) fn png(scene: &Scene, font: &Font) -> Result<Vec<u8>, String> {
    let size = |length: f64| (length * PNG_SCALE).ceil() as u32;
    let mut pixmap = Pixmap::new(size(scene.width), size(scene.height)).ok_or("the picture is too large")?;
    pixmap.fill(tiny_skia::Color::WHITE);
    let transform = Transform::from_scale(PNG_SCALE as f32, PNG_SCALE as f32);
    for shape in &scene.shapes {
        match shape {
            SceneShape::Text(text) => draw_text(&mut pixmap, text, font, transform),
            SceneShape::Figure { outline, fill, stroke, .. } => {
                // `None`: an outline without a length, such as an error bar on the axis.
                let Some(path) = outline_path(outline) else { continue };
                if let Some(color) = fill {
                    pixmap.fill_path(&path, &paint(*color), FillRule::Winding, transform, None);
                }
                if let Some(Stroke { color, width, dash }) = stroke {
                    let lengths: Vec<f32> = dash.lengths().iter().map(|length| *length as f32).collect();
                    // `None` for no lengths: a solid line.
                    let dash = StrokeDash::new(lengths, 0.0);
                    let (line_cap, line_join) = (LineCap::Butt, LineJoin::Round);
                    let stroke =
                        tiny_skia::Stroke { width: *width as f32, dash, line_cap, line_join, ..Default::default() };
                    pixmap.stroke_path(&path, &paint(*color), &stroke, transform, None);
                }
            }
        }
    }
    pixmap.encode_png().map_err(|error| error.to_string())
}

fn paint(Color(rgb): Color) -> Paint<'static> {
    let [_, red, green, blue] = rgb.to_be_bytes();
    let mut paint = Paint { anti_alias: true, ..Paint::default() };
    paint.set_color_rgba8(red, green, blue, 255);
    paint
}

fn outline_path(outline: &Outline) -> Option<tiny_skia::Path> {
    let mut path = PathBuilder::new();
    match outline {
        Outline::Circle(center, radius) => path.push_circle(center.x as f32, center.y as f32, *radius as f32),
        Outline::Path(points, closed) => {
            for (at, point) in points.iter().enumerate() {
                match at {
                    0 => path.move_to(point.x as f32, point.y as f32),
                    _ => path.line_to(point.x as f32, point.y as f32),
                }
            }
            if *closed {
                path.close();
            }
        }
    }
    path.finish()
}

/// Draws a text, glyph after glyph, without kerning, as [`Font::width`] measures it.
fn draw_text(pixmap: &mut Pixmap, text: &TextLine, font: &Font, transform: Transform) {
    let width = font.width(&text.text, text.size);
    let shift = match text.anchor {
        Anchor::Start => 0.0,
        Anchor::Middle => -width / 2.0,
        Anchor::End => -width,
    };
    let mut glyphs = GlyphPath { path: PathBuilder::new(), x: shift as f32, scale: font.scale(text.size) as f32 };
    for c in text.text.chars() {
        // 0 is the glyph of missing characters.
        let glyph = font.face().glyph_index(c).unwrap_or(GlyphId(0));
        font.face().outline_glyph(glyph, &mut glyphs);
        glyphs.x += f32::from(font.face().glyph_hor_advance(glyph).unwrap_or(0)) * glyphs.scale;
    }
    let Some(path) = glyphs.path.finish() else { return };
    let placed = transform.pre_translate(text.at.x as f32, text.at.y as f32);
    let placed = if text.upward { placed.pre_concat(Transform::from_rotate(-90.0)) } else { placed };
    pixmap.fill_path(&path, &paint(text.color), FillRule::Winding, placed, None);
}

/// Collects the outlines of glyphs. In fonts y goes up from the base line.
struct GlyphPath {
    path: PathBuilder,
    x: f32,
    scale: f32,
}

impl GlyphPath {
    fn picture_point(&self, x: f32, y: f32) -> (f32, f32) {
        (self.x + x * self.scale, -y * self.scale)
    }
}

impl OutlineBuilder for GlyphPath {
    fn move_to(&mut self, x: f32, y: f32) {
        let (x, y) = self.picture_point(x, y);
        self.path.move_to(x, y);
    }

    fn line_to(&mut self, x: f32, y: f32) {
        let (x, y) = self.picture_point(x, y);
        self.path.line_to(x, y);
    }

    fn quad_to(&mut self, x1: f32, y1: f32, x: f32, y: f32) {
        let ((x1, y1), (x, y)) = (self.picture_point(x1, y1), self.picture_point(x, y));
        self.path.quad_to(x1, y1, x, y);
    }

    fn curve_to(&mut self, x1: f32, y1: f32, x2: f32, y2: f32, x: f32, y: f32) {
        let ((x1, y1), (x2, y2), (x, y)) =
            (self.picture_point(x1, y1), self.picture_point(x2, y2), self.picture_point(x, y));
        self.path.cubic_to(x1, y1, x2, y2, x, y);
    }

    fn close(&mut self) {
        self.path.close();
    }
}
