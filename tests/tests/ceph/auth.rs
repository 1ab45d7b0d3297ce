//! Users of the cluster with keys and capabilities of their own, and configuration files as Ceph makes them.

use std::path::{Path, PathBuf};
use std::process::Command;

use mqblk_storage::conformance::{TestTarget, run};
use mqblk_tests::ceph::{CephCluster, POOL};
use mqblk_tests::hostile::daemon::HostileDaemon;
use mqblk_tests::hostile::load::{VhostUserLoad, start_neighbour};
use mqblk_tests::hostile::wait_for;

const GUESTS: [&str; 4] = ["mon", "profile rbd", "osd", "profile rbd pool=rbd"];
const READERS: [&str; 4] = ["mon", "profile rbd", "osd", "profile rbd-read-only pool=rbd"];

/// Makes a configuration file with the monitors and a keyring only.
fn conf_with(cluster: &CephCluster, name: &str, keyring: &Path) -> PathBuf {
    cluster.minimal_conf(name, &format!("keyring = {}", keyring.display()))
}

fn open(settings: &[(&str, &str)]) -> Result<(), String> {
    let trial = TestTarget { kind: "rbd", settings, keeps_data: true, seed: 0 };
    trial.open(&[]).map(drop).map_err(|error| error.to_string())
}

/// Users with just the capabilities that the documents name are served, also those of a namespace, with nothing but
/// monitors and a keyring in the configuration. Others get an error that names the user, the cluster's answer, and the
/// missing key or capability.
#[test]
fn users_are_served_by_their_capabilities() {
    let cluster = CephCluster::start();
    cluster.image("a", 8);
    cluster.rbd(&["namespace", "create", "rbd/blue"]);
    cluster.rbd(&["create", "rbd/blue/b", "--size", "8M"]);
    let guests = conf_with(&cluster, "guests", &cluster.user("guests", &GUESTS));
    let text = std::fs::read_to_string(&guests).expect("the configuration");
    let keys: Vec<_> = text.lines().filter_map(|line| Some(line.split_once('=')?.0.trim())).collect();
    assert_eq!(keys, ["fsid", "mon_host", "keyring"], "nothing else is given:\n{text}");
    let of_blue = ["mon", "profile rbd", "osd", "profile rbd pool=rbd namespace=blue"];
    let blue = conf_with(&cluster, "blue", &cluster.user("blue", &of_blue));
    let readers = conf_with(&cluster, "readers", &cluster.user("readers", &READERS));
    let [guests, blue, readers] = [guests, blue, readers].map(|path| path.display().to_string());

    let a = [("pool", POOL), ("image", "a")];
    let of = |conf, user| [&a[..], &[("conf", conf), ("user", user)]].concat();
    open(&of(&guests, "guests")).expect("it may be written");
    let b = [("pool", POOL), ("namespace", "blue"), ("image", "b"), ("conf", &*blue), ("user", "blue")];
    run(&TestTarget { kind: "rbd", settings: &b, keeps_data: true, seed: 2 });
    open(&[&of(&readers, "readers")[..], &[("readonly", "on")]].concat()).expect("it may be read");

    check_errors(&cluster, [&guests, &blue, &readers]);
}

/// Opens images as users that lack a key or a capability, by the configurations of three users.
fn check_errors(cluster: &CephCluster, [guests, blue, readers]: [&str; 3]) {
    let a = [("pool", POOL), ("image", "a")];
    let of = |conf, user| [&a[..], &[("conf", conf), ("user", user)]].concat();
    let b = [("pool", POOL), ("namespace", "blue"), ("image", "b")];
    // A key that the cluster does not have, of a user that it has, and of one that it does not have.
    let [wrong, unknown] = ["guests", "nobody"].map(|user| {
        let keyring = cluster.conf().with_file_name(format!("wrong.{user}.keyring"));
        let name = format!("client.{user}");
        let mut command = Command::new("ceph-authtool");
        let made = command.arg("--create-keyring").arg(&keyring).args(["--gen-key", "-n", &name]).output();
        assert!(made.expect("ceph-authtool").status.success());
        conf_with(cluster, &format!("wrong.{user}"), &keyring).display().to_string()
    });
    let none = cluster.conf().with_file_name("no.keyring");
    let none = conf_with(cluster, "none", &none).display().to_string();
    for (settings, parts) in [
        (
            of(&wrong, "guests"),
            [
                "user: found client.guests (authentication with the keyring /",
                "Permission denied",
                "`ceph auth get client",
            ],
        ),
        (
            of(&unknown, "nobody"),
            [
                "user: found client.nobody (authentication with the keyring /",
                "Permission denied",
                "`ceph auth get client",
            ],
        ),
        (
            of(&none, "guests"),
            [
                "user: found client.guests (authentication with no keyring (/",
                "/no.keyring: No such file",
                "`keyring` in",
            ],
        ),
        (
            of(guests, "readers"),
            [
                "user: found client.readers (authentication with the keyring /",
                "has no [client.readers]",
                "`keyring` in",
            ],
        ),
        (
            of(readers, "readers"),
            ["found client.readers at rbd:rbd/a (", "Operation not permitted", "osd 'profile rbd pool=rbd'`)"],
        ),
        (
            of(blue, "blue"),
            ["user: found client.blue at rbd:rbd/a (", "Operation not permitted", "osd 'profile rbd pool=rbd'`)"],
        ),
        (
            [&b[..], &[("conf", readers), ("user", "readers")]].concat(),
            ["found client.readers at rbd:rbd/blue/b (", "Operation not permitted", "pool=rbd namespace=blue'`)"],
        ),
    ] {
        let error = open(&settings).expect_err("it opens");
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
}

/// Capabilities are taken away from the user of a disk that is served: its requests fail, the log names the user and
/// the missing capability, and other disks go on.
#[test]
fn a_user_loses_its_capabilities() {
    let cluster = CephCluster::start();
    // The lifetime of a ticket with capabilities; an hour by default.
    for daemon in ["mon", "osd"] {
        cluster.ceph(&["config", "set", daemon, "auth_service_ticket_ttl", "10"]);
    }
    cluster.image("a", 16);
    let guests = conf_with(&cluster, "guests", &cluster.user("guests", &GUESTS));
    let settings = format!("storage=rbd,pool={POOL},image=a,user=guests,conf={},queues=1", guests.display());
    let of_admin = format!("{},queues=1", cluster.image("b", 16));
    let daemon = HostileDaemon::start(1, &[("a", &settings), ("b", &of_admin), ("c", "storage=ram,size=4M,queues=1")]);
    let others = ["b", "c"].map(|id| start_neighbour(daemon.socket(id), 1, 1));
    let mut load = VhostUserLoad::connect(daemon.socket("a"), 1, 64, 2);
    (0..50).for_each(|_| load.round());

    cluster.ceph(&[&["auth", "caps", "client.guests"], &READERS[..]].concat());
    // A connection keeps the capabilities that it began with.
    std::thread::sleep(std::time::Duration::from_secs(20));
    for name in ["osd.0", "osd.1"] {
        cluster.kill(name);
    }
    cluster.revive();
    wait_for("a failed write", || {
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| load.round())).is_err().then_some(())
    });
    others.iter().for_each(|other| other.assert_progress("a user has lost its capabilities"));
    let log = daemon.log();
    assert!(log.contains("rbd:rbd/a: the cluster does not permit requests of the user any more"), "{log}");
    assert!(log.contains("`ceph auth caps client.guests mon 'profile rbd' osd 'profile rbd pool=rbd'`"), "{log}");
    others.into_iter().for_each(|other| drop(other.finish()));
    drop(load);
    daemon.stop();
}
