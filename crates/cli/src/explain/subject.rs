//! The subject of an explanation: a disk, a controller, or a LUN of one.

use mqblk_admin::model::{ConnectionsStat, Health, QueueStat, Stat, TenantBudgetStat};

/// Most ids that a message lists.
const LISTED: usize = 16;

/// A disk, a controller or a LUN, in a sample.
pub(super) struct Subject<'a> {
    /// The requested id.
    pub(super) id: &'a str,
    /// The id of the disk or controller whose queues serve it.
    pub(super) device: &'a str,
    /// Queues that the device offers.
    pub(super) queue_count: u32,
    /// The device's queues.
    pub(super) queues: &'a [QueueStat],
    /// Its merge mode: `auto`, `on` or `off`. `None` for a controller.
    pub(super) merge: Option<&'a str>,
    /// Longest merged request, in bytes.
    pub(super) merge_bytes: u64,
    /// The kind of storage. `None` for a controller.
    pub(super) storage: Option<&'a str>,
    /// `None` for a controller.
    pub(super) health: Option<&'a Health>,
    pub(super) connections: Option<&'a ConnectionsStat>,
    pub(super) budget: Option<&'a TenantBudgetStat>,
    /// Age of the oldest request in flight, in milliseconds.
    pub(super) oldest_ms: Option<u64>,
    pub(super) in_flight: u64,
}

impl<'a> Subject<'a> {
    /// Finds the subject with this id; else returns the expected ids, for a message.
    pub(super) fn find(stat: &'a Stat, id: &str) -> Result<Subject<'a>, String> {
        let disk = stat.disks.iter().find(|disk| disk.id == id).map(|disk| Subject {
            id: &disk.id,
            device: &disk.id,
            queue_count: disk.queue_count,
            queues: &disk.queues,
            merge: Some(&disk.merge),
            merge_bytes: disk.merge_bytes,
            storage: Some(&disk.storage),
            health: Some(&disk.health),
            connections: disk.connections.as_ref(),
            budget: disk.budget.as_ref(),
            oldest_ms: disk.totals.oldest_ms,
            in_flight: disk.totals.in_flight,
        });
        let controllers = || stat.controllers.iter();
        let controller = || controllers().find(|controller| controller.id == id).map(Subject::of_controller);
        let lun = || {
            controllers().find_map(|controller| {
                let lun = controller.luns.iter().find(|lun| lun.id == id)?;
                Some(Subject {
                    id: &lun.id,
                    merge: Some(&lun.merge),
                    merge_bytes: lun.merge_bytes,
                    storage: Some(&lun.storage),
                    health: Some(&lun.health),
                    connections: lun.connections.as_ref(),
                    oldest_ms: lun.oldest_ms,
                    in_flight: lun.in_flight,
                    ..Subject::of_controller(controller)
                })
            })
        };
        disk.or_else(controller).or_else(lun).ok_or_else(|| {
            let disks = stat.disks.iter().map(|disk| disk.id.as_str());
            let others = controllers()
                .flat_map(|one| [one.id.as_str()].into_iter().chain(one.luns.iter().map(|lun| lun.id.as_str())));
            let ids: Vec<&str> = disks.chain(others).collect();
            let more = if ids.len() > LISTED { ", ..." } else { "" };
            format!("one of {}{more}", ids.iter().take(LISTED).copied().collect::<Vec<_>>().join(", "))
        })
    }

    fn of_controller(controller: &'a mqblk_admin::model::ControllerStat) -> Subject<'a> {
        Subject {
            id: &controller.id,
            device: &controller.id,
            queue_count: controller.queue_count,
            queues: &controller.queues,
            merge: None,
            merge_bytes: 0,
            storage: None,
            health: None,
            connections: None,
            budget: controller.budget.as_ref(),
            oldest_ms: controller.totals.oldest_ms,
            in_flight: controller.totals.in_flight,
        }
    }
}
