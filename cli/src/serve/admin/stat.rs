//! `stat`: what every queue, disk and worker counted.

use std::sync::Arc;

use mqblk_admin::model::Stat;
use mqblk_admin::{Kind, Param, Params, Verb, VerbError};

use super::{Source, monotonic_ns, wire};

const PARAMS: &[Param] = &[
    Param { name: "queues", kind: Kind::Boolean, about: "Every queue too, not only each disk's sums [false]" },
    Param { name: "latency", kind: Kind::Boolean, about: "The buckets of the latencies' distributions too [false]" },
    Param { name: "disk", kind: Kind::Text, about: "Only the disk of this id [all disks]" },
];

pub fn verb(source: &Arc<Source>) -> Verb {
    let source = Arc::clone(source);
    Verb::new("stat", "What every disk, queue and worker counted since the daemon started", PARAMS, move |params| {
        let stat = read(&source, params)?;
        serde_json::to_value(stat).map_err(|error| VerbError::Failed(error.to_string()))
    })
}

fn read(source: &Source, params: &Params) -> Result<Stat, VerbError> {
    let wanted = params.text("disk");
    if let Some(id) = wanted
        && !source.disks.iter().any(|disk| disk.about.id == id)
    {
        let ids: Vec<_> = source.disks.iter().map(|disk| disk.about.id.as_str()).collect();
        return Err(VerbError::params("params.disk", format!("{id:?}"), format!("one of {}", ids.join(", "))));
    }
    let shape = wire::Shape { queues: params.is_set("queues"), latency: params.is_set("latency") };
    let counted = source.counted()?;
    let time_ns = monotonic_ns();
    let disks = source.disks.iter().zip(&counted.disks);
    let disks = disks.filter(|(disk, _)| wanted.is_none_or(|id| id == disk.about.id));
    let disks = disks.map(|(disk, queues)| wire::disk(&disk.about, queues, shape)).collect();
    Ok(Stat {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        time_ns,
        uptime_ns: time_ns.saturating_sub(source.started_ns),
        disks,
        workers: counted.workers.iter().zip(0..).map(|(worker, number)| wire::worker(number, worker)).collect(),
    })
}
