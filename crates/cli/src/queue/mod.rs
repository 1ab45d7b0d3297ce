//! `mqblk queue`: shows and changes the assignment of a running daemon's queues to workers.

use std::process::ExitCode;

use clap::Subcommand;
use mqblk_admin::model::{ListedQueue, QueueList, QueueMoved};
use serde_json::json;

use crate::call::{CallError, DaemonArgs, call, lost_unless, read};
use crate::{failure, table};

/// The options of `mqblk queue`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = include_str!("help.txt"), after_help = "Examples: mqblk queue --help")]
pub(crate) struct QueueArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Move a queue to another worker while its guest uses it
    Move {
        #[command(flatten)]
        daemon: DaemonArgs,

        /// The disk's or controller's id
        #[arg(value_name = "ID")]
        id: String,

        /// The request queue, from 0
        #[arg(value_name = "QUEUE")]
        queue: u16,

        /// The worker, from 0
        #[arg(long, value_name = "WORKER")]
        worker: u16,
    },

    /// Show the request queues and the worker of each
    List {
        #[command(flatten)]
        daemon: DaemonArgs,

        /// Only those of this disk or controller
        #[arg(value_name = "ID")]
        id: Option<String>,
    },
}

/// Sends the request to the daemon and prints the result.
pub(crate) fn run(args: QueueArgs) -> ExitCode {
    failure::show(execute(&args.action), CallError::is_usage)
}

fn execute(action: &Action) -> Result<String, CallError> {
    match action {
        Action::Move { daemon, id, queue, worker } => {
            const WHAT: &str = "queue move";
            let params = json!({ "id": id, "queue": queue, "worker": worker });
            let response = call(WHAT, &daemon.admin.path(), "queue.move", &params)?;
            if daemon.json {
                return Ok(format!("{response}\n"));
            }
            let QueueMoved { id, queue, worker, moved, survives_restart } = read(WHAT, response)?;
            let what = if moved { "moved to" } else { "is not in use, and starts at" };
            Ok(format!("{id}: queue {queue} {what} worker {worker}{}\n", lost_unless(survives_restart)))
        }
        Action::List { daemon, id } => {
            const WHAT: &str = "queue list";
            let params = id.as_ref().map_or_else(|| json!({}), |id| json!({ "id": id }));
            let response = call(WHAT, &daemon.admin.path(), "queue.list", &params)?;
            if daemon.json {
                return Ok(format!("{response}\n"));
            }
            Ok(queue_table(&read::<QueueList>(WHAT, response)?.queues))
        }
    }
}

fn queue_table(queues: &[ListedQueue]) -> String {
    let head = ["disk", "queue", "worker"].map(str::to_owned).to_vec();
    let row = |queue: &ListedQueue| vec![queue.id.clone(), queue.queue.to_string(), queue.worker.to_string()];
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(queues.iter().map(row)).collect();
    table::align(&rows)
}
