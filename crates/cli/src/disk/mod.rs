//! `mqblk disk`: adds, removes, resizes, changes and lists disks of a running daemon.

mod list;
mod set;

pub(crate) use set::set_settings;

use std::process::ExitCode;

use clap::Subcommand;
use mqblk_admin::model::{DiskAdded, DiskRemoved, DiskRetried};
use mqblk_core::settings::SettingError;
use mqblk_daemon::key_values;
use mqblk_daemon::state_file::absolute_setting;
use serde_json::{Map, Value, json};

use crate::call::{CallError, DaemonArgs, call, lost_unless, read};
use crate::{failure, resize};

/// The actions of `mqblk disk`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = include_str!("help.txt"), after_help = "Examples: mqblk disk --help")]
pub(crate) struct DiskArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Serve one more disk, or with controller=ID add a LUN
    Add {
        #[command(flatten)]
        daemon: DaemonArgs,

        /// The keys of the disk, as for --disk; with controller=ID those of --lun: see `mqblk serve --help`
        #[arg(value_name = "KEY=VALUE,...")]
        settings: String,
    },

    /// Take a disk or LUN away, when its requests have ended, and close its storage
    Remove {
        #[command(flatten)]
        daemon: DaemonArgs,

        /// The disk's or LUN's id
        #[arg(value_name = "ID")]
        id: String,

        /// Also while a guest is connected, which loses the disk
        #[arg(long)]
        force: bool,
    },

    /// Give a disk or LUN another size; its guest goes on working
    Resize(resize::ResizeArgs),

    /// Change settings of a disk or LUN while its guest works
    Set(set::SetArgs),

    /// Try now to serve a disk or LUN that is out, or all that are
    Retry {
        #[command(flatten)]
        daemon: DaemonArgs,

        /// The disk's or LUN's id; without it all that are out
        #[arg(value_name = "ID")]
        id: Option<String>,
    },

    /// Show the disks and LUNs: what they are made of, and who uses them
    List {
        #[command(flatten)]
        daemon: DaemonArgs,
    },
}

/// Sends the request to the daemon and prints the result.
pub(crate) fn run(args: DiskArgs) -> ExitCode {
    let result = match args.action {
        Action::Add { daemon, settings } => add("disk add", "disk.add", &daemon, &settings),
        Action::Remove { daemon, id, force } => remove("disk remove", "disk.remove", &daemon, &id, force),
        Action::Resize(args) => return resize::run(args),
        Action::Set(args) => set::set(&args),
        Action::Retry { daemon, id } => retry(&daemon, id.as_deref()),
        Action::List { daemon } => list::list(&daemon),
    };
    failure::show(result, CallError::is_usage)
}

/// Makes the daemon try disks that are out.
fn retry(daemon: &DaemonArgs, id: Option<&str>) -> Result<String, CallError> {
    let what = "disk retry";
    let params = id.map_or_else(|| json!({}), |id| json!({ "id": id }));
    let response = call(what, &daemon.admin.path(), "disk.retry", &params)?;
    if daemon.json {
        return Ok(format!("{response}\n"));
    }
    let DiskRetried { served, out } = read(what, response)?;
    let served = served.iter().map(|id| format!("{id} is served\n"));
    let text: String = served.chain(out.iter().map(|disk| format!("{} is out: {}\n", disk.id, disk.why))).collect();
    Ok(if text.is_empty() { "no disk is out\n".to_owned() } else { text })
}

/// Makes the daemon add the device of `settings`, by `verb`. Returns the output; `what` is the subcommand in messages.
pub(crate) fn add(what: &'static str, verb: &str, daemon: &DaemonArgs, settings: &str) -> Result<String, CallError> {
    let settings = absolute_settings(what, settings)?;
    let response = call(what, &daemon.admin.path(), verb, &json!({ "settings": settings }))?;
    if daemon.json {
        return Ok(format!("{response}\n"));
    }
    let DiskAdded { id, survives_restart } = read(what, response)?;
    Ok(format!("added {id}{}\n", lost_unless(survives_restart)))
}

/// Makes the daemon remove the device with this id, by `verb`. Returns the output; `what` is the subcommand in
/// messages.
pub(crate) fn remove(
    what: &'static str,
    verb: &str,
    daemon: &DaemonArgs,
    id: &str,
    force: bool,
) -> Result<String, CallError> {
    let response = call(what, &daemon.admin.path(), verb, &json!({ "id": id, "force": force }))?;
    if daemon.json {
        return Ok(format!("{response}\n"));
    }
    let DiskRemoved { id } = read(what, response)?;
    Ok(format!("removed {id}\n"))
}

/// Returns settings with paths that do not depend on the working directory, because the daemon's differs.
pub(crate) fn absolute_settings(subject: &str, text: &str) -> Result<Value, SettingError> {
    let settings = key_values::parse(subject, text)?;
    let pairs = settings.pairs().map(|(key, value)| (key.to_owned(), absolute_setting(key, value).into()));
    Ok(Value::Object(pairs.collect::<Map<_, _>>()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_resolved_where_they_are_typed() {
        let settings = absolute_settings("disk add", "path=vm.img,socket=/run/vm.sock,size=1M").unwrap();
        let path = std::path::absolute("vm.img").unwrap();
        assert_eq!(settings, json!({ "path": path, "size": "1M", "socket": "/run/vm.sock" }));
        assert_eq!(absolute_settings("disk add", "path").unwrap_err().key, "syntax");
    }
}
