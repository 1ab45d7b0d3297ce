//! Several drivers on several disks of one daemon. One is killed or frozen in the middle of its requests, repeatedly;
//! the others continue to verify, and the disk serves its next driver.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use mqblk_tests::hostile::TIMEOUT;
use mqblk_tests::hostile::daemon::HostileDaemon;
use mqblk_tests::hostile::load::{VhostUserLoad, start_neighbour};
use mqblk_tests::hostile::neighbour::Neighbour;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use rustix::process::{Pid, Signal, kill_process};

/// A client in a process of its own.
struct Client {
    child: Child,
    lines: Receiver<u64>,
}

impl Client {
    fn start(socket: &Path, queues: u16, seed: u64) -> Client {
        let mut child = Command::new(env!("CARGO_BIN_EXE_driver_load"))
            .arg(socket)
            .args([queues.to_string(), seed.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a client");
        let output = BufReader::new(child.stdout.take().expect("its output"));
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if sender.send(line.parse().expect("a number of verified blocks")).is_err() {
                    return;
                }
            }
        });
        Client { child, lines }
    }

    /// Waits until it has verified requests since the last call.
    fn assert_works(&self) {
        while self.lines.try_recv().is_ok() {}
        let before = self.lines.recv_timeout(TIMEOUT.time()).expect("a sign of life");
        let after = (0..1000).find_map(|_| {
            let now = self.lines.recv_timeout(TIMEOUT.time()).expect("a sign of life");
            (now > before).then_some(now)
        });
        assert!(after.is_some(), "the client verifies nothing");
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("a signal");
    }

    fn kill(mut self) {
        self.signal(Signal::KILL);
        let status = self.child.wait().expect("its end");
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9), "it had failed before: {status}");
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The disk whose drivers are killed, on each storage, and three others.
fn disks(victim: &'static str) -> [(&'static str, &'static str); 4] {
    [
        ("victim", victim),
        ("ram", "storage=ram,size=1M,queues=2"),
        ("file", "storage=file,path=IMAGE,queues=2"),
        ("late", "storage=fault,inner=ram,size=1M,fault-jitter-us=800,fault-reorder=4,queues=2,poll=off"),
    ]
}

const VICTIMS: [&str; 3] = [
    "storage=ram,size=1M,queues=2",
    "storage=file,path=IMAGE,queues=2",
    "storage=fault,inner=ram,size=1M,fault-jitter-us=3000,queues=2",
];

fn neighbours(daemon: &HostileDaemon) -> Vec<Neighbour> {
    [("ram", 2), ("file", 1), ("late", 2)]
        .into_iter()
        .zip(1..)
        .map(|((id, queues), seed)| start_neighbour(daemon.socket(id), queues, seed))
        .collect()
}

#[test]
fn drivers_are_killed_in_mid_request() {
    for (workers, victim) in [1, 2].into_iter().flat_map(|workers| VICTIMS.map(|victim| (workers, victim))) {
        let mut daemon = HostileDaemon::start(workers, &disks(victim));
        let neighbours = neighbours(&daemon);
        let mut random = SmallRng::seed_from_u64(workers as u64);
        let mut base = None;
        for round in 0..10 {
            let client = Client::start(&daemon.socket("victim"), 2, round);
            client.assert_works();
            std::thread::sleep(Duration::from_micros(random.random_range(0..3000)));
            client.kill();
            daemon.wait_for_session_end("victim");
            daemon.assert_alive("a kill");
            // The first driver leaves the resources that a worker keeps for the next.
            let base = base.get_or_insert_with(|| daemon.stable_resources());
            daemon.wait_for_resources(*base, "a kill");
        }
        neighbours.iter().for_each(|it| it.assert_progress("kills"));
        let mut load = VhostUserLoad::connect(daemon.socket("victim"), 2, 200, 99);
        (0..20).for_each(|_| load.round());
        assert!(load.verified > 0);
        drop(load);
        for neighbour in neighbours {
            neighbour.finish();
        }
        assert_no_warnings(&daemon, &disks(victim));
        daemon.stop();
    }
}

/// Checks that no disk has warnings, except those of hanging storage if all disks on files have them: then the disk of
/// the host hung.
fn assert_no_warnings(daemon: &HostileDaemon, disks: &[(&str, &str)]) {
    let on_file = |settings: &str| settings.contains("path=IMAGE");
    let hung = |id: &str| daemon.warnings(id).iter().any(|warning| warning.contains("the storage hangs"));
    let files: Vec<&str> = disks.iter().filter(|(_, settings)| on_file(settings)).map(|(id, _)| *id).collect();
    let host_hung = files.len() > 1 && files.iter().all(|id| hung(id));
    for (id, settings) in disks {
        let mut warnings = daemon.warnings(id);
        if host_hung && on_file(settings) {
            warnings.retain(|text| !text.contains("waiting for storage since") && !text.contains("the storage hangs"));
        }
        assert_eq!(warnings, Vec::<String>::new(), "{id} on {settings}");
    }
}

#[test]
fn a_driver_is_frozen_in_mid_request() {
    for workers in [1, 2] {
        let daemon = HostileDaemon::start(workers, &disks(VICTIMS[2]));
        let neighbours = neighbours(&daemon);
        let client = Client::start(&daemon.socket("victim"), 2, 1);
        for _ in 0..10 {
            client.assert_works();
            client.signal(Signal::STOP);
            neighbours.iter().for_each(|it| it.assert_progress("a freeze"));
            client.signal(Signal::CONT);
        }
        client.assert_works();
        // Frozen, and then killed.
        client.signal(Signal::STOP);
        client.kill();
        daemon.wait_for_session_end("victim");
        for neighbour in neighbours {
            neighbour.finish();
        }
        daemon.stop();
    }
}

#[test]
fn a_daemon_stops_orderly_under_load() {
    for workers in [1, 2] {
        let daemon = HostileDaemon::start(workers, &disks(VICTIMS[1]));
        let clients: Vec<Client> =
            ["victim", "ram", "file", "late"].iter().map(|id| Client::start(&daemon.socket(id), 2, 5)).collect();
        clients.iter().for_each(Client::assert_works);
        daemon.stop();
    }
}
