//! Loads: trims, flushes, rates, failures; each on all interfaces that have it.

use mqblk_driver::virtio_blk::model::{BlkBehaviour, BlkFault};
use mqblk_driver::virtio_scsi::model::ScsiBehaviour;
use serde_json::Value;

use super::{Rig, json, plan, refused, virtio_scsi, xen};
use crate::BenchError;
use crate::words::Distribution;

/// Runs a load on each interface. Returns its only row, and the name of the interface.
pub(super) fn on_each_interface(line: &str, check: impl Fn(&str, &Value)) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("out.json").display().to_string();
    let line = format!("{line} --json {file}");
    let disks = virtio_scsi::disks(2, 1, 1 << 20);
    let scsi = virtio_scsi::Rig::new(ScsiBehaviour { disks, ..ScsiBehaviour::default() });
    let (blk, xen) = (Rig::new(BlkBehaviour::default()), xen::Rig::new(Default::default()));
    type Run<'a> = &'a dyn Fn(&str) -> Result<u64, BenchError>;
    let runs: [(&str, Run<'_>); 3] = [
        ("virtio-blk", &|line| blk.run(line)),
        ("virtio-scsi", &|line| scsi.run(&format!("{line} --targets 2"))),
        ("xen", &|line| xen.run(line)),
    ];
    for (interface, run) in runs {
        assert_eq!(run(&line).unwrap(), 0, "{interface}: {line}");
        let row = json(&file)[0].clone();
        assert_eq!(row["interface"], interface);
        check(interface, &row);
    }
}

pub(super) fn number(row: &Value, at: &str) -> f64 {
    row.pointer(at).and_then(Value::as_f64).unwrap_or_else(|| panic!("{at}: {row}"))
}

/// Returns the number of an operation's I/Os in a row's only run.
pub(super) fn count(row: &Value, op: &str) -> u64 {
    (number(row, &format!("/{op}/iops_mean")) * number(row, "/each_run/0/elapsed_s")).round() as u64
}

#[test]
fn each_block_is_trimmed_once() {
    for rw in ["trim", "randtrim"] {
        on_each_interface(&format!("--rw {rw} --bs 4k --runtime 0 --iodepth 4 --allow-write"), |interface, row| {
            let disks = if interface == "virtio-scsi" { 2 } else { 1 };
            assert_eq!(count(row, "trim"), 256 * disks, "{interface}");
            assert_eq!((&row["read"], &row["write"], &row["flush"]), (&Value::Null, &Value::Null, &Value::Null));
            assert_eq!((number(row, "/trim/iops_mean"), number(row, "/errors")), (number(row, "/iops_mean"), 0.0));
        });
    }
    let rig = Rig::new(BlkBehaviour::default());
    assert_eq!(rig.run("--rw write --bs 4k --verify crc32c --allow-write").unwrap(), 0);
    assert_eq!(rig.run("--rw trim --bs 8k --runtime 0 --allow-write --size 512k").unwrap(), 0);
    let disk = rig.model.disk().clone();
    let zeroed = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0);
    assert!(zeroed(&disk[..512 << 10]) && disk[512 << 10..].chunks(4096).all(|block| !zeroed(block)));
}

#[test]
fn a_job_flushes_after_so_many_writes() {
    for (line, flushes) in [("--fsync 1", 255), ("--fsync 8 --iodepth 4", 31), ("--fsync 300", 0)] {
        on_each_interface(&format!("--rw write --bs 4k --runtime 0 --allow-write {line}"), |interface, row| {
            let disks = if interface == "virtio-scsi" { 2 } else { 1 };
            assert_eq!(count(row, "write"), 256 * disks, "{interface} {line}");
            // Nothing comes after the last write; with several in flight another slot may have seen that a flush is
            // due.
            let found = count(row, "flush");
            assert!((flushes * disks..=(flushes + 1) * disks).contains(&found), "{interface} {line}: {found}");
            assert_eq!(number(row, "/write/iops_mean"), number(row, "/iops_mean"), "flushes are no I/Os");
        });
    }
    let rig = Rig::new(BlkBehaviour::default());
    assert_eq!(rig.run("--rw randwrite --fsync 4 --verify crc32c --allow-write --bs 4k").unwrap(), 0);
    assert!(rig.model.flushes() >= 63);
}

#[test]
fn what_a_device_lacks_is_named() {
    for (bit, line, expected) in [
        (
            13,
            "--rw trim --allow-write",
            "--rw: found trim, expected read or write: the disk does not offer VIRTIO_BLK_F_DISCARD",
        ),
        (
            9,
            "--rw randwrite --fsync 2 --allow-write",
            "--fsync: found 2, expected 0: the disk does not offer VIRTIO_BLK_F_FLUSH, so there is nothing to flush",
        ),
    ] {
        let rig = Rig::new(BlkBehaviour { without_features: 1 << bit, ..BlkBehaviour::default() });
        assert_eq!(refused(rig.run(line)), expected);
        assert_eq!(rig.model.requests(0), 0);
    }
}

#[test]
fn reads_and_writes_are_counted_apart() {
    on_each_interface(
        "--rw randrw --rwmixread 70 --bs 4k --runtime 0.2 --warmup 0 --runs 2 --allow-write",
        |_, row| {
            let (reads, writes) = (number(row, "/read/iops_mean"), number(row, "/write/iops_mean"));
            let all = number(row, "/iops_mean");
            assert!((reads + writes - all).abs() < 0.01 && reads > writes && writes > 0.0, "{reads} {writes} {all}");
            let bytes = number(row, "/read/bw_bytes_per_s") + number(row, "/write/bw_bytes_per_s");
            assert!((bytes - number(row, "/bw_bytes_per_s")).abs() < 1.0 && (bytes - all * 4096.0).abs() < 1.0);
            let (most, of_all) =
                (number(row, "/read/lat_us/max").max(number(row, "/write/lat_us/max")), number(row, "/lat_us/max"));
            assert_eq!(most, of_all);
            assert_eq!(row["each_run"].as_array().unwrap().len(), 2);
            assert!(row["trim"].is_null() && row["rate"].is_null());
            // Command, machine and server.
            assert!(!row["command"].as_array().unwrap().is_empty() && row["machine"]["kernel"].is_string());
            assert!(row["date"].as_str().unwrap().ends_with('Z') && row["version"].is_string());
        },
    );
}

/// Failed requests complete quickly: counted as I/Os they would make the disk look fast.
#[test]
fn failed_requests_are_no_ios() {
    let size = 400 << 10;
    let rig = Rig::new(BlkBehaviour { size, fault: BlkFault::FailFrom(40), ..BlkBehaviour::default() });
    let file = rig.path("out.json");
    assert_eq!(rig.run(&format!("--rw read --bs 4k --runtime 0 --json {file}")).unwrap(), 60);
    let row = &json(&file)[0];
    assert_eq!((count(row, "read"), number(row, "/errors"), number(row, "/each_run/0/errors")), (40, 60.0, 60.0));
    // I/Os that did not verify are not counted either.
    let rig = Rig::new(BlkBehaviour { fault: BlkFault::FailFrom(0), ..BlkBehaviour::default() });
    let file = rig.path("out.json");
    assert!(rig.run(&format!("--runtime 0.1 --warmup 0 --runs 1 --json {file}")).unwrap() > 0);
    let row = &json(&file)[0];
    assert_eq!((number(row, "/iops_mean"), number(row, "/lat_us/max")), (0.0, 0.0));
}

/// The number of I/Os that are due depends only on the time, not on the machine's speed.
#[test]
fn a_rate_is_asked_for_whatever_completes() {
    for client in ["wait", "poll"] {
        let line = "--runtime 0.3 --warmup 0.05 --runs 1 --jobs 2 --queues 2 --iodepth 4";
        on_each_interface(&format!("{line} --client {client} --rate-iops 500"), |interface, row| {
            let due = number(row, "/rate/started") + number(row, "/rate/unstarted");
            let asked = 1000.0 * number(row, "/each_run/0/elapsed_s");
            // The threads do not begin and end at the same time.
            assert!((due - asked).abs() < asked * 0.5 + 4.0, "{interface} {client}: {due} of {asked}");
            assert_eq!((number(row, "/rate/asked_iops"), number(row, "/rate_iops")), (1000.0, 500.0));
            assert!(number(row, "/rate/started") > 0.0 && number(row, "/iops_mean") > 0.0);
        });
    }
    // More than any machine does: the latencies have the time that requests were late.
    on_each_interface("--runtime 0.2 --warmup 0 --runs 1 --iodepth 2 --rate-iops 100000000", |interface, row| {
        assert!(number(row, "/rate/unstarted") > number(row, "/rate/started"), "{interface}");
        assert!(number(row, "/lat_us/max") >= number(row, "/rate/delay_us_mean"), "{interface}");
    });
}

#[test]
fn a_rate_ends_when_each_block_was_done_once() {
    on_each_interface("--rw read --runtime 0 --rate-iops 100000 --iodepth 4", |interface, row| {
        let disks = if interface == "virtio-scsi" { 2 } else { 1 };
        assert_eq!((count(row, "read"), number(row, "/rate/unstarted")), (256 * disks, 0.0), "{interface}");
    });
}

#[test]
fn rates_are_swept() {
    let swept = plan("--socket s --rate-iops 100,200 --iodepth 1,2").unwrap();
    let found: Vec<_> = swept.combinations.iter().map(|one| (one.iodepth, one.rate_iops.unwrap())).collect();
    assert_eq!(found, [(1, 100), (1, 200), (2, 100), (2, 200)]);
}

#[test]
fn the_words_of_fio_are_taken() {
    let line = "--socket s --numjobs 4 --time_based --runtime 30s --ramp_time 500ms --blocksize 8k --iodepth 8 --iodepth_batch 4 \
                --offset_increment 1M --rate_iops 100 --random_distribution zipf:1.1 --randseed 7";
    let plan = plan(line).unwrap();
    let one = &plan.combinations[0];
    assert_eq!((one.jobs, one.batch, one.sizes.min.0, one.rate_iops), (4, 4, 8192, Some(100)));
    let times = (plan.runtime.map(|time| time.as_millis()), plan.warmup.as_millis());
    assert_eq!((times, plan.seed), ((Some(30_000), 500), Some(7)));
    assert_eq!(plan.distribution, Distribution::Zipf(1.1));
    assert_eq!(plan.offset_increment.map(|increment| increment.0), Some(1 << 20));
}

#[test]
fn an_open_loop_load_is_verified() {
    // Each block once: all of them, and no other number.
    let once = "--rw randwrite --bs 4k --verify crc32c --rate-iops 20000 --iodepth 4 --allow-write";
    for line in [once.to_owned(), format!("{once} --client poll --jobs 2 --queues 2")] {
        on_each_interface(&line, |interface, row| {
            let disks = if interface == "virtio-scsi" { 2 } else { 1 };
            assert_eq!(count(row, "write"), 256 * disks, "{interface} {line}");
            assert_eq!(number(row, "/rate/started") + number(row, "/rate/unstarted"), 256.0 * disks as f64);
        });
    }
    // Blocks are written and read again and again, few of them and many at a time: no job ends before its time.
    let line = "--rw randrw --bsrange 4k-8k --verify crc32c --rate-iops 3000 --iodepth 4 --allow-write";
    on_each_interface(&format!("{line} --size 64k --runtime 0.3 --warmup 0.05 --runs 1"), |interface, row| {
        let due = number(row, "/rate/started") + number(row, "/rate/unstarted");
        let asked = number(row, "/rate/asked_iops") * number(row, "/each_run/0/elapsed_s");
        assert!((due - asked).abs() < asked * 0.5 + 4.0, "{interface}: {due} of {asked}");
        assert!(count(row, "write") > 0);
    });
    let rig = Rig::new(BlkBehaviour { fault: BlkFault::CorruptFrom(40), ..BlkBehaviour::default() });
    assert_eq!(rig.run(once).unwrap(), 216);
    let rig = Rig::new(BlkBehaviour::default());
    assert_eq!(
        refused(rig.run("--rw randwrite --bs 4k --size 32k --verify crc32c --rate-iops 100 --iodepth 9 --allow-write")),
        "--iodepth: found 9, expected at most 8 with --verify and --rate-iops: a job has 8 blocks, and a block one I/O in flight"
    );
}
