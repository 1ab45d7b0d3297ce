//! A new daemon takes over from a running one under verified load: no request fails, and no frontend reconnects. A
//! takeover that fails leaves the running one unchanged.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use mqblk_admin::{Client, ClientError, StatQuery};
use mqblk_driver::virtio_blk::{BlkConnectOptions, BlkDevice};
use mqblk_driver::virtio_scsi::ScsiController;
use mqblk_tests::blkif::SimulatedHost;
use mqblk_tests::crash::blk::disk_content;
use mqblk_tests::crash::blk::{self, BlkQueues};
use mqblk_tests::crash::daemon::RestartableDaemon;
use mqblk_tests::crash::kills::{self, RunningLoad};
use mqblk_tests::crash::load::LoadHistory;
use mqblk_tests::crash::scsi::{self, ScsiQueues};
use mqblk_tests::crash::stats::print_uncaptured;
use mqblk_tests::hostile::daemon::mqblk_binary;
use mqblk_tests::hostile::frontend::HostileFrontend;
use mqblk_tests::hostile::load::start_neighbour;
use mqblk_tests::hostile::memory::START;
use mqblk_tests::hostile::socket::{VERSION, VhostUserSocket, message, vring_state_payload};
use mqblk_tests::hostile::{TIMEOUT, wait_for};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags, SocketFlags, SocketType, recvmsg,
    sendmsg, socketpair,
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// Disks: their ids and special settings.
const DISKS: [(&str, &str); 4] = [
    ("cache", "storage=file,direct=off"),
    ("direct", "storage=file,direct=on,merge=on"),
    ("fault", "storage=fault,inner=file,direct=off,merge=on,fault-jitter-us=3000,fault-reorder=4"),
    ("qcow2", "storage=qcow2,base=FOLDER/qcow2.img,overlay=FOLDER/qcow2.qcow2"),
];
/// Logical units of the controller.
const UNITS: [(&str, &str); 2] = [("unit0", "storage=file,direct=off"), ("unit1", "storage=file,direct=on,merge=on")];

/// A daemon, and loads on its disks and its controller.
struct Rig {
    daemon: RestartableDaemon,
    devices: Vec<BlkDevice>,
    controller: Option<ScsiController>,
    disks: Vec<RunningLoad<BlkQueues>>,
    units: Option<RunningLoad<ScsiQueues>>,
}

impl Rig {
    fn start(more: &[&str], seed: u64) -> Rig {
        let mut arguments: Vec<String> = ["--workers", "2", "--admin", "FOLDER/admin"].map(str::to_owned).into();
        arguments.extend(more.iter().map(|one| (*one).to_owned()));
        for (id, settings) in DISKS {
            let path = if settings.contains("overlay=") { String::new() } else { format!("path=FOLDER/{id}.img,") };
            let disk = format!("id={id},socket=FOLDER/{id}.sock,{path}queues=2,{settings}");
            arguments.extend(["--disk".to_owned(), disk]);
        }
        arguments.extend(["--controller".to_owned(), "id=c,socket=FOLDER/c.sock,queues=2".to_owned()]);
        for (lun, (name, settings)) in UNITS.iter().enumerate() {
            let unit = format!("controller=c,target=0,lun={lun},path=FOLDER/{name}.img,{settings}");
            arguments.extend(["--lun".to_owned(), unit]);
        }
        let images: Vec<String> = DISKS.iter().chain(&UNITS).map(|(name, _)| format!("{name}.img")).collect();
        let images: Vec<&str> = images.iter().map(String::as_str).collect();
        let daemon = RestartableDaemon::start(&arguments, &images);
        let mut rig = Rig { daemon, devices: Vec::new(), controller: None, disks: Vec::new(), units: None };
        for (at, (id, _)) in (0..).zip(DISKS) {
            let socket = rig.daemon.folder().join(format!("{id}.sock"));
            // Split and packed rings alternate.
            let options = BlkConnectOptions { packed: at % 2 == 1, ..blk::connect_options(socket, 2) };
            let (device, port) = BlkQueues::connect(&options);
            rig.devices.push(device);
            rig.disks.push(RunningLoad::start(id, port, LoadHistory::new(1), seed + at));
        }
        let (controller, port) = ScsiQueues::connect(&scsi::connect_options(rig.daemon.folder().join("c.sock"), 2));
        rig.controller = Some(controller);
        rig.units = Some(RunningLoad::start("c", port, LoadHistory::new(UNITS.len()), seed + 9));
        rig
    }

    fn admin(&self) -> Client {
        let path = self.daemon.folder().join("admin");
        wait_for("the admin socket", || Client::connect_with(&path, TIMEOUT.time()).ok())
    }

    /// Waits until each load has had this many completions.
    fn wait_progress(&mut self, completions: u64) {
        self.disks.iter_mut().for_each(|load| load.wait_completions(completions));
        self.units.iter_mut().for_each(|load| load.wait_completions(completions));
    }

    /// Ends the loads and the daemon, and checks all images. Returns the log and the number of requests.
    fn finish(mut self) -> (String, u64) {
        let disks: Vec<_> = self.disks.drain(..).map(RunningLoad::finish).collect();
        let units = self.units.take().map(RunningLoad::finish);
        self.daemon.stop();
        let image = |name: &str| disk_content(self.daemon.folder(), name);
        let mut requests = 0;
        for ((id, _), (mut history, port)) in DISKS.iter().zip(disks) {
            drop(port);
            history.check_disk(0, &image(id)).unwrap_or_else(|why| panic!("the image of {id}: {why}"));
            requests += history.stats.requests;
        }
        if let Some((mut history, port)) = units {
            drop(port);
            for (disk, (name, _)) in UNITS.iter().enumerate() {
                history.check_disk(disk, &image(name)).unwrap_or_else(|why| panic!("the image of {name}: {why}"));
            }
            requests += history.stats.requests;
        }
        (self.daemon.log(), requests)
    }
}

fn count(log: &str, what: &str) -> u64 {
    log.lines().filter(|line| line.contains(what)).count() as u64
}

/// Checks that no connection ended before the end of the test, and that there were no warnings.
fn check_log(log: &str, takeovers: u64) {
    let devices = DISKS.len() as u64 + 1;
    assert_eq!(count(log, "frontend connected"), devices, "{log}");
    assert_eq!(count(log, "frontend taken over"), devices * takeovers, "{log}");
    assert_eq!(count(log, "frontend disconnected"), devices, "at the end of the test:\n{log}");
}

fn takeovers(times: u64, more: &[&str]) {
    let seed = kills::seed();
    let mut rig = Rig::start(more, seed);
    let mut random = SmallRng::seed_from_u64(seed);
    for _ in 0..times {
        rig.daemon.take_over();
        rig.wait_progress(random.random_range(1..100));
    }
    let stat = rig.admin().stat(&StatQuery::default()).expect("statistics");
    // Some commands to the controller must fail, such as a COMPARE AND WRITE: the load checks those.
    for disk in &stat.disks {
        assert_eq!((disk.totals.counters.errors, disk.totals.counters.malformed), (0, 0), "{}", disk.id);
    }
    let (log, requests) = rig.finish();
    check_log(&log, times);
    let mut pauses: Vec<u64> = log
        .lines()
        .filter_map(|line| line.split_once("longest_pause_us=")?.1.split(' ').next()?.parse().ok())
        .collect();
    pauses.sort_unstable();
    assert_eq!(pauses.len() as u64, times);
    let (median, longest) = (pauses[pauses.len() / 2], pauses[pauses.len() - 1]);
    print_uncaptured(&format!(
        "{times} takeovers {more:?}, seed {seed}: {requests} requests verified, pause of the slowest of 5 devices: median {median} us, longest {longest} us"
    ));
}

#[test]
fn takeovers_under_verified_load() {
    takeovers(10, &[]);
}

#[test]
fn fifty_takeovers_in_the_sandbox_under_verified_load() {
    takeovers(50, &["--sandbox", "on", "--state", "FOLDER/state"]);
}

/// Storage that takes longer than the drain timeout: requests in flight are left to the successor, which replays them
/// when the old daemon has ended.
#[test]
fn requests_on_slow_storage_are_left_to_the_successor() {
    let seed = kills::seed();
    let settings = "storage=fault,inner=file,direct=off,fault-latency-us=1500000,fault-jitter-us=500000";
    let disk = |id: &str, settings: &str| {
        ["--disk".to_owned(), format!("id={id},socket=FOLDER/{id}.sock,path=FOLDER/{id}.img,queues=2,{settings}")]
    };
    let mut arguments: Vec<String> =
        ["--workers", "2", "--admin", "FOLDER/admin", "--drain-timeout-s", "1"].map(str::to_owned).into();
    arguments.extend(disk("slow", settings).into_iter().chain(disk("cache", "direct=off")));
    let mut daemon = RestartableDaemon::start(&arguments, &["slow.img", "cache.img"]);
    let connect = |id: &str| BlkQueues::connect(&blk::connect_options(daemon.folder().join(format!("{id}.sock")), 2));
    let (slow, fast) = (connect("slow"), connect("cache"));
    let mut loads = [("slow", slow.1, seed), ("cache", fast.1, seed + 1)]
        .map(|(id, port, seed)| RunningLoad::start(id, port, LoadHistory::new(1), seed));
    for _ in 0..3 {
        loads[0].wait_completions(1);
        daemon.take_over();
        loads[1].wait_completions(100);
    }
    loads[0].wait_completions(20);
    let histories = loads.map(RunningLoad::finish);
    daemon.stop();
    for ((mut history, port), id) in histories.into_iter().zip(["slow", "cache"]) {
        drop(port);
        let image = std::fs::read(daemon.folder().join(format!("{id}.img"))).expect("the image");
        history.check_disk(0, &image).unwrap_or_else(|why| panic!("the image of {id}: {why}"));
    }
    let log = daemon.log();
    assert!(kills::replayed_requests(&log) > 0, "{log}");
    assert_eq!((count(&log, "frontend connected"), count(&log, "frontend taken over")), (2, 6), "{log}");
}

/// A device without a guest may be removed, and another one may have its socket.
#[test]
fn devices_without_guests_come_and_go() {
    let disk = |id: &str, socket: &str| {
        ["--disk".to_owned(), format!("id={id},socket=FOLDER/{socket}.sock,storage=null,size=1M,queues=1")]
    };
    let base = ["--workers", "1", "--admin", "FOLDER/admin"].map(str::to_owned);
    let arguments: Vec<String> =
        base.iter().cloned().chain(disk("a", "one")).chain(disk("b", "two")).chain(disk("c", "three")).collect();
    let mut daemon = RestartableDaemon::start(&arguments, &[]);
    let folder = daemon.folder().to_owned();
    let admin = || wait_for("the admin socket", || Client::connect_with(&folder.join("admin"), TIMEOUT.time()).ok());
    drop(admin());
    let place = folder.display().to_string();
    let next: Vec<String> =
        base.iter().cloned().chain(disk("a", "one")).chain(disk("d", "two")).chain(disk("e", "four")).collect();
    let next: Vec<String> = next.iter().map(|argument| argument.replace("FOLDER", &place)).collect();
    daemon.take_over_with(&next);
    let stat = admin().stat(&StatQuery::default()).expect("statistics");
    let ids: Vec<&str> = stat.disks.iter().map(|disk| disk.id.as_str()).collect();
    assert_eq!(ids, ["a", "d", "e"]);
    for (socket, wanted) in [("one", true), ("two", true), ("three", false), ("four", true)] {
        let path = folder.join(format!("{socket}.sock"));
        assert_eq!(path.exists(), wanted, "{socket}");
        if wanted {
            let (device, _port) = BlkQueues::connect(&blk::connect_options(path, 1));
            drop(device);
        }
    }
    daemon.stop();
    let left = std::fs::read_dir(&folder).expect("the folder").map(|entry| entry.expect("an entry").file_name());
    assert_eq!(left.collect::<Vec<_>>(), ["log"], "all sockets are removed");
}

/// Waits for the end of a successor that cannot start.
fn failed(mut successor: Child) {
    let status = wait_for("the successor's end", || successor.try_wait().expect("wait"));
    assert!(!status.success(), "{status}");
}

#[test]
fn a_successor_that_cannot_start_changes_nothing() {
    let mut rig = Rig::start(&["--sandbox", "on"], kills::seed());
    let arguments = rig.daemon.arguments().to_vec();
    let folder = rig.daemon.folder().display().to_string();
    let edited =
        |from: &str, to: &str| -> Vec<String> { arguments.iter().map(|argument| argument.replace(from, to)).collect() };
    let with = |more: &[&str]| -> Vec<String> {
        arguments.iter().cloned().chain(more.iter().map(|one| (*one).to_owned())).collect()
    };
    let missing = format!("id=new,socket={folder}/new.sock,path={folder}/missing.img");
    let another = format!("id=new,socket={folder}/no/such/folder.sock,storage=null,size=1M");
    for (arguments, want) in [
        (edited("id=fault", "id=other"), "found \"fault\" (virtio-blk) of the running daemon, which a guest uses"),
        (edited("id=fault,", "id=fault,interface=virtio-scsi,"), "found \"fault\" (virtio-blk) of the running daemon"),
        (
            // Without the map the guest's two queues would be kept.
            edited("queues=2,storage=file,direct=on", "queues=1,queue-map=0:0,storage=file,direct=on"),
            "queues: found 2, expected at most 1",
        ),
        (with(&["--strict", "--disk", &missing]), "missing.img"),
        (with(&["--disk", &another]), "no/such/folder.sock"),
        (with(&["--metrics", "192.0.2.1:1"]), "192.0.2.1:1"),
    ] {
        let before = rig.daemon.log().len();
        failed(rig.daemon.spawn_successor(Some(&arguments)));
        wait_for("the old daemon's line", || rig.daemon.log()[before..].contains("served on").then_some(()));
        let log = rig.daemon.log()[before..].to_owned();
        assert!(log.contains(want), "{want}:\n{log}");
        rig.daemon.assert_alive();
        rig.wait_progress(20);
    }
    // Killed at any time before it serves.
    let mut random = SmallRng::seed_from_u64(kills::seed());
    let mut killed = 0;
    while killed < 10 {
        let mut successor = rig.daemon.spawn_successor(None);
        std::thread::sleep(std::time::Duration::from_micros(random.random_range(0..20_000)));
        kill_process(Pid::from_child(&successor), Signal::KILL).expect("a signal");
        successor.wait().expect("its end");
        // It may have finished before.
        let log = rig.daemon.log();
        assert_eq!(
            count(&log, "handed over; this process ends"),
            0,
            "kills are meant to come earlier: shorten the pause"
        );
        killed += 1;
        rig.wait_progress(5);
    }
    rig.daemon.take_over();
    rig.wait_progress(20);
    rig.finish();
}

/// An incomplete setup of a frontend, or half of a message, does not keep the others from the successor: that frontend
/// reconnects.
#[test]
fn a_frontend_that_cannot_be_handed_over_connects_again() {
    const LOG_ALL: u64 = 1 << 26;
    let names = ["good", "half", "log", "slow"];
    let disk = |name: &str| match name {
        "slow" => format!(
            "id={name},socket=FOLDER/{name}.sock,path=FOLDER/{name}.img,queues=1,storage=fault,inner=file,fault-latency-us=20000000"
        ),
        _ => format!("id={name},socket=FOLDER/{name}.sock,path=FOLDER/{name}.img,queues=1"),
    };
    let mut arguments: Vec<String> = ["--workers", "1", "--admin", "FOLDER/admin"].map(str::to_owned).into();
    arguments.extend(names.iter().flat_map(|name| ["--disk".to_owned(), disk(name)]));
    let images = names.map(|name| format!("{name}.img"));
    let mut daemon = RestartableDaemon::start(&arguments, &images.each_ref().map(String::as_str));
    let folder = daemon.folder().to_owned();
    let socket = |name: &str| folder.join(format!("{name}.sock"));
    wait_for("the admin socket", || Client::connect_with(&folder.join("admin"), TIMEOUT.time()).ok());
    let good = start_neighbour(socket("good"), 1, 1);
    let half = VhostUserSocket::connect(&socket("half"));
    half.send_bytes(&[5, 0, 0, 0, 1, 0, 0], &[]);
    let mut log = VhostUserSocket::connect(&socket("log"));
    let features = log.request_u64(message::GET_FEATURES);
    log.send(message::SET_FEATURES, VERSION, &(features | LOG_ALL).to_ne_bytes(), &[]);
    // Its last message waits for storage.
    let mut slow = HostileFrontend::start(&socket("slow"), 0, 1);
    slow.queues[0].read_first_sector(START + 0x1_8000);
    slow.connection.send(message::GET_VRING_BASE, VERSION, &vring_state_payload(0, 0), &[]);
    let before = daemon.log().len();
    daemon.take_over();
    let said = daemon.log()[before..].to_owned();
    for name in ["half", "log", "slow"] {
        let line = said
            .lines()
            .find(|line| line.contains("has to connect again") && line.contains(&format!("disk=\"{name}\"")));
        assert!(line.is_some(), "{name}:\n{said}");
        assert_ne!(VhostUserSocket::connect(&socket(name)).request_u64(message::GET_FEATURES), 0, "{name}");
    }
    good.assert_progress("the takeover");
    good.finish();
    daemon.stop();
}

/// Xen rings have no connection to hand over: they are drained, and the successor attaches to them.
#[test]
fn xen_disks_go_to_the_successor() {
    let mut host = SimulatedHost::start(&["--workers", "1", "--xen-watch"]);
    host.stop();
    ["blk", "xen"].iter().for_each(|name| drop(host.create_image(&format!("{name}.img"), 8 << 20)));
    let blk = "path=FOLDER/blk.img,id=blk,socket=FOLDER/blk.sock,queues=2";
    let xen = "path=FOLDER/xen.img,id=xen,interface=xen,domid=1,vdev=xvda,queues=2";
    host.spawn_with(&["--workers", "2", "--admin", "FOLDER/admin", "--disk", blk, "--disk", xen]);
    let folder = host.folder().to_owned();
    wait_for("the admin socket", || Client::connect_with(&folder.join("admin"), TIMEOUT.time()).ok());
    let path = |name: &str| folder.join(name).display().to_string();
    let (socket, simulation) = (path("blk.sock"), path("xen"));
    let loads =
        [vec!["--socket", &socket], vec!["--interface", "xen", "--vdev", "xvda", "--xen", &simulation]].map(|target| {
            let load = ["--rw", "randrw", "--bs", "4k", "--iodepth", "8", "--verify", "crc32c", "--allow-write"];
            let mut command = Command::new(mqblk_binary());
            command.arg("bench").args(target).args(load).args(["--runs", "1", "--warmup", "0", "--runtime", "8"]);
            command
                .args(["--queues", "2", "--jobs", "2"])
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::piped());
            command.spawn().expect("a load")
        });
    let requests = |folder: &Path| {
        let mut admin = Client::connect_with(&folder.join("admin"), TIMEOUT.time()).expect("the admin socket");
        let stat = admin.stat(&StatQuery::default()).expect("statistics");
        stat.disks.iter().map(|disk| disk.totals.counters.requests).min().unwrap_or(0)
    };
    for _ in 0..3 {
        // Both loads make progress with each daemon.
        wait_for("requests of both disks", || (requests(&folder) > 100).then_some(()));
        host.take_over();
    }
    wait_for("requests of both disks", || (requests(&folder) > 100).then_some(()));
    for load in loads {
        let output = load.wait_with_output().expect("the load's output");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    host.stop();
    assert_eq!(count(&host.log(), "handed over; this process ends"), 3);
}

/// A successor's end of the connection.
struct FakeSuccessor {
    channel: OwnedFd,
}

impl FakeSuccessor {
    /// Calls the verb. Also returns the answer.
    fn begin(admin: &mut Client, protocol: u64) -> (FakeSuccessor, Result<Value, ClientError>) {
        let (channel, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).expect("sockets");
        let params = json!({ "protocol": protocol, "version": "test" });
        let answer = admin.call_with("takeover", &params, Some(theirs.as_fd()));
        (FakeSuccessor { channel }, answer)
    }

    /// Receives a packet, and closes its descriptors.
    fn packet(&self) -> Vec<u8> {
        let mut bytes = vec![0; 64 << 10];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received =
            recvmsg(&self.channel, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC);
        control.drain().for_each(drop);
        bytes.truncate(received.expect("a packet").bytes);
        bytes
    }

    /// Receives a message.
    fn receive(&self) -> Value {
        let header = self.packet();
        let number = |at: usize| u64::from_ne_bytes(header[at..at + 8].try_into().expect("eight bytes")) as usize;
        let mut text = Vec::new();
        while text.len() < number(0) {
            text.extend(self.packet());
        }
        (0..number(8).div_ceil(250)).for_each(|_| drop(self.packet()));
        serde_json::from_slice(&text).expect("a message")
    }

    fn send_packet(&self, bytes: &[u8]) {
        // The daemon may have given up already.
        let _ =
            sendmsg(&self.channel, &[IoSlice::new(bytes)], &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL);
    }

    fn send(&self, message: &Value) {
        let text = message.to_string();
        self.send_packet(&[(text.len() as u64).to_ne_bytes(), 0_u64.to_ne_bytes()].concat());
        self.send_packet(text.as_bytes());
    }
}

#[test]
fn a_hostile_successor_is_refused_or_given_up() {
    let mut rig = Rig::start(&["--sandbox", "on"], kills::seed());
    let mut admin = rig.admin();
    let (_, answer) = FakeSuccessor::begin(&mut admin, 7);
    assert!(answer.unwrap_err().to_string().contains("params.protocol: found 7 (mqblk test), expected 1"));
    let error = admin.call("takeover", &json!({ "protocol": 1 })).unwrap_err().to_string();
    assert!(error.contains("found no descriptor"), "{error}");
    let (stream, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    let error = admin.call_with("takeover", &json!({ "protocol": 1 }), Some(stream.as_fd())).unwrap_err().to_string();
    assert!(error.contains("no socket of sequential packets"), "{error}");

    let all: Vec<&str> = DISKS.iter().map(|(id, _)| *id).chain(["c"]).collect();
    let served_on = |rig: &mut Rig, times: u64| {
        wait_for("the old daemon's line", || (count(&rig.daemon.log(), "served on") == times).then_some(()));
        rig.daemon.assert_alive();
        rig.wait_progress(20);
    };
    // It leaves at once; sends an invalid message; knows no device; leaves with the connections.
    for (times, step) in (1..).zip(["leave", "garbage", "stranger", "connections", "refuse"]) {
        let (successor, answer) = FakeSuccessor::begin(&mut admin, 1);
        answer.unwrap_or_else(|error| panic!("{step}: {error}"));
        // Nothing changes meanwhile, and a second one is refused.
        if step == "leave" {
            let error = admin.call("disk.remove", &json!({ "id": "cache", "force": true })).unwrap_err().to_string();
            assert!(error.contains("found a takeover by another process"), "{error}");
            let (_, second) = FakeSuccessor::begin(&mut admin, 1);
            assert!(second.unwrap_err().to_string().contains("another takeover"));
            admin.stat(&StatQuery::default()).expect("what reads is answered");
        }
        let offer = successor.receive();
        assert_eq!((&offer["message"], offer["devices"].as_array().unwrap().len()), (&json!("offer"), all.len()));
        match step {
            "garbage" => successor.send_packet(b"x"),
            "stranger" => successor.send(&json!({ "message": "stands-by", "devices": ["none"], "sockets": [] })),
            "connections" | "refuse" => {
                successor.send(&json!({ "message": "stands-by", "devices": all, "sockets": [] }));
                let connection = successor.receive();
                assert_eq!(connection["message"], "connection");
                if step == "refuse" {
                    successor.send(&json!({ "message": "failed", "why": "a reason of the test" }));
                }
            }
            _ => {}
        }
        drop(successor);
        served_on(&mut rig, times);
    }
    assert!(rig.daemon.log().contains("a reason of the test"));
    // It takes devices and dies: frontends reconnect to the old daemon, and nothing is lost.
    let (successor, answer) = FakeSuccessor::begin(&mut admin, 1);
    answer.expect("an answer");
    successor.receive();
    successor.send(&json!({ "message": "stands-by", "devices": all, "sockets": [] }));
    for _ in &all {
        assert_eq!(successor.receive()["message"], "connection");
        successor.send(&json!({ "message": "done" }));
    }
    assert_eq!(successor.receive()["message"], "serve");
    drop(successor);
    wait_for("the old daemon's line", || rig.daemon.log().contains("devices are served here again").then_some(()));
    // The first device is the one that it was given.
    rig.devices[0].reconnect(TIMEOUT.time()).expect("a connection to the old daemon");
    rig.wait_progress(20);
    rig.daemon.take_over();
    rig.wait_progress(20);
    rig.finish();
}

/// Both disks take some time to drain, and the faster one does not wait for the other, which is before it. Its turn has
/// not come when the successor dies: its queues restart where they have drained, and not before.
#[test]
fn a_drain_that_has_begun_ends_before_the_queues_start_again() {
    let seed = kills::seed();
    let slow = "id=slow,socket=FOLDER/slow.sock,path=FOLDER/slow.img,queues=2,storage=fault,inner=file,direct=off,fault-latency-us=8000000,fault-jitter-us=500000";
    let fast = "id=cache,socket=FOLDER/cache.sock,path=FOLDER/cache.img,queues=2,storage=fault,inner=file,direct=off,fault-latency-us=500000";
    let arguments = ["--workers", "2", "--admin", "FOLDER/admin", "--disk", slow, "--disk", fast].map(str::to_owned);
    let mut daemon = RestartableDaemon::start(&arguments, &["slow.img", "cache.img"]);
    let folder = daemon.folder().to_owned();
    let mut admin = wait_for("the admin socket", || Client::connect_with(&folder.join("admin"), TIMEOUT.time()).ok());
    let connect = |id: &str| BlkQueues::connect(&blk::connect_options(folder.join(format!("{id}.sock")), 2));
    let ((_slow, slow), (mut cache, fast)) = (connect("slow"), connect("cache"));
    let mut loads = [("slow", slow, seed), ("cache", fast, seed + 1)]
        .map(|(id, port, seed)| RunningLoad::start(id, port, LoadHistory::new(1), seed));
    loads[0].wait_completions(2);
    let (successor, answer) = FakeSuccessor::begin(&mut admin, 1);
    answer.expect("an answer");
    successor.receive();
    successor.send(&json!({ "message": "stands-by", "devices": ["slow", "cache"], "sockets": [] }));
    for _ in 0..2 {
        assert_eq!(successor.receive()["message"], "connection");
        successor.send(&json!({ "message": "done" }));
    }
    let serve = successor.receive();
    assert_eq!((&serve["message"], &serve["device"]), (&json!("serve"), &json!("cache")), "the slow one comes later");
    drop(successor);
    wait_for("the old daemon's line", || daemon.log().contains("devices are served here again").then_some(()));
    cache.reconnect(TIMEOUT.time()).expect("a connection to the old daemon");
    loads.iter_mut().for_each(|load| load.wait_completions(20));
    let ended = loads.map(RunningLoad::finish);
    daemon.stop();
    for ((mut history, port), id) in ended.into_iter().zip(["slow", "cache"]) {
        drop(port);
        let image = std::fs::read(folder.join(format!("{id}.img"))).expect("the image");
        history.check_disk(0, &image).unwrap_or_else(|why| panic!("the image of {id}: {why}"));
    }
    // The slow one has kept its connection.
    assert_eq!(count(&daemon.log(), "frontend connected"), 3, "{}", daemon.log());
}
