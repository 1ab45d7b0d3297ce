//! virtio-scsi: daemons that are killed and stopped at random times. Logical units of different speed share queues,
//! with multi-step commands and task management functions among the reads and writes.

use std::path::PathBuf;
use std::time::Duration;

use mqblk_driver::virtio_scsi::{ScsiConnectOptions, ScsiController};
use mqblk_tests::crash::daemon::RestartableDaemon;
use mqblk_tests::crash::kills::{self, KillPlan, RunningLoad, Victim, kill_and_stop, replayed_requests};
use mqblk_tests::crash::load::LoadHistory;
use mqblk_tests::crash::scsi::{ScsiQueues, connect_options};
use mqblk_tests::crash::stats::CrashStats;
use mqblk_tests::hostile::TIMEOUT;
use rustix::process::Pid;

/// Logical units, in the order of their numbers.
const UNITS: [(&str, &str); 3] = [
    ("cache", "storage=file,direct=off"),
    ("fault", "storage=fault,inner=file,direct=off,merge=on,fault-jitter-us=3000,fault-reorder=4"),
    ("direct", "storage=file,direct=on,merge=on"),
];

struct Rig {
    daemon: RestartableDaemon,
    device: Option<ScsiController>,
    /// True: connects with packed rings.
    packed: bool,
}

impl Rig {
    fn start(units: &[(&str, &str)], more: &[&str]) -> Rig {
        let mut arguments = vec!["--workers".to_owned(), "2".to_owned()];
        arguments.extend(more.iter().map(|one| (*one).to_owned()));
        arguments.extend(["--controller".to_owned(), "id=c,socket=FOLDER/c.sock,queues=3".to_owned()]);
        for (lun, (name, settings)) in units.iter().enumerate() {
            let unit = format!("controller=c,target=0,lun={lun},path=FOLDER/{name}.img,{settings}");
            arguments.extend(["--lun".to_owned(), unit]);
        }
        let images: Vec<String> = units.iter().map(|(name, _)| format!("{name}.img")).collect();
        let images: Vec<&str> = images.iter().map(String::as_str).collect();
        Rig { daemon: RestartableDaemon::start(&arguments, &images), device: None, packed: false }
    }

    fn connect(&mut self) -> ScsiQueues {
        let options = connect_options(self.daemon.folder().join("c.sock"), 3);
        let (device, port) = ScsiQueues::connect(&ScsiConnectOptions { packed: self.packed, ..options });
        self.device = Some(device);
        port
    }

    fn image(&self, name: &str) -> PathBuf {
        self.daemon.folder().join(format!("{name}.img"))
    }

    /// Ends a load and checks the images.
    fn check(&self, units: &[(&str, &str)], (mut history, port): (LoadHistory, ScsiQueues)) -> CrashStats {
        drop(port);
        for (disk, (name, _)) in units.iter().enumerate() {
            let bytes = std::fs::read(self.image(name)).expect("the image");
            if let Err(why) = history.check_disk(disk, &bytes) {
                panic!("the image of {name}: {why}");
            }
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
        let mut each = self.device.iter_mut();
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
    kill_and_stop_under_load(false);
}

#[test]
fn killed_and_stopped_under_load_with_packed_rings() {
    kill_and_stop_under_load(true);
}

fn kill_and_stop_under_load(packed: bool) {
    let seed = kills::seed();
    let mut rig = Rig::start(&UNITS, &[]);
    rig.packed = packed;
    let port = rig.connect();
    let mut loads = [RunningLoad::start("scsi", port, LoadHistory::new(UNITS.len()), seed)];
    let mut stats = kill_and_stop(&mut rig, &mut loads, KillPlan::usual(), seed);
    let [load] = loads;
    let ended = load.finish();
    rig.daemon.stop();
    stats.add(&rig.check(&UNITS, ended));
    stats.replayed = replayed_requests(&rig.log());
    stats.log(if packed { "virtio-scsi, packed rings" } else { "virtio-scsi" }, seed);
    assert!(stats.replayed > 0, "no kill found a request under way");
    assert!(stats.compare_writes > 0, "no COMPARE AND WRITE succeeded");
}

/// Each request of one of them takes 0.2 s, beside fast ones on the same queues.
const SLOW: [(&str, &str); 2] = [
    ("slow", "storage=fault,inner=file,direct=off,fault-latency-us=200000,fault-jitter-us=50000"),
    ("cache", "storage=file,direct=off"),
];

#[test]
fn killed_and_stopped_while_a_unit_is_slow() {
    let seed = kills::seed();
    let mut rig = Rig::start(&SLOW, &[]);
    let port = rig.connect();
    let mut loads = [RunningLoad::start("scsi", port, LoadHistory::new(SLOW.len()), seed)];
    let mut stats = kill_and_stop(&mut rig, &mut loads, KillPlan::slow(), seed);
    let [load] = loads;
    let ended = load.finish();
    rig.daemon.stop();
    stats.add(&rig.check(&SLOW, ended));
    stats.replayed = replayed_requests(&rig.log());
    stats.log("virtio-scsi, a slow unit", seed);
    assert!(stats.replayed > 0, "no kill found a request under way");
}

#[test]
fn stopped_while_a_unit_does_not_complete_in_time() {
    let seed = kills::seed();
    let units = [("stuck", "storage=fault,inner=file,direct=off,fault-latency-us=1800000")];
    let mut rig = Rig::start(&units, &["--drain-timeout-s", "1"]);
    let port = rig.connect();
    let mut load = RunningLoad::start("scsi", port, LoadHistory::new(1), seed);
    load.wait_completions(1);
    // Requests after the first completions are pulled within this time, and take longer than the drain timeout.
    std::thread::sleep(Duration::from_millis(300));
    rig.stop();
    rig.spawn();
    rig.reconnect(TIMEOUT.time()).expect("the daemon that was started again");
    load.wait_completions(40);
    let ended = load.finish();
    rig.daemon.stop();
    let mut stats = rig.check(&units, ended);
    (stats.stops, stats.replayed) = (1, replayed_requests(&rig.log()));
    stats.log("virtio-scsi, a unit that does not answer", seed);
    let log = rig.log();
    assert!(log.contains("storage did not answer in time"), "{log}");
    assert!(stats.replayed > 0, "nothing was left to the next daemon:\n{log}");
}
