//! Disks, controllers with their LUNs, and the VMMs that use them.

use std::fmt;

use mqblk_admin::model::{ControllerStat, DiskStat, LunStat, QueueStat, ResourceStat, TenantBudgetStat};

use super::family::{Family, Item, Labels, MetricWriter, Value};
use super::grants::GRANTS;
use super::load::{LOAD, write_latencies};
use super::storage::{CONNECTIONS, HEALTH, LUN};
use crate::request::Detail;

/// Writes the families of all devices.
pub(super) fn write(
    writer: &mut MetricWriter<'_, '_>,
    disks: &[DiskStat],
    controllers: &[ControllerStat],
    detail: Detail,
) -> fmt::Result {
    write_disks(writer, disks)?;
    write_controllers(writer, controllers)?;
    write_luns(writer, controllers)?;
    if detail.queues {
        let queues = disks.iter().flat_map(|disk| disk.queues.iter().map(|queue| queue_item("disk", &disk.id, queue)));
        write_queues(writer, "mqblk_disk_queue", queues.collect())?;
        let queues =
            controllers.iter().flat_map(|it| it.queues.iter().map(|queue| queue_item("controller", &it.id, queue)));
        write_queues(writer, "mqblk_controller_queue", queues.collect())?;
    }
    let tenants = disks.iter().map(|disk| (&disk.id, &disk.budget));
    let tenants = tenants.chain(controllers.iter().map(|controller| (&controller.id, &controller.budget)));
    let tenants = tenants.filter_map(|(id, budget)| Some(Item { labels: label("tenant", id), of: budget.as_ref()? }));
    writer.families("mqblk_tenant_", TENANT, &tenants.collect::<Vec<_>>())
}

fn label(name: &'static str, value: &str) -> Labels {
    vec![(name, value.to_owned())]
}

/// Returns a part of each item that has it, with the item's labels.
fn parts<'a, T, U: ?Sized>(
    items: &'a [T],
    labels: impl Fn(&T) -> Labels,
    part: impl Fn(&'a T) -> Option<&'a U>,
) -> Vec<Item<&'a U>> {
    items.iter().filter_map(|item| Some(Item { labels: labels(item), of: part(item)? })).collect()
}

fn write_disks(writer: &mut MetricWriter<'_, '_>, disks: &[DiskStat]) -> fmt::Result {
    let labels = |disk: &DiskStat| label("disk", &disk.id);
    let info = parts(
        disks,
        |disk| {
            with(
                labels(disk),
                &[
                    ("interface", &disk.interface),
                    ("storage", &disk.storage),
                    ("merge", &disk.merge),
                    ("on_error", &disk.health.on_error),
                    ("on_enospc", &disk.health.on_enospc),
                ],
            )
        },
        Some,
    );
    writer.info("mqblk_disk", "How a disk is configured", &info)?;
    let prefix = "mqblk_disk_";
    writer.families(prefix, DISK, &parts(disks, labels, Some))?;
    let loads = parts(disks, labels, |disk| Some(&disk.totals));
    writer.families(prefix, LOAD, &loads)?;
    write_latencies(writer, prefix, &loads)?;
    writer.families(prefix, HEALTH, &parts(disks, labels, |disk| Some(&disk.health)))?;
    writer.families(prefix, CONNECTIONS, &parts(disks, labels, |disk| disk.connections.as_ref()))?;
    writer.families(prefix, GRANTS, &parts(disks, labels, |disk| disk.grants.as_ref()))
}

fn write_controllers(writer: &mut MetricWriter<'_, '_>, controllers: &[ControllerStat]) -> fmt::Result {
    let labels = |controller: &ControllerStat| label("controller", &controller.id);
    let info = parts(controllers, |it| with(labels(it), &[("interface", &it.interface)]), Some);
    writer.info("mqblk_controller", "How a controller is configured", &info)?;
    let prefix = "mqblk_controller_";
    writer.families(prefix, CONTROLLER, &parts(controllers, labels, Some))?;
    let loads = parts(controllers, labels, |controller| Some(&controller.totals));
    writer.families(prefix, LOAD, &loads)?;
    write_latencies(writer, prefix, &loads)
}

fn write_luns(writer: &mut MetricWriter<'_, '_>, controllers: &[ControllerStat]) -> fmt::Result {
    let luns =
        controllers.iter().flat_map(|controller| controller.luns.iter().map(|lun| (controller.id.as_str(), lun)));
    let luns: Vec<(&str, &LunStat)> = luns.collect();
    let labels = |(controller, lun): &(&str, &LunStat)| with(label("lun", &lun.id), &[("controller", controller)]);
    let info = parts(
        &luns,
        |it| {
            with(
                labels(it),
                &[
                    ("target", &it.1.target.to_string()),
                    ("address", &it.1.lun.to_string()),
                    ("logical_unit", &it.1.unit),
                    ("storage", &it.1.storage),
                    ("state", &it.1.state),
                ],
            )
        },
        |it| Some(&it.1),
    );
    writer.info("mqblk_lun", "Where a LUN is, and what its storage is", &info)?;
    let prefix = "mqblk_lun_";
    writer.families(prefix, LUN, &parts(&luns, labels, |(_, lun)| Some(*lun)))?;
    writer.families(prefix, HEALTH, &parts(&luns, labels, |(_, lun)| Some(&lun.health)))?;
    writer.families(prefix, CONNECTIONS, &parts(&luns, labels, |(_, lun)| lun.connections.as_ref()))
}

fn with(mut labels: Labels, more: &[(&'static str, &str)]) -> Labels {
    labels.extend(more.iter().map(|(name, value)| (*name, (*value).to_owned())));
    labels
}

fn queue_item<'a>(kind: &'static str, device: &str, queue: &'a QueueStat) -> Item<&'a QueueStat> {
    let labels = with(label(kind, device), &[("role", &queue.role), ("queue", &queue.queue.to_string())]);
    Item { labels, of: queue }
}

/// The worker has its own family: a queue that moves to another one keeps its counters.
fn write_queues(writer: &mut MetricWriter<'_, '_>, name: &str, queues: Vec<Item<&QueueStat>>) -> fmt::Result {
    let info = queues
        .iter()
        .map(|queue| Item { labels: with(queue.labels.clone(), &[("worker", &queue.of.worker.to_string())]), of: () });
    writer.info(name, "Which worker serves a queue", &info.collect::<Vec<_>>())?;
    let loads: Vec<_> = queues.into_iter().map(|queue| Item { labels: queue.labels, of: &queue.of.load }).collect();
    writer.families(&format!("{name}_"), LOAD, &loads)
}

const DISK: &[Family<DiskStat>] = &[
    Family::gauge("queues", "Queues that the disk offers", |it| Some(Value::Number(it.queue_count.into()))),
    Family::gauge("in_flight_region", "1 if the VMM keeps an in-flight region, else 0", |it| {
        it.in_flight_region.map(Value::Flag)
    }),
];

const CONTROLLER: &[Family<ControllerStat>] = &[
    Family::gauge("queues", "Request queues that the controller offers", |it| {
        Some(Value::Number(it.queue_count.into()))
    }),
    Family::gauge("luns", "LUNs of the controller", |it| Some(Value::Number(it.luns.len() as u64))),
    Family::gauge("in_flight_region", "1 if the VMM keeps an in-flight region, else 0", |it| {
        it.in_flight_region.map(Value::Flag)
    }),
];

/// Returns the value and its unit, if there is one.
fn limit(of: &ResourceStat, unit: fn(u64) -> Value) -> Option<Value> {
    of.limit.map(unit)
}

/// The use of its budget by a tenant: the VMM of a disk or a controller.
const TENANT: &[Family<TenantBudgetStat>] = &[
    Family::gauge("mappings", "Mappings of the VMM's memory", |it| Some(Value::Number(it.mappings.used))),
    Family::gauge("mappings_highest", "Most mappings that there were", |it| Some(Value::Number(it.mappings.highest))),
    Family::gauge("mappings_limit", "Most mappings that there may be", |it| limit(&it.mappings, Value::Number)),
    Family::counter("mappings_refused", "Times that the VMM was refused more mappings", |it| {
        Some(Value::Number(it.mappings.refused))
    }),
    Family::gauge("address_space", "Address space of the mappings", |it| {
        Some(Value::Bytes(it.address_space_bytes.used))
    }),
    Family::gauge("address_space_highest", "Most address space that there was", |it| {
        Some(Value::Bytes(it.address_space_bytes.highest))
    }),
    Family::gauge("address_space_limit", "Most address space that there may be", |it| {
        limit(&it.address_space_bytes, Value::Bytes)
    }),
    Family::counter("address_space_refused", "Times that the VMM was refused more address space", |it| {
        Some(Value::Number(it.address_space_bytes.refused))
    }),
    Family::gauge("guest_memory", "Guest memory of the VMM's memory table", |it| {
        Some(Value::Bytes(it.guest_memory_bytes.used))
    }),
    Family::gauge("guest_memory_highest", "Most guest memory that there was", |it| {
        Some(Value::Bytes(it.guest_memory_bytes.highest))
    }),
    Family::gauge("guest_memory_limit", "Most guest memory that there may be", |it| {
        limit(&it.guest_memory_bytes, Value::Bytes)
    }),
    Family::counter("guest_memory_refused", "Times that the VMM was refused more guest memory", |it| {
        Some(Value::Number(it.guest_memory_bytes.refused))
    }),
    Family::counter("delayed_connections", "Connections that waited because there were too many a second", |it| {
        Some(Value::Number(it.delayed_connections))
    }),
    Family::counter("delayed_messages", "Messages that waited because there were too many a second", |it| {
        Some(Value::Number(it.delayed_messages))
    }),
];
