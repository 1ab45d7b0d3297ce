//! `mqblk resize`: resizes a disk of a running daemon.

use std::process::ExitCode;
use std::time::Duration;

use mqblk_admin::model::ResizeResult;
use mqblk_admin::{Client, ClientError};
use mqblk_core::ByteLen;
use mqblk_core::settings::{SettingError, Settings};
use serde_json::json;

use crate::admin_socket::AdminSocket;
use crate::failure;

/// How long to wait for the daemon's response. Longer than any time-out of the daemon itself.
const TIMEOUT: Duration = Duration::from_secs(60);
/// JSON-RPC's code for a parameter that cannot be used.
const INVALID_PARAMS: i64 = -32602;

/// The options of `mqblk resize`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = include_str!("help.txt"), after_help = "Examples: mqblk resize --help")]
pub(crate) struct ResizeArgs {
    /// The disk's id, or a LUN's, or a Xen device's as `mqblk stat` shows it
    #[arg(value_name = "ID")]
    id: String,

    /// The size, such as 10G: a file is extended or cut to it [default: the size that the file or block device has now]
    #[arg(value_name = "SIZE")]
    size: Option<String>,

    #[command(flatten)]
    admin: AdminSocket,

    /// The disk may become smaller; what lies beyond its new end is lost
    #[arg(long)]
    shrink: bool,

    /// Print what the daemon answers, as one JSON object
    #[arg(long)]
    json: bool,
}

/// Why the disk was not resized, or the result not printed.
#[derive(Debug, thiserror::Error)]
enum CallError {
    #[error(transparent)]
    Usage(SettingError),
    #[error("resize: {0}")]
    Client(#[from] ClientError),
    #[error("resize: {0}")]
    Refused(String),
    #[error("resize: standard output: {0}")]
    Output(#[from] std::io::Error),
}

/// Sends the request to the daemon and prints the result.
pub(crate) fn run(args: ResizeArgs) -> ExitCode {
    failure::show(execute(&args), |error| matches!(error, CallError::Usage(_)))
}

fn execute(args: &ResizeArgs) -> Result<String, CallError> {
    let mut params = json!({ "id": args.id, "shrink": args.shrink });
    if let Some(size) = &args.size {
        params["size"] = json!(size);
    }
    let result =
        Client::connect_with(&args.admin.path(), TIMEOUT).and_then(|mut client| client.call("resize", &params));
    let response = result.map_err(|error| match error {
        ClientError::Refused(refused) => {
            let data_member = |name: &str| refused.data.as_ref()?.get(name)?.as_str().map(str::to_owned);
            match (data_member("field"), data_member("found"), data_member("expected")) {
                (Some(field), Some(found), Some(expected)) if refused.code == INVALID_PARAMS => {
                    let key = field.rsplit('.').next().unwrap_or_default();
                    CallError::Usage(Settings::new("resize").error(key, found, expected))
                }
                _ => CallError::Refused(refused.message),
            }
        }
        error => CallError::Client(error),
    })?;
    if args.json {
        return Ok(format!("{response}\n"));
    }
    let malformed = |error| ClientError::Strange(format!("malformed response ({error})"));
    let result: ResizeResult = serde_json::from_value(response).map_err(malformed)?;
    Ok(summary(&result))
}

fn summary(ResizeResult { id, before_bytes, size_bytes, guest }: &ResizeResult) -> String {
    let (before, size) = (ByteLen(*before_bytes), ByteLen(*size_bytes));
    match guest.as_str() {
        "unchanged" => format!("{id} has {size} already\n"),
        "told" => format!("resized {id} from {before} to {size}; the guest was told\n"),
        "no-guest" => format!("resized {id} from {before} to {size}; no guest is connected\n"),
        "at-reconnect" => format!(
            "resized {id} from {before} to {size}; the guest's VMM cannot be told, and sees it when it connects again\n"
        ),
        _ => format!("resized {id} from {before} to {size}; the guest's VMM did not say that it knows\n"),
    }
}
