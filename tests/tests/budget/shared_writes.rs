//! The memory that two workers write while they serve two queues of one device. Valgrind's lackey prints each load and
//! store, and its scheduler the running thread.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use super::program;

/// Requests that are published at once. A turn serves 16.
const BATCH: u32 = 16;

/// Bytes of a cache line, as a power of two.
const LINE_BITS: u32 = 6;

/// Accesses of the threads to a cache line.
#[derive(Clone, Copy, Debug, Default)]
struct Accesses {
    loads: [u32; 2],
    stores: [u32; 2],
}

impl Accesses {
    /// Returns true if the worker stores to it at least once per published batch.
    fn is_written(&self, worker: usize, batches: u32) -> bool {
        self.stores[worker] >= batches
    }

    /// Returns true if the worker accesses it at least once per published batch.
    fn is_used(&self, worker: usize, batches: u32) -> bool {
        self.loads[worker] + self.stores[worker] >= batches
    }
}

/// Runs the program with two threads, for `requests` each. Returns the accesses of both to each cache line.
fn accesses(mode: &str, requests: u32) -> HashMap<u64, Accesses> {
    let mut run = Command::new("valgrind")
        .args(["--tool=lackey", "--trace-mem=yes", "--trace-sched=yes"])
        .arg(program())
        .args([&requests.to_string(), &BATCH.to_string(), "direct", mode, "2"])
        .stderr(Stdio::piped())
        .spawn()
        .expect("valgrind can be started: apt-get install valgrind (make test does it)");
    let mut lines: HashMap<u64, Accesses> = HashMap::new();
    let mut thread = 0;
    for line in BufReader::new(run.stderr.take().expect("a pipe")).split(b'\n') {
        let line = line.expect("valgrind's output");
        let line = String::from_utf8_lossy(&line);
        if let Some((_, text)) = line.split_once("SCHED[") {
            if let Some((number, what)) = text.split_once("]:")
                && what.trim_start().starts_with("acquired lock")
            {
                thread = number.parse::<usize>().expect("a thread's number");
            }
            continue;
        }
        // "I  ADDRESS,SIZE" is an instruction, " L" a load, " S" a store, " M" both. Thread 1 starts the other two.
        let (Some(kind @ ("L" | "S" | "M")), Some(at)) =
            (line.get(1..2), line.get(3..).and_then(|rest| rest.split_once(',')))
        else {
            continue;
        };
        let (Ok(address), Some(worker)) =
            (u64::from_str_radix(at.0.trim(), 16), thread.checked_sub(2).filter(|worker| *worker < 2))
        else {
            continue;
        };
        let line = lines.entry(address >> LINE_BITS).or_default();
        line.loads[worker] += u32::from(kind != "S");
        line.stores[worker] += u32::from(kind != "L");
    }
    assert!(run.wait().expect("an end").success(), "the run under valgrind failed");
    lines
}

/// Checks the cache lines that each worker accesses for each request or turn. Of these, it counts the lines that
/// several workers access and one of them writes. Accesses once per batch are more frequent than those at set-up and at
/// the end.
fn judge(mode: &str, requests: u32) {
    let lines = accesses(mode, requests);
    let batches = requests / BATCH;
    let of_worker = |worker: usize, least: u32| {
        lines.values().filter(|line| line.stores[worker] + line.loads[worker] >= least).count()
    };
    for worker in [0, 1] {
        // Rings and buffers of the guest use other lines for each request.
        assert!(of_worker(worker, requests) > 10, "{mode}: worker {worker} has done nothing");
    }
    let mut shared: Vec<(u64, Accesses)> = lines.iter().map(|(at, line)| (*at, *line)).collect();
    let is_shared = |line: &Accesses| {
        [(0, 1), (1, 0)].iter().any(|(one, other)| line.is_written(*one, batches) && line.is_used(*other, batches))
    };
    shared.retain(|(_, line)| is_shared(line));
    shared.sort_by_key(|(at, _)| *at);
    let shared_text: Vec<String> = shared
        .iter()
        .map(|(at, line)| format!("{:#x}: stores {:?}, loads {:?}", at << LINE_BITS, line.stores, line.loads))
        .collect();
    let text = format!(
        "{mode}: {} and {} cache lines are accessed for each request or more often; accessed by both workers in each turn and written: {}\n",
        of_worker(0, requests),
        of_worker(1, requests),
        shared.len()
    );
    std::io::stdout().write_all(text.as_bytes()).expect("standard output");
    assert!(shared.is_empty(), "{mode}: workers share cache lines that are written:\n{}", shared_text.join("\n"));
}

#[test]
#[cfg_attr(debug_assertions, ignore = "the program is a release build, as the budget's: cargo test --release")]
fn workers_write_no_cache_line_in_common() {
    // Stores to the same lines set up each of 32 units.
    for (mode, requests) in [("plain", 800), ("tracked", 800), ("packed", 800), ("scsi32", 3200)] {
        judge(mode, requests);
    }
}
