//! All verbs of the admin socket concurrently, in pairs, beside a scraper of metrics and a guest: none waits for
//! another for ever, and none blocks a takeover or the stop. The daemon checks the order of its locks meanwhile, as all
//! builds with assertions do.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use mqblk_admin::{Client, ClientError};
use mqblk_tests::crash::daemon::RestartableDaemon;
use mqblk_tests::hostile::load::start_neighbour;
use mqblk_tests::hostile::neighbour::Neighbour;
use mqblk_tests::hostile::wait_for;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use serde_json::Value;

/// Seconds of the pairs; `make soak` sets 60.
const SECONDS: &str = "MQBLK_VERB_RACE_SECONDS";
const DEFAULT_SECONDS: u64 = 6;
/// A verb that takes longer hangs: each has a bound of seconds.
const HANG: Duration = Duration::from_secs(60);
/// Pause between verbs beside a takeover, which begins when none runs.
const PAUSE: Duration = Duration::from_millis(2);

/// Calls of one side in turn: a verb, and its undo. `S` is the side, so that both sides succeed; without it they
/// collide.
const CALLS: &[&[(&str, &str)]] = &[
    &[("stat", r#"{"queues":true,"latency":true}"#)],
    &[("disks", "{}")],
    &[("version", "{}")],
    &[("log", r#"{"level":"info"}"#)],
    &[("disk.list", "{}")],
    &[("controller.list", "{}")],
    &[("queue.list", "{}")],
    &[("worker.list", "{}")],
    &[("limit-group.list", "{}")],
    &[("lun.list", "{}")],
    &[("resize", r#"{"id":"blk"}"#), ("resize", r#"{"id":"scsi:0:0"}"#)],
    &[("lun.resize", r#"{"id":"scsi:0:0"}"#)],
    &[("resume", r#"{"id":"blk"}"#)],
    &[("disk.retry", "{}"), ("disk.retry", r#"{"id":"blk"}"#)],
    &[("disk.set", r#"{"id":"blk","settings":{"depth":3,"iops":90000,"limit-group":"g"}}"#)],
    &[("disk.set", r#"{"id":"blk","settings":{"queue-map":"0:0,1:0"}}"#)],
    &[("disk.set", r#"{"id":"scsi:0:0","settings":{"merge":"on"}}"#)],
    &[("controller.set", r#"{"id":"scsi","settings":{"poll":"off"}}"#)],
    &[("limit-group.set", r#"{"name":"g","settings":{"iops":80000}}"#)],
    &[("queue.move", r#"{"id":"blk","queue":1,"worker":1}"#), ("queue.move", r#"{"id":"scsi","queue":0,"worker":1}"#)],
    &[("worker.add", "{}"), ("worker.remove", "{}")],
    &[
        ("disk.add", r#"{"settings":{"id":"dS","storage":"null","size":"1M","socket":"FOLDER/dS.sock"}}"#),
        ("disk.remove", r#"{"id":"dS"}"#),
    ],
    &[
        ("disk.add", r#"{"settings":{"id":"same","storage":"null","size":"1M","socket":"FOLDER/same.sock"}}"#),
        ("disk.remove", r#"{"id":"same"}"#),
    ],
    &[
        ("lun.add", r#"{"controller":"scsi","settings":{"id":"lS","storage":"null","size":"1M"}}"#),
        ("lun.remove", r#"{"id":"lS"}"#),
    ],
    &[
        ("lun.add", r#"{"controller":"scsi","settings":{"id":"same","storage":"null","size":"1M"}}"#),
        ("lun.remove", r#"{"id":"same"}"#),
    ],
    &[
        ("controller.add", r#"{"settings":{"id":"cS","socket":"FOLDER/cS.sock"}}"#),
        ("lun.add", r#"{"controller":"cS","settings":{"storage":"null","size":"1M"}}"#),
        ("controller.remove", r#"{"id":"cS"}"#),
    ],
    &[
        ("controller.add", r#"{"settings":{"id":"same","socket":"FOLDER/same.sock"}}"#),
        ("controller.remove", r#"{"id":"same"}"#),
    ],
    &[("config.diff", r#"{"file":"FOLDER/more.toml"}"#)],
    &[("config.apply", r#"{"file":"FOLDER/more.toml"}"#), ("config.apply", r#"{"file":"FOLDER/base.toml"}"#)],
];

const BASE: &str = r#"
workers = 2
admin = "FOLDER/admin"
metrics = "unix:FOLDER/metrics"
state = "FOLDER/state"
[[limit-group]]
name = "g"
iops = 100000
[[disk]]
id = "blk"
path = "FOLDER/blk.img"
socket = "FOLDER/blk.sock"
queues = 2
[[controller]]
id = "scsi"
socket = "FOLDER/scsi.sock"
queues = 2
[[controller.lun]]
path = "FOLDER/lun.img"
"#;
const MORE: &str = r#"
[[disk]]
id = "more"
storage = "null"
size = "1M"
socket = "FOLDER/more.sock"
"#;

struct Host {
    daemon: RestartableDaemon,
    folder: PathBuf,
    neighbour: Neighbour,
}

impl Host {
    fn start() -> Host {
        let arguments = ["--config", "FOLDER/base.toml"].map(str::to_owned);
        let mut daemon = RestartableDaemon::prepare(&arguments, &["blk.img", "lun.img"]);
        let folder = daemon.folder().to_owned();
        let write = |path: PathBuf, text: &str| {
            std::fs::write(path, text.replace("FOLDER", &folder.display().to_string())).expect("a configuration")
        };
        write(folder.join("base.toml"), BASE);
        write(folder.join("more.toml"), &format!("{BASE}{MORE}"));
        daemon.spawn();
        wait_for("the admin socket", || Client::connect_with(&folder.join("admin"), HANG).ok());
        let neighbour = start_neighbour(folder.join("blk.sock"), 2, 5);
        Host { daemon, folder, neighbour }
    }
}

/// One side of a race: its calls, and the number of successes.
struct Side {
    name: &'static str,
    folder: PathBuf,
    client: Option<Client>,
    /// Reconnects to each new daemon.
    reconnects: bool,
    succeeded: BTreeMap<&'static str, u64>,
    /// The last refusal of each verb.
    refused: BTreeMap<&'static str, String>,
}

impl Side {
    fn new(name: &'static str, folder: &Path, reconnects: bool) -> Side {
        Side {
            name,
            folder: folder.to_owned(),
            client: None,
            reconnects,
            succeeded: BTreeMap::new(),
            refused: BTreeMap::new(),
        }
    }

    fn call_all(&mut self, calls: &[(&'static str, &str)]) {
        for (verb, params) in calls {
            // The folder last, because its name may have any letter.
            let params = params.replace('S', self.name).replace("FOLDER", &self.folder.display().to_string());
            let params: Value = serde_json::from_str(&params).expect("parameters");
            self.call(verb, &params);
        }
    }

    fn call(&mut self, verb: &'static str, params: &Value) {
        if self.client.is_none() {
            match Client::connect_with(&self.folder.join("admin"), HANG) {
                Ok(client) => self.client = Some(client),
                Err(error) => return assert!(self.reconnects, "{error}"),
            }
        }
        let Some(client) = &mut self.client else { return };
        match client.call(verb, params) {
            Ok(_) => *self.succeeded.entry(verb).or_default() += 1,
            // The other side was faster, or holds the resource.
            Err(ClientError::Refused(error)) => _ = self.refused.insert(verb, format!("{params}: {error:?}")),
            Err(error @ ClientError::Late(_)) => panic!("{verb} {params} hangs: {error}"),
            Err(error) => {
                assert!(self.reconnects, "{verb} {params}: {error}");
                self.client = None;
            }
        }
    }
}

/// Sets it when dropped, also after a failure, because others wait for it.
struct SetAtEnd<'a>(&'a AtomicBool);

impl Drop for SetAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Scrapes metrics until `ended` is set.
fn scrape(folder: &Path, ended: &AtomicBool) -> u64 {
    let mut scrapes = 0;
    while !ended.load(Ordering::Relaxed) {
        let Ok(mut stream) = UnixStream::connect(folder.join("metrics")) else { continue };
        stream.set_read_timeout(Some(HANG)).expect("a time-out");
        let mut text = String::new();
        // A daemon that hands over closes its connections.
        let sent = stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
        let read = sent.and_then(|()| stream.read_to_string(&mut text));
        let hangs = |error: &std::io::Error| error.kind() == std::io::ErrorKind::WouldBlock;
        assert!(!read.as_ref().is_err_and(hangs), "metrics hang");
        scrapes += u64::from(text.starts_with("HTTP/1.1 200"));
        std::thread::sleep(PAUSE);
    }
    scrapes
}

fn assert_log(log: &str) {
    let wrong: Vec<&str> =
        log.lines().filter(|line| line.contains("panicked") || line.contains("lock order")).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn every_pair_of_verbs_runs_at_once() {
    let seconds = std::env::var(SECONDS).map_or(DEFAULT_SECONDS, |text| text.parse().expect("seconds"));
    let mut host = Host::start();
    let folder = host.folder.clone();
    let help = Client::connect_with(&folder.join("admin"), HANG).expect("a client").call("help", &Value::Null);
    for verb in help.expect("help")["verbs"].as_array().expect("verbs") {
        let name = verb["name"].as_str().expect("a name");
        let is_called = CALLS.iter().flat_map(|calls| calls.iter()).any(|(called, _)| *called == name);
        // A takeover ends the daemon, and follows below.
        assert!(is_called || ["help", "takeover"].contains(&name), "{name} is raced with nothing: add it to CALLS");
    }
    let mut pairs: Vec<(usize, usize)> =
        (0..CALLS.len()).flat_map(|one| (one..CALLS.len()).map(move |other| (one, other))).collect();
    pairs.shuffle(&mut SmallRng::seed_from_u64(7));
    let slice = Duration::from_secs(seconds) / pairs.len() as u32;
    let (mut left, mut right) = (Side::new("0", &folder, false), Side::new("1", &folder, false));
    let ended = AtomicBool::new(false);
    let scrapes = std::thread::scope(|scope| {
        let scraper = scope.spawn(|| scrape(&folder, &ended));
        let set_at_end = SetAtEnd(&ended);
        for (one, other) in pairs {
            let until = Instant::now() + slice;
            let race = |side: &mut Side, calls: &[(&'static str, &str)]| {
                side.call_all(calls);
                while Instant::now() < until {
                    side.call_all(calls);
                }
            };
            std::thread::scope(|scope| {
                scope.spawn(|| race(&mut left, CALLS[one]));
                race(&mut right, CALLS[other]);
            });
        }
        drop(set_at_end);
        scraper.join().expect("the scraper")
    });
    for (verb, _) in CALLS.iter().flat_map(|calls| calls.iter()) {
        let succeeded: u64 = [&left, &right].iter().filter_map(|side| side.succeeded.get(verb)).sum();
        // No request stops it here.
        let refused = (left.refused.get(verb), right.refused.get(verb));
        assert!(succeeded > 0 || *verb == "resume", "{verb} never succeeded: {refused:?}");
    }
    assert!(scrapes > 0);
    host.neighbour.assert_progress("the race");
    host.neighbour.finish();
    host.daemon.stop();
    assert_log(&host.daemon.log());
}

#[test]
fn verbs_race_with_takeovers_and_the_stop() {
    let mut host = Host::start();
    let folder = host.folder.clone();
    let ended = AtomicBool::new(false);
    let succeeded = Mutex::new(0);
    std::thread::scope(|scope| {
        for (name, seed) in [("0", 1), ("1", 2)] {
            let (folder, ended, succeeded) = (&folder, &ended, &succeeded);
            scope.spawn(move || {
                let mut random = SmallRng::seed_from_u64(seed);
                let mut side = Side::new(name, folder, true);
                while !ended.load(Ordering::Relaxed) {
                    side.call_all(CALLS[random.random_range(0..CALLS.len())]);
                    std::thread::sleep(PAUSE);
                }
                *succeeded.lock().expect("no panic") += side.succeeded.values().sum::<u64>();
            });
        }
        scope.spawn(|| scrape(&folder, &ended));
        let _set_at_end = SetAtEnd(&ended);
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(200));
            host.daemon.take_over();
            host.neighbour.assert_progress("a takeover");
        }
        host.neighbour.finish();
        // Concurrently with the verbs.
        host.daemon.stop();
    });
    assert!(*succeeded.lock().expect("no panic") > 0);
    assert_log(&host.daemon.log());
}
