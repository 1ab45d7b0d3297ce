//! The daemon's counters match the requests of its driver exactly: while queues are attached and detached, with and
//! without merging, with immediate and deferred calls.

use std::time::Duration;

use mqblk_core::Sector512;
use mqblk_driver::virtio_blk::{BlkQueueSet, BlkStatus, DataSegment, SectorRange};
use mqblk_engine::{Coalesce, MergeMode, PlugOptions, PollPolicy, QueueCounters, QueuePolicy, QueueStats};
use mqblk_memory::GuestAddress;
use mqblk_tests::in_process::{Plan, Rig, disk};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

const QUEUES: usize = 3;
const DEPTH: u32 = 32;
const SECTORS: u64 = 4096;

/// Sends random requests and adds them to the expected counters.
fn expect(counters: &mut QueueCounters, random: &mut SmallRng, set: &mut BlkQueueSet, index: usize) {
    let count = random.random_range(1..=DEPTH);
    let queue = &mut set.queues_mut()[index];
    let start = random.random_range(0..SECTORS - u64::from(DEPTH));
    for user in 0..count {
        let data = DataSegment { address: GuestAddress(queue.data().0.0 + u64::from(user) * 512), len: 512 };
        let sector = Sector512(start + u64::from(user));
        let range = |sectors| SectorRange { start: sector, sectors, unmap: false };
        counters.requests += 1;
        match random.random_range(0..100) {
            0..40 => {
                counters.reads += 1;
                counters.read_bytes += 512;
                queue.read(user, sector, data)
            }
            40..80 => {
                counters.writes += 1;
                counters.written_bytes += 512;
                queue.write(user, sector, data)
            }
            80..84 => {
                counters.flushes += 1;
                queue.flush(user)
            }
            84..88 => {
                counters.discards += 1;
                counters.other_bytes += 3 * 512;
                queue.discard(user, &[range(1), range(2)])
            }
            88..92 => {
                counters.write_zeroes += 1;
                counters.other_bytes += 512;
                queue.write_zeroes(user, &[range(1)])
            }
            92..96 => {
                counters.answered_alone += 1;
                queue.get_id(user, data.address)
            }
            _ => {
                counters.reads += 1;
                counters.read_errors += 1;
                counters.errors += 1;
                queue.read(user, Sector512(SECTORS), data)
            }
        }
        .expect("the ring has room");
    }
    queue.publish().expect("the kick can be sent");
    let mut left = count;
    while left > 0 {
        let queue = &mut set.queues_mut()[index];
        queue.poll().expect("a sound ring");
        while let Some(done) = queue.reap().expect("a sound ring") {
            assert!(done.status == BlkStatus::Ok || done.status == BlkStatus::IoError, "{:?}", done.status);
            left -= 1;
        }
        if left > 0 {
            set.wait(1).expect("an answer comes");
        }
    }
}

/// Returns the counters that the driver knows too.
fn known(report: &QueueStats) -> QueueCounters {
    QueueCounters {
        kicks: 0,
        calls: 0,
        calls_suppressed: 0,
        calls_put_off: 0,
        turns: 0,
        empty_turns: 0,
        arms: 0,
        poll_ns: 0,
        busy_ns: 0,
        read_merges: 0,
        write_merges: 0,
        other_merges: 0,
        ..report.counters
    }
}

fn run(merge: MergeMode, coalesce: Coalesce, seed: u64) {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    file.as_file().set_len(SECTORS * 512).expect("its size");
    let path = file.path().to_str().expect("a plain path");
    let plug = PlugOptions { merge, ..PlugOptions::default() };
    let poll = PollPolicy::Static(Duration::from_micros(20));
    let (disk, policy) = (disk("file", &[("path", path)]), QueuePolicy { poll, coalesce });
    let plan = Plan { disk, workers: 2, policy, plug, health: Default::default() };
    let (mut rig, mut sets) = Rig::new(plan, |options| {
        options.queues = QUEUES as u16;
        options.depth = DEPTH as u16;
    });
    let mut random = SmallRng::seed_from_u64(seed);
    let mut expected = [QueueCounters::default(); QUEUES];
    let (mut kicks, mut calls) = (0, 0);
    for attachment in 0..4 {
        for _ in 0..60 {
            let index = random.random_range(0..QUEUES);
            expect(&mut expected[index], &mut random, &mut sets[0], index);
        }
        let report = rig.report();
        for (index, (report, expected)) in report.iter().zip(&expected).enumerate() {
            assert_eq!(known(report), *expected, "queue {index} in attachment {attachment}, seed {seed}");
            assert_eq!(report.in_flight, 0);
            let latency = &report.latency;
            let disk = expected.requests - expected.answered_alone;
            let others = expected.flushes + expected.discards + expected.write_zeroes;
            let counted = [&latency.reads, &latency.writes, &latency.others].map(|parts| parts.total.count());
            assert_eq!(counted, [expected.reads, expected.writes, others]);
            assert_eq!(counted.iter().sum::<u64>(), disk);
        }
        let sum = |what: fn(&QueueCounters) -> u64| report.iter().map(|report| what(&report.counters)).sum::<u64>();
        // Concurrent kicks and calls count as one: never more than were sent.
        kicks += sets[0].kicks();
        calls += sets[0].calls().expect("the counter can be read");
        assert!((1..=kicks).contains(&sum(|it| it.kicks)), "{} of {kicks} kicks", sum(|it| it.kicks));
        assert!((1..=sum(|it| it.calls)).contains(&calls), "{calls} of {} calls", sum(|it| it.calls));
        let merges = sum(|it| it.read_merges + it.write_merges + it.other_merges);
        assert_eq!(merges > 0, merge == MergeMode::On, "{merges} merges");
        (rig, sets) = rig.reconnect(sets);
    }
    rig.stop(sets);
}

#[test]
fn merging_off() {
    run(MergeMode::Off, Coalesce::default(), 1);
}

#[test]
fn merging_on_and_calls_deferred() {
    run(MergeMode::On, Coalesce { delay: Duration::from_micros(200), answers: 4 }, 2);
}
