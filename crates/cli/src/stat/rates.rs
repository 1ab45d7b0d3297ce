//! Computes rates from two samples of the counters. Does no I/O and reads no clock.

use std::collections::BTreeMap;

use mqblk_admin::model::{
    ConnectionsStat, Distribution, Health, LatencyParts, Load, LunCounters, LunStat, OutDisk, QueueStat, Stat,
    TenantBudgetStat, WorkerStat,
};
use mqblk_core::ByteLen;
use serde::Serialize;

use super::grants::{self, GrantRates};
use super::throttle::{self, ThrottleRates};

const NS_PER_S: f64 = 1e9;
const NS_PER_US: f64 = 1e3;

/// The start of a report's interval.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Since {
    /// The daemon's start.
    Start,
    /// The previous sample.
    Previous,
}

/// The rates between two samples.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Report {
    /// The start of the interval.
    pub since: Since,
    /// Length of the interval in nanoseconds.
    pub interval_ns: u64,
    /// True if the daemon was restarted since the previous sample: the interval then begins with its start.
    pub restarted: bool,
    /// The disks.
    pub disks: Vec<DiskRates>,
    /// The controllers.
    pub controllers: Vec<ControllerRates>,
    /// The workers.
    pub workers: Vec<WorkerRates>,
    /// The disks and LUNs that are out.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub out: Vec<OutDisk>,
}

/// One disk.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct DiskRates {
    /// Its name.
    pub id: String,
    /// Sum of all its queues. `None` if the previous sample lacks the disk, or a counter was reset since.
    pub totals: Option<IoRates>,
    /// Its health at the end of the interval. Empty if the daemon is too old to report it.
    pub health: Health,
    /// Its VMM's use of its limits. `None` for Xen disks, and if the daemon is too old to report it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget: Option<TenantBudgetStat>,
    /// Its connections to its storage, at the end of the interval. `None` for storage that has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connections: Option<ConnectionsStat>,
    /// Grant operations; Xen disks only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grants: Option<GrantRates>,
    /// Rates of its rate limits. `None` without limits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub throttle: Option<ThrottleRates>,
    /// Its queues, if they were requested.
    pub queues: Vec<QueueRates>,
}

/// One controller.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct ControllerRates {
    /// Its name.
    pub id: String,
    /// Sum of all its request queues. `None` as for a disk.
    pub totals: Option<IoRates>,
    /// Its VMM's use of its limits. `None` for Xen disks, and if the daemon is too old to report it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget: Option<TenantBudgetStat>,
    /// Its LUNs, if they were requested.
    pub luns: Vec<LunRates>,
    /// Its queues, if they were requested.
    pub queues: Vec<QueueRates>,
}

/// One LUN.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct LunRates {
    /// Its name.
    pub id: String,
    /// Its target.
    pub target: u32,
    /// Its LUN.
    pub lun: u32,
    /// Its state: `adding`, `ready` or `removing`.
    pub state: String,
    /// Its health at the end of the interval. Empty if the daemon is too old to report it.
    pub health: Health,
    /// The connections of its logical unit, as of a disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connections: Option<ConnectionsStat>,
    /// Rates of its logical unit's rate limits. `None` without limits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub throttle: Option<ThrottleRates>,
    /// `None` as for a disk.
    pub rates: Option<LunIoRates>,
}

/// I/O rates of a LUN in an interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct LunIoRates {
    /// Reads completed per second.
    pub reads_per_s: f64,
    /// Writes completed per second.
    pub writes_per_s: f64,
    /// Flushes, discards and write-zeroes completed per second.
    pub others_per_s: f64,
    /// Bytes read per second.
    pub read_bytes_per_s: f64,
    /// Bytes written per second.
    pub written_bytes_per_s: f64,
    /// Mean length of reads and writes, in sectors of 512 bytes. 0 if there were none.
    pub request_sectors: f64,
    /// Mean number of requests in flight.
    pub queue_size: f64,
    /// Mean time of a request, in microseconds. 0 if there were none.
    pub await_us: f64,
    /// Mean time of a read.
    pub read_await_us: f64,
    /// Mean time of a write.
    pub write_await_us: f64,
    /// Mean length of a read, in bytes. 0 if there were none.
    pub read_request_bytes: f64,
    /// Mean length of a write, in bytes.
    pub write_request_bytes: f64,
    /// Requests in flight at the end of the interval.
    pub in_flight: u64,
    /// Age of the oldest of them, in milliseconds. `None` if there are none.
    pub oldest_ms: Option<u64>,
    /// Requests that did not succeed in the interval.
    pub errors: u64,
}

/// One queue.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct QueueRates {
    /// Its role: `request`, `control` or `event`.
    pub role: String,
    /// Its number among those of its role.
    pub queue: u32,
    /// The worker that serves it.
    pub worker: u32,
    /// `None` as for the disk.
    pub rates: Option<IoRates>,
}

/// I/O rates of a queue, or of all queues of a disk, in an interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct IoRates {
    /// Reads of the guest completed per second.
    pub reads_per_s: f64,
    /// Writes of the guest completed per second.
    pub writes_per_s: f64,
    /// Discards and write-zeroes completed per second.
    pub discards_per_s: f64,
    /// Flushes completed per second.
    pub flushes_per_s: f64,
    /// Reads merged into the one before them, per second.
    pub read_merges_per_s: f64,
    /// Writes merged into the one before them, per second.
    pub write_merges_per_s: f64,
    /// Bytes read per second.
    pub read_bytes_per_s: f64,
    /// Bytes written per second.
    pub written_bytes_per_s: f64,
    /// Mean length of the guest's reads and writes, in sectors of 512 bytes. 0 if there were none.
    pub request_sectors: f64,
    /// Mean number of requests in flight: the sum of their latencies, divided by the interval.
    pub queue_size: f64,
    /// Mean time of a request, in microseconds. 0, as its parts, if there were none.
    pub await_us: f64,
    /// Its part before the storage.
    pub queued_us: f64,
    /// Its part in the storage.
    pub device_us: f64,
    /// Its part after the storage.
    pub publish_us: f64,
    /// Mean time of a read, in microseconds. 0 if there were none.
    pub read_await_us: f64,
    /// Mean time of a write.
    pub write_await_us: f64,
    /// Mean length of a read, in bytes. 0 if there were none.
    pub read_request_bytes: f64,
    /// Mean length of a write, in bytes.
    pub write_request_bytes: f64,
    /// Median of request latencies, in microseconds. `None` if there were none.
    pub p50_us: Option<f64>,
    /// 99th percentile of request latencies.
    pub p99_us: Option<f64>,
    /// 99.9th percentile of request latencies.
    pub p999_us: Option<f64>,
    /// Time with requests in flight, in percent of the interval. For a disk: an estimate from its queues
    /// ([`busy_percent_of_all`]). `None` if the daemon is too old to count it.
    pub util_percent: Option<f64>,
    /// Time spent polling without finding a request, in percent of the interval. For a disk: the mean of its queues.
    pub poll_percent: f64,
    /// Kicks by the guest per second.
    pub kicks_per_s: f64,
    /// Calls to the guest per second.
    pub calls_per_s: f64,
    /// Requests in flight at the end of the interval.
    pub in_flight: u64,
    /// Age of the oldest of them, in milliseconds. `None` if there are none.
    pub oldest_ms: Option<u64>,
    /// Requests that did not succeed in the interval.
    pub errors: u64,
}

/// One worker.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct WorkerRates {
    /// Its number.
    pub worker: u32,
    /// Queues that it serves at the end of the interval.
    pub queues: u32,
    /// `None` if a counter was reset.
    pub rates: Option<TurnRates>,
}

/// Rates of a worker in an interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct TurnRates {
    /// CPU time, in percent of the interval.
    pub cpu_percent: f64,
    /// Turns that found work, per second.
    pub turns_per_s: f64,
    /// Turns that found no work, per second.
    pub empty_turns_per_s: f64,
    /// Sleeps per second.
    pub sleeps_per_s: f64,
    /// Time asleep, in percent of the interval.
    pub slept_percent: f64,
    /// Merged requests in the interval that failed in the storage and were split.
    pub merge_splits: u64,
}

/// Returns the rates between `before` and `now`. Without an earlier sample of the same run: since the daemon's start.
pub(crate) fn compare(before: Option<&Stat>, now: &Stat) -> Report {
    let same_run = before.filter(|before| before.started_ns() == now.started_ns() && before.time_ns <= now.time_ns);
    let interval_ns = same_run.map_or(now.uptime_ns, |before| now.time_ns - before.time_ns).max(1);
    let interval = Interval { since_start: same_run.is_none(), ns: interval_ns };
    let disks = now.disks.iter().map(|disk| {
        let found = same_run.and_then(|before| before.disks.iter().find(|before| before.id == disk.id));
        let before = found.map(|disk| (&disk.totals, disk.queues.as_slice()));
        let (totals, queues) = interval.device_rates(before, (&disk.totals, &disk.queues), disk.queue_count);
        let grants_before = found.and_then(|before| before.grants);
        let grants_before = grants_before.or_else(|| same_run.is_none().then(Default::default));
        let grants =
            disk.grants.zip(grants_before).and_then(|(now, before)| grants::rates_between(&before, &now, interval_ns));
        let (id, health, connections) = (disk.id.clone(), disk.health.clone(), disk.connections.clone());
        let throttle = interval.throttle_rates(found.map(|disk| &disk.health), &disk.health);
        DiskRates { id, totals, health, budget: disk.budget, connections, grants, throttle, queues }
    });
    let controllers = now.controllers.iter().map(|controller| {
        let found = same_run.and_then(|before| before.controllers.iter().find(|before| before.id == controller.id));
        let before = found.map(|before| (&before.totals, before.queues.as_slice()));
        let (totals, queues) =
            interval.device_rates(before, (&controller.totals, &controller.queues), controller.queue_count);
        let luns = controller.luns.iter().map(|lun| {
            let before = found.and_then(|before| before.luns.iter().find(|before| before.id == lun.id));
            let (id, state) = (lun.id.clone(), lun.state.clone());
            let (health, connections) = (lun.health.clone(), lun.connections.clone());
            let rates = interval.lun_rates(before, lun);
            let throttle = interval.throttle_rates(before.map(|lun| &lun.health), &lun.health);
            LunRates { id, target: lun.target, lun: lun.lun, state, health, connections, throttle, rates }
        });
        ControllerRates { id: controller.id.clone(), totals, budget: controller.budget, luns: luns.collect(), queues }
    });
    let workers = now.workers.iter().map(|worker| {
        let idle = WorkerStat { worker: worker.worker, ..WorkerStat::default() };
        let found = match same_run {
            None => Some(&idle),
            Some(before) => before.workers.iter().find(|before| before.worker == worker.worker),
        };
        let rates = found.and_then(|before| turn_rates(before, worker, interval_ns));
        WorkerRates { worker: worker.worker, queues: worker.queues, rates }
    });
    Report {
        since: if same_run.is_some() { Since::Previous } else { Since::Start },
        interval_ns,
        restarted: before.is_some() && same_run.is_none(),
        disks: disks.collect(),
        controllers: controllers.collect(),
        workers: workers.collect(),
        out: now.out.clone(),
    }
}

/// The totals and the queues of a device.
type DeviceSample<'a> = (&'a Load, &'a [QueueStat]);

/// An interval between two samples.
struct Interval {
    /// True if the interval begins with the daemon's start: all counters started at zero.
    since_start: bool,
    ns: u64,
}

impl Interval {
    /// Returns `None` for an item that the previous sample lacks: its counters at the start of the interval are
    /// unknown.
    fn io_rates(&self, before: Option<&Load>, now: &Load) -> Option<IoRates> {
        if self.since_start { io_rates(&Load::default(), now, self.ns) } else { io_rates(before?, now, self.ns) }
    }

    fn throttle_rates(&self, before: Option<&Health>, now: &Health) -> Option<ThrottleRates> {
        let nothing = Health::default();
        let before = if self.since_start { &nothing } else { before? };
        throttle::rates_between(before.throttle.as_ref(), now.throttle.as_ref(), self.ns)
    }

    fn lun_rates(&self, before: Option<&LunStat>, now: &LunStat) -> Option<LunIoRates> {
        let nothing = LunStat::default();
        let before = if self.since_start { &nothing } else { before? };
        let delta = |get: fn(&LunCounters) -> u64| get(&now.counters).checked_sub(get(&before.counters));
        let per_s = |count: u64| count as f64 * NS_PER_S / self.ns as f64;
        let [reads, writes, others] =
            [delta(|counters| counters.reads)?, delta(|counters| counters.writes)?, delta(|counters| counters.others)?];
        let (read, written) = (delta(|counters| counters.read_bytes)?, delta(|counters| counters.written_bytes)?);
        let (read_ns, write_ns) = (delta(|counters| counters.read_ns)?, delta(|counters| counters.write_ns)?);
        let ns = read_ns + write_ns + delta(|counters| counters.other_ns)?;
        Some(LunIoRates {
            reads_per_s: per_s(reads),
            writes_per_s: per_s(writes),
            others_per_s: per_s(others),
            read_bytes_per_s: per_s(read),
            written_bytes_per_s: per_s(written),
            request_sectors: mean(ByteLen(read + written).sectors().0 as f64, reads + writes),
            queue_size: ns as f64 / self.ns as f64,
            await_us: mean(ns as f64 / NS_PER_US, reads + writes + others),
            read_await_us: mean(read_ns as f64 / NS_PER_US, reads),
            write_await_us: mean(write_ns as f64 / NS_PER_US, writes),
            read_request_bytes: mean(read as f64, reads),
            write_request_bytes: mean(written as f64, writes),
            in_flight: now.in_flight,
            oldest_ms: now.oldest_ms,
            errors: delta(|counters| counters.errors)?,
        })
    }

    fn device_rates(
        &self,
        before: Option<DeviceSample<'_>>,
        (totals, queues): DeviceSample<'_>,
        queue_count: u32,
    ) -> (Option<IoRates>, Vec<QueueRates>) {
        let sums = self.io_rates(before.map(|(totals, _)| totals), totals);
        // The queues of a worker are polled at the same time: their sum could exceed 100 percent.
        let mean = |sums: IoRates| sums.poll_percent / f64::from(queue_count.max(1));
        let queues = queues.iter().map(|queue| {
            let same = |other: &&QueueStat| (&other.role, other.queue) == (&queue.role, queue.queue);
            let before = before.and_then(|(_, queues)| queues.iter().find(same));
            let rates = self.io_rates(before.map(|queue| &queue.load), &queue.load);
            QueueRates { role: queue.role.clone(), queue: queue.queue, worker: queue.worker, rates }
        });
        let queues: Vec<QueueRates> = queues.collect();
        let totals = sums.map(|sums| IoRates {
            poll_percent: mean(sums),
            util_percent: busy_percent_of_all(&queues).or(sums.util_percent.filter(|_| queue_count <= 1)),
            ..sums
        });
        (totals, queues)
    }
}

/// Returns `None` if a counter was reset.
fn io_rates(before: &Load, now: &Load, interval_ns: u64) -> Option<IoRates> {
    let (old, new) = (&before.counters, &now.counters);
    let seconds = interval_ns as f64 / NS_PER_S;
    let per_s = |new: u64, old: u64| Some(new.checked_sub(old)? as f64 / seconds);
    let transfers = (new.reads + new.writes).checked_sub(old.reads + old.writes)?;
    let bytes = (new.read_bytes + new.written_bytes).checked_sub(old.read_bytes + old.written_bytes)?;
    let part = |get: fn(&LatencyParts) -> &Distribution| LatencySum::between(before, now, get);
    let total = part(|parts| &parts.total)?;
    let (reads, writes) = (new.reads.checked_sub(old.reads)?, new.writes.checked_sub(old.writes)?);
    let class = |get: fn(&Load) -> &LatencyParts| LatencySum::of_class(&get(before).total, &get(now).total);
    let buckets = interval_buckets(before, now)?;
    let percentile = |percent| percentile_ns(&buckets, percent).map(|ns| ns as f64 / NS_PER_US);
    // All requests take time: without any busy time the daemon does not count it.
    let counts_busy = new.busy_ns > 0 || new.requests == 0;
    Some(IoRates {
        reads_per_s: per_s(new.reads, old.reads)?,
        writes_per_s: per_s(new.writes, old.writes)?,
        discards_per_s: per_s(new.discards + new.write_zeroes, old.discards + old.write_zeroes)?,
        flushes_per_s: per_s(new.flushes, old.flushes)?,
        read_merges_per_s: per_s(new.read_merges, old.read_merges)?,
        write_merges_per_s: per_s(new.write_merges, old.write_merges)?,
        read_bytes_per_s: per_s(new.read_bytes, old.read_bytes)?,
        written_bytes_per_s: per_s(new.written_bytes, old.written_bytes)?,
        request_sectors: mean(ByteLen(bytes).sectors().0 as f64, transfers),
        queue_size: total.sum_ns as f64 / interval_ns as f64,
        await_us: total.mean_us(),
        queued_us: part(|parts| &parts.queued)?.mean_us(),
        device_us: part(|parts| &parts.device)?.mean_us(),
        publish_us: part(|parts| &parts.publish)?.mean_us(),
        read_await_us: class(|load| &load.latency.reads)?.mean_us(),
        write_await_us: class(|load| &load.latency.writes)?.mean_us(),
        read_request_bytes: mean(new.read_bytes.checked_sub(old.read_bytes)? as f64, reads),
        write_request_bytes: mean(new.written_bytes.checked_sub(old.written_bytes)? as f64, writes),
        p50_us: percentile(50.0),
        p99_us: percentile(99.0),
        p999_us: percentile(99.9),
        util_percent: counts_busy.then_some(percent(new.busy_ns, old.busy_ns, interval_ns)?.min(100.0)),
        poll_percent: percent(new.poll_ns, old.poll_ns, interval_ns)?,
        kicks_per_s: per_s(new.kicks, old.kicks)?,
        calls_per_s: per_s(new.calls, old.calls)?,
        in_flight: now.in_flight,
        oldest_ms: now.oldest_ms,
        errors: new.errors.checked_sub(old.errors)?,
    })
}

/// Returns `None` if a counter was reset.
fn turn_rates(before: &WorkerStat, now: &WorkerStat, interval_ns: u64) -> Option<TurnRates> {
    let seconds = interval_ns as f64 / NS_PER_S;
    let per_s = |new: u64, old: u64| Some(new.checked_sub(old)? as f64 / seconds);
    Some(TurnRates {
        cpu_percent: percent(now.cpu_ns, before.cpu_ns, interval_ns)?,
        turns_per_s: per_s(now.turns, before.turns)?,
        empty_turns_per_s: per_s(now.empty_turns, before.empty_turns)?,
        sleeps_per_s: per_s(now.sleeps, before.sleeps)?,
        slept_percent: percent(now.slept_ns, before.slept_ns, interval_ns)?,
        merge_splits: now.merge_splits.checked_sub(before.merge_splits)?,
    })
}

fn percent(new_ns: u64, old_ns: u64, interval_ns: u64) -> Option<f64> {
    Some(new_ns.checked_sub(old_ns)? as f64 * 100.0 / interval_ns as f64)
}

fn mean(sum: f64, count: u64) -> f64 {
    if count == 0 { 0.0 } else { sum / count as f64 }
}

/// A component of the latency, over all types of requests, in an interval.
struct LatencySum {
    count: u64,
    sum_ns: u64,
}

impl LatencySum {
    fn between(before: &Load, now: &Load, get: fn(&LatencyParts) -> &Distribution) -> Option<LatencySum> {
        let all = |load: &Load| {
            let parts = [&load.latency.reads, &load.latency.writes, &load.latency.others].map(get);
            let add = |get: fn(&Distribution) -> u64| parts.iter().map(|part| get(part)).fold(0, u64::saturating_add);
            (add(|part| part.count), add(|part| part.sum_ns))
        };
        let ((count, sum), (old_count, old_sum)) = (all(now), all(before));
        Some(LatencySum { count: count.checked_sub(old_count)?, sum_ns: sum.checked_sub(old_sum)? })
    }

    fn of_class(before: &Distribution, now: &Distribution) -> Option<LatencySum> {
        let (count, sum_ns) = (now.count.checked_sub(before.count)?, now.sum_ns.checked_sub(before.sum_ns)?);
        Some(LatencySum { count, sum_ns })
    }

    fn mean_us(&self) -> f64 {
        mean(self.sum_ns as f64 / NS_PER_US, self.count)
    }
}

/// Returns the part of the interval in which any of these queues had requests in flight, in percent: 1 - (1 - a)(1 -
/// b)..., as if the queues were busy independently of each other. It is exact where one queue is used, or one is always
/// busy. `None` if no queue is known, or one does not report it.
fn busy_percent_of_all(queues: &[QueueRates]) -> Option<f64> {
    let requests = queues.iter().filter(|queue| ["request", ""].contains(&queue.role.as_str()));
    let busy: Option<Vec<f64>> = requests.map(|queue| queue.rates?.util_percent).collect();
    let busy = busy.filter(|busy| !busy.is_empty())?;
    let idle: f64 = busy.iter().map(|percent| 1.0 - percent / 100.0).product();
    Some(100.0 * (1.0 - idle))
}

/// Returns the latency in nanoseconds below which `percent` of the requests lie: the middle of its bucket. `None` if
/// there were none.
fn percentile_ns(buckets: &BTreeMap<(u64, u64), u64>, percent: f64) -> Option<u64> {
    let buckets = buckets.iter().map(|((lower, upper), count)| (*lower, *upper, *count));
    mqblk_engine::percentile_ns(buckets, percent)
}

/// Returns the buckets of the total latencies of all requests in the interval, by their bounds. `None` if a counter was
/// reset.
fn interval_buckets(before: &Load, now: &Load) -> Option<BTreeMap<(u64, u64), u64>> {
    let buckets = |load: &Load| {
        let mut all = BTreeMap::new();
        for parts in [&load.latency.reads, &load.latency.writes, &load.latency.others] {
            for (lower, upper, count) in &parts.total.buckets {
                *all.entry((*lower, *upper)).or_insert(0_u64) += count;
            }
        }
        all
    };
    let mut left = buckets(now);
    for (bounds, count) in buckets(before) {
        let entry = left.entry(bounds).or_insert(0);
        *entry = entry.checked_sub(count)?;
    }
    Some(left)
}

#[cfg(test)]
#[path = "rates_tests.rs"]
mod tests;
