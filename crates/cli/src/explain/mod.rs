//! `mqblk explain DISK`: explains the current limit of a disk in sentences, from two samples of its daemon.

mod evidence;
mod findings;
mod subject;
mod throttle;

use std::process::ExitCode;
use std::time::Duration;

use mqblk_admin::ClientError;
use mqblk_admin::model::Stat;
use mqblk_core::settings::{SettingError, Settings};
use serde::Serialize;

use crate::admin_socket::AdminSocket;
use crate::failure;
use crate::stat::rates::{self, Report};
use crate::stat::source::StatSource;
use crate::table::wrap;
use evidence::Finding;
use findings::findings;
use subject::Subject;

/// Shortest and longest time between the samples, in seconds, and the default.
const SHORTEST_S: f64 = 0.1;
const LONGEST_S: f64 = 3600.0;
const DEFAULT_S: f64 = 2.0;
/// The width of a sentence.
const WIDTH: usize = 80;

/// The options of `mqblk explain`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = include_str!("help.txt"), after_help = "What is looked for, and examples: mqblk explain --help")]
pub(crate) struct ExplainArgs {
    /// The disk, controller or LUN
    #[arg(value_name = "DISK")]
    disk: String,

    #[command(flatten)]
    admin: AdminSocket,

    /// How many seconds it is watched; 0.1 or more [default: 2]
    #[arg(long, value_name = "S", allow_negative_numbers = true)]
    seconds: Option<String>,

    /// One JSON object: each finding with its figures
    #[arg(long)]
    json: bool,
}

/// Reasons for a missing explanation.
#[derive(Debug, thiserror::Error)]
enum ExplainError {
    #[error(transparent)]
    Usage(#[from] SettingError),
    #[error("explain: socket: {0}")]
    Client(#[from] ClientError),
    #[error("explain: the daemon was restarted, or the disk added, while it was watched; try again")]
    Restarted,
    #[error("explain: standard output: {0}")]
    Output(#[from] std::io::Error),
}

/// The findings on a disk.
#[derive(Debug, Serialize)]
struct Explanation<'a> {
    disk: &'a str,
    interval_ns: u64,
    findings: Vec<Finding>,
}

/// Watches a disk for a moment and prints its limits.
pub(crate) fn run(args: &ExplainArgs) -> ExitCode {
    failure::show(explain(args), |error| matches!(error, ExplainError::Usage(_)))
}

fn explain(args: &ExplainArgs) -> Result<String, ExplainError> {
    let interval = parse_seconds(args.seconds.as_deref())?;
    // Reads the whole daemon: other disks may share the workers.
    let mut daemon = StatSource::new(args.admin.path(), None);
    let before = daemon.read()?;
    if let Err(known) = Subject::find(&before, &args.disk) {
        return Err(Settings::new("explain").error("disk", format!("{:?}", args.disk), known).into());
    }
    std::thread::sleep(interval);
    let now = daemon.read()?;
    let report = rates::compare(Some(&before), &now);
    let subject = Subject::find(&now, &args.disk).map_err(|_| ExplainError::Restarted)?;
    let findings = findings(&subject, &now, &report).ok_or(ExplainError::Restarted)?;
    let explanation = Explanation { disk: &args.disk, interval_ns: report.interval_ns, findings };
    if args.json {
        return Ok(serde_json::to_string(&explanation).map_err(std::io::Error::other)? + "\n");
    }
    let mut text = format!("{} over {:.1} s:\n", args.disk, report.interval_ns as f64 / 1e9);
    explanation.findings.iter().for_each(|finding| text.push_str(&wrap(&format!("  * {}", finding.sentence), WIDTH)));
    Ok(text)
}

/// Returns the sentences on the device with this id, from a sample and the rates that end with it. Returns none if it
/// is new.
pub(crate) fn sentences(now: &Stat, report: &Report, id: &str) -> Vec<String> {
    let found = Subject::find(now, id).ok().and_then(|subject| findings(&subject, now, report));
    found.into_iter().flatten().map(|finding| finding.sentence).collect()
}

fn parse_seconds(text: Option<&str>) -> Result<Duration, SettingError> {
    let Some(text) = text else { return Ok(Duration::from_secs_f64(DEFAULT_S)) };
    match text.parse::<f64>() {
        Ok(seconds) if (SHORTEST_S..=LONGEST_S).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err(Settings::new("explain").error("seconds", format!("{text:?}"), "seconds from 0.1 to 3600")),
    }
}
