//! Controllers and their LUNs in a running daemon, with `mqblk lun` and over the admin socket.

#[path = "../daemon/mod.rs"]
mod daemon;
mod mistakes;

use std::path::Path;

use daemon::{Daemon, output};
use mqblk_admin::model::{Lun, LunChange, LunList};
use mqblk_admin::{Client, StatQuery};
use rustix::process::Signal;
use serde_json::{Value, json};

/// The note on a LUN added to a daemon without a state file.
const LOST: &str = "; it does not survive a restart of the daemon, which has no --state";

/// Starts a daemon with a controller `c` of two queues and two LUNs, and a controller `d` without LUNs.
fn start() -> Daemon {
    start_in(tempfile::tempdir().unwrap(), &[])
}

fn start_in(folder: tempfile::TempDir, more: &[&str]) -> Daemon {
    let at = folder.path().display().to_string();
    image(folder.path(), "first.img", 8);
    let args = [
        format!("id=c,socket={at}/c.sock,queues=2"),
        // Without a size watch: new sizes of the file are adopted only on request.
        format!("controller=c,path={at}/first.img,watch-size=off"),
        "controller=c,storage=ram,size=4M,id=mem,target=7,lun=3,serial=S1".to_owned(),
        format!("id=d,socket={at}/d.sock,queues=1"),
    ];
    let mut words = vec!["--controller", &args[0], "--lun", &args[1], "--lun", &args[2], "--controller", &args[3]];
    words.extend(more);
    Daemon::start_in(folder, &words)
}

fn image(folder: &Path, name: &str, mib: u64) -> String {
    let path = folder.join(name);
    std::fs::File::create(&path).unwrap().set_len(mib << 20).unwrap();
    path.display().to_string()
}

fn lun(daemon: &Daemon, words: &[&str]) -> (Option<i32>, String, String) {
    let admin = daemon.admin().display().to_string();
    output(&[&["lun", words[0], "--socket", &admin], &words[1..]].concat())
}

fn client(daemon: &Daemon) -> Client {
    Client::connect(&daemon.admin()).unwrap()
}

fn luns(client: &mut Client) -> Vec<Lun> {
    serde_json::from_value::<LunList>(client.call("lun.list", &Value::Null).unwrap()).unwrap().luns
}

fn ids(client: &mut Client) -> Vec<String> {
    luns(client).into_iter().map(|lun| lun.id).collect()
}

#[test]
fn luns_are_added_and_removed() {
    let daemon = start();
    let image = image(daemon.path(), "second.img", 16);
    let done = |words: &[&str]| {
        let (code, stdout, stderr) = lun(&daemon, words);
        assert_eq!((code, stderr.as_str()), (Some(0), ""), "{words:?}");
        stdout
    };
    let add = format!("controller=c,path={image},merge=off");
    assert_eq!(done(&["add", &add]), format!("added c:1:0: target 1 lun 0 of controller c, 16M{LOST}\n"));
    assert_eq!(
        done(&["add", "controller=d,unit=c:1:0,target=9"]),
        format!("added d:9:0: target 9 lun 0 of controller d, 16M{LOST}\n")
    );
    let table = done(&["list"]);
    let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(
        rows,
        [
            vec!["lun", "controller", "target", "lun", "size", "state", "storage", "unit", "origin"],
            vec!["c:0:0", "c", "0", "0", "8M", "ready", "file", "c:0:0", "configuration"],
            vec!["c:1:0", "c", "1", "0", "16M", "ready", "file", "c:1:0", "run-time"],
            vec!["mem", "c", "7", "3", "4M", "ready", "ram", "mem", "configuration"],
            vec!["d:9:0", "d", "9", "0", "16M", "ready", "file", "c:1:0", "run-time"],
        ]
    );
    assert_eq!(done(&["list", "--controller", "d"]).lines().count(), 2);

    // The image is released with its last LUN, not before.
    assert_eq!(done(&["remove", "c:1:0"]), "removed c:1:0: target 1 lun 0 of controller c, 16M\n");
    let (code, _, stderr) = lun(&daemon, &["add", &add]);
    assert_eq!(code, Some(2), "{stderr}");
    assert!(stderr.starts_with("mqblk: lun add: id: found \"c:1:0\", the id of lun \"d:9:0\""), "{stderr}");
    let (code, _, stderr) = lun(&daemon, &["add", &format!("{add},id=again")]);
    assert_eq!(code, Some(2), "{stderr}");
    assert!(
        stderr.starts_with(&format!("mqblk: lun add: unit-name: found \"1:0:{}/c.sock\"", daemon.path().display())),
        "{stderr}"
    );
    let (code, _, stderr) = lun(&daemon, &["add", &format!("{add},id=again,unit-name=x")]);
    assert_eq!(code, Some(2), "{stderr}");
    assert!(
        stderr.starts_with(&format!("mqblk: lun add: path: found \"{image}\" (in use by another process)")),
        "{stderr}"
    );
    let removed = done(&["remove", "--controller", "d", "--target", "9", "--json"]);
    let removed: LunChange = serde_json::from_str(&removed).unwrap();
    assert_eq!((removed.lun.id.as_str(), removed.lun.state.as_str()), ("d:9:0", "removed"));
    assert_eq!(done(&["add", &add]), format!("added c:1:0: target 1 lun 0 of controller c, 16M{LOST}\n"));
    assert_eq!(ids(&mut client(&daemon)), ["c:0:0", "c:1:0", "mem"]);

    daemon.signal(Signal::TERM);
    let (code, folder) = daemon.ended();
    assert_eq!(code, Some(0));
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2, "the images alone: {left:?}");
}

#[test]
fn reported_settings_can_be_added_again() {
    let daemon = start();
    let mut client = client(&daemon);
    let before = luns(&mut client);
    assert_eq!((before[1].id.as_str(), before[1].target, before[1].lun), ("mem", 7, 3));
    assert_eq!(
        (before[1].size_bytes, before[1].block_bytes, before[1].read_only),
        (Some(4 << 20), Some(512), Some(false))
    );
    assert_eq!((&before[1].settings["serial"], &before[1].settings["size"]), (&json!("S1"), &json!("4M")));
    for lun in &before {
        let removed = client.call("lun.remove", &json!({ "id": lun.id })).unwrap();
        assert_eq!(removed["lun"]["state"], "removed");
        client.call("lun.add", &json!({ "controller": lun.controller, "settings": lun.settings })).unwrap();
    }
    let configured = |lun: Lun| {
        assert_eq!((lun.origin.as_str(), lun.survives_restart), ("run-time", false));
        Lun { origin: "configuration".to_owned(), survives_restart: true, ..lun }
    };
    assert_eq!(luns(&mut client).into_iter().map(configured).collect::<Vec<_>>(), before);
}

#[test]
fn many_clients_at_once() {
    let daemon = start();
    let admin = daemon.admin();
    std::thread::scope(|scope| {
        for worker in 0..4 {
            let admin = &admin;
            scope.spawn(move || {
                let mut client = Client::connect(admin).unwrap();
                for _ in 0..20 {
                    // All get the first free target, and no two the same.
                    let params =
                        json!({ "controller": "c", "settings": format!("storage=ram,size=1M,id=mine-{worker}") });
                    let added: LunChange = serde_json::from_value(client.call("lun.add", &params).unwrap()).unwrap();
                    assert!((1..=5).contains(&added.lun.target), "{added:?}");
                    let place = json!({ "controller": "c", "target": added.lun.target });
                    let removed: LunChange =
                        serde_json::from_value(client.call("lun.remove", &place).unwrap()).unwrap();
                    assert_eq!(removed.lun.id, format!("mine-{worker}"));
                }
            });
        }
    });
    assert_eq!(ids(&mut client(&daemon)), ["c:0:0", "mem"]);
}

#[test]
fn stat_reports_controllers() {
    let daemon = start();
    let mut client = client(&daemon);
    let stat = client.stat(&StatQuery { queues: true, ..StatQuery::default() }).unwrap();
    assert_eq!((stat.disks.len(), stat.controllers.len()), (2, 2));
    let controller = &stat.controllers[0];
    assert_eq!(
        (controller.id.as_str(), controller.interface.as_str(), controller.queue_count),
        ("c", "virtio-scsi", 2)
    );
    let queues: Vec<_> = controller.queues.iter().map(|queue| (queue.role.as_str(), queue.queue)).collect();
    assert_eq!(queues, [("control", 0), ("event", 0), ("request", 0), ("request", 1)]);
    let reported: Vec<_> = controller.luns.iter().map(|lun| (lun.id.as_str(), lun.target, lun.lun)).collect();
    assert_eq!(reported, [("c:0:0", 0, 0), ("mem", 7, 3)]);
    for (id, disks, controllers, luns) in [("a", 1, 0, 0), ("c", 0, 1, 2), ("mem", 0, 1, 1), ("d", 0, 1, 0)] {
        let stat = client.stat(&StatQuery { disk: Some(id.to_owned()), ..StatQuery::default() }).unwrap();
        let found = stat.controllers.iter().map(|one| one.luns.len()).sum::<usize>();
        assert_eq!((stat.disks.len(), stat.controllers.len(), found), (disks, controllers, luns), "{id}");
    }
    let admin = daemon.admin().display().to_string();
    let (code, stdout, stderr) = output(&["stat", "--socket", &admin, "--queues", "--disk", "c"]);
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    // A name may be longer than its column: then its numbers are in the next line.
    let names =
        stdout.lines().skip(2).map(|line| line.split("  ").find(|part| !part.trim().is_empty()).unwrap_or_default());
    let names: Vec<&str> =
        names.map(str::trim).filter(|name| name.starts_with(|first: char| first.is_alphabetic())).collect();
    let first = format!("q0 w{}", controller.queues[2].worker);
    assert_eq!(names[..6], ["c", "lun c:0:0", "lun mem", "control w0", "event w0", first.as_str()], "{stdout}");
}

#[test]
fn the_printed_configuration_round_trips() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().display().to_string();
    let image = image(folder.path(), "disk.img", 1);
    let args = [
        format!("id=c,socket={at}/c,queues=2,poll=off"),
        format!("controller=c,path={image},reservations={at}/kept"),
        "controller=c,unit=c:0:0,target=4".to_owned(),
        format!("storage=null,size=1G,socket={at}/d,interface=virtio-scsi,queues=1"),
    ];
    let printed = output(&[
        "serve",
        "--controller",
        &args[0],
        "--lun",
        &args[1],
        "--lun",
        &args[2],
        "--disk",
        &args[3],
        "--print-config",
    ]);
    assert_eq!(printed.0, Some(0), "{}", printed.2);
    let file = folder.path().join("m.toml");
    std::fs::write(&file, &printed.1).unwrap();
    let again = output(&["serve", "--config", file.to_str().unwrap(), "--print-config"]);
    assert_eq!((again.0, again.1), (Some(0), printed.1.clone()), "{}", again.2);
    assert_eq!(printed.1.matches("[[controller]]").count(), 2);
    assert_eq!(printed.1.matches("[[controller.lun]]").count(), 3);
    assert!(!folder.path().join("kept").exists(), "nothing has been created");
    std::fs::write(folder.path().join("kept"), "{}").unwrap();
    let (code, _, stderr) = output(&["serve", "--config", file.to_str().unwrap()]);
    assert_eq!(code, Some(2));
    assert!(stderr.starts_with(&format!("mqblk: lun \"c:0:0\": reservations: found \"{at}/kept\": ")), "{stderr}");
}

#[test]
fn luns_are_resized() {
    let daemon = start();
    let mut client = client(&daemon);
    client.call("lun.add", &json!({ "controller": "d", "settings": "unit=c:0:0" })).unwrap();
    let sizes = |client: &mut Client| luns(client).iter().map(|lun| lun.size_bytes.unwrap() >> 20).collect::<Vec<_>>();
    let resize = |words: &[&str]| lun(&daemon, &[&["resize"], words].concat());
    assert_eq!(sizes(&mut client), [8, 4, 8]);

    // The daemon resizes the file; all LUNs of the logical unit have the size.
    assert_eq!(resize(&["c:0:0", "--size", "12M"]).1, "resized c:0:0: target 0 lun 0 of controller c, 12M\n");
    let image = daemon.path().join("first.img");
    assert_eq!((std::fs::metadata(&image).unwrap().len() >> 20, sizes(&mut client)), (12, vec![12, 4, 12]));
    // The file is resized externally; then by address, by a number of bytes, and to a smaller size.
    std::fs::OpenOptions::new().write(true).open(&image).unwrap().set_len(20 << 20).unwrap();
    assert_eq!(sizes(&mut client), [12, 4, 12], "not adopted yet");
    assert_eq!(
        resize(&["--controller", "d", "--target", "0"]).1,
        "resized d:0:0: target 0 lun 0 of controller d, 20M\n"
    );
    assert_eq!(sizes(&mut client), [20, 4, 20]);
    let reported = client.call("lun.resize", &json!({ "id": "mem", "size": 1 << 20, "shrink": true })).unwrap();
    assert_eq!((&reported["lun"]["size_bytes"], &reported["lun"]["settings"]["size"]), (&json!(1 << 20), &json!("1M")));
    assert_eq!(sizes(&mut client), [20, 1, 20]);

    let smaller = "; a smaller disk needs --shrink, and data beyond its end is lost\n";
    let (code, _, stderr) = resize(&["c:0:0", "--size", "8M"]);
    let want = format!("mqblk: lun resize: size: found 8M, and the disk has 20M, expected at least 20M{smaller}");
    assert_eq!((code, stderr, std::fs::metadata(&image).unwrap().len()), (Some(2), want, 20 << 20));
    for (words, code, want) in [
        (
            &["mem", "--shrink", "--size", "1000"][..],
            2,
            "mqblk: lun resize: size: found 1000 bytes, expected a multiple of block-size 512 above 0\n",
        ),
        (
            &["mem", "--shrink", "--size", "0"][..],
            2,
            "mqblk: lun resize: size: found 0 bytes, expected a multiple of block-size 512 above 0\n",
        ),
        (&["mem", "--size", "5M"][..], 2, "mqblk: lun resize: size: found 5M, expected at most max-size 4M\n"),
    ] {
        let (found, _, stderr) = resize(words);
        assert_eq!((found, stderr.as_str()), (Some(code), want), "{words:?}");
    }
    std::fs::OpenOptions::new().write(true).open(&image).unwrap().set_len(1000).unwrap();
    let (code, _, stderr) = resize(&["c:0:0"]);
    assert_eq!(code, Some(1));
    assert!(
        stderr.contains("found 1000 in the storage, and the guest's disk has 20M, expected at least 20M"),
        "{stderr}"
    );
    let (code, _, stderr) = resize(&["c:0:0", "--shrink"]);
    let want = format!(
        "mqblk: lun resize: lun \"c:0:0\": size: found 1000 bytes in {}, expected a multiple of block-size 512 above 0\n",
        image.display()
    );
    assert_eq!((code, stderr), (Some(1), want));
    assert_eq!(sizes(&mut client), [20, 1, 20], "as it was");
    assert_eq!(resize(&["c:0:0", "--size", "8M", "--shrink"]).0, Some(0));
    assert_eq!(sizes(&mut client), [8, 1, 8]);
}
