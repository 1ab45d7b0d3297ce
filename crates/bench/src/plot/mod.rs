//! `mqblk plot`: pictures of result files, and those of experiments.
//!
//! ```text
//! rows (place: read and check the files; series: a row for each run) -> keys (the values of each key)
//!      -> select (axis, series, panels) -> chart (samples, axes, titles) -> svg (positions and colours)
//!      -> a temporary file, renamed
//! ```

mod axis;
mod chart;
mod keys;
mod metric;
mod place;
mod rows;
mod select;
mod series;
mod svg;
#[cfg(test)]
mod tests;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::ValueEnum;
use clap::builder::{PossibleValuesParser, TypedValueParser};

use chart::Chart;
use keys::RowTable;

pub(crate) use keys::{KeyValue, RowKey};
pub(crate) use metric::Metric;
pub(crate) use rows::PlotRow;
pub(crate) use select::{AxisChoice, PlotGroup, PublishedSeries};
pub(crate) use svg::markup_text;

use crate::BenchError;
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
    #[arg(long, value_name = "KEY", value_parser = key_parser(RowKey::named().chain([RowKey::Time])))]
    x: Option<RowKey>,

    /// Values of the y axis; several make panels one below the other [default: iops, and percentiles when no number
    /// varies]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "METRIC,...")]
    y: Vec<Metric>,

    /// Give each value of this key (one of those of --x) a panel of its own
    #[arg(long, value_name = "KEY", hide_possible_values = true, value_parser = key_parser(RowKey::named()))]
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

/// Returns the parser of an option that takes one of these keys.
fn key_parser(keys: impl Iterator<Item = RowKey>) -> impl TypedValueParser<Value = RowKey> {
    PossibleValuesParser::new(keys.map(RowKey::possible)).try_map(|name| RowKey::from_str(&name, false))
}

/// A filter: the values of a key that are drawn.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RowFilter {
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
        let key = RowKey::named().find(|key| key.to_string() == name).ok_or_else(|| {
            let names: Vec<String> = RowKey::named().map(|key| key.to_string()).collect();
            format!("found key {name:?}, expected one of {}", names.join(", "))
        })?;
        // A target may have commas in its label.
        match key.is_numeric() {
            true => Ok(RowFilter { key, values: values.split(',').map(str::to_owned).collect() }),
            false => Ok(RowFilter::new(key, values)),
        }
    }

    /// Returns its values with their key.
    fn phrase(&self) -> String {
        self.key.phrase(&KeyValue::Text(self.values.join(" or ")))
    }

    /// Checks that each value is in one of the rows, at least one.
    fn check(&self, option: &str, rows: &[PlotRow]) -> Result<(), BenchError> {
        let RowFilter { key, values } = self;
        let Some(value) = values.iter().find(|value| !rows.iter().any(|row| row.key(*key).is(value))) else {
            return Ok(());
        };
        let expected = format!("one of {}", RowTable::new(rows.to_vec()).ticks(*key));
        Err(BenchError::option(option, format!("{key}={value}"), expected))
    }

    /// Returns true if a row has one of the values.
    pub(crate) fn passes(&self, row: &PlotRow) -> bool {
        self.values.iter().any(|value| row.key(self.key).is(value))
    }
}

/// Draws the picture. Exit code 0; 1 when it cannot be written; 2 when the options or a result file cannot be used.
pub fn run(args: &PlotArgs) -> ExitCode {
    crate::exit("plot", plot(args).map(|()| 0))
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
