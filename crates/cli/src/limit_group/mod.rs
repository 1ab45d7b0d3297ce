//! `mqblk limit-group`: shows and changes the limits that disks of a running daemon share.

use std::process::ExitCode;

use clap::Subcommand;
use mqblk_admin::model::{LimitGroupChange, LimitGroupList, LimitGroupStat};
use serde_json::json;

use crate::call::{CallError, DaemonArgs, call, lost_unless, read, settings_text};
use crate::failure;
use crate::table;

/// The cell of a missing value.
const NONE: &str = "-";

/// The options of `mqblk limit-group`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = include_str!("help.txt"), after_help = "Examples: mqblk limit-group --help")]
pub(crate) struct LimitGroupArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Change the limits of a group while the guests of its disks work
    Set {
        #[command(flatten)]
        daemon: DaemonArgs,

        /// The group's name
        #[arg(value_name = "NAME")]
        name: String,

        /// Limits to change, such as iops=5000 or bandwidth=off
        #[arg(value_name = "KEY=VALUE", required = true)]
        settings: Vec<String>,
    },

    /// Show the groups, their limits and the disks that are in them
    List {
        #[command(flatten)]
        daemon: DaemonArgs,
    },
}

/// Sends the request to the daemon and prints the result.
pub(crate) fn run(args: LimitGroupArgs) -> ExitCode {
    failure::show(execute(&args.action), CallError::is_usage)
}

fn execute(action: &Action) -> Result<String, CallError> {
    match action {
        Action::Set { daemon, name, settings } => {
            const WHAT: &str = "limit-group set";
            let params = json!({ "name": name, "settings": settings.join(",") });
            let response = call(WHAT, &daemon.admin.path(), "limit-group.set", &params)?;
            if daemon.json {
                return Ok(format!("{response}\n"));
            }
            let LimitGroupChange { group, survives_restart } = read(WHAT, response)?;
            let LimitGroupStat { name, limits, .. } = group;
            Ok(format!("set {name}: {}{}\n", settings_text(&limits), lost_unless(survives_restart)))
        }
        Action::List { daemon } => {
            const WHAT: &str = "limit-group list";
            let response = call(WHAT, &daemon.admin.path(), "limit-group.list", &json!({}))?;
            if daemon.json {
                return Ok(format!("{response}\n"));
            }
            Ok(group_table(&read::<LimitGroupList>(WHAT, response)?.groups))
        }
    }
}

fn group_table(groups: &[LimitGroupStat]) -> String {
    let head = ["group", "limits", "disks"].map(str::to_owned).to_vec();
    let row = |group: &LimitGroupStat| {
        let disks = if group.disks.is_empty() { NONE.to_owned() } else { group.disks.join(",") };
        vec![group.name.clone(), settings_text(&group.limits), disks]
    };
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(groups.iter().map(row)).collect();
    table::align(&rows)
}
