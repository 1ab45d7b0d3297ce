//! A disk that cannot be served is out, and all others are served: in the sandbox, at the start and at a takeover. The
//! daemon retries it.

use std::fs::File;
use std::io::Write as _;
use std::net::TcpListener;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Command, Output};

use mqblk_admin::Client;
use mqblk_admin::model::{DiskList, OutDisk};
use mqblk_tests::crash::daemon::RestartableDaemon;
use mqblk_tests::hostile::daemon::{HostileDaemon, mqblk_binary};
use mqblk_tests::hostile::load::{BLOCK, VhostUserLoad, start_neighbour};
use mqblk_tests::hostile::{TIMEOUT, wait_for};
use mqblk_tests::nbd_server::NbdServer;
use serde_json::{Value, json};

const BLOCKS: usize = 64;

fn image(path: &Path) {
    File::create(path).and_then(|file| file.set_len((BLOCKS * BLOCK) as u64)).expect("an image");
}

fn call(admin: &Path, verb: &str, params: &Value) -> Result<Value, String> {
    let connect = || Client::connect_with(admin, TIMEOUT.time()).ok();
    let mut client = wait_for("the admin socket", connect);
    client.call(verb, params).map_err(|error| error.to_string())
}

fn list(admin: &Path) -> DiskList {
    serde_json::from_value(call(admin, "disk.list", &Value::Null).expect("a list")).expect("a list")
}

/// Returns the disks that are out, by id.
fn out(admin: &Path) -> Vec<OutDisk> {
    let mut out = list(admin).out;
    out.sort_by(|one, other| one.id.cmp(&other.id));
    out
}

fn ids(out: &[OutDisk]) -> Vec<&str> {
    out.iter().map(|disk| disk.id.as_str()).collect()
}

fn mqblk(arguments: &[&str]) -> Output {
    Command::new(mqblk_binary()).args(arguments).env_remove("RUST_LOG").output().expect("mqblk")
}

/// Causes of out disks: a file that is missing, of another format, too short, a folder, or locked, and servers that are
/// silent, invalid, or absent.
#[test]
fn every_other_disk_is_served_and_what_was_out_comes() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    std::fs::create_dir(at("folder")).expect("a folder");
    image(&at("foreign.img"));
    File::options()
        .write(true)
        .open(at("foreign.img"))
        .unwrap()
        .write_all_at(b"QFI\xfb\0\0\0\x03", 0)
        .expect("a signature");
    File::create(at("odd.img")).and_then(|mut file| file.write_all(b"odd")).expect("a file");
    image(&at("locked.img"));
    let holder = HostileDaemon::start(1, &[("holder", &format!("path={}", at("locked.img").display()))]);
    // One accepts and sends nothing; the other sends garbage.
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let liar = TcpListener::bind("127.0.0.1:0").expect("a port");
    let (silent_port, liar_port) = (silent.local_addr().unwrap().port(), liar.local_addr().unwrap().port());
    std::thread::spawn(move || {
        for connection in liar.incoming() {
            let _ = connection.and_then(|mut connection| connection.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n"));
        }
    });
    let kept_out = [
        ("missing", format!("path={}", at("late.img").display()), "No such file"),
        ("foreign", format!("path={}", at("foreign.img").display()), "an image of the format qcow2"),
        ("odd", format!("path={}", at("odd.img").display()), "a multiple of block-size"),
        ("folder", format!("path={}", at("folder").display()), "expected a regular file"),
        ("locked", format!("path={}", at("locked.img").display()), "in use by another process"),
        ("dead", format!("path=nbd+unix:///?socket={}", at("nobody.sock").display()), "No such file"),
        ("silent", format!("path=nbd://127.0.0.1:{silent_port}"), "no answer within"),
        ("liar", format!("path=nbd://127.0.0.1:{liar_port}"), "NBDMAGIC"),
    ];
    let mut arguments = Vec::new();
    for (id, settings, _) in &kept_out {
        arguments.extend([
            "--disk".to_owned(),
            format!("id={id},socket={},{settings}", at(&format!("{id}.sock")).display()),
        ]);
    }
    arguments.extend(["--controller", "id=c,queues=1"].map(str::to_owned));
    arguments.last_mut().unwrap().push_str(&format!(",socket={}", at("c.sock").display()));
    for (lun, file) in [("there", "there.img"), ("gone", "gone.img")] {
        arguments.extend(["--lun".to_owned(), format!("controller=c,id={lun},path={}", at(file).display())]);
    }
    image(&at("there.img"));
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let daemon = HostileDaemon::start_with(1, &[("kept", "path=IMAGE,queues=1")], &arguments);
    let admin = daemon.folder().join("admin.sock");
    let _neighbour = start_neighbour(daemon.socket("kept"), 1, 1);
    let found = out(&admin);
    assert_eq!(ids(&found), ["dead", "folder", "foreign", "gone", "liar", "locked", "missing", "odd", "silent"]);
    for (id, _, why) in &kept_out {
        let disk = found.iter().find(|disk| disk.id == *id).unwrap();
        assert!(disk.why.contains(why), "{id}: {}", disk.why);
        assert!(
            daemon.warnings(id).iter().any(|line| line.contains("not served") && line.contains(why)),
            "{id}: {}",
            daemon.log()
        );
    }
    let metrics = mqblk(&["stat", "--socket", admin.to_str().unwrap()]);
    assert!(String::from_utf8_lossy(&metrics.stdout).contains("locked is out"), "{metrics:?}");

    // A disk is served once it can be, by itself or on request.
    image(&at("late.img"));
    image(&at("gone.img"));
    drop(holder);
    wait_for("what has come", || {
        (ids(&out(&admin)) == ["dead", "folder", "foreign", "liar", "odd", "silent"]).then_some(())
    });
    VhostUserLoad::connect(at("missing.sock"), 1, BLOCKS, 7);
    let luns = list(&admin).disks.into_iter().filter(|disk| disk.controller.is_some()).map(|disk| disk.id);
    assert_eq!(luns.collect::<Vec<_>>(), ["there", "gone"]);
    image(&at("odd.img"));
    match call(&admin, "disk.retry", &json!({ "id": "odd" })) {
        Ok(retried) => assert_eq!(retried, json!({ "served": ["odd"], "out": [] })),
        // It was its turn anyway.
        Err(why) => assert!(!ids(&out(&admin)).contains(&"odd"), "{why}"),
    }
    let why = call(&admin, "disk.retry", &json!({ "id": "dead" })).unwrap_err();
    assert!(why.contains("No such file"), "{why}");
    assert!(call(&admin, "disk.retry", &json!({ "id": "kept" })).unwrap_err().contains("dead"), "it is not out");
    // A removed disk is not retried.
    call(&admin, "disk.remove", &json!({ "id": "folder" })).expect("it is given up");
    assert!(!ids(&out(&admin)).contains(&"folder"));
}

/// With `--strict`, for `--print-config` and `--check`, and when there is nothing else.
#[test]
fn who_wants_all_or_nothing_has_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name).display().to_string();
    image(&folder.path().join("good.img"));
    let good = format!("id=good,path={},socket={}", at("good.img"), at("good.sock"));
    let missing = format!("id=missing,path={},socket={}", at("missing.img"), at("missing.sock"));
    let typo = format!("id=typo,pth={},socket={}", at("good.img"), at("typo.sock"));
    let run = |arguments: &[&str]| {
        let Output { status, stdout, stderr } = mqblk(&[&["serve"], arguments].concat());
        let text = String::from_utf8_lossy(&[stdout, stderr].concat()).into_owned();
        (status.code(), text)
    };
    for (arguments, code, said) in [
        (&["--strict", "--disk", &good, "--disk", &missing][..], 1, "missing.img"),
        (&["--print-config", "--disk", &good, "--disk", &missing], 1, "missing.img"),
        (&["--check", "--disk", &good, "--disk", &missing], 1, "disk good: can be served\nmissing is out: "),
        (&["--check", "--disk", &good], 0, "disk good: can be served\n"),
        (&["--check", "--disk", &good, "--disk", &typo], 2, "path: found nothing"),
        // It would not be noticed that nothing is served.
        (&["--disk", &missing], 1, "missing.img"),
    ] {
        let (found, text) = run(arguments);
        assert_eq!(found, Some(code), "{arguments:?}: {text}");
        assert!(text.contains(said), "{arguments:?}: {text}");
    }
}

/// The successor cannot open one disk: its guest has to wait, and all others go over.
#[test]
fn a_disk_that_a_successor_cannot_open_does_not_keep_the_others() {
    let disk = |id: &str, path: &str| format!("id={id},socket=FOLDER/{id}.sock,{path},queues=1");
    let export = "storage=nbd,path=nbd+unix:///?socket=FOLDER/nbd.sock";
    let arguments = [
        "--workers",
        "1",
        "--admin",
        "FOLDER/admin",
        "--disk",
        &disk("a", "path=FOLDER/a.img"),
        "--disk",
        &disk("n", export),
    ];
    let arguments: Vec<String> = arguments.map(str::to_owned).into();
    let mut daemon = RestartableDaemon::prepare(&arguments, &["a.img", "n.img"]);
    let (socket, image) = (daemon.folder().join("nbd.sock"), daemon.folder().join("n.img"));
    // Several connections, so that the disk can be handed over.
    let nbdkit = || {
        let mut command = Command::new("nbdkit");
        command.args(["--foreground", "--unix"]).arg(&socket).arg("file").arg(&image);
        NbdServer::start(command, || socket.exists())
    };
    let mut server = nbdkit();
    daemon.spawn();
    let admin = daemon.folder().join("admin");
    let _kept = start_neighbour(daemon.folder().join("a.sock"), 1, 1);
    let waits = VhostUserLoad::connect(daemon.folder().join("n.sock"), 1, BLOCKS, 3);
    server.kill();
    let _ = std::fs::remove_file(&socket);
    let first = call(&admin, "version", &Value::Null).expect("a version")["pid"].clone();
    daemon.take_over();
    assert_ne!(call(&admin, "version", &Value::Null).expect("a version")["pid"], first, "{}", daemon.log());
    assert_eq!(ids(&out(&admin)), ["n"], "{}", daemon.log());
    drop(waits);
    let _again = nbdkit();
    wait_for("the disk", || out(&admin).is_empty().then_some(()));
    VhostUserLoad::connect(daemon.folder().join("n.sock"), 1, BLOCKS, 4);
}

/// State that a daemon of the user nobody, compromised by a guest, could leave behind for the next start by root.
fn poisoned_state(at: &dyn Fn(&str) -> String) -> Value {
    let disk = |id: &str, image: &str, socket: &str| json!({ "id": id, "settings": { "path": at(image), "socket": at(socket), "queues": "1", "lock": "off" } });
    let lun = |id: &str, image: &str| json!({ "controller": "c", "id": id, "settings": { "path": at(image) }, "target": 7, "lun": 0 });
    let disks = [
        disk("good", "images/good.img", "run/good"),
        disk("a", "secret.img", "run/a"),
        disk("door", "images/good.img", "etc/door"),
    ];
    json!({ "format": "mqblk-state", "version": 2, "interfaces": {
        "virtio-blk": { "added": disks, "removed": ["a"] },
        "virtio-scsi": { "added": [lun("lun", "secret.img")], "removed": [] },
    } })
}

#[test]
#[ignore = "needs root"]
fn as_root_what_a_state_file_names_is_opened_with_the_rights_of_the_daemon_and_no_others() {
    const NOBODY: u32 = 65_534;
    for sandbox in ["on", "off"] {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name).display().to_string();
        let set_mode = |path: &str, mode| {
            std::fs::set_permissions(at(path), std::os::unix::fs::PermissionsExt::from_mode(mode)).expect("a mode");
        };
        set_mode("", 0o755);
        for name in ["images", "run", "state", "etc"] {
            std::fs::create_dir(at(name)).expect("a folder");
        }
        for name in ["images/a.img", "images/good.img", "secret.img"] {
            image(&folder.path().join(name));
            set_mode(name, 0o600);
        }
        let own = |name: &str| std::os::unix::fs::chown(at(name), Some(NOBODY), Some(NOBODY)).expect("an owner");
        ["run", "state", "images/good.img"].iter().for_each(|name| own(name));
        let (state, admin) = (at("state/s.json"), at("run/admin"));
        std::fs::write(&state, poisoned_state(&at).to_string()).expect("a state");
        set_mode("state/s.json", 0o600);
        let (disk, controller) = (
            format!("id=a,path={},socket={}", at("images/a.img"), at("run/a")),
            format!("id=c,socket={}", at("run/c")),
        );
        let images = at("images");
        let mut arguments = vec!["--disk", &disk, "--controller", &controller, "--state", &state, "--sandbox", sandbox];
        arguments.extend(["--user", "65534", "--admin", &admin]);
        if sandbox == "on" {
            arguments.extend(["--sandbox-allow", &images]);
        }
        // Only once it is the file of root or of the user.
        std::os::unix::fs::chown(&state, Some(54321), None).expect("an owner");
        let refused = mqblk(&[&["serve"], &arguments[..]].concat());
        let why = String::from_utf8_lossy(&refused.stderr);
        assert!(refused.status.code() == Some(2) && why.contains("a file of user 54321"), "{why}");
        own("state/s.json");
        let daemon = HostileDaemon::start_with(1, &[], &arguments);
        let out = out(Path::new(&admin));
        assert_eq!(ids(&out), ["a", "door", "lun"], "{sandbox}: {out:?}");
        let expected = if sandbox == "on" { "sandbox-allow" } else { "Permission denied" };
        for at in [0, 2] {
            assert!(out[at].why.contains("secret.img") && out[at].why.contains(expected), "{}", out[at].why);
        }
        assert!(!folder.path().join("etc/door").exists() && folder.path().join("run/good").exists());
        daemon.stop();
    }
}
