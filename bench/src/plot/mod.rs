//! `mqblk plot`: pictures of result files.
//!
//! ```text
//! rows (read and check the files; series: a row for each run) -> keys (the values of each key) -> select (axis, series, panels: what varies)
//!      -> build (a chart: samples, axes, titles) -> layout, panel, markers (a scene: positions and colours)
//!      -> render (SVG, PNG) -> a temporary file, renamed
//! ```

mod axis;
mod build;
mod chart;
pub(crate) mod figure;
mod keys;
mod layout;
mod markers;
mod metric;
mod panel;
mod ratio;
mod render;
mod rows;
mod scene;
mod select;
mod series;
#[cfg(test)]
mod tests;

pub(crate) use render::markup_text;
use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::ValueEnum;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use mqblk_core::settings::parse_size;

use keys::{RowKey, RowTable};
use metric::Metric;
use ratio::{AxisChoice, ChartOptions};
use rows::PlotRow;
use select::PlotSelection;

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
  mqblk plot sizes.json -o sizes.png --y iops,latency,cpu --x queues --panels rw
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

    /// Picture to write; its extension says the format: .svg or .png
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,

    /// What goes to the right; time: the time series that `mqblk bench --interval` records [default: a number that varies]
    #[arg(long, value_name = "KEY", value_parser = axis_parser())]
    x: Option<PlotAxis>,

    /// What goes up; several make panels one below the other [default: iops, and percentiles when no number varies]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "METRIC,...")]
    y: Vec<Metric>,

    /// Give each value of this key (one of those of --x) a panel of its own
    #[arg(long, value_enum, value_name = "KEY", hide_possible_values = true)]
    panels: Option<RowKey>,

    /// Draw only rows with these values, for example bs=4k,64k; may be repeated
    #[arg(long, value_name = "KEY=VALUE,...", value_parser = parse_filter)]
    only: Vec<RowFilter>,

    /// Draw ratios to the rows with this value, for example queues=1; what else is drawn agrees
    #[arg(long, value_name = "KEY=VALUE", value_parser = parse_filter)]
    ratio: Option<RowFilter>,

    /// Scale of the vertical axes
    #[arg(long, value_enum, default_value_t)]
    scale: AxisChoice,

    /// Title [default: what is drawn]
    #[arg(long, value_name = "TEXT")]
    title: Option<String>,
}

/// What goes to the right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PlotAxis {
    /// The values of a key.
    Key(RowKey),
    /// Time from the start of the measurement.
    Time,
}

/// The word for [`PlotAxis::Time`].
const TIME: &str = "time";

/// Returns the parser of `--x`.
fn axis_parser() -> impl TypedValueParser<Value = PlotAxis> {
    let keys = RowKey::value_variants().iter().filter_map(RowKey::to_possible_value);
    let time = PossibleValue::new(TIME).help("Time from the start of the measurement, a line for each run");
    PossibleValuesParser::new(keys.chain([time])).try_map(|name| match name.as_str() {
        TIME => Ok(PlotAxis::Time),
        key => RowKey::from_str(key, false).map(PlotAxis::Key),
    })
}

/// A filter: the values of a key that are drawn.
#[derive(Clone, Debug)]
struct RowFilter {
    key: RowKey,
    values: Vec<String>,
}

/// Why no picture was written.
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

/// Format of a picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PictureFormat {
    Svg,
    Png,
}

/// Draws the picture. Exit code 0; 1 when it cannot be written; 2 when the options or a result file cannot be used.
pub fn run(args: PlotArgs) -> ExitCode {
    let (why, code) = match plot(&args) {
        Ok(()) => return ExitCode::SUCCESS,
        Err(error @ PlotError::Input(_)) => (error.to_string(), 2),
        Err(error @ PlotError::Output(_)) => (error.to_string(), 1),
    };
    // Standard error may be closed.
    let _ = writeln!(std::io::stderr(), "mqblk: plot: {}", crate::one_line(&why));
    ExitCode::from(code)
}

fn plot(args: &PlotArgs) -> Result<(), PlotError> {
    let format = picture_format(&args.output)?;
    let mut rows = read(&args.results)?;
    if args.x == Some(PlotAxis::Time) {
        if let Some(filter) = &args.ratio {
            return Err(PlotError::option("ratio", filter.key, "none with --x time, where a row has no one value"));
        }
        rows = series::of_each_run(rows)?;
    }
    let table = RowTable::new(filter_rows(rows, &args.only)?);
    let selections = select::select(&table, args)?;
    if let Some(filter) = &args.ratio {
        check_ratio(&table, &selections, filter)?;
    }
    let title = args.title.as_deref().map(rows::label);
    let options = ChartOptions { title, ratio: args.ratio.clone(), scale: args.scale };
    let chart = build::chart(&table, &selections, &options);
    let font = scene::Font::new();
    let scene = layout::scene(&chart, &font);
    let failed = |why: String| PlotError::Output(format!("{}: {why}", args.output.display()));
    let bytes = match format {
        PictureFormat::Svg => render::svg(&scene).into_bytes(),
        PictureFormat::Png => render::png(&scene, &font).map_err(failed)?,
    };
    write(&args.output, &bytes).map_err(|error| failed(error.to_string()))
}

/// Checks that ratios can be drawn to the rows of `filter`.
fn check_ratio(table: &RowTable, selections: &[PlotSelection], filter: &RowFilter) -> Result<(), PlotError> {
    let has = |value: &String| table.rows.iter().any(|row| has_value(row, filter.key, value));
    if let Some(value) = filter.values.iter().find(|value| !has(value)) {
        let levels: Vec<String> = table.levels(filter.key).iter().map(|level| filter.key.tick(level)).collect();
        return Err(PlotError::option(
            "ratio",
            format!("{}={value}", filter.key),
            format!("one of {}", levels.join(" ")),
        ));
    }
    let key = Some(filter.key);
    if !selections.iter().any(|one| one.x == key || one.panels == key || one.series.contains(&filter.key)) {
        let expected = "a key that is drawn: one that varies, and does not follow from another";
        return Err(PlotError::option("ratio", filter.key, expected));
    }
    Ok(())
}

fn picture_format(output: &Path) -> Result<PictureFormat, PlotError> {
    let extension = output.extension().map(|extension| extension.to_string_lossy().to_lowercase());
    match extension.as_deref() {
        Some("svg") => Ok(PictureFormat::Svg),
        Some("png") => Ok(PictureFormat::Png),
        _ => Err(PlotError::option("output", output.display(), "a file name that ends in .svg or .png")),
    }
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
            let expected = format!("at most {} in all files together", rows::MAX_ROWS);
            return Err(PlotError::Input(format!(
                "{}: found {} rows, expected {expected}",
                path.display(),
                rows.len()
            )));
        }
    }
    Ok(rows)
}

fn parse_filter(text: &str) -> Result<RowFilter, String> {
    let (name, values) = text.split_once('=').ok_or("expected KEY=VALUE,... such as bs=4k,64k")?;
    let key = RowKey::from_str(name, false).map_err(|_| {
        let names: Vec<String> =
            keys::ROW_KEYS.iter().filter(|key| **key != RowKey::Repeat).map(RowKey::to_string).collect();
        format!("found key {name:?}, expected one of {}", names.join(", "))
    })?;
    // A target may have commas in its label.
    let values =
        if key.is_numeric() { values.split(',').map(str::to_owned).collect() } else { vec![values.to_owned()] };
    Ok(RowFilter { key, values })
}

/// Returns the rows that pass all filters. Filters of the same key add up.
fn filter_rows(rows: Vec<PlotRow>, only: &[RowFilter]) -> Result<Vec<PlotRow>, PlotError> {
    for RowFilter { key, values } in only {
        for value in values {
            if !rows.iter().any(|row| has_value(row, *key, value)) {
                let table = RowTable::new(rows);
                let found: Vec<String> = table.levels(*key).iter().map(|level| key.tick(level)).collect();
                return Err(PlotError::option("only", format!("{key}={value}"), format!("one of {}", found.join(" "))));
            }
        }
    }
    let passes = |row: &PlotRow, key: RowKey| {
        let mut same = only.iter().filter(|only| only.key == key);
        same.any(|only| only.values.iter().any(|value| has_value(row, key, value)))
    };
    let rows: Vec<PlotRow> = rows.into_iter().filter(|row| only.iter().all(|only| passes(row, only.key))).collect();
    match rows.is_empty() {
        true => Err(PlotError::Input("--only: found no row that has all these values, expected at least one".into())),
        false => Ok(rows),
    }
}

fn has_value(row: &PlotRow, key: RowKey, value: &str) -> bool {
    match key.value(row) {
        keys::KeyValue::Number(number) => parse_size(value).is_some_and(|size| size.0 == number),
        keys::KeyValue::Text(text) => text == value,
    }
}

/// Writes the file as a whole or not at all.
fn write(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // The permissions of a created file: what the umask leaves.
    let permissions = Permissions::from_mode(0o666);
    let mut file = tempfile::Builder::new().prefix(".mqblk-plot-").permissions(permissions).tempfile_in(folder)?;
    file.write_all(bytes)?;
    file.persist(path).map(drop).map_err(|error| error.error)
}
