//! Plain-text tables.

use std::fmt::Write as _;

/// Minimum column width. Keeps the columns of consecutive reports aligned in most cases.
const MIN_WIDTH: usize = 8;

/// Formats rows of equal length: the first column is left-aligned, the others are right-aligned.
pub(crate) fn align(rows: &[Vec<String>]) -> String {
    let columns = rows.first().map_or(0, Vec::len);
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0).max(MIN_WIDTH);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            // Writing to a String cannot fail.
            let _ = if column == 0 { write!(text, "{cell:<width$}") } else { write!(text, " {cell:>width$}") };
        }
        text.push('\n');
    }
    text
}

/// Wraps a line between words, with the lines after the first indented. Each ends with a newline. Words longer than
/// `width` are not cut.
pub(crate) fn wrap(line: &str, width: usize) -> String {
    const INDENT: &str = "    ";
    let mut text = String::new();
    let mut length = 0;
    for (number, word) in line.split(' ').enumerate() {
        let count = word.chars().count();
        if number > 0 && length > 0 && length + 1 + count > width {
            text.push('\n');
            text.push_str(INDENT);
            length = INDENT.len();
        } else if number > 0 {
            text.push(' ');
            length += 1;
        }
        text.push_str(word);
        length += count;
    }
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_wrapped_between_words() {
        assert_eq!(wrap("one two three", 80), "one two three\n");
        assert_eq!(wrap("one two three", 8), "one two\n    three\n");
        assert_eq!(wrap("one two three", 3), "one\n    two\n    three\n");
        assert_eq!(wrap("", 3), "\n");
        assert_eq!(wrap("  * one two", 8), "  * one\n    two\n");
    }
}
