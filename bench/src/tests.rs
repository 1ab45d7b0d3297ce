//! The benchmark against the driver's model server, which can be told to misbehave.

use std::path::Path;
use std::time::Duration;

use clap::Parser;
use mqblk_driver::virtio_blk::model::{Behaviour, Fault, Model};

use crate::plan::Plan;
use crate::{Args, BenchError, runs};

#[derive(Debug, Parser)]
struct Cli {
    #[command(flatten)]
    args: Args,
}

fn plan(line: &str) -> Result<Plan, BenchError> {
    let cli = Cli::try_parse_from(std::iter::once("bench").chain(line.split_whitespace()));
    Plan::new(&cli.map_err(|error| BenchError::Usage(error.to_string()))?.args)
}

struct Rig {
    model: Model,
    folder: tempfile::TempDir,
}

impl Rig {
    fn new(behaviour: Behaviour) -> Rig {
        let folder = tempfile::tempdir().unwrap();
        Rig { model: Model::start(&folder.path().join("s"), behaviour), folder }
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    fn run(&self, line: &str) -> Result<u64, BenchError> {
        let mut plan = plan(&format!("--socket {} {line}", self.path("s"))).unwrap();
        plan.stuck = Duration::from_millis(300);
        runs::run(&plan)
    }
}

fn failed(result: Result<u64, BenchError>) -> String {
    match result {
        Err(BenchError::Failed(text)) => text,
        other => panic!("expected a failure, found {other:?}"),
    }
}

fn refused(result: Result<u64, BenchError>) -> String {
    match result {
        Err(BenchError::Usage(text)) => text,
        other => panic!("expected a usage error, found {other:?}"),
    }
}

fn json(path: &str) -> serde_json::Value {
    serde_json::from_str(&std::fs::read_to_string(Path::new(path)).unwrap()).unwrap()
}

#[test]
fn every_block_is_written_once_on_all_queues_and_verified() {
    for options in
        ["--rw write --bs 4k", "--rw randwrite --bs 64k --client poll", "--rw write --bs 512 --descriptors indirect"]
    {
        let rig = Rig::new(Behaviour { queues: 3, ..Behaviour::default() });
        let line = format!("{options} --iodepth 4 --queues 3 --verify crc32c --allow-write --size 768k --offset 64k");
        assert_eq!(rig.run(&line).unwrap(), 0);
        let disk = rig.model.disk().clone();
        let block = if options.contains("64k") {
            65536
        } else if options.contains("4k") {
            4096
        } else {
            512
        };
        for (at, bytes) in disk.chunks(block).enumerate() {
            let inside = (64 << 10..832 << 10).contains(&(at * block));
            let offset = u64::from_le_bytes(bytes[8..16].try_into().unwrap());
            assert_eq!((&bytes[..8] == b"mqblkchk", offset), (inside, if inside { (at * block) as u64 } else { 0 }));
        }
        let blocks = (768 << 10) / block as u64;
        let served: Vec<u64> = (0..3).map(|queue| rig.model.requests(queue)).collect();
        assert!(served.iter().all(|count| *count >= blocks / 3 * 2), "{served:?} of {blocks} blocks");
        assert_eq!(served.iter().sum::<u64>(), 2 * blocks, "each block written once and read once");
    }
}

#[test]
fn mixed_load_with_time_verifies_too() {
    let rig = Rig::new(Behaviour::default());
    let line = "--rw randrw --rwmixread 30 --bs 8k --iodepth 8 --queues 2 --jobs 3 --verify crc32c --allow-write --runtime 0.2 --warmup 0.1 --runs 2";
    assert_eq!(rig.run(line).unwrap(), 0);
}

#[test]
fn differences_and_failures_are_counted() {
    for (fault, line) in [
        (Fault::CorruptFrom(40), "--rw write --bs 4k --verify crc32c --allow-write"),
        (Fault::SilentFrom(40), "--rw write --bs 4k --verify crc32c --allow-write"),
        (Fault::FailFrom(40), "--rw read --bs 4k --runtime 0"),
    ] {
        let rig = Rig::new(Behaviour { size: 400 << 10, fault, ..Behaviour::default() });
        let errors = rig.run(line).unwrap();
        // 100 blocks, the first 40 good; what was corrupted is found when it is read back, what was not answered at once.
        assert!((60..=160).contains(&errors), "{fault:?}: {errors}");
    }
}

#[test]
fn a_server_that_leaves_or_sticks_ends_the_run() {
    for client in ["poll", "wait"] {
        for (fault, word) in [(Fault::LeaveAfter(100), "went away"), (Fault::StallAfter(100), "stuck")] {
            let rig = Rig::new(Behaviour { fault, ..Behaviour::default() });
            let text = failed(rig.run(&format!("--client {client} --iodepth 4 --queues 2 --runtime 60")));
            assert!(text.contains(word), "{text}");
        }
        let rig = Rig::new(Behaviour { fault: Fault::WrongIdAt(10), ..Behaviour::default() });
        let text = failed(rig.run(&format!("--client {client} --runtime 60")));
        assert!(text.contains("used element"), "{text}");
    }
    let folder = tempfile::tempdir().unwrap();
    let text = failed(runs::run(&plan(&format!("--socket {}/none", folder.path().display())).unwrap()));
    assert!(text.contains("/none: cannot connect"), "{text}");
}

#[test]
fn the_disk_is_asked_before_it_is_loaded() {
    let rig = Rig::new(Behaviour { read_only: true, ..Behaviour::default() });
    assert!(refused(rig.run("--rw randwrite --allow-write")).contains("read-only"));
    assert!(refused(rig.run("--size 2M")).contains("--size: found 2M, expected at most 1M"));
    assert!(refused(rig.run("--offset 1M")).contains("--size: found 0"));
    assert!(refused(rig.run("--queues 5")).contains("queues: found 5, expected 1 to 4"));
    assert!(refused(rig.run("--rw read --jobs 3 --size 8k")).contains("a block of 4K for each job"));
    assert_eq!(rig.model.requests(0), 0);
}

#[test]
fn jobs_and_queues_meet_in_every_ratio() {
    for (queues, jobs, iodepth) in [(1, 1, 1), (4, 1, 1), (4, 1, 6), (3, 2, 5), (2, 5, 3), (4, 4, 1)] {
        let rig = Rig::new(Behaviour::default());
        let line =
            format!("--rw read --bs 4k --runtime 0 --queues {queues} --jobs {jobs} --iodepth {iodepth} --batch 3");
        assert_eq!(rig.run(&line).unwrap(), 0);
        let served: Vec<u64> = (0..4).map(|queue| rig.model.requests(queue)).collect();
        assert_eq!(served.iter().sum::<u64>(), 256, "{line}: {served:?}");
        assert_eq!(served.iter().filter(|count| **count > 0).count(), queues, "{line}: {served:?}");
    }
}

#[test]
fn the_results_have_the_keys_that_stay() {
    let (rig, other) = (Rig::new(Behaviour::default()), Rig::new(Behaviour::default()));
    let file = rig.path("results.json");
    let line = format!(
        "--socket {} --label one --label two --bs 4k,8k --iodepth 2 --runtime 0.1 --warmup 0 --runs 2 --json {file}",
        other.path("s")
    );
    assert_eq!(rig.run(&line).unwrap(), 0);
    let rows = json(&file);
    let rows = rows.as_array().unwrap();
    assert_eq!(rows.len(), 4);
    let keys: Vec<&str> = rows[0].as_object().unwrap().keys().map(String::as_str).collect();
    let mut expected = vec![
        "interface",
        "storage",
        "target",
        "rw",
        "bs",
        "queues",
        "jobs",
        "iodepth",
        "batch",
        "poll",
        "merge",
        "runs",
        "iops_mean",
        "iops_stderr",
        "bw_bytes_per_s",
        "lat_us",
        "server_cpu_us_per_io",
        "client_cpu_us_per_io",
        "kicks_per_io",
        "calls_per_io",
        "errors",
    ];
    expected.sort_unstable();
    assert_eq!(keys, expected);
    let latency: Vec<&String> = rows[0]["lat_us"].as_object().unwrap().keys().collect();
    assert_eq!(latency, ["max", "mean", "p50", "p99", "p999"]);
    for (row, (target, bs)) in rows.iter().zip([("one", 4096), ("two", 4096), ("one", 8192), ("two", 8192)]) {
        assert_eq!(
            (row["target"].as_str(), row["bs"].as_u64(), row["runs"].as_u64()),
            (Some(target), Some(bs), Some(2))
        );
        let number = |key: &str| row[key].as_f64().unwrap();
        assert!(number("iops_mean") > 0.0 && number("client_cpu_us_per_io") > 0.0);
        assert!(number("server_cpu_us_per_io") >= 0.0, "our own process is the server here");
        assert!((number("bw_bytes_per_s") - number("iops_mean") * bs as f64).abs() < 1.0);
        assert!(number("kicks_per_io") > 0.0 && number("calls_per_io") > 0.0 && number("calls_per_io") < 2.0);
        assert!(row["lat_us"]["p50"].as_f64() <= row["lat_us"]["p99"].as_f64());
    }
}

#[test]
fn usage_errors_name_the_option() {
    for (line, word) in [
        ("", "--socket"),
        ("--socket s --rw randwrite", "--allow-write"),
        ("--socket s --rw trim", "trim"),
        ("--socket s --bs 1000", "--bs: found 1000"),
        ("--socket s --bs 0", "--bs: found 0"),
        ("--socket s --bs 2G", "--bs: found 2G"),
        ("--socket s --bs x", "'x'"),
        ("--socket s --iodepth 0", "--iodepth"),
        ("--socket s --iodepth 257", "--queue-size"),
        ("--socket s --queue-size 100", "--queue-size: found 100"),
        ("--socket s --queues 0", "--queues"),
        ("--socket s --queues 257", "--queues"),
        ("--socket s --offset 100", "--offset: found 100"),
        ("--socket s --runtime=-1", "--runtime"),
        ("--socket s --queues 2 --jobs 600", "--iodepth: found 300"),
        ("--socket s --runtime x", "--runtime"),
        ("--socket s --runtime 0 --warmup 1", "--warmup"),
        ("--socket s --runs 0", "--runs"),
        ("--socket s --verify crc32c", "--verify"),
        ("--socket s --verify md5", "md5"),
        ("--socket s --poll off", "--disk"),
        ("--socket s --server-cpus 1", "--disk"),
        ("--socket s --label a --label b", "--label"),
        ("--socket s --rwmixread 101", "101"),
        ("--disk storage=null,size=1G,socket=/x", "key socket"),
        ("--disk storage=null,size=1G,queues=2", "key queues"),
        ("--disk storage=null,size=1G,poll=off --poll busy", "--poll"),
    ] {
        match plan(line) {
            Err(BenchError::Usage(text)) => assert!(text.contains(word), "{line}: {text}"),
            other => panic!("{line}: {other:?}"),
        }
    }
}

#[test]
fn defaults_follow_from_what_is_asked() {
    let timed = plan("--socket s").unwrap();
    assert_eq!((timed.runtime, timed.runs), (Some(Duration::from_secs(5)), 3));
    let once = plan("--socket s --rw write --allow-write --verify crc32c --iodepth 4 --batch 0,2,9").unwrap();
    assert_eq!((once.runtime, once.runs, once.warmup), (None, 1, Duration::ZERO));
    assert_eq!(once.combinations.iter().map(|c| c.batch).collect::<Vec<_>>(), [4, 2, 4]);
    let swept =
        plan("--socket s --disk storage=null,size=1G --poll off,busy --queues 1,2 --jobs 4 --label peer").unwrap();
    assert_eq!(
        swept.targets.iter().map(|t| (t.label.as_str(), t.poll.as_str(), t.storage.as_str())).collect::<Vec<_>>(),
        [
            ("peer", "unknown", "unknown"),
            ("storage=null,size=1G", "off", "null"),
            ("storage=null,size=1G", "busy", "null"),
        ]
    );
    assert_eq!(swept.combinations.iter().map(|c| (c.jobs, c.threads())).collect::<Vec<_>>(), [(4, 1), (4, 2)]);
}
