//! `mqblk resume`: resumes a stopped disk of a running daemon.

use std::process::ExitCode;

use mqblk_admin::model::Resumed;
use serde_json::json;

use crate::call::{CallError, DaemonArgs, call, read};
use crate::failure;

/// The name for messages.
const RESUME: &str = "resume";

/// The options of `mqblk resume`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = include_str!("help.txt"), after_help = "When a disk stops, and examples: mqblk resume --help")]
pub(crate) struct ResumeArgs {
    /// The disk's or LUN's id
    #[arg(value_name = "ID")]
    id: String,

    #[command(flatten)]
    daemon: DaemonArgs,

    /// Give the parked requests back to the guest as errors, in place of doing them
    #[arg(long)]
    report: bool,
}

/// Sends the request to the daemon and prints the result.
pub(crate) fn run(args: ResumeArgs) -> ExitCode {
    failure::show(execute(&args), CallError::is_usage)
}

fn execute(args: &ResumeArgs) -> Result<String, CallError> {
    let params = json!({ "id": args.id, "report": args.report });
    let response = call(RESUME, &args.daemon.admin.path(), "resume", &params)?;
    if args.daemon.json {
        return Ok(format!("{response}\n"));
    }
    let Resumed { id, parked, report } = read(RESUME, response)?;
    let outcome = if report { "answered with errors" } else { "to be done" };
    Ok(format!("resumed {id}: {parked} requests {outcome}\n"))
}
