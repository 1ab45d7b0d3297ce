//! The admin socket of a running daemon.

mod daemon;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use daemon::{Daemon, long, output};
use mqblk_admin::{Client, ClientError, StatQuery};
use rustix::process::Signal;
use serde_json::{Value, json};

fn names(folder: &std::path::Path) -> Vec<String> {
    let names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}

#[test]
fn the_socket_has_its_mode_and_is_removed_on_stop() {
    for (more, want) in [(&[][..], 0o600), (&["--admin-mode", "0660"][..], 0o660)] {
        let daemon = Daemon::start(more);
        let mode = std::fs::metadata(daemon.admin()).unwrap().permissions().mode() & 0o7777;
        assert_eq!(mode, want);
        // Connected clients, even in the middle of a message, do not delay the stop.
        let idle = UnixStream::connect(daemon.admin()).unwrap();
        let mut half = UnixStream::connect(daemon.admin()).unwrap();
        half.write_all(b"{\"jsonrpc\"").unwrap();
        daemon.signal(Signal::TERM);
        let (code, folder) = daemon.ended();
        assert_eq!(code, Some(0));
        assert_eq!(names(folder.path()), [""; 0]);
        drop(idle);
    }
}

/// Leaves a socket without a listener. The child of another test's thread also has the listener, between its fork and
/// its exec.
fn leave_socket(path: &Path) {
    drop(UnixListener::bind(path).unwrap());
    let deadline = Instant::now() + long();
    while UnixStream::connect(path).is_ok() {
        assert!(Instant::now() < deadline, "somebody listens on {}", path.display());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_stale_socket_is_replaced_and_a_live_one_refused() {
    let folder = tempfile::tempdir().unwrap();
    leave_socket(&folder.path().join("admin.sock"));
    let daemon = Daemon::start_in(folder, &[]);
    let admin = daemon.admin().display().to_string();
    let other = format!("storage=null,size=1M,socket={}/other.sock", daemon.path().display());
    let (code, _, stderr) = output(&["serve", "--admin", &admin, "--disk", &other]);
    assert_eq!(code, Some(1));
    let want = format!("mqblk: serve: admin: found {admin:?} in use by another program, expected a free path");
    assert!(stderr.starts_with(&want), "{stderr}");
    assert_eq!(names(daemon.path()), ["a.sock", "admin.sock", "b.sock"]);
    Client::connect(&daemon.admin()).unwrap().call("version", &Value::Null).unwrap();
}

#[test]
fn invalid_paths_are_refused_before_anything_is_created() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().display().to_string();
    std::fs::write(folder.path().join("plain"), "kept").unwrap();
    let disk = format!("storage=null,size=1M,socket={at}/s");
    for (admin, expected, want) in [
        // The host may accept a refused operation later.
        (format!("{at}/plain"), 1, format!("admin: found \"{at}/plain\", which is no stream socket")),
        (format!("{at}/none/admin"), 1, format!("admin: found \"{at}/none/admin\": No such file or directory")),
        (format!("{at}/s"), 2, format!("admin: found \"{at}/s\", the socket of disk \"null\"")),
        (format!("/{}", "x".repeat(107)), 2, "admin: found a path of 108 bytes, expected at most 107".to_owned()),
    ] {
        let (code, _, stderr) = output(&["serve", "--admin", &admin, "--disk", &disk]);
        assert_eq!(code, Some(expected), "{stderr}");
        assert!(stderr.starts_with(&format!("mqblk: serve: {want}")), "{stderr}");
        assert_eq!(names(folder.path()), ["plain"]);
    }
}

#[test]
fn responses_match_the_handbook() {
    let daemon = Daemon::start(&[]);
    let mut client = Client::connect(&daemon.admin()).unwrap();
    let version = client.call("version", &Value::Null).unwrap();
    assert_eq!(version["version"], env!("CARGO_PKG_VERSION"));
    let help = client.call("help", &Value::Null).unwrap();
    let verbs = help["verbs"].as_array().unwrap().iter().map(|verb| verb["name"].as_str().unwrap());
    let verbs: Vec<_> = verbs.collect();
    assert_eq!(
        verbs,
        [
            "stat",
            "disks",
            "version",
            "resize",
            "resume",
            "disk.retry",
            "disk.list",
            "disk.add",
            "disk.remove",
            "controller.list",
            "controller.add",
            "controller.remove",
            "worker.list",
            "worker.add",
            "worker.remove",
            "log",
            "config.diff",
            "config.apply",
            "disk.set",
            "controller.set",
            "queue.list",
            "queue.move",
            "limit-group.set",
            "limit-group.list",
            "lun.add",
            "lun.remove",
            "lun.resize",
            "lun.list",
            "takeover",
            "help"
        ]
    );
    let handbook = include_str!("../../../docs/admin.md");
    for verb in &verbs {
        assert!(handbook.contains(&format!("### `{verb}`")), "{verb} is not in the handbook");
    }

    let disks = client.call("disks", &Value::Null).unwrap();
    let first = &disks["disks"][0];
    assert_eq!((&first["id"], &first["storage"]), (&json!("a"), &json!("null")));
    assert_eq!((&first["settings"]["queues"], &first["settings"]["size"]), (&json!(2), &json!("1G")));
    assert_eq!(disks["disks"][1]["settings"]["merge"], "off");

    let whole = client.call("stat", &json!({ "queues": true, "latency": true })).unwrap();
    assert_eq!(whole["disks"][0]["queues"].as_array().unwrap().len(), 2);
    assert_eq!(whole["workers"].as_array().unwrap().len(), 2);
    assert!(whole["uptime_ns"].as_u64().unwrap() <= whole["time_ns"].as_u64().unwrap());
    // The handbook explains every name.
    let mut reported = Vec::new();
    names_in(&whole, &mut reported);
    assert!(reported.len() > 50, "{reported:?}");
    for name in reported {
        assert!(handbook.contains(&format!("`{name}`")), "{name} is not in the handbook");
    }

    let one = client.stat(&StatQuery { disk: Some("b".to_owned()), ..StatQuery::default() }).unwrap();
    assert_eq!((one.disks.len(), one.disks[0].id.as_str(), one.disks[0].queue_count), (1, "b", 1));
    assert_eq!((one.disks[0].merge.as_str(), one.disks[0].queues.len()), ("off", 0));
    let later = client.stat(&StatQuery::default()).unwrap();
    assert!(later.time_ns > one.time_ns && later.started_ns() == one.started_ns());

    let none = client.stat(&StatQuery { disk: Some("c".to_owned()), ..StatQuery::default() }).unwrap_err();
    let ClientError::Refused(error) = none else { panic!("{none}") };
    assert_eq!((error.code, error.message.as_str()), (-32602, "params.disk: found \"c\", expected one of a, b"));
}

fn names_in(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(members) => {
            for (name, value) in members {
                if !found.contains(name) {
                    found.push(name.clone());
                }
                names_in(value, found);
            }
        }
        Value::Array(values) => values.iter().for_each(|value| names_in(value, found)),
        _ => {}
    }
}

#[test]
fn garbage_is_refused() {
    let daemon = Daemon::start(&[]);
    for garbage in [&b"\xff\xfe\n"[..], b"[[[[\n", b"{}\n", b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\0\0\0\0\0\0\0\0\0\n"] {
        let stream = UnixStream::connect(daemon.admin()).unwrap();
        stream.set_read_timeout(Some(long())).unwrap();
        (&stream).write_all(garbage).unwrap();
        let mut response = String::new();
        BufReader::new(&stream).read_line(&mut response).unwrap();
        assert!(response.contains("\"code\":-32"), "{response}");
    }
    Client::connect(&daemon.admin()).unwrap().stat(&StatQuery::default()).unwrap();
}

#[test]
fn the_printed_settings_round_trip() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().display().to_string();
    let disk = format!("storage=null,size=1M,socket={at}/s");
    let (admin, mode) = (format!("{at}/admin"), "0640");
    let (code, printed, stderr) =
        output(&["serve", "--admin", &admin, "--admin-mode", mode, "--disk", &disk, "--print-config"]);
    assert_eq!(code, Some(0), "{stderr}");
    for line in [format!("admin = \"{admin}\""), format!("admin-mode = \"{mode}\"")] {
        assert!(printed.lines().any(|printed| printed == line), "{line} not in {printed}");
    }
    let file = folder.path().join("m.toml");
    std::fs::write(&file, &printed).unwrap();
    let file = file.to_str().unwrap();
    assert_eq!(output(&["serve", "--config", file, "--print-config"]).1, printed);
    let other = format!("{at}/other");
    let (_, overridden, _) = output(&["serve", "--config", file, "--admin", &other, "--print-config"]);
    assert_eq!(overridden, printed.replace(&format!("admin = \"{admin}\""), &format!("admin = \"{other}\"")));
}
