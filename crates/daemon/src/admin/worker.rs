//! `worker.list`, `worker.add` and `worker.remove`: the threads that serve queues, at run time.

use std::sync::Arc;

use mqblk_admin::model::{ListedWorker, WorkerChange, WorkerList};
use mqblk_admin::{Param, ParamKind, Params, Verb, VerbError};
use serde_json::Value;

use super::conversion::{change_error, response};
use crate::saved_changes::Keeping;
use crate::state::DaemonState;

const ADD: &[Param] =
    &[Param { name: "cpu", kind: ParamKind::Number, about: "The CPU that it is pinned to [the kernel places it]" }];

pub(super) fn verbs(state: &Arc<DaemonState>) -> [Verb; 3] {
    let (listing, adding, removing) = (Arc::clone(state), Arc::clone(state), Arc::clone(state));
    [
        Verb::new("worker.list", "The workers, their CPUs and queues", &[], move |_| list(&listing)),
        Verb::new("worker.add", "Starts one more worker", ADD, move |params| add(&adding, params)),
        Verb::new("worker.remove", "Ends the last worker; its queues move to others first", &[], move |params| {
            let removed = removing.remove_worker(Keeping::Record);
            change(&removing, removed.map_err(|error| change_error(error, params))?)
        }),
    ]
}

fn list(state: &DaemonState) -> Result<Value, VerbError> {
    let mut workers: Vec<ListedWorker> = (0..)
        .zip(state.engine().cpus())
        .map(|(worker, cpu)| ListedWorker { worker, cpu: cpu.map(|cpu| cpu as u32), queues: 0 })
        .collect();
    for queue in state.devices().iter().filter_map(|device| device.queue_settings()).flat_map(|queues| queues.map) {
        if let Some(worker) = workers.get_mut(queue) {
            worker.queues += 1;
        }
    }
    response(WorkerList { workers })
}

fn add(state: &DaemonState, params: &Params) -> Result<Value, VerbError> {
    let cpu = match params.number("cpu") {
        None => None,
        Some(cpu) => Some(u16::try_from(cpu).map_err(|_| {
            VerbError::params("params.cpu", format!("the number {cpu}"), "the number of a CPU, up to 65535")
        })?),
    };
    let added = state.add_worker(cpu, Keeping::Record);
    change(state, added.map_err(|error| change_error(error, params))?)
}

fn change(state: &DaemonState, worker: u16) -> Result<Value, VerbError> {
    let (workers, survives_restart) = (state.worker_count().into(), state.keeps_changes());
    response(WorkerChange { worker: worker.into(), workers, survives_restart })
}
