//! `mqblk log`: the level of a running daemon's log.

use std::process::ExitCode;

use serde_json::json;

use crate::call::{CallError, DaemonArgs, call, read};
use crate::failure;

/// The name for messages.
const LOG: &str = "log";

/// The options of `mqblk log`.
#[derive(Debug, clap::Args)]
#[command(
    after_long_help = "Examples:\n\n  mqblk serve --admin --disk path=/srv/vm1.img,socket=/run/mqblk/vm1.sock\n  mqblk log\n  mqblk log debug --socket /run/mqblk/admin.sock",
    after_help = "Examples: mqblk log --help"
)]
pub(crate) struct LogArgs {
    /// off, error, warn, info, debug or trace, or TARGET=LEVEL,... [default: only show it]
    #[arg(value_name = "LEVEL")]
    level: Option<String>,

    #[command(flatten)]
    daemon: DaemonArgs,
}

/// The daemon's answer.
#[derive(Debug, serde::Deserialize)]
struct Level {
    level: String,
    before: String,
}

/// Sends the request to the daemon and prints the result.
pub(crate) fn run(args: LogArgs) -> ExitCode {
    failure::show(execute(&args), CallError::is_usage)
}

fn execute(LogArgs { level, daemon }: &LogArgs) -> Result<String, CallError> {
    let params = level.as_ref().map_or(json!({}), |level| json!({ "level": level }));
    let response = call(LOG, &daemon.admin.path(), "log", &params)?;
    if daemon.json {
        return Ok(format!("{response}\n"));
    }
    let Level { level, before } = read(LOG, response)?;
    Ok(if level == before { format!("{level}\n") } else { format!("{level} (it was {before})\n") })
}
