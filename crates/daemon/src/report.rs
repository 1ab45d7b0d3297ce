//! Converts the engine's statistics to those of the admin socket. Every field is named on both sides, so that a new
//! field of the engine does not compile until it is reported here.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use mqblk_admin::model::{
    self, ConnectionsStat, DiskStat, Distribution, FailedRequest, Health, HealthStop, Latency, LatencyParts, Load,
    PollingStat, QueueStat, ResourceStat, TenantBudgetStat, ThrottleStat, WorkerStat,
};
use mqblk_core::{BudgetUse, ConnectionStats, ResourceUse};
use mqblk_engine::{
    AnyDisk, DiskHealth, DiskLimits, HealthStats, LatencyHistogram, PlugOptions, Polling, QueueLatency, QueueStats,
    ThrottleStats, WorkerStats,
};

use crate::interface::StatDetail;
use crate::limits::current_limit_pairs;
use crate::out::{OutDisk, OutDisks};
use crate::pair::Pair;

/// The description of a disk for reports.
#[derive(Clone)]
pub struct DiskInfo {
    /// Its id.
    pub id: String,
    /// Its interface.
    pub interface: &'static str,
    /// Its storage backend.
    pub storage: String,
    /// The merging of adjacent requests.
    pub plug: PlugOptions,
    /// Its health.
    pub health: Arc<DiskHealth>,
    /// Its storage, which reports do not keep open. `None` without storage.
    pub disk: Option<Weak<AnyDisk>>,
    /// True if the size of its storage is watched.
    pub watch_size: bool,
    /// The worker of each queue, if the interface does not move queues.
    pub queue_map: Vec<u16>,
    /// Its settings, without id, interface, storage and limits.
    pub settings: Vec<Pair>,
}

impl DiskInfo {
    /// Returns the present merging of requests.
    pub fn current_plug(&self) -> PlugOptions {
        self.health.plug().unwrap_or(self.plug)
    }
}

/// The role of request queues.
pub const REQUEST: &str = "request";
/// Returns the statistics of a disk, from those of its queues in order. `map`: the worker of each queue.
pub fn disk(about: &DiskInfo, map: &[usize], queues: &[QueueStats], detail: StatDetail) -> DiskStat {
    let plug = about.current_plug();
    let mut totals = QueueStats::default();
    queues.iter().for_each(|stats| totals.add(stats));
    let queue = |(stats, number): (&QueueStats, u32)| QueueStat {
        role: REQUEST.to_owned(),
        queue: number,
        worker: map.get(number as usize).copied().unwrap_or_default() as u32,
        polling: polling(stats),
        load: io_stats(stats, detail),
    };
    DiskStat {
        id: about.id.clone(),
        interface: about.interface.to_owned(),
        storage: about.storage.clone(),
        merge: plug.merge.word().to_owned(),
        merge_bytes: plug.merge_bytes.0,
        merge_segments: plug.merge_segments,
        queue_count: map.len() as u32,
        totals: io_stats(&totals, detail),
        health: health(&about.health),
        connections: about.disk.as_ref().and_then(Weak::upgrade).and_then(|disk| connections(&*disk)),
        in_flight_region: None,
        budget: None,
        grants: None,
        queues: if detail.queues { queues.iter().zip(0..).map(queue).collect() } else { Vec::new() },
    }
}

/// Converts a tenant's use of its budget.
pub fn tenant_budget(used: &BudgetUse) -> TenantBudgetStat {
    let resource = |used: &ResourceUse| {
        let ResourceUse { used, highest, limit, refused } = *used;
        ResourceStat { used, highest, limit, refused }
    };
    let BudgetUse { mappings, address_space, guest_memory, delayed_connections, delayed_messages } = used;
    TenantBudgetStat {
        mappings: resource(mappings),
        address_space_bytes: resource(address_space),
        guest_memory_bytes: resource(guest_memory),
        delayed_connections: *delayed_connections,
        delayed_messages: *delayed_messages,
    }
}

/// Converts a disk's health.
pub fn health(of: &DiskHealth) -> Health {
    let HealthStats { stopped, parked, stops, retries, failed, last_failure } = of.stats();
    let stopped =
        stopped.map(|stop| HealthStop { stopped_ns: nanoseconds(stop.time), reason: stop.why, enospc: stop.no_space });
    let last_failure = last_failure.map(|(what, ago)| FailedRequest { what, ago_ns: nanoseconds(ago) });
    Health {
        state: if stopped.is_some() { "stopped" } else { "running" }.to_owned(),
        on_error: of.policy().on_error.to_string(),
        on_enospc: of.policy().on_enospc.word().to_owned(),
        stopped,
        parked,
        stops,
        retries,
        failed,
        last_failure,
        throttle: throttle(of.limits()),
    }
}

/// Returns a time in nanoseconds.
pub fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn throttle(limits: &DiskLimits) -> Option<ThrottleStat> {
    let ThrottleStats { throttled, throttled_ns, waiting } = limits.stats();
    let pairs = current_limit_pairs(limits);
    (!pairs.is_empty()).then(|| ThrottleStat { limits: settings_json(pairs), throttled, throttled_ns, waiting })
}

/// Converts the statistics of a disk's connections.
pub fn connections(disk: &AnyDisk) -> Option<ConnectionsStat> {
    let ConnectionStats { counters, unreachable, last_failure, last_error } = disk.connections()?;
    let unreachable_ns = unreachable.map(nanoseconds);
    Some(ConnectionsStat { counters, unreachable_ns, last_failure, last_error })
}

/// Converts a request's age to milliseconds.
pub fn ns_to_ms(ns: Option<u64>) -> Option<u64> {
    ns.map(|ns| ns / 1_000_000)
}

/// Converts a worker's statistics.
pub fn worker(number: u32, stats: &WorkerStats) -> WorkerStat {
    let WorkerStats { turns, empty_turns, sleeps, slept_ns, yields, away_ns, cpu_ns, merge_splits, ref queues } =
        *stats;
    WorkerStat {
        worker: number,
        queues: queues.len() as u32,
        turns,
        empty_turns,
        sleeps,
        slept_ns,
        yields,
        away_ns,
        cpu_ns,
        merge_splits,
    }
}

/// Converts the polling of a queue.
pub fn polling(stats: &QueueStats) -> Option<PollingStat> {
    let Polling { reason, window_ns, timer_ns } = stats.polling?;
    Some(PollingStat { reason: reason.word().to_owned(), window_ns, timer_ns })
}

/// Converts the statistics of a queue, or their sum.
pub fn io_stats(stats: &QueueStats, detail: StatDetail) -> Load {
    let QueueStats { counters, latency, in_flight, slots, oldest_ns, polling: _, disks: _ } = stats;
    let QueueLatency { reads, writes, others } = &**latency;
    let parts = |parts: &mqblk_engine::LatencyParts| {
        let mqblk_engine::LatencyParts { queued, device, publish, total } = parts;
        LatencyParts {
            queued: distribution(queued, detail),
            device: distribution(device, detail),
            publish: distribution(publish, detail),
            total: distribution(total, detail),
        }
    };
    Load {
        in_flight: (*in_flight).into(),
        slots: (*slots).into(),
        oldest_ms: ns_to_ms(*oldest_ns),
        counters: *counters,
        latency: Latency { reads: parts(reads), writes: parts(writes), others: parts(others) },
    }
}

fn distribution(histogram: &LatencyHistogram, detail: StatDetail) -> Distribution {
    let count = histogram.count();
    if count == 0 {
        // The common case in a daemon of many disks: skips the search of the buckets.
        return Distribution { sum_ns: histogram.sum_ns(), ..Distribution::default() };
    }
    Distribution {
        count,
        sum_ns: histogram.sum_ns(),
        p50_ns: histogram.percentile_ns(50.0),
        p99_ns: histogram.percentile_ns(99.0),
        p999_ns: histogram.percentile_ns(99.9),
        buckets: if detail.latency { histogram.buckets().collect() } else { Vec::new() },
    }
}

/// Converts the disks that are out.
pub fn out(disks: &OutDisks) -> Vec<model::OutDisk> {
    let now = Instant::now();
    let convert = |disk: OutDisk| model::OutDisk {
        controller: disk.settings.peek("controller").map(str::to_owned),
        id: disk.id,
        interface: disk.interface.to_owned(),
        why: disk.why,
        out_ns: nanoseconds(now.saturating_duration_since(disk.since)),
        tries: disk.tries,
        next_try_ns: nanoseconds(disk.next.saturating_duration_since(now)),
    };
    disks.list().into_iter().map(convert).collect()
}

/// Converts settings to a JSON object.
pub fn settings_json(pairs: impl IntoIterator<Item = Pair>) -> serde_json::Map<String, serde_json::Value> {
    pairs.into_iter().map(|(key, value)| (key.to_owned(), to_json(value))).collect()
}

/// Converts a setting's value. Settings are texts and numbers.
fn to_json(value: toml::Value) -> serde_json::Value {
    match value {
        toml::Value::Integer(number) => number.into(),
        toml::Value::String(text) => text.into(),
        other => other.to_string().into(),
    }
}

#[cfg(test)]
#[path = "report_tests.rs"]
pub mod tests;
