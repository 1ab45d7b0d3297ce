//! `mqblk resize`: another size for a disk of a running daemon.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use mqblk_admin::model::ResizeResult;
use mqblk_admin::{Client, ClientError};
use mqblk_core::ByteLen;
use mqblk_core::settings::{SettingError, Settings};
use serde_json::json;

use crate::failure;

/// Longer than the daemon waits for anything before it says so.
const PATIENCE: Duration = Duration::from_secs(60);
/// JSON-RPC's code for a parameter that cannot be used.
const INVALID_PARAMS: i64 = -32602;

/// The options of `mqblk resize`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = include_str!("help.txt"), after_help = "Examples: mqblk resize --help")]
pub struct Args {
    /// The disk's id, or a LUN's, or a Xen device's as `mqblk stat` shows it
    #[arg(value_name = "ID")]
    id: String,

    /// The size, such as 10G: a file is extended or cut to it [default: the size that the file or block device has now]
    #[arg(value_name = "SIZE")]
    size: Option<String>,

    /// The daemon's admin socket: the path given to `mqblk serve --admin`
    #[arg(long, value_name = "ADMIN")]
    socket: PathBuf,

    /// The disk may become smaller; what lies beyond its new end is lost
    #[arg(long)]
    shrink: bool,

    /// Print what the daemon answers, as one JSON object
    #[arg(long)]
    json: bool,
}

/// Why it was not done, or not shown.
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

/// Asks the daemon, and shows what it says.
pub fn run(args: Args) -> ExitCode {
    failure::show(act(&args), |error| matches!(error, CallError::Usage(_)))
}

fn act(args: &Args) -> Result<String, CallError> {
    let mut params = json!({ "id": args.id, "shrink": args.shrink });
    if let Some(size) = &args.size {
        params["size"] = json!(size);
    }
    let called = Client::connect_with(&args.socket, PATIENCE).and_then(|mut client| client.call("resize", &params));
    let answer = called.map_err(|error| match error {
        ClientError::Refused(refused) => {
            let part = |name: &str| refused.data.as_ref()?.get(name)?.as_str().map(str::to_owned);
            match (part("field"), part("found"), part("expected")) {
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
        return Ok(format!("{answer}\n"));
    }
    let strange = |error| ClientError::Strange(format!("an answer that is none ({error})"));
    let result: ResizeResult = serde_json::from_value(answer).map_err(strange)?;
    Ok(told(&result))
}

fn told(ResizeResult { id, before_bytes, size_bytes, guest }: &ResizeResult) -> String {
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
