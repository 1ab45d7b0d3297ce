//! Disks with limits: the worker is stepped, and the clock of the limits is the test's.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use mqblk_core::{ByteLen, DiskSlot, Op, Outcome};

use super::stopping::{Attached, DISCARD, DONE, EIO, Rig, STOP, WRITE};
use super::*;
use crate::errors::{DiskHealth, ErrorPolicy};
use crate::limits::{DiskLimits, IoLimit, IoLimits, LimitClock, LimitGroup, LimitKind, ThrottleStats};
use crate::options::MergeMode;

const MS: u64 = 1_000_000;
/// A limit of one request in 100 ms: the bucket holds one.
const TEN_A_SECOND: IoLimit = IoLimit { rate: 10, burst: None };
const ABORTED: Outcome = Outcome::Aborted;

struct Limited {
    rig: Rig,
    clock: Arc<AtomicU64>,
}

impl Limited {
    fn new(limits: IoLimits, policy: ErrorPolicy, merge: MergeMode) -> Limited {
        let clock = Arc::new(AtomicU64::new(1000 * MS));
        let limits = DiskLimits::with_clock(limits, None, LimitClock::manual(&clock));
        let health = Arc::new(DiskHealth::with_limits("trial", policy, limits));
        Limited { rig: Rig::of(&health, merge), clock }
    }

    fn of(kind: LimitKind, limit: IoLimit) -> Limited {
        let limits = IoLimits::default().with(kind, limit);
        Limited::new(limits, ErrorPolicy::default(), MergeMode::Off)
    }

    /// Lets time pass. Returns the requests that completed then.
    fn after_ms(&mut self, ms: u64) -> Vec<u64> {
        self.clock.fetch_add(ms * MS, Ordering::Relaxed);
        sectors(&self.rig.run_until_idle())
    }

    fn stats(&self) -> ThrottleStats {
        self.rig.health.limits().stats()
    }
}

fn sectors(completed: &[(u64, Outcome)]) -> Vec<u64> {
    assert!(completed.iter().all(|(_, outcome)| matches!(outcome, Outcome::Done(_))), "{completed:?}");
    completed.iter().map(|(sector, _)| *sector).collect()
}

/// This many reads, of sectors from 1 on that do not touch.
fn reads(count: u64) -> Vec<(Op, u64)> {
    (0..count).map(|at| (Op::Read, 1 + 2 * at)).collect()
}

#[test]
fn requests_wait_in_the_engine_until_the_limit_allows_them() {
    let mut limited = Limited::of(LimitKind::Iops, TEN_A_SECOND);
    assert_eq!(limited.rig.submit(&reads(4)), [(1, DONE)]);
    assert_eq!(limited.rig.seen(), [1], "the storage does not know the others");
    assert_eq!((limited.stats().waiting, limited.rig.in_flight()), (3, 3));
    // Nothing happens before it is due, and a sleeping worker wakes then.
    let sleep = limited.rig.worker.channels.deadline().expect("it is due at some time");
    let wait = sleep.saturating_duration_since(Instant::now());
    assert!(wait > Duration::from_millis(50) && wait < Duration::from_millis(101), "{wait:?}");
    assert_eq!(limited.after_ms(99), []);
    assert_eq!(limited.after_ms(2), [3]);
    assert_eq!(limited.after_ms(98), []);
    assert_eq!(limited.after_ms(1), [5]);
    assert_eq!(limited.after_ms(99), []);
    assert_eq!(limited.after_ms(1), [7]);
    let ThrottleStats { throttled, throttled_ns, waiting } = limited.stats();
    assert_eq!((throttled, throttled_ns, waiting), (3, (101 + 200 + 300) * MS, 0));
    assert!(limited.rig.worker.channels.deadline().is_none());
    // Unused tokens are kept up to the bucket's depth.
    assert_eq!(limited.after_ms(10_000), []);
    assert_eq!(sectors(&limited.rig.submit(&reads(3))), [1]);
}

#[test]
fn reads_and_writes_have_limits_of_their_own() {
    let limits = IoLimits::default().with(LimitKind::IopsWrite, TEN_A_SECOND);
    let mut limited = Limited::new(limits, ErrorPolicy::default(), MergeMode::Off);
    let requests = [(WRITE, 1), (WRITE, 3), (Op::Read, 5), (WRITE, 7), (Op::Read, 9)];
    assert_eq!(sectors(&limited.rig.submit(&requests)), [1, 5, 9], "reads do not wait for writes");
    assert_eq!(limited.after_ms(100), [3]);
    assert_eq!(limited.after_ms(100), [7]);
    // A limit of all requests and one of writes.
    let limits = IoLimits::default()
        .with(LimitKind::Iops, IoLimit { rate: 30, burst: None })
        .with(LimitKind::IopsWrite, TEN_A_SECOND);
    let mut limited = Limited::new(limits, ErrorPolicy::default(), MergeMode::Off);
    assert_eq!(sectors(&limited.rig.submit(&requests)), [1, 5, 9]);
    assert_eq!(limited.after_ms(1000), [3, 7]);
    assert_eq!(limited.after_ms(1000), []);
    // In the order of arrival, as far as the limits allow.
    assert_eq!(
        sectors(&limited.rig.submit(&[(Op::Read, 11), (WRITE, 13), (WRITE, 15), (Op::Read, 17), (Op::Read, 19)])),
        [11, 13, 17]
    );
    assert_eq!(limited.after_ms(34), [19]);
    assert_eq!(limited.after_ms(67), [15]);
}

#[test]
fn bandwidth_counts_bytes_and_flushes_and_discards_have_none() {
    // 5 sectors a tenth of a second.
    let limit = IoLimit { rate: 50 * 512, burst: None };
    let mut limited = Limited::of(LimitKind::Bandwidth, limit);
    let zeroes = Op::WriteZeroes { may_unmap: false, fua: false };
    let requests = [
        (Op::Read, 1),
        (WRITE, 3),
        (zeroes, 5),
        (Op::Read, 7),
        (WRITE, 9),
        (zeroes, 11),
        (DISCARD, 100),
        (Op::Flush, 99),
    ];
    // The discard has three ranges. It waits with the writes, and costs nothing when its turn comes.
    let done = limited.rig.submit(&requests);
    assert_eq!(sectors(&done), [1, 3, 5, 7, 9, 99], "a flush passes");
    assert_eq!(limited.after_ms(21), [11, 100]);
    let mut limited = Limited::of(LimitKind::Iops, TEN_A_SECOND);
    assert_eq!(limited.rig.submit(&[(DISCARD, 20), (Op::Flush, 99)]), [(99, Outcome::Done(ByteLen::ZERO))]);
    assert_eq!((limited.after_ms(101), limited.after_ms(101)), (vec![], vec![20]), "each range is a request");
}

#[test]
fn throttled_requests_that_pass_together_are_merged() {
    let limits = IoLimits::default().with(LimitKind::Iops, IoLimit { rate: 1000, burst: None });
    let mut limited = Limited::new(limits, ErrorPolicy::default(), MergeMode::On);
    // The bucket holds 100 requests. Neighbours: merged as far as they come in one turn.
    let discards: Vec<(Op, u64)> = (0..33).map(|at| (DISCARD, at * 10)).collect();
    assert_eq!(limited.rig.submit(&discards).len(), 33);
    limited.rig.seen();
    assert_eq!(limited.rig.submit(&[(Op::Read, 1), (Op::Read, 2), (Op::Read, 3), (Op::Read, 5)]), [(1, DONE)]);
    assert_eq!(limited.after_ms(1), [2]);
    let before = limited.rig.worker.channels.merges(limited.rig.attached_at.0);
    limited.rig.seen();
    // Zeroes of sectors 1 to 6.
    let zeroes = Op::WriteZeroes { may_unmap: false, fua: false };
    limited.rig.submit(&(11..17).map(|sector| (zeroes, sector)).collect::<Vec<_>>());
    assert_eq!(limited.after_ms(20), [3, 5, 11, 12, 13, 14, 15, 16]);
    assert!(limited.rig.seen().contains(&11));
    let merges = limited.rig.worker.channels.merges(limited.rig.attached_at.0);
    assert_eq!(merges.others - before.others, 5);
}

#[test]
fn a_throttled_request_can_be_cancelled() {
    let mut limited = Limited::of(LimitKind::Iops, TEN_A_SECOND);
    limited.rig.submit(&[(Op::Read, 1), (Op::Read, 3), (WRITE, 5), (WRITE, 7)]);
    for sector in [5, 3] {
        limited.rig.guest.lock().unwrap().cancel = Some(sector);
        limited.rig.waker.wake();
        assert_eq!(limited.rig.run_until_idle(), [(sector, ABORTED)]);
    }
    assert_eq!((limited.stats().waiting, limited.stats().throttled), (1, 0));
    assert_eq!(limited.after_ms(101), [7]);
    assert_eq!(limited.rig.seen(), [1, 7]);
}

#[test]
fn a_queue_that_is_drained_is_served_at_its_limit() {
    let mut limited = Limited::of(LimitKind::Iops, TEN_A_SECOND);
    limited.rig.submit(&reads(4));
    let (slot, generation) = limited.rig.attached_at;
    let (done, left) = std::sync::mpsc::sync_channel(1);
    limited.rig.worker.drain(slot, generation, done);
    for served in [3, 5] {
        assert_eq!(limited.rig.run_until_idle(), []);
        assert_eq!(limited.after_ms(101), [served]);
        assert!(left.try_recv().is_err());
    }
    assert_eq!(limited.after_ms(101), [7]);
    assert!(left.try_recv().is_ok());
    assert_eq!((limited.stats().waiting, limited.stats().throttled), (0, 3));
}

#[test]
fn a_queue_whose_process_ends_does_not_wait_for_its_limits() {
    let mut limited = Limited::of(LimitKind::Iops, TEN_A_SECOND);
    limited.rig.submit(&reads(5));
    let (slot, generation) = limited.rig.attached_at;
    let (done, left) = std::sync::mpsc::sync_channel(1);
    limited.rig.worker.drain(slot, generation, done);
    assert_eq!(limited.rig.run_until_idle(), []);
    limited.rig.worker.pass_throttled(slot, generation);
    assert_eq!(sectors(&limited.rig.run_until_idle()), [3, 5, 7, 9]);
    assert!(left.try_recv().is_ok());
}

#[test]
fn requests_that_are_recorded_go_back_unserved() {
    let mut limited = Limited::of(LimitKind::Iops, TEN_A_SECOND);
    limited.rig.submit(&[(Op::Read, 1), (Op::Read, 3), (DISCARD, 20), (WRITE, 5)]);
    let (slot, generation) = limited.rig.attached_at;
    let (done, left) = std::sync::mpsc::sync_channel(1);
    limited.rig.worker.drain_keeping_parked(slot, generation, done);
    let abandoned = limited.rig.worker.abandon_unserved(slot, generation);
    assert_eq!(abandoned, 3, "the ranges of a discard are one request");
    let served = (limited.rig.run_until_idle(), limited.rig.seen(), limited.rig.abandoned());
    assert_eq!(served, (vec![], vec![1], vec![3, 5, 20]));
    assert_eq!((limited.stats().waiting, left.try_recv().is_ok()), (0, true));
    assert_eq!(limited.after_ms(10_000), []);
}

#[test]
fn a_queue_that_moves_is_served_at_its_limit() {
    let mut limited = Limited::of(LimitKind::Iops, TEN_A_SECOND);
    limited.rig.submit(&reads(3));
    let (slot, generation) = limited.rig.attached_at;
    let (taken, left) = std::sync::mpsc::sync_channel(1);
    limited.rig.worker.begin_move(slot, generation, taken.clone());
    assert_eq!(limited.after_ms(101), [3]);
    limited.rig.worker.cancel_move(slot, generation);
    assert_eq!((limited.rig.run_until_idle(), left.try_recv().is_err()), (vec![], true), "given up: it stays");
    limited.rig.worker.begin_move(slot, generation, taken);
    assert_eq!(limited.after_ms(101), [5]);
    let disks = left.try_recv().map(|left| left.parts.disks.len());
    assert_eq!((disks, limited.stats().waiting), (Ok(1), 0));
}

/// The served requests are within the limit after any number of leaves of a queue, in any way.
#[test]
fn queues_that_leave_evade_no_limit() {
    for way in ["drained", "recorded"] {
        let mut limited = Limited::of(LimitKind::Iops, IoLimit { rate: 100, burst: None });
        let health = Arc::clone(&limited.rig.health);
        let mut served = 0;
        for _ in 0..50 {
            let queue = Attached::new(&mut limited.rig.worker, &health, MergeMode::Off);
            queue.guest.lock().unwrap().waiting.extend(reads(60));
            limited.rig.run_until_idle();
            let (slot, generation) = queue.attached_at;
            let (done, left) = std::sync::mpsc::sync_channel(1);
            match way {
                "drained" => limited.rig.worker.drain(slot, generation, done),
                _ => {
                    limited.rig.worker.drain_keeping_parked(slot, generation, done);
                    limited.rig.worker.abandon_unserved(slot, generation);
                }
            }
            for _ in 0..200 {
                limited.after_ms(10);
                if left.try_recv().is_ok() {
                    break;
                }
            }
            served += queue.guest.lock().unwrap().completed.len() as u64;
        }
        let seconds = (limited.clock.load(Ordering::Relaxed) - 1000 * MS) / 1000 / MS;
        assert!(served <= 100 * (seconds + 1) + 10, "{way}: {served} in {seconds} s");
        assert!(served >= 50, "{way}: {served}");
    }
}

#[test]
fn what_passed_without_tokens_is_owed_also_at_a_new_rate() {
    let mut limited = Limited::of(LimitKind::Iops, TEN_A_SECOND);
    limited.rig.submit(&reads(5));
    let slot = limited.rig.attached_at.0;
    limited.rig.worker.channels.begin_leave_throttles(slot);
    limited.rig.worker.channels.end_leave_throttles(slot);
    assert_eq!(sectors(&limited.rig.run_until_idle()), [3, 5, 7, 9]);
    assert_eq!(limited.rig.submit(&[(Op::Read, 11)]), []);
    for ms in 1..500 {
        assert_eq!(limited.after_ms(1), [], "four requests passed on credit, {ms} ms ago");
    }
    assert_eq!(limited.after_ms(1), [11]);
    // Four more, and then the limit is another one.
    limited.rig.submit(&[(Op::Read, 13), (Op::Read, 15), (Op::Read, 17), (Op::Read, 19)]);
    limited.rig.worker.channels.begin_leave_throttles(slot);
    limited.rig.worker.channels.end_leave_throttles(slot);
    assert_eq!(limited.rig.run_until_idle().len(), 4);
    limited.rig.health.limits().set_own(IoLimits::default().with(LimitKind::Iops, IoLimit { rate: 20, burst: None }));
    limited.rig.worker.channels.reload_settings();
    assert_eq!(limited.rig.submit(&[(Op::Read, 21)]), []);
    assert_eq!(limited.after_ms(150), [], "four are owed");
    assert_eq!(limited.after_ms(200), [21]);
}

#[test]
fn a_neighbour_in_a_group_pays_for_nobody() {
    let clock = Arc::new(AtomicU64::new(1000 * MS));
    let limits = IoLimits::default().with(LimitKind::Iops, IoLimit { rate: 100, burst: None });
    let group = Arc::new(LimitGroup::with_clock("gold", limits, LimitClock::manual(&clock)));
    let disk = || {
        let limits = DiskLimits::with_clock(IoLimits::default(), Some(&group), LimitClock::manual(&clock));
        Rig::of(&Arc::new(DiskHealth::with_limits("d", ErrorPolicy::default(), limits)), MergeMode::Off)
    };
    let (mut hostile, mut neighbour) = (disk(), disk());
    for _ in 0..30 {
        hostile.submit(&reads(60));
        let (slot, generation) = hostile.attached_at;
        // As at the end of its process: nothing waits for the limits.
        hostile.worker.pass_throttled(slot, generation);
        hostile.run_until_idle();
        hostile.worker.channels.end_leave_throttles(slot);
    }
    assert_eq!(neighbour.submit(&[(Op::Read, 1)]), []);
    let mut waited = 0;
    while neighbour.run_until_idle().is_empty() {
        clock.fetch_add(MS, Ordering::Relaxed);
        waited += 1;
        assert!(waited <= 200, "the neighbour waits for {waited} ms");
    }
}

#[test]
fn closing_a_disk_does_not_wait_for_its_limits() {
    let mut limited = Limited::of(LimitKind::Iops, TEN_A_SECOND);
    limited.rig.submit(&reads(3));
    let (done, left) = std::sync::mpsc::sync_channel(1);
    limited.rig.worker.close_disk(limited.rig.attached_at.0, limited.rig.attached_at.1, DiskSlot::FIRST, done);
    assert_eq!(sectors(&limited.rig.run_until_idle()), [3, 5]);
    assert!(left.try_recv().is_ok());
}

#[test]
fn a_stopped_disk_parks_what_passes_its_limits() {
    let limits = IoLimits::default().with(LimitKind::Iops, TEN_A_SECOND);
    let mut limited = Limited::new(limits, STOP, MergeMode::Off);
    limited.rig.bad(&[(1, EIO)]);
    assert_eq!(limited.rig.submit(&reads(3)), []);
    assert_eq!((limited.rig.health.stats().parked, limited.stats().waiting), (1, 2));
    assert_eq!(limited.after_ms(101), []);
    assert_eq!((limited.rig.health.stats().parked, limited.stats().waiting), (2, 1));
    let (done, left) = std::sync::mpsc::sync_channel(1);
    limited.rig.worker.drain(limited.rig.attached_at.0, limited.rig.attached_at.1, done);
    assert_eq!(limited.rig.run_until_idle(), [(1, EIO), (3, EIO)]);
    limited.clock.fetch_add(101 * MS, Ordering::Relaxed);
    assert_eq!(limited.rig.run_until_idle(), [(5, EIO)]);
    assert!(left.try_recv().is_ok());
}

#[test]
fn limits_change_while_requests_wait() {
    let mut limited = Limited::of(LimitKind::Iops, TEN_A_SECOND);
    limited.rig.submit(&reads(30));
    let set = |limited: &mut Limited, limits: IoLimits| {
        limited.rig.health.limits().set_own(limits);
        limited.rig.worker.channels.reload_settings();
        sectors(&limited.rig.run_until_idle()).len()
    };
    // A change gives no new burst.
    assert_eq!(set(&mut limited, IoLimits::default().with(LimitKind::Iops, IoLimit { rate: 100, burst: None })), 0);
    assert_eq!(limited.after_ms(100).len(), 10);
    // Another limit, full at first: two requests.
    assert_eq!(
        set(&mut limited, IoLimits::default().with(LimitKind::Bandwidth, IoLimit { rate: 10_240, burst: None })),
        2
    );
    assert_eq!(limited.after_ms(101).len(), 2);
    assert_eq!(set(&mut limited, IoLimits::default()), 15, "no limit: all pass");
    assert_eq!((limited.stats().waiting, sectors(&limited.rig.submit(&reads(30))).len()), (0, 30));
    // A disk that had no limit when it was opened.
    assert_eq!(set(&mut limited, IoLimits::default().with(LimitKind::Iops, TEN_A_SECOND)), 0);
    assert_eq!(sectors(&limited.rig.submit(&reads(3))), [1]);
    assert_eq!(limited.stats().waiting, 2);
}

#[test]
fn throttled_requests_are_not_hung_storage() {
    let mut limited = Limited::of(LimitKind::Iops, TEN_A_SECOND);
    limited.rig.storage.lock().unwrap().hangs = true;
    limited.rig.submit(&reads(2));
    assert_eq!(limited.rig.worker.ages().iter().map(|age| age.in_flight).collect::<Vec<_>>(), [1]);
    limited.rig.storage.lock().unwrap().hangs = false;
    assert_eq!(sectors(&limited.rig.run_until_idle()), [1]);
    assert!(limited.rig.worker.ages().is_empty(), "the other one waits for its limit");
    // Its time at the storage begins when it passes.
    std::thread::sleep(Duration::from_millis(60));
    limited.rig.storage.lock().unwrap().hangs = true;
    let passes = Instant::now();
    assert_eq!(limited.after_ms(101), []);
    let ages = limited.rig.worker.ages();
    assert!(ages.len() == 1 && ages[0].oldest <= passes.elapsed(), "{:?}", ages[0].oldest);
    limited.rig.storage.lock().unwrap().hangs = false;
    limited.rig.run_until_idle();
    // The wait is in the part before the storage.
    let stats = limited.rig.worker.stats(0);
    let reads = &stats.queues[0].1.latency.reads;
    assert!(reads.queued.sum_ns() >= 60 * MS, "{} ns", reads.queued.sum_ns());
    assert!(reads.device.sum_ns() + reads.queued.sum_ns() <= reads.total.sum_ns());
}

#[test]
fn disks_of_a_group_share_its_limits() {
    let clock = Arc::new(AtomicU64::new(1000 * MS));
    let limits = IoLimits::default().with(LimitKind::Iops, IoLimit { rate: 1000, burst: None });
    let group = Arc::new(LimitGroup::with_clock("gold", limits, LimitClock::manual(&clock)));
    // Three disks, each on a worker of its own; the third has a limit of its own too.
    let disk = |own: IoLimits| {
        let limits = DiskLimits::with_clock(own, Some(&group), LimitClock::manual(&clock));
        Rig::of(&Arc::new(DiskHealth::with_limits("d", ErrorPolicy::default(), limits)), MergeMode::Off)
    };
    let own = IoLimits::default().with(LimitKind::IopsRead, IoLimit { rate: 100, burst: None });
    let mut rigs = [disk(IoLimits::default()), disk(IoLimits::default()), disk(own)];
    let mut done = [0; 3];
    // Each has 40 requests waiting all the time, for two seconds.
    for _ in 0..20_000 {
        for (rig, done) in rigs.iter_mut().zip(&mut done) {
            let missing = 40 - rig.in_flight() as usize;
            rig.guest.lock().unwrap().waiting.extend((0..missing as u64).map(|at| (Op::Read, at)));
            rig.worker.turn();
            *done += rig.run_until_idle().len();
        }
        clock.fetch_add(MS / 10, Ordering::Relaxed);
    }
    let all: usize = done.iter().sum();
    // 2000, and the 100 that the bucket holds; less the leases.
    assert!((2080..=2112).contains(&all), "{done:?}");
    assert!((195..=215).contains(&done[2]), "its own limit: {done:?}");
    assert!(done[0].abs_diff(done[1]) <= all / 20, "{done:?}");
    // One leaves the group, and then has no limit.
    rigs[0].health.limits().set_group(None);
    rigs[0].worker.channels.reload_settings();
    assert_eq!(rigs[0].run_until_idle().len(), 40);
    assert_eq!(group.limits(), limits);
}

#[test]
fn a_throttled_disk_does_not_hold_up_its_neighbour() {
    let mut limited = Limited::of(LimitKind::Iops, TEN_A_SECOND);
    let free = Arc::new(DiskHealth::new("free", ErrorPolicy::default()));
    let neighbour = Attached::new(&mut limited.rig.worker, &free, MergeMode::Off);
    assert_eq!(sectors(&limited.rig.submit(&reads(20))), [1]);
    assert_eq!(limited.stats().waiting, 19);
    for _ in 0..5 {
        neighbour.guest.lock().unwrap().waiting.extend(reads(60));
        assert_eq!(limited.rig.run_until_idle(), []);
        assert_eq!(std::mem::take(&mut neighbour.guest.lock().unwrap().completed).len(), 60);
    }
    assert_eq!(limited.after_ms(101), [3]);
    assert_eq!(limited.stats().waiting, 18);
}
