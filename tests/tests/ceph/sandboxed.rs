//! The rights of a daemon in the sandbox for its images.

use std::path::Path;
use std::process::{Command, Output};

use mqblk_admin::Client;
use mqblk_tests::ceph::CephCluster;
use mqblk_tests::hostile::daemon::{HostileDaemon, mqblk_binary};
use mqblk_tests::hostile::load::start_neighbour;
use mqblk_tests::hostile::wait_for;
use tempfile::TempDir;

/// Returns name, seccomp mode and possible capabilities of each thread.
fn threads(pid: u32) -> Vec<(String, String, String)> {
    let field = |path: &Path, name: &str| {
        let status = std::fs::read_to_string(path.join("status")).unwrap_or_default();
        let line = status.lines().find(|line| line.starts_with(name)).unwrap_or_default();
        line.split_whitespace().nth(1).unwrap_or_default().to_owned()
    };
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("the daemon's threads");
    tasks
        .flatten()
        .map(|task| (field(&task.path(), "Name:"), field(&task.path(), "Seccomp:"), field(&task.path(), "CapPrm:")))
        .collect()
}

/// The library's threads have a system call filter and no capability, including those that restore a lost connection.
#[test]
fn the_librarys_threads_are_restricted_and_connect_again() {
    let cluster = CephCluster::start();
    let settings = format!("{},queues=1", cluster.image("a", 16));
    let daemon = HostileDaemon::start(1, &[("a", &settings)]);
    let load = start_neighbour(daemon.socket("a"), 1, 1);
    cluster.kill("osd.0");
    cluster.kill("osd.1");
    cluster.revive();
    load.assert_progress("all connections were made again");
    let threads = threads(daemon.pid());
    for name in ["network", "rbd", "msgr-worker-0", "io_context_pool"] {
        let found: Vec<_> = threads.iter().filter(|(found, ..)| found == name).collect();
        assert!(!found.is_empty(), "{name}: {threads:?}");
        for (_, seccomp, capabilities) in found {
            assert_eq!((seccomp.as_str(), capabilities.as_str()), ("2", "0000000000000000"), "{name}");
        }
    }
    assert!(threads.iter().all(|(_, seccomp, _)| seccomp == "2"), "{threads:?}");
    load.finish();
    daemon.stop();
}

/// Starts a daemon with a disk and an empty controller, and adds and removes a LUN. Returns the daemon, the result of
/// the addition, and the folder of the controller's socket.
fn add_lun(disk: &str, lun: &str, more: &[&str]) -> (HostileDaemon, Output, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let (admin, controller) = (at("admin"), format!("id=c,socket={}", at("c.sock")));
    let arguments = [&["--admin", &*admin, "--controller", &*controller], more].concat();
    let daemon = HostileDaemon::start_with(1, &[("d", disk)], &arguments);
    wait_for("the admin socket", || Client::connect(Path::new(&admin)).ok());
    let verb = |words: &[&str]| Command::new(mqblk_binary()).arg("lun").args(words).output().unwrap();
    let lun = format!("controller=c,id=l,target=0,lun=1,{lun}");
    let added = verb(&["add", "--socket", &admin, &lun]);
    if added.status.success() {
        let removed = verb(&["remove", "--socket", &admin, "l"]);
        assert!(removed.status.success(), "{removed:?}");
    }
    (daemon, added, folder)
}

/// A daemon with an image, or with `sandbox-rbd=on`, gets others at run time, and releases their locks when they are
/// removed. Another daemon cannot get any.
#[test]
fn luns_come_and_go_if_the_daemon_was_started_for_images() {
    let cluster = CephCluster::start();
    let (settings, lun) = (cluster.image("a", 8), cluster.image("b", 8));
    let no_image = "storage=ram,size=1M,queues=1";
    for (disk, more) in [(&*format!("{settings},queues=1"), &[][..]), (no_image, &["--sandbox-rbd", "on"])] {
        let (daemon, added, _folder) = add_lun(disk, &lun, more);
        assert!(added.status.success(), "{added:?}");
        wait_for("the lock to be released", || cluster.rbd(&["lock", "ls", "rbd/b"]).is_empty().then_some(()));
        assert_eq!(cluster.rbd(&["lock", "ls", "rbd/a"]).is_empty(), disk == no_image);
        assert!(threads(daemon.pid()).iter().all(|(_, seccomp, _)| seccomp == "2"), "all are restricted");
        daemon.stop();
    }

    let (daemon, added, _folder) = add_lun(no_image, &lun, &[]);
    let said = String::from_utf8_lossy(&added.stderr);
    assert!(!added.status.success(), "a daemon without images has the network");
    assert!(
        said.contains("storage: found rbd, in a sandbox without it, expected sandbox-rbd=on, or a disk of storage=rbd"),
        "{said}"
    );
    daemon.stop();
}
