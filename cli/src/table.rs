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
