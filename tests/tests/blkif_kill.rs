//! The back-end is killed, or stopped, in the middle of a guest's verified requests, again and again. The guest notices nothing but
//! that it takes longer, and nothing is lost.

use std::time::Duration;

use mqblk_driver::blkfront::Options;
use mqblk_tests::blkif::{Host, Load};
use mqblk_xen::vbd::State;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

/// Storages, each of which a daemon after the first finds as it was left.
const STORAGES: [&str; 2] = [
    // Answers come in whatever order.
    "storage=fault,inner=file,path=FOLDER/a.img,fault-jitter-us=2000,fault-reorder=4",
    "storage=file,path=FOLDER/a.img,poll=off",
];

/// With direct I/O no page is mapped for a request alone.
const GRANTS: [&str; 3] = ["copy", "map,direct=off", "persistent"];

fn options(host: &Host, queues: u16, order: u8) -> Options {
    let device = host.make(1, "xvda", "mqblk:a");
    Options { queues, ring_order: Some(order), ..host.options(&device) }
}

fn start(settings: &str) -> Host {
    let folder = tempfile::tempdir().expect("a folder");
    let image = folder.path().join("a.img");
    std::fs::File::create(&image).and_then(|file| file.set_len(1 << 20)).expect("an image");
    // The image has to be there before the daemon is, and as long.
    let image = folder.keep().join("a.img").display().to_string();
    let settings = settings.replace("FOLDER/a.img", &image);
    Host::start(&["--workers", "2", "--disk", &format!("id=a,interface=xen,queues=2,{settings}")])
}

#[test]
fn killed_in_the_middle_of_writes() {
    for (storage, grants) in STORAGES.into_iter().flat_map(|storage| GRANTS.map(|it| (storage, it))) {
        let mut host = start(&format!("{storage},grants={grants}"));
        let options = options(&host, 2, 0);
        let client = std::thread::spawn({
            let options = options.clone();
            move || {
                let mut load = Load::connect(&options, 200, 7);
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
        while !client.is_finished() && kills < 12 {
            std::thread::sleep(Duration::from_micros(random.random_range(0..60_000)));
            host.kill();
            host.spawn();
            kills += 1;
        }
        let (verified, generations) = client.join().expect("a guest that notices nothing");
        assert!(verified > 500 && kills >= 5, "{storage} {grants}: {verified} verified, {kills} kills");
        // What is on the disk is what was written, also for another guest after another daemon.
        host.kill();
        host.spawn();
        let mut load = Load::connect(&options, 200, 8).knowing(generations);
        load.verify_all();
        load.finish();
        let log = host.log();
        assert!(log.contains("ring taken up"), "{storage} {grants}: no journal was used:\n{log}");
        let replayed: usize = log
            .lines()
            .filter_map(|line| line.split("replayed=").nth(1)?.split_whitespace().next()?.parse::<usize>().ok())
            .sum();
        // The other storage may be too fast to be caught at work.
        if storage == STORAGES[0] {
            assert!(replayed > 0, "{storage} {grants}: nothing was ever in flight when it was killed:\n{log}");
        }
        host.stop();
    }
}

#[test]
fn stopped_in_good_order_and_started_again() {
    let mut host = start(STORAGES[0]);
    let options = options(&host, 2, 1);
    let client = std::thread::spawn(move || {
        let mut load = Load::connect(&options, 200, 9);
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
            // Nothing of the guest's is held while nobody serves it.
            assert_eq!(host.machine.counters().live_mappings, 0);
        }
        host.spawn();
    }
    client.join().expect("a guest that notices nothing");
    assert_eq!(host.complaints(), Vec::<String>::new());
    host.stop();
    assert_eq!(host.journals(), 0, "the guest has closed: no journal is needed");
}

#[test]
fn without_journals_too_when_nothing_was_in_flight() {
    for settings in ["--xen-state=off", "--log=info"] {
        let disk = "id=a,interface=xen,storage=ram,size=1M,queues=2,journal=off";
        let mut host = Host::start(&["--workers", "1", "--disk", disk]);
        let _ = settings;
        let device = host.make(1, "xvda", "mqblk:a");
        let mut load = Load::connect(&Options { queues: 2, ..host.options(&device) }, 100, 1);
        load.round();
        assert_eq!(host.journals(), 0);
        host.kill();
        host.spawn();
        // The storage was in memory, and is gone with the daemon; the rings go on.
        let mut load = load.knowing(vec![0; 100]);
        load.round();
        host.wait_state(&device, State::Connected);
        load.finish();
        host.stop();
    }
}
