//! Tables for people.

use std::fmt::Write as _;

/// No column is narrower, so that most reports of a sequence stand under one another.
const NARROWEST: usize = 8;

/// Rows of as many cells each: the first column to the left, the others to the right.
pub fn align(rows: &[Vec<String>]) -> String {
    let columns = rows.first().map_or(0, Vec::len);
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0).max(NARROWEST);
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
