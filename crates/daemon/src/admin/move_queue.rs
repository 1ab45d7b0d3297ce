//! `queue.list` and `queue.move`: the workers of queues.

use std::sync::Arc;

use mqblk_admin::model::{ListedQueue, QueueList, QueueMoved};
use mqblk_admin::{Param, ParamKind, Params, Verb, VerbError};
use serde_json::Value;

use super::conversion::{change_error, response};
use super::disk_set::no_such_id;
use crate::live::MovedQueue;
use crate::state::DaemonState;

const LIST: &[Param] =
    &[Param { name: "id", kind: ParamKind::Text, about: "Only those of the disk or controller of this id [all]" }];

const MOVE: &[Param] = &[
    Param { name: "id", kind: ParamKind::Text, about: "The id of the disk or controller" },
    Param { name: "queue", kind: ParamKind::Number, about: "The request queue, from 0" },
    Param { name: "worker", kind: ParamKind::Number, about: "The worker, from 0" },
];

pub(super) fn verbs(state: &Arc<DaemonState>) -> [Verb; 2] {
    let (listing, moving) = (Arc::clone(state), Arc::clone(state));
    [
        Verb::new("queue.list", "The request queues and their workers", LIST, move |params| list(&listing, params)),
        Verb::new("queue.move", "Moves a queue to another worker while its guest uses it", MOVE, move |params| {
            move_queue(&moving, params)
        }),
    ]
}

fn list(state: &DaemonState, params: &Params) -> Result<Value, VerbError> {
    let wanted = params.text("id");
    let mut queues = Vec::new();
    let devices = state.devices();
    for device in devices.iter().filter(|device| wanted.is_none_or(|id| device.id() == id)) {
        let (id, settings) = (device.id(), device.queue_settings());
        let map = settings.map(|settings| settings.map).unwrap_or_default();
        queues.extend((0..).zip(map).map(|(queue, worker)| ListedQueue {
            id: id.clone(),
            queue,
            worker: worker as u32,
        }));
    }
    match wanted {
        Some(id) if devices.iter().all(|device| device.id() != id) => Err(no_such_id(id, state.no_such_device(id))),
        _ => response(QueueList { workers: state.engine().workers() as u32, queues }),
    }
}

fn move_queue(state: &DaemonState, params: &Params) -> Result<Value, VerbError> {
    let id = params.text("id").unwrap_or_default();
    let number = |name: &str| {
        params.number(name).ok_or_else(|| VerbError::params(format!("params.{name}"), "nothing", "a number"))
    };
    let target = state.live_any(id).ok_or_else(|| no_such_id(id, state.no_such_device(id)))?;
    let (queue, worker) = (number("queue")?, number("worker")?);
    let moved = state.move_queue(&target, queue, worker).map_err(|error| change_error(error, params))?;
    response(QueueMoved {
        id: id.to_owned(),
        queue: queue as u32,
        worker: worker as u32,
        moved: moved == MovedQueue::Moved,
        survives_restart: state.keeps_changes(),
    })
}
