//! `mqblk bench` as a process: exit code, leftovers, and the end of its servers.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use mqblk_tests::hostile::daemon::mqblk_binary;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::Value;

/// Starts an endless benchmark of many short runs.
fn start(arguments: &[&str]) -> Child {
    let mut command = Command::new(mqblk_binary());
    command.args(["bench", "--disk", "storage=null,size=1G", "--runtime", "100ms", "--warmup", "0", "--runs", "10000"]);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("the benchmark")
}

/// Waits for the second run, and returns the rest of its output.
fn after_two_runs(bench: &mut Child) -> BufReader<impl Read + use<>> {
    let mut lines = BufReader::new(bench.stderr.take().expect("it is piped"));
    let mut line = String::new();
    while !line.contains("run 2 of 10000") {
        line.clear();
        assert!(lines.read_line(&mut line).expect("a line") > 0, "it ended");
    }
    lines
}

/// Returns its server; `None` between two runs.
fn server_of(bench: &Child) -> Option<Pid> {
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", bench.id())).expect("its children");
    children.split_whitespace().next()?.parse().ok().and_then(Pid::from_raw)
}

/// Waits for its end. Returns its output; `lines`: the rest of its standard error.
fn end(bench: Child, mut lines: BufReader<impl Read>) -> (Output, String) {
    let mut told = String::new();
    lines.read_to_string(&mut told).expect("text");
    (bench.wait_with_output().expect("its end"), told)
}

fn rows(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).expect("the results")).expect("JSON")
}

#[test]
fn a_signal_leaves_the_results_and_no_server() {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        let folder = tempfile::tempdir().expect("a folder");
        let json = folder.path().join("out.json");
        let mut bench = start(&["--json", json.to_str().expect("text")]);
        let lines = after_two_runs(&mut bench);
        let server = server_of(&bench);
        kill_process(Pid::from_child(&bench), signal).expect("the benchmark runs");
        let (output, told) = end(bench, lines);
        assert_eq!(output.status.code(), Some(code), "{told}");
        let table = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(table.contains("Not finished") && table.contains("IOPS"), "{table}");
        let rows = rows(&json);
        assert!(rows[0]["runs"].as_u64() >= Some(2) && rows[0]["iops_mean"].as_f64() > Some(0.0), "{rows}");
        assert_eq!(
            rows[0]["each_run"].as_array().map(Vec::len).unwrap_or(0) as u64,
            rows[0]["runs"].as_u64().unwrap_or(0)
        );
        assert!(
            server.is_none_or(|server| test_kill_process(server).is_err()),
            "the server of a benchmark that has ended still runs"
        );
    }
}

#[test]
fn a_server_that_is_killed_leaves_the_runs_before() {
    let folder = tempfile::tempdir().expect("a folder");
    let json = folder.path().join("out.json");
    let mut bench = start(&["--json", json.to_str().expect("text"), "--queue-size", "2048", "--iodepth", "1500"]);
    let lines = after_two_runs(&mut bench);
    // Between two runs there is none.
    while server_of(&bench).is_none_or(|server| kill_process(server, Signal::KILL).is_err()) {
        std::thread::yield_now();
    }
    let (output, told) = end(bench, lines);
    assert_eq!(output.status.code(), Some(1), "{told}");
    let last = told.lines().last().unwrap_or_default();
    assert!(
        last.starts_with("mqblk: bench: storage=null,size=1G poll default: randread bs 4K")
            && last.contains(" of 10000: "),
        "{told}"
    );
    assert!(rows(&json)[0]["runs"].as_u64() >= Some(2));
    assert!(String::from_utf8_lossy(&output.stdout).contains("Not finished"));
}

#[test]
fn results_on_standard_output_are_json_alone() {
    let mut command = Command::new(mqblk_binary());
    command.args(["bench", "--disk", "storage=null,size=1G", "--runtime", "50ms", "--warmup", "0", "--runs", "1"]);
    let output = command.args(["--queues", "1,2", "--json", "-"]).output().expect("the benchmark");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && told.contains("queues") && told.contains("IOPS"), "{told}");
    let rows: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(rows.as_array().map(Vec::len), Some(2));
    let row = &rows[1];
    assert_eq!(row["command"][1], "bench");
    let program = row["server"]["program"].as_str().expect("the server's program");
    assert_eq!(Path::new(program), mqblk_binary().canonicalize().expect("the program"));
    assert_eq!(row["server"]["version"], row["version"]);
}

/// A time that is too short for the storage does not measure nothing: the run goes on until an I/O completes.
#[test]
fn a_run_has_an_io_however_slow_the_storage_is() {
    let mut command = Command::new(mqblk_binary());
    command.args(["bench", "--disk", "storage=null,size=1G,latency-us=400000", "--queues", "1", "--iodepth", "1"]);
    command.args(["--runtime", "50ms", "--warmup", "0", "--runs", "1", "--json", "-"]);
    let output = command.output().expect("mqblk runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let rows: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let run = &rows[0]["each_run"][0];
    assert!(run["iops"].as_f64() > Some(0.0) && run["elapsed_s"].as_f64() >= Some(0.4), "{run}");
}
