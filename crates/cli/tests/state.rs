//! `--state`: LUNs that are added and removed at run time, over restarts and kills. Also signals that do not end the
//! daemon.

#[path = "daemon/mod.rs"]
mod daemon;

use std::path::Path;

use daemon::{Daemon, long, output};
use mqblk_admin::Client;
use mqblk_admin::model::{Lun, LunList};
use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;

fn image(folder: &Path, name: &str) -> String {
    let path = folder.join(name);
    if !path.exists() {
        std::fs::File::create(&path).unwrap().set_len(8 << 20).unwrap();
    }
    path.display().to_string()
}

/// Starts a daemon with a controller `c`, a LUN `c:0:0` of a file, the arguments `more`, and its state in `state`.
fn start(folder: TempDir, more: &[&str]) -> Daemon {
    let at = folder.path().display().to_string();
    image(folder.path(), "first.img");
    let (controller, lun) = (format!("id=c,socket={at}/c.sock,queues=1"), format!("controller=c,path={at}/first.img"));
    let state = format!("{at}/state");
    let words = ["--controller", &controller, "--lun", &lun, "--state", &state];
    Daemon::start_in(folder, &[&words, more].concat())
}

fn restart(daemon: Daemon, signal: Signal, more: &[&str]) -> Daemon {
    daemon.signal(signal);
    start(daemon.ended().1, more)
}

fn luns(daemon: &Daemon) -> Vec<Lun> {
    let mut client = Client::connect(&daemon.admin()).unwrap();
    serde_json::from_value::<LunList>(client.call("lun.list", &Value::Null).unwrap()).unwrap().luns
}

/// Returns id, target, origin and survival of a restart of each LUN.
fn summary(daemon: &Daemon) -> Vec<(String, u32, String, bool)> {
    luns(daemon).into_iter().map(|lun| (lun.id, lun.target, lun.origin, lun.survives_restart)).collect()
}

fn want(luns: &[(&str, u32, &str)]) -> Vec<(String, u32, String, bool)> {
    luns.iter().map(|(id, target, origin)| ((*id).to_owned(), *target, (*origin).to_owned(), true)).collect()
}

fn lun(daemon: &Daemon, words: &[&str]) -> String {
    let admin = daemon.admin().display().to_string();
    let (code, stdout, stderr) = output(&[&["lun", words[0], "--socket", &admin], &words[1..]].concat());
    assert_eq!((code, stderr.as_str()), (Some(0), ""), "{words:?}");
    stdout
}

const CONFIGURED: (&str, u32, &str) = ("c:0:0", 0, "configuration");

#[test]
fn run_time_changes_survive_restarts_and_kills() {
    let daemon = start(tempfile::tempdir().unwrap(), &[]);
    let second = image(daemon.path(), "second.img");
    let response = lun(&daemon, &["add", &format!("controller=c,path={second},serial=S2,cache=writethrough")]);
    assert_eq!(response, "added c:1:0: target 1 lun 0 of controller c, 8M\n");
    lun(&daemon, &["add", "controller=c,storage=ram,size=4M,id=mem,target=9"]);
    lun(&daemon, &["add", "controller=c,unit=c:1:0,target=5,id=path2"]);
    let all = want(&[CONFIGURED, ("c:1:0", 1, "run-time"), ("path2", 5, "run-time"), ("mem", 9, "run-time")]);
    assert_eq!(summary(&daemon), all);
    let before = luns(&daemon);
    let mut daemon = daemon;
    for signal in [Signal::KILL, Signal::TERM, Signal::KILL] {
        daemon = restart(daemon, signal, &[]);
        assert_eq!((summary(&daemon), luns(&daemon)), (all.clone(), before.clone()));
    }
    let table = lun(&daemon, &["list"]);
    assert!(table.lines().next().unwrap().contains("origin") && table.contains("run-time"), "{table}");

    // Removed LUNs stay removed: one of the configuration, and one whose logical unit another LUN shares.
    for id in ["c:0:0", "c:1:0", "mem"] {
        lun(&daemon, &["remove", id]);
    }
    let left = want(&[("path2", 5, "run-time")]);
    assert_eq!(summary(&daemon), left);
    daemon = restart(daemon, Signal::KILL, &[]);
    assert_eq!(summary(&daemon), left);
    // The storage of a removed LUN is not needed.
    std::fs::remove_file(daemon.path().join("first.img")).unwrap();
    let folder = {
        daemon.signal(Signal::TERM);
        daemon.ended().1
    };
    std::fs::write(folder.path().join("first.img"), "no whole block").unwrap();
    daemon = start(folder, &[]);
    assert_eq!(summary(&daemon), left);
    // Its address and id can be used again.
    lun(&daemon, &["add", "controller=c,storage=ram,size=1M,target=0"]);
    lun(&daemon, &["remove", "path2"]);
    daemon = restart(daemon, Signal::KILL, &[]);
    assert_eq!(summary(&daemon), want(&[("c:0:0", 0, "run-time")]));
    assert_eq!(luns(&daemon)[0].storage.as_deref(), Some("ram"));
}

#[test]
fn the_configuration_has_priority_over_the_state() {
    let daemon = start(tempfile::tempdir().unwrap(), &[]);
    for words in ["id=x,target=3", "id=y,target=4", "id=z,target=5"] {
        lun(&daemon, &["add", &format!("controller=c,storage=ram,size=1M,{words}")]);
    }
    lun(&daemon, &["remove", "c:0:0"]);
    let missing = image(daemon.path(), "gone.img");
    lun(&daemon, &["add", &format!("controller=c,path={missing},id=file,target=6")]);
    std::fs::remove_file(&missing).unwrap();
    // One new LUN has the address of a saved one, another its id; the file of a third is missing for now.
    let more = [
        "--lun",
        "controller=c,storage=ram,size=2M,id=new,target=3",
        "--lun",
        "controller=c,storage=ram,size=2M,id=y,target=8",
    ];
    let daemon = restart(daemon, Signal::KILL, &more);
    let without = [("new", 3, "configuration"), ("z", 5, "run-time"), ("y", 8, "configuration")];
    assert_eq!(summary(&daemon), want(&without));
    image(daemon.path(), "gone.img");
    let daemon = restart(daemon, Signal::KILL, &more);
    assert_eq!(summary(&daemon), want(&[without[0], without[1], ("file", 6, "run-time"), without[2]]));
    // Conflicting LUNs were dropped from the state.
    let daemon = restart(daemon, Signal::KILL, &[]);
    assert_eq!(summary(&daemon), want(&[("z", 5, "run-time"), ("file", 6, "run-time")]));
}

#[test]
fn a_damaged_state_file_and_one_in_use_are_refused() {
    let daemon = start(tempfile::tempdir().unwrap(), &[]);
    lun(&daemon, &["add", "controller=c,storage=ram,size=1M"]);
    let at = daemon.path().display().to_string();
    let (controller, state) = (format!("id=d,socket={at}/d.sock"), format!("{at}/state"));
    let serve = || output(&["serve", "--controller", &controller, "--state", &state]);
    let (code, _, stderr) = serve();
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.contains("state: found") && stderr.contains("another daemon uses it"), "{stderr}");
    daemon.signal(Signal::KILL);
    let (_, folder) = daemon.ended();
    let whole = std::fs::read(folder.path().join("state")).unwrap();
    for cut in [0, 1, whole.len() / 2, whole.len() - 3] {
        std::fs::write(folder.path().join("state"), &whole[..cut]).unwrap();
        let (code, _, stderr) = serve();
        assert_eq!(code, Some(2), "{stderr}");
        assert!(stderr.starts_with(&format!("mqblk: serve: state: found \"{state}\": ")), "{stderr}");
        assert_eq!(std::fs::read(folder.path().join("state")).unwrap(), &whole[..cut], "it is left as it is");
    }
}

#[test]
fn without_a_state_file_the_response_says_that_the_lun_will_be_lost() {
    let folder = tempfile::tempdir().unwrap();
    let controller = format!("id=c,socket={}/c.sock,queues=1", folder.path().display());
    let daemon = Daemon::start_in(folder, &["--controller", &controller]);
    let response = lun(&daemon, &["add", "controller=c,storage=ram,size=1M"]);
    let want = "added c:0:0: target 0 lun 0 of controller c, 1M; it does not survive a restart of the daemon, which has no --state\n";
    assert_eq!(response, want);
    let mut client = Client::connect(&daemon.admin()).unwrap();
    let response = client.call("lun.add", &json!({ "controller": "c", "settings": "storage=ram,size=1M" })).unwrap();
    assert_eq!((&response["lun"]["origin"], &response["lun"]["survives_restart"]), (&json!("run-time"), &json!(false)));
}

#[test]
fn sighup_does_not_end_the_daemon() {
    let daemon = Daemon::start(&[]);
    for _ in 0..5 {
        daemon.signal(Signal::HUP);
    }
    let mut client = Client::connect_with(&daemon.admin(), long()).unwrap();
    client.call("version", &Value::Null).unwrap();
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.ended().0, Some(0));
}
