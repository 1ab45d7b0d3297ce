//! The broker of a running daemon: its rights, its end with the daemon, and the effect of an earlier end.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use mqblk_admin::Client;
use mqblk_tests::hostile::daemon::{HostileDaemon, mqblk_binary};
use mqblk_tests::hostile::load::VhostUserLoad;
use mqblk_tests::hostile::wait_for;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::sandbox::rights;

/// CAP_DAC_OVERRIDE.
const OF_BROKER: u64 = 1 << 1;

/// A controller with a LUN, and a folder for more images that only its owner can read.
pub(crate) struct LunHost {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) daemon: HostileDaemon,
    client: Client,
}

impl LunHost {
    /// Starts a daemon with `arguments`. The folders of sockets and state belong to the user `owner`.
    pub(crate) fn start(disks: &[(&str, &str)], arguments: &[&str], owner: Option<u32>) -> LunHost {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name).display().to_string();
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).expect("permissions");
        for name in ["images", "run", "state"] {
            std::fs::create_dir(at(name)).expect("a folder");
        }
        for name in ["images/first.img", "images/second.img"] {
            let image = std::fs::File::create(at(name)).expect("an image");
            image.set_len(1 << 20).expect("an image");
            image.set_permissions(std::fs::Permissions::from_mode(0o600)).expect("permissions");
        }
        for name in ["run", "state"] {
            std::os::unix::fs::chown(at(name), owner, owner).expect("an owner");
        }
        let (admin, controller) = (at("run/admin"), format!("id=c,socket={}", at("run/c.sock")));
        let lun = format!("controller=c,id=first,path={}", at("images/first.img"));
        let (state, images) = (at("state/luns.json"), at("images"));
        let mut all = vec!["--admin", &admin, "--state", &state, "--controller", &controller, "--lun", &lun];
        all.extend(["--sandbox-allow", &images]);
        all.extend(arguments);
        let mut daemon = HostileDaemon::start_with(1, disks, &all);
        let client = wait_for("the admin socket", || {
            daemon.assert_alive("the start");
            Client::connect(Path::new(&admin)).ok()
        });
        LunHost { folder, daemon, client }
    }

    pub(crate) fn at(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    /// Adds a LUN at run time.
    pub(crate) fn add(&mut self, id: &str, path: &str) -> Result<(), String> {
        let settings = format!("id={id},path={path}");
        let answer = self.client.call("lun.add", &json!({ "controller": "c", "settings": settings }));
        answer.map(drop).map_err(|error| error.to_string())
    }

    /// Returns the process id of the daemon's only child.
    fn broker(&self) -> u32 {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.daemon.pid())).expect("the daemon's threads");
        let children = tasks.flatten().filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
        let children: String = children.collect();
        children.trim().parse().expect("one child")
    }
}

fn send(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid.cast_signed()).expect("a pid"), signal).expect("a signal");
}

#[test]
fn the_broker_has_given_up_its_rights_and_ends_with_the_daemon() {
    let mut host = LunHost::start(&[], &[], None);
    let broker = host.broker();
    let threads = rights(broker);
    assert_eq!(threads.len(), 1, "{threads:?}");
    for rights in threads.values() {
        assert_eq!((rights.seccomp, rights.no_new_privs, rights.filters), (2, 1, 1), "{rights:?}");
        assert_eq!((rights.permitted | rights.effective) & !OF_BROKER, 0, "{rights:?}");
    }
    let fds = std::fs::read_dir(format!("/proc/{broker}/fd")).expect("its descriptors").flatten();
    let names: Vec<_> = fds.filter_map(|fd| std::fs::read_link(fd.path()).ok()).collect();
    assert!(names.contains(&host.at("images").into()), "{names:?}");
    assert!(!names.iter().any(|name| name.extension().is_some_and(|end| end == "img")), "{names:?}");
    // Terminals and systemd send it to both. It is for the daemon.
    send(broker, Signal::TERM);
    let image = host.at("images/second.img");
    host.add("second", &image).expect("an image");
    send(host.daemon.pid(), Signal::KILL);
    // Its parent may not reap it: then it stays as a zombie.
    let status = || std::fs::read_to_string(format!("/proc/{broker}/stat"));
    wait_for("the broker's end", || status().map_or(true, |stat| stat.contains(") Z ")).then_some(()));
}

#[test]
fn disks_are_served_on_when_the_broker_was_killed() {
    let mut host = LunHost::start(&[("d", "path=IMAGE")], &[], None);
    let mut load = VhostUserLoad::connect(host.daemon.socket("d"), 1, 64, 1);
    load.round();
    send(host.broker(), Signal::KILL);
    let log = wait_for("the error", || {
        let log = host.daemon.log();
        log.contains("ERROR").then_some(log)
    });
    assert!(log.contains("the broker") && log.contains("SIGKILL") && log.contains("restart the daemon"), "{log}");
    let image = host.at("images/second.img");
    let error = host.add("second", &image).expect_err("nobody opens it");
    assert!(error.contains("the broker") && error.contains("restart the daemon"), "{error}");
    for _ in 0..10 {
        load.round();
    }
    host.daemon.assert_alive("I/O");
    drop(load);
    host.daemon.stop();
}

#[test]
fn images_elsewhere_are_refused_and_those_of_the_configuration_opened_again() {
    let mut host = LunHost::start(&[], &[], None);
    let other = host.at("other.img");
    std::fs::copy(host.at("images/second.img"), &other).expect("an image");
    let error = host.add("other", &other).expect_err("no folder of sandbox-allow");
    assert!(error.contains("other.img") && error.contains("sandbox-allow"), "{error}");
    std::os::unix::fs::symlink(&other, host.at("images/link.img")).expect("a link");
    let link = host.at("images/link.img");
    let error = host.add("link", &link).expect_err("it leads out");
    assert!(error.contains("leads out of") && error.contains("sandbox-allow"), "{error}");
    let first = host.at("images/first.img");
    let error = host.add("again", &first).expect_err("the first has it locked");
    assert!(error.contains("in use by another process"), "{error}");
    host.daemon.stop();
}

#[test]
fn nobody_else_starts_a_broker() {
    let output = Command::new(mqblk_binary()).arg("broker").output().expect("the program");
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(error.starts_with("mqblk: broker: standard input: ") && error.lines().count() == 1, "{error}");
    let help = Command::new(mqblk_binary()).arg("--help").output().expect("the program");
    assert!(!String::from_utf8_lossy(&help.stdout).contains("broker"), "it is not offered");
}
