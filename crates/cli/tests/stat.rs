//! `mqblk stat` and `mqblk serve`, run as processes.

mod daemon;

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Stdio};

use daemon::{Daemon, mqblk, output};
use rustix::process::Signal;
use serde_json::Value;

fn stat(daemon: &Daemon, args: &[&str]) -> (Option<i32>, String, String) {
    let admin = daemon.admin().display().to_string();
    output(&[&["stat", "--socket", &admin], args].concat())
}

/// Returns the first word of each line.
fn first_words(text: &str) -> Vec<&str> {
    text.lines().map(|line| line.split_whitespace().next().unwrap_or("")).collect()
}

#[test]
fn tables() {
    let daemon = Daemon::start(&[]);
    let workers = ["", "worker", "0", "1", ""];
    for (args, disks) in [
        (&[][..], &["mqblk", "disk", "a", "b"][..]),
        (&["--queues"][..], &["mqblk", "disk", "a", "q0", "q1", "b", "q0"][..]),
        (&["--disk", "b"][..], &["mqblk", "disk", "b"][..]),
        (&["--disk", "a", "--queues"][..], &["mqblk", "disk", "a", "q0", "q1"][..]),
        (&["--disk", "[bc]", "--disk", "a"][..], &["mqblk", "disk", "a", "b"][..]),
        (&["--sort", "name"][..], &["mqblk", "disk", "a", "b"][..]),
    ] {
        let (code, stdout, stderr) = stat(&daemon, args);
        assert_eq!((code, stderr.as_str()), (Some(0), ""), "{args:?}");
        assert!(stdout.contains("averages since the daemon started, over "), "{stdout}");
        assert_eq!(first_words(&stdout), [disks, &workers].concat(), "{args:?}\n{stdout}");
        let columns: Vec<_> = stdout.lines().nth(1).unwrap().split_whitespace().collect();
        let row: Vec<_> = stdout.lines().nth(2).unwrap().split_whitespace().collect();
        assert_eq!(columns.len(), row.len(), "{stdout}");
        assert_eq!(&columns[..3], ["disk", "r/s", "w/s"]);
    }
    let (code, stdout, _) = stat(&daemon, &["-z", "--queues"]);
    assert_eq!((code, first_words(&stdout)), (Some(0), [&["mqblk", "disk"][..], &workers].concat()), "{stdout}");
}

#[test]
fn intervals() {
    let daemon = Daemon::start(&[]);
    let (code, stdout, stderr) = stat(&daemon, &["--watch", "0.1", "--count", "3"]);
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    assert_eq!(stdout.matches(": averages over ").count(), 3, "{stdout}");
    assert!(!stdout.contains("since the daemon started"), "{stdout}");
}

#[test]
fn json_is_a_line_for_each_report() {
    let daemon = Daemon::start(&[]);
    let lines = |args: &[&str]| -> Vec<Value> {
        let (code, stdout, stderr) = stat(&daemon, args);
        assert_eq!((code, stderr.as_str()), (Some(0), ""));
        stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let once = lines(&["--json"]);
    assert_eq!(once.len(), 1);
    assert_eq!((&once[0]["rates"]["since"], &once[0]["rates"]["restarted"]), (&"start".into(), &false.into()));
    assert_eq!(once[0]["rates"]["interval_ns"], once[0]["stat"]["uptime_ns"]);
    assert!(once[0]["stat"]["disks"][0]["totals"]["counters"]["reads"].is_u64());
    assert!(once[0]["rates"]["disks"][0]["totals"]["reads_per_s"].is_f64());
    assert_eq!(once[0]["rates"]["disks"][0]["queues"], Value::Array(vec![]));

    let watched = lines(&["--json", "--watch", "0.1", "--count", "2", "--queues", "--disk", "a"]);
    assert_eq!(watched.len(), 2);
    let times = watched.iter().map(|line| line["stat"]["time_ns"].as_u64().unwrap()).collect::<Vec<_>>();
    assert_eq!(watched[1]["rates"]["interval_ns"], times[1] - times[0]);
    for line in &watched {
        assert_eq!(line["rates"]["since"], "previous");
        assert_eq!(line["stat"]["disks"].as_array().unwrap().len(), 1);
        assert_eq!(line["stat"]["disks"][0]["queues"].as_array().unwrap().len(), 2);
        assert!(line["rates"]["disks"][0]["queues"][1]["rates"]["await_us"].is_f64());
    }
}

#[test]
fn a_report_has_the_width_that_is_asked_for() {
    let daemon = Daemon::start(&[]);
    let columns = |width: &str| {
        let admin = daemon.admin().display().to_string();
        let mut command = mqblk(&["stat", "--socket", &admin, "--queues"]);
        command.env_remove("COLUMNS");
        match width {
            "" => {}
            width if width.starts_with('=') => _ = command.env("COLUMNS", &width[1..]),
            width => _ = command.args(["--width", width]),
        }
        let text = String::from_utf8(command.output().unwrap().stdout).unwrap();
        let widest = text.lines().map(|line| line.chars().count()).max().unwrap();
        (widest, text.lines().nth(1).unwrap().split_whitespace().count())
    };
    let (widest, standard) = columns("");
    assert!(widest <= 80 && standard == 10, "{widest} characters, {standard} columns");
    let (widest, wide) = columns("=120");
    assert!((100..=120).contains(&widest) && wide > standard, "{widest} characters, {wide} columns");
    assert_eq!(columns("80"), columns(""));
    assert_eq!(columns("120"), columns("=120"));
    assert!(columns("300").1 > wide);
}

#[test]
fn headings_have_the_time_if_it_is_asked_for() {
    let daemon = Daemon::start(&[]);
    let (_, stdout, _) = stat(&daemon, &["--timestamps"]);
    let first = stdout.split_whitespace().next().unwrap();
    assert!(first.len() == 20 && first.starts_with("20") && first.ends_with('Z'), "{stdout}");
    let (_, stdout, _) = stat(&daemon, &["--timestamps", "--json", "--disk", "b*"]);
    let line: Value = serde_json::from_str(&stdout).unwrap();
    assert!(line["time"].as_str().unwrap().ends_with('Z'));
    assert_eq!(line["stat"]["disks"].as_array().unwrap().len(), 1);
    assert_eq!(line["rates"]["disks"][0]["id"], "b");
    let (_, stdout, _) = stat(&daemon, &["--json"]);
    assert_eq!(serde_json::from_str::<Value>(&stdout).unwrap()["time"], Value::Null);
}

#[test]
fn usage_errors_are_code_2_and_a_missing_daemon_code_1() {
    let daemon = Daemon::start(&[]);
    for (args, want) in [
        (&["--watch", "0"][..], "stat: watch: found \"0\", expected seconds from 0.1 to 86400"),
        (&["--watch", "0.09"][..], "stat: watch: found \"0.09\""),
        (&["--watch", "NaN"][..], "stat: watch: found \"NaN\""),
        (&["--watch", "inf"][..], "stat: watch: found \"inf\""),
        (&["--watch", "-1"][..], "stat: watch: found \"-1\""),
        (&["--watch", "1s"][..], "stat: watch: found \"1s\""),
        (&["--watch", "1", "--count", "0"][..], "stat: count: found \"0\", expected a whole number of intervals"),
        (&["--watch", "1", "--count", "1.5"][..], "stat: count: found \"1.5\""),
        (
            &["--disk", "c*"][..],
            "stat: disk: found \"c*\", expected the id of one of a, b, or a pattern for some of them",
        ),
        (&["--disk", "a", "--disk", "c"][..], "stat: disk: found \"c\", expected the id of one of a, b"),
        (&["--disk", "a["][..], "stat: disk: found \"a[\" ("),
        (&["--sort", "await"][..], "stat: sort: found \"await\", expected name or a column: r/s, "),
        (&["--width", "10"][..], "stat: width: found \"10\", expected a number from 40 to 1000"),
        (&["--disk", "c"][..], "stat: disk: found \"c\", expected one of a, b"),
        (&["--disk", "c", "--watch", "1"][..], "stat: disk: found \"c\", expected one of a, b"),
    ] {
        let (code, stdout, stderr) = stat(&daemon, args);
        assert_eq!((code, stdout.as_str()), (Some(2), ""), "{args:?}: {stderr}");
        assert!(stderr.starts_with(&format!("mqblk: {want}")) && stderr.matches('\n').count() == 1, "{stderr}");
    }
    for args in [&["stat", "--socket", "x", "--count", "1"][..], &["stat", "--socket", "x", "y"][..]] {
        assert_eq!(output(args).0, Some(2), "{args:?}");
    }
    let missing = daemon.path().join("gone").display().to_string();
    let (code, _, stderr) = output(&["stat", "--socket", &missing]);
    assert_eq!(code, Some(1));
    assert!(stderr.starts_with(&format!("mqblk: stat: socket: found {missing:?}: No such file")), "{stderr}");
    assert!(stderr.contains("is it running, with --admin?"), "{stderr}");
    let disk = daemon.path().join("a.sock").display().to_string();
    let (code, _, stderr) = output(&["stat", "--socket", &disk]);
    assert_eq!(code, Some(1));
    assert!(stderr.contains("disk"), "the socket of a disk: {stderr}");
}

/// Starts `mqblk stat` with these options. The test reads its output.
fn watching(daemon: &Daemon, options: &[&str]) -> Child {
    let admin = daemon.admin().display().to_string();
    let arguments = [&["stat", "--socket", &admin], options].concat();
    mqblk(&arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

#[test]
fn a_restart_of_the_daemon_is_reported() {
    let daemon = Daemon::start(&[]);
    let mut watching = watching(&daemon, &["--watch", "0.1"]);
    let mut reports = BufReader::new(watching.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut notes = BufReader::new(watching.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(reports.any(|line| line.contains("averages over")));
    daemon.signal(Signal::KILL);
    let (_, folder) = daemon.ended();
    let note = notes.next().unwrap();
    assert!(note.starts_with("mqblk: stat: no report: ") && note.ends_with("trying again at each interval"), "{note}");
    let daemon = Daemon::start_in(folder, &[]);
    assert!(notes.next().unwrap().contains("the daemon was restarted"));
    assert!(reports.any(|line| line.contains("averages since the daemon started")));
    assert!(reports.any(|line| line.contains("averages over")));
    drop(daemon);
    watching.kill().unwrap();
    watching.wait().unwrap();
}

#[test]
fn a_missing_daemon_at_the_end_is_code_1() {
    let daemon = Daemon::start(&[]);
    let mut watching = watching(&daemon, &["--watch", "0.5", "--count", "2"]);
    let mut first = [0];
    watching.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    daemon.signal(Signal::KILL);
    daemon.ended();
    assert_eq!(watching.wait_with_output().unwrap().status.code(), Some(1));
}

#[test]
fn a_closed_output_pipe_is_no_error() {
    let daemon = Daemon::start(&[]);
    let mut watching = watching(&daemon, &["--watch", "0.1"]);
    let mut first = [0];
    let mut stdout = watching.stdout.take().unwrap();
    stdout.read_exact(&mut first).unwrap();
    drop(stdout);
    let ended = watching.wait_with_output().unwrap();
    assert_eq!((ended.status.code(), ended.stderr.as_slice()), (Some(0), &b""[..]));
}

#[test]
fn help_explains_and_shows_examples() {
    let (code, stdout, _) = output(&["stat", "--help"]);
    assert_eq!(code, Some(0));
    for word in ["rrqm/s", "%poll", "Examples:", "--watch 1 --queues", "Exit code:"] {
        assert!(stdout.contains(word), "{word}");
    }
}
