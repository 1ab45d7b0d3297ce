//! The backend is killed, or stopped, in the middle of a guest's verified requests, repeatedly. The guest only sees a
//! delay, and nothing is lost.

use std::time::Duration;

use mqblk_driver::blkfront::BlkfrontOptions;
use mqblk_test_bounds::Bound;
use mqblk_tests::blkif::{BlkfrontLoad, SimulatedHost};
use mqblk_tests::hostile::wait_for;
use mqblk_xen::vbd::XenbusState;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

/// Storages whose contents survive a daemon.
const STORAGES: [&str; 2] = [
    // Completions come in any order.
    "storage=fault,inner=file,path=FOLDER/a.img,fault-jitter-us=2000,fault-reorder=4",
    "storage=file,path=FOLDER/a.img,poll=off",
];

/// With direct I/O no page is mapped for a single request.
const GRANTS: [&str; 3] = ["copy", "map,direct=off", "persistent"];

fn options(host: &SimulatedHost, queues: u16, order: u8) -> BlkfrontOptions {
    let device = host.create_device(1, "xvda", "mqblk:a");
    BlkfrontOptions { queues, ring_order: Some(order), ..host.frontend_options(&device) }
}

/// Starts a daemon with these settings for its disk, `FOLDER/a.img`, and more arguments.
fn start_with(settings: &str, more: &[&str]) -> SimulatedHost {
    // The image must exist before the daemon starts.
    let mut host = SimulatedHost::start(&["--workers", "1", "--disk", "id=none,interface=xen,storage=ram,size=1M"]);
    host.create_image("a.img", 1 << 20);
    host.stop();
    start_another(&mut host, settings, more);
    host
}

/// Starts the next daemon.
fn start_another(host: &mut SimulatedHost, settings: &str, more: &[&str]) {
    let disk = format!("id=a,interface=xen,queues=2,{settings}");
    // With an admin socket it also serves while the kernel still has requests of the previous daemon, which keep the
    // image's lock: the disk is out.
    host.spawn_with(&[&["--workers", "2", "--admin", "FOLDER/admin", "--disk", &disk], more].concat());
}

fn start(settings: &str) -> SimulatedHost {
    start_with(settings, &[])
}

#[test]
fn killed_in_the_middle_of_writes() {
    for (storage, grants) in STORAGES.into_iter().flat_map(|storage| GRANTS.map(|it| (storage, it))) {
        let mut host = start(&format!("{storage},grants={grants}"));
        let options = options(&host, 2, 0);
        let client = std::thread::spawn({
            let options = options.clone();
            move || {
                let mut load = BlkfrontLoad::connect(&options, 200, 7);
                for _ in 0..400 {
                    load.round();
                    std::thread::sleep(Duration::from_micros(500));
                }
                load.verify_all();
                (load.verified, load.finish())
            }
        });
        let mut random = SmallRng::seed_from_u64(3);
        let mut kills = 0;
        let connected = |host: &SimulatedHost| host.log().matches(" connected device").count();
        let mut before = 0;
        while !client.is_finished() && kills < 12 {
            // Every other daemon is killed once it serves the rings, regardless of the duration of its start.
            if kills % 2 == 1 {
                let serves = |host: &SimulatedHost| connected(host) > before || client.is_finished();
                wait_for("a daemon that serves the rings", || serves(&host).then_some(()));
            }
            std::thread::sleep(Duration::from_micros(random.random_range(0..60_000)));
            before = connected(&host);
            host.kill();
            host.spawn();
            kills += 1;
        }
        let (verified, generations) = client.join().expect("a guest that notices nothing");
        assert!(verified > 500 && kills >= 5, "{storage} {grants}: {verified} verified, {kills} kills");
        // The disk has the written data, also for another guest after another daemon.
        host.kill();
        host.spawn();
        let mut load = BlkfrontLoad::connect(&options, 200, 8).with_generations(generations);
        load.verify_all();
        load.finish();
        let log = host.log();
        assert!(log.contains("ring resumed"), "{storage} {grants}: no journal was used:\n{log}");
        let replayed: usize = log
            .lines()
            .filter_map(|line| line.split("replayed=").nth(1)?.split_whitespace().next()?.parse::<usize>().ok())
            .sum();
        // The other storage may be too fast for a kill in mid-request.
        if storage == STORAGES[0] {
            assert!(replayed > 0, "{storage} {grants}: nothing was ever in flight when it was killed:\n{log}");
        }
        host.stop();
    }
}

#[test]
fn stopped_orderly_and_started_again() {
    let mut host = start(STORAGES[0]);
    let options = options(&host, 2, 1);
    let client = std::thread::spawn(move || {
        let mut load = BlkfrontLoad::connect(&options, 200, 9);
        for _ in 0..300 {
            load.round();
            std::thread::sleep(Duration::from_micros(500));
        }
        load.verify_all();
        load.finish();
    });
    for round in 0..5 {
        std::thread::sleep(Duration::from_millis(20 * round));
        host.stop();
        if !client.is_finished() {
            // No page of the guest is mapped while no daemon serves it.
            assert_eq!(host.machine.stats().live_mappings, 0);
        }
        host.spawn();
    }
    client.join().expect("a guest that notices nothing");
    assert_eq!(host.warnings(), Vec::<String>::new());
    host.stop();
    assert_eq!(host.journal_count(), 0, "the guest has closed: no journal is needed");
}

/// A stopping daemon does not complete requests that the storage has not completed in time, or that are parked at a
/// stopped disk: the next daemon replays them.
#[test]
fn stopped_while_storage_hangs_or_has_stopped() {
    const FILE: &str = "inner=file,path=FOLDER/a.img";
    // The flush at the stop takes less than this, a request more.
    let drain_s = Bound::seconds(1).time().as_secs().max(1);
    let (drain, latency) = (drain_s.to_string(), drain_s * 5_000_000);
    for grants in GRANTS {
        for (storage, more, logged) in [
            (
                format!("storage=fault,{FILE},fault-latency-us={latency}"),
                &["--drain-timeout-s", &drain][..],
                "in time: its requests",
            ),
            (format!("storage=fault,{FILE},fail-write=0+1M:EIO,on-error=stop"), &[], "the disk is stopped"),
        ] {
            let mut host = start_with(&format!("{storage},grants={grants}"), more);
            let options = options(&host, 2, 0);
            let client = std::thread::spawn(move || {
                let mut load = BlkfrontLoad::connect(&options, 200, 4);
                (0..20).for_each(|_| load.round());
                load.verify_all();
                load.finish();
            });
            if more.is_empty() {
                wait_for("the disk's stop", || host.log().contains(logged).then_some(()));
            } else {
                let connected = || host.log().matches(" rings device=").count();
                wait_for("the guest", || (connected() > 0).then_some(()));
                // The first requests arrive at once, and take longer than this daemon runs.
                std::thread::sleep(Duration::from_millis(500));
            }
            host.stop();
            assert!(host.log().contains(logged), "{storage} {grants}:\n{}", host.log());
            start_another(&mut host, &format!("storage=file,path=FOLDER/a.img,grants={grants}"), &[]);
            client.join().expect("a guest that notices nothing");
            let replayed = host.log().lines().any(|line| line.contains("ring resumed") && !line.contains("replayed=0"));
            assert!(replayed, "{storage} {grants}: nothing was left to the next:\n{}", host.log());
            host.stop();
        }
    }
}

#[test]
fn without_journals_if_nothing_was_in_flight() {
    for settings in ["--xen-state=off", "--log=info"] {
        let disk = "id=a,interface=xen,storage=ram,size=1M,queues=2,journal=off";
        let mut host = SimulatedHost::start(&["--workers", "1", "--disk", disk]);
        let _ = settings;
        let device = host.create_device(1, "xvda", "mqblk:a");
        let mut load = BlkfrontLoad::connect(&BlkfrontOptions { queues: 2, ..host.frontend_options(&device) }, 100, 1);
        load.round();
        assert_eq!(host.journal_count(), 0);
        host.kill();
        host.spawn();
        // The storage was in memory and is lost with the daemon; the rings are resumed.
        let mut load = load.with_generations(vec![0; 100]);
        load.round();
        host.wait_for_backend_state(&device, XenbusState::Connected);
        load.finish();
        host.stop();
    }
}
