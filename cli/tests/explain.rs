//! `mqblk explain`, run as a process.

mod daemon;

use daemon::{Daemon, output};
use rustix::process::Signal;
use serde_json::Value;

fn explain(daemon: &Daemon, args: &[&str]) -> (Option<i32>, String, String) {
    let admin = daemon.admin().display().to_string();
    output(&[&["explain", "--socket", &admin], args].concat())
}

#[test]
fn a_disk_without_a_guest_says_so() {
    let daemon = Daemon::start(&[]);
    let (code, stdout, stderr) = explain(&daemon, &["a", "--seconds", "0.1"]);
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    assert!(
        stdout.starts_with("a over 0.")
            && stdout.ends_with(" s:\n  * No guest uses it: none of its queues is set up.\n"),
        "{stdout}"
    );
    let (code, stdout, _) = explain(&daemon, &["b", "--seconds", "0.1", "--json"]);
    let found: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((code, &found["disk"], &found["findings"][0]["kind"]), (Some(0), &"b".into(), &"no-guest".into()));
    assert_eq!(found["findings"][0]["figures"]["slots"], 0.0);
    assert!(found["interval_ns"].as_u64().unwrap() >= 100_000_000);
}

#[test]
fn mistakes_are_named() {
    let daemon = Daemon::start(&[]);
    for (args, want) in [
        (&["c"][..], "mqblk: explain: disk: found \"c\", expected one of a, b\n"),
        (&["a", "--seconds", "0"][..], "mqblk: explain: seconds: found \"0\", expected seconds from 0.1 to 3600\n"),
    ] {
        let (code, stdout, stderr) = explain(&daemon, args);
        assert_eq!((code, stdout.as_str(), stderr.as_str()), (Some(2), "", want), "{args:?}");
    }
    let (code, _, stderr) = output(&["explain", "a", "--socket", "/nonexistent"]);
    assert!(code == Some(1) && stderr.starts_with("mqblk: explain: socket: found \"/nonexistent\""), "{stderr}");
    assert_eq!(output(&["explain"]).0, Some(2));
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.ended().0, Some(0));
}
