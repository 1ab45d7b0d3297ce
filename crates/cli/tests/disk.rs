//! `mqblk disk` and `mqblk log`, and the log's formats. `--state` keeps disks over restarts and kills.

#[path = "daemon/mod.rs"]
mod daemon;

use std::process::Stdio;

use daemon::{Daemon, mqblk, output};
use mqblk_admin::Client;
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

fn disk(daemon: &Daemon, words: &[&str]) -> (Option<i32>, String, String) {
    let admin = daemon.admin().display().to_string();
    output(&[&["disk", words[0], "--socket", &admin], &words[1..]].concat())
}

fn done(daemon: &Daemon, words: &[&str]) -> String {
    let (code, stdout, stderr) = disk(daemon, words);
    assert_eq!((code, stderr.as_str()), (Some(0), ""), "{words:?}");
    stdout
}

/// Returns the first column of the list.
fn listed(daemon: &Daemon) -> Vec<String> {
    let table = done(daemon, &["list"]);
    table.lines().skip(1).map(|line| line.split_whitespace().next().unwrap().to_owned()).collect()
}

fn with_state(folder: TempDir) -> Daemon {
    let state = folder.path().join("state").display().to_string();
    Daemon::start_in(folder, &["--state", &state])
}

#[test]
fn disks_survive_restarts_and_kills() {
    let mut daemon = with_state(tempfile::tempdir().unwrap());
    assert_eq!(listed(&daemon), ["a", "b"]);
    let at = daemon.path().display().to_string();
    std::fs::File::create(daemon.path().join("c.img")).unwrap().set_len(1 << 20).unwrap();
    assert_eq!(done(&daemon, &["add", &format!("path={at}/c.img,socket={at}/c.sock,queues=1")]), "added c\n");
    assert_eq!(done(&daemon, &["add", &format!("storage=ram,size=4M,id=d,socket={at}/d.sock")]), "added d\n");
    assert_eq!(done(&daemon, &["remove", "b"]), "removed b\n");
    for signal in [Signal::KILL, Signal::TERM, Signal::KILL] {
        assert_eq!(listed(&daemon), ["a", "c", "d"]);
        daemon.signal(signal);
        daemon = with_state(daemon.ended().1);
    }
    done(&daemon, &["set", "c", "iops=5000"]);
    // Its image is missing for a while.
    std::fs::rename(daemon.path().join("c.img"), daemon.path().join("elsewhere")).unwrap();
    daemon.signal(Signal::TERM);
    daemon = with_state(daemon.ended().1);
    let table = done(&daemon, &["list"]);
    assert!(listed(&daemon).starts_with(&["a", "d", "c"].map(str::to_owned)), "{table}");
    assert!(table.contains("c is out, and tried again") && table.contains("No such file"), "{table}");
    std::fs::rename(daemon.path().join("elsewhere"), daemon.path().join("c.img")).unwrap();
    assert_eq!(done(&daemon, &["retry", "c"]), "c is served\n");
    // With its own settings, and those of others are intact.
    let disks = Client::connect(&daemon.admin()).unwrap().call("disks", &Value::Null).unwrap();
    let settings =
        disks["disks"].as_array().unwrap().iter().find(|disk| disk["id"] == "c").map(|disk| &disk["settings"]);
    assert_eq!(settings.unwrap()["iops"], 5000, "{disks}");
    assert_eq!(listed(&daemon), ["a", "d", "c"]);
    daemon.signal(Signal::TERM);
    daemon = with_state(daemon.ended().1);
    assert_eq!(listed(&daemon), ["a", "c", "d"]);
    assert_eq!(done(&daemon, &["remove", "c"]), "removed c\n");
    daemon.signal(Signal::KILL);
    daemon = with_state(daemon.ended().1);
    assert_eq!(listed(&daemon), ["a", "d"]);
    let grown = done(&daemon, &["resize", "d", "1M", "--shrink"]);
    assert_eq!(grown, "resized d from 4M to 1M; no guest is connected\n");
}

#[test]
fn mistakes_name_the_key() {
    let daemon = Daemon::start(&[]);
    let at = daemon.path().display().to_string();
    let lost = "; it does not survive a restart of the daemon, which has no --state\n";
    assert_eq!(
        done(&daemon, &["add", &format!("storage=ram,size=1M,id=c,socket={at}/c.sock")]),
        format!("added c{lost}")
    );
    for (words, code, want) in [
        (&["add", "storage=ram,size=1M,id=c,socket=/x"][..], 2, "mqblk: disk add: id: found \"c\""),
        (&["add", "storage=ram,id=x,socket=/x"][..], 2, "mqblk: disk add: size: found nothing"),
        (&["add", "storage=ram,storage=ram"][..], 2, "mqblk: disk add: storage: found \"ram\" and \"ram\""),
        (&["remove", "x"][..], 2, "mqblk: disk remove: id: found \"x\", expected one of a, b, c"),
        (&["add", "storage=ram,size=1M,id=x,socket=/nowhere/x"][..], 1, "mqblk: disk add: disk \"x\": socket"),
    ] {
        let (found, stdout, stderr) = disk(&daemon, words);
        assert_eq!((found, stdout.as_str()), (Some(code), ""), "{words:?}: {stderr}");
        assert!(stderr.starts_with(want), "{words:?}: {stderr}");
    }
    let admin = daemon.admin().display().to_string();
    assert_eq!(output(&["log", "--socket", &admin]).1, "info\n");
    assert_eq!(output(&["log", "warn", "--socket", &admin]).1, "warn (it was info)\n");
    let (code, _, stderr) = output(&["log", "loud", "--socket", &admin]);
    assert_eq!(code, Some(2));
    assert!(stderr.starts_with("mqblk: log: level: found \"loud\", expected off, error"), "{stderr}");
}

/// Returns exit code and standard error of a daemon that cannot have its state file, and logs before that.
fn log_of(more: &[&str], environment: &[(&str, &str)]) -> (Option<i32>, String) {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().display().to_string();
    let disk = format!("storage=ram,size=1M,id=a,queues=1,socket={at}/a.sock");
    let state = format!("{at}/none/state");
    let mut command = mqblk(&["serve", "--disk", &disk, "--workers", "3", "--state", &state]);
    let output = command.args(more).envs(environment.iter().copied()).stderr(Stdio::piped()).output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn formats_of_the_log() {
    let warning = "some workers have no queue to serve";
    let (code, text) = log_of(&[], &[]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.lines().next().unwrap().contains(&format!(" WARN {warning} workers=3 queues=")), "{text}");
    let (_, json) = log_of(&["--log-format", "json"], &[]);
    let line: Value = serde_json::from_str(json.lines().next().unwrap()).unwrap();
    assert_eq!((line["level"].as_str(), line["message"].as_str()), (Some("WARN"), Some(warning)));
    assert_eq!(line["workers"], 3);
    let (_, journal) = log_of(&["--log-format", "journald"], &[]);
    assert!(journal.starts_with(&format!("<4>{warning} workers=3 queues=")), "{journal}");
    // Not the journal: another file.
    let (_, text) = log_of(&[], &[("JOURNAL_STREAM", "8:1")]);
    assert!(text.contains(" WARN "), "{text}");
    for wrong in ["loud", "info,loud", "mqblk=loud"] {
        let (code, text) = log_of(&[], &[("RUST_LOG", wrong)]);
        assert_eq!(code, Some(2), "{text}");
        assert!(text.starts_with(&format!("mqblk: environment: RUST_LOG: found {wrong:?}, expected off,")), "{text}");
    }
    assert_eq!(log_of(&["--log-format", "xml"], &[]).0, Some(2));
}
