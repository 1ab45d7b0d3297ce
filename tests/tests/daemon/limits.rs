//! Rate limits of a daemon in the sandbox: set at its start, and changed while drivers that verify their reads use the
//! disks.

use std::process::{Command, Output};
use std::time::Instant;

use mqblk_admin::model::{LimitGroupList, ThrottleStat};
use mqblk_admin::{Client, StatQuery};
use mqblk_tests::hostile::TIMEOUT;
use mqblk_tests::hostile::daemon::{HostileDaemon, mqblk_binary};
use mqblk_tests::hostile::load::VhostUserLoad;
use serde_json::{Value, json};

/// Runs `mqblk` with the daemon's admin socket. Returns the exit code, standard output and standard error.
fn mqblk(daemon: &HostileDaemon, args: &[&str]) -> (Option<i32>, String, String) {
    let admin = daemon.folder().join("admin.sock");
    let output = Command::new(mqblk_binary()).args(args).arg("--socket").arg(admin).output().expect("mqblk runs");
    let Output { status, stdout, stderr } = output;
    (status.code(), String::from_utf8(stdout).expect("text"), String::from_utf8(stderr).expect("text"))
}

fn done(daemon: &HostileDaemon, args: &[&str]) -> String {
    let (code, stdout, stderr) = mqblk(daemon, args);
    assert_eq!((code, stderr.as_str()), (Some(0), ""), "{args:?}");
    stdout
}

fn call(daemon: &HostileDaemon, verb: &str, params: &Value) -> Result<Value, String> {
    // Created after the sockets of the disks.
    let connect = || Client::connect_with(&daemon.folder().join("admin.sock"), TIMEOUT.time()).ok();
    let mut client = mqblk_tests::hostile::wait_for("the admin socket", connect);
    client.call(verb, params).map_err(|error| error.to_string())
}

/// Returns the notice of a daemon without a state file about a change.
fn lost(change: &str) -> String {
    format!("{change}; it does not survive a restart of the daemon, which has no --state\n")
}

fn throttle(daemon: &HostileDaemon, id: &str) -> Option<ThrottleStat> {
    daemon.stat(id).health.throttle
}

#[test]
fn limits_are_changed_under_load() {
    let disks = [("a", "path=IMAGE,queues=2,iops=5000"), ("b", "path=IMAGE,queues=1,limit-group=gold")];
    let daemon = HostileDaemon::start_with(2, &disks, &["--limit-group", "name=gold,bandwidth=100M"]);
    let mut load = VhostUserLoad::connect(daemon.socket("a"), 2, 64, 1);
    load.round();
    let given = throttle(&daemon, "a").expect("it has limits");
    assert_eq!(Value::Object(given.limits), json!({ "iops": 5000 }));

    // A low limit, so that a round takes long and the counts are certain.
    assert_eq!(done(&daemon, &["disk", "set", "a", "iops=200", "iops-max=off"]), lost("set a: iops=200,iops-max=off"));
    let (start, before) = (Instant::now(), throttle(&daemon, "a").expect("limits"));
    let requests = || {
        let counters = daemon.stat("a").totals.counters;
        counters.reads + counters.writes
    };
    let first = requests();
    while throttle(&daemon, "a").expect("limits").throttled < before.throttled + 50 {
        load.round();
    }
    let (passed, seconds) = (requests() - first, start.elapsed().as_secs_f64());
    // The rest in the bucket of the previous limit, and the most that leases may have.
    assert!(passed as f64 <= 200.0 * (seconds + 0.1) + 20.0, "{passed} in {seconds} s");
    let stats = throttle(&daemon, "a").expect("limits");
    assert!(stats.throttled_ns > before.throttled_ns && stats.waiting == 0, "{stats:?}");
    let shown = done(&daemon, &["stat"]);
    assert!(shown.lines().any(|line| line.starts_with("disk a is limited (iops=200): ")), "{shown}");

    // One request per second; then off, while some wait.
    done(&daemon, &["disk", "set", "a", "iops=1", "bandwidth-read=64M"]);
    std::thread::scope(|scope| {
        let raising = scope.spawn(|| {
            while throttle(&daemon, "a").expect("limits").waiting == 0 {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            done(&daemon, &["disk", "set", "a", "iops=off"])
        });
        load.round();
        assert_eq!(raising.join().expect("no panic"), lost("set a: iops=off"));
    });
    assert_eq!(done(&daemon, &["disk", "set", "a", "bandwidth-read=0"]), lost("set a: bandwidth-read=off"));
    assert_eq!(throttle(&daemon, "a"), None);
    load.round();
    drop(load);
    assert_eq!(daemon.warnings("a"), [""; 0]);
    daemon.stop();
}

#[test]
fn groups_are_shown_and_changed() {
    let disks = [("a", "storage=null,size=1G,iops-read=7"), ("b", "storage=null,size=1G,limit-group=gold,iops=9")];
    let groups = ["--limit-group", "name=gold,iops=1000", "--limit-group", "name=silver"];
    let daemon = HostileDaemon::start_with(1, &disks, &groups);
    let list = || {
        let list = call(&daemon, "limit-group.list", &json!({})).expect("the groups");
        let groups = serde_json::from_value::<LimitGroupList>(list).expect("groups").groups;
        groups.into_iter().map(|group| (group.name, Value::Object(group.limits), group.disks)).collect::<Vec<_>>()
    };
    let group = |name: &str, limits: Value, disks: &[&str]| {
        (name.to_owned(), limits, disks.iter().map(|id| (*id).to_owned()).collect::<Vec<_>>())
    };
    assert_eq!(list(), [group("gold", json!({ "iops": 1000 }), &["b"]), group("silver", json!({}), &[])]);
    assert_eq!(done(&daemon, &["disk", "set", "a", "limit-group=silver"]), lost("set a: limit-group=silver"));
    assert_eq!(
        done(&daemon, &["limit-group", "set", "silver", "bandwidth=1G", "iops=5"]),
        lost("set silver: bandwidth=1G,iops=5")
    );
    let table = done(&daemon, &["limit-group", "list"]);
    let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(
        rows,
        [["group", "limits", "disks"], ["gold", "iops=1000", "b"], ["silver", "bandwidth=1G,iops=5", "a"]]
    );
    // The verb `disks` returns the effective limits.
    let disks = call(&daemon, "disks", &json!({})).expect("the disks");
    assert_eq!(disks["disks"][0]["settings"]["limit-group"], "silver");
    assert_eq!(
        (&disks["disks"][1]["settings"]["iops"], &disks["disks"][0]["settings"]["iops-read"]),
        (&json!(9), &json!(7))
    );
    done(&daemon, &["disk", "set", "a", "limit-group=off", "iops-read=off"]);
    assert_eq!(list()[1].2, [""; 0]);
    let disks = call(&daemon, "disks", &json!({})).expect("the disks");
    assert_eq!(disks["disks"][0]["settings"].get("limit-group"), None);
    daemon.stop();
}

#[test]
fn luns_have_limits_too() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("c.sock").display().to_string();
    let controller = format!("id=c,socket={socket},queues=2");
    let arguments = [
        "--limit-group",
        "name=gold,iops=1000",
        "--controller",
        &controller,
        "--lun",
        "controller=c,storage=null,size=1G,iops=10,iops-max=20",
        "--lun",
        "controller=c,storage=null,size=1G",
    ];
    let daemon = HostileDaemon::start_with(1, &[("a", "storage=null,size=1M")], &arguments);
    assert_eq!(
        done(&daemon, &["disk", "set", "c:0:0", "iops=15", "limit-group=gold"]),
        lost("set c:0:0: iops=15,limit-group=gold")
    );
    let luns = call(&daemon, "lun.list", &json!({})).expect("the LUNs");
    let settings = &luns["luns"][0]["settings"];
    assert_eq!((&settings["iops"], &settings["limit-group"]), (&json!(15), &json!("gold")));
    assert_eq!(luns["luns"][1]["settings"].get("iops"), None);
    // An added one has the keys, also with its printed settings.
    let added = done(&daemon, &["lun", "add", "controller=c,storage=null,size=1M,limit-group=gold,bandwidth=1M"]);
    assert!(added.starts_with("added c:2:0"), "{added}");
    let stat =
        Client::connect(&daemon.folder().join("admin.sock")).and_then(|mut client| client.stat(&StatQuery::default()));
    let luns = &stat.expect("the daemon responds").controllers[0].luns;
    let limits = |at: usize| luns[at].health.throttle.as_ref().map(|throttle| Value::Object(throttle.limits.clone()));
    assert_eq!(limits(1), None);
    assert_eq!(limits(2), Some(json!({ "bandwidth": "1M", "limit-group": "gold" })));
    daemon.stop();
}

#[test]
fn wrong_changes_are_refused_and_change_nothing() {
    let daemon =
        HostileDaemon::start_with(1, &[("a", "storage=null,size=1G,iops=100")], &["--limit-group", "name=gold"]);
    for (args, want) in [
        (&["disk", "set", "x", "iops=1"][..], "mqblk: disk set: id: found \"x\", expected one of a\n"),
        (
            &["disk", "set", "a", "pull=off"][..],
            "mqblk: disk set: pull: found an unknown key (with value \"off\"), expected poll, or one of ",
        ),
        (
            &["disk", "set", "a", "iops=many"][..],
            "mqblk: disk set: iops: found \"many\", expected requests a second, a whole number from 1 to 100000000, or off\n",
        ),
        (
            &["disk", "set", "a", "bandwidth=5M", "iops-max=50"][..],
            "mqblk: disk set: iops-max: found 50, expected more than iops (100), or off\n",
        ),
        (
            &["disk", "set", "a", "bandwidth=5M", "limit-group=x"][..],
            "mqblk: disk set: limit-group: found \"x\", expected one of gold\n",
        ),
        (&["disk", "set", "a", "iops"][..], "mqblk: disk set: syntax: found \"iops\", expected KEY=VALUE"),
        (
            &["limit-group", "set", "x", "iops=1"][..],
            "mqblk: limit-group set: name: found \"x\", expected one of gold\n",
        ),
        (
            &["limit-group", "set", "gold", "limit-group=gold"][..],
            "mqblk: limit-group set: limit-group: found an unknown key",
        ),
    ] {
        let (code, stdout, stderr) = mqblk(&daemon, args);
        assert_eq!((code, stdout.as_str()), (Some(2), ""), "{args:?}");
        assert!(stderr.starts_with(want), "{args:?}: {stderr}");
    }
    for (params, want) in [
        (json!({ "settings": { "iops": 1 } }), "params.id: found nothing"),
        (json!({ "id": "a", "settings": { "iops": -1 } }), "params.settings.iops: found \"-1\""),
        (json!({ "id": "a", "settings": { "iops": [] } }), "params.settings.iops: found an array"),
        (json!({ "id": "a", "settings": 5 }), "params.settings: found the number 5"),
    ] {
        let refused = call(&daemon, "disk.set", &params).unwrap_err();
        assert!(refused.contains(want), "{params}: {refused}");
    }
    let limits = throttle(&daemon, "a").expect("it has limits").limits;
    assert_eq!(Value::Object(limits), json!({ "iops": 100 }));
    daemon.stop();
}
