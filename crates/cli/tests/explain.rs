//! `mqblk explain`, run as a process.

mod daemon;

use std::process::Stdio;
use std::time::Instant;

use daemon::{Daemon, long, mqblk, output};
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

/// A bench that ends with the test.
struct Load(std::process::Child);

impl Drop for Load {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_disk_at_its_rate_limit_says_which() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("c.sock").display().to_string();
    let disk = format!("storage=null,size=1G,id=c,queues=1,socket={socket},iops=200,bandwidth=1G");
    let daemon = Daemon::start_in(folder, &["--disk", &disk]);
    let args = ["bench", "--socket", &socket, "--rw", "randread", "--bs", "4k", "--queues", "1", "--iodepth", "8"];
    let mut bench = mqblk(&args);
    bench.args(["--runtime", "120", "--warmup", "0", "--runs", "1"]).stdout(Stdio::null()).stderr(Stdio::null());
    let _load = Load(bench.spawn().unwrap());
    let deadline = Instant::now() + long();
    let finding = loop {
        let (code, stdout, stderr) = explain(&daemon, &["c", "--seconds", "0.5", "--json"]);
        assert_eq!(code, Some(0), "{stderr}");
        let found: Value = serde_json::from_str(&stdout).unwrap();
        // It is at its limit when the burst is over.
        let first = found["findings"][0].clone();
        if first["kind"] == "throttled" && first["figures"]["throttled_percent"].as_f64() > Some(50.0) {
            break first;
        }
        assert!(Instant::now() < deadline, "{stdout}");
    };
    let sentence = finding["sentence"].as_str().unwrap();
    assert!(sentence.contains(" percent of its requests waited for iops=200"), "{sentence}");
    assert!(finding["figures"]["throttled_await_us"].as_f64() > Some(0.0), "{finding}");
}
