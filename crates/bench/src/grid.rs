//! Tables as text, and numbers as text.

use std::fmt::Write as _;

/// A column's heading.
#[derive(Clone, Debug)]
pub(crate) struct Heading {
    pub text: String,
    /// Numbers are aligned to the right.
    pub number: bool,
}

/// Returns a line of headings and one for each of `rows`, which have a cell for each heading.
pub(crate) fn format_grid(headings: &[Heading], rows: &[Vec<String>]) -> String {
    let width = |at: usize| {
        let cells = rows.iter().map(|row| row[at].chars().count());
        cells.chain([headings[at].text.chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..headings.len()).map(width).collect();
    let mut text = String::new();
    let mut line = |cells: &mut dyn Iterator<Item = &str>| {
        let mut line = String::new();
        for ((cell, heading), width) in cells.zip(headings).zip(&widths) {
            // Writing to a String cannot fail.
            let _ = match heading.number {
                true => write!(line, "{cell:>width$}  "),
                false => write!(line, "{cell:<width$}  "),
            };
        }
        text.push_str(line.trim_end());
        text.push('\n');
    };
    line(&mut headings.iter().map(|heading| heading.text.as_str()));
    for row in rows {
        line(&mut row.iter().map(String::as_str));
    }
    text
}

/// Returns a number with at least three significant digits.
pub(crate) fn three_digits(value: f64) -> String {
    match value {
        v if v >= 100.0 => format!("{v:.0}"),
        v if v >= 10.0 => format!("{v:.1}"),
        v => format!("{v:.2}"),
    }
}

/// Returns a count with three significant digits and the suffix of thousands or millions, K or M.
pub(crate) fn with_suffix(value: f64) -> String {
    match value {
        // A value that rounds up to the next suffix gets it.
        v if v >= 999_500.0 => format!("{}M", three_digits(v / 1e6)),
        v if v >= 999.5 => format!("{}K", three_digits(v / 1e3)),
        v => format!("{v:.0}"),
    }
}

/// Returns a value as text, or a dash.
pub(crate) fn or_dash(value: Option<f64>, text: impl Fn(f64) -> String) -> String {
    value.map_or_else(|| "-".into(), text)
}

/// Returns the ratio of `value` to `first`.
pub(crate) fn ratio(value: f64, first: f64) -> String {
    // In a short run no I/O may have completed.
    or_dash((first > 0.0).then(|| value / first), |ratio| format!("{ratio:.2}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_have_three_digits() {
        for (value, text) in [
            (0.0, "0"),
            (12.4, "12"),
            (999.0, "999"),
            (999.7, "1.00K"),
            (1534.0, "1.53K"),
            (11_260.0, "11.3K"),
            (158_000.0, "158K"),
            (999_400.0, "999K"),
            (999_700.0, "1.00M"),
            (3_530_904.0, "3.53M"),
            (20_000_000.0, "20.0M"),
        ] {
            assert_eq!(with_suffix(value), text);
        }
    }

    #[test]
    fn numbers_stand_at_the_right() {
        let heading = |text: &str, number| Heading { text: text.into(), number };
        let rows = [vec!["a".to_owned(), "1000".to_owned()], vec!["long".to_owned(), "1".to_owned()]];
        assert_eq!(
            format_grid(&[heading("x", false), heading("n", true)], &rows),
            "x        n\na     1000\nlong     1\n"
        );
    }
}
