//! `mqblk plot`: pictures of result files, and those of experiments.
//!
//! ```text
//! rows (place: read and check the files; series: a row for each run) -> row_table (the values of each key)
//!      -> select (a group: axis, series, panels) -> chart (a picture: samples, axes, titles) -> svg (positions and colours)
//!      -> a temporary file, renamed
//! ```

mod axis;
mod chart;
mod group;
mod intervals;
mod keys;
mod metric;
mod options;
mod picture;
mod place;
mod row_table;
mod rows;
mod select;
mod series;
mod svg;
#[cfg(test)]
mod tests;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use picture::Chart;
use row_table::RowTable;

pub(crate) use group::{PlotGroup, PublishedSeries};
pub(crate) use keys::{KeyValue, RowKey};
pub(crate) use metric::Metric;
pub use options::PlotArgs;
pub(crate) use options::{AxisChoice, RowFilter};
pub(crate) use rows::PlotRow;
pub(crate) use svg::markup_text;

use crate::BenchError;
use crate::report::ResultRow;

/// Draws the picture. Exit code 0; 1 when it cannot be written; 2 when the options or a result file cannot be used.
pub fn run(args: &PlotArgs) -> ExitCode {
    crate::error::exit("plot", plot(args).map(|()| 0))
}

fn plot(args: &PlotArgs) -> Result<(), BenchError> {
    if args.output.extension().is_none_or(|extension| !extension.eq_ignore_ascii_case("svg")) {
        return Err(BenchError::option("output", args.output.display(), "a file name that ends in .svg"));
    }
    let mut rows = read(&args.results)?;
    if args.x == Some(RowKey::Time) {
        if let Some(filter) = &args.ratio {
            return Err(BenchError::option("ratio", filter.key, "none with --x time, where a row has no one value"));
        }
        rows = series::of_each_run(rows)?;
    }
    let chart = chart(filter_rows(rows, &args.only)?, args)?;
    let written = crate::output::replace(&args.output, |file| file.write_all(svg::svg(&chart).as_bytes()));
    written.map_err(|error| BenchError::failed(args.output.display(), error))
}

/// Returns the chart of at least one row.
fn chart(rows: Vec<PlotRow>, args: &PlotArgs) -> Result<Chart, BenchError> {
    let table = RowTable::new(rows);
    let groups = select::select(&table, args)?;
    let title = args.title.as_deref().map_or_else(|| chart::heading(&groups), rows::label);
    let subtitle = select::constants(&table, &groups);
    Ok(chart::chart(title, subtitle, &groups.iter().map(|group| (&table, group)).collect::<Vec<_>>()))
}

/// Reads the rows of all files.
fn read(paths: &[PathBuf]) -> Result<Vec<PlotRow>, BenchError> {
    let short =
        |path: &Path| path.file_stem().map_or(path.to_string_lossy(), |stem| stem.to_string_lossy()).into_owned();
    let mut rows = vec![];
    for path in paths {
        // The whole path if two files have the same name.
        let same = paths.iter().filter(|other| short(other) == short(path)).count();
        let name = if same == 1 { short(path) } else { path.display().to_string() };
        rows.extend(rows::read(path, &rows::label(&name))?);
        select::at_most(rows::MAX_ROWS, rows.len(), "rows", &format!("{}: ", path.display()), "in all files together")?;
    }
    Ok(rows)
}

/// Returns the rows that pass all filters. Filters of the same key add up.
fn filter_rows(rows: Vec<PlotRow>, only: &[RowFilter]) -> Result<Vec<PlotRow>, BenchError> {
    only.iter().try_for_each(|filter| filter.check("only", &rows))?;
    let passes = |row: &PlotRow, key: RowKey| only.iter().any(|filter| filter.key == key && filter.passes(row));
    let rows: Vec<PlotRow> = rows.into_iter().filter(|row| only.iter().all(|only| passes(row, only.key))).collect();
    match rows.is_empty() {
        true => Err(BenchError::option("only", "no row that has all these values", "at least one")),
        false => Ok(rows),
    }
}

/// The picture of an experiment: its groups are given, not selected.
#[derive(Debug)]
pub(crate) struct Figure {
    pub title: &'static str,
    /// Settings of all measurements.
    pub subtitle: &'static str,
    /// Groups with their rows, from top to bottom. Groups without rows are left out.
    pub groups: Vec<(Vec<PlotRow>, PlotGroup)>,
}

impl Figure {
    /// Converts measured rows for drawing.
    pub(crate) fn rows(rows: &[ResultRow]) -> Vec<PlotRow> {
        let read = |text: Vec<u8>| rows::parse(&text, "");
        let text = serde_json::to_vec(rows).map_err(|error| error.to_string());
        if rows.is_empty() { vec![] } else { text.and_then(read).expect("a row is what a result file has") }
    }

    /// Returns the picture as SVG.
    pub(crate) fn svg(self) -> String {
        let groups = self.groups.into_iter().filter(|(rows, _)| !rows.is_empty());
        let groups: Vec<(RowTable, PlotGroup)> = groups.map(|(rows, group)| (RowTable::new(rows), group)).collect();
        let with_rows: Vec<(&RowTable, &PlotGroup)> = groups.iter().map(|(table, group)| (table, group)).collect();
        let mut chart = chart::chart(self.title.to_owned(), self.subtitle.to_owned(), &with_rows);
        if groups.is_empty() {
            chart.caption.push("Nothing was measured.".into());
        }
        svg::svg(&chart)
    }
}
