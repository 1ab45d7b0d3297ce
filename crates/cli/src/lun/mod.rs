//! `mqblk lun`: adds, removes, resizes and lists the LUNs of a running daemon.

use std::process::ExitCode;

use clap::Subcommand;
use mqblk_admin::model::{Lun, LunChange, LunList};
use mqblk_core::ByteLen;
use serde_json::{Value, json};

use crate::call::{CallError, DaemonArgs, call, read};
use crate::disk::absolute_settings;
use crate::failure;
use crate::table;

/// The names for messages.
const ADD: &str = "lun add";
const LIST: &str = "lun list";
/// The table cell for an unknown value.
const UNKNOWN: &str = "-";

/// The options of `mqblk lun`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = include_str!("help.txt"), after_help = "Examples: mqblk lun --help")]
pub(crate) struct LunArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Add a LUN to a controller; its guest sees it at once
    Add {
        #[command(flatten)]
        daemon: DaemonArgs,

        /// The keys of `mqblk serve --lun`, see `mqblk serve --help`
        #[arg(value_name = "controller=ID,KEY=VALUE,...")]
        settings: String,
    },

    /// Take a LUN away: from its guest at once, from its storage when the requests of before have ended
    Remove {
        #[command(flatten)]
        daemon: DaemonArgs,

        #[command(flatten)]
        selector: LunSelector,
    },

    /// Resize a LUN and notify its guests
    Resize {
        #[command(flatten)]
        daemon: DaemonArgs,

        #[command(flatten)]
        selector: LunSelector,

        /// The size, such as 10G: a file is extended or cut to it [default: the size that the file or block device has
        /// now]
        #[arg(long, value_name = "SIZE")]
        size: Option<String>,

        /// The LUN may become smaller; data beyond its new end is lost
        #[arg(long)]
        shrink: bool,
    },

    /// Show the LUNs
    List {
        #[command(flatten)]
        daemon: DaemonArgs,

        /// Only those of this controller
        #[arg(long, value_name = "ID")]
        controller: Option<String>,
    },
}

/// The selected LUN.
#[derive(Debug, clap::Args)]
struct LunSelector {
    /// The LUN's id
    #[arg(value_name = "ID", required_unless_present = "controller", conflicts_with_all = ["controller", "target", "lun"])]
    id: Option<String>,

    /// Its controller's id, in place of its own
    #[arg(long, value_name = "ID", requires = "target")]
    controller: Option<String>,

    /// Its target
    #[arg(long, value_name = "T", requires = "controller", allow_negative_numbers = true)]
    target: Option<u64>,

    /// Its LUN [default: 0]
    #[arg(long, value_name = "L", requires = "controller", allow_negative_numbers = true)]
    lun: Option<u64>,
}

impl LunSelector {
    fn params(&self) -> Value {
        let mut params = json!({});
        for (name, value) in [("id", &self.id), ("controller", &self.controller)] {
            if let Some(value) = value {
                params[name] = json!(value);
            }
        }
        for (name, value) in [("target", self.target), ("lun", self.lun)] {
            if let Some(value) = value {
                params[name] = json!(value);
            }
        }
        params
    }
}

/// Sends the request to the daemon and prints the result.
pub(crate) fn run(args: LunArgs) -> ExitCode {
    failure::show(execute(&args.action), CallError::is_usage)
}

fn execute(action: &Action) -> Result<String, CallError> {
    match action {
        Action::Add { daemon, settings } => {
            let settings = absolute_settings(ADD, settings)?;
            change(daemon, ADD, "lun.add", &json!({ "settings": settings }), "added")
        }
        Action::Remove { daemon, selector } => {
            change(daemon, "lun remove", "lun.remove", &selector.params(), "removed")
        }
        Action::Resize { daemon, selector, size, shrink } => {
            let mut params = selector.params();
            params["shrink"] = json!(shrink);
            if let Some(size) = size {
                params["size"] = json!(size);
            }
            change(daemon, "lun resize", "lun.resize", &params, "resized")
        }
        Action::List { daemon, controller } => {
            let params = controller.as_ref().map_or(json!({}), |id| json!({ "controller": id }));
            let response = call(LIST, &daemon.admin.path(), "lun.list", &params)?;
            if daemon.json {
                return Ok(format!("{response}\n"));
            }
            Ok(lun_table(&read::<LunList>(LIST, response)?.luns))
        }
    }
}

fn change(
    daemon: &DaemonArgs,
    subcommand: &'static str,
    verb: &str,
    params: &Value,
    done: &str,
) -> Result<String, CallError> {
    let response = call(subcommand, &daemon.admin.path(), verb, params)?;
    if daemon.json {
        return Ok(format!("{response}\n"));
    }
    let Lun { id, controller, target, lun, size_bytes, survives_restart, .. } =
        read::<LunChange>(subcommand, response)?.lun;
    let size = size_bytes.map_or(String::new(), |bytes| format!(", {}", ByteLen(bytes)));
    let lost = if subcommand == ADD && !survives_restart {
        "; it does not survive a restart of the daemon, which has no --state"
    } else {
        ""
    };
    Ok(format!("{done} {id}: target {target} lun {lun} of controller {controller}{size}{lost}\n"))
}

fn lun_table(luns: &[Lun]) -> String {
    let head = ["lun", "controller", "target", "lun", "size", "state", "storage", "unit", "origin"]
        .map(str::to_owned)
        .to_vec();
    let row = |lun: &Lun| {
        let known = |text: &Option<String>| text.clone().unwrap_or_else(|| UNKNOWN.to_owned());
        vec![
            lun.id.clone(),
            lun.controller.clone(),
            lun.target.to_string(),
            lun.lun.to_string(),
            lun.size_bytes.map_or(UNKNOWN.to_owned(), |bytes| ByteLen(bytes).to_string()),
            lun.state.clone(),
            known(&lun.storage),
            known(&lun.unit),
            known(&Some(lun.origin.clone()).filter(|origin| !origin.is_empty())),
        ]
    };
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(luns.iter().map(row)).collect();
    table::align(&rows)
}
