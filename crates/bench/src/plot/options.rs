//! The options of `mqblk plot`.

use std::path::PathBuf;

use clap::ValueEnum;
use clap::builder::{PossibleValuesParser, TypedValueParser};

use super::keys::{KeyValue, RowKey};
use super::metric::Metric;
use super::row_table::RowTable;
use super::rows::PlotRow;
use crate::BenchError;

/// Scale of the vertical axes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum AxisChoice {
    /// Logarithmic for latencies that span more than two decades, else from 0
    #[default]
    Auto,
    /// From 0
    Linear,
    /// Logarithmic, but for bars and where a value is 0
    Log,
}

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
    pub(super) results: Vec<PathBuf>,

    /// Picture to write: FILE.svg
    #[arg(short, long, value_name = "FILE")]
    pub(super) output: PathBuf,

    /// Value of the x axis; time: the time series that `mqblk bench --interval` records [default: a number that
    /// varies]
    #[arg(long, value_name = "KEY", value_parser = key_parser(RowKey::named().chain([RowKey::Time])))]
    pub(super) x: Option<RowKey>,

    /// Values of the y axis; several make panels one below the other [default: iops, and percentiles when no number
    /// varies]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "METRIC,...")]
    pub(super) y: Vec<Metric>,

    /// Give each value of this key (one of those of --x) a panel of its own
    #[arg(long, value_name = "KEY", hide_possible_values = true, value_parser = key_parser(RowKey::named()))]
    pub(super) panels: Option<RowKey>,

    /// Draw only rows with these values, for example bs=4k,64k; may be repeated
    #[arg(long, value_name = "KEY=VALUE,...", value_parser = RowFilter::parse)]
    pub(super) only: Vec<RowFilter>,

    /// Draw ratios to the rows with this value, for example queues=1; what else is drawn agrees
    #[arg(long, value_name = "KEY=VALUE", value_parser = RowFilter::parse)]
    pub(super) ratio: Option<RowFilter>,

    /// Scale of the vertical axes
    #[arg(long, value_enum, default_value_t)]
    pub(super) scale: AxisChoice,

    /// Title [default: what is drawn]
    #[arg(long, value_name = "TEXT")]
    pub(super) title: Option<String>,
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

    pub(super) fn parse(text: &str) -> Result<RowFilter, String> {
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
    pub(super) fn phrase(&self) -> String {
        self.key.phrase(&KeyValue::Text(self.values.join(" or ")))
    }

    /// Checks that each value is in one of the rows, at least one.
    pub(super) fn check(&self, option: &str, rows: &[PlotRow]) -> Result<(), BenchError> {
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
