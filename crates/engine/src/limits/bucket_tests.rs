//! A bucket's promises, with a clock of the test's own: never more than the rate, the depth and the leases; nothing is
//! lost while requests wait; every worker gets a part.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use proptest::prelude::*;

use super::bucket::{Bucket, BucketRole, Demand, Lease};
use super::group::LimitGroup;
use super::io_limits::{Burst, IoLimit, IoLimits, LimitKind};
use super::limit_clock::LimitClock;

const MS: u64 = 1_000_000;
const S: u64 = 1000 * MS;

fn bucket(kind: LimitKind, rate: u64, now_ns: u64) -> Bucket {
    Bucket::of_limit(kind, IoLimit { rate, burst: None }, true, now_ns).next().unwrap()
}

/// More requests than any lease covers.
const MUCH: Demand = Demand { requests: 1 << 30, bytes: 1 << 50 };

/// Passes as many requests of this many bytes as the bucket affords, at most `most`. Returns their number.
fn pass(bucket: &Bucket, lease: &mut Lease, bytes: u64, most: u64, sharers: u64, now_ns: u64) -> u64 {
    let cost = bucket.cost(bytes);
    let mut passed = 0;
    while passed < most && lease.affords(bucket, cost, MUCH, || sharers, now_ns) {
        lease.spend(cost);
        passed += 1;
    }
    passed
}

/// Passed requests: time and tokens.
type Passed = Vec<(u64, u64)>;

/// Checks that in no window more tokens were used than accrue in it, and `allowance`.
fn check_windows(passed: &Passed, rate: u64, allowance: u64) -> Result<(), TestCaseError> {
    for (at, &(start, _)) in passed.iter().enumerate() {
        let mut used = 0_u128;
        for &(end, tokens) in &passed[at..] {
            used += u128::from(tokens);
            let accrued = u128::from(rate) * u128::from(end - start) / u128::from(S) + 1;
            prop_assert!(
                used <= accrued + u128::from(allowance),
                "{used} tokens from {start} to {end} ns, {accrued} accrued, {allowance} allowed"
            );
        }
    }
    Ok(())
}

/// One step of several workers.
#[derive(Clone, Debug)]
struct Step {
    worker: usize,
    /// Movement of the clock, also backwards.
    clock_ns: i64,
    bytes: u64,
    most: u64,
    gives_back: bool,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let clock = prop_oneof![
        8 => 0..2 * MS as i64,
        2 => 0..500 * MS as i64,
        1 => Just(0),
        1 => 0..100 * S as i64,
        1 => -(MS as i64)..0,
    ];
    let step =
        (0..WORKERS, clock, prop_oneof![Just(4096_u64), 512..(1_u64 << 20)], 1_u64..200, prop::bool::weighted(0.1));
    let step =
        step.prop_map(|(worker, clock_ns, bytes, most, gives_back)| Step { worker, clock_ns, bytes, most, gives_back });
    proptest::collection::vec(step, 1..300)
}

const WORKERS: usize = 4;
const LONGEST: u64 = 1 << 20;

fn kind_and_rate() -> impl Strategy<Value = (LimitKind, u64)> {
    prop_oneof![
        (Just(LimitKind::Iops), 1_u64..2_000_000),
        (Just(LimitKind::Bandwidth), prop_oneof![1_u64..100_000, 100_000_u64..(64 << 30)]),
    ]
}

/// Tokens that the workers' leases may have: those of one draw, and those used on credit.
fn leased(bucket: &Bucket) -> u64 {
    WORKERS as u64 * (bucket.quantum(1) + 2 * bucket.cost(LONGEST))
}

/// A clock that only goes forward, for windows: use while the real one is back counts at the latest time.
fn step_clock(now_ns: &mut u64, latest_ns: &mut u64, step: &Step) {
    *now_ns = now_ns.saturating_add_signed(step.clock_ns);
    *latest_ns = (*latest_ns).max(*now_ns);
}

proptest! {
    /// Any interleaving of workers, leases returned at any time, a clock that jumps in both directions.
    #[test]
    fn no_window_has_more_than_the_rate_and_the_depth((kind, rate) in kind_and_rate(), sharers in 1_u64..6, steps in steps()) {
        let (mut now_ns, mut latest_ns) = (S, S);
        let bucket = bucket(kind, rate, now_ns);
        let mut leases = [Lease::default(); WORKERS];
        let mut used = Passed::new();
        for step in &steps {
            step_clock(&mut now_ns, &mut latest_ns, step);
            let lease = &mut leases[step.worker];
            let count = pass(&bucket, lease, step.bytes, step.most, sharers, now_ns);
            used.push((latest_ns, count * bucket.cost(step.bytes)));
            if step.gives_back {
                lease.give_back(&bucket);
            }
        }
        check_windows(&used, bucket.rate(), bucket.depth() + leased(&bucket))?;
    }

    /// A single worker gets exactly the accrued tokens; the slack is one request.
    #[test]
    fn a_lone_worker_is_exact((kind, rate) in kind_and_rate(), steps in steps()) {
        let (mut now_ns, mut latest_ns) = (S, S);
        let bucket = bucket(kind, rate, now_ns);
        let mut lease = Lease::default();
        let mut used = Passed::new();
        for step in &steps {
            step_clock(&mut now_ns, &mut latest_ns, step);
            let count = pass(&bucket, &mut lease, step.bytes, step.most, 1, now_ns);
            used.push((latest_ns, count * bucket.cost(step.bytes)));
            lease.give_back(&bucket);
        }
        check_windows(&used, bucket.rate(), bucket.depth() + bucket.cost(LONGEST))?;
    }

    /// Nothing is lost while all want more than there is and each returns before the bucket is full.
    #[test]
    fn nothing_is_lost_while_requests_wait(
        (kind, rate) in kind_and_rate(),
        pauses in proptest::collection::vec(0..50 * MS, 50..200),
        bytes in prop_oneof![Just(512_u64), Just(4096), Just(LONGEST)],
    ) {
        let mut now_ns = S;
        let bucket = bucket(kind, rate, now_ns);
        // A pass is a loop in this test: not too many.
        prop_assume!(bucket.rate() / bucket.cost(bytes) < 100_000);
        let mut leases = [Lease::default(); WORKERS];
        let mut used = 0;
        for (at, pause) in pauses.iter().enumerate() {
            now_ns += pause;
            for worker in 0..WORKERS {
                let lease = &mut leases[(worker + at) % WORKERS];
                used += pass(&bucket, lease, bytes, u64::MAX, WORKERS as u64, now_ns) * bucket.cost(bytes);
            }
        }
        let accrued = (u128::from(bucket.rate()) * u128::from(now_ns - S) / u128::from(S)) as u64;
        let missing = leased(&bucket);
        prop_assert!(used + missing >= accrued, "{used} of {accrued} used, {missing} may be leased");
    }

    /// A limit that changes while workers use it: each period keeps to its own.
    #[test]
    fn changes_at_run_time_keep_to_the_new_limit(
        rates in proptest::collection::vec(1_u64..500_000, 1..5),
        steps in steps(),
    ) {
        let clock = Arc::new(AtomicU64::new(S));
        let limit = |rate| IoLimits::default().with(LimitKind::Iops, IoLimit { rate, burst: None });
        let group = LimitGroup::with_clock("g", limit(1000), LimitClock::manual(&clock));
        let (mut now_ns, mut latest_ns) = (S, S);
        let mut at = 0;
        for rate in rates {
            let before = group.buckets()[0].level(now_ns);
            group.set(limit(rate));
            let bucket = Arc::clone(&group.buckets()[0]);
            // A change does not restore a used burst.
            prop_assert!(bucket.level(now_ns) <= before.max(0), "{} after {before}", bucket.level(now_ns));
            let mut leases = [Lease::default(); WORKERS];
            let mut used = Passed::new();
            for step in steps.iter().cycle().skip(at).take(50) {
                step_clock(&mut now_ns, &mut latest_ns, step);
                clock.store(now_ns, std::sync::atomic::Ordering::Relaxed);
                let count = pass(&bucket, &mut leases[step.worker], step.bytes, step.most, 2, now_ns);
                used.push((latest_ns, count * bucket.cost(step.bytes)));
            }
            check_windows(&used, bucket.rate(), bucket.depth() + leased(&bucket))?;
            leases.iter_mut().for_each(|lease| lease.give_back(&bucket));
            at += 50;
        }
    }

    /// `ready_at` is not too late for its request, and never now or earlier: no worker spins.
    #[test]
    fn a_worker_that_sleeps_as_told_finds_tokens((kind, rate) in kind_and_rate(), bytes in 512..LONGEST, waits in 1..40) {
        let mut now_ns = S;
        let bucket = bucket(kind, rate, now_ns);
        let mut lease = Lease::default();
        let waiting = Demand { requests: 1, bytes };
        for _ in 0..waits {
            let cost = bucket.cost(bytes);
            if lease.affords(&bucket, cost, waiting, || 1, now_ns) {
                lease.spend(cost);
                continue;
            }
            let due_ns = lease.ready_at(&bucket, cost, waiting, now_ns).unwrap();
            prop_assert!(due_ns > now_ns);
            let seconds = (bucket.depth().min(cost) + cost) as f64 / bucket.rate() as f64;
            prop_assert!(((due_ns - now_ns) as f64) < 1.001 * seconds * S as f64 + 1000.0, "{} ns", due_ns - now_ns);
            now_ns = due_ns;
            // Tokens used on credit may need a second draw.
            if !lease.affords(&bucket, cost, waiting, || 1, now_ns) {
                let due_ns = lease.ready_at(&bucket, cost, waiting, now_ns).unwrap();
                prop_assert!(due_ns > now_ns);
                now_ns = due_ns;
                prop_assert!(lease.affords(&bucket, cost, waiting, || 1, now_ns));
            }
            lease.spend(cost);
        }
    }
}

#[test]
fn a_request_that_costs_more_than_the_bucket_holds_passes_when_it_is_full() {
    // A tenth of a second: 100,000 bytes.
    let mut now_ns = S;
    let bucket = bucket(LimitKind::Bandwidth, 1_000_000, now_ns);
    let mut lease = Lease::default();
    assert_eq!(pass(&bucket, &mut lease, 1 << 20, 9, 1, now_ns), 1, "it is full");
    assert_eq!(pass(&bucket, &mut lease, 1 << 20, 9, 1, now_ns), 0);
    // 948,576 bytes of credit, and 100,000 bytes that must be there before the next.
    now_ns += 1040 * MS;
    assert_eq!(pass(&bucket, &mut lease, 1 << 20, 9, 1, now_ns), 0);
    now_ns += 10 * MS;
    assert_eq!(pass(&bucket, &mut lease, 1 << 20, 9, 1, now_ns), 1);
    // After its return, credit is a debt of all.
    lease.give_back(&bucket);
    let mut other = Lease::default();
    now_ns += 900 * MS;
    assert_eq!(pass(&bucket, &mut other, 4096, 9, 1, now_ns), 0);
    now_ns += 55 * MS;
    assert_eq!(pass(&bucket, &mut other, 4096, 9, 1, now_ns), 1);
}

#[test]
fn a_burst_has_its_height_and_its_length() {
    let limit = IoLimit { rate: 1000, burst: Some(Burst { rate: 5000, seconds: 3 }) };
    let start = S;
    let buckets: Vec<Bucket> = Bucket::of_limit(LimitKind::Iops, limit, true, start).collect();
    assert_eq!(
        buckets.iter().map(|bucket| bucket.role).collect::<Vec<_>>(),
        [BucketRole::Sustained, BucketRole::Height]
    );
    let mut leases = [Lease::default(); 2];
    let mut second = |number: u64| {
        let mut passed = 0_u32;
        for ms in 0..1000 {
            let now_ns = start + (number * 1000 + ms) * MS;
            let cost = buckets[0].cost(0);
            while buckets.iter().zip(&mut leases).all(|(bucket, lease)| lease.affords(bucket, cost, MUCH, || 1, now_ns))
            {
                leases.iter_mut().for_each(|lease| lease.spend(cost));
                passed += 1;
            }
        }
        passed
    };
    let seconds: Vec<u32> = (0..6).map(&mut second).collect();
    assert!((5490..=5510).contains(&seconds[0]), "the height, and a tenth of a second's worth of it: {seconds:?}");
    assert!((4990..=5010).contains(&seconds[1]), "{seconds:?}");
    // 12,000 above the rate in three seconds, and 100 that the bucket always has: 500 of them were used in the first
    // second.
    assert!((4500..=4700).contains(&seconds[2]), "{seconds:?}");
    assert!(seconds[3..].iter().all(|passed| (990..=1010).contains(passed)), "{seconds:?}");
    // A quarter of the burst accrues in three idle seconds.
    assert!((3_990..=4_110).contains(&second(9)), "1000 of the second, 3000 of the idle ones");
}

/// A worker that wants more than it gets: it draws when tokens are due, or late, or polls.
struct Worker {
    lease: Lease,
    wakes_ns: u64,
    late_ns: u64,
    polls: bool,
    bytes: u64,
    sharers: u64,
    used: u64,
}

/// Runs workers for `ns`. Returns the tokens that each used.
fn compete(bucket: &Bucket, workers: &mut [Worker], from_ns: u64, ns: u64) -> Vec<u64> {
    let mut now_ns = from_ns;
    while now_ns < from_ns + ns {
        for worker in workers.iter_mut().filter(|worker| worker.wakes_ns <= now_ns) {
            let passed = pass(bucket, &mut worker.lease, worker.bytes, u64::MAX, worker.sharers, now_ns);
            worker.used += passed * bucket.cost(worker.bytes);
            let due = worker.lease.ready_at(bucket, bucket.cost(worker.bytes), MUCH, now_ns).unwrap_or(now_ns);
            worker.wakes_ns = if worker.polls { now_ns + 1000 } else { due + worker.late_ns };
        }
        now_ns = workers.iter().map(|worker| worker.wakes_ns).min().unwrap_or(u64::MAX).max(now_ns + 1);
    }
    workers.iter().map(|worker| worker.used).collect()
}

fn worker(bytes: u64, sharers: u64, late_ns: u64, polls: bool) -> Worker {
    Worker { lease: Lease::default(), wakes_ns: 0, late_ns, polls, bytes, sharers, used: 0 }
}

#[test]
fn workers_that_sleep_get_as_much_as_one_that_polls() {
    for rate in [50, 1000, 100_000] {
        let bucket = bucket(LimitKind::Iops, rate, S);
        let mut workers = [worker(4096, 3, 0, true), worker(4096, 3, 70_000, false), worker(4096, 3, 200_000, false)];
        let used = compete(&bucket, &mut workers, S, 10 * S);
        let part = used.iter().sum::<u64>() / 3;
        assert!(used.iter().all(|used| used.abs_diff(part) <= part / 10), "{rate}: {used:?}");
    }
}

#[test]
fn short_requests_get_as_much_bandwidth_as_long_ones() {
    for rate in [10 << 20, 1 << 30] {
        let bucket = bucket(LimitKind::Bandwidth, rate, S);
        let mut workers = [worker(1 << 20, 2, 50_000, false), worker(4096, 2, 50_000, false)];
        let used = compete(&bucket, &mut workers, S, 10 * S);
        let part = used.iter().sum::<u64>() / 2;
        assert!(used.iter().all(|used| used.abs_diff(part) <= part / 10), "{rate}: {used:?}");
    }
}

#[test]
fn disks_of_a_group_get_equal_parts_whatever_the_number_of_their_workers() {
    for rate in [100, 20_000] {
        let bucket = bucket(LimitKind::Iops, rate, S);
        // Two disks: one on three workers, one on one.
        let mut workers: Vec<Worker> = (0..3).map(|_| worker(4096, 6, 50_000, false)).collect();
        workers.push(worker(4096, 2, 50_000, false));
        let used = compete(&bucket, &mut workers, S, 10 * S);
        let (many, one) = (used[..3].iter().sum::<u64>(), used[3]);
        assert!(many.abs_diff(one) <= (many + one) / 10, "{rate}: {used:?}");
    }
}

#[test]
fn what_one_does_not_want_others_get() {
    let bucket = bucket(LimitKind::Iops, 1000, S);
    // One wants a request every 20 ms, the other all tokens.
    let (mut modest, mut greedy) = (Lease::default(), [worker(4096, 2, 50_000, false)]);
    for step in 0..500 {
        let now_ns = S + step * 20 * MS;
        // It waits at most a round of both.
        let cost = bucket.cost(4096);
        let mut at = now_ns;
        while !modest.affords(&bucket, cost, Demand { requests: 1, bytes: 4096 }, || 2, at) {
            at += MS;
            assert!(at < now_ns + 15 * MS, "it waits too long");
        }
        modest.spend(cost);
        modest.give_back(&bucket);
        compete(&bucket, &mut greedy, now_ns, 20 * MS);
    }
    let greedy = greedy[0].used / bucket.cost(4096);
    assert!((9300..=9700).contains(&greedy), "{greedy} of the 9500 that the other leaves, and the bucket's 100");
}

/// In a group a long request gathers its tokens before it passes, so that its disk has no debt to the others, which get
/// their part meanwhile.
#[test]
fn a_long_request_in_a_group_is_paid_for_before_it_passes() {
    let (mut now_ns, start) = (S, S);
    let limit = IoLimit { rate: 1_000_000, burst: None };
    let bucket = Bucket::of_limit(LimitKind::Bandwidth, limit, false, now_ns).next().unwrap();
    let (mut long, mut short) = (Lease::default(), Lease::default());
    assert_eq!(pass(&bucket, &mut long, 1 << 20, 9, 1, now_ns), 0, "alone: it draws what there is");
    let (mut long_bytes, mut short_bytes) = (0, 0);
    while now_ns < start + 10 * S {
        now_ns += MS;
        long_bytes += (1 << 20) * pass(&bucket, &mut long, 1 << 20, 9, 2, now_ns);
        short_bytes += 4096 * pass(&bucket, &mut short, 4096, 9, 2, now_ns);
        let waited = (now_ns - start) / MS;
        assert!(waited < 250 || short_bytes > 0, "the neighbour waits for {waited} ms");
    }
    let total = long_bytes + short_bytes;
    assert!((8_900_000..=10_100_000).contains(&total), "{long_bytes} and {short_bytes}");
    assert!(short_bytes > 4_000_000 && long_bytes >= 4 << 20, "{long_bytes} and {short_bytes}");
    let mut rest = Lease::default();
    std::mem::swap(&mut rest, &mut long);
    rest.give_back(&bucket);
    assert!(bucket.balance(now_ns) >= 0);
}

#[test]
fn what_another_process_has_used_is_missing_here() {
    let clock = Arc::new(AtomicU64::new(S));
    let now_ns = || clock.load(std::sync::atomic::Ordering::Relaxed);
    let limit = IoLimit { rate: 1_000_000, burst: Some(Burst { rate: 2_000_000, seconds: 3 }) };
    let limits = IoLimits::default().with(LimitKind::Bandwidth, limit).with(LimitKind::Iops, limit);
    let group = || LimitGroup::with_clock("g", limits, LimitClock::manual(&clock));
    // The burst has ended, and there is a debt of the height; or 100 s of debt.
    for (bytes, left) in [(3_000_000, 100_000), (100_000_000, -10_000_000)] {
        let (old, new) = (group(), group());
        assert_eq!((old.used(), new.used()), Default::default(), "both are full");
        let [sustained, _] = group_buckets(&old, LimitKind::Bandwidth);
        let mut lease = Lease::default();
        lease.owe(bytes);
        lease.give_back(&sustained);
        new.charge(&old.used());
        let [charged, height] = group_buckets(&new, LimitKind::Bandwidth);
        assert_eq!(charged.balance(now_ns()), left);
        assert_eq!(height.balance(now_ns()), 200_000, "nothing was used of it");
        assert_eq!(group_buckets(&new, LimitKind::Iops).map(|bucket| bucket.used(now_ns())), [0; 2]);
        // All has accrued again.
        clock.fetch_add(200 * S, std::sync::atomic::Ordering::Relaxed);
        assert_eq!((old.used(), new.used()), Default::default());
    }
}

fn group_buckets(group: &LimitGroup, kind: LimitKind) -> [Arc<Bucket>; 2] {
    let buckets: Vec<_> = group.buckets().into_iter().filter(|bucket| bucket.kind == kind).collect();
    buckets.try_into().expect("the sustained one and that of the height")
}
