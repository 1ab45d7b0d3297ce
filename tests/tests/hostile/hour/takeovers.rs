//! Takeovers under attack: a new daemon every few seconds. Hostile guests, frontends and admin clients try to prevent
//! it, while verifying disks, limits, groups and changes at run time go on.
//!
//! The short form takes over every two seconds, the long one (`MQBLK_HOSTILE_SECONDS`) every ten. No takeover and no
//! request of a verifying disk may fail. The attacks take turns, as in the hour without takeovers; in every sixth
//! interval all run at once. The long form also checks that each verifying disk without a limit has at least half of
//! its undisturbed throughput while they take turns.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use mqblk_tests::crash::blk::{self, BlkQueues};
use mqblk_tests::crash::daemon::RestartableDaemon;
use mqblk_tests::crash::scsi::{self, ScsiQueues};
use mqblk_tests::crash::stats::print_uncaptured;
use mqblk_tests::hostile::attacks::{Attack, RunningAttack, admin_clients, controllers, frontends, guests};
use mqblk_tests::hostile::autogroup::NoAutogroups;
use mqblk_tests::hostile::timed_load::{LoadPhase, RunningTimedLoad};
use mqblk_tests::hostile::{TIMEOUT, wait_for};

/// Takeovers with attacks that take turns, before one with all at once.
const ROUNDS: usize = 5;
const SHORT_INTERVAL: Duration = Duration::from_secs(2);
const LONG_INTERVAL: Duration = Duration::from_secs(10);
/// Images of the verifying virtio-blk clients. The last one has a limit, with an attacker in its group.
const GOOD: [(&str, &str); 3] = [
    ("good-direct", "path=FOLDER/good-direct.img"),
    ("good-cached", "path=FOLDER/good-cached.img,direct=off"),
    ("good-limited", "path=FOLDER/good-limited.img,direct=off,limit-group=shared"),
];
/// The disks under attack, one for each.
const BAD: [(&str, &str); 11] = [
    ("small-reads", "storage=null,size=1M,limit-group=shared"),
    ("limited-reads", "storage=null,size=1M,iops=200"),
    ("flushes", "path=FOLDER/flushes.img,direct=off"),
    ("kicks", "storage=null,size=1M"),
    ("rewriting", "storage=null,size=1M"),
    ("broken-rings", "storage=null,size=1M"),
    ("stops-and-starts", "storage=null,size=1M"),
    ("any-messages", "storage=null,size=1M"),
    ("connections", "storage=null,size=1M"),
    ("unread-replies", "storage=null,size=1M"),
    ("memory-tables", "storage=null,size=1M"),
];
const IMAGES: [&str; 8] = [
    "good-direct.img",
    "good-cached.img",
    "good-limited.img",
    "flushes.img",
    "lun0.img",
    "lun1.img",
    "lun2.img",
    "added.img",
];
const IMAGE_BYTES: u64 = 8 << 20;
const WORKERS: u64 = 2;

struct Rig(RestartableDaemon);

impl Rig {
    fn start() -> Rig {
        let mut arguments: Vec<String> =
            ["--workers", "2", "--admin", "FOLDER/admin", "--state", "FOLDER/state/s.json", "--drain-timeout-s", "1"]
                .map(str::to_owned)
                .into();
        let mut add = |option: &str, value: &str| arguments.extend([option.to_owned(), value.to_owned()]);
        add("--sandbox", "on");
        add("--sandbox-allow", "FOLDER");
        add("--limit-group", "name=shared,iops=4000");
        for (id, settings) in GOOD.iter().chain(&BAD) {
            let queues = if id.starts_with("good") { 2 } else { 4 };
            add("--disk", &format!("id={id},socket=FOLDER/{id}.sock,queues={queues},{settings}"));
        }
        for id in ["good-scsi", "bad-commands", "task-management"] {
            add("--controller", &format!("id={id},socket=FOLDER/{id}.sock,queues=2"));
        }
        add("--lun", "controller=good-scsi,target=0,path=FOLDER/lun0.img");
        add("--lun", "controller=good-scsi,target=1,path=FOLDER/lun1.img,direct=off");
        add("--lun", "controller=bad-commands,target=0,storage=null,size=1M");
        add("--lun", "controller=task-management,target=0,path=FOLDER/lun2.img,direct=off");
        let mut daemon = RestartableDaemon::prepare(&arguments, &IMAGES);
        for image in IMAGES {
            let file = std::fs::File::options().write(true).open(daemon.folder().join(image));
            file.and_then(|file| file.set_len(IMAGE_BYTES)).expect("an image");
        }
        std::fs::create_dir(daemon.folder().join("state")).expect("a folder");
        daemon.spawn();
        let rig = Rig(daemon);
        wait_for("the daemon's sockets", || rig.socket("task-management").exists().then_some(()));
        rig
    }

    fn socket(&self, id: &str) -> PathBuf {
        self.0.folder().join(format!("{id}.sock"))
    }

    fn loads(&self) -> Vec<RunningTimedLoad> {
        let mut loads = Vec::new();
        for (seed, (id, _)) in (1..).zip(GOOD) {
            let options = blk::connect_options(self.socket(id), 2);
            loads.push(RunningTimedLoad::start(id, 1, seed, move || BlkQueues::connect(&options)));
        }
        let options = scsi::connect_options(self.socket("good-scsi"), 2);
        loads.push(RunningTimedLoad::start("good-scsi", 2, 9, move || ScsiQueues::connect(&options)));
        loads
    }

    /// Starts attack `first` and each `step` after it.
    fn attacks(&self, first: usize, step: usize) -> Vec<RunningAttack> {
        let (admin, added) = (self.0.folder().join("admin"), self.0.folder().join("added.img"));
        let new_socket = self.0.folder().join("new.sock");
        let moved: Vec<&'static str> = BAD.iter().chain(&GOOD).map(|(id, _)| *id).collect();
        let (limited, grouped) = (vec!["small-reads", "limited-reads", "flushes"], "shared");
        let at = |id: &str| self.socket(id);
        let all: Vec<(&'static str, Attack)> = vec![
            ("small-reads", repeated(at("small-reads"), guests::small_reads)),
            ("limited-reads", repeated(at("limited-reads"), guests::small_reads)),
            ("flushes", repeated(at("flushes"), |socket| guests::flushes_and_zeroes(socket, IMAGE_BYTES / 512))),
            ("kicks", repeated(at("kicks"), guests::kicks)),
            ("rewriting", repeated(at("rewriting"), |socket| guests::rewriting(socket, 1))),
            ("broken-rings", repeated(at("broken-rings"), |socket| guests::broken_rings(socket, 2))),
            ("stops-and-starts", repeated(at("stops-and-starts"), guests::stops_and_starts)),
            ("any-messages", repeated(at("any-messages"), |socket| frontends::any_messages(socket, 3))),
            ("connections", repeated(at("connections"), |socket| frontends::connections(socket, 4))),
            ("unread-replies", repeated(at("unread-replies"), frontends::unread_replies)),
            ("memory-tables", repeated(at("memory-tables"), frontends::memory_tables)),
            ("bad-commands", repeated(at("bad-commands"), |socket| controllers::bad_commands(socket, 6))),
            ("task-management", repeated(at("task-management"), |socket| controllers::task_management(socket, 7))),
            ("admin-rubbish", repeated(admin.clone(), |admin| admin_clients::rubbish(admin, 8))),
            ("admin-stat", repeated(admin.clone(), admin_clients::statistics)),
            (
                "admin-luns",
                repeated(admin.clone(), move |admin| admin_clients::luns(admin, "bad-commands", added.clone())),
            ),
            (
                "admin-moves",
                repeated(admin.clone(), move |admin| admin_clients::moves(admin, moved.clone(), WORKERS, 9)),
            ),
            (
                "admin-settings",
                repeated(admin, move |admin| {
                    admin_clients::settings(admin, limited.clone(), grouped, new_socket.clone(), 10)
                }),
            ),
        ];
        all.into_iter().skip(first).step_by(step).map(|(name, attack)| RunningAttack::start(name, attack)).collect()
    }
}

/// An attack on a socket that restarts when a takeover has ended its connection.
fn repeated(socket: PathBuf, make: impl Fn(PathBuf) -> Attack + Send + 'static) -> Attack {
    Box::new(move |control| {
        while !control.is_stopped() {
            let attack = make(socket.clone());
            if catch_unwind(AssertUnwindSafe(|| attack(control))).is_err() {
                control.pause(Duration::from_millis(20));
            }
        }
    })
}

/// Sum of a load's phases.
#[derive(Default)]
struct Sum {
    requests: u64,
    length: Duration,
    worst: Duration,
}

impl Sum {
    fn add(&mut self, phase: &LoadPhase) {
        self.requests += phase.record.completed();
        self.length += phase.length;
        self.worst = self.worst.max(phase.record.worst());
    }

    fn throughput(&self) -> f64 {
        self.requests as f64 / self.length.as_secs_f64()
    }
}

/// Waits for `time`, and until each load and attack has made progress.
fn watch(time: Duration, loads: &[RunningTimedLoad], attacks: &[RunningAttack]) {
    let (began, bound) = (Instant::now(), time + TIMEOUT.time());
    let all_have_begun = || attacks.iter().all(|attack| attack.steps() > 0);
    while began.elapsed() < time || (!all_have_begun() && began.elapsed() < bound) {
        std::thread::sleep(Duration::from_millis(50));
        loads.iter().for_each(RunningTimedLoad::assert_runs);
        attacks.iter().for_each(RunningAttack::assert_runs);
    }
}

#[test]
fn takeovers_while_everybody_attacks() {
    let long = std::env::var("MQBLK_HOSTILE_SECONDS").ok().map(|text| text.parse::<u64>().expect("seconds"));
    let interval = if long.is_some() { LONG_INTERVAL } else { SHORT_INTERVAL };
    let count = long.map_or(ROUNDS + 1, |seconds| (seconds / LONG_INTERVAL.as_secs()) as usize);
    let _priorities = long.map(|_| NoAutogroups::begin());
    let mut rig = Rig::start();
    let loads = rig.loads();
    // Until each has written all its blocks.
    watch(interval, &loads, &[]);
    loads.iter().for_each(|load| _ = load.end_phase());
    watch(interval, &loads, &[]);
    let undisturbed: Vec<LoadPhase> = loads.iter().map(RunningTimedLoad::end_phase).collect();
    let mut sums: Vec<Sum> = loads.iter().map(|_| Sum::default()).collect();
    let (mut steps, mut longest) = (BTreeMap::<&str, u64>::new(), Duration::ZERO);
    for takeover in 0..count {
        let all_at_once = takeover % (ROUNDS + 1) == ROUNDS;
        let attacks = if all_at_once { rig.attacks(0, 1) } else { rig.attacks(takeover % (ROUNDS + 1), ROUNDS) };
        loads.iter().for_each(|load| _ = load.end_phase());
        watch(interval, &loads, &attacks);
        rig.0.assert_alive();
        let begin = Instant::now();
        rig.0.take_over();
        longest = longest.max(begin.elapsed());
        for (sum, load) in sums.iter_mut().zip(&loads) {
            let phase = load.end_phase();
            assert!(phase.record.completed() > 0, "{}: no progress", load.name);
            if !all_at_once {
                sum.add(&phase);
            }
        }
        attacks.iter().for_each(RunningAttack::begin_stop);
        for attack in attacks {
            let name = attack.name;
            *steps.entry(name).or_default() += attack.finish();
        }
    }
    let ratios = loads.iter().zip(undisturbed.iter().zip(&sums));
    let ratios: Vec<(&str, f64)> =
        ratios.map(|(load, (before, sum))| (load.name, sum.throughput() / before.throughput())).collect();
    loads.into_iter().for_each(RunningTimedLoad::finish);
    let worst: Vec<Duration> = sums.iter().map(|sum| sum.worst).collect();
    print_uncaptured(&format!(
        "{count} takeovers under attack, each {longest:.1?} at most; throughput beside that without: {ratios:.2?}; worst latencies: \
         {worst:.1?}; steps of attacks: {steps:?}\n"
    ));
    assert!(steps.values().all(|steps| *steps > 0), "an attack has done nothing: {steps:?}");
    let log = rig.0.log();
    let panics: Vec<_> = log.lines().filter(|line| line.contains("panic")).collect();
    assert!(panics.is_empty(), "{}", panics.join("\n"));
    if long.is_some() {
        for (name, ratio) in ratios.iter().filter(|(name, _)| *name != "good-limited") {
            assert!(*ratio >= 0.5, "{name}: {ratio:.2} of its undisturbed throughput");
        }
    }
    rig.0.stop();
}
