//! `mqblk disk set`: changes settings of a disk or LUN of a running daemon.

use mqblk_admin::model::DiskSettings;
use mqblk_daemon::key_values;
use serde_json::{Map, Value, json};

use crate::call::{CallError, DaemonArgs, call, lost_unless, read};

/// The options of `mqblk disk set`.
#[derive(Debug, clap::Args)]
pub(super) struct SetArgs {
    /// The disk's or LUN's id
    #[arg(value_name = "ID")]
    id: String,

    /// Settings to change, such as iops=5000, bandwidth=off, merge=off, poll=busy or queue-map=0:0,1:1
    #[arg(value_name = "KEY=VALUE", required = true)]
    settings: Vec<String>,

    #[command(flatten)]
    daemon: DaemonArgs,
}

/// Sends the request to the daemon. Returns the output.
pub(super) fn set(args: &SetArgs) -> Result<String, CallError> {
    set_settings("disk set", "disk.set", &args.daemon, &args.id, &args.settings)
}

/// Makes the daemon change settings by `verb`. Returns the output; `what` is the subcommand in messages.
pub(crate) fn set_settings(
    what: &'static str,
    verb: &str,
    daemon: &DaemonArgs,
    id: &str,
    settings: &[String],
) -> Result<String, CallError> {
    let given = settings.join(",");
    let response = call(what, &daemon.admin.path(), verb, &json!({ "id": id, "settings": given }))?;
    if daemon.json {
        return Ok(format!("{response}\n"));
    }
    let DiskSettings { id, settings, survives_restart } = read(what, response)?;
    Ok(format!("set {id}: {}{}\n", set_text(&given, &settings), lost_unless(survives_restart)))
}

/// Formats the given settings with their current values.
fn set_text(given: &str, settings: &Map<String, Value>) -> String {
    let parsed = key_values::parse("settings", given);
    let keys: Vec<String> = parsed.iter().flat_map(|parsed| parsed.keys_left().map(str::to_owned)).collect();
    let value = |key: &str| match settings.get(key) {
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
        // A limit that was removed.
        None => "off".to_owned(),
    };
    let pairs: Vec<String> = keys.iter().map(|key| format!("{key}={}", value(key))).collect();
    pairs.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_given_is_shown_as_it_is_now() {
        let settings = json!({ "iops": 5, "poll": "off", "queue-map": "0:1,1:0", "merge": "auto" });
        let settings = settings.as_object().unwrap();
        assert_eq!(
            set_text("queue-map=0:1,1:0,iops=5,bandwidth=0", settings),
            "bandwidth=off,iops=5,queue-map=0:1,1:0"
        );
    }
}
