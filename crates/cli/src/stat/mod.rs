//! `mqblk stat`: reads the counters of a running daemon and prints rates.

pub(crate) mod columns;
pub(crate) mod grants;
pub(crate) mod notes;
pub(crate) mod rates;
mod screen;
pub(crate) mod selection;
pub(crate) mod source;
mod table;
pub(crate) mod throttle;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use mqblk_admin::ClientError;
use mqblk_admin::model::{Load, Stat};
use mqblk_core::settings::{SettingError, Settings};
use serde::Serialize;

use crate::admin_socket::AdminSocket;
use crate::failure::{self, BAD_USAGE, FAILED};
use rates::Report;
use screen::{Screen, timestamp};
use selection::{DiskPatterns, SortKey, drop_idle};
use source::StatSource;

/// Shortest and longest interval, in seconds.
const SHORTEST_S: f64 = 0.1;
const LONGEST_S: f64 = 86_400.0;
/// Bounds of `--width`.
const WIDTHS: std::ops::RangeInclusive<usize> = 40..=1000;
/// JSON-RPC's code for an invalid parameter.
const INVALID_PARAMS: i64 = -32602;

/// The options of `mqblk stat`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = include_str!("help.txt"), after_help = "What the columns are, and examples: mqblk stat --help")]
pub(crate) struct StatArgs {
    #[command(flatten)]
    admin: AdminSocket,

    /// A report of every S seconds, until interrupted; 0.1 or more
    #[arg(long, value_name = "S", allow_negative_numbers = true)]
    watch: Option<String>,

    /// End after N intervals
    #[arg(long, value_name = "N", requires = "watch", allow_negative_numbers = true)]
    count: Option<String>,

    /// A line for each queue, too
    #[arg(long)]
    queues: bool,

    /// Only this disk, controller or LUN, or those of a pattern such as 'vm*'; may be repeated
    #[arg(long, value_name = "ID")]
    disk: Vec<String>,

    /// Leave out what had nothing to do
    #[arg(short = 'z', long)]
    skip_idle: bool,

    /// Sort by a column, the largest first, or by name [default: the order of the configuration]
    #[arg(long, value_name = "COLUMN")]
    sort: Option<String>,

    /// The time in each heading, in UTC
    #[arg(long)]
    timestamps: bool,

    /// How wide a report may be [default: the terminal, COLUMNS, or 80]
    ///
    /// Columns that do not fit are left out.
    #[arg(long, value_name = "N")]
    width: Option<String>,

    /// Print each report below the one before
    ///
    /// Otherwise it replaces the one before on a terminal.
    #[arg(long)]
    append: bool,

    /// A JSON object a line for each report
    ///
    /// It has the counters, and the rates computed of them.
    #[arg(long)]
    json: bool,
}

/// Reasons for a missing report.
#[derive(Debug, thiserror::Error)]
enum StatError {
    #[error(transparent)]
    Usage(#[from] SettingError),
    #[error("stat: socket: {0}")]
    Client(#[from] ClientError),
    #[error("stat: standard output: {0}")]
    Output(std::io::Error),
    /// The reader closed the pipe: not an error.
    #[error("standard output is closed")]
    Closed,
}

impl From<std::io::Error> for StatError {
    fn from(error: std::io::Error) -> StatError {
        if error.kind() == std::io::ErrorKind::BrokenPipe { StatError::Closed } else { StatError::Output(error) }
    }
}

/// Prints the averages since the daemon's start, or those of consecutive intervals.
pub(crate) fn run(args: StatArgs) -> ExitCode {
    match show(&args) {
        Ok(()) | Err(StatError::Closed) => ExitCode::SUCCESS,
        Err(error @ StatError::Usage(_)) => failure::report(&error, BAD_USAGE),
        Err(error) => failure::report(&error, FAILED),
    }
}

/// The checked options.
struct StatOptions<'a> {
    args: &'a StatArgs,
    patterns: DiskPatterns,
    sort: Option<SortKey>,
    screen: Screen,
}

impl<'a> StatOptions<'a> {
    fn parse(args: &'a StatArgs, watches: bool) -> Result<StatOptions<'a>, SettingError> {
        let width = match &args.width {
            None => None,
            Some(text) => Some(text.parse().ok().filter(|width| WIDTHS.contains(width)).ok_or_else(|| {
                let expected = format!("a number from {} to {}", WIDTHS.start(), WIDTHS.end());
                Settings::new("stat").error("width", format!("{text:?}"), expected)
            })?),
        };
        Ok(StatOptions {
            args,
            patterns: DiskPatterns::parse("stat", &args.disk)?,
            sort: args.sort.as_ref().map(|text| SortKey::parse("stat", text)).transpose()?,
            screen: Screen::new(width, watches && !args.append && !args.json),
        })
    }

    /// Prints a report of the selection.
    fn print(&mut self, mut report: Report, stat: Stat) -> Result<(), StatError> {
        if !self.args.queues {
            report.disks.iter_mut().for_each(|disk| disk.queues.clear());
            report.controllers.iter_mut().for_each(|controller| controller.queues.clear());
        }
        if self.args.skip_idle {
            drop_idle(&mut report);
        }
        if let Some(key) = self.sort {
            key.sort(&mut report);
        }
        let time = self.args.timestamps.then(timestamp);
        let text = if self.args.json {
            json_line(time, report, stat, self.args.queues)?
        } else {
            let time = time.map(|time| format!("{time} ")).unwrap_or_default();
            table::format_report(&format!("{time}mqblk {}", stat.version), &report, self.screen.width())
        };
        Ok(self.screen.print(&text)?)
    }
}

fn show(args: &StatArgs) -> Result<(), StatError> {
    let (watch, count) = parse_watch(args)?;
    let mut options = StatOptions::parse(args, watch.is_some())?;
    let mut daemon = StatSource::new(args.admin.path(), options.patterns.only_id());
    let mut first = daemon.read().map_err(|error| map_error(error, args))?;
    options.patterns.check("stat", &first)?;
    options.patterns.apply(&mut first);
    let Some(interval) = watch else { return options.print(rates::compare(None, &first), first) };
    let mut next = Instant::now();
    let mut before = first;
    let mut last_error: Option<ClientError> = None;
    for number in 1.. {
        if count.is_some_and(|count| number > count) {
            break;
        }
        // Absolute times, so that intervals do not drift. After a pause of this process (SIGSTOP) missed intervals are
        // skipped.
        next = (next + interval).max(Instant::now());
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
        match daemon.read() {
            Ok(mut now) => {
                options.patterns.apply(&mut now);
                let report = rates::compare(Some(&before), &now);
                if report.restarted {
                    print_note(
                        "the daemon was restarted: its counters began again, and the next report is since its start",
                    );
                } else if last_error.is_some() {
                    print_note("the daemon answers again, and the next report is since the one before");
                }
                last_error = None;
                options.print(report, now.clone())?;
                before = now;
            }
            Err(error) => {
                if last_error.is_none() {
                    let why = match &error {
                        ClientError::Closed => "the daemon closed the connection".to_owned(),
                        error => error.to_string(),
                    };
                    print_note(&format!("no report: {why}; trying again at each interval"));
                }
                last_error = Some(error);
            }
        }
    }
    last_error.map_or(Ok(()), |error| Err(error.into()))
}

/// Parses `--watch` and `--count`.
fn parse_watch(args: &StatArgs) -> Result<(Option<Duration>, Option<u64>), SettingError> {
    let invalid =
        |key: &str, found: &str, expected: &str| Settings::new("stat").error(key, format!("{found:?}"), expected);
    let watch = match &args.watch {
        None => None,
        Some(text) => match text.parse::<f64>() {
            Ok(seconds) if (SHORTEST_S..=LONGEST_S).contains(&seconds) => Some(Duration::from_secs_f64(seconds)),
            _ => return Err(invalid("watch", text, "seconds from 0.1 to 86400, such as 1 or 0.5")),
        },
    };
    let count = match &args.count {
        None => None,
        Some(text) => match text.parse::<u64>() {
            Ok(count @ 1..) => Some(count),
            _ => return Err(invalid("count", text, "a whole number of intervals, at least 1")),
        },
    };
    Ok((watch, count))
}

/// Maps the error. An unknown id in `--disk` is a usage error.
fn map_error(error: ClientError, args: &StatArgs) -> StatError {
    if let (ClientError::Refused(refused), Some(id)) = (&error, args.disk.first())
        && refused.code == INVALID_PARAMS
        && let Some(expected) = refused.data.as_ref().and_then(|data| data["expected"].as_str())
    {
        return Settings::new("stat").error("disk", format!("{id:?}"), expected).into();
    }
    error.into()
}

/// A line of `--json` output.
#[derive(Serialize)]
struct JsonLine {
    #[serde(skip_serializing_if = "Option::is_none")]
    time: Option<String>,
    rates: Report,
    stat: Stat,
}

fn json_line(time: Option<String>, rates: Report, mut stat: Stat, queues: bool) -> Result<String, StatError> {
    for (totals, of_queues) in stat
        .disks
        .iter_mut()
        .map(|disk| (&mut disk.totals, &mut disk.queues))
        .chain(stat.controllers.iter_mut().map(|controller| (&mut controller.totals, &mut controller.queues)))
    {
        drop_buckets(totals);
        if !queues {
            of_queues.clear();
        }
        of_queues.iter_mut().for_each(|queue| drop_buckets(&mut queue.load));
    }
    let line = serde_json::to_string(&JsonLine { time, rates, stat }).map_err(std::io::Error::other)?;
    Ok(line + "\n")
}

/// Removes the histogram buckets: they would be most of every line. The admin socket has them.
fn drop_buckets(load: &mut Load) {
    for parts in [&mut load.latency.reads, &mut load.latency.writes, &mut load.latency.others] {
        for part in [&mut parts.queued, &mut parts.device, &mut parts.publish, &mut parts.total] {
            part.buckets.clear();
        }
    }
}

/// Prints a line on standard error, between reports.
fn print_note(text: &str) {
    // The process continues: the exit code is not used.
    let _ = failure::report(&format!("stat: {text}"), FAILED);
}
