//! `mqblk resume`: resumes a stopped disk of a running daemon.

use std::process::ExitCode;
use std::time::Duration;

use mqblk_admin::model::Resumed;
use mqblk_admin::{Client, ClientError};
use mqblk_core::settings::{SettingError, Settings};
use serde_json::json;

use crate::admin_socket::AdminSocket;
use crate::failure;

/// How long to wait for the daemon's response. Generous: a busy daemon needs less.
const TIMEOUT: Duration = Duration::from_secs(60);
/// JSON-RPC's code for a parameter that cannot be used.
const INVALID_PARAMS: i64 = -32602;

/// The options of `mqblk resume`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = include_str!("help.txt"), after_help = "When a disk stops, and examples: mqblk resume --help")]
pub(crate) struct ResumeArgs {
    /// The disk's or LUN's id
    #[arg(value_name = "ID")]
    id: String,

    #[command(flatten)]
    admin: AdminSocket,

    /// Give the parked requests back to the guest as errors, in place of doing them
    #[arg(long)]
    report: bool,

    /// Print what the daemon answers, as one JSON object
    #[arg(long)]
    json: bool,
}

/// Why the disk was not resumed.
#[derive(Debug, thiserror::Error)]
enum ResumeError {
    #[error(transparent)]
    Usage(SettingError),
    #[error("resume: {0}")]
    Client(#[source] ClientError),
    #[error("resume: {0}")]
    Refused(String),
    #[error("resume: standard output: {0}")]
    Output(#[from] std::io::Error),
}

/// Sends the request to the daemon and prints the result.
pub(crate) fn run(args: ResumeArgs) -> ExitCode {
    failure::show(execute(&args), |error| matches!(error, ResumeError::Usage(_)))
}

fn execute(args: &ResumeArgs) -> Result<String, ResumeError> {
    let params = json!({ "id": args.id, "report": args.report });
    let result =
        Client::connect_with(&args.admin.path(), TIMEOUT).and_then(|mut client| client.call("resume", &params));
    let response = result.map_err(|error| match error {
        ClientError::Refused(refused) => {
            let data_member = |name: &str| refused.data.as_ref()?.get(name)?.as_str().map(str::to_owned);
            match (data_member("found"), data_member("expected")) {
                (Some(found), Some(expected)) if refused.code == INVALID_PARAMS => {
                    ResumeError::Usage(Settings::new("resume").error("id", found, expected))
                }
                _ => ResumeError::Refused(refused.message),
            }
        }
        error => ResumeError::Client(error),
    })?;
    if args.json {
        return Ok(format!("{response}\n"));
    }
    let malformed = |error| ResumeError::Client(ClientError::Strange(format!("malformed response ({error})")));
    let Resumed { id, parked, report } = serde_json::from_value(response).map_err(malformed)?;
    let outcome = if report { "answered with errors" } else { "to be done" };
    Ok(format!("resumed {id}: {parked} requests {outcome}\n"))
}
