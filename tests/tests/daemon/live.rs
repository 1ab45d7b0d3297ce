//! Settings that are changed while drivers verify their reads, over virtio-blk, virtio-scsi and Xen, and that are kept
//! over a restart.

use std::path::Path;
use std::time::Instant;

use mqblk_admin::Client;
use mqblk_test_bounds::Bound;
use mqblk_tests::hostile::daemon::HostileDaemon;
use mqblk_tests::hostile::load::{VhostUserLoad, start_neighbour};
use mqblk_tests::hostile::{TIMEOUT, wait_for};
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};

use super::queue_moves::{DEVICES, Loads, assert_counters, start_host};

/// Initial and largest number of workers.
const WORKERS: u64 = 2;
const MOST_WORKERS: u64 = 4;
const CHANGES: u32 = 600;
/// Only a failing test waits this long for a change.
const STALL: Bound = Bound::seconds(60);

/// Keys of a disk's requests, with values in their printed form.
const STORAGE: &[(&str, &[&str])] = &[
    ("merge", &["on", "off", "auto"]),
    ("merge-bytes", &["4K", "64K", "1M"]),
    ("merge-segments", &["2", "7", "1024"]),
    ("depth", &["1", "3", "0"]),
];
/// Keys of a device's queues.
const QUEUES: &[(&str, &[&str])] =
    &[("poll", &["adaptive", "off", "busy", "50", "adaptive:200"]), ("coalesce-us", &["50", "0", "1000"])];

fn admin_of(folder: &Path) -> Client {
    wait_for("the admin socket", || Client::connect_with(folder, TIMEOUT.time()).ok())
}

/// Sets one key. Returns false if a queue had no time to move.
fn set(admin: &mut Client, verb: &str, id: &str, key: &str, value: &str) -> bool {
    match admin.call(verb, &json!({ "id": id, "settings": { key: value } })) {
        Ok(set) => {
            let now = &set["settings"][key];
            let now = now.as_str().map_or_else(|| now.to_string(), str::to_owned);
            assert_eq!(now, value, "{verb} {id} {key}");
            true
        }
        Err(error) => {
            let error = error.to_string();
            assert!(key == "queue-map" && error.contains("stay where they are"), "{verb} {id} {key}={value}: {error}");
            false
        }
    }
}

/// Adds or removes a worker. Returns false if a queue had no time to move.
fn change_workers(admin: &mut Client, adds: bool) -> bool {
    match admin.call(if adds { "worker.add" } else { "worker.remove" }, &json!({})) {
        Ok(_) => true,
        Err(error) => {
            let error = error.to_string();
            assert!(!adds && error.contains("try again"), "{error}");
            false
        }
    }
}

#[test]
fn settings_change_under_verified_loads() {
    let mut host = start_host(WORKERS, &[]);
    let folder = host.folder().to_owned();
    let mut admin = admin_of(&folder.join("admin"));
    let mut loads = Loads::start(&folder);
    let mut random = SmallRng::seed_from_u64(11);
    let (mut changed, mut workers) = (0, WORKERS);
    let mut last = Instant::now();
    while changed < CHANGES {
        let (id, queues) = *DEVICES.choose(&mut random).expect("there are some");
        let is_controller = id == "scsi";
        let (of_queues, of_storage) = if is_controller {
            (("controller.set", "scsi"), ("disk.set", "scsi:0:0"))
        } else {
            (("disk.set", id), ("disk.set", id))
        };
        let done = match random.random_range(0..4) {
            0 => {
                let (key, values) = STORAGE.choose(&mut random).expect("there are some");
                set(&mut admin, of_storage.0, of_storage.1, key, values.choose(&mut random).expect("some"))
            }
            1 => {
                let (key, values) = QUEUES.choose(&mut random).expect("there are some");
                set(&mut admin, of_queues.0, of_queues.1, key, values.choose(&mut random).expect("some"))
            }
            2 => {
                let adds = workers == 1 || (workers < MOST_WORKERS && random.random());
                let done = change_workers(&mut admin, adds);
                if done {
                    workers = if adds { workers + 1 } else { workers - 1 };
                }
                done
            }
            _ => {
                let pair = |queue| format!("{queue}:{}", random.random_range(0..workers));
                let map: Vec<String> = (0..queues).map(pair).collect();
                set(&mut admin, of_queues.0, of_queues.1, "queue-map", &map.join(","))
            }
        };
        if done {
            changed += 1;
            last = Instant::now();
        }
        assert!(!STALL.is_exceeded_since(last), "nothing can be changed");
        loads.renew();
    }
    let runs = loads.finish();
    assert!(runs.iter().all(|runs| *runs > 0), "{runs:?}");
    assert_counters(&mut admin);
    host.assert_alive("the changes");
    host.stop();
}

fn refused(admin: &mut Client, verb: &str, id: &str, settings: &Value) -> String {
    admin.call(verb, &json!({ "id": id, "settings": settings })).expect_err("it is refused").to_string()
}

#[test]
fn what_cannot_be_changed_is_said_and_changes_nothing() {
    let mut host = start_host(2, &[]);
    let mut admin = admin_of(&host.folder().join("admin"));
    let before = admin.call("disks", &Value::Null).expect("the disks");
    for (verb, id, settings, want) in [
        ("disk.set", "blk", json!({ "path": "/x" }), "path cannot: remove the disk and add it with the new value"),
        ("disk.set", "blk", json!({ "queues": 2, "depth": 7 }), "queues cannot: remove the disk"),
        ("disk.set", "blk", json!({ "colour": "red" }), "colour: found an unknown key"),
        (
            "disk.set",
            "blk",
            json!({ "depth": 7, "poll": "sometimes" }),
            "poll: found \"sometimes\", expected off, adaptive, adaptive:<max us>",
        ),
        (
            "disk.set",
            "blk",
            json!({ "merge": "on", "queue-map": "0:0,1:0,2:0" }),
            "queue-map: found no worker for queue 3",
        ),
        (
            "disk.set",
            "blk",
            json!({ "queue-map": "0:0,1:0,2:0,3:2" }),
            "queue-map: found worker 2, expected workers from 0 to 1",
        ),
        (
            "disk.set",
            "blk",
            json!({ "coalesce-max": 4 }),
            "coalesce-max: found a number of completions, but coalesce-us is 0",
        ),
        ("disk.set", "scsi", json!({ "depth": 4 }), "params.id: found \"scsi\", expected one of"),
        ("disk.set", "scsi:0:0", json!({ "poll": "off" }), "mqblk controller set scsi poll=..."),
        ("controller.set", "scsi", json!({ "depth": 4 }), "mqblk disk set LUN depth=..."),
        ("controller.set", "scsi", json!({ "socket": "/x" }), "socket cannot: remove the controller"),
        ("controller.set", "blk", json!({ "poll": "off" }), "params.id: found \"blk\", expected one of scsi"),
    ] {
        let why = refused(&mut admin, verb, id, &settings);
        assert!(why.contains(want), "{verb} {id} {settings}: {why}");
    }
    for (params, want) in [
        (json!({ "id": "blk", "queue": 4, "worker": 0 }), "params.queue: found 4, expected from 0 to 3"),
        (json!({ "id": "blk", "queue": 0, "worker": 2 }), "params.worker: found 2, expected from 0 to 1"),
        (json!({ "id": "none", "queue": 0, "worker": 1 }), "params.id: found \"none\", expected one of"),
        (json!({ "id": "scsi:0:0", "queue": 0, "worker": 1 }), "its queues are its controller's"),
        (json!({ "id": "blk", "queue": 0 }), "params.worker: found nothing"),
    ] {
        let why = admin.call("queue.move", &params).expect_err("it is refused").to_string();
        assert!(why.contains(want), "{params}: {why}");
    }
    assert_eq!(admin.call("disks", &Value::Null).expect("the disks"), before);
    host.stop();
}

#[test]
fn workers_controllers_and_settings_change_in_the_sandbox() {
    let images = tempfile::tempdir().expect("a folder");
    let allow = images.path().display().to_string();
    let state = tempfile::tempdir().expect("a folder");
    let kept = state.path().join("state").display().to_string();
    let disks = [("a", "path=IMAGE,queues=2"), ("b", "path=IMAGE,queues=1")];
    let sandbox = ["--sandbox", "on", "--sandbox-allow", &allow, "--state", &kept];
    let daemon = HostileDaemon::start_with(1, &disks, &sandbox);
    let mut admin = admin_of(&daemon.folder().join("admin.sock"));
    let mut call = |verb: &str, params: Value| {
        admin.call(verb, &params).unwrap_or_else(|error| panic!("{verb} {params}: {error}"))
    };
    let neighbour = start_neighbour(daemon.socket("b"), 1, 5);
    let mut load = VhostUserLoad::connect(daemon.socket("a"), 2, 64, 9);
    let threads = daemon.thread_count("worker-1");
    for round in 0..3 {
        assert_eq!(call("worker.add", json!({}))["workers"], 2);
        assert_eq!(daemon.thread_count("worker-1"), threads + 1);
        assert_eq!(call("queue.move", json!({ "id": "a", "queue": 1, "worker": 1 }))["moved"], true);
        (0..5).for_each(|_| load.round());
        call(
            "disk.set",
            json!({ "id": "b", "settings": { "queue-map": "0:1", "poll": "busy", "merge": "off", "depth": 2 } }),
        );
        (0..5).for_each(|_| load.round());
        // A new disk and a controller may be placed on it.
        let (disk, controller) = (daemon.socket("new"), daemon.socket("c"));
        call(
            "disk.add",
            json!({ "settings": format!("id=new,storage=ram,size=1M,queues=2,socket={}", disk.display()) }),
        );
        call("controller.add", json!({ "settings": format!("id=c,queues=2,socket={}", controller.display()) }));
        call("lun.add", json!({ "controller": "c", "settings": { "storage": "ram", "size": "1M" } }));
        let workers = call("worker.list", json!({}));
        assert!(workers["workers"][1]["queues"].as_u64() >= Some(3), "{workers}");
        let mut other = VhostUserLoad::connect(disk, 2, 64, round);
        (0..5).for_each(|_| other.round());
        assert_eq!(call("worker.remove", json!({}))["workers"], 1);
        assert_eq!(daemon.thread_count("worker-1"), threads);
        let queues = call("queue.list", json!({}));
        assert!(queues["queues"].as_array().expect("queues").iter().all(|queue| queue["worker"] == 0), "{queues}");
        (0..5).for_each(|_| [&mut load, &mut other].into_iter().for_each(|load| load.round()));
        call("disk.remove", json!({ "id": "new", "force": true }));
        drop(other);
        call("controller.remove", json!({ "id": "c" }));
        call("disk.set", json!({ "id": "b", "settings": { "poll": "static:50", "merge": "auto", "depth": 0 } }));
    }
    let only = admin.call("worker.remove", &json!({})).expect_err("it is the only one").to_string();
    assert!(only.contains("it is the only one"), "{only}");
    let none = admin.call("worker.add", &json!({ "cpu": 60_000 })).expect_err("no such CPU").to_string();
    assert!(none.contains("CPU 60000"), "{none}");
    load.round();
    drop(load);
    neighbour.assert_progress("the changes");
    neighbour.finish();
    assert_eq!(daemon.warnings("a"), [""; 0]);
    daemon.stop();
}
