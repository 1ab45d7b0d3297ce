//! Rules, by cases: two samples, and the findings.

use mqblk_admin::model::{
    ConnectionsStat, DiskStat, Distribution, Health, HealthStop, Load, QueueStat, ResourceStat, TenantBudgetStat,
    ThrottleStat, WorkerStat,
};
use serde_json::{Value, json};

use super::*;
use crate::stat::rates::compare;

const SECOND: u64 = 1_000_000_000;

/// Work of a queue in the second between the samples.
#[derive(Clone, Copy)]
struct Work {
    requests: u64,
    bytes: u64,
    /// Queued, device and publish of each request, in microseconds.
    parts_us: [u64; 3],
    kicks: u64,
    merges: u64,
    busy_percent: u64,
    poll_percent: u64,
}

/// 1,000 requests of 64 KiB that take 200 us each, without a dominant part.
const EASY: Work = Work {
    requests: 1000,
    bytes: 65_536,
    parts_us: [40, 90, 40],
    kicks: 100,
    merges: 0,
    busy_percent: 20,
    poll_percent: 0,
};
/// An unused disk.
const IDLE: Work =
    Work { requests: 0, bytes: 0, parts_us: [0; 3], kicks: 0, merges: 0, busy_percent: 0, poll_percent: 0 };

fn load(work: Work) -> Load {
    let mut load = Load { slots: 128, ..Load::default() };
    let counters = &mut load.counters;
    (counters.requests, counters.reads, counters.read_bytes) =
        (work.requests, work.requests, work.requests * work.bytes);
    (counters.kicks, counters.read_merges) = (work.kicks, work.merges);
    (counters.busy_ns, counters.poll_ns) = (SECOND / 100 * work.busy_percent, SECOND / 100 * work.poll_percent);
    let part =
        |us: u64| Distribution { count: work.requests, sum_ns: work.requests * us * 1000, ..Distribution::default() };
    let [queued, device, publish] = work.parts_us;
    let reads = &mut load.latency.reads;
    (reads.queued, reads.device, reads.publish) = (part(queued), part(device), part(publish));
    reads.total = part(queued + device + publish);
    load
}

fn disk(id: &str, queues: &[(u32, Work)]) -> DiskStat {
    let queue = |(number, (worker, work)): (u32, &(u32, Work))| QueueStat {
        role: "request".to_owned(),
        queue: number,
        worker: *worker,
        polling: None,
        load: load(*work),
    };
    let sum = |get: fn(&Work) -> u64| queues.iter().map(|(_, work)| get(work)).sum();
    let first = queues[0].1;
    let all = Work {
        requests: sum(|it| it.requests),
        kicks: sum(|it| it.kicks),
        merges: sum(|it| it.merges),
        busy_percent: sum(|it| it.busy_percent),
        poll_percent: sum(|it| it.poll_percent),
        ..first
    };
    DiskStat {
        id: id.to_owned(),
        storage: "file".to_owned(),
        merge: "auto".to_owned(),
        merge_bytes: 1 << 20,
        queue_count: queues.len() as u32,
        totals: load(all),
        queues: (0..).zip(queues).map(queue).collect(),
        ..DiskStat::default()
    }
}

fn worker(number: u32, cpu_percent: u64, turns: u64, empty_turns: u64) -> WorkerStat {
    WorkerStat { worker: number, cpu_ns: SECOND / 100 * cpu_percent, turns, empty_turns, ..WorkerStat::default() }
}

/// Returns a sample one second after the daemon's start.
fn stat(disks: Vec<DiskStat>) -> Stat {
    let workers = vec![worker(0, 30, 1000, 10), worker(1, 0, 0, 0)];
    Stat { time_ns: 2 * SECOND, uptime_ns: SECOND + 1, disks, workers, ..Stat::default() }
}

/// Returns the first sample, before any request.
fn before(now: &Stat) -> Stat {
    let disk = |disk: &DiskStat| {
        let idle: Vec<_> = disk.queues.iter().map(|queue| (queue.worker, IDLE)).collect();
        self::disk(&disk.id, &idle)
    };
    let workers = now.workers.iter().map(|one| worker(one.worker, 0, 0, 0)).collect();
    Stat { time_ns: SECOND, uptime_ns: 1, disks: now.disks.iter().map(disk).collect(), workers, ..Stat::default() }
}

fn explained(now: &Stat) -> Vec<Finding> {
    let report = compare(Some(&before(now)), now);
    let subject = Subject::find(now, "vm1").unwrap_or_else(|expected| panic!("expected {expected}"));
    findings(&subject, now, &report).expect("the same daemon")
}

fn kinds(now: &Stat) -> Vec<&'static str> {
    explained(now).iter().map(|finding| finding.kind).collect()
}

fn sentence(now: &Stat, kind: &str) -> String {
    let all = explained(now);
    let found = all.iter().find(|finding| finding.kind == kind);
    found.unwrap_or_else(|| panic!("no {kind}: {all:#?}")).sentence.clone()
}

#[test]
fn a_disk_that_could_do_more_has_one_sentence() {
    let work = Work { parts_us: [10, 20, 10], ..EASY };
    // A quarter before the storage, half in it, and a quarter after it: all parts are large.
    assert_eq!(kinds(&stat(vec![disk("vm1", &[(0, work)])])), ["storage", "queued", "publish"]);
    let work = Work { parts_us: [22, 49, 29], ..EASY };
    assert_eq!(kinds(&stat(vec![disk("vm1", &[(0, work)])])), ["publish"]);
    let work = Work { parts_us: [0, 0, 0], ..EASY };
    let now = stat(vec![disk("vm1", &[(0, work)])]);
    let found = explained(&now);
    assert_eq!(found.len(), 1);
    assert_eq!(
        found[0].sentence,
        "Nothing limits it: its guest sends 1000 requests a second, which take 0.0 us each, and it is busy for 20 percent of the time."
    );
    assert_eq!(found[0].figures["requests_per_s"], 1000.0);
}

#[test]
fn the_storage_is_named_with_its_part() {
    let work = Work { requests: 16_000, parts_us: [50, 1900, 50], busy_percent: 100, ..EASY };
    let now = stat(vec![disk("vm1", &[(0, work)])]);
    let want =
        "The storage takes 1.90 ms of the 2.00 ms of a request (95 percent), with 32 requests in flight on average.";
    assert_eq!(sentence(&now, "storage"), want);
    let found = explained(&now);
    assert_eq!((found[0].figures["percent"], found[0].figures["in_flight_requests"]), (95.0, 32.0));
}

#[test]
fn time_before_and_after_the_storage_is_named() {
    let work = Work { parts_us: [600, 300, 100], ..EASY };
    let text = sentence(&stat(vec![disk("vm1", &[(0, work)])]), "queued");
    assert!(
        text.starts_with("Requests wait 600.0 us of 1.00 ms (60 percent) until they are given to the storage: "),
        "{text}"
    );
    let work = Work { parts_us: [100, 300, 600], ..EASY };
    let text = sentence(&stat(vec![disk("vm1", &[(0, work)])]), "publish");
    assert!(text.starts_with("Requests wait 600.0 us of 1.00 ms (60 percent) after the storage"), "{text}");
}

/// Returns a disk with these limits that made 400 of its 1000 requests wait for 600 us each.
fn limited(limits: Value, work: Work) -> Stat {
    let mut now = stat(vec![disk("vm1", &[(0, work)])]);
    now.disks[0].health.throttle = Some(ThrottleStat {
        limits: limits.as_object().cloned().unwrap(),
        throttled: 400,
        throttled_ns: 400 * 600_000,
        waiting: 3,
    });
    now
}

#[test]
fn a_rate_limit_is_named_with_its_share() {
    let work = Work { parts_us: [260, 300, 20], ..EASY };
    let now = limited(json!({"bandwidth": "1G", "iops": 1000}), work);
    let found = explained(&now);
    assert_eq!(found[0].kind, "throttled");
    assert_eq!(
        found[0].sentence,
        "40 percent of its requests waited for iops=1000 (used to 100 percent), for 600.0 us on average; 3 wait now."
    );
    let figures =
        ["throttled_percent", "throttled_per_s", "throttled_await_us", "waiting_requests", "limit_used_percent"];
    assert_eq!(figures.map(|figure| found[0].figures[figure]), [40.0, 400.0, 600.0, 3.0, 100.0]);
    // 240 of the 260 us before the storage are the limit's.
    assert_eq!(kinds(&now), ["throttled", "storage"]);
    let slow = Work { parts_us: [560, 300, 20], ..EASY };
    assert!(
        sentence(&limited(json!({"iops": 1000}), slow), "queued").starts_with("Requests wait 320.0 us of 880.0 us")
    );
}

#[test]
fn a_limit_of_a_group_is_named_where_no_other_is_used_up() {
    let work = Work { parts_us: [260, 300, 20], ..EASY };
    let text = sentence(&limited(json!({"iops": 4000, "limit-group": "gold"}), work), "throttled");
    assert!(text.starts_with("40 percent of its requests waited for a limit of its group gold, for "), "{text}");
    let text = sentence(&limited(json!({"iops-read": 1000, "limit-group": "gold"}), work), "throttled");
    assert!(text.starts_with("40 percent of its requests waited for iops-read=1000 (used to 100 percent)"), "{text}");
    let mut now = limited(json!({"iops": 4000}), work);
    now.disks[0].health.throttle = Some(ThrottleStat { throttled: 4, ..ThrottleStat::default() });
    assert!(!kinds(&now).contains(&"throttled"), "0.4 percent");
}

#[test]
fn requests_that_only_wait_for_a_limit_are_no_fault_of_the_storage() {
    let mut now = limited(json!({"bandwidth": "4K"}), IDLE);
    now.disks[0].health.throttle.as_mut().unwrap().throttled = 0;
    now.disks[0].totals.in_flight = 3;
    let found = explained(&now);
    assert_eq!(found.len(), 1, "{found:#?}");
    assert_eq!(found[0].sentence, "Requests wait for bandwidth=4K; 3 wait now.");
}

#[test]
fn a_full_queue_is_named() {
    // 120,000 requests of 1 ms: 120 in flight.
    let full = Work { requests: 120_000, parts_us: [0, 1000, 0], busy_percent: 100, ..EASY };
    let now = stat(vec![disk("vm1", &[(0, EASY), (1, full)])]);
    let want = "Queue 1 is full: 120 of its 128 slots are in use on average; a longer ring or more queues hold more.";
    assert_eq!(sentence(&now, "queue-full"), want);
    let mut roomy = now.clone();
    roomy.disks[0].queues[1].load.slots = 256;
    assert!(!kinds(&roomy).contains(&"queue-full"));
}

#[test]
fn a_guest_that_waits_for_each_request_is_named() {
    // 10,000 requests of 95 us one after the other.
    let work = Work { requests: 10_000, parts_us: [0, 95, 0], busy_percent: 95, ..EASY };
    let want = "The guest waits for each request before it sends the next (0.9 in flight on average, 95 percent of the time): at 95.0 us a \
                request that is 10000 requests a second.";
    let text = sentence(&stat(vec![disk("vm1", &[(0, work)])]), "one-at-a-time");
    assert!(text == want || text == want.replace("0.9 in", "1.0 in"), "{text}");
    let deep = Work { requests: 100_000, ..work };
    assert!(!kinds(&stat(vec![disk("vm1", &[(0, deep)])])).contains(&"one-at-a-time"));
}

#[test]
fn a_worker_without_time_names_those_it_is_shared_with() {
    let mut now = stat(vec![
        disk("vm1", &[(0, EASY)]),
        disk("vm2", &[(0, Work { requests: 2850, ..EASY })]),
        disk("vm3", &[(0, Work { requests: 150, ..EASY })]),
    ]);
    now.workers[0] = worker(0, 99, 100_000, 100);
    assert_eq!(
        sentence(&now, "worker-shared"),
        "Worker 0 has no time left (99 percent of a CPU), and shares it with vm2 (71 percent of its requests)."
    );
    now.workers[0] = worker(0, 99, 1000, 900_000);
    assert!(!kinds(&now).contains(&"worker-shared"), "it polls");
    let mut alone = stat(vec![disk("vm1", &[(0, EASY)]), disk("vm2", &[(1, EASY)])]);
    alone.workers[0] = worker(0, 99, 100_000, 100);
    let want = "Worker 0 has no time left: it uses 99 percent of a CPU; queues on more workers have more.";
    assert_eq!(sentence(&alone, "worker-busy"), want);
    assert_eq!(explained(&alone).iter().find(|it| it.kind == "worker-busy").unwrap().figures["own_percent"], 100.0);
}

#[test]
fn queues_and_workers_that_are_not_used_are_named() {
    let now = stat(vec![disk("vm1", &[(0, EASY), (1, IDLE), (0, IDLE), (1, IDLE)])]);
    assert_eq!(sentence(&now, "queues-unused"), "The guest uses 1 of 4 queues.");
    let mut fewer = now.clone();
    fewer.disks[0].queues[2..].iter_mut().for_each(|queue| queue.load.slots = 0);
    assert_eq!(sentence(&fewer, "queues-unused"), "The guest uses 1 of 4 queues; its VMM has set up 2.");
    let same = stat(vec![disk("vm1", &[(0, EASY), (0, EASY)])]);
    assert_eq!(sentence(&same, "one-worker"), "All 2 queues that the guest uses are on worker 0 of 2.");
    assert!(
        !kinds(&stat(vec![disk("vm1", &[(0, EASY), (1, EASY)])]))
            .iter()
            .any(|kind| ["one-worker", "queues-unused"].contains(kind))
    );
}

#[test]
fn polling_that_gains_nothing_is_named() {
    let missed = Work { kicks: 980, poll_percent: 23, ..EASY };
    let text = sentence(&stat(vec![disk("vm1", &[(0, missed)])]), "poll-missed");
    assert!(text.starts_with("The poll window is never hit: the queues are polled for 23 percent of the time, and still 98 percent of the requests"), "{text}");
    let off = Work { kicks: 980, ..EASY };
    let text = sentence(&stat(vec![disk("vm1", &[(0, off)])]), "kicked");
    assert!(text.starts_with("98 percent of the requests wake the worker with a kick"), "{text}");
    for (reason, window_ns, timer_ns, want) in [
        ("expected", Some(50_000), None, "50 us, because requests come soon."),
        ("quiet", Some(0), None, "closed, because none came soon."),
        ("cpu-wanted", Some(0), Some(25_000), "closed, because other threads want the CPU; a timer looks every 25 us."),
        ("policy", None, None, "always open, as `poll` says."),
    ] {
        let mut disk = disk("vm1", &[(0, off)]);
        disk.queues[0].polling = Some(PollingStat { reason: reason.to_owned(), window_ns, timer_ns });
        let text = sentence(&stat(vec![disk]), "kicked");
        assert!(text.ends_with(&format!(" The window now: {want}")), "{text}");
    }
    // Queues that the guest does not use do not count.
    let mut partly_used = disk("vm1", &[(0, off), (0, IDLE), (0, IDLE)]);
    for (queue, reason) in partly_used.queues.iter_mut().zip(["expected", "quiet", "quiet"]) {
        let (reason, window_ns) = (reason.to_owned(), Some(20_000));
        queue.polling = Some(PollingStat { reason, window_ns, timer_ns: None });
    }
    let text = sentence(&stat(vec![partly_used]), "kicked");
    assert!(text.ends_with("20 us, because requests come soon."), "{text}");
    let hit = Work { kicks: 20, poll_percent: 23, ..EASY };
    assert!(!kinds(&stat(vec![disk("vm1", &[(0, hit)])])).contains(&"poll-missed"));
}

#[test]
fn requests_that_are_not_merged_have_a_reason() {
    let small = Work { requests: 40_000, bytes: 4096, parts_us: [10, 80, 10], ..EASY };
    let reason = |change: &dyn Fn(&mut DiskStat), queues: &[(u32, Work)]| {
        let mut now = stat(vec![disk("vm1", queues)]);
        change(&mut now.disks[0]);
        let text = sentence(&now, "unmerged");
        text.strip_prefix("Requests of 4.0 kB on average are not merged, because ")
            .unwrap_or_else(|| panic!("{text}"))
            .to_owned()
    };
    let one = [(0, small)];
    assert_eq!(reason(&|disk| disk.merge = "off".to_owned(), &one), "merge=off.");
    assert_eq!(reason(&|disk| disk.storage = "ram".to_owned(), &one), "storage=ram gains nothing by it (merge=auto).");
    assert_eq!(reason(&|disk| disk.merge_bytes = 4096, &one), "two of them are longer than merge-bytes=4096.");
    assert_eq!(reason(&|_| (), &one), "their ranges do not touch.");
    assert_eq!(reason(&|_| (), &[(0, Work { requests: 5000, ..small })]), "only 0.5 are in flight on average.");
    assert_eq!(
        reason(&|_| (), &[(0, small), (1, small)]),
        "their ranges do not touch, or those that do are on different ones of 2 workers."
    );
    for other in [Work { merges: 2000, ..small }, Work { bytes: 128 << 10, ..small }] {
        assert!(!kinds(&stat(vec![disk("vm1", &[(0, other)])])).contains(&"unmerged"));
    }
}

#[test]
fn a_disk_without_requests_says_why() {
    let idle = stat(vec![disk("vm1", &[(0, IDLE)])]);
    assert_eq!(sentence(&idle, "idle"), "Its guest sends nothing.");
    let mut nobody = idle.clone();
    nobody.disks[0].queues[0].load.slots = 0;
    assert_eq!(sentence(&nobody, "no-guest"), "No guest uses it: none of its queues is set up.");
    let mut hung = idle.clone();
    (hung.disks[0].totals.in_flight, hung.disks[0].totals.oldest_ms) = (7, Some(400));
    assert_eq!(sentence(&hung, "storage"), "The storage completed none of 7 requests in flight.");
    hung.disks[0].totals.oldest_ms = Some(12_000);
    assert_eq!(explained(&hung).len(), 1);
    assert_eq!(sentence(&hung, "oldest"), "The oldest of 7 requests in flight has been for 12.0 s.");
}

#[test]
fn troubles_come_first() {
    let mut now = stat(vec![disk("vm1", &[(0, EASY)])]);
    let disk = &mut now.disks[0];
    let stop = HealthStop { stopped_ns: 12_340_000_000, reason: "write at 4096: why".to_owned(), enospc: false };
    disk.health = Health { stopped: Some(stop), parked: 5, ..Health::default() };
    disk.totals.counters.errors = 2;
    let refused = ResourceStat { refused: 3, ..ResourceStat::default() };
    disk.budget = Some(TenantBudgetStat { guest_memory_bytes: refused, ..TenantBudgetStat::default() });
    disk.connections = Some(ConnectionsStat {
        unreachable_ns: Some(2 * SECOND),
        last_failure: Some("nbd://a/: reset".to_owned()),
        ..ConnectionsStat::default()
    });
    let found = kinds(&now);
    assert_eq!(found[..3], ["stopped", "errors", "refused"], "{found:?}");
    assert!(!found.contains(&"unreachable"), "what blocks it first is enough");
    let want = "It has been stopped for 12.3 s, because of write at 4096: why; 5 requests wait for `mqblk resume vm1`.";
    assert_eq!(sentence(&now, "stopped"), want);
    assert_eq!(sentence(&now, "refused"), "Its VMM was refused more memory by mem-budget 3 times.");
    now.disks[0].health = Health::default();
    assert_eq!(sentence(&now, "unreachable"), "Its storage has not been reached for 2.0 s: nbd://a/: reset.");
}

#[test]
fn counters_that_began_again_are_no_evidence() {
    let now = stat(vec![disk("vm1", &[(0, IDLE)])]);
    let later = stat(vec![disk("vm1", &[(0, EASY)])]);
    let report = compare(Some(&Stat { time_ns: SECOND, uptime_ns: 1, ..later }), &now);
    assert_eq!(findings(&Subject::find(&now, "vm1").ok().unwrap(), &now, &report), None);
    assert_eq!(Subject::find(&now, "vm9").err().as_deref(), Some("one of vm1"));
}
