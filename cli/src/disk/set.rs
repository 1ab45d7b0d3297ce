//! `mqblk disk set`: changes settings of a disk or LUN of a running daemon.

use mqblk_admin::model::DiskSettings;
use serde_json::json;

use crate::call::{CallError, DaemonArgs, call, read, settings_text};

/// The options of `mqblk disk set`.
#[derive(Debug, clap::Args)]
pub(super) struct SetArgs {
    /// The disk's or LUN's id
    #[arg(value_name = "ID")]
    id: String,

    /// What is changed, such as iops=5000 or bandwidth=off
    #[arg(value_name = "KEY=VALUE", required = true)]
    settings: Vec<String>,

    #[command(flatten)]
    daemon: DaemonArgs,
}

/// Sends the request to the daemon. Returns what to print.
pub(super) fn set(args: &SetArgs) -> Result<String, CallError> {
    const SET: &str = "disk set";
    let params = json!({ "id": args.id, "settings": args.settings.join(",") });
    let response = call(SET, &args.daemon.admin.path(), "disk.set", &params)?;
    if args.daemon.json {
        return Ok(format!("{response}\n"));
    }
    let DiskSettings { id, settings } = read(SET, response)?;
    Ok(format!("set {id}: {}\n", settings_text(&settings)))
}
