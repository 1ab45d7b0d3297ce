//! A daemon under a service manager: passed sockets, its notifications, and sockets for other users.

use std::fs::Permissions;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use mqblk_admin::Client;
use mqblk_test_bounds::Bound;
use mqblk_tests::hostile::daemon::mqblk_binary;
use mqblk_tests::hostile::load::VhostUserLoad;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// Only a failing test waits this long.
const LONG: Bound = Bound::seconds(60);
/// A user and a group without any other use.
const NOBODY: u32 = 65_534;
const GROUP: u32 = 54_321;

/// The images in `run`, of 1 MiB.
const IMAGES: [&str; 2] = ["own.img", "vm1.img"];

/// A daemon and its manager's end of the notifications.
struct Service {
    child: Child,
    notified: UnixDatagram,
    folder: tempfile::TempDir,
}

impl Service {
    /// Starts a daemon with two sockets of a manager: `vm1` at `passed/vm1.sock`, and `admin` at `passed/admin.sock`.
    /// `notify` is the address of the manager. The daemon's own sockets are in `run`, which belongs to `owner`.
    fn start(notify: &str, arguments: &[&str], owner: Option<u32>) -> Service {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).expect("permissions");
        for name in ["passed", "run"] {
            std::fs::create_dir(folder.path().join(name)).expect("a folder");
        }
        for image in IMAGES {
            let image = std::fs::File::create(folder.path().join("run").join(image));
            image.and_then(|image| image.set_len(1 << 20)).expect("an image");
        }
        std::os::unix::fs::chown(folder.path().join("run"), owner, owner).expect("an owner");
        let notified = match notify.strip_prefix('@') {
            Some(name) => UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(name).expect("a name")),
            None => UnixDatagram::bind(folder.path().join(notify)),
        };
        let address = if notify.starts_with('@') { PathBuf::from(notify) } else { folder.path().join(notify) };
        let notified = notified.expect("a socket");
        notified.set_read_timeout(Some(LONG.time())).expect("a time-out");
        let passed = |name: &str| {
            let listener = UnixListener::bind(folder.path().join("passed").join(name)).expect("a socket");
            Stdio::from(OwnedFd::from(listener))
        };
        // The shell has them as standard input and output first, the only way to pass them to it.
        let mut command = Command::new("sh");
        command.args(["-c", "LISTEN_PID=$$ exec \"$@\" 3<&0 4<&1 </dev/null >/dev/null", "sh"]);
        command.arg(mqblk_binary()).args(["serve", "--sandbox", "on", "--workers", "1"]).args(arguments);
        command.current_dir(folder.path()).stdin(passed("vm1.sock")).stdout(passed("admin.sock"));
        command.env("LISTEN_FDS", "2").env("LISTEN_FDNAMES", "vm1:control").env("NOTIFY_SOCKET", address);
        command.env("WATCHDOG_USEC", "300000").env_remove("WATCHDOG_PID").env_remove("RUST_LOG");
        Service { child: command.spawn().expect("the daemon"), notified, folder }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Waits for a message with this line. Returns the lines before it.
    fn wait_for(&self, wanted: &str) -> Vec<String> {
        let until = Instant::now() + LONG.time();
        let mut before = Vec::new();
        let mut buffer = [0; 1024];
        while Instant::now() < until {
            let len = self.notified.recv(&mut buffer).unwrap_or_else(|error| panic!("{wanted}: {error}; {before:?}"));
            let message = String::from_utf8_lossy(&buffer[..len]).into_owned();
            if message.lines().any(|line| line == wanted) {
                return before;
            }
            before.push(message);
        }
        panic!("{wanted} did not come: {before:?}");
    }

    fn stop(mut self) -> tempfile::TempDir {
        kill_process(Pid::from_child(&self.child), Signal::TERM).expect("a signal");
        self.wait_for("STOPPING=1");
        assert_eq!(self.child.wait().expect("the end").code(), Some(0));
        std::mem::replace(&mut self.folder, tempfile::tempdir().expect("a folder"))
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// In the sandbox, and from root as another user: notifications, passed sockets and sockets with a group.
fn serves_under_a_manager(notify: &str, more: &[&str], owner: Option<u32>) {
    let group = if is_root() { ",socket-group=54321" } else { "" };
    let own = format!("id=own,storage=ram,size=1M,queues=1,socket=run/own.sock,socket-mode=0660{group}");
    let mut arguments = vec!["--disk", "id=vm1,storage=ram,size=1M,queues=1,socket=fd:vm1", "--disk", &own];
    // By its path, although its name differs.
    arguments.extend(["--admin", "passed/admin.sock"]);
    arguments.extend(more);
    let service = Service::start(notify, &arguments, owner);
    let before = service.wait_for("READY=1");
    assert!(before.iter().any(|message| message == "STATUS=Serving 2 devices; 0 guests connected"), "{before:?}");
    service.wait_for("WATCHDOG=1");

    let mut load = VhostUserLoad::connect(service.at("passed/vm1.sock"), 1, 64, 1);
    load.round();
    service.wait_for("STATUS=Serving 2 devices; 1 guest connected");
    service.wait_for("WATCHDOG=1");
    let socket = std::fs::metadata(service.at("run/own.sock")).expect("a socket");
    let want = (owner.unwrap_or(socket.uid()), if is_root() { GROUP } else { socket.gid() }, 0o660);
    assert_eq!((socket.uid(), socket.gid(), socket.mode() & 0o777), want);
    let mut other = VhostUserLoad::connect(service.at("run/own.sock"), 1, 64, 2);
    other.round();
    let mut client = Client::connect(&service.at("passed/admin.sock")).expect("the admin socket");
    let version = client.call("version", &Value::Null).expect("an answer");
    assert_eq!(version["pid"].as_u64(), Some(service.child.id().into()), "the shell became the daemon");
    drop((load, other, client));

    let folder = service.stop();
    let names = |name: &str| {
        let entries = std::fs::read_dir(folder.path().join(name)).expect("a folder");
        let mut names: Vec<_> = entries.map(|entry| entry.expect("an entry").file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names("passed"), ["admin.sock", "vm1.sock"], "they are the manager's");
    assert_eq!(names("run"), IMAGES);
}

#[test]
fn a_service_reports_and_serves_on_sockets_of_its_manager() {
    serves_under_a_manager("notify.sock", &[], None);
}

#[test]
fn a_service_that_changes_its_user_reports_to_an_abstract_socket() {
    let name = format!("@mqblk-test-notify-{}", std::process::id());
    match is_root() {
        true => serves_under_a_manager(&name, &["--user", "65534"], Some(NOBODY)),
        false => serves_under_a_manager(&name, &[], None),
    }
}

/// The manager does not start the successor, which has none of its variables.
#[test]
fn a_successor_takes_over_what_the_manager_has_passed() {
    let group = if is_root() { ",socket-group=54321" } else { "" };
    let own = format!("id=own,path=run/own.img,queues=1,socket=run/own.sock,socket-mode=0660{group}");
    let mut arguments = vec!["--disk", "id=vm1,path=run/vm1.img,queues=1,socket=fd:vm1", "--disk", &own];
    arguments.extend(["--admin", "fd:control", "--metrics", "unix:run/metrics.sock", "--state", "run/state"]);
    let mut service = Service::start("notify.sock", &arguments, None);
    service.wait_for("READY=1");
    let mut load = VhostUserLoad::connect(service.at("passed/vm1.sock"), 1, 64, 1);
    load.round();
    let mut client = Client::connect(&service.at("passed/admin.sock")).expect("the admin socket");
    let added = json!({ "settings": "id=added,storage=null,size=1M,queues=1,socket=run/added.sock" });
    client.call("disk.add", &added).expect("a disk at run time");
    for _ in 0..2 {
        let mut command = Command::new(mqblk_binary());
        command.args(["serve", "--sandbox", "on", "--workers", "1"]).args(&arguments);
        command.args(["--takeover", "passed/admin.sock"]).current_dir(service.folder.path()).env_remove("RUST_LOG");
        let successor = command.stdin(Stdio::null()).spawn().expect("the successor");
        service.wait_for(&format!("MAINPID={}", successor.id()));
        let mut old = std::mem::replace(&mut service.child, successor);
        service.wait_for("READY=1");
        assert_eq!(old.wait().expect("the end").code(), Some(0));
        service.wait_for("WATCHDOG=1");
        load.round();
        let mut metrics = UnixStream::connect(service.at("run/metrics.sock")).expect("the metrics");
        metrics.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").expect("a request");
        let mut text = String::new();
        metrics.read_to_string(&mut text).expect("an answer");
        assert!(text.contains("mqblk_build_info"), "{text}");
        let mut client = Client::connect(&service.at("passed/admin.sock")).expect("the admin socket");
        let version = client.call("version", &Value::Null).expect("an answer");
        assert_eq!(version["pid"].as_u64(), Some(service.child.id().into()));
        let disks = client.call("disk.list", &Value::Null).expect("an answer").to_string();
        assert!(disks.contains("\"added\"") && service.at("run/added.sock").exists(), "{disks}");
    }
    drop(load);
    let folder = service.stop();
    let left = |name: &str| folder.path().join(name).exists();
    assert!(left("passed/admin.sock") && left("passed/vm1.sock"), "they are the manager's");
    assert!(!left("run/own.sock") && !left("run/added.sock") && !left("run/metrics.sock"));
}

/// Waits for the end of a daemon that refuses its configuration.
fn wait_refused(mut service: Service) {
    let status = service.child.wait().expect("the end");
    assert_eq!(status.code(), Some(2));
    for name in ["passed/vm1.sock", "passed/admin.sock"] {
        assert!(service.at(name).exists(), "{name} is the manager's");
    }
    assert_eq!(std::fs::read_dir(service.at("run")).expect("a folder").count(), IMAGES.len(), "nothing else is left");
}

#[test]
fn sockets_that_nothing_is_served_on_are_refused() {
    let own = "id=own,storage=ram,size=1M,socket=run/own.sock";
    for arguments in [
        // vm1 and the admin socket are not used.
        &["--disk", own][..],
        // There is no such name.
        &["--disk", "id=a,storage=ram,size=1M,socket=fd:vm2", "--admin", "fd:control"],
        // Its permissions belong to the manager.
        &["--disk", "id=a,storage=ram,size=1M,socket=fd:vm1,socket-mode=0660", "--admin", "fd:control"],
        // One descriptor for two sockets.
        &["--disk", "id=a,storage=ram,size=1M,socket=fd:vm1", "--admin", "fd:vm1"],
    ] {
        wait_refused(Service::start("notify.sock", arguments, None));
    }
}

#[test]
#[ignore = "needs root"]
fn as_root_a_socket_is_made_early_and_removed_when_the_start_fails() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("s");
    for more in [&["--print-config"][..], &["--strict", "--disk", "id=b,path=/nonexistent,socket=/tmp/never"]] {
        let disk = format!("id=a,storage=ram,size=1M,socket={},socket-group={GROUP}", socket.display());
        let output = Command::new(mqblk_binary()).args(["serve", "--disk", &disk]).args(more).output().expect("mqblk");
        assert_eq!(output.status.success(), more.len() == 1, "{output:?}");
        assert!(!socket.exists(), "{more:?}");
    }
}

/// By the conventions of vhost-user programs.
#[test]
fn a_listening_descriptor_is_served() {
    let folder = tempfile::tempdir().expect("a folder");
    let (socket, image) = (folder.path().join("s"), folder.path().join("disk.img"));
    std::fs::File::create(&image).expect("an image").set_len(1 << 20).expect("an image");
    let listener = UnixListener::bind(&socket).expect("a socket");
    let program = folder.path().join("vhost-user-block");
    std::os::unix::fs::symlink(mqblk_binary(), &program).expect("a link");
    let start = |arguments: &[&str], stdin: Stdio| {
        Command::new(&program)
            .args(arguments)
            .args(["--blk-file", image.to_str().expect("a path")])
            .stdin(stdin)
            .spawn()
    };
    let listener = Stdio::from(OwnedFd::from(listener));
    let mut child = start(&["--fd=0", "--read-only"], listener).expect("the program");
    let stream = UnixStream::connect(&socket).expect("a connection");
    drop(stream);
    kill_process(Pid::from_child(&child), Signal::TERM).expect("a signal");
    let ended = child.wait().expect("the end");
    // The signal may come before the handler.
    assert!(ended.code() == Some(0) || ended.code().is_none(), "{ended}");
    assert!(socket.exists());
    let mut child = start(&["--fd=0"], Stdio::null()).expect("the program");
    assert_eq!(child.wait().expect("the end").code(), Some(2), "/dev/null is no socket");
}

/// The units, rated by systemd: 0 is the best, 10 the worst.
#[test]
fn the_units_are_hardened() {
    let examples = mqblk_tests::documented::repository().join("examples");
    let folder = tempfile::tempdir().expect("a folder");
    // As an instance, because systemd-analyze does not take a template.
    for (unit, name) in [("mqblk.service", "mqblk.service"), ("mqblk@.service", "mqblk@blue.service")] {
        std::fs::copy(examples.join(unit), folder.path().join(name)).expect("a copy");
        let mut command = Command::new("systemd-analyze");
        command.args(["security", "--offline=true", "--threshold=25", "--no-pager"]).arg(folder.path().join(name));
        let output = command.output().expect("systemd-analyze, of Debian's package systemd");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{unit}: more than 2.5\n{text}{}", String::from_utf8_lossy(&output.stderr));
        assert!(text.contains("Overall exposure level"), "{text}");
    }
}
