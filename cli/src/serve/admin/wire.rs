//! From what the engine counts to what the admin socket says. Every field is named on both sides: one that is added to the
//! engine is an error here until it is told.

use mqblk_admin::model::{
    ControllerStat, Counters, DiskStat, Distribution, Latency, LatencyParts, Load, LunStat, QueueStat, WorkerStat,
};
use mqblk_engine::{LatencyHistogram, QueueCounters, QueueLatency, QueueReport, WorkerReport};

use super::DiskAbout;
use crate::serve::luns::Lun;

/// The guest interfaces of disks and of controllers.
pub const BLK: &str = "virtio-blk";
pub const SCSI: &str = "virtio-scsi";
/// What queues are for.
const REQUEST: &str = "request";
/// The queues of a controller before those for requests. The first worker has them.
const FIXED_ROLES: [&str; 2] = ["control", "event"];

/// How much of it is said.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Each queue.
    pub queues: bool,
    /// The buckets of distributions.
    pub latency: bool,
}

/// A disk, by its queues' reports in order.
pub fn disk(about: &DiskAbout, reports: &[QueueReport], shape: Shape) -> DiskStat {
    let mut totals = QueueReport::default();
    reports.iter().for_each(|report| totals.add(report));
    let queue = |(report, number): (&QueueReport, u32)| QueueStat {
        role: REQUEST.to_owned(),
        queue: number,
        worker: about.queue_map.get(number as usize).copied().unwrap_or_default().into(),
        load: load(report, shape),
    };
    DiskStat {
        id: about.id.clone(),
        interface: BLK.to_owned(),
        storage: about.storage.clone(),
        merge: about.plug.merge.word().to_owned(),
        merge_bytes: about.plug.merge_bytes.0,
        merge_segments: about.plug.merge_segments,
        queue_count: about.queue_map.len() as u32,
        totals: load(&totals, shape),
        queues: if shape.queues { reports.iter().zip(0..).map(queue).collect() } else { Vec::new() },
    }
}

/// A controller, by its queues' reports in order.
pub fn controller(
    id: &str,
    queue_map: &[u16],
    luns: Vec<LunStat>,
    reports: &[QueueReport],
    shape: Shape,
) -> ControllerStat {
    let mut totals = QueueReport::default();
    reports.iter().skip(FIXED_ROLES.len()).for_each(|report| totals.add(report));
    let numbers = FIXED_ROLES.into_iter().map(|role| (role, 0, 0));
    let numbers = numbers.chain(queue_map.iter().zip(0..).map(|(worker, queue)| (REQUEST, queue, (*worker).into())));
    let queues = reports.iter().zip(numbers).map(|(report, (role, queue, worker))| QueueStat {
        role: role.to_owned(),
        queue,
        worker,
        load: load(report, shape),
    });
    ControllerStat {
        id: id.to_owned(),
        interface: SCSI.to_owned(),
        queue_count: queue_map.len() as u32,
        totals: load(&totals, shape),
        luns,
        queues: if shape.queues { queues.collect() } else { Vec::new() },
    }
}

/// A LUN.
pub fn lun(lun: &Lun) -> LunStat {
    let backing = lun.unit.as_ref().map(|unit| &unit.config().backing);
    let plug = backing.map(|backing| backing.plug).unwrap_or_default();
    LunStat {
        id: lun.id.clone(),
        target: lun.place.target.into(),
        lun: lun.place.lun.into(),
        state: lun.state.word().to_owned(),
        unit: lun.unit.as_ref().map(|unit| unit.name().to_owned()).unwrap_or_default(),
        storage: backing.map(|backing| backing.storage.clone()).unwrap_or_default(),
        merge: plug.merge.word().to_owned(),
        merge_bytes: plug.merge_bytes.0,
        merge_segments: plug.merge_segments,
    }
}

/// A worker.
pub fn worker(number: u32, report: &WorkerReport) -> WorkerStat {
    let WorkerReport {
        turns,
        empty_turns,
        sleeps,
        slept_ns,
        cpu_ns,
        plug_holds,
        plug_hold_ns,
        merge_splits,
        ref queues,
    } = *report;
    WorkerStat {
        worker: number,
        queues: queues.len() as u32,
        turns,
        empty_turns,
        sleeps,
        slept_ns,
        cpu_ns,
        plug_holds,
        plug_hold_ns,
        merge_splits,
    }
}

fn load(report: &QueueReport, shape: Shape) -> Load {
    let QueueReport { counters, latency, in_flight, disks: _ } = report;
    let QueueLatency { reads, writes, others } = &**latency;
    let parts = |parts: &mqblk_engine::LatencyParts| {
        let mqblk_engine::LatencyParts { queued, device, publish, total } = parts;
        LatencyParts {
            queued: distribution(queued, shape),
            device: distribution(device, shape),
            publish: distribution(publish, shape),
            total: distribution(total, shape),
        }
    };
    Load {
        in_flight: (*in_flight).into(),
        counters: counted(counters),
        latency: Latency { reads: parts(reads), writes: parts(writes), others: parts(others) },
    }
}

fn distribution(histogram: &LatencyHistogram, shape: Shape) -> Distribution {
    Distribution {
        count: histogram.count(),
        sum_ns: histogram.sum_ns(),
        p50_ns: histogram.percentile_ns(50.0),
        p99_ns: histogram.percentile_ns(99.0),
        p999_ns: histogram.percentile_ns(99.9),
        buckets: if shape.latency { histogram.buckets().collect() } else { Vec::new() },
    }
}

fn counted(counters: &QueueCounters) -> Counters {
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
mod tests {
    use std::collections::BTreeSet;

    use mqblk_engine::PlugOptions;
    use serde_json::Value;

    use super::*;

    fn about() -> DiskAbout {
        DiskAbout {
            id: "vm1".to_owned(),
            storage: "file".to_owned(),
            plug: PlugOptions::default(),
            queue_map: vec![1, 0],
            settings: serde_json::Map::new(),
        }
    }

    /// A report with a number of its own in each field, `times` as large as those of another.
    fn made_up(times: u64) -> QueueReport {
        let counters = QueueCounters {
            reads: times,
            writes: 2 * times,
            flushes: 3 * times,
            discards: 4 * times,
            write_zeroes: 5 * times,
            answered_alone: 6 * times,
            malformed: 7 * times,
            read_bytes: 8 * times,
            written_bytes: 9 * times,
            errors: 10 * times,
            kicks: 11 * times,
            calls: 12 * times,
            calls_suppressed: 13 * times,
            turns: 14 * times,
            empty_turns: 15 * times,
            arms: 16 * times,
            poll_ns: 17 * times,
            requests: 18 * times,
            read_merges: 19 * times,
            write_merges: 20 * times,
            other_merges: 21 * times,
            other_bytes: 22 * times,
            calls_put_off: 23 * times,
            read_errors: 2 * times,
            write_errors: 3 * times,
        };
        let mut report = QueueReport { counters, in_flight: 24, ..QueueReport::default() };
        let latency = &mut report.latency;
        let parts = [&mut latency.reads, &mut latency.writes, &mut latency.others];
        for (kind, parts) in parts.into_iter().enumerate() {
            let of = [&mut parts.queued, &mut parts.device, &mut parts.publish, &mut parts.total];
            for (part, histogram) in of.into_iter().enumerate() {
                histogram.record(1000 * (1 + 4 * kind as u64 + part as u64), times);
            }
        }
        report
    }

    const ALL: Shape = Shape { queues: true, latency: true };

    #[test]
    fn no_counter_is_taken_for_another() {
        let told = serde_json::to_value(counted(&made_up(1).counters)).unwrap();
        let told = told.as_object().unwrap();
        let numbers: BTreeSet<u64> = told.values().map(|value| value.as_u64().unwrap()).collect();
        assert_eq!(numbers, (1..=23).collect());
        for (name, number) in [("reads", 1), ("read_bytes", 8), ("errors", 10), ("read_merges", 19), ("poll_ns", 17)] {
            assert_eq!(told[name], number, "{name}");
        }
    }

    #[test]
    fn a_disk_is_the_sum_of_its_queues() {
        let disk = disk(&about(), &[made_up(1), made_up(10)], ALL);
        assert_eq!((disk.id.as_str(), disk.interface.as_str(), disk.storage.as_str()), ("vm1", "virtio-blk", "file"));
        assert_eq!((disk.merge.as_str(), disk.merge_bytes, disk.merge_segments), ("auto", 1 << 20, 1024));
        assert_eq!((disk.queue_count, disk.queues.len()), (2, 2));
        assert_eq!((disk.queues[0].queue, disk.queues[0].worker), (0, 1));
        assert_eq!((disk.queues[1].queue, disk.queues[1].worker), (1, 0));
        assert_eq!(disk.queues[1].load.counters.write_merges, 200);
        assert_eq!((disk.totals.counters.requests, disk.totals.in_flight), (18 * 11, 48));
        let parts = &disk.totals.latency.writes;
        assert_eq!((parts.queued.sum_ns, parts.device.sum_ns), (11 * 5000, 11 * 6000));
        assert_eq!((parts.publish.sum_ns, parts.total.sum_ns), (11 * 7000, 11 * 8000));
        let total = &disk.totals.latency.others.total;
        assert_eq!((total.count, total.buckets.len()), (11, 1));
        let (lower, upper, count) = total.buckets[0];
        assert!(lower <= 12_000 && 12_000 < upper && count == 11, "{total:?}");
        assert!((lower..upper).contains(&total.p50_ns.unwrap()) && total.p50_ns == total.p999_ns);
    }

    #[test]
    fn what_was_not_asked_for_is_not_there() {
        let told = |shape| serde_json::to_value(disk(&about(), &[made_up(1), QueueReport::default()], shape)).unwrap();
        let short = told(Shape { queues: false, latency: false });
        assert!(short.get("queues").is_none());
        let total = &short["totals"]["latency"]["reads"]["total"];
        assert!(total.get("buckets").is_none() && total["p99_ns"].is_u64(), "{total}");
        let queues = told(Shape { queues: true, latency: false });
        assert_eq!(queues["queues"][0]["in_flight"], 24);
        assert_eq!(queues["queues"][1]["latency"]["reads"]["total"]["p99_ns"], Value::Null);
        let whole = told(ALL);
        assert!(whole["queues"][0]["latency"]["reads"]["total"]["buckets"].is_array());
        let back: DiskStat = serde_json::from_value(whole).unwrap();
        assert_eq!(back, disk(&about(), &[made_up(1), QueueReport::default()], ALL));
    }

    #[test]
    fn a_controller_is_the_sum_of_its_request_queues() {
        let reports = [made_up(1000), made_up(2000), made_up(1), made_up(10)];
        let told = controller("c", &[1, 0], Vec::new(), &reports, ALL);
        assert_eq!((told.id.as_str(), told.interface.as_str(), told.queue_count), ("c", "virtio-scsi", 2));
        assert_eq!(told.totals.counters.requests, 18 * 11);
        let queues: Vec<_> = told.queues.iter().map(|queue| (queue.role.as_str(), queue.queue, queue.worker)).collect();
        assert_eq!(queues, [("control", 0, 0), ("event", 0, 0), ("request", 0, 1), ("request", 1, 0)]);
        assert_eq!((told.queues[0].load.counters.kicks, told.queues[3].load.counters.kicks), (11_000, 110));
        let short = controller("c", &[1, 0], Vec::new(), &reports, Shape { queues: false, latency: false });
        assert_eq!((short.queues.len(), short.totals.counters), (0, told.totals.counters));
    }

    #[test]
    fn workers() {
        let report = WorkerReport {
            turns: 1,
            empty_turns: 2,
            sleeps: 3,
            slept_ns: 4,
            cpu_ns: 5,
            plug_holds: 6,
            plug_hold_ns: 7,
            merge_splits: 8,
            queues: Vec::new(),
        };
        let want = WorkerStat {
            worker: 9,
            queues: 0,
            turns: 1,
            empty_turns: 2,
            sleeps: 3,
            slept_ns: 4,
            cpu_ns: 5,
            plug_holds: 6,
            plug_hold_ns: 7,
            merge_splits: 8,
        };
        assert_eq!(worker(9, &report), want);
    }
}
