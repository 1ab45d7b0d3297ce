//! The benchmark against the driver's model server, which can misbehave.

use std::path::Path;
use std::time::Duration;

use clap::Parser;
use mqblk_driver::virtio_blk::model::{BlkBehaviour, BlkFault, BlkModel};

use crate::benchmark::Benchmark;
use crate::plan::Plan;
use crate::{BenchArgs, BenchError, sweep};

mod endings;
mod loads;
mod printed;
mod series;
mod virtio_scsi;
mod xen;

#[derive(Debug, Parser)]
struct Cli {
    #[command(flatten)]
    args: BenchArgs,
}

/// Parses the options of a command line.
fn args(line: &str) -> Result<BenchArgs, clap::Error> {
    Cli::try_parse_from(std::iter::once("bench").chain(line.split_whitespace())).map(|cli| cli.args)
}

/// Checks a command line.
pub(crate) fn benchmark(line: &str) -> Result<Benchmark, BenchError> {
    Benchmark::new(&args(line).map_err(|error| BenchError::Usage(error.to_string()))?)
}

/// Checks a command line, and returns its plan.
pub(crate) fn plan(line: &str) -> Result<Plan, BenchError> {
    benchmark(line).map(|benchmark| benchmark.plan)
}

struct Rig {
    model: BlkModel,
    folder: tempfile::TempDir,
    /// True if the model gets stuck: the timeout is short.
    stalls: bool,
}

impl Rig {
    fn new(behaviour: BlkBehaviour) -> Rig {
        let folder = tempfile::tempdir().unwrap();
        let stalls = matches!(behaviour.fault, BlkFault::StallAfter(_));
        Rig { model: BlkModel::start(&folder.path().join("s"), behaviour), folder, stalls }
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    fn run(&self, line: &str) -> Result<u64, BenchError> {
        let mut benchmark = benchmark(&format!("--socket {} {line}", self.path("s"))).unwrap();
        if self.stalls {
            benchmark.plan.stuck_timeout = Duration::from_millis(300);
        }
        sweep::run(&benchmark)
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
        let rig = Rig::new(BlkBehaviour { queues: 3, ..BlkBehaviour::default() });
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

/// Returns the offsets of the blocks of `block` bytes that a verifying benchmark wrote.
fn written(disk: &[u8], block: usize) -> Vec<usize> {
    (0..disk.len()).step_by(block).filter(|at| &disk[*at..at + 8] == b"mqblkchk").collect()
}

#[test]
fn jobs_with_an_offset_increment_verify() {
    for options in ["--bs 4k", "--bs 512 --rw randwrite", "--bs 8k --threads 2 --client poll"] {
        let rig = Rig::new(BlkBehaviour::default());
        let rw = if options.contains("--rw") { "" } else { "--rw write" };
        let line = format!("{rw} {options} --iodepth 4 --queues 4 --jobs 4 --verify crc32c --allow-write");
        assert_eq!(rig.run(&format!("{line} --offset 64k --offset-increment 128k --size 32k")).unwrap(), 0);
        let block = if options.contains("512") { 512 } else { 4096 << usize::from(options.contains("8k")) };
        let starts = (0..4).map(|job| (64 + 128 * job) << 10);
        let expected: Vec<usize> = starts.flat_map(|start| (start..start + (32 << 10)).step_by(block)).collect();
        assert_eq!(written(&rig.model.disk(), block), expected, "{options}");
        assert_eq!((0..4).map(|queue| rig.model.requests(queue)).sum::<u64>(), 2 * expected.len() as u64);
    }
}

/// A disk with small segments: an I/O is several requests, and the ring has no space for all of them.
#[test]
fn large_blocks_are_several_requests_and_one_io() {
    for (size_max, bs, parts) in [(4096, 64 << 10, 2), (1000, 64 << 10, 5), (512, 256 << 10, 37), (1 << 20, 4 << 20, 1)]
    {
        for shape in ["direct", "indirect"] {
            let behaviour = BlkBehaviour { size: 16 << 20, size_max: Some(size_max), ..BlkBehaviour::default() };
            let rig = Rig::new(behaviour);
            let file = rig.path("results.json");
            let line = format!(
                "--rw write --bs {bs} --iodepth 4 --queues 2 --jobs 1 --queue-size 32 --descriptors {shape} --verify crc32c --allow-write --json {file}"
            );
            assert_eq!(rig.run(&line).unwrap(), 0, "{line}");
            let ios = (16 << 20) / bs;
            assert_eq!(written(&rig.model.disk(), bs).len(), ios, "{line}");
            let served: u64 = (0..2).map(|queue| rig.model.requests(queue)).sum();
            assert_eq!(served, 2 * (ios * parts) as u64, "{line}");
            let row = &json(&file)[0];
            assert_eq!(row["requests_per_io"].as_u64(), Some(parts as u64));
        }
    }
    let rig = Rig::new(BlkBehaviour { size_max: Some(16), ..BlkBehaviour::default() });
    assert!(failed(rig.run("--bs 4k")).contains("SIZE_MAX: found 224 bytes a request, expected a block of 512"));
}

#[test]
fn a_part_that_fails_fails_its_io_once() {
    let fault = BlkFault::FailFrom(40);
    let rig = Rig::new(BlkBehaviour { size_max: Some(4096), fault, ..BlkBehaviour::default() });
    // 16 I/Os of 2 requests each: the first 40 requests are the first run's 32, and four I/Os of the second.
    assert_eq!(rig.run("--rw read --bs 64k --runtime 0").unwrap(), 0);
    assert_eq!(rig.run("--rw read --bs 64k --runtime 0").unwrap(), 12);
}

#[test]
fn mixed_load_with_time_verifies_too() {
    let rig = Rig::new(BlkBehaviour::default());
    let line = "--rw randrw --rwmixread 30 --bs 8k --iodepth 8 --queues 2 --jobs 3 --verify crc32c --allow-write --runtime 0.2 --warmup 0.1 --runs 2";
    assert_eq!(rig.run(line).unwrap(), 0);
}

#[test]
fn differences_and_failures_are_counted() {
    for (fault, line) in [
        (BlkFault::CorruptFrom(40), "--rw write --bs 4k --verify crc32c --allow-write"),
        (BlkFault::NoStatusFrom(40), "--rw write --bs 4k --verify crc32c --allow-write"),
        (BlkFault::FailFrom(40), "--rw read --bs 4k --runtime 0"),
    ] {
        let rig = Rig::new(BlkBehaviour { size: 400 << 10, fault, ..BlkBehaviour::default() });
        let errors = rig.run(line).unwrap();
        // 100 blocks, the first 40 good. Corruption is found when a block is read back, a failure at once.
        assert!((60..=160).contains(&errors), "{fault:?}: {errors}");
    }
}

#[test]
fn a_server_that_disconnects_or_is_stuck_ends_the_run() {
    for client in ["poll", "wait"] {
        for (fault, word) in [(BlkFault::DisconnectAfter(100), "went away"), (BlkFault::StallAfter(100), "stuck")] {
            let rig = Rig::new(BlkBehaviour { fault, ..BlkBehaviour::default() });
            let text = failed(rig.run(&format!("--client {client} --iodepth 4 --queues 2 --runtime 60")));
            assert!(text.contains(word), "{text}");
        }
        let rig = Rig::new(BlkBehaviour { fault: BlkFault::WrongIdAt(10), ..BlkBehaviour::default() });
        let text = failed(rig.run(&format!("--client {client} --runtime 60")));
        assert!(text.contains("used element"), "{text}");
    }
    let folder = tempfile::tempdir().unwrap();
    let text = failed(sweep::run(&benchmark(&format!("--socket {}/none", folder.path().display())).unwrap()));
    assert!(text.contains("/none: cannot connect"), "{text}");
}

#[test]
fn options_are_checked_against_the_disk() {
    let rig = Rig::new(BlkBehaviour { read_only: true, ..BlkBehaviour::default() });
    assert!(refused(rig.run("--rw randwrite --allow-write")).contains("read-only"));
    assert!(refused(rig.run("--size 2M")).contains("--size: found 2M, expected at most 1M"));
    assert!(refused(rig.run("--offset 1M")).contains("--size: found 0"));
    assert!(refused(rig.run("--queues 5")).contains("queues: found 5, expected 1 to 4"));
    assert!(refused(rig.run("--rw read --jobs 3 --size 8k")).contains("a block of 4K for each job"));
    assert_eq!(rig.model.requests(0), 0);
}

#[test]
fn any_ratio_of_jobs_to_queues_works() {
    for (queues, jobs, iodepth, threads) in [
        (1, 1, 1, 8),
        (4, 1, 1, 8),
        (4, 1, 6, 8),
        (3, 2, 5, 8),
        (2, 5, 3, 8),
        (4, 4, 1, 8),
        (4, 4, 1, 2),
        (4, 5, 3, 3),
        (4, 3, 2, 2),
        (3, 2, 1, 1),
    ] {
        let rig = Rig::new(BlkBehaviour::default());
        let line = format!(
            "--rw read --bs 4k --runtime 0 --queues {queues} --jobs {jobs} --threads {threads} --iodepth {iodepth} --batch 3"
        );
        assert_eq!(rig.run(&line).unwrap(), 0);
        let served: Vec<u64> = (0..4).map(|queue| rig.model.requests(queue)).collect();
        assert_eq!(served.iter().sum::<u64>(), 256, "{line}: {served:?}");
        assert_eq!(served.iter().filter(|count| **count > 0).count(), queues, "{line}: {served:?}");
    }
}

fn number_of(row: &serde_json::Value, latency: &str) -> f64 {
    row["lat_us"][latency].as_f64().unwrap()
}

#[test]
fn the_results_have_stable_keys() {
    let (rig, other) = (Rig::new(BlkBehaviour::default()), Rig::new(BlkBehaviour::default()));
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
        "storage_latency_us",
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
        "server_workers",
        "client_cpu_us_per_io",
        "kicks_per_io",
        "calls_per_io",
        "errors",
        "iops_median",
        "percentiles",
        "rrqm_per_s",
        "wrqm_per_s",
        "requests_per_io",
        "experiment",
        "column",
        "bs_max",
        "bw_stderr",
        "handovers_per_io",
        "lun_bw_bytes_per_s",
        "lun_bw_max_bytes_per_s",
        "lun_bw_min_bytes_per_s",
        "luns",
        "steer",
        "targets",
        "abi",
        "grants",
        "grants_pool",
        "ring_order",
        "rate_iops",
        "rate",
        "fsync",
        "random_distribution",
        "read",
        "write",
        "trim",
        "flush",
        "each_run",
        "holes",
        "seed",
        "date",
        "server",
        "version",
        "command",
        "machine",
    ];
    expected.sort_unstable();
    assert_eq!(keys, expected);
    let latency: Vec<&String> = rows[0]["lat_us"].as_object().unwrap().keys().collect();
    assert_eq!(latency, ["max", "mean", "p50", "p90", "p99", "p999"]);
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
        let points: Vec<(f64, f64)> = serde_json::from_value(row["percentiles"].clone()).unwrap();
        assert_eq!((points.len(), points[0].0, points[12].0), (13, 1.0, 99.99));
        assert!(points.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1), "{points:?}");
        assert_eq!((points[4].1, points[8].1), (number_of(row, "p50"), number_of(row, "p99")));
        for (key, value) in [
            ("rrqm_per_s", serde_json::Value::Null),
            ("wrqm_per_s", serde_json::Value::Null),
            ("requests_per_io", 1.into()),
            ("experiment", serde_json::Value::Null),
            ("column", serde_json::Value::Null),
            ("merge", "unknown".into()),
            ("bs_max", bs.into()),
            ("targets", serde_json::Value::Null),
            ("luns", serde_json::Value::Null),
            ("steer", serde_json::Value::Null),
            ("lun_bw_bytes_per_s", serde_json::Value::Null),
            ("grants", serde_json::Value::Null),
            ("grants_pool", serde_json::Value::Null),
            ("ring_order", serde_json::Value::Null),
            ("abi", serde_json::Value::Null),
        ] {
            assert_eq!(row[key], value, "{key}");
        }
    }
}

#[test]
fn usage_errors_name_the_option() {
    for (line, word) in [
        ("", "--socket"),
        ("--socket s --rw randwrite", "--allow-write"),
        ("--socket s --rw trim", "--allow-write"),
        ("--socket s --rw shred", "shred"),
        ("--socket s --rw trim --allow-write --verify crc32c", "--verify: found a benchmark that trims"),
        ("--socket s --rate-iops 0", "--rate-iops"),
        ("--socket s --fsync 8", "--fsync: found 8, expected a --rw that writes with it"),
        ("--socket s --rw randwrite,randtrim --allow-write --fsync 8", "--fsync: found 8"),
        ("--socket s --rw read --random-distribution zipf:1.1", "--random-distribution: found zipf:1.1"),
        ("--socket s --runtime 0 --random-distribution zipf:1.1", "--random-distribution: found zipf:1.1"),
        ("--socket s --random-distribution pareto:0.5", "zipf:THETA"),
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
        ("--socket s --queues 2 --jobs 600", "--iodepth: found 300 I/Os"),
        ("--socket s --runtime x", "--runtime"),
        ("--socket s --runtime 0 --warmup 1", "--warmup"),
        ("--socket s --runs 0", "--runs"),
        ("--socket s --experiment seek", "block-size"),
        ("--socket s --experiment block-size", "--experiment: found block-size without a disk"),
        ("--disk path=x,merge=off --experiment block-size", "--disk: found a disk with the key merge"),
        ("--disk path=x --experiment block-size --jobs 9", "--iodepth: found 288 I/Os in flight on a queue"),
        ("--disk path=x --experiment block-size --rw write", "--allow-write"),
        ("--socket s --offset-increment 6k --bs 4k", "--offset-increment: found 6K, expected a multiple of --bs, 4K"),
        ("--socket s --offset-increment x", "--offset-increment"),
        ("--socket s --threads 0", "--threads"),
        ("--socket s --verify crc32c", "--verify"),
        ("--socket s --verify md5", "md5"),
        ("--socket s --poll off", "--disk"),
        ("--socket s --server-cpus 1", "--disk"),
        ("--socket s --label a --label b", "--label"),
        ("--socket s --rwmixread 101", "101"),
        ("--disk storage=null,size=1G,socket=/x", "key socket"),
        ("--disk storage=null,size=1G,queues=2", "key queues"),
        ("--disk storage=null,size=1G,poll=off --poll busy", "--poll"),
        (
            "--disk storage=null,size=1G,queue-size=128 --queue-size 256",
            "--queue-size: found 256, expected at most 128, the queue-size of --disk",
        ),
    ] {
        match plan(line) {
            Err(BenchError::Usage(text)) => assert!(text.contains(word), "{line}: {text}"),
            other => panic!("{line}: {other:?}"),
        }
    }
}

#[test]
fn block_sizes_are_lists_and_ranges() {
    let sizes = |bs: &str| {
        let plan = plan(&format!("--socket s --bs {bs}"));
        plan.map(|plan| plan.combinations.iter().map(|c| c.sizes.min.0).collect::<Vec<_>>())
    };
    assert_eq!(sizes("512,3k,4M").unwrap(), [512, 3072, 4 << 20]);
    assert_eq!(sizes("512-4k").unwrap(), [512, 1024, 2048, 4096]);
    assert_eq!(sizes("4k-4k,1M-2M,512").unwrap(), [4096, 1 << 20, 2 << 20, 512]);
    assert_eq!(sizes("512-4M").unwrap().len(), 14);
    for bs in ["4k-512", "3k-6k", "512-", "512-4k-8k", "0-4k"] {
        match sizes(bs) {
            Err(BenchError::Usage(text)) => assert!(text.contains("--bs"), "{bs}: {text}"),
            other => panic!("{bs}: {other:?}"),
        }
    }
}

#[test]
fn an_experiment_makes_columns_and_is_overridden_by_what_is_given() {
    type Column = (Option<String>, Option<u16>, String);
    let columns = |line: &str| -> Vec<Column> {
        let plan = plan(line).unwrap();
        plan.targets.iter().map(|t| (t.column.clone(), t.queues, t.merge().to_owned())).collect()
    };
    let column = |name: &str, queues: u16, merge: &str| (Some(name.to_owned()), Some(queues), merge.to_owned());
    let line = "--experiment block-size --disk storage=null,size=1G";
    let own = plan(line).unwrap();
    assert_eq!((own.runtime, own.warmup, own.runs), (Some(Duration::from_secs(2)), Duration::from_millis(500), 3));
    assert_eq!(own.combinations.len(), 14);
    assert!(own.combinations.iter().all(|c| (c.rw.name(), c.jobs, c.iodepth, c.batch) == ("read", 8, 32, 1)));
    let expected =
        [column("1 queue", 1, "on"), column("8 queues", 8, "on"), column("8 queues without merging", 8, "off")];
    assert_eq!(columns(line), expected);

    let given =
        plan(&format!("{line} --rw write --allow-write --bs 4k,1M --runtime 7 --queues 2 --jobs 4 --iodepth 9"));
    let given = given.unwrap();
    assert_eq!((given.runtime, given.warmup), (Some(Duration::from_secs(7)), Duration::from_millis(500)));
    assert_eq!(given.combinations.iter().map(|c| c.sizes.min.0).collect::<Vec<_>>(), [4096, 1 << 20]);
    assert!(given.combinations.iter().all(|c| (c.rw.name(), c.jobs, c.iodepth) == ("write", 4, 9)));
    assert_eq!(given.targets[1].combination(&given.combinations[0]).threads(), 2);
    assert_eq!(given.targets[0].combination(&given.combinations[0]).depth_per_queue(), 36);

    let expected = [
        column("1 queue", 1, "on"),
        column("1 queue without merging", 1, "off"),
        column("4 queues", 4, "on"),
        column("4 queues without merging", 4, "off"),
        column("peer, 1 queue", 1, "unknown"),
        column("peer, 4 queues", 4, "unknown"),
    ];
    assert_eq!(columns(&format!("{line} --queues 1,4 --socket s --label peer")), expected);
    let two = columns(&format!("{line} --disk path=x --label a --label b --poll off --queues 2"));
    assert_eq!(two[0], column("a poll off, 1 queue", 1, "on"));
    assert_eq!(two[5], column("b poll off, 2 queues without merging", 2, "off"));
}

#[test]
fn threads_queues_and_jobs_are_laid_out() {
    for (options, threads, depth) in [
        ("--queues 8 --jobs 8", 8, 3),
        ("--queues 8 --jobs 8 --threads 2", 2, 3),
        ("--queues 1 --jobs 8 --threads 2", 1, 24),
        ("--queues 3 --jobs 8 --threads 2", 2, 12),
        ("--queues 8 --jobs 2", 2, 3),
        ("--queues 8 --jobs 4 --threads 2", 2, 6),
        ("--queues 2 --jobs 5", 2, 9),
    ] {
        let combination = plan(&format!("--socket s --iodepth 3 {options}")).unwrap().combinations[0];
        assert_eq!((combination.threads(), combination.depth_per_queue()), (threads, depth), "{options}");
    }
}

#[test]
fn defaults_follow_from_other_options() {
    let timed = plan("--socket s").unwrap();
    assert_eq!((timed.runtime, timed.runs), (Some(Duration::from_secs(5)), 3));
    let once = plan("--socket s --rw write --allow-write --verify crc32c --iodepth 4 --batch 0,2,9").unwrap();
    assert_eq!((once.runtime, once.runs, once.warmup), (None, 1, Duration::ZERO));
    assert_eq!(once.combinations.iter().map(|c| c.batch).collect::<Vec<_>>(), [4, 2, 4]);
    let swept =
        plan("--socket s --disk storage=null,size=1G --poll off,busy --queues 1,2 --jobs 4 --label peer").unwrap();
    assert_eq!(
        swept.targets.iter().map(|t| (t.label.as_str(), t.poll(), t.storage())).collect::<Vec<_>>(),
        [
            ("peer", "unknown", "unknown"),
            ("storage=null,size=1G", "off", "null"),
            ("storage=null,size=1G", "busy", "null"),
        ]
    );
    assert_eq!(swept.combinations.iter().map(|c| (c.jobs, c.threads())).collect::<Vec<_>>(), [(4, 1), (4, 2)]);
}
