//! `--user` and `--group`: the daemon's identity after its start, and the refused configurations. Needs root; otherwise
//! only tests the refusals.

use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use mqblk_tests::hostile::daemon::mqblk_binary;

use crate::broker::LunHost;
use crate::sandbox::{OF_DAEMON, rights};

/// "nobody" of Linux systems.
const NOBODY: u32 = 65_534;

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Starts a daemon that must refuse its configuration. Returns the error.
fn refused(command: &mut Command) -> String {
    let output = command.output().expect("the program");
    let error = String::from_utf8_lossy(&output.stderr);
    let line = error.lines().find(|line| line.starts_with("mqblk: ")).unwrap_or_default().to_owned();
    assert_eq!(output.status.code(), Some(2), "{error}");
    line
}

fn serve(arguments: &[&str]) -> Command {
    let mut command = Command::new(mqblk_binary());
    command.args(["serve", "--disk", "id=d,storage=ram,size=1M,socket=/nowhere/never"]).args(arguments);
    command.env_remove("RUST_LOG");
    command
}

#[test]
#[ignore = "needs root"]
fn as_root_a_daemon_of_root_becomes_the_user_and_the_broker_opens_roots_images() {
    let mut host = LunHost::start(&[], &["--user", "65534"], Some(NOBODY));
    let all = [NOBODY; 4];
    let threads = rights(host.daemon.pid());
    for (name, rights) in &threads {
        assert_eq!((&rights.users[..], &rights.groups[..]), (&all[..], &all[..]), "{name}");
        assert_eq!((rights.permitted | rights.effective) & !OF_DAEMON, 0, "{name}: {rights:?}");
    }
    for name in ["mqblk", "worker-0"] {
        assert!(threads.contains_key(name), "{name}");
    }
    let image = host.at("images/second.img");
    host.add("second", &image).expect("an image that only root may open");
    for name in ["run/c.sock", "run/admin", "state/luns.json"] {
        assert_eq!(std::fs::metadata(host.at(name)).expect(name).uid(), NOBODY, "{name}");
    }
    let (sockets, folder) = (["run/c.sock", "run/admin"].map(|name| host.at(name)), host.folder);
    host.daemon.stop();
    for socket in sockets {
        assert!(!std::path::Path::new(&socket).exists(), "{socket}");
    }
    drop(folder);
}

#[test]
#[ignore = "needs root"]
fn as_root_without_the_sandbox_disks_are_opened_before_the_user_changes() {
    let mut host = LunHost::start(&[], &["--sandbox", "log", "--user", "nobody", "--group", "65534"], Some(NOBODY));
    for (name, rights) in rights(host.daemon.pid()) {
        assert_eq!(rights.users, [NOBODY; 4], "{name}");
    }
    let image = host.at("images/second.img");
    let error = host.add("second", &image).expect_err("an image that only root may open");
    assert!(error.contains("Permission denied"), "{error}");
    host.daemon.stop();
}

#[test]
fn a_user_that_cannot_be_served_as_is_refused() {
    for (arguments, want) in [
        (
            &["--user", "no such user"][..],
            "serve: user: found \"no such user\", expected a user of this host, or a UID",
        ),
        (&["--group", "0"], "serve: group: found \"0\", but no user, expected user with it"),
        (&["--user", "4000000"], "serve: group: found nothing, and user \"4000000\", which has no entry on this host"),
        (
            &["--user", "0", "--group", "no such group"],
            "serve: group: found \"no such group\", expected a group of this host",
        ),
    ] {
        let error = refused(&mut serve(arguments));
        assert!(error.contains(want), "{arguments:?}: {error}");
    }
    let mut unprivileged = serve(&["--user", "0"]);
    if is_root() {
        unprivileged.uid(NOBODY).gid(NOBODY);
    }
    let error = refused(&mut unprivileged);
    assert!(error.contains("user: found \"0\", but this process may not change its user"), "{error}");
}

#[test]
#[ignore = "needs root"]
fn as_root_folders_that_the_user_cannot_write_to_are_refused_before_anything_is_created() {
    let folder = tempfile::tempdir().expect("a folder");
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(folder.path(), open).expect("permissions");
    for mode in ["off", "on"] {
        let disk = format!("id=d,storage=ram,size=1M,socket={}", folder.path().join("d.sock").display());
        let mut command = Command::new(mqblk_binary());
        command.args(["serve", "--disk", &disk, "--user", "65534", "--sandbox", mode]);
        let error = refused(&mut command);
        let folder = folder.path().display().to_string();
        assert!(error.contains("who may not create files in") && error.contains(&folder), "{error}");
        assert!(error.contains("chown"), "{error}");
    }
    assert_eq!(std::fs::read_dir(folder.path()).expect("the folder").count(), 0);
}
