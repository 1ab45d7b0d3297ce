//! `mqblk plot`: pictures of result files, and those of experiments.
//!
//! ```text
//! rows (read and check the files; series: a row for each run) -> keys (the values of each key)
//!      -> select (axis, series, panels) -> chart (samples, axes, titles) -> svg (positions and colours)
//!      -> a temporary file, renamed
//! ```

mod axis;
mod chart;
mod keys;
mod metric;
mod rows;
mod select;
mod series;
mod svg;
#[cfg(test)]
mod tests;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};

use chart::Chart;
use keys::RowTable;

pub(crate) use chart::size_label;
pub(crate) use keys::{KeyValue, RowKey};
pub(crate) use metric::Metric;
pub(crate) use rows::PlotRow;
pub(crate) use select::{AxisChoice, PlotGroup, PublishedSeries};
pub(crate) use svg::markup_text;

use crate::report::ResultRow;

/// The options of `mqblk plot`.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
What varies is drawn: the first of bs, queues, iodepth, jobs, batch with three values or more (else with two) goes to the \
right, everything else that varies makes the series, and what is constant is said below the title. When no number varies \
there are bars for each target (or whatever varies), and a curve of the latency percentiles. When more than 7 series would \
share a panel, one of the keys gets panels of its own.

Examples:
  mqblk plot sizes.json -o sizes.svg
      of a file with --bs 512,4k,64k --queues 1,2: IOPS against block size, a line for each number of queues
  mqblk plot sizes.json -o metrics.svg --y iops,latency,cpu --x queues --panels rw
      three metrics one below the other against queues, reads beside writes
  mqblk plot sizes.json -o gain.svg --ratio queues=1 --scale log
      what more queues gain: IOPS as a ratio to one queue
  mqblk plot over-time.json -o over-time.svg --x time --y iops,latency
      of a file with --interval: IOPS and latency over time, a line for each run
  mqblk plot before.json after.json -o change.svg --y percentiles --only bs=4k --only queues=1,8
      latency percentiles of two files together, of some of their rows")]
pub struct PlotArgs {
    /// Result files: what `mqblk bench --json` wrote
    #[arg(value_name = "RESULT.json", required = true)]
    results: Vec<PathBuf>,

    /// Picture to write: FILE.svg
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,

    /// Value of the x axis; time: the time series that `mqblk bench --interval` records [default: a number that
    /// varies]
    #[arg(long, value_name = "KEY", value_parser = axis_parser())]
    x: Option<PlotAxis>,

    /// Values of the y axis; several make panels one below the other [default: iops, and percentiles when no number
    /// varies]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "METRIC,...")]
    y: Vec<Metric>,

    /// Give each value of this key (one of those of --x) a panel of its own
    #[arg(long, value_name = "KEY", hide_possible_values = true, value_parser = key_parser())]
    panels: Option<RowKey>,

    /// Draw only rows with these values, for example bs=4k,64k; may be repeated
    #[arg(long, value_name = "KEY=VALUE,...", value_parser = RowFilter::parse)]
    only: Vec<RowFilter>,

    /// Draw ratios to the rows with this value, for example queues=1; what else is drawn agrees
    #[arg(long, value_name = "KEY=VALUE", value_parser = RowFilter::parse)]
    ratio: Option<RowFilter>,

    /// Scale of the vertical axes
    #[arg(long, value_enum, default_value_t)]
    scale: AxisChoice,

    /// Title [default: what is drawn]
    #[arg(long, value_name = "TEXT")]
    title: Option<String>,
}

/// The horizontal axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PlotAxis {
    /// The values of a key.
    Key(RowKey),
    /// Time from the start of the measurement.
    Time,
}

/// The word for [`PlotAxis::Time`].
const TIME: &str = "time";

/// Returns the names of all keys on the command line.
fn key_names() -> impl Iterator<Item = &'static str> {
    RowKey::all().map(RowKey::name).filter(|name| !name.is_empty())
}

fn key_parser() -> impl TypedValueParser<Value = RowKey> {
    PossibleValuesParser::new(key_names()).try_map(|name| RowKey::find(&name).ok_or("no such key"))
}

/// Returns the parser of `--x`.
fn axis_parser() -> impl TypedValueParser<Value = PlotAxis> {
    let keys = RowKey::all().filter(|key| !key.name().is_empty());
    let keys = keys.map(|key| PossibleValue::new(key.name()).help(key.title()));
    let time = PossibleValue::new(TIME).help("time from the start of the measurement, a line for each run");
    PossibleValuesParser::new(keys.chain([time])).try_map(|name| match name.as_str() {
        TIME => Ok(PlotAxis::Time),
        key => RowKey::find(key).map(PlotAxis::Key).ok_or("no such key"),
    })
}

/// A filter: the values of a key that are drawn.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RowFilter {
    /// The key.
    pub key: RowKey,
    /// Its values as a user writes them.
    pub values: Vec<String>,
}

impl RowFilter {
    /// Creates a filter of one value.
    pub(crate) fn new(key: RowKey, value: impl Into<String>) -> RowFilter {
        RowFilter { key, values: vec![value.into()] }
    }

    fn parse(text: &str) -> Result<RowFilter, String> {
        let (name, values) = text.split_once('=').ok_or("expected KEY=VALUE,... such as bs=4k,64k")?;
        let key = RowKey::find(name).ok_or_else(|| {
            format!("found key {name:?}, expected one of {}", key_names().collect::<Vec<_>>().join(", "))
        })?;
        // A target may have commas in its label.
        match key.is_numeric() {
            true => Ok(RowFilter { key, values: values.split(',').map(str::to_owned).collect() }),
            false => Ok(RowFilter::new(key, values)),
        }
    }

    /// Returns true if a row has one of the values.
    pub(crate) fn passes(&self, row: &PlotRow) -> bool {
        self.values.iter().any(|value| row.key(self.key).is(value))
    }
}

/// Reason why no picture was written.
#[derive(Debug, thiserror::Error)]
enum PlotError {
    /// The options or a result file cannot be used. Exit code 2.
    #[error("{0}")]
    Input(String),
    /// The picture cannot be written. Exit code 1.
    #[error("{0}")]
    Output(String),
}

impl PlotError {
    /// Makes an error about an option.
    fn option(name: &str, found: impl std::fmt::Display, expected: impl std::fmt::Display) -> PlotError {
        PlotError::Input(format!("--{name}: found {found}, expected {expected}"))
    }
}

/// Draws the picture. Exit code 0; 1 when it cannot be written; 2 when the options or a result file cannot be used.
pub fn run(args: &PlotArgs) -> ExitCode {
    match plot(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error @ PlotError::Input(_)) => crate::fail("plot", &error.to_string(), 2),
        Err(error @ PlotError::Output(_)) => crate::fail("plot", &error.to_string(), 1),
    }
}

fn plot(args: &PlotArgs) -> Result<(), PlotError> {
    if args.output.extension().is_none_or(|extension| !extension.eq_ignore_ascii_case("svg")) {
        return Err(PlotError::option("output", args.output.display(), "a file name that ends in .svg"));
    }
    let mut rows = read(&args.results)?;
    if args.x == Some(PlotAxis::Time) {
        if let Some(filter) = &args.ratio {
            return Err(PlotError::option("ratio", filter.key, "none with --x time, where a row has no one value"));
        }
        rows = series::of_each_run(rows)?;
    }
    let chart = chart(filter_rows(rows, &args.only)?, args)?;
    let failed = |error: std::io::Error| PlotError::Output(format!("{}: {error}", args.output.display()));
    crate::output::replace(&args.output, |file| file.write_all(svg::svg(&chart).as_bytes())).map_err(failed)
}

/// Returns the chart of at least one row.
fn chart(rows: Vec<PlotRow>, args: &PlotArgs) -> Result<Chart, PlotError> {
    let table = RowTable::new(rows);
    let groups = select::select(&table, args)?;
    Ok(Chart {
        title: args.title.as_deref().map_or_else(|| chart::heading(&groups), rows::label),
        subtitle: select::constants(&table, &groups),
        groups: groups.iter().map(|group| chart::panel_group(&table, group)).collect(),
        caption: chart::caption(&groups.iter().map(|group| (&table, group)).collect::<Vec<_>>()),
    })
}

/// Reads the rows of all files.
fn read(paths: &[PathBuf]) -> Result<Vec<PlotRow>, PlotError> {
    let short =
        |path: &Path| path.file_stem().map_or(path.to_string_lossy(), |stem| stem.to_string_lossy()).into_owned();
    let mut rows = vec![];
    for path in paths {
        // The whole path if two files have the same name.
        let same = paths.iter().filter(|other| short(other) == short(path)).count();
        let name = if same == 1 { short(path) } else { path.display().to_string() };
        rows.extend(rows::read(path, &rows::label(&name))?);
        if rows.len() > rows::MAX_ROWS {
            let (path, found, most) = (path.display(), rows.len(), rows::MAX_ROWS);
            let text = format!("{path}: found {found} rows, expected at most {most} in all files together");
            return Err(PlotError::Input(text));
        }
    }
    Ok(rows)
}

/// Returns the rows that pass all filters. Filters of the same key add up.
fn filter_rows(rows: Vec<PlotRow>, only: &[RowFilter]) -> Result<Vec<PlotRow>, PlotError> {
    for RowFilter { key, values } in only {
        if let Some(value) = values.iter().find(|value| !rows.iter().any(|row| row.key(*key).is(value))) {
            let found = RowTable::new(rows).ticks(*key);
            return Err(PlotError::option("only", format!("{key}={value}"), format!("one of {found}")));
        }
    }
    let passes = |row: &PlotRow, key: RowKey| only.iter().any(|filter| filter.key == key && filter.passes(row));
    let rows: Vec<PlotRow> = rows.into_iter().filter(|row| only.iter().all(|only| passes(row, only.key))).collect();
    match rows.is_empty() {
        true => Err(PlotError::Input("--only: found no row that has all these values, expected at least one".into())),
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
        let mut caption = chart::caption(&groups.iter().map(|(table, group)| (table, group)).collect::<Vec<_>>());
        if groups.is_empty() {
            caption.push("Nothing was measured.".into());
        }
        svg::svg(&Chart {
            title: self.title.to_owned(),
            subtitle: self.subtitle.to_owned(),
            groups: groups.iter().map(|(table, group)| chart::panel_group(table, group)).collect(),
            caption,
        })
    }
}
