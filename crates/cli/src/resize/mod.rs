//! `mqblk resize`: resizes a disk of a running daemon.

use std::process::ExitCode;

use mqblk_admin::model::ResizeResult;
use mqblk_core::ByteLen;
use serde_json::json;

use crate::call::{CallError, DaemonArgs, call, read};
use crate::failure;

/// The name for messages.
const RESIZE: &str = "resize";

/// The options of `mqblk resize`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = include_str!("help.txt"), after_help = "Examples: mqblk resize --help")]
pub(crate) struct ResizeArgs {
    /// The disk's id, or a LUN's, or a Xen device's as `mqblk stat` shows it
    #[arg(value_name = "ID")]
    id: String,

    /// The size, such as 10G: a file is extended or cut to it [default: the size that the file or block device has
    /// now]
    #[arg(value_name = "SIZE")]
    size: Option<String>,

    #[command(flatten)]
    daemon: DaemonArgs,

    /// The disk may become smaller; data beyond its new end is lost
    #[arg(long)]
    shrink: bool,
}

/// Sends the request to the daemon and prints the result.
pub(crate) fn run(args: ResizeArgs) -> ExitCode {
    failure::show(execute(&args), CallError::is_usage)
}

fn execute(args: &ResizeArgs) -> Result<String, CallError> {
    let mut params = json!({ "id": args.id, "shrink": args.shrink });
    if let Some(size) = &args.size {
        params["size"] = json!(size);
    }
    let response = call(RESIZE, &args.daemon.admin.path(), "resize", &params)?;
    if args.daemon.json {
        return Ok(format!("{response}\n"));
    }
    Ok(summary(&read(RESIZE, response)?))
}

fn summary(ResizeResult { id, before_bytes, size_bytes, guest }: &ResizeResult) -> String {
    let (before, size) = (ByteLen(*before_bytes), ByteLen(*size_bytes));
    match guest.as_str() {
        "unchanged" => format!("{id} has {size} already\n"),
        "told" => format!("resized {id} from {before} to {size}; the guest was notified\n"),
        "no-guest" => format!("resized {id} from {before} to {size}; no guest is connected\n"),
        "at-reconnect" => format!(
            "resized {id} from {before} to {size}; the guest's VMM cannot be notified, and sees it when it reconnects\n"
        ),
        _ => format!("resized {id} from {before} to {size}; the guest's VMM did not say that it knows\n"),
    }
}
