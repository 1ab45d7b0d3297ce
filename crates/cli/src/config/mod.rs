//! `mqblk config`: compares a running daemon with its configuration file.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Subcommand;
use mqblk_admin::model::{ConfigDifference, ConfigDifferences};
use serde_json::json;

use crate::call::{CallError, DaemonArgs, call, read};
use crate::failure;

/// The names for messages.
const DIFF: &str = "config diff";
const APPLY: &str = "config apply";

/// The actions of `mqblk config`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = include_str!("help.txt"), after_help = "Examples: mqblk config --help")]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Show the differences between the file and the daemon
    Diff(FileArgs),

    /// Apply the differences, as far as they can change while the daemon serves
    Apply(FileArgs),
}

#[derive(Debug, clap::Args)]
struct FileArgs {
    /// The file [default: the one that the daemon was started with]
    #[arg(value_name = "FILE.toml")]
    file: Option<PathBuf>,

    #[command(flatten)]
    daemon: DaemonArgs,
}

/// Sends the request to the daemon and prints the result.
pub(crate) fn run(args: ConfigArgs) -> ExitCode {
    let result = match &args.action {
        Action::Diff(file) => execute(DIFF, "config.diff", file),
        Action::Apply(file) => execute(APPLY, "config.apply", file),
    };
    failure::show(result, CallError::is_usage)
}

fn execute(name: &'static str, verb: &str, FileArgs { file, daemon }: &FileArgs) -> Result<String, CallError> {
    let params = match file {
        Some(file) => json!({ "file": std::path::absolute(file)? }),
        None => json!({}),
    };
    let response = call(name, &daemon.admin.path(), verb, &params)?;
    let failed = |changes: &[ConfigDifference]| changes.iter().filter(|change| change.error.is_some()).count();
    let Ok(ConfigDifferences { changes }) = serde_json::from_value(response.clone()) else {
        return read::<ConfigDifferences>(name, response).map(|_| String::new());
    };
    let text = if daemon.json { format!("{response}\n") } else { summary(&changes) };
    match failed(&changes) {
        0 => Ok(text),
        count => Err(CallError::Refused(
            name,
            format!("{count} of {} could not be applied: {}", changes.len(), errors(&changes)),
        )),
    }
}

fn errors(changes: &[ConfigDifference]) -> String {
    let errors = changes.iter().filter_map(|change| change.error.as_ref().map(|error| (change, error)));
    errors.map(|(change, error)| format!("{}: {error}", change.what)).collect::<Vec<_>>().join("; ")
}

fn summary(changes: &[ConfigDifference]) -> String {
    if changes.is_empty() {
        return "nothing has changed\n".to_owned();
    }
    let mut text = String::new();
    for ConfigDifference { what, can_apply, applied, error } in changes {
        let result = match (applied, error, can_apply) {
            (true, ..) => ": done",
            (_, _, false) => "",
            _ => " (config apply does it)",
        };
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{what}{result}");
    }
    text
}
