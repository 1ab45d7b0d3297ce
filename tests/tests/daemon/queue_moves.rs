//! Queues of virtio-blk, virtio-scsi and Xen disks that move between workers at random thousands of times under load:
//! every byte is verified, every request is counted once, and no worker keeps anything.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use mqblk_admin::{Client, StatQuery};
use mqblk_test_bounds::Bound;
use mqblk_tests::blkif::SimulatedHost;
use mqblk_tests::crash::daemon::RestartableDaemon;
use mqblk_tests::crash::kills::{self, RunningLoad};
use mqblk_tests::crash::load::LoadHistory;
use mqblk_tests::crash::scsi::{self, ScsiQueues};
use mqblk_tests::hostile::daemon::mqblk_binary;
use mqblk_tests::hostile::{TIMEOUT, wait_for};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use serde_json::json;

const WORKERS: u64 = 3;
/// Sets the number of moves (2000).
const MOVES: &str = "MQBLK_QUEUE_MOVES";
/// The devices, and the number of their request queues.
pub(super) const DEVICES: [(&str, u64); 3] = [("blk", 4), ("scsi", 2), ("xen", 2)];
/// Duration of a run of a load in seconds. Each verifies all its writes at its end.
const RUN: &str = "3";
/// Only a failing test waits this long for progress.
const STALL: Bound = Bound::seconds(60);

/// Returns the command that loads a device and verifies it.
fn load(folder: &Path, device: usize) -> Command {
    let (id, queues) = DEVICES[device];
    let path = |name: String| folder.join(name).display().to_string();
    let target = match id {
        "blk" => vec!["--socket".to_owned(), path("blk.sock".to_owned())],
        "scsi" => ["--interface", "virtio-scsi", "--socket"]
            .map(str::to_owned)
            .into_iter()
            .chain([path("scsi.sock".to_owned())])
            .collect(),
        _ => {
            let xen = path("xen".to_owned());
            ["--interface", "xen", "--vdev", "xvda", "--xen"].map(str::to_owned).into_iter().chain([xen]).collect()
        }
    };
    let mut command = Command::new(mqblk_binary());
    let load = ["--rw", "randrw", "--bs", "4k", "--iodepth", "8", "--verify", "crc32c", "--allow-write"];
    command.arg("bench").args(target).args(load);
    command.args(["--runs", "1", "--warmup", "0", "--runtime", RUN, "--queues", &queues.to_string()]);
    command.args(["--jobs", &queues.to_string()]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

/// Loads that are restarted when they end.
pub(super) struct Loads<'a> {
    folder: &'a Path,
    running: Vec<Child>,
    runs: [u32; DEVICES.len()],
}

impl<'a> Loads<'a> {
    /// Starts the loads.
    pub(super) fn start(folder: &'a Path) -> Loads<'a> {
        let running = (0..DEVICES.len()).map(|device| load(folder, device).spawn().expect("a load")).collect();
        Loads { folder, running, runs: [0; DEVICES.len()] }
    }

    /// Restarts the ended loads. Fails when one found an error.
    pub(super) fn renew(&mut self) {
        for device in 0..DEVICES.len() {
            if self.running[device].try_wait().expect("the load's state").is_some() {
                let next = load(self.folder, device).spawn().expect("a load");
                let ended = std::mem::replace(&mut self.running[device], next);
                self.check(device, ended);
            }
        }
    }

    fn check(&mut self, device: usize, ended: Child) {
        let output = ended.wait_with_output().expect("the load's output");
        assert!(output.status.success(), "{}: {}", DEVICES[device].0, String::from_utf8_lossy(&output.stderr));
        self.runs[device] += 1;
    }

    /// Waits for the last runs. Returns the number of runs of each.
    pub(super) fn finish(mut self) -> [u32; DEVICES.len()] {
        for (device, ended) in std::mem::take(&mut self.running).into_iter().enumerate() {
            self.check(device, ended);
        }
        self.runs
    }
}

/// Starts a host with a disk of each interface and this many workers.
pub(super) fn start_host(workers: u64, more: &[&str]) -> SimulatedHost {
    let blk = "path=FOLDER/blk.img,id=blk,socket=FOLDER/blk.sock,queues=4";
    let xen = "path=FOLDER/xen.img,id=xen,interface=xen,domid=1,vdev=xvda,queues=2";
    let mut host = SimulatedHost::start(&["--workers", "1", "--xen-watch"]);
    host.stop();
    ["blk", "scsi", "xen"].iter().for_each(|name| drop(host.create_image(&format!("{name}.img"), 8 << 20)));
    let workers = workers.to_string();
    let arguments = ["--workers", &workers, "--admin", "FOLDER/admin", "--disk", blk, "--disk", xen];
    let controller =
        ["--controller", "id=scsi,socket=FOLDER/scsi.sock,queues=2", "--lun", "controller=scsi,path=FOLDER/scsi.img"];
    host.spawn_with(&[&arguments[..], &controller, more].concat());
    host
}

#[test]
fn verified_loads_survive_random_moves() {
    let mut host = start_host(WORKERS, &[]);
    let folder = host.folder().to_owned();
    let mut admin = wait_for("the admin socket", || Client::connect_with(&folder.join("admin"), TIMEOUT.time()).ok());

    let wanted = std::env::var(MOVES).map_or(2000, |text| text.parse().expect(MOVES));
    let mut loads = Loads::start(&folder);
    let mut random = SmallRng::seed_from_u64(7);
    let mut moves = [0_u64; DEVICES.len()];
    let mut last = Instant::now();
    while moves.iter().sum::<u64>() < wanted {
        let device = random.random_range(0..DEVICES.len());
        let (id, queues) = DEVICES[device];
        let (queue, worker) = (random.random_range(0..queues), random.random_range(0..WORKERS));
        match admin.call("queue.move", &json!({ "id": id, "queue": queue, "worker": worker })) {
            Ok(moved) if moved["moved"] == true => {
                moves[device] += 1;
                last = Instant::now();
            }
            Ok(_) => {}
            Err(error) => {
                assert!(error.to_string().contains("it stays where it is"), "{id} {queue} to {worker}: {error}")
            }
        }
        // Between two loads no queue is attached.
        assert!(!STALL.is_exceeded_since(last), "no queue could be moved: {moves:?}");
        loads.renew();
    }
    let runs = loads.finish();
    assert!(moves.iter().all(|moves| *moves > wanted / 20), "{moves:?}");
    assert!(runs.iter().all(|runs| *runs > 0), "{runs:?}");

    assert_counters(&mut admin);
    host.assert_alive("the moves");
    host.stop();
}

/// COMPARE AND WRITE and ORWRITE keep private memory in the pool of the worker that serves their queue.
#[test]
fn commands_of_several_steps_survive_moves() {
    let (seed, workers) = (kills::seed(), 2);
    let arguments = ["--workers", &workers.to_string(), "--admin", "FOLDER/admin", "--controller"].map(str::to_owned);
    let arguments = [
        &arguments[..],
        &["id=c,socket=FOLDER/c.sock,queues=2", "--lun", "controller=c,path=FOLDER/unit.img,direct=off"]
            .map(str::to_owned),
    ];
    let mut daemon = RestartableDaemon::start(&arguments.concat(), &["unit.img"]);
    let folder = daemon.folder().to_owned();
    let mut admin = wait_for("the admin socket", || Client::connect_with(&folder.join("admin"), TIMEOUT.time()).ok());
    let (_controller, queues) = ScsiQueues::connect(&scsi::connect_options(folder.join("c.sock"), 2));
    let mut load = RunningLoad::start("c", queues, LoadHistory::new(1), seed);
    let mut moved = 0;
    while moved < 100 {
        // Five of 32 requests are such commands: each worker begins some between two moves of a queue.
        load.wait_completions(200);
        for queue in 0..2 {
            let to = json!({ "id": "c", "queue": queue, "worker": (moved + queue) % workers });
            let answer = admin.call("queue.move", &to).expect("the daemon lives");
            moved += i32::from(answer["moved"] == true);
        }
    }
    let (mut history, queues) = load.finish();
    drop(queues);
    daemon.stop();
    let image = std::fs::read(folder.join("unit.img")).expect("the image");
    history.check_disk(0, &image).unwrap_or_else(|why| panic!("the image: {why}"));
}

/// Checks that every request was counted once and none failed.
pub(super) fn assert_counters(admin: &mut Client) {
    let stat = admin.stat(&StatQuery::default()).expect("statistics");
    let totals = stat.disks.iter().map(|disk| &disk.totals).chain(stat.controllers.iter().map(|one| &one.totals));
    for totals in totals {
        assert!(totals.counters.requests > 0 && totals.counters.errors == 0, "{totals:?}");
        assert_eq!(totals.in_flight, 0, "{totals:?}");
        assert_eq!(totals.counters.malformed, 0, "{totals:?}");
        assert_eq!(totals.latency.reads.total.count, totals.counters.reads, "every read is counted once");
    }
}
