//! Settings, controllers and configurations that change while the daemon serves, and `--state` that keeps them over
//! restarts and kills.

#[path = "daemon/mod.rs"]
mod daemon;

use std::path::Path;

use daemon::{Daemon, output};
use mqblk_admin::Client;
use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;

/// Runs a subcommand with the daemon's admin socket.
fn run(daemon: &Daemon, words: &[&str]) -> (Option<i32>, String, String) {
    let admin = daemon.admin().display().to_string();
    output(&[words, &["--socket", &admin]].concat())
}

fn done(daemon: &Daemon, words: &[&str]) -> String {
    let (code, stdout, stderr) = run(daemon, words);
    assert_eq!((code, stderr.as_str()), (Some(0), ""), "{words:?}");
    stdout
}

fn call(daemon: &Daemon, verb: &str, params: &Value) -> Result<Value, String> {
    Client::connect(&daemon.admin()).unwrap().call(verb, params).map_err(|error| error.to_string())
}

/// Returns the shown settings of a disk, controller or LUN.
fn settings(daemon: &Daemon, id: &str) -> Value {
    let all = call(daemon, "disks", &Value::Null).unwrap();
    let luns = call(daemon, "lun.list", &Value::Null).unwrap();
    let lists = [&all["disks"], &all["controllers"], &luns["luns"]];
    let found = lists.into_iter().flat_map(|list| list.as_array().unwrap()).find(|one| one["id"] == id);
    found.unwrap_or_else(|| panic!("no {id}: {all}"))["settings"].clone()
}

/// The values of some keys.
fn values(daemon: &Daemon, id: &str, keys: &[&str]) -> Vec<Value> {
    let settings = settings(daemon, id);
    keys.iter().map(|key| settings[key].clone()).collect()
}

fn controllers(daemon: &Daemon) -> Vec<(String, Vec<String>)> {
    let list = call(daemon, "controller.list", &Value::Null).unwrap();
    let list: mqblk_admin::model::ControllerList = serde_json::from_value(list).unwrap();
    list.controllers.into_iter().map(|controller| (controller.id, controller.luns)).collect()
}

fn named(all: &[(&str, &[&str])]) -> Vec<(String, Vec<String>)> {
    all.iter().map(|(id, luns)| ((*id).to_owned(), luns.iter().map(|lun| (*lun).to_owned()).collect())).collect()
}

/// Starts a daemon with a configuration file and its state.
fn start(folder: TempDir, config: &str) -> Daemon {
    let at = folder.path().display().to_string();
    let (state, file) = (format!("{at}/state"), format!("{at}/mqblk.toml"));
    std::fs::write(&file, config.replace("AT", &at)).unwrap();
    Daemon::start_in(folder, &["--state", &state, "--config", &file])
}

fn restart(daemon: Daemon, signal: Signal, config: &str) -> Daemon {
    daemon.signal(signal);
    start(daemon.ended().1, config)
}

const CONFIG: &str = "[[limit-group]]\nname = \"gold\"\niops = 1000\n[[disk]]\nid = \"d\"\nstorage = \"ram\"\nsize = \"1M\"\nsocket = \"AT/d.sock\"\n\
                      queues = 2\niops = 100\n[[controller]]\nid = \"c\"\nsocket = \"AT/c.sock\"\nqueues = 2\n[[controller.lun]]\nstorage = \"ram\"\n\
                      size = \"1M\"\n";

#[test]
fn changed_settings_survive_restarts_and_kills() {
    let daemon = start(tempfile::tempdir().unwrap(), CONFIG);
    assert_eq!(
        done(&daemon, &["disk", "set", "d", "iops=7", "poll=busy", "merge=on", "depth=9"]),
        "set d: depth=9,iops=7,merge=on,poll=busy\n"
    );
    assert_eq!(
        done(&daemon, &["disk", "set", "d", "queue-map=0:1,1:1", "coalesce-us=20"]),
        "set d: coalesce-us=20,queue-map=0:1,1:1\n"
    );
    assert_eq!(
        done(&daemon, &["queue", "move", "a", "0", "--worker", "1"]),
        "a: queue 0 is not in use, and starts at worker 1\n"
    );
    assert_eq!(
        done(&daemon, &["controller", "set", "c", "queue-map=0:1,1:0", "poll=off"]),
        "set c: poll=off,queue-map=0:1,1:0\n"
    );
    assert_eq!(
        done(&daemon, &["disk", "set", "c:0:0", "depth=3", "limit-group=gold"]),
        "set c:0:0: depth=3,limit-group=gold\n"
    );
    assert_eq!(done(&daemon, &["limit-group", "set", "gold", "iops=off", "bandwidth=5M"]), "set gold: bandwidth=5M\n");
    let keys = ["iops", "poll", "merge", "depth", "queue-map", "coalesce-us"];
    let want = [json!(7), json!("busy"), json!("on"), json!(9), json!("0:1,1:1"), json!(20)];
    let check = |daemon: &Daemon| {
        assert_eq!(values(daemon, "d", &keys), want);
        assert_eq!(settings(daemon, "a")["queue-map"].as_str().unwrap().split(',').next(), Some("0:1"));
        assert_eq!(values(daemon, "c", &["queue-map", "poll"]), [json!("0:1,1:0"), json!("off")]);
        assert_eq!(values(daemon, "c:0:0", &["depth", "limit-group"]), [json!(3), json!("gold")]);
        let groups = call(daemon, "limit-group.list", &Value::Null).unwrap();
        assert_eq!(groups["groups"][0]["limits"], json!({ "bandwidth": "5M" }));
    };
    check(&daemon);
    let mut daemon = daemon;
    for signal in [Signal::KILL, Signal::TERM] {
        daemon = restart(daemon, signal, CONFIG);
        check(&daemon);
    }
    let list = done(&daemon, &["queue", "list", "c"]);
    let rows: Vec<Vec<&str>> = list.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows, [["disk", "queue", "worker"], ["c", "0", "1"], ["c", "1", "0"]]);

    // Edits of the configuration have priority, also a removal.
    let edited = CONFIG
        .replace("iops = 100\n", "iops = 200\nmerge = \"auto\"\n")
        .replace("name = \"gold\"", "name = \"silver\"");
    daemon = restart(daemon, Signal::TERM, &edited);
    assert_eq!(
        values(&daemon, "d", &keys),
        [json!(200), json!("busy"), json!("auto"), json!(9), json!("0:1,1:1"), json!(20)]
    );
    assert_eq!(values(&daemon, "c:0:0", &["depth", "limit-group"]), [json!(3), Value::Null]);
    daemon = restart(daemon, Signal::TERM, CONFIG);
    assert_eq!(values(&daemon, "d", &keys)[..3], [json!(100), json!("busy"), json!("auto")], "it was forgotten");
}

#[test]
fn controllers_come_and_go_and_are_kept() {
    let daemon = start(tempfile::tempdir().unwrap(), CONFIG);
    let at = daemon.path().display().to_string();
    assert_eq!(done(&daemon, &["controller", "add", &format!("id=n,socket={at}/n.sock,queues=3")]), "added n\n");
    done(&daemon, &["lun", "add", "controller=n,storage=ram,size=1M"]);
    done(&daemon, &["disk", "add", "controller=n,storage=null,size=2M,id=second"]);
    done(&daemon, &["controller", "set", "n", "poll=busy"]);
    let both = named(&[("c", &["c:0:0"]), ("n", &["n:0:0", "second"])]);
    let mut daemon = daemon;
    for signal in [Signal::KILL, Signal::TERM, Signal::KILL] {
        assert_eq!(controllers(&daemon), both);
        assert_eq!(values(&daemon, "n", &["queues", "poll"]), [json!(3), json!("busy")]);
        daemon = restart(daemon, signal, CONFIG);
    }
    let table = done(&daemon, &["controller", "list"]);
    let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[2], ["n", "virtio-scsi", "-", "n:0:0,second"]);

    // A LUN's settings do not pass to its successor.
    done(&daemon, &["disk", "set", "second", "depth=5"]);
    done(&daemon, &["lun", "remove", "second"]);
    done(&daemon, &["lun", "add", "controller=n,storage=null,size=2M,id=second"]);
    daemon = restart(daemon, Signal::KILL, CONFIG);
    assert_eq!(values(&daemon, "second", &["depth"]), [json!(0)]);

    // A LUN of the other one shares a unit, which stays.
    done(&daemon, &["lun", "add", "controller=c,unit=second,id=path"]);
    let (code, _, stderr) = run(&daemon, &["controller", "remove", "n"]);
    assert!(code == Some(1) && stderr.contains("LUN \"path\" of controller \"c\" shares a unit of it"), "{stderr}");
    done(&daemon, &["lun", "remove", "path"]);
    assert_eq!(done(&daemon, &["controller", "remove", "n"]), "removed n\n");
    assert!(!Path::new(&format!("{at}/n.sock")).exists());
    assert_eq!(done(&daemon, &["controller", "remove", "c"]), "removed c\n");
    assert_eq!(controllers(&daemon), []);
    // Their names are free.
    done(&daemon, &["controller", "add", &format!("id=n,socket={at}/c.sock")]);
    assert_eq!(values(&daemon, "n", &["poll"]), [json!("adaptive")], "what was set belonged to the other one");
    daemon = restart(daemon, Signal::KILL, CONFIG);
    assert_eq!(controllers(&daemon), named(&[("n", &[])]));
    done(&daemon, &["controller", "remove", "n"]);
    daemon = restart(daemon, Signal::TERM, CONFIG);
    assert_eq!(controllers(&daemon), []);
    // A configuration without it drops the record of its removal.
    daemon = restart(daemon, Signal::TERM, "");
    daemon = restart(daemon, Signal::TERM, CONFIG);
    assert_eq!(controllers(&daemon), named(&[("c", &["c:0:0"])]));

    for (settings, want) in [
        (format!("id=x,socket={at}/c.sock"), "socket: found"),
        (format!("id=d,socket={at}/x.sock"), "id: found \"d\", the id of disk"),
        (format!("id=c:0:0,socket={at}/x.sock"), "id: found \"c:0:0\""),
        ("id=x".to_owned(), "socket: found nothing"),
        (format!("id=x,socket={at}/x.sock,queue-map=0:9,queues=1"), "queue-map: found worker 9"),
        (format!("id=x,socket={at}/x.sock,path=/x"), "path: found an unknown key"),
        (format!("id=x,socket={at}/none/x.sock"), "No such file or directory"),
    ] {
        let (code, _, stderr) = run(&daemon, &["controller", "add", &settings]);
        assert!(code != Some(0) && stderr.contains(want), "{settings}: {stderr}");
        assert_eq!(controllers(&daemon), named(&[("c", &["c:0:0"])]));
    }
    let (code, _, stderr) = run(&daemon, &["controller", "remove", "x"]);
    assert!(code == Some(2) && stderr.contains("id: found \"x\", expected one of c"), "{stderr}");
}

fn apply(daemon: &Daemon, verb: &str, config: &str) -> Vec<(String, bool, Option<String>)> {
    let at = daemon.path().display().to_string();
    std::fs::write(daemon.path().join("mqblk.toml"), config.replace("AT", &at)).unwrap();
    let found = call(daemon, verb, &Value::Null).unwrap();
    let found: mqblk_admin::model::ConfigDifferences = serde_json::from_value(found).unwrap();
    found.changes.into_iter().map(|change| (change.what, change.applied, change.error)).collect()
}

fn applied(what: &[&str]) -> Vec<(String, bool, Option<String>)> {
    what.iter().map(|what| ((*what).to_owned(), true, None)).collect()
}

#[test]
fn an_edited_configuration_is_applied() {
    let daemon = start(tempfile::tempdir().unwrap(), CONFIG);
    // Settings made at run time stay where the file is unchanged.
    done(&daemon, &["disk", "set", "d", "depth=9", "iops=5"]);
    let edited = CONFIG
        .replace("iops = 100\n", "iops = 200\niops-max = 400\npoll = \"adaptive:100\"\nqueue-map = \"0:1,1:1\"\n")
        .replace("iops = 1000", "bandwidth = \"9M\"")
        .replace("[[controller.lun]]", "poll = \"off\"\n[[controller.lun]]\ndepth = 4");
    let edited = edited
        + "[[controller.lun]]\ntarget = 5\nstorage = \"null\"\nsize = \"2M\"\n[[controller]]\nid = \"n\"\nsocket = \"AT/n.sock\"\n\
                           [[controller.lun]]\nstorage = \"null\"\nsize = \"1M\"\n";
    let diff = apply(&daemon, "config.diff", &edited);
    assert!(diff.len() == 7 && diff.iter().all(|(_, applied, _)| !applied), "{diff:?}");
    assert_eq!(values(&daemon, "d", &["iops"]), [json!(5)]);
    let changes = apply(&daemon, "config.apply", &edited);
    assert_eq!(
        changes,
        applied(&[
            "limit-group \"gold\": set bandwidth=9M,bandwidth-burst-s=(default),bandwidth-max=(default),iops=(default),iops-burst-s=(default),iops-max=(default)",
            "disk \"d\": set iops=200,iops-burst-s=(default),iops-max=400,poll=adaptive:100,queue-map=0:1,1:1",
            "controller \"c\": set poll=off",
            "controller \"n\": add",
            "lun \"c:0:0\": set depth=4",
            "lun \"c:5:0\": add",
            "lun \"n:0:0\": add",
        ])
    );
    let check = |daemon: &Daemon| {
        let keys = ["iops", "iops-max", "poll", "queue-map", "depth"];
        assert_eq!(
            values(daemon, "d", &keys),
            [json!(200), json!(400), json!("adaptive:100"), json!("0:1,1:1"), json!(9)]
        );
        assert_eq!(controllers(daemon), named(&[("c", &["c:0:0", "c:5:0"]), ("n", &["n:0:0"])]));
        assert_eq!(
            (values(daemon, "c", &["poll"]), values(daemon, "c:0:0", &["depth"])),
            (vec![json!("off")], vec![json!(4)])
        );
        let groups = call(daemon, "limit-group.list", &Value::Null).unwrap();
        assert_eq!(groups["groups"][0]["limits"], json!({ "bandwidth": "9M" }));
    };
    check(&daemon);
    assert_eq!(apply(&daemon, "config.apply", &edited), []);
    // The next daemon reads the same file, and has the settings made at run time.
    let daemon = restart(daemon, Signal::KILL, &edited);
    check(&daemon);

    // Back: removed keys get their defaults, and changes that need a restart are reported and change nothing.
    let back = CONFIG.replace("queues = 2\niops = 100\n", "queues = 1\n");
    let changes = apply(&daemon, "config.apply", &back);
    let (done_ones, others): (Vec<_>, Vec<_>) = changes.into_iter().partition(|(_, applied, _)| *applied);
    assert_eq!(
        done_ones.iter().map(|(what, ..)| what.split(": ").next().unwrap()).collect::<Vec<_>>(),
        [
            "controller \"n\"",
            "lun \"c:5:0\"",
            "limit-group \"gold\"",
            "disk \"d\"",
            "controller \"c\"",
            "lun \"c:0:0\""
        ]
    );
    let told = "disk \"d\": other values of queue-map, queues, which apply when the disk is removed and added again, or at a restart";
    assert_eq!(others, [(told.to_owned(), false, None)]);
    assert_eq!(
        values(&daemon, "d", &["iops", "poll", "queue-map", "depth", "queues"]),
        [Value::Null, json!("adaptive"), json!("0:1,1:1"), json!(9), json!(2)]
    );
    assert_eq!(controllers(&daemon), named(&[("c", &["c:0:0"])]));
    // An invalid value is an error of that line, and the others are applied.
    let wrong = back.replace("[[controller.lun]]", "poll = \"sometimes\"\n[[controller.lun]]\ndepth = 8");
    let changes = apply(&daemon, "config.apply", &wrong);
    let error =
        changes.iter().find_map(|(what, _, error)| what.starts_with("controller").then(|| error.clone().unwrap()));
    assert!(error.as_ref().unwrap().contains("poll: found \"sometimes\""), "{changes:?}");
    assert_eq!(
        (values(&daemon, "c", &["poll"]), values(&daemon, "c:0:0", &["depth"])),
        (vec![json!("adaptive")], vec![json!(8)])
    );
}

#[test]
fn a_daemon_without_a_state_file_says_that_changes_are_lost() {
    let daemon = Daemon::start(&[]);
    let at = daemon.path().display().to_string();
    for words in [
        &["disk", "set", "a", "depth=1"][..],
        &["queue", "move", "a", "0", "--worker", "1"][..],
        &["controller", "add", &format!("id=n,socket={at}/n.sock")][..],
        &["controller", "set", "n", "poll=off"][..],
    ] {
        let text = done(&daemon, words);
        assert!(text.ends_with("; it does not survive a restart of the daemon, which has no --state\n"), "{text}");
    }
}

#[test]
fn the_number_of_workers_is_kept() {
    let workers = |daemon: &Daemon| {
        let list = call(daemon, "worker.list", &Value::Null).unwrap();
        let cpus: Vec<Value> = list["workers"].as_array().unwrap().iter().map(|worker| worker["cpu"].clone()).collect();
        cpus
    };
    let daemon = start(tempfile::tempdir().unwrap(), CONFIG);
    assert_eq!(done(&daemon, &["worker", "add", "--pin", "0"]), "added worker 2: there are 3\n");
    assert_eq!(done(&daemon, &["worker", "add"]), "added worker 3: there are 4\n");
    done(&daemon, &["disk", "set", "d", "queue-map=0:3,1:2"]);
    let pinned = [Value::Null, Value::Null, json!(0), Value::Null];
    let daemon = restart(daemon, Signal::KILL, CONFIG);
    assert_eq!((workers(&daemon), values(&daemon, "d", &["queue-map"])), (pinned.to_vec(), vec![json!("0:3,1:2")]));
    let table = done(&daemon, &["worker", "list"]);
    let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!((&rows[0][..], &rows[3][..2]), (&["worker", "cpu", "queues"][..], &["2", "0"][..]));
    // Its queues move, and the kept map names no removed worker.
    assert_eq!(done(&daemon, &["worker", "remove"]), "removed worker 3: there are 3\n");
    let map = values(&daemon, "d", &["queue-map"]);
    let daemon = restart(daemon, Signal::KILL, CONFIG);
    assert_eq!((workers(&daemon).len(), values(&daemon, "d", &["queue-map"])), (3, map));
    for _ in 0..2 {
        done(&daemon, &["worker", "remove"]);
    }
    let (code, _, stderr) = run(&daemon, &["worker", "remove"]);
    assert!(code == Some(1) && stderr.contains("worker 0: it is the only one"), "{stderr}");
    let daemon = restart(daemon, Signal::TERM, CONFIG);
    assert_eq!((workers(&daemon).len(), values(&daemon, "d", &["queue-map"])), (1, vec![json!("0:0,1:0")]));
}
