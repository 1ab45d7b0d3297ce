//! Converts the engine's statistics to those of the admin socket. Every field is named on both sides, so that a field added to the engine
//! does not compile until it is reported here.

use mqblk_admin::model::{
    ControllerStat, Counters, DiskStat, Distribution, GrantStat, Health, HealthStop, Latency, LatencyParts, Load,
    LunCounters, LunStat, QueueStat, WorkerStat,
};
use mqblk_blkif::GrantCounters;
use mqblk_engine::{
    DiskCounters, DiskHealth, HealthStats, LatencyHistogram, QueueCounters, QueueLatency, QueueStats, WorkerStats,
};

use super::DiskInfo;
use crate::serve::luns::{LunEntry, LunState};

/// The guest interface of controllers.
pub const SCSI: &str = "virtio-scsi";
/// The role of request queues.
const REQUEST: &str = "request";
/// The roles of a controller's queues before the request queues. The first worker serves them.
const FIXED_ROLES: [&str; 2] = ["control", "event"];

/// How detailed the statistics are.
#[derive(Clone, Copy, Debug)]
pub struct StatDetail {
    /// True to include each queue.
    pub queues: bool,
    /// True to include the buckets of latency histograms.
    pub latency: bool,
}

/// Returns the statistics of a disk, out of those of its queues in order.
pub fn disk(about: &DiskInfo, queues: &[QueueStats], grants: Option<&GrantCounters>, detail: StatDetail) -> DiskStat {
    let mut totals = QueueStats::default();
    queues.iter().for_each(|stats| totals.add(stats));
    let queue = |(stats, number): (&QueueStats, u32)| QueueStat {
        role: REQUEST.to_owned(),
        queue: number,
        worker: about.queue_map.get(number as usize).copied().unwrap_or_default().into(),
        load: io_stats(stats, detail),
    };
    DiskStat {
        id: about.id.clone(),
        interface: about.interface.word().to_owned(),
        storage: about.storage.clone(),
        merge: about.plug.merge.word().to_owned(),
        merge_bytes: about.plug.merge_bytes.0,
        merge_segments: about.plug.merge_segments,
        queue_count: about.queue_map.len() as u32,
        totals: io_stats(&totals, detail),
        health: health(&about.health),
        in_flight_region: None,
        grants: grants.map(grant_stat),
        queues: if detail.queues { queues.iter().zip(0..).map(queue).collect() } else { Vec::new() },
    }
}

fn grant_stat(counters: &GrantCounters) -> GrantStat {
    let GrantCounters {
        copies,
        copy_calls,
        copy_errors,
        maps,
        map_calls,
        map_errors,
        unmaps,
        unmap_calls,
        persistent_hits,
        persistent_misses,
        persistent_purged,
        over_cap,
        over_budget,
        mapped_pages: held,
        stuck_pages: stuck,
        buffer_pages,
        indirect_requests,
        barriers,
        events_sent,
        events_received: events_taken,
    } = *counters;
    GrantStat {
        copies,
        copy_calls,
        copy_errors,
        maps,
        map_calls,
        map_errors,
        unmaps,
        unmap_calls,
        persistent_hits,
        persistent_misses,
        persistent_purged,
        over_cap,
        over_budget,
        held,
        stuck,
        buffer_pages,
        indirect_requests,
        barriers,
        events_sent,
        events_taken,
    }
}

/// Converts a disk's health.
fn health(of: &DiskHealth) -> Health {
    let HealthStats { stopped, parked, stops, retries } = of.stats();
    let stopped = stopped.map(|stop| HealthStop {
        stopped_ns: u64::try_from(stop.time.as_nanos()).unwrap_or(u64::MAX),
        reason: stop.why,
        enospc: stop.no_space,
    });
    Health {
        state: if stopped.is_some() { "stopped" } else { "running" }.to_owned(),
        on_error: of.policy().on_error.to_string(),
        on_enospc: of.policy().on_enospc.word().to_owned(),
        stopped,
        parked,
        stops,
        retries,
    }
}

/// Converts a request's age.
fn ns_to_ms(ns: Option<u64>) -> Option<u64> {
    ns.map(|ns| ns / 1_000_000)
}

/// Returns the statistics of a controller with these LUNs, out of those of its queues in order.
pub fn controller(
    id: &str,
    queue_map: &[u16],
    luns: &[&LunEntry],
    queues: &[QueueStats],
    detail: StatDetail,
) -> ControllerStat {
    let totals = request_totals(queues);
    let numbers = FIXED_ROLES.into_iter().map(|role| (role, 0, 0));
    let numbers = numbers.chain(queue_map.iter().zip(0..).map(|(worker, queue)| (REQUEST, queue, (*worker).into())));
    let queues = queues.iter().zip(numbers).map(|(stats, (role, queue, worker))| QueueStat {
        role: role.to_owned(),
        queue,
        worker,
        load: io_stats(stats, detail),
    });
    ControllerStat {
        id: id.to_owned(),
        interface: SCSI.to_owned(),
        queue_count: queue_map.len() as u32,
        totals: io_stats(&totals, detail),
        in_flight_region: None,
        luns: luns.iter().map(|one| lun(one, disk_counters(&totals, one))).collect(),
        queues: if detail.queues { queues.collect() } else { Vec::new() },
    }
}

/// Returns the number of a LUN's requests in flight, out of the statistics of its controller's queues.
pub fn in_flight(lun: &LunEntry, queues: &[QueueStats]) -> u32 {
    disk_counters(&request_totals(queues), lun).in_flight
}

/// Returns the sum of the request queues.
fn request_totals(queues: &[QueueStats]) -> QueueStats {
    let mut totals = QueueStats::default();
    queues.iter().skip(FIXED_ROLES.len()).for_each(|stats| totals.add(stats));
    totals
}

/// Returns the counters of a LUN's disk. Zero while it is being added: its slot may still have the counters of a removed LUN.
fn disk_counters(totals: &QueueStats, lun: &LunEntry) -> DiskCounters {
    let own = totals.disks.iter().find(|disk| disk.slot == lun.slot && !matches!(lun.state, LunState::Adding));
    own.copied().unwrap_or(DiskCounters::new(lun.slot))
}

fn lun(lun: &LunEntry, counted: DiskCounters) -> LunStat {
    let storage = lun.unit.as_ref().map(|unit| &unit.config().storage);
    let plug = storage.map(|storage| storage.plug).unwrap_or_default();
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

/// Converts a worker's statistics.
pub fn worker(number: u32, stats: &WorkerStats) -> WorkerStat {
    let WorkerStats { turns, empty_turns, sleeps, slept_ns, cpu_ns, merge_splits, ref queues } = *stats;
    WorkerStat {
        worker: number,
        queues: queues.len() as u32,
        turns,
        empty_turns,
        sleeps,
        slept_ns,
        cpu_ns,
        merge_splits,
    }
}

fn io_stats(stats: &QueueStats, detail: StatDetail) -> Load {
    let QueueStats { counters, latency, in_flight, oldest_ns, disks: _ } = stats;
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
        oldest_ms: ns_to_ms(*oldest_ns),
        counters: queue_counters(counters),
        latency: Latency { reads: parts(reads), writes: parts(writes), others: parts(others) },
    }
}

fn distribution(histogram: &LatencyHistogram, detail: StatDetail) -> Distribution {
    Distribution {
        count: histogram.count(),
        sum_ns: histogram.sum_ns(),
        p50_ns: histogram.percentile_ns(50.0),
        p99_ns: histogram.percentile_ns(99.0),
        p999_ns: histogram.percentile_ns(99.9),
        buckets: if detail.latency { histogram.buckets().collect() } else { Vec::new() },
    }
}

fn queue_counters(counters: &QueueCounters) -> Counters {
    let QueueCounters {
        reads,
        writes,
        flushes,
        discards,
        write_zeroes,
        answered_alone,
        malformed,
        read_bytes,
        written_bytes,
        errors,
        read_errors,
        write_errors,
        kicks,
        calls,
        calls_suppressed,
        turns,
        empty_turns,
        arms,
        poll_ns,
        requests,
        read_merges,
        write_merges,
        other_merges,
        other_bytes,
        calls_put_off,
    } = *counters;
    Counters {
        requests,
        reads,
        writes,
        flushes,
        discards,
        write_zeroes,
        answered_alone,
        malformed,
        errors,
        read_errors,
        write_errors,
        read_bytes,
        written_bytes,
        other_bytes,
        read_merges,
        write_merges,
        other_merges,
        kicks,
        calls,
        calls_suppressed,
        calls_put_off,
        turns,
        empty_turns,
        arms,
        poll_ns,
    }
}

#[cfg(test)]
#[path = "wire_tests.rs"]
mod tests;
