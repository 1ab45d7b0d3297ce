//! `mqblk stat`: reads the counters of a running daemon and prints rates.

mod grants;
mod rates;
mod table;

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use mqblk_admin::model::{Load, Stat};
use mqblk_admin::{Client, ClientError, StatQuery};
use mqblk_core::settings::{SettingError, Settings};
use serde::Serialize;

use crate::failure::{self, BAD_USAGE, FAILED};
use rates::Report;

/// Shortest and longest interval, in seconds.
const SHORTEST_S: f64 = 0.1;
const LONGEST_S: f64 = 86_400.0;
/// JSON-RPC's code for a parameter that cannot be used.
const INVALID_PARAMS: i64 = -32602;

/// The options of `mqblk stat`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = include_str!("help.txt"), after_help = "What the columns are, and examples: mqblk stat --help")]
pub(crate) struct StatArgs {
    /// The daemon's admin socket: the path given to `mqblk serve --admin`
    #[arg(long, value_name = "ADMIN")]
    socket: PathBuf,

    /// A report every S seconds, each of that interval, until interrupted; 0.1 or more
    #[arg(long, value_name = "S", allow_negative_numbers = true)]
    watch: Option<String>,

    /// End after N intervals
    #[arg(long, value_name = "N", requires = "watch", allow_negative_numbers = true)]
    count: Option<String>,

    /// A line for each queue, too
    #[arg(long)]
    queues: bool,

    /// Only this disk, controller or LUN
    #[arg(long, value_name = "ID")]
    disk: Option<String>,

    /// One JSON object a line for each report: the counters, and the rates computed of them
    #[arg(long)]
    json: bool,
}

/// Why no report was printed.
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

fn show(args: &StatArgs) -> Result<(), StatError> {
    let (watch, count) = parse_watch(args)?;
    let mut daemon = StatClient::new(args);
    let first = daemon.read().map_err(|error| map_error(error, args))?;
    let Some(interval) = watch else { return print(args, rates::compare(None, &first), first) };
    let mut next = Instant::now();
    let mut before = first;
    let mut last_error: Option<ClientError> = None;
    for number in 1.. {
        if count.is_some_and(|count| number > count) {
            break;
        }
        // Absolute times, so that intervals do not drift. After a pause of this process (SIGSTOP) missed intervals are skipped.
        next = (next + interval).max(Instant::now());
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
        match daemon.read() {
            Ok(now) => {
                let report = rates::compare(Some(&before), &now);
                if report.restarted {
                    print_note(
                        "the daemon was restarted: its counters began anew, and the next report is since its start",
                    );
                } else if last_error.is_some() {
                    print_note("the daemon answers again, and the next report is since the one before");
                }
                last_error = None;
                print(args, report, now.clone())?;
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
    if let (ClientError::Refused(refused), Some(id)) = (&error, &args.disk)
        && refused.code == INVALID_PARAMS
        && let Some(expected) = refused.data.as_ref().and_then(|data| data["expected"].as_str())
    {
        return Settings::new("stat").error("disk", format!("{id:?}"), expected).into();
    }
    error.into()
}

/// The connection to the daemon. Reconnects after an error.
struct StatClient<'a> {
    args: &'a StatArgs,
    query: StatQuery,
    client: Option<Client>,
}

impl<'a> StatClient<'a> {
    fn new(args: &'a StatArgs) -> StatClient<'a> {
        // The histogram buckets are needed for the percentiles of an interval.
        let query = StatQuery { queues: args.queues, latency: true, disk: args.disk.clone() };
        StatClient { args, query, client: None }
    }

    fn read(&mut self) -> Result<Stat, ClientError> {
        let mut client = match self.client.take() {
            Some(client) => client,
            None => Client::connect(&self.args.socket)?,
        };
        let stat = client.stat(&self.query)?;
        self.client = Some(client);
        Ok(stat)
    }
}

/// A line of `--json` output.
#[derive(Serialize)]
struct JsonLine {
    rates: Report,
    stat: Stat,
}

fn print(args: &StatArgs, report: Report, mut stat: Stat) -> Result<(), StatError> {
    let text = if args.json {
        stat.disks.iter_mut().for_each(|disk| {
            drop_buckets(&mut disk.totals);
            disk.queues.iter_mut().for_each(|queue| drop_buckets(&mut queue.load));
        });
        stat.controllers.iter_mut().for_each(|controller| {
            drop_buckets(&mut controller.totals);
            controller.queues.iter_mut().for_each(|queue| drop_buckets(&mut queue.load));
        });
        let line = serde_json::to_string(&JsonLine { rates: report, stat }).map_err(std::io::Error::other)?;
        line + "\n"
    } else {
        table::format_report(&stat.version, &report)
    };
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    Ok(stdout.flush()?)
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
