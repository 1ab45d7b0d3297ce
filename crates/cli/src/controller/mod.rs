//! `mqblk controller`: adds, removes, changes and lists the controllers of a running daemon.

use std::process::ExitCode;

use clap::Subcommand;
use mqblk_admin::model::{ControllerList, ListedController};
use serde_json::json;

use crate::call::{CallError, DaemonArgs, call, read};
use crate::{disk, failure, table};

/// The name for messages.
const LIST: &str = "controller list";
/// The cell of a missing value.
const NONE: &str = "-";

/// The actions of `mqblk controller`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = include_str!("help.txt"), after_help = "Examples: mqblk controller --help")]
pub(crate) struct ControllerArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Serve one more controller, without LUNs
    Add {
        #[command(flatten)]
        daemon: DaemonArgs,

        /// The keys of the controller, as for --controller: see `mqblk serve --help`
        #[arg(value_name = "KEY=VALUE,...")]
        settings: String,
    },

    /// Take a controller and its LUNs away, when their requests have ended
    Remove {
        #[command(flatten)]
        daemon: DaemonArgs,

        /// The controller's id
        #[arg(value_name = "ID")]
        id: String,

        /// Also while a guest is connected, which loses its LUNs
        #[arg(long)]
        force: bool,
    },

    /// Change how a controller's queues are served while its guest works
    Set {
        /// The controller's id
        #[arg(value_name = "ID")]
        id: String,

        /// Settings to change, such as poll=busy or queue-map=0:0,1:1
        #[arg(value_name = "KEY=VALUE", required = true)]
        settings: Vec<String>,

        #[command(flatten)]
        daemon: DaemonArgs,
    },

    /// Show the controllers, their LUNs and who uses them
    List {
        #[command(flatten)]
        daemon: DaemonArgs,
    },
}

/// Sends the request to the daemon and prints the result.
pub(crate) fn run(args: ControllerArgs) -> ExitCode {
    let result = match args.action {
        Action::Add { daemon, settings } => disk::add("controller add", "controller.add", &daemon, &settings),
        Action::Remove { daemon, id, force } => {
            disk::remove("controller remove", "controller.remove", &daemon, &id, force)
        }
        Action::Set { id, settings, daemon } => {
            disk::set_settings("controller set", "controller.set", &daemon, &id, &settings)
        }
        Action::List { daemon } => list(&daemon),
    };
    failure::show(result, CallError::is_usage)
}

fn list(daemon: &DaemonArgs) -> Result<String, CallError> {
    let response = call(LIST, &daemon.admin.path(), "controller.list", &json!({}))?;
    if daemon.json {
        return Ok(format!("{response}\n"));
    }
    Ok(controller_table(&read::<ControllerList>(LIST, response)?.controllers))
}

fn controller_table(controllers: &[ListedController]) -> String {
    let head = ["controller", "interface", "vmm", "luns"].map(str::to_owned).to_vec();
    let row = |controller: &ListedController| {
        let vmm = match &controller.frontend {
            None => NONE.to_owned(),
            Some(frontend) if frontend.pid == 0 => "connected".to_owned(),
            Some(frontend) => format!("pid {}", frontend.pid),
        };
        let luns = if controller.luns.is_empty() { NONE.to_owned() } else { controller.luns.join(",") };
        vec![controller.id.clone(), controller.interface.clone(), vmm, luns]
    };
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(controllers.iter().map(row)).collect();
    table::align(&rows)
}
