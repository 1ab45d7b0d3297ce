//! `stat`: the statistics of each queue, disk and worker.

use std::sync::Arc;

use mqblk_admin::model::{ControllerStat, DiskStat, Stat};
use mqblk_admin::{Param, ParamKind, Params, Verb, VerbError, found};

use super::{DaemonState, monotonic_ns, wire};

const PARAMS: &[Param] = &[
    Param { name: "queues", kind: ParamKind::Boolean, about: "Every queue too, not only sums [false]" },
    Param {
        name: "latency",
        kind: ParamKind::Boolean,
        about: "The buckets of the latencies' distributions too [false]",
    },
    Param { name: "disk", kind: ParamKind::Text, about: "Only the disk, controller or LUN of this id [all]" },
];

pub fn verb(source: &Arc<DaemonState>) -> Verb {
    let source = Arc::clone(source);
    Verb::new(
        "stat",
        "What every disk, controller, queue and worker counted since the daemon started",
        PARAMS,
        move |params| {
            let stat = read(&source, params)?;
            serde_json::to_value(stat).map_err(|error| VerbError::Failed(error.to_string()))
        },
    )
}

fn read(source: &DaemonState, params: &Params) -> Result<Stat, VerbError> {
    let wanted = params.text("disk");
    let luns = source.luns.list();
    let controllers = || source.luns.controllers().iter().zip(0..);
    let stats = source.snapshot()?;
    if let Some(id) = wanted {
        let mut ids = source.disks.iter().map(|disk| disk.info.id.as_str()).collect::<Vec<_>>();
        ids.extend(stats.unconfigured.iter().map(|(about, _)| about.id.as_str()));
        ids.extend(controllers().map(|(controller, _)| controller.id()));
        if !ids.contains(&id) && !luns.iter().any(|lun| lun.id == id) {
            let or_lun = if luns.is_empty() { "" } else { ", or a LUN's" };
            return Err(VerbError::params(
                "params.disk",
                found(&id.into()),
                format!("one of {}{or_lun}", ids.join(", ")),
            ));
        }
    }
    let detail = wire::StatDetail { queues: params.is_set("queues"), latency: params.is_set("latency") };
    let time_ns = monotonic_ns();
    let disks = source.disks.iter().map(|disk| &disk.info).zip(&stats.disks);
    let disks = disks.chain(stats.unconfigured.iter().map(|(about, disk_stats)| (about, disk_stats)));
    let disks = disks.filter(|(about, _)| wanted.is_none_or(|id| id == about.id));
    let disks = disks.map(|(about, disk)| DiskStat {
        in_flight_region: disk.in_flight_region,
        ..wire::disk(about, &disk.queues, disk.grants.as_ref(), detail)
    });
    let disks = disks.collect();
    let controller_stats = controllers().zip(&stats.controllers).filter_map(|((controller, at), queues)| {
        let is_whole = wanted.is_none_or(|id| id == controller.id());
        let own = luns.iter().filter(|lun| lun.controller == at && (is_whole || wanted == Some(&lun.id)));
        let own: Vec<_> = own.collect();
        let map = &controller.endpoint().queue_map;
        let in_flight_region = controller.in_flight_region();
        (is_whole || !own.is_empty()).then(|| ControllerStat {
            in_flight_region,
            ..wire::controller(controller.id(), map, &own, queues, detail)
        })
    });
    Ok(Stat {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        time_ns,
        uptime_ns: time_ns.saturating_sub(source.started_ns),
        disks,
        controllers: controller_stats.collect(),
        workers: stats.workers.iter().zip(0..).map(|(worker, number)| wire::worker(number, worker)).collect(),
    })
}
