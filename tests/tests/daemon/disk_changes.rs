//! Disks that are added and removed while others serve verified requests, in the sandbox.

use std::fs::File;
use std::path::PathBuf;

use mqblk_admin::Client;
use mqblk_admin::model::{DiskList, ListedDisk};
use mqblk_tests::hostile::TIMEOUT;
use mqblk_tests::hostile::daemon::HostileDaemon;
use mqblk_tests::hostile::load::{BLOCK, VhostUserLoad, start_neighbour};
use serde_json::{Value, json};

const BLOCKS: usize = 64;

/// A folder of images that may be opened at run time.
struct Images(tempfile::TempDir);

impl Images {
    fn new() -> Images {
        Images(tempfile::tempdir().expect("a folder"))
    }

    fn image(&self, name: &str) -> PathBuf {
        let path = self.0.path().join(name);
        File::create(&path).and_then(|file| file.set_len((BLOCKS * BLOCK) as u64)).expect("an image");
        path
    }
}

fn start(images: &Images, disks: &[(&str, &str)], more: &[&str]) -> HostileDaemon {
    let allow = images.0.path().display().to_string();
    let sandbox = ["--sandbox", "on", "--sandbox-allow", &allow];
    HostileDaemon::start_with(2, disks, &[&sandbox, more].concat())
}

fn call(daemon: &HostileDaemon, verb: &str, params: &Value) -> Result<Value, String> {
    // Created after the sockets of the disks.
    let connect = || Client::connect_with(&daemon.folder().join("admin.sock"), TIMEOUT.time()).ok();
    let mut client = mqblk_tests::hostile::wait_for("the admin socket", connect);
    client.call(verb, params).map_err(|error| error.to_string())
}

fn add(daemon: &HostileDaemon, id: &str, settings: &str) -> Result<Value, String> {
    let socket = daemon.socket(id);
    call(daemon, "disk.add", &json!({ "settings": format!("id={id},socket={},{settings}", socket.display()) }))
}

fn remove(daemon: &HostileDaemon, id: &str, force: bool) -> Result<Value, String> {
    call(daemon, "disk.remove", &json!({ "id": id, "force": force }))
}

fn list(daemon: &HostileDaemon) -> Vec<ListedDisk> {
    let list = call(daemon, "disk.list", &Value::Null).expect("a list");
    serde_json::from_value::<DiskList>(list).expect("a list").disks
}

fn ids(daemon: &HostileDaemon) -> Vec<String> {
    list(daemon).into_iter().map(|disk| disk.id).collect()
}

#[test]
fn disks_come_and_go_under_load() {
    let images = Images::new();
    let daemon = start(&images, &[("kept", "path=IMAGE,queues=2")], &[]);
    let neighbour = start_neighbour(daemon.socket("kept"), 2, 1);
    let path = images.image("one.img");
    let settings = format!("path={},queues=2", path.display());
    for round in 0..5 {
        let added = add(&daemon, "one", &settings).expect("it is added");
        assert_eq!(added, json!({ "id": "one", "survives_restart": false }));
        assert_eq!(ids(&daemon), ["kept", "one"]);
        assert!(list(&daemon)[1].frontend.is_none());
        // Every load begins with zeroes.
        images.image("one.img");
        let mut load = VhostUserLoad::connect(daemon.socket("one"), 2, BLOCKS, 7 + round);
        (0..10).for_each(|_| load.round());
        let shown = &list(&daemon)[1];
        let frontend = shown.frontend.as_ref().expect("a frontend");
        assert_eq!((frontend.queues, frontend.pid), (2, std::process::id() as i32));
        assert_eq!((shown.storage.as_deref(), shown.size_bytes), (Some("file"), Some((BLOCKS * BLOCK) as u64)));
        let refused = remove(&daemon, "one", false).expect_err("its guest is connected");
        assert!(refused.contains("disk \"one\": a guest is connected"), "{refused}");
        (0..10).for_each(|_| load.round());
        if round % 2 == 0 {
            drop(load);
            daemon.wait_for_session_end("one");
            let removed = std::iter::from_fn(|| Some(remove(&daemon, "one", false))).take(1000).find(Result::is_ok);
            assert!(removed.is_some(), "its guest has left");
        } else {
            remove(&daemon, "one", true).expect("it is removed by force");
            drop(load);
        }
        assert!(!daemon.socket("one").exists());
        assert_eq!(ids(&daemon), ["kept"]);
    }
    neighbour.assert_progress("the changes");
    neighbour.finish();
    daemon.stop();
}

#[test]
fn what_cannot_be_added_leaves_nothing_behind() {
    let images = Images::new();
    let daemon = start(&images, &[("kept", "storage=ram,size=1M,queues=1")], &[]);
    let path = images.image("one.img").display().to_string();
    let elsewhere = tempfile::NamedTempFile::new().expect("a file");
    let (kept, other) = (daemon.socket("kept").display().to_string(), daemon.socket("other").display().to_string());
    let outside = images.0.path().join("outside.sock").display().to_string();
    for (settings, want) in [
        (format!("id=kept,path={path},socket={other}"), "id: found \"kept\", the id of disk"),
        (format!("id=one,path={path},socket={kept}"), "in use by another program"),
        (format!("id=one,path={path},socket={other},quues=1"), "quues: found an unknown key"),
        (format!("id=one,path={path},socket={other},queues=0"), "queues: found \"0\", expected"),
        (format!("id=one,path={path}.gone,socket={other}"), "No such file or directory"),
        (format!("id=one,path={},socket={other}", elsewhere.path().display()), "the sandbox opens only images"),
        (format!("id=one,path={path},socket={outside}"), "Permission denied"),
        (
            format!("id=one,path={path},socket={other},interface=xen"),
            "interface: found \"xen\", expected one whose disks",
        ),
        (format!("id=one,path={path},socket={other},interface=virtio-scsi"), "controller: found nothing"),
        (format!("id=one,path={path},controller=c"), "controller: found \"c\""),
        (format!("path={path},path={path}"), "path: found"),
        ("path".to_owned(), "syntax: found \"path\", expected KEY=VALUE"),
        (format!("id=one,path={path},socket={other},queue-map=0:9"), "queue-map: found worker 9"),
    ] {
        let refused = call(&daemon, "disk.add", &json!({ "settings": settings })).expect_err(&settings);
        assert!(refused.contains(want), "{settings}: {refused}");
        assert_eq!(ids(&daemon), ["kept"]);
    }
    // Its id, its socket and its image are free.
    let settings = format!("id=one,path={path},socket={other}");
    call(&daemon, "disk.add", &json!({ "settings": settings })).expect("it is added");
    let refused = call(&daemon, "disk.add", &json!({ "settings": format!("id=two,path=/x,socket={other}") }));
    assert!(refused.as_ref().is_err_and(|why| why.contains("the socket of disk \"one\"")), "{refused:?}");
    let refused = remove(&daemon, "two", true).expect_err("there is none");
    assert!(refused.contains("id: found \"two\", expected one of kept, one"), "{refused}");
    daemon.stop();
}

#[test]
fn a_daemon_without_disks_waits_for_some() {
    let images = Images::new();
    let daemon = start(&images, &[], &[]);
    mqblk_tests::hostile::wait_for("the admin socket", || Client::connect(&daemon.folder().join("admin.sock")).ok());
    let path = images.image("one.img");
    add(&daemon, "one", &format!("path={}", path.display())).expect("it is added");
    let mut load = VhostUserLoad::connect(daemon.socket("one"), 1, BLOCKS, 3);
    (0..10).for_each(|_| load.round());
    drop(load);
    daemon.stop();
}

#[test]
fn failed_requests_are_logged_once_and_summed_up() {
    let images = Images::new();
    let daemon = start(&images, &[("a", "storage=ram,size=1M,queues=1")], &[]);
    let mut load = VhostUserLoad::connect(daemon.socket("a"), 1, BLOCKS, 1);
    for _ in 0..20 {
        assert_ne!(load.try_read(1 << 40), mqblk_driver::virtio_blk::BlkStatus::Ok);
    }
    let health = daemon.stat("a").health;
    assert_eq!(health.failed, 20);
    let last = health.last_failure.expect("a failure").what;
    assert_eq!(last, format!("read at {}: past the end of the disk", (BLOCK as u64) << 40));
    assert_eq!(list(&daemon)[0].health.as_ref().map(|health| health.failed), Some(20));
    drop(load);
    let log = daemon.stop_and_log();
    let lines: Vec<&str> = log.lines().filter(|line| line.contains("I/O error")).collect();
    assert!(lines[0].contains("WARN") && lines[0].contains("I/O error: a request of the guest failed"), "{lines:?}");
    for part in
        ["disk=\"a\"", "op=\"read\"", &format!("offset={}", (BLOCK as u64) << 40), "error=past the end of the disk"]
    {
        assert!(lines[0].contains(part), "{part}: {}", lines[0]);
    }
    let failed = |line: &&str| {
        let number = line.split("failed=").nth(1)?.split(' ').next()?.parse::<u64>().ok()?;
        line.contains("more I/O errors followed").then_some(number)
    };
    // On a slow machine the summary may be split.
    assert_eq!(lines[1..].iter().filter_map(failed).sum::<u64>(), 19, "{lines:?}");
    for event in ["frontend connected", "the driver starts", "frontend disconnected"] {
        let line = log.lines().find(|line| line.contains(event) && line.contains("disk=\"a\""));
        assert!(line.is_some_and(|line| line.contains(&format!("frontend={}", std::process::id()))), "{event}: {log}");
    }
    assert!(!log.contains("queue stopped"), "a line for each queue:\n{log}");
}

#[test]
fn the_level_of_the_log_changes() {
    let images = Images::new();
    let daemon = start(&images, &[("a", "storage=ram,size=1M,queues=1")], &[]);
    let level = |params: Value| call(&daemon, "log", &params);
    assert_eq!(level(Value::Null).expect("a level"), json!({ "level": "info", "before": "info" }));
    let set = level(json!({ "level": "info,mqblk_vhost_user_server=debug" })).expect("a level");
    assert_eq!(set, json!({ "level": "info,mqblk_vhost_user_server=debug", "before": "info" }));
    drop(VhostUserLoad::connect(daemon.socket("a"), 1, BLOCKS, 1));
    mqblk_tests::hostile::wait_for("a line of level debug", || daemon.log().contains("queue stopped").then_some(()));
    let refused = level(json!({ "level": "loud" })).expect_err("it is none");
    assert!(refused.contains("level: found \"loud\", expected off, error, warn"), "{refused}");
    level(json!({ "level": "off" })).expect("a level");
    let before = daemon.log();
    drop(VhostUserLoad::connect(daemon.socket("a"), 1, BLOCKS, 1));
    daemon.wait_for_session_end("a");
    assert_eq!(daemon.log(), before);
    daemon.stop();
}

/// The configuration file of a daemon in the sandbox is changed and applied.
#[test]
fn a_changed_configuration_is_applied() {
    let (images, folder) = (Images::new(), tempfile::tempdir().expect("a folder"));
    let config = folder.path().join("mqblk.toml");
    let path = images.image("one.img");
    let daemon = {
        std::fs::write(&config, "").expect("a file");
        start(&images, &[("kept", "path=IMAGE,queues=2")], &["--config", config.to_str().expect("UTF-8")])
    };
    let disk = |id: &str, more: &str| {
        let (socket, path) = (daemon.socket(id).display().to_string(), path.display().to_string());
        format!("[[disk]]\nid = \"{id}\"\nsocket = \"{socket}\"\npath = \"{path}\"\nqueues = 1\n{more}")
    };
    let write = |text: &str| std::fs::write(&config, text).expect("a file");
    let changes = |verb: &str| -> Vec<(String, bool, Option<String>)> {
        let found = call(&daemon, verb, &Value::Null).expect("an answer");
        let found: mqblk_admin::model::ConfigDifferences = serde_json::from_value(found).expect("differences");
        found.changes.into_iter().map(|change| (change.what, change.applied, change.error)).collect()
    };
    let neighbour = start_neighbour(daemon.socket("kept"), 2, 1);
    assert_eq!(changes("config.diff"), []);
    write(&disk("one", ""));
    assert_eq!(changes("config.diff"), [("disk \"one\": add".to_owned(), false, None)]);
    assert_eq!(ids(&daemon), ["kept"]);
    assert_eq!(changes("config.apply"), [("disk \"one\": add".to_owned(), true, None)]);
    assert_eq!((changes("config.apply"), ids(&daemon)), (vec![], vec!["kept".to_owned(), "one".to_owned()]));

    // Changes that need a restart are reported, and an invalid configuration changes nothing.
    write(&format!("hang-warning-s = 3\n{}", disk("one", "poll = \"off\"\n")));
    let told = changes("config.apply");
    assert!(told[0].0 == "disk \"one\": set poll=off" && told[0].1, "{told:?}");
    assert!(told[1].0.starts_with("serve: other values of hang-warning-s,") && told.len() == 2, "{told:?}");
    write(&disk("one", ""));
    assert_eq!(changes("config.apply")[0].0, "disk \"one\": set poll=(default)");
    write("[[disk]\n");
    assert!(call(&daemon, "config.apply", &Value::Null).expect_err("no TOML").contains("syntax"));
    write(&format!(
        "{}[[disk]]\nid = \"bad\"\nstorage = \"ram\"\nsocket = \"/nowhere/s\"\nsize = \"1M\"\n",
        disk("one", "")
    ));
    let told = changes("config.apply");
    assert!(told.len() == 1 && told[0].2.as_ref().is_some_and(|why| why.contains("/nowhere/s")), "{told:?}");
    assert_eq!(ids(&daemon), ["kept", "one"]);

    // A disk with a guest stays.
    let mut load = VhostUserLoad::connect(daemon.socket("one"), 1, BLOCKS, 3);
    (0..10).for_each(|_| load.round());
    write("");
    let told = changes("config.apply");
    assert!(told[0].2.as_ref().is_some_and(|why| why.contains("a guest is connected")), "{told:?}");
    (0..10).for_each(|_| load.round());
    drop(load);
    daemon.wait_for_session_end("one");
    // By the signal.
    let pid = rustix::process::Pid::from_raw(daemon.pid() as i32).expect("a process");
    mqblk_tests::hostile::wait_for("the disk's end", || {
        rustix::process::kill_process(pid, rustix::process::Signal::HUP).expect("a signal");
        std::thread::sleep(std::time::Duration::from_millis(20));
        (ids(&daemon) == ["kept"]).then_some(())
    });
    neighbour.assert_progress("the changes");
    neighbour.finish();
    assert!(daemon.stop_and_log().contains("the configuration was read again: disk \"one\": remove: done"));
}
