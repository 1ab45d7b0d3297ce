//! Hostile guests, frontends and admin clients, all at the same time, beside disks that verify their reads.
//!
//! `MQBLK_HOSTILE_SECONDS=600` is the long form, which `make soak` runs alone. Both forms check that no request of the
//! verifying disks fails or returns wrong data, that all of them make progress, and that the daemon's descriptors,
//! mappings, threads and memory are the same before and after. The long form also checks that each verifying disk has
//! at least half of its undisturbed throughput, and a worst latency of at most ten times the undisturbed one. The
//! results are printed, and written to `target/test-logs/hostile-hour.json`.
//!
//! For three quarters of the time the attacks take turns, four at a time: as many hostile tenants as verifying ones.
//! The comparison uses this time. Then all attacks run at once. A fair share of a worker would leave the verifying
//! disks a fifth, so only errors, progress and leaks are checked then.
//!
//! The comparison must show the daemon's behaviour. A guest's own threads use the guest's CPUs; on a machine with few
//! CPUs they would take those of the verifying clients. Therefore the attackers' threads have the lowest priority (nice
//! 19; the kernel gives each 1.5 % of the share of a daemon thread), and those of the verifying clients a high one
//! (nice -15, as root). The daemon's work for attackers has the daemon's usual priority. Cheap attacks keep its workers
//! busy: an attacker lays its requests out once, and makes 256 of them available with one store. Undisturbed means that
//! nothing runs beside the verifying disks. These pause for 0.5 ms after each round, as guests with other work do: if
//! they saturated the workers, the criterion of half the throughput would depend only on the number of attackers. The
//! kernel's autogroups are off in the long form, because priorities have no effect between them.
//!
//! Other programs on the machine disturb the comparison: during a build the criteria of the long form fail, direct I/O
//! first (its requests wait for the device with everybody else's). One load, `host-direct`, has no daemon: it does
//! direct I/O by system calls, as a reference.

#![allow(clippy::print_stderr, reason = "a table for people")]

mod takeovers;

use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mqblk_test_bounds::Bound;
use mqblk_tests::crash::blk::{self, BlkQueues};
use mqblk_tests::crash::scsi::{self, ScsiQueues};
use mqblk_tests::crash::stats::print_uncaptured;
use mqblk_tests::hostile::attacks::{Attack, RunningAttack, admin_clients, controllers, frontends, guests};
use mqblk_tests::hostile::autogroup::NoAutogroups;
use mqblk_tests::hostile::daemon::HostileDaemon;
use mqblk_tests::hostile::direct_file::DirectFileQueues;
use mqblk_tests::hostile::loop_file_system::LoopFileSystem;
use mqblk_tests::hostile::timed_load::{LoadPhase, RunningTimedLoad};
use mqblk_tests::hostile::usage::ProcessUsage;
use mqblk_tests::hostile::wait_for;
use serde_json::{Value, json};
use tempfile::TempDir;

/// Rounds of attacks that take turns, four at a time.
const ROUNDS: usize = 5;
/// Seconds under attack in the short form.
const SHORT_SECONDS: u64 = 12;
/// Time for the daemon to release the attackers' resources: 16 reads of 1 GiB are in flight when their guest leaves.
const SETTLE: Bound = Bound::seconds(60);
/// Private memory may grow by this many KiB. The C library's allocator keeps freed memory of threads in up to eight
/// arenas per CPU (after some minutes 145 of 169 MB were in 15 arenas). Attacks before the first measurement make the
/// arenas grow, with their duration.
const MEMORY_KIB: u64 = 96 << 10;
const LONG_MEMORY_KIB: u64 = 32 << 10;
/// The number of mappings may grow by this many: the allocator's arenas, and the stacks of ended threads that the C
/// library keeps.
const PRIVATE_MAPS: usize = 64;
const WORKERS: usize = 2;
/// The disks under attack, one for each attack of a guest or a frontend, with their storage.
const BAD_DISKS: [(&str, &str); 13] = [
    ("small-reads", "storage=ram,size=1M"),
    ("giant-reads", "storage=ram,size=1G"),
    ("giant-file-reads", "storage=file,path=OTHERS/bad.img,direct=off,lock=off"),
    ("flushes", "storage=file,path=OTHERS/flushed.img,direct=off"),
    ("kicks", "storage=null,size=1M"),
    ("rewriting", "storage=ram,size=1M"),
    ("broken-rings", "storage=null,size=1M"),
    ("cut-memory", "storage=null,size=1M"),
    ("stops-and-starts", "storage=null,size=1M"),
    ("any-messages", "storage=null,size=1M"),
    ("connections", "storage=null,size=1M"),
    ("unread-replies", "storage=null,size=1M"),
    ("memory-tables", "storage=null,size=1M"),
];
/// A disk with hostile in-flight regions.
const INFLIGHT: &str = "inflight-regions";
const GOOD_DISKS: [(&str, &str); 3] = [
    ("good-ram", "storage=ram,size=8M,queues=2"),
    ("good-direct", "storage=file,path=IMAGES/direct.img,queues=2"),
    ("good-cached", "storage=file,path=IMAGES/cached.img,direct=off,queues=2"),
];
/// The controllers: the verifying one has a LUN of each kind of storage.
const CONTROLLERS: [&str; 3] = ["good-scsi", "bad-commands", "task-management"];
const LUNS: [&str; 5] = [
    "controller=good-scsi,target=0,storage=ram,size=8M",
    "controller=good-scsi,target=1,storage=file,path=IMAGES/lun-direct.img",
    "controller=good-scsi,target=2,storage=file,path=IMAGES/lun-cached.img,direct=off",
    "controller=bad-commands,target=0,storage=ram,size=1M",
    "controller=task-management,target=0,storage=ram,size=1M",
];
/// Images of the verifying disks.
const GOOD_IMAGES: [&str; 5] = ["direct", "cached", "lun-direct", "lun-cached", HOST];
/// The load without a daemon, and its image.
const HOST: &str = "host-direct";
/// Bytes of each image, except that of giant reads.
const IMAGE_BYTES: u64 = 8 << 20;
const GIANT_IMAGE_BYTES: u64 = 1 << 30;
/// Bytes of the attacked images' device. The largest image is sparse.
const DEVICE_BYTES: u64 = 128 << 20;

/// The daemon with its images and sockets.
struct Host {
    daemon: HostileDaemon,
    sockets: TempDir,
    images: TempDir,
    /// Images of the attacked disks, on a device of their own in memory: the daemon does not share out the time of a
    /// device.
    _others: LoopFileSystem,
    _device: TempDir,
}

impl Host {
    fn start() -> Host {
        let sockets = tempfile::tempdir().expect("a folder");
        // tmpfs has no direct I/O.
        let images = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
        let device = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
        let backing = device.path().join("device");
        File::create(&backing).and_then(|file| file.set_len(DEVICE_BYTES)).expect("a device");
        let others = LoopFileSystem::mount(&backing);
        for name in GOOD_IMAGES.into_iter().chain(["flushed", "bad", "added"]) {
            let bytes = if name == "bad" { GIANT_IMAGE_BYTES } else { IMAGE_BYTES };
            let file = format!("{name}.img");
            let is_other = name == "flushed" || name == "bad";
            let path = if is_other { others.path(&file) } else { images.path().join(file) };
            let mut image = File::create(path).expect("an image");
            image.set_len(bytes).expect("an image");
            if GOOD_IMAGES.contains(&name) {
                // Written: the first write of a block waits for the file system's journal, and so for the flushes of
                // others.
                image.write_all(&vec![0xff; IMAGE_BYTES as usize]).and_then(|()| image.sync_all()).expect("an image");
            }
        }
        let at = |settings: &str| {
            let settings = settings.replace("OTHERS", &others.path("").display().to_string());
            settings.replace("IMAGES", &images.path().display().to_string())
        };
        let inflight = [(INFLIGHT, "storage=null,size=1M")];
        let bad = BAD_DISKS.iter().chain(&inflight).map(|(id, settings)| (*id, format!("{},queues=4", at(settings))));
        let all: Vec<(&str, String)> = GOOD_DISKS.iter().map(|(id, settings)| (*id, at(settings))).chain(bad).collect();
        let all: Vec<(&str, &str)> = all.iter().map(|(id, settings)| (*id, settings.as_str())).collect();
        let socket = |name: &str| sockets.path().join(name).display().to_string();
        let mut arguments = vec!["--admin".to_owned(), socket("admin")];
        arguments.extend(["--sandbox-allow".to_owned(), images.path().display().to_string()]);
        for id in CONTROLLERS {
            arguments.extend(["--controller".to_owned(), format!("id={id},socket={},queues=2", socket(id))]);
        }
        for lun in LUNS {
            arguments.extend(["--lun".to_owned(), at(lun)]);
        }
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let daemon = HostileDaemon::start_with(WORKERS, &all, &arguments);
        let host = Host { daemon, sockets, images, _others: others, _device: device };
        wait_for("the controllers' sockets", || CONTROLLERS.iter().all(|id| host.socket(id).exists()).then_some(()));
        host
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.sockets.path().join(name)
    }

    fn usage(&self) -> ProcessUsage {
        ProcessUsage::of(self.daemon.pid())
    }

    fn loads(&self) -> Vec<RunningTimedLoad> {
        let mut loads = Vec::new();
        for (seed, (id, _)) in (1..).zip(GOOD_DISKS) {
            let options = blk::connect_options(self.daemon.socket(id), 2);
            loads.push(RunningTimedLoad::start(id, 1, seed, move || BlkQueues::connect(&options)));
        }
        let options = scsi::connect_options(self.socket("good-scsi"), 2);
        loads.push(RunningTimedLoad::start("good-scsi", 3, 9, move || ScsiQueues::connect(&options)));
        let image = self.images.path().join(format!("{HOST}.img"));
        loads.push(RunningTimedLoad::start(HOST, 1, 10, move || ((), DirectFileQueues::open(&image))));
        loads
    }

    /// Starts attack `first` and each `step` after it.
    fn attacks(&self, first: usize, step: usize) -> Vec<RunningAttack> {
        let disk = |id: &str| self.daemon.socket(id);
        let (admin, added) = (self.socket("admin"), self.images.path().join("added.img"));
        let moved = BAD_DISKS.iter().map(|(id, _)| *id).chain(CONTROLLERS.into_iter().skip(1)).collect();
        let all: Vec<(&'static str, Attack)> = vec![
            ("small-reads", guests::small_reads(disk("small-reads"))),
            ("giant-reads", guests::giant_reads(disk("giant-reads"))),
            ("giant-file-reads", guests::giant_reads(disk("giant-file-reads"))),
            ("flushes", guests::flushes_and_zeroes(disk("flushes"), IMAGE_BYTES / 512)),
            ("kicks", guests::kicks(disk("kicks"))),
            ("rewriting", guests::rewriting(disk("rewriting"), 1)),
            ("broken-rings", guests::broken_rings(disk("broken-rings"), 2)),
            ("cut-memory", guests::cut_memory(disk("cut-memory"))),
            ("stops-and-starts", guests::stops_and_starts(disk("stops-and-starts"))),
            ("any-messages", frontends::any_messages(disk("any-messages"), 3)),
            ("connections", frontends::connections(disk("connections"), 4)),
            ("unread-replies", frontends::unread_replies(disk("unread-replies"))),
            ("memory-tables", frontends::memory_tables(disk("memory-tables"))),
            (INFLIGHT, frontends::inflight_regions(disk(INFLIGHT), 5)),
            ("bad-commands", controllers::bad_commands(self.socket("bad-commands"), 6)),
            ("task-management", controllers::task_management(self.socket("task-management"), 7)),
            ("admin-rubbish", admin_clients::rubbish(admin.clone(), 8)),
            ("admin-unread", admin_clients::unread_responses(admin.clone())),
            ("admin-stat", admin_clients::statistics(admin.clone())),
            ("admin-luns", admin_clients::luns(admin.clone(), "bad-commands", added)),
            ("admin-moves", admin_clients::moves(admin, moved, WORKERS as u64, 9)),
        ];
        // `MQBLK_HOSTILE_ATTACKS=kicks,flushes` runs only these, to find the one that fails.
        let only = std::env::var("MQBLK_HOSTILE_ATTACKS").ok();
        let chosen = |name: &str| only.as_ref().is_none_or(|only| only.split(',').any(|one| one == name));
        let all = all.into_iter().filter(|(name, _)| chosen(name));
        all.skip(first).step_by(step).map(|(name, attack)| RunningAttack::start(name, attack)).collect()
    }

    /// Waits for `time`, and checks that all loads and attacks make progress. Waits longer for an attack without a
    /// step: its thread has the lowest priority, and its disk may still serve the 1 GiB requests of the previous round.
    fn watch(&mut self, time: Duration, loads: &[RunningTimedLoad], attacks: &[RunningAttack]) -> Vec<Value> {
        let (began, every) = (Instant::now(), (time / 20).max(Duration::from_secs(1)));
        let mut samples = vec![];
        let all_have_begun = || attacks.iter().all(|attack| attack.steps() > 0);
        while began.elapsed() < time || (!all_have_begun() && began.elapsed() < time + SETTLE.time()) {
            std::thread::sleep(Duration::from_millis(100).min(time));
            self.daemon.assert_alive("attacks");
            loads.iter().for_each(RunningTimedLoad::assert_runs);
            attacks.iter().for_each(RunningAttack::assert_runs);
            if began.elapsed() >= every * (samples.len() as u32 + 1) {
                samples.push(self.usage().to_json());
            }
        }
        samples
    }
}

/// Ends attacks. Returns the number of steps of each.
fn finish(attacks: Vec<RunningAttack>) -> Vec<(&'static str, u64)> {
    attacks.iter().for_each(RunningAttack::begin_stop);
    attacks.into_iter().map(|attack| (attack.name, attack.finish())).collect()
}

/// Measurements of one load.
struct Comparison {
    name: &'static str,
    before: LoadPhase,
    /// Attacks that take turns.
    attacked: LoadPhase,
    /// All attacks at once.
    all: LoadPhase,
    after: LoadPhase,
}

impl Comparison {
    fn undisturbed_worst(&self) -> Duration {
        self.before.record.worst().max(self.after.record.worst())
    }

    /// Throughput under attack, divided by the undisturbed one.
    fn throughput(&self) -> f64 {
        let completed = self.before.record.completed() + self.after.record.completed();
        let undisturbed = completed as f64 / (self.before.length + self.after.length).as_secs_f64();
        self.attacked.throughput() / undisturbed
    }

    /// Worst latency under attack, divided by the worst undisturbed one.
    fn latency(&self) -> f64 {
        self.attacked.record.worst().as_secs_f64() / self.undisturbed_worst().as_secs_f64()
    }

    fn line(&self) -> String {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let phase = |phase: &LoadPhase| {
            let latency = |quantile| ms(phase.record.quantile(quantile));
            let (p50, p99, p9999, worst) = (latency(0.5), latency(0.99), latency(0.9999), ms(phase.record.worst()));
            format!("{:>7.0}/s {p50:>6.2} {p99:>6.2} {p9999:>7.2} {worst:>7.2} ms", phase.throughput())
        };
        let mut line = String::new();
        let phases =
            [("before", &self.before), ("attacked", &self.attacked), ("by all", &self.all), ("after", &self.after)];
        for (name, measured) in phases {
            let _ = writeln!(line, "{:<12} {name:<9} {}", self.name, phase(measured));
        }
        let _ = write!(
            line,
            "{:<12} throughput x {:.2}, worst latency x {:.1}",
            self.name,
            self.throughput(),
            self.latency()
        );
        line
    }

    fn to_json(&self) -> Value {
        json!({
            "disk": self.name, "before": self.before.to_json(), "attacked": self.attacked.to_json(),
            "attacked_by_all": self.all.to_json(), "after": self.after.to_json(),
            "throughput_ratio": self.throughput(), "worst_latency_ratio": self.latency(),
        })
    }
}

fn write_report(report: &Value) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/test-logs");
    std::fs::create_dir_all(&folder).expect("a folder for the report");
    std::fs::write(folder.join("hostile-hour.json"), format!("{report:#}\n")).expect("the report");
}

#[test]
#[ignore = "needs root"]
fn as_root_hostile_hour() {
    let long = std::env::var("MQBLK_HOSTILE_SECONDS").ok().map(|text| text.parse::<u64>().expect("seconds"));
    let attacked = Duration::from_secs(long.unwrap_or(SHORT_SECONDS));
    let _priorities = long.map(|_| NoAutogroups::begin());
    let mut host = Host::start();
    let loads = host.loads();
    let held = wait_for_rest(&host);
    // Lets buffers, arenas and disks in memory grow first.
    let attacks = host.attacks(0, 1);
    host.watch((attacked / 5).min(Duration::from_secs(60)), &loads, &attacks);
    finish(attacks);
    let settled =
        |host: &Host, expected: &ProcessUsage| ProcessUsage::wait_until_as(expected, host.daemon.pid(), SETTLE);
    let before = settled(&host, &held);

    loads.iter().for_each(|load| _ = load.end_phase());
    let undisturbed = attacked / 10 + Duration::from_secs(1);
    host.watch(undisturbed, &loads, &[]);
    let phases_before: Vec<LoadPhase> = loads.iter().map(RunningTimedLoad::end_phase).collect();
    let (log, cpu) = (host.daemon.log().lines().count(), host.usage().cpu_ms);
    let (mut steps, mut samples) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let attacks = host.attacks(round, ROUNDS);
        samples.extend(host.watch(attacked * 3 / 4 / ROUNDS as u32, &loads, &attacks));
        steps.extend(finish(attacks));
    }
    let phases_attacked: Vec<LoadPhase> = loads.iter().map(RunningTimedLoad::end_phase).collect();
    let attacks = host.attacks(0, 1);
    samples.extend(host.watch(attacked / 4, &loads, &attacks));
    let phases_all: Vec<LoadPhase> = loads.iter().map(RunningTimedLoad::end_phase).collect();
    let cpu = host.usage().cpu_ms - cpu;
    let log = host.daemon.log().lines().count() - log;
    steps.extend(finish(attacks));
    let after = settled(&host, &before);
    loads.iter().for_each(|load| _ = load.end_phase());
    host.watch(undisturbed, &loads, &[]);
    let phases_after: Vec<LoadPhase> = loads.iter().map(RunningTimedLoad::end_phase).collect();

    let phases = phases_before.into_iter().zip(phases_attacked).zip(phases_all.into_iter().zip(phases_after));
    let named = loads.iter().zip(phases);
    let compared: Vec<Comparison> = named
        .map(|(load, ((before, attacked), (all, after)))| Comparison { name: load.name, before, attacked, all, after })
        .collect();
    loads.into_iter().for_each(RunningTimedLoad::finish);
    let mut table = format!("attacked for {attacked:?}; requests, then latency: p50, p99, p99.99, worst\n");
    compared.iter().for_each(|one| _ = writeln!(table, "{}", one.line()));
    let _ = writeln!(
        table,
        "steps of attacks: {steps:?}\nlines of log: {log}, CPU time of the daemon: {cpu} ms\n{before:?}\n{after:?}"
    );
    print_uncaptured(&table);
    write_report(&json!({
        "seconds": attacked.as_secs(), "disks": compared.iter().map(Comparison::to_json).collect::<Vec<_>>(),
        "attacks": steps.iter().map(|(name, steps)| json!({ "attack": name, "steps": steps })).collect::<Vec<_>>(),
        "log_lines": log, "daemon_cpu_ms": cpu,
        "before": before.to_json(), "after": after.to_json(), "samples": samples,
    }));
    assert!(steps.iter().all(|(_, steps)| *steps > 0), "an attack has done nothing: {steps:?}");
    assert!(
        compared.iter().all(|one| one.attacked.record.completed() > 0 && one.all.record.completed() > 0),
        "a verifying disk made no progress"
    );
    let grown = after.memory_kib.saturating_sub(before.memory_kib);
    let most = if long.is_some() { LONG_MEMORY_KIB } else { MEMORY_KIB };
    assert!(grown <= most, "the daemon's memory has grown by {grown} KiB");
    assert!(after.maps <= before.maps + PRIVATE_MAPS, "{} mappings, {} before", after.maps, before.maps);
    if long.is_some() {
        let failed: Vec<String> = compared
            .iter()
            .filter(|one| one.name != HOST && (one.throughput() < 0.5 || one.latency() > 10.0))
            .map(Comparison::line)
            .collect();
        assert!(
            failed.is_empty(),
            "the attacks cost more than half, or ten times the worst latency{}:\n{}",
            if NoAutogroups::are_on() { " (autogroups are on: run it as root)" } else { "" },
            failed.join("\n")
        );
    }
    host.daemon.stop();
}

/// Waits until the daemon's resources are stable, and returns them.
fn wait_for_rest(host: &Host) -> ProcessUsage {
    let (mut deadline, mut last) = (SETTLE.begin(), host.usage());
    let mut since = Instant::now();
    while since.elapsed() < Duration::from_secs(2) {
        assert!(!deadline.has_passed(), "the daemon does not come to rest: {last:?}; not within {SETTLE}");
        std::thread::sleep(Duration::from_millis(50));
        let now = host.usage();
        if now.difference(&last).is_some() {
            since = Instant::now();
        }
        last = now;
    }
    last
}
