//! `stat`: the statistics of each queue, disk and worker.

use std::sync::Arc;

use mqblk_admin::model::Stat;
use mqblk_admin::{Param, ParamKind, Params, Verb, VerbError, found};
use mqblk_engine::WorkerStats;

use super::conversion::response;
use crate::clock::monotonic_ns;
use crate::interface::{DeviceStat, StatDetail};
use crate::report;
use crate::state::DaemonState;

const PARAMS: &[Param] = &[
    Param { name: "queues", kind: ParamKind::Boolean, about: "Every queue too, not only sums [false]" },
    Param {
        name: "latency",
        kind: ParamKind::Boolean,
        about: "The buckets of the latencies' distributions too [false]",
    },
    Param { name: "disk", kind: ParamKind::Text, about: "Only the disk, controller or LUN of this id [all]" },
];

pub(super) fn verb(state: &Arc<DaemonState>) -> Verb {
    let state = Arc::clone(state);
    Verb::new(
        "stat",
        "Counters of every disk, controller, queue and worker since the daemon started",
        PARAMS,
        move |params| {
            let stat = read(&state, params)?;
            response(stat)
        },
    )
}

/// Returns the statistics of all workers and devices at one moment.
///
/// # Errors
/// As [`DaemonState::snapshot`].
pub(crate) fn sample(state: &DaemonState, detail: StatDetail) -> Result<Stat, VerbError> {
    let (workers, stats) = state.snapshot(detail)?;
    Ok(stat_of(state, &workers, stats))
}

fn read(state: &DaemonState, params: &Params) -> Result<Stat, VerbError> {
    let detail = StatDetail { queues: params.is_set("queues"), latency: params.is_set("latency") };
    let (workers, mut stats) = state.snapshot(detail)?;
    if let Some(id) = params.text("disk") {
        let luns = state.exports();
        let is_lun = luns.iter().any(|export| export.id == id);
        let ids: Vec<_> = stats.iter().map(DeviceStat::id).collect();
        if !ids.contains(&id) && !is_lun {
            let has_luns = luns.iter().any(|export| !ids.contains(&export.id.as_str()));
            let or_lun = if has_luns { ", or a LUN's" } else { "" };
            let expected = format!("one of {}{or_lun}", ids.join(", "));
            return Err(VerbError::params("params.disk", found(&id.into()), expected));
        }
        stats.retain_mut(|stat| is_wanted(stat, id));
    }
    Ok(stat_of(state, &workers, stats))
}

fn stat_of(state: &DaemonState, workers: &[WorkerStats], stats: Vec<DeviceStat>) -> Stat {
    let (mut disks, mut controllers) = (Vec::new(), Vec::new());
    for stat in stats {
        match stat {
            DeviceStat::Disk(disk) => disks.push(*disk),
            DeviceStat::Controller(controller) => controllers.push(*controller),
        }
    }
    let time_ns = monotonic_ns();
    let worker = |(stats, number): (&WorkerStats, u32)| report::worker(number, stats);
    Stat {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        time_ns,
        uptime_ns: time_ns.saturating_sub(state.started_ns()),
        disks,
        controllers,
        workers: workers.iter().zip(0..).map(worker).collect(),
        out: report::out(state.out()),
    }
}

/// Returns true if the device has this id, or has a LUN of this id. Removes its other LUNs then.
fn is_wanted(stat: &mut DeviceStat, id: &str) -> bool {
    match stat {
        DeviceStat::Controller(controller) if controller.id != id => {
            controller.luns.retain(|lun| lun.id == id);
            !controller.luns.is_empty()
        }
        stat => stat.id() == id,
    }
}
