//! From two readings of the counters to rates. Pure: no clock, no socket.

use std::collections::BTreeMap;

use mqblk_admin::model::{Distribution, Health, LatencyParts, Load, LunCounters, LunStat, QueueStat, Stat, WorkerStat};
use mqblk_core::ByteLen;
use serde::Serialize;

use super::grants::{self, GrantRates};

const NS_PER_S: f64 = 1e9;
const NS_PER_US: f64 = 1e3;

/// What a report's interval begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Since {
    /// The daemon's start.
    Start,
    /// The reading before.
    Previous,
}

/// What happened between two readings.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// What the interval begins with.
    pub since: Since,
    /// Its length, in nanoseconds.
    pub interval_ns: u64,
    /// The reading before was of another run of the daemon, so that this is since the start.
    pub restarted: bool,
    /// The disks.
    pub disks: Vec<DiskRates>,
    /// The controllers.
    pub controllers: Vec<ControllerRates>,
    /// The workers.
    pub workers: Vec<WorkerRates>,
}

/// One disk.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DiskRates {
    /// Its name.
    pub id: String,
    /// Over all its queues. `None`: it was not there at the reading before, or its counters began anew since.
    pub totals: Option<LoadRates>,
    /// Its health at the end; of an older daemon nothing.
    pub health: Health,
    /// Of a Xen disk: what was done with the guest's pages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grants: Option<GrantRates>,
    /// Its queues, as far as they were read.
    pub queues: Vec<QueueRates>,
}

/// One controller.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ControllerRates {
    /// Its name.
    pub id: String,
    /// Over all its request queues. `None` as for a disk.
    pub totals: Option<LoadRates>,
    /// Its LUNs, as far as they were read.
    pub luns: Vec<LunRates>,
    /// Its queues, as far as they were read.
    pub queues: Vec<QueueRates>,
}

/// One LUN.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LunRates {
    /// Its name.
    pub id: String,
    /// Its target.
    pub target: u32,
    /// Its LUN.
    pub lun: u32,
    /// How far it is.
    pub state: String,
    /// Its health at the end; of an older daemon nothing.
    pub health: Health,
    /// `None` as for a disk.
    pub rates: Option<LunLoadRates>,
}

/// What a LUN did in the interval. As of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LunLoadRates {
    /// Reads finished in a second.
    pub reads_per_s: f64,
    /// Writes finished in a second.
    pub writes_per_s: f64,
    /// Flushes, discards and write-zeroes finished in a second.
    pub others_per_s: f64,
    /// Bytes read in a second.
    pub read_bytes_per_s: f64,
    /// Bytes written in a second.
    pub written_bytes_per_s: f64,
    /// Mean length of reads and writes, in sectors of 512 bytes. 0 without any.
    pub request_sectors: f64,
    /// Mean number of requests under way.
    pub queue_size: f64,
    /// Mean time of a request, in microseconds. 0 without any.
    pub await_us: f64,
    /// Requests in flight at the end.
    pub in_flight: u64,
    /// How long the oldest of them has been, in milliseconds. `None` without any.
    pub oldest_ms: Option<u64>,
    /// Requests that ended otherwise than done, in the interval.
    pub errors: u64,
}

/// One queue.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct QueueRates {
    /// What it is for: `request`, `control` or `event`.
    pub role: String,
    /// Its number among those of its role.
    pub queue: u32,
    /// The worker that serves it.
    pub worker: u32,
    /// `None` as for the disk.
    pub rates: Option<LoadRates>,
}

/// What a queue, or all of a disk's, did in the interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LoadRates {
    /// Reads of the guest finished in a second.
    pub reads_per_s: f64,
    /// Writes of the guest finished in a second.
    pub writes_per_s: f64,
    /// Discards and write-zeroes finished in a second.
    pub discards_per_s: f64,
    /// Flushes finished in a second.
    pub flushes_per_s: f64,
    /// Reads joined to the one before them, in a second.
    pub read_merges_per_s: f64,
    /// Writes joined to the one before them, in a second.
    pub write_merges_per_s: f64,
    /// Bytes read in a second.
    pub read_bytes_per_s: f64,
    /// Bytes written in a second.
    pub written_bytes_per_s: f64,
    /// Mean length of the guest's reads and writes, in sectors of 512 bytes. 0 without any.
    pub request_sectors: f64,
    /// Mean number of requests under way: the time that all took together, by the interval.
    pub queue_size: f64,
    /// Mean time of a request, in microseconds. 0 without any, as are its parts.
    pub await_us: f64,
    /// Its part before the storage.
    pub queued_us: f64,
    /// Its part in the storage.
    pub device_us: f64,
    /// Its part after the storage.
    pub publish_us: f64,
    /// 99 percent of requests took less, in microseconds. `None` without any.
    pub p99_us: Option<f64>,
    /// Time spent polling in vain, in percent of the interval; of a disk: the mean of its queues.
    pub poll_percent: f64,
    /// Kicks of the guest in a second.
    pub kicks_per_s: f64,
    /// Calls to the guest in a second.
    pub calls_per_s: f64,
    /// Requests in flight at the end.
    pub in_flight: u64,
    /// How long the oldest of them has been, in milliseconds. `None` without any.
    pub oldest_ms: Option<u64>,
    /// Requests that ended otherwise than done, in the interval.
    pub errors: u64,
}

/// One worker.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct WorkerRates {
    /// Its number.
    pub worker: u32,
    /// Queues that it serves at the end.
    pub queues: u32,
    /// `None`: its counters began anew.
    pub rates: Option<TurnRates>,
}

/// What a worker did in the interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct TurnRates {
    /// CPU time, in percent of the interval.
    pub cpu_percent: f64,
    /// Turns in which something happened, in a second.
    pub turns_per_s: f64,
    /// Turns in which nothing happened, in a second.
    pub empty_turns_per_s: f64,
    /// Times it slept, in a second.
    pub sleeps_per_s: f64,
    /// Time asleep, in percent of the interval.
    pub slept_percent: f64,
    /// Joined requests that the storage failed, in the interval.
    pub merge_splits: u64,
}

/// What happened between `before` and `now`, or since the daemon's start when there is no reading of the same run before.
pub fn compare(before: Option<&Stat>, now: &Stat) -> Report {
    let same_run = before.filter(|before| before.started_ns() == now.started_ns() && before.time_ns <= now.time_ns);
    let interval_ns = same_run.map_or(now.uptime_ns, |before| now.time_ns - before.time_ns).max(1);
    let interval = Interval { new: same_run.is_none(), ns: interval_ns };
    let disks = now.disks.iter().map(|disk| {
        let found = same_run.and_then(|before| before.disks.iter().find(|before| before.id == disk.id));
        let before = found.map(|disk| (&disk.totals, disk.queues.as_slice()));
        let (totals, queues) = interval.device(before, (&disk.totals, &disk.queues), disk.queue_count);
        let granted = found.and_then(|before| before.grants);
        let granted = granted.or_else(|| same_run.is_none().then(Default::default));
        let grants = disk.grants.zip(granted).and_then(|(now, before)| grants::between(&before, &now, interval_ns));
        DiskRates { id: disk.id.clone(), totals, health: disk.health.clone(), grants, queues }
    });
    let controllers = now.controllers.iter().map(|one| {
        let found = same_run.and_then(|before| before.controllers.iter().find(|before| before.id == one.id));
        let before = found.map(|before| (&before.totals, before.queues.as_slice()));
        let (totals, queues) = interval.device(before, (&one.totals, &one.queues), one.queue_count);
        let luns = one.luns.iter().map(|lun| {
            let before = found.and_then(|before| before.luns.iter().find(|before| before.id == lun.id));
            let (id, state) = (lun.id.clone(), lun.state.clone());
            let rates = interval.lun(before, lun);
            LunRates { id, target: lun.target, lun: lun.lun, state, health: lun.health.clone(), rates }
        });
        ControllerRates { id: one.id.clone(), totals, luns: luns.collect(), queues }
    });
    let workers = now.workers.iter().map(|worker| {
        let idle = WorkerStat { worker: worker.worker, ..WorkerStat::default() };
        let found = match same_run {
            None => Some(&idle),
            Some(before) => before.workers.iter().find(|before| before.worker == worker.worker),
        };
        let rates = found.and_then(|before| turns(before, worker, interval_ns));
        WorkerRates { worker: worker.worker, queues: worker.queues, rates }
    });
    Report {
        since: if same_run.is_some() { Since::Previous } else { Since::Start },
        interval_ns,
        restarted: before.is_some() && same_run.is_none(),
        disks: disks.collect(),
        controllers: controllers.collect(),
        workers: workers.collect(),
    }
}

/// The sums and the queues of a device.
type Loads<'a> = (&'a Load, &'a [QueueStat]);

/// What happens in an interval.
struct Interval {
    /// It begins with the daemon's start, so that everything began at nothing.
    new: bool,
    ns: u64,
}

impl Interval {
    /// `None` for what is new since the reading before, and so has no beginning that could be told.
    fn load(&self, before: Option<&Load>, now: &Load) -> Option<LoadRates> {
        if self.new { load(&Load::default(), now, self.ns) } else { load(before?, now, self.ns) }
    }

    fn lun(&self, before: Option<&LunStat>, now: &LunStat) -> Option<LunLoadRates> {
        let nothing = LunStat::default();
        let before = if self.new { &nothing } else { before? };
        let grown = |get: fn(&LunCounters) -> u64| get(&now.counters).checked_sub(get(&before.counters));
        let per_s = |count: u64| count as f64 * NS_PER_S / self.ns as f64;
        let [reads, writes, others] =
            [grown(|counters| counters.reads)?, grown(|counters| counters.writes)?, grown(|counters| counters.others)?];
        let (read, written) = (grown(|counters| counters.read_bytes)?, grown(|counters| counters.written_bytes)?);
        let ns = grown(|counters| counters.read_ns)?
            + grown(|counters| counters.write_ns)?
            + grown(|counters| counters.other_ns)?;
        Some(LunLoadRates {
            reads_per_s: per_s(reads),
            writes_per_s: per_s(writes),
            others_per_s: per_s(others),
            read_bytes_per_s: per_s(read),
            written_bytes_per_s: per_s(written),
            request_sectors: mean(ByteLen(read + written).sectors().0 as f64, reads + writes),
            queue_size: ns as f64 / self.ns as f64,
            await_us: mean(ns as f64 / NS_PER_US, reads + writes + others),
            in_flight: now.in_flight,
            oldest_ms: now.oldest_ms,
            errors: grown(|counters| counters.errors)?,
        })
    }

    fn device(
        &self,
        before: Option<Loads<'_>>,
        (totals, queues): Loads<'_>,
        queue_count: u32,
    ) -> (Option<LoadRates>, Vec<QueueRates>) {
        let sums = self.load(before.map(|(totals, _)| totals), totals);
        // Several queues of one worker are polled at the same time.
        let mean = |sums: LoadRates| sums.poll_percent / f64::from(queue_count.max(1));
        let totals = sums.map(|sums| LoadRates { poll_percent: mean(sums), ..sums });
        let queues = queues.iter().map(|queue| {
            let same = |other: &&QueueStat| (&other.role, other.queue) == (&queue.role, queue.queue);
            let before = before.and_then(|(_, queues)| queues.iter().find(same));
            let rates = self.load(before.map(|queue| &queue.load), &queue.load);
            QueueRates { role: queue.role.clone(), queue: queue.queue, worker: queue.worker, rates }
        });
        (totals, queues.collect())
    }
}

/// `None` when a counter went down.
fn load(before: &Load, now: &Load, interval_ns: u64) -> Option<LoadRates> {
    let (old, new) = (&before.counters, &now.counters);
    let seconds = interval_ns as f64 / NS_PER_S;
    let per_s = |new: u64, old: u64| Some(new.checked_sub(old)? as f64 / seconds);
    let transfers = (new.reads + new.writes).checked_sub(old.reads + old.writes)?;
    let bytes = (new.read_bytes + new.written_bytes).checked_sub(old.read_bytes + old.written_bytes)?;
    let part = |get: fn(&LatencyParts) -> &Distribution| Part::between(before, now, get);
    let total = part(|parts| &parts.total)?;
    Some(LoadRates {
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
        p99_us: percentile_ns(before, now, 99.0)?.map(|ns| ns as f64 / NS_PER_US),
        poll_percent: percent(new.poll_ns, old.poll_ns, interval_ns)?,
        kicks_per_s: per_s(new.kicks, old.kicks)?,
        calls_per_s: per_s(new.calls, old.calls)?,
        in_flight: now.in_flight,
        oldest_ms: now.oldest_ms,
        errors: new.errors.checked_sub(old.errors)?,
    })
}

/// `None` when a counter went down.
fn turns(before: &WorkerStat, now: &WorkerStat, interval_ns: u64) -> Option<TurnRates> {
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

/// One part of the latency of all kinds of requests, in the interval.
struct Part {
    count: u64,
    sum_ns: u64,
}

impl Part {
    fn between(before: &Load, now: &Load, get: fn(&LatencyParts) -> &Distribution) -> Option<Part> {
        let all = |load: &Load| {
            let parts = [&load.latency.reads, &load.latency.writes, &load.latency.others].map(get);
            let add = |get: fn(&Distribution) -> u64| parts.iter().map(|part| get(part)).fold(0, u64::saturating_add);
            (add(|part| part.count), add(|part| part.sum_ns))
        };
        let ((count, sum), (old_count, old_sum)) = (all(now), all(before));
        Some(Part { count: count.checked_sub(old_count)?, sum_ns: sum.checked_sub(old_sum)? })
    }

    fn mean_us(&self) -> f64 {
        mean(self.sum_ns as f64 / NS_PER_US, self.count)
    }
}

/// Below which total latency `percent` of the interval's requests lie: the middle of its bucket. `None`: a counter went down;
/// `Some(None)`: there were no requests.
fn percentile_ns(before: &Load, now: &Load, percent: f64) -> Option<Option<u64>> {
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
    let left = left.iter().map(|((lower, upper), count)| (*lower, *upper, *count));
    Some(mqblk_engine::percentile_ns(left, percent))
}

#[cfg(test)]
#[path = "rates_tests.rs"]
mod tests;
