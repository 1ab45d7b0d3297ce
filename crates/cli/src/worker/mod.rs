//! `mqblk worker`: adds, removes and lists the workers of a running daemon.

use std::process::ExitCode;

use clap::Subcommand;
use mqblk_admin::model::{ListedWorker, WorkerChange, WorkerList};
use serde_json::{Value, json};

use crate::call::{CallError, DaemonArgs, call, lost_unless, read};
use crate::{failure, table};

/// The cell of a missing value.
const NONE: &str = "-";

/// The options of `mqblk worker`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = include_str!("help.txt"), after_help = "Examples: mqblk worker --help")]
pub(crate) struct WorkerArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Start one more worker
    Add {
        #[command(flatten)]
        daemon: DaemonArgs,

        /// The CPU that it is pinned to [default: the kernel places it]
        #[arg(long, value_name = "CPU")]
        pin: Option<u16>,
    },

    /// End the last worker, when its queues have moved to others
    Remove {
        #[command(flatten)]
        daemon: DaemonArgs,
    },

    /// Show the workers, their CPUs and how many queues each has
    List {
        #[command(flatten)]
        daemon: DaemonArgs,
    },
}

/// Sends the request to the daemon and prints the result.
pub(crate) fn run(args: WorkerArgs) -> ExitCode {
    let result = match args.action {
        Action::Add { daemon, pin } => {
            let params = pin.map_or_else(|| json!({}), |cpu| json!({ "cpu": cpu }));
            change("worker add", "worker.add", "added", &daemon, &params)
        }
        Action::Remove { daemon } => change("worker remove", "worker.remove", "removed", &daemon, &json!({})),
        Action::List { daemon } => list(&daemon),
    };
    failure::show(result, CallError::is_usage)
}

fn change(
    what: &'static str,
    verb: &str,
    done: &str,
    daemon: &DaemonArgs,
    params: &Value,
) -> Result<String, CallError> {
    let response = call(what, &daemon.admin.path(), verb, params)?;
    if daemon.json {
        return Ok(format!("{response}\n"));
    }
    let WorkerChange { worker, workers, survives_restart } = read(what, response)?;
    Ok(format!("{done} worker {worker}: there are {workers}{}\n", lost_unless(survives_restart)))
}

fn list(daemon: &DaemonArgs) -> Result<String, CallError> {
    const LIST: &str = "worker list";
    let response = call(LIST, &daemon.admin.path(), "worker.list", &json!({}))?;
    if daemon.json {
        return Ok(format!("{response}\n"));
    }
    let WorkerList { workers } = read(LIST, response)?;
    let head = ["worker", "cpu", "queues"].map(str::to_owned).to_vec();
    let row = |ListedWorker { worker, cpu, queues }: &ListedWorker| {
        vec![worker.to_string(), cpu.map_or_else(|| NONE.to_owned(), |cpu| cpu.to_string()), queues.to_string()]
    };
    Ok(table::align(&std::iter::once(head).chain(workers.iter().map(row)).collect::<Vec<_>>()))
}
