//! Rates of constructed samples, against values computed step by step.

use mqblk_admin::model::{ControllerStat, DiskStat, Latency, LunStat, QueueCounters, QueueStat};

use super::*;

const SECOND: u64 = 1_000_000_000;

fn distribution(count: u64, sum_ns: u64, buckets: &[(u64, u64, u64)]) -> Distribution {
    Distribution { count, sum_ns, buckets: buckets.to_vec(), ..Distribution::default() }
}

/// The counters of a queue after `times` identical seconds.
fn load_after(times: u64) -> Load {
    let counters = QueueCounters {
        requests: 170 * times,
        reads: 100 * times,
        writes: 50 * times,
        flushes: 10 * times,
        discards: 6 * times,
        write_zeroes: 4 * times,
        errors: times,
        read_bytes: 100 * 4096 * times,
        written_bytes: 50 * 8192 * times,
        read_merges: 40 * times,
        write_merges: 30 * times,
        kicks: 20 * times,
        calls: 25 * times,
        poll_ns: SECOND / 4 * times,
        busy_ns: SECOND / 2 * times,
        ..QueueCounters::default()
    };
    let part = |count: u64, each_ns: u64| distribution(count * times, count * each_ns * times, &[]);
    let parts = |count: u64| LatencyParts {
        queued: part(count, 1000),
        device: part(count, 7000),
        publish: part(count, 2000),
        total: distribution(
            count * times,
            count * 10_000 * times,
            &[(8000, 12_000, count * times - times), (90_000, 110_000, times)],
        ),
    };
    let latency = Latency { reads: parts(100), writes: parts(50), others: parts(20) };
    Load { in_flight: 3 * times, oldest_ms: Some(times), counters, latency, ..Load::default() }
}

fn stat_after(times: u64) -> Stat {
    let load = load_after(times);
    Stat {
        out: Vec::new(),
        version: "1".to_owned(),
        time_ns: 100 * SECOND + times * SECOND,
        uptime_ns: times * SECOND,
        disks: vec![DiskStat {
            id: "a".to_owned(),
            queue_count: 1,
            totals: load.clone(),
            queues: vec![QueueStat { role: "request".to_owned(), queue: 0, worker: 1, polling: None, load }],
            ..DiskStat::default()
        }],
        controllers: Vec::new(),
        workers: vec![WorkerStat {
            worker: 0,
            queues: 1,
            turns: 1000 * times,
            empty_turns: 500 * times,
            sleeps: 100 * times,
            slept_ns: SECOND / 2 * times,
            yields: 0,
            away_ns: 0,
            cpu_ns: SECOND / 5 * times,
            merge_splits: times,
        }],
    }
}

/// The rates of [`load_after`] over `seconds`.
fn expected(seconds: u64, in_flight: u64) -> IoRates {
    IoRates {
        reads_per_s: 100.0,
        writes_per_s: 50.0,
        discards_per_s: 10.0,
        flushes_per_s: 10.0,
        read_merges_per_s: 40.0,
        write_merges_per_s: 30.0,
        read_bytes_per_s: 409_600.0,
        written_bytes_per_s: 409_600.0,
        // (100 * 8 + 50 * 16) / 150
        request_sectors: 1600.0 / 150.0,
        // 170 requests of 10 us in a second
        queue_size: 0.0017,
        await_us: 10.0,
        queued_us: 1.0,
        device_us: 7.0,
        publish_us: 2.0,
        read_await_us: 10.0,
        write_await_us: 10.0,
        read_request_bytes: 4096.0,
        write_request_bytes: 8192.0,
        p50_us: Some(10.0),
        // 3 of 170 are the slow ones: more than one percent.
        p99_us: Some(100.0),
        p999_us: Some(100.0),
        util_percent: Some(50.0),
        poll_percent: 25.0,
        kicks_per_s: 20.0,
        calls_per_s: 25.0,
        in_flight,
        oldest_ms: Some(in_flight / 3),
        errors: seconds,
    }
}

fn assert_near(found: Option<IoRates>, want: IoRates) {
    let found = serde_json::to_value(found.expect("rates")).unwrap();
    let want = serde_json::to_value(want).unwrap();
    for (name, want) in want.as_object().unwrap() {
        let (found, want) = (found[name].as_f64().unwrap(), want.as_f64().unwrap());
        assert!((found - want).abs() <= want.abs() * 1e-9, "{name}: {found}, expected {want}");
    }
}

#[test]
fn rates_since_the_start_and_since_the_previous_sample() {
    for (before, now, since, seconds) in [(None, 4, Since::Start, 4), (Some(1), 4, Since::Previous, 3)] {
        let report = compare(before.map(stat_after).as_ref(), &stat_after(now));
        assert_eq!((report.since, report.interval_ns, report.restarted), (since, seconds * SECOND, false));
        assert_near(report.disks[0].totals, expected(seconds, 12));
        let queue = &report.disks[0].queues[0];
        assert_eq!((queue.queue, queue.worker), (0, 1));
        assert_near(queue.rates, expected(seconds, 12));
        let turns = report.workers[0].rates.unwrap();
        assert_eq!((turns.cpu_percent, turns.slept_percent, turns.merge_splits), (20.0, 50.0, seconds));
        assert_eq!((turns.turns_per_s, turns.empty_turns_per_s), (1000.0, 500.0));
        assert_eq!(turns.sleeps_per_s, 100.0);
    }
}

#[test]
fn controllers_have_totals_and_queues_by_role() {
    let with_controller = |times: u64| {
        let queue = |role: &str, times: u64| QueueStat {
            role: role.to_owned(),
            load: load_after(times),
            ..QueueStat::default()
        };
        let controller = ControllerStat {
            id: "c".to_owned(),
            queue_count: 1,
            totals: load_after(times),
            queues: vec![queue("control", 0), queue("event", 1), queue("request", times)],
            luns: vec![LunStat {
                id: "c:7:0".to_owned(),
                target: 7,
                state: "removing".to_owned(),
                in_flight: 2 * times,
                oldest_ms: Some(77),
                counters: LunCounters {
                    reads: 30 * times,
                    writes: 10 * times,
                    others: 10 * times,
                    read_bytes: 30 * 4096 * times,
                    written_bytes: 10 * 8192 * times,
                    errors: times,
                    read_ns: 1_000_000 * times,
                    write_ns: 2_000_000 * times,
                    other_ns: 2_000_000 * times,
                },
                ..LunStat::default()
            }],
            ..ControllerStat::default()
        };
        Stat { controllers: vec![controller], ..stat_after(times) }
    };
    let report = compare(Some(&with_controller(1)), &with_controller(4));
    let [controller] = report.controllers.as_slice() else { panic!("{report:?}") };
    assert_near(controller.totals, expected(3, 12));
    let reads = |at: usize| controller.queues[at].rates.map(|rates| rates.reads_per_s);
    assert_eq!((reads(0), reads(1), reads(2)), (Some(0.0), Some(0.0), Some(100.0)));
    let lun = &controller.luns[0];
    assert_eq!((lun.id.as_str(), lun.target, lun.state.as_str()), ("c:7:0", 7, "removing"));
    let want = LunIoRates {
        reads_per_s: 30.0,
        writes_per_s: 10.0,
        others_per_s: 10.0,
        read_bytes_per_s: 122_880.0,
        written_bytes_per_s: 81_920.0,
        // (30 * 8 + 10 * 16) / 40
        request_sectors: 10.0,
        // 5 ms of requests in a second
        queue_size: 0.005,
        await_us: 100.0,
        read_await_us: 1000.0 / 30.0,
        write_await_us: 200.0,
        read_request_bytes: 4096.0,
        write_request_bytes: 8192.0,
        in_flight: 8,
        oldest_ms: Some(77),
        errors: 3,
    };
    assert_eq!(lun.rates, Some(want));
    let mut down = with_controller(4);
    down.controllers[0].luns[0].counters.write_ns = 1;
    assert_eq!(compare(Some(&with_controller(1)), &down).controllers[0].luns[0].rates, None);
    assert_eq!(compare(None, &with_controller(4)).controllers[0].luns[0].rates.map(|rates| rates.errors), Some(4));
    let before = stat_after(1);
    assert_eq!(compare(Some(&before), &with_controller(4)).controllers[0].totals, None, "the controller is new");
}

#[test]
fn an_idle_interval_has_zero_rates() {
    let mut later = stat_after(1);
    later.time_ns += SECOND;
    later.uptime_ns += SECOND;
    let report = compare(Some(&stat_after(1)), &later);
    assert_eq!(
        report.disks[0].totals,
        Some(IoRates { in_flight: 3, oldest_ms: Some(1), util_percent: Some(0.0), ..IoRates::default() })
    );
    assert_eq!(report.workers[0].rates, Some(TurnRates::default()));
    // The same sample twice: no division by zero.
    let report = compare(Some(&later), &later);
    assert_eq!((report.interval_ns, report.since), (1, Since::Previous));
    assert_eq!(report.disks[0].totals.unwrap().queue_size, 0.0);
    // A daemon with zero uptime.
    let report = compare(None, &Stat::default());
    assert_eq!((report.interval_ns, report.disks.len()), (1, 0));
}

#[test]
fn samples_of_different_daemon_runs_are_not_compared() {
    // Its counters are higher than those of the previous run: only the time of its start differs.
    for uptime in [1, 2 * SECOND] {
        let mut now = stat_after(9);
        now.uptime_ns = uptime;
        let report = compare(Some(&stat_after(4)), &now);
        assert_eq!((report.restarted, report.since, report.interval_ns), (true, Since::Start, uptime));
        assert_eq!(report.disks[0].totals.unwrap().errors, 9);
    }
}

#[test]
fn counters_that_decrease_give_no_rates() {
    let downs: [fn(&mut Load); 6] = [
        |load| load.counters.reads -= 1,
        |load| load.counters.read_bytes -= 500_000,
        |load| load.counters.poll_ns = 0,
        |load| load.counters.errors = 0,
        |load| load.latency.reads.device.sum_ns = 0,
        |load| load.latency.writes.total.buckets.clear(),
    ];
    for (number, down) in downs.into_iter().enumerate() {
        let before = stat_after(2);
        let mut now = before.clone();
        now.time_ns += SECOND;
        now.uptime_ns += SECOND;
        down(&mut now.disks[0].totals);
        let report = compare(Some(&before), &now);
        assert!(!report.restarted);
        assert_eq!(report.disks[0].totals, None, "{number}");
        assert!(report.disks[0].queues[0].rates.is_some(), "{number}: the queue went on");
    }
    let (before, mut now) = (stat_after(2), stat_after(3));
    now.workers[0].cpu_ns = 0;
    assert_eq!(compare(Some(&before), &now).workers[0].rates, None);
}

#[test]
fn disks_queues_and_workers_appear_and_disappear() {
    let (mut before, now) = (stat_after(1), stat_after(2));
    before.disks[0].id = "b".to_owned();
    before.workers[0].worker = 7;
    let report = compare(Some(&before), &now);
    assert_eq!(report.disks.len(), 1);
    assert_eq!((report.disks[0].id.as_str(), report.disks[0].totals), ("a", None));
    assert_eq!((report.disks[0].queues[0].rates, report.workers[0].rates), (None, None));
    let mut before = stat_after(1);
    before.disks[0].queues.clear();
    let report = compare(Some(&before), &now);
    assert!(report.disks[0].totals.is_some());
    assert_eq!(report.disks[0].queues[0].rates, None);
}

#[test]
fn percentiles_cover_the_interval_only() {
    let load = |fast: u64, slow: u64| {
        let mut load = Load::default();
        load.latency.reads.total.buckets = vec![(1000, 1200, fast)];
        load.latency.writes.total.buckets = vec![(9000, 11_000, slow)];
        load
    };
    for (before, now, p99) in [
        ((0, 0), (0, 0), None),
        ((5, 5), (5, 5), None),
        ((0, 0), (99, 1), Some(1100)),
        ((0, 0), (98, 2), Some(10_000)),
        ((0, 50), (100, 50), Some(1100)),
        ((100, 0), (100, 1), Some(10_000)),
    ] {
        let buckets = interval_buckets(&load(before.0, before.1), &load(now.0, now.1)).unwrap();
        assert_eq!(percentile_ns(&buckets, 99.0), p99, "{before:?} {now:?}");
    }
    assert_eq!(interval_buckets(&load(2, 0), &load(1, 5)), None);
}

#[test]
fn a_disk_is_busy_when_any_of_its_queues_is() {
    let queue = |role: &str, util_percent| {
        let rates = Some(IoRates { util_percent, ..IoRates::default() });
        QueueRates { role: role.to_owned(), queue: 0, worker: 0, rates }
    };
    let all = |queues: &[QueueRates]| busy_percent_of_all(queues).map(|percent| (percent * 1e6).round() / 1e6);
    assert_eq!(all(&[]), None);
    assert_eq!(all(&[queue("control", Some(50.0))]), None, "no request queue");
    assert_eq!(
        all(&[queue("request", Some(30.0)), queue("request", Some(0.0)), queue("event", Some(90.0))]),
        Some(30.0)
    );
    assert_eq!(all(&[queue("request", Some(50.0)), queue("request", Some(50.0))]), Some(75.0));
    assert_eq!(all(&[queue("request", Some(100.0)), queue("request", Some(5.0))]), Some(100.0));
    assert_eq!(all(&[queue("request", Some(50.0)), queue("request", None)]), None, "an old daemon");
}

#[test]
fn a_daemon_that_does_not_count_busy_time_is_recognised() {
    let mut now = stat_after(2);
    now.disks[0].totals.counters.busy_ns = 0;
    now.disks[0].queues[0].load.counters.busy_ns = 0;
    let report = compare(None, &now);
    assert_eq!(report.disks[0].totals.unwrap().util_percent, None);
}
