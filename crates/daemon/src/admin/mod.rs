//! The verbs of the admin socket that all interfaces have. Each has its own file, and is registered in [`verbs`].

mod config;
mod controller;
mod conversion;
mod disk;
mod disk_set;
mod disks;
mod limit_group;
mod log;
mod move_queue;
pub mod resize;
mod resume;
pub(crate) mod stat;
mod takeover;
mod version;
mod worker;

use std::sync::Arc;

use mqblk_admin::{VerbError, Verbs};

use crate::state::DaemonState;
pub use conversion::{change_error, response, setting_error, take_settings};

/// Verbs that change nothing a successor has to know: answered during a takeover.
const READING: &[&str] = &[
    "stat",
    "disks",
    "version",
    "log",
    "config.diff",
    "disk.list",
    "controller.list",
    "queue.list",
    "worker.list",
    "limit-group.list",
    "lun.list",
    "takeover",
];

/// Returns all verbs: those below, and those of the interfaces.
pub fn verbs(state: &Arc<DaemonState>) -> Verbs {
    let mut verbs = vec![stat::verb(state), disks::verb(state), version::verb(), resize::verb(state)];
    verbs.push(resume::verb(state));
    verbs.extend(disk::verbs(state));
    verbs.extend(controller::verbs(state));
    verbs.extend(worker::verbs(state));
    verbs.extend(log::verb(state));
    verbs.extend(config::verbs(state));
    verbs.extend(disk_set::verbs(state));
    verbs.extend(move_queue::verbs(state));
    verbs.extend(limit_group::verbs(state));
    verbs.extend(state.interfaces().iter().flat_map(|interface| Arc::clone(interface).verbs()));
    verbs.push(takeover::verb(state));
    let verbs = verbs.into_iter().map(|verb| {
        let state = Arc::clone(state);
        match READING.contains(&verb.name()) {
            true => verb,
            false => verb.guarded(move || state.begin_change().map_err(VerbError::Failed)),
        }
    });
    Verbs::new(verbs.collect())
}
