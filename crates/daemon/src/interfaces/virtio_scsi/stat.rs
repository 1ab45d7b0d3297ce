//! The statistics of controllers and LUNs.

use std::sync::Arc;
use std::time::Duration;

use mqblk_admin::model::{ControllerStat, LunCounters, LunStat, QueueStat};
use mqblk_core::Resize;
use mqblk_engine::{DiskCounters, QueueId, QueueMove, QueuePolicy, QueueSettings, QueueStats, WorkerStats};
use mqblk_vhost_user_server::{Frontend, Server};

use super::config::WORD;
use super::controller::Controller;
use super::luns::{LunEntry, LunSelector, LunState, Luns};
use crate::change::ChangeError;
use crate::interface::{DeviceDescription, DeviceStat, Export, ServedDevice, StatDetail};
use crate::queues::queue_settings_pairs;
use crate::report::{REQUEST, connections, health, io_stats, ns_to_ms, polling, tenant_budget};
use crate::resize::ResizeOutcome;

/// A served controller.
pub(super) struct ServedController {
    luns: Arc<Luns>,
    controller: Arc<Controller>,
}

impl ServedController {
    /// Creates the handle of a controller.
    pub(super) fn new(luns: Arc<Luns>, controller: Arc<Controller>) -> ServedController {
        ServedController { luns, controller }
    }

    fn own_luns(&self) -> Vec<LunEntry> {
        self.luns.list().into_iter().filter(|lun| Arc::ptr_eq(&lun.controller, &self.controller)).collect()
    }
}

impl ServedDevice for ServedController {
    fn describe(&self) -> DeviceDescription {
        let controller = &self.controller;
        // These may have been changed while it is served.
        let current = queue_settings_pairs(&controller.queue_settings());
        let is_fixed = |key: &str| key != "id" && !current.iter().any(|(other, _)| *other == key);
        let settings = controller.settings().iter().filter(|(key, _)| is_fixed(key)).cloned().chain(current.clone());
        let settings = settings.collect();
        DeviceDescription { id: controller.id().to_owned(), interface: WORD, storage: None, settings }
    }

    fn stat(&self, workers: &[WorkerStats], detail: StatDetail) -> Option<DeviceStat> {
        let served = &self.controller;
        let luns = self.own_luns();
        let queues = served.stats(workers)?;
        let mut stat = controller(served.id(), &served.queue_settings().map, &luns, &queues, detail);
        stat.in_flight_region = served.in_flight_region();
        stat.budget = Some(tenant_budget(&served.budget()));
        Some(DeviceStat::Controller(Box::new(stat)))
    }

    fn queue_settings(&self) -> Option<QueueSettings> {
        Some(self.controller.queue_settings())
    }

    fn set_policy(&self, policy: QueuePolicy) -> Result<(), String> {
        self.controller.set_policy(policy)
    }

    fn move_queue(&self, queue: u16, worker: usize, timeout: Duration) -> Result<QueueMove, String> {
        self.controller.move_queue(queue, worker, timeout)
    }

    fn attached_queues(&self) -> Vec<(u16, QueueId)> {
        self.controller.attached_queues()
    }

    fn frontend(&self) -> Option<Frontend> {
        self.controller.frontend()
    }

    fn server(&self) -> Option<Arc<Server>> {
        Some(self.controller.server())
    }

    fn is_connected(&self) -> bool {
        self.controller.is_connected()
    }

    fn exports(&self) -> Vec<Export> {
        self.own_luns().into_iter().map(export).collect()
    }

    fn resize(&self, id: &str, request: Resize) -> Result<ResizeOutcome, ChangeError> {
        self.luns.resize(&LunSelector::Id(id.to_owned()), request).map(|(_, outcome)| outcome)
    }
}

/// Returns a LUN in its state at the time of the listing.
fn export(lun: LunEntry) -> Export {
    let storage = lun.unit.as_ref().map(|unit| &unit.config().storage);
    Export {
        storage: storage.map(|storage| storage.kind.clone()),
        health: lun.unit.as_ref().map(|unit| Arc::clone(unit.health())),
        configured_plug: storage.map(|storage| storage.plug).unwrap_or_default(),
        disk: lun.unit.as_ref().map(|unit| Arc::downgrade(unit.disk())),
        is_watched: lun.is_ready() && storage.is_some_and(|storage| storage.watch_size),
        id: lun.id,
    }
}

/// The roles of a controller's queues before the request queues. The first worker serves them.
const FIXED_ROLES: [&str; 2] = ["control", "event"];

/// Returns the statistics of a controller with these LUNs, from those of its queues in order.
fn controller(
    id: &str,
    queue_map: &[usize],
    luns: &[LunEntry],
    queues: &[QueueStats],
    detail: StatDetail,
) -> ControllerStat {
    let totals = request_totals(queues);
    let numbers = FIXED_ROLES.into_iter().map(|role| (role, 0, 0));
    let numbers = numbers.chain(queue_map.iter().zip(0..).map(|(worker, queue)| (REQUEST, queue, *worker as u32)));
    let queues = queues.iter().zip(numbers).map(|(stats, (role, queue, worker))| QueueStat {
        role: role.to_owned(),
        queue,
        worker,
        polling: polling(stats),
        load: io_stats(stats, detail),
    });
    ControllerStat {
        id: id.to_owned(),
        interface: WORD.to_owned(),
        queue_count: queue_map.len() as u32,
        totals: io_stats(&totals, detail),
        in_flight_region: None,
        budget: None,
        luns: luns.iter().map(|one| lun(one, disk_counters(&totals, one))).collect(),
        queues: if detail.queues { queues.collect() } else { Vec::new() },
    }
}

/// Returns the number of a LUN's requests in flight, from the statistics of its controller's queues.
pub(super) fn in_flight(lun: &LunEntry, queues: &[QueueStats]) -> u32 {
    disk_counters(&request_totals(queues), lun).in_flight
}

/// Returns the sum of the request queues.
fn request_totals(queues: &[QueueStats]) -> QueueStats {
    let mut totals = QueueStats::default();
    queues.iter().skip(FIXED_ROLES.len()).for_each(|stats| totals.add(stats));
    totals
}

/// Returns the counters of a LUN's disk. Zero while it is being added: its slot may still have the counters of a
/// removed LUN.
fn disk_counters(totals: &QueueStats, lun: &LunEntry) -> DiskCounters {
    let own = totals.disks.iter().find(|disk| disk.slot == lun.slot && !matches!(lun.state, LunState::Adding));
    own.copied().unwrap_or(DiskCounters::new(lun.slot))
}

fn lun(lun: &LunEntry, counted: DiskCounters) -> LunStat {
    let storage = lun.unit.as_ref().map(|unit| &unit.config().storage);
    let plug = lun.unit.as_ref().map(|unit| unit.plug()).unwrap_or_default();
    LunStat {
        id: lun.id.clone(),
        target: lun.address.target.into(),
        lun: lun.address.lun.into(),
        state: lun.state.word().to_owned(),
        unit: lun.unit.as_ref().map(|unit| unit.name().to_owned()).unwrap_or_default(),
        storage: storage.map(|storage| storage.kind.clone()).unwrap_or_default(),
        merge: plug.merge.word().to_owned(),
        merge_bytes: plug.merge_bytes.0,
        merge_segments: plug.merge_segments,
        in_flight: counted.in_flight.into(),
        oldest_ms: ns_to_ms(counted.oldest_ns),
        health: lun.unit.as_ref().map(|unit| health(unit.health())).unwrap_or_default(),
        connections: lun.unit.as_ref().and_then(|unit| connections(&**unit.disk())),
        counters: lun_counters(&counted),
    }
}

fn lun_counters(counted: &DiskCounters) -> LunCounters {
    let DiskCounters {
        slot: _,
        reads,
        writes,
        others,
        read_bytes,
        written_bytes,
        errors,
        in_flight: _,
        oldest_ns: _,
        read_ns,
        write_ns,
        other_ns,
    } = *counted;
    LunCounters { reads, writes, others, read_bytes, written_bytes, errors, read_ns, write_ns, other_ns }
}

#[cfg(test)]
mod tests {
    use mqblk_core::DiskSlot;

    use super::*;
    use crate::report::tests::{ALL, distinct_stats};

    #[test]
    fn a_controller_is_the_sum_of_its_request_queues() {
        let queue_stats = [distinct_stats(1000), distinct_stats(2000), distinct_stats(1), distinct_stats(10)];
        let reported = controller("c", &[1, 0], &[], &queue_stats, ALL);
        assert_eq!((reported.id.as_str(), reported.interface.as_str(), reported.queue_count), ("c", "virtio-scsi", 2));
        assert_eq!(reported.totals.counters.requests, 18 * 11);
        let queues: Vec<_> =
            reported.queues.iter().map(|queue| (queue.role.as_str(), queue.queue, queue.worker)).collect();
        assert_eq!(queues, [("control", 0, 0), ("event", 0, 0), ("request", 0, 1), ("request", 1, 0)]);
        assert_eq!((reported.queues[0].load.counters.kicks, reported.queues[3].load.counters.kicks), (11_000, 110));
        let short = controller("c", &[1, 0], &[], &queue_stats, StatDetail { queues: false, latency: false });
        assert_eq!((short.queues.len(), short.totals.counters), (0, reported.totals.counters));
    }

    #[test]
    fn counters_of_a_lun_are_not_mixed_up() {
        let counted = DiskCounters {
            slot: DiskSlot(77),
            reads: 1,
            writes: 2,
            others: 3,
            read_bytes: 4,
            written_bytes: 5,
            errors: 6,
            in_flight: 88,
            oldest_ns: Some(77),
            read_ns: 7,
            write_ns: 8,
            other_ns: 9,
        };
        let reported = serde_json::to_value(lun_counters(&counted)).unwrap();
        let names =
            ["reads", "writes", "others", "read_bytes", "written_bytes", "errors", "read_ns", "write_ns", "other_ns"];
        assert_eq!(reported.as_object().unwrap().len(), names.len());
        names.iter().zip(1..).for_each(|(name, number)| assert_eq!(reported[name], number, "{name}"));
    }
}
