//! virtio-blk: daemons that are killed and stopped at random times, under overlapping requests of all sizes, which complete in any order.

use std::path::PathBuf;
use std::time::Duration;

use mqblk_driver::virtio_blk::{BlkConnectOptions, BlkDevice};
use mqblk_tests::crash::blk::{BlkQueues, connect_options};
use mqblk_tests::crash::daemon::RestartableDaemon;
use mqblk_tests::crash::kills::{self, KillPlan, RunningLoad, Victim, kill_and_stop, replayed_requests};
use mqblk_tests::crash::load::LoadHistory;
use mqblk_tests::crash::stats::CrashStats;
use mqblk_tests::hostile::TIMEOUT;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use rustix::process::Pid;

/// Disks: their ids and special settings.
const DISKS: [(&str, &str); 3] = [
    ("cache", "storage=file,direct=off"),
    ("direct", "storage=file,direct=on,merge=on"),
    ("fault", "storage=fault,inner=file,direct=off,merge=on,fault-jitter-us=3000,fault-reorder=4"),
];

struct Rig {
    daemon: RestartableDaemon,
    devices: Vec<BlkDevice>,
    /// Connect with packed rings, and with rings that are used in order.
    rings: (bool, bool),
}

impl Rig {
    fn start(disks: &[(&str, &str)], more: &[&str]) -> Rig {
        let mut arguments = vec!["--workers".to_owned(), "2".to_owned()];
        arguments.extend(more.iter().map(|one| (*one).to_owned()));
        for (id, settings) in disks {
            let disk = format!("id={id},socket=FOLDER/{id}.sock,path=FOLDER/{id}.img,queues=2,{settings}");
            arguments.extend(["--disk".to_owned(), disk]);
        }
        let images: Vec<String> = disks.iter().map(|(id, _)| format!("{id}.img")).collect();
        let images: Vec<&str> = images.iter().map(String::as_str).collect();
        Rig { daemon: RestartableDaemon::start(&arguments, &images), devices: vec![], rings: (false, false) }
    }

    fn connect(&mut self, id: &str) -> BlkQueues {
        let (packed, in_order) = self.rings;
        let options = BlkConnectOptions { packed, in_order, ..connect_options(self.socket(id), 2) };
        let (device, port) = BlkQueues::connect(&options);
        self.devices.push(device);
        port
    }

    fn socket(&self, id: &str) -> PathBuf {
        self.daemon.folder().join(format!("{id}.sock"))
    }

    fn image(&self, id: &str) -> PathBuf {
        self.daemon.folder().join(format!("{id}.img"))
    }

    /// Ends a load and checks the image.
    fn check(&self, id: &str, (mut history, port): (LoadHistory, BlkQueues)) -> CrashStats {
        drop(port);
        let bytes = std::fs::read(self.image(id)).expect("the image");
        if let Err(why) = history.check_disk(0, &bytes) {
            panic!("the image of {id}: {why}");
        }
        history.stats
    }
}

impl Victim for Rig {
    fn kill(&mut self) {
        self.daemon.kill();
    }
    fn pid(&self) -> Pid {
        self.daemon.pid()
    }
    fn stop(&mut self) {
        self.daemon.stop();
    }
    fn request_stop(&mut self) {
        self.daemon.request_stop();
    }
    fn spawn(&mut self) {
        self.daemon.spawn();
    }
    fn reconnect(&mut self, timeout: Duration) -> Result<(), String> {
        let mut each = self.devices.iter_mut();
        each.try_for_each(|device| device.reconnect(timeout)).map_err(|error| error.to_string())
    }
    fn log(&self) -> String {
        self.daemon.log()
    }
    fn drop_caches(&mut self) {
        kills::drop_page_cache(&self.image("cache"));
    }
}

#[test]
fn killed_and_stopped_under_load() {
    kill_and_stop_under_load(false, false);
}

#[test]
fn killed_and_stopped_under_load_with_packed_rings() {
    kill_and_stop_under_load(true, false);
}

#[test]
fn killed_and_stopped_under_load_with_rings_in_order() {
    kill_and_stop_under_load(false, true);
}

#[test]
fn killed_and_stopped_under_load_with_packed_rings_in_order() {
    kill_and_stop_under_load(true, true);
}

fn kill_and_stop_under_load(packed: bool, in_order: bool) {
    let seed = kills::seed();
    let mut rig = Rig::start(&DISKS, &[]);
    rig.rings = (packed, in_order);
    let start = |(at, (id, _)): (u64, &(&str, &str))| {
        let port = rig.connect(id);
        RunningLoad::start(id, port, LoadHistory::new(1), seed + at)
    };
    let mut loads: Vec<_> = (0..).zip(&DISKS).map(start).collect();
    let mut stats = kill_and_stop(&mut rig, &mut loads, KillPlan::usual(), seed);
    let ended: Vec<_> = loads.into_iter().map(RunningLoad::finish).collect();
    rig.daemon.stop();
    for ((id, _), ended) in DISKS.iter().zip(ended) {
        stats.add(&rig.check(id, ended));
    }
    stats.replayed = replayed_requests(&rig.log());
    let rings =
        [(packed, ", packed rings"), (in_order, ", in order")].into_iter().filter_map(|(is, text)| is.then_some(text));
    stats.log(&rings.fold("virtio-blk".to_owned(), |name, text| name + text), seed);
    assert!(stats.replayed > 0, "no kill found a request under way");
}

/// Each request takes 0.2 s, so that there are always some in flight.
const SLOW: [(&str, &str); 2] = [
    ("slow", "storage=fault,inner=file,direct=off,fault-latency-us=200000,fault-jitter-us=50000"),
    ("cache", "storage=file,direct=off"),
];

#[test]
fn killed_and_stopped_while_storage_is_slow() {
    let seed = kills::seed();
    let mut rig = Rig::start(&SLOW, &[]);
    let start = |(at, (id, _)): (u64, &(&str, &str))| {
        let port = rig.connect(id);
        RunningLoad::start(id, port, LoadHistory::new(1), seed + at)
    };
    let mut loads: Vec<_> = (0..).zip(&SLOW).map(start).collect();
    let mut stats = kill_and_stop(&mut rig, &mut loads, KillPlan::slow(), seed);
    let ended: Vec<_> = loads.into_iter().map(RunningLoad::finish).collect();
    rig.daemon.stop();
    for ((id, _), ended) in SLOW.iter().zip(ended) {
        stats.add(&rig.check(id, ended));
    }
    stats.replayed = replayed_requests(&rig.log());
    stats.log("virtio-blk, slow storage", seed);
    assert!(stats.replayed > 0, "no kill found a request under way");
}

#[test]
fn drivers_that_die_and_reconnect_at_once() {
    let seed = kills::seed();
    let mut random = SmallRng::seed_from_u64(seed);
    for (id, settings) in [SLOW[0], DISKS[2], DISKS[1]] {
        let mut rig = Rig::start(&[(id, settings)], &[]);
        let mut history = LoadHistory::new(1);
        let mut kills = 0;
        for round in 0..if kills::is_full_run() { 20 } else { 4 } {
            let port = rig.connect(id);
            let mut load = RunningLoad::start(id, port, history, seed + round);
            load.wait_completions(random.random_range(1..60));
            std::thread::sleep(Duration::from_micros(random.random_range(0..20_000)));
            let (known, port) = load.die();
            history = known;
            // As a killed process: the socket is closed first, then its memory.
            rig.devices.clear();
            drop(port);
            if random.random_ratio(1, 3) {
                rig.daemon.kill();
                rig.daemon.spawn();
                kills += 1;
            }
        }
        let port = rig.connect(id);
        let mut load = RunningLoad::start(id, port, history, seed);
        load.wait_completions(60);
        let ended = load.finish();
        rig.daemon.stop();
        let mut stats = rig.check(id, ended);
        stats.kills = kills;
        stats.log(&format!("virtio-blk, drivers that die: {id}"), seed);
    }
}

#[test]
fn stopped_while_storage_does_not_complete_in_time() {
    let seed = kills::seed();
    let disk = ("stuck", "storage=fault,inner=file,direct=off,fault-latency-us=1800000");
    let mut rig = Rig::start(&[disk], &["--drain-timeout-s", "1"]);
    let port = rig.connect(disk.0);
    let mut load = RunningLoad::start(disk.0, port, LoadHistory::new(1), seed);
    load.wait_completions(1);
    // The requests that follow the first completions are pulled within this time, and take longer than the drain timeout.
    std::thread::sleep(Duration::from_millis(300));
    rig.stop();
    rig.spawn();
    rig.reconnect(TIMEOUT.time()).expect("the daemon that was started again");
    load.wait_completions(40);
    let ended = load.finish();
    rig.daemon.stop();
    let mut stats = rig.check(disk.0, ended);
    (stats.stops, stats.replayed) = (1, replayed_requests(&rig.log()));
    stats.log("virtio-blk, storage that does not answer", seed);
    let log = rig.log();
    assert!(log.contains("storage did not answer in time"), "{log}");
    assert!(stats.replayed > 0, "nothing was left to the next daemon:\n{log}");
}
