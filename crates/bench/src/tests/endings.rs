//! Benchmarks that end early, and their results.

use std::time::Duration;

use mqblk_driver::virtio_blk::model::{BlkBehaviour, BlkFault};

use super::{Rig, benchmark, failed, json, plan};
use crate::interrupt::Interrupt;
use crate::{BenchError, sweep};

const SIGINT: i32 = 2;

/// Runs the benchmark; sends `signals` when the model has served `after` requests.
pub(super) fn interrupted(rig: &Rig, line: &str, after: u64, signals: usize) -> Result<u64, BenchError> {
    let benchmark = benchmark(&format!("--socket {} {line}", rig.path("s"))).unwrap();
    let interrupt: Interrupt = benchmark.plan.interrupt.clone();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while rig.model.requests(0) < after {
                std::thread::sleep(Duration::from_millis(1));
            }
            (0..signals).for_each(|_| interrupt.set(SIGINT));
        });
        sweep::run(&benchmark)
    })
}

pub(super) fn is_sigint(result: &Result<u64, BenchError>) -> bool {
    matches!(result, Err(BenchError::Interrupted(SIGINT)))
}

#[test]
fn a_signal_ends_the_run_and_keeps_what_it_measured() {
    for client in ["poll", "wait"] {
        for line in ["--runtime 600 --warmup 0 --runs 3", "--runtime 600 --warmup 0 --runs 1 --queues 3 --iodepth 4"] {
            let rig = Rig::new(BlkBehaviour::default());
            let file = rig.path("results.json");
            let result = interrupted(&rig, &format!("{line} --client {client} --json {file}"), 20_000, 1);
            assert!(is_sigint(&result), "{result:?}");
            let rows = json(&file);
            assert_eq!((rows.as_array().unwrap().len(), rows[0]["runs"].as_u64()), (1, Some(1)));
            assert!(rows[0]["iops_mean"].as_f64().unwrap() > 0.0);
        }
    }
}

#[test]
fn a_signal_before_the_measurement_leaves_older_results() {
    let rig = Rig::new(BlkBehaviour::default());
    let file = rig.path("results.json");
    std::fs::write(&file, "older").unwrap();
    let result = interrupted(&rig, &format!("--runtime 600 --warmup 600 --json {file}"), 50, 1);
    assert!(is_sigint(&result), "{result:?}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "older");
    // The written blocks are not checked: the run does not count.
    let verified = format!("--rw randwrite --verify crc32c --allow-write --runtime 600 --warmup 0 --json {file}");
    assert!(is_sigint(&interrupted(&rig, &verified, 100, 1)));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "older");
}

#[test]
fn a_second_signal_does_not_wait_for_a_server_that_is_stuck() {
    let rig = Rig::new(BlkBehaviour { fault: BlkFault::StallAfter(100), ..BlkBehaviour::default() });
    let plan = plan(&format!("--socket {} --runtime 600 --warmup 0", rig.path("s"))).unwrap();
    assert!(plan.stuck_timeout >= Duration::from_secs(30));
    assert!(is_sigint(&interrupted(&rig, "--runtime 600 --warmup 0 --iodepth 4", 90, 2)));
}

/// Each run is 256 requests: the third one meets the end of the server.
#[test]
fn the_runs_before_the_end_of_a_server_are_kept() {
    let rig = Rig::new(BlkBehaviour { fault: BlkFault::DisconnectAfter(600), ..BlkBehaviour::default() });
    let file = rig.path("results.json");
    let text = failed(rig.run(&format!("--label disk --rw read --runtime 0 --runs 5 --json {file}")));
    assert_eq!(
        text,
        "disk: read bs 4K queues 1 jobs 1 iodepth 1 batch 1: run 3 of 5: the server went away: it closed the connection in mid-run"
    );
    let rows = json(&file);
    assert_eq!((rows.as_array().unwrap().len(), rows[0]["runs"].as_u64()), (1, Some(2)));
}

/// The last combination does not fit: nothing is measured.
#[test]
fn all_combinations_are_checked_before_the_first_run() {
    let rig = Rig::new(BlkBehaviour::default());
    for (line, expected) in [
        ("--queues 1,4,5", "--queues: found 5, expected 1 to 4"),
        ("--rw read --bs 4k,2M", "--size: found 1M, expected a block of 2M for each job, at least"),
        ("--pin 0,1023", "--pin: found 1023, expected a CPU that this process may use"),
        ("--runs 1 --pin 1023", "--pin: found 1023, expected a CPU that this process may use"),
        ("--json /none/out.json", "--json: found /none/out.json (No such file or directory"),
    ] {
        let error = rig.run(line).unwrap_err();
        assert!(matches!(&error, BenchError::Usage(text) if text.starts_with(expected)), "{line}: {error}");
    }
    let other = rig.path("none");
    let text = failed(rig.run(&format!("--socket {other}")));
    assert!(text.contains("/none: cannot connect"), "{text}");
    assert_eq!(rig.model.requests(0), 0);
    let cpus = benchmark("--disk storage=null,size=1G --server-cpus 1023").unwrap();
    let error = sweep::run(&cpus).unwrap_err().to_string();
    assert!(error.starts_with("--server-cpus: found 1023, expected a CPU"), "{error}");
}

#[test]
fn results_that_cannot_be_written_are_an_error() {
    let rig = Rig::new(BlkBehaviour::default());
    let text = failed(rig.run("--runtime 0 --json /dev/full"));
    assert!(text.starts_with("--json /dev/full: No space left on device"), "{text}");
    let served = rig.model.requests(0);
    assert!(served >= 256);
    let folder = rig.path("");
    let error = rig.run(&format!("--runtime 0 --json {folder}")).unwrap_err();
    assert!(matches!(&error, BenchError::Usage(text) if text.starts_with("--json: found ")), "{error}");
    assert_eq!(rig.model.requests(0), served, "nothing was measured");
}
