//! The benchmark against the driver's model controller.

use std::collections::BTreeMap;
use std::time::Duration;

use mqblk_driver::virtio_scsi::LunAddress;
use mqblk_driver::virtio_scsi::model::{ModelDisk, ScsiBehaviour, ScsiFault, ScsiModel};

use super::{benchmark, failed, json, plan, refused};
use crate::words::IoSizes;
use crate::{BenchError, sweep};

pub(super) struct Rig {
    model: ScsiModel,
    folder: tempfile::TempDir,
    /// True if the model gets stuck: the timeout is short.
    stalls: bool,
}

/// Creates the disks of `targets` targets with `luns` logical units each.
pub(super) fn disks(targets: u8, luns: u16, size: usize) -> BTreeMap<LunAddress, ModelDisk> {
    let addresses = (0..targets).flat_map(|target| (0..luns).map(move |lun| LunAddress { target, lun }));
    addresses.map(|at| (at, ModelDisk::new(size))).collect()
}

impl Rig {
    pub(super) fn new(behaviour: ScsiBehaviour) -> Rig {
        let folder = tempfile::tempdir().unwrap();
        let stalls = matches!(behaviour.fault, ScsiFault::StallAfter(_));
        Rig { model: ScsiModel::start(&folder.path().join("s"), behaviour), folder, stalls }
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    pub(super) fn run(&self, line: &str) -> Result<u64, BenchError> {
        let line = format!("--interface virtio-scsi --socket {} {line}", self.path("s"));
        let mut benchmark = benchmark(&line).unwrap();
        if self.stalls {
            benchmark.plan.stuck_timeout = Duration::from_millis(300);
        }
        sweep::run(&benchmark)
    }

    /// Returns true if every logical unit is full of verifiable blocks.
    fn all_written(&self, block: usize) -> bool {
        self.model.disks().values().all(|disk| {
            let right = |(at, bytes): (usize, &[u8])| {
                &bytes[..8] == b"mqblkchk" && bytes[8..16] == ((at * block) as u64).to_le_bytes()
            };
            disk.bytes.chunks(block).enumerate().all(right)
        })
    }
}

#[test]
fn every_block_of_every_unit_is_written_once_and_verified_under_each_policy() {
    for (steer, options) in [
        ("target", "--queues 3 --bs 4k --client poll"),
        ("target", "--queues 3 --bs 512 --jobs 12 --threads 2"),
        ("submitter", "--queues 2 --bs 4k --jobs 12"),
        ("fixed", "--queues 3 --bs 4k --jobs 12"),
        ("target", "--queues 4 --bs 4k --jobs 4"),
        ("fixed", "--queues 3 --bs 4k --jobs 3 --queue-size 64 --descriptors direct --batch 4"),
    ] {
        let rig = Rig::new(ScsiBehaviour { disks: disks(3, 2, 128 << 10), queues: 4, ..ScsiBehaviour::default() });
        let line = format!(
            "--rw write {options} --steer {steer} --targets 3 --luns 2 --iodepth 4 --verify crc32c --allow-write"
        );
        assert_eq!(rig.run(&line).unwrap(), 0, "{line}");
        let block = if options.contains("512") { 512 } else { 4096 };
        assert!(rig.all_written(block), "{line}");
        let served: u64 = (0..4).map(|queue| rig.model.transfers(queue)).sum();
        assert_eq!(served as usize, 2 * 6 * (128 << 10) / block, "{line}: each block written once and read once");
        if steer != "submitter" {
            assert_eq!(rig.model.steering_violations(), 0, "{line}: a target on two queues");
        }
    }
}

/// Jobs of several threads on one target: all threads but one hand their commands over.
#[test]
fn a_target_that_threads_share_is_verified_and_its_commands_are_handed_over() {
    let rig = Rig::new(ScsiBehaviour { disks: disks(1, 1, 1 << 20), ..ScsiBehaviour::default() });
    let file = rig.path("results.json");
    let line =
        format!("--rw randwrite --bs 512 --queues 4 --jobs 4 --iodepth 8 --verify crc32c --allow-write --json {file}");
    assert_eq!(rig.run(&line).unwrap(), 0);
    assert!(rig.all_written(512));
    assert_eq!(rig.model.steering_violations(), 0);
    let row = &json(&file)[0];
    assert!(row["handovers_per_io"].as_f64().unwrap() > 0.0, "{row}");
    assert_eq!((row["steer"].as_str(), row["interface"].as_str()), (Some("target"), Some("virtio-scsi")));
}

#[test]
fn mixed_sizes_verify_and_are_counted_in_bytes() {
    for options in ["--rw write", "--rw randrw --runtime 0.2 --warmup 0", "--rw rw --runtime 0.2 --warmup 0 --jobs 1"] {
        // A command takes 16 KiB: larger I/Os are several.
        let rig =
            Rig::new(ScsiBehaviour { disks: disks(2, 1, 256 << 10), max_sectors: 32, ..ScsiBehaviour::default() });
        let file = rig.path("results.json");
        let line = format!(
            "{options} --bsrange 4k-64k --targets 2 --queues 2 --iodepth 4 --verify crc32c --allow-write --json {file}"
        );
        assert_eq!(rig.run(&line).unwrap(), 0, "{line}");
        let row = json(&file)[0].clone();
        assert_eq!((row["bs"].as_u64(), row["bs_max"].as_u64()), (Some(4096), Some(65536)));
        assert_eq!(row["requests_per_io"].as_u64(), Some(4));
        let number = |key: &str| row[key].as_f64().unwrap();
        let mean = number("bw_bytes_per_s") / number("iops_mean");
        assert!((8192.0..60000.0).contains(&mean), "{options}: {mean} bytes a block");
        assert!((number("lun_bw_bytes_per_s") * 2.0 - number("bw_bytes_per_s")).abs() < 1.0);
        assert!(number("lun_bw_min_bytes_per_s") <= number("lun_bw_bytes_per_s") + 1.0);
        assert!(number("lun_bw_max_bytes_per_s") + 1.0 >= number("lun_bw_bytes_per_s"));
        if options == "--rw write" {
            assert!(rig.all_written(4096));
        }
    }
}

#[test]
fn units_with_other_block_sizes_or_read_only_are_checked() {
    let mut disks = disks(2, 1, 1 << 20);
    let other = disks.get_mut(&LunAddress { target: 1, lun: 0 }).unwrap();
    (other.block_size, other.read_only) = (4096, true);
    let rig = Rig::new(ScsiBehaviour { disks, ..ScsiBehaviour::default() });
    assert_eq!(rig.run("--targets 2 --rw read --bs 8k --runtime 0 --queues 2").unwrap(), 0);
    assert_eq!((0..4).map(|queue| rig.model.transfers(queue)).sum::<u64>(), 256);
    assert!(
        refused(rig.run("--targets 2 --bs 512"))
            .contains("--bs: found 512, expected a multiple of the block of logical unit 1:0")
    );
    assert!(refused(rig.run("--targets 2 --rw write --allow-write")).contains("logical unit 1:0 is read-only"));
    assert!(refused(rig.run("--targets 3")).contains("--targets: found 3, expected at most 2"));
    assert!(refused(rig.run("--luns 2")).contains("--luns: found 2, expected at most 1"));
    assert!(refused(rig.run("--queues 5")).contains("queues: found 5, expected 1 to 4"));
}

#[test]
fn differences_and_failures_are_counted() {
    for (fault, line) in [
        (ScsiFault::CorruptFrom(40), "--rw write --bs 4k --verify crc32c --allow-write"),
        (ScsiFault::NoResponseFrom(40), "--rw write --bs 4k --verify crc32c --allow-write"),
        (ScsiFault::FailFrom(40), "--rw read --bs 4k --runtime 0"),
        (ScsiFault::ResidualFrom(40, 512), "--rw read --bs 4k --runtime 0"),
        (ScsiFault::StatusFrom(40, 8), "--rw read --bs 4k --runtime 0"),
    ] {
        let rig = Rig::new(ScsiBehaviour { disks: disks(1, 1, 400 << 10), fault, ..ScsiBehaviour::default() });
        let errors = rig.run(line).unwrap();
        // 100 blocks, the first 40 good. Corruption is found when a block is read back, a failure at once.
        assert!((60..=160).contains(&errors), "{fault:?}: {errors}");
    }
}

#[test]
fn a_server_that_disconnects_or_is_stuck_ends_the_run() {
    for client in ["poll", "wait"] {
        for (fault, word) in [(ScsiFault::DisconnectAfter(100), "went away"), (ScsiFault::StallAfter(100), "stuck")] {
            let rig = Rig::new(ScsiBehaviour { fault, disks: disks(2, 1, 1 << 20), ..ScsiBehaviour::default() });
            let line = format!("--client {client} --iodepth 4 --targets 2 --jobs 4 --queues 2 --runtime 60");
            let text = failed(rig.run(&line));
            assert!(text.contains(word), "{text}");
        }
        let fault = ScsiFault::WrongIdAt(10);
        let rig = Rig::new(ScsiBehaviour { fault, disks: disks(2, 1, 1 << 20), ..ScsiBehaviour::default() });
        let text = failed(rig.run(&format!("--client {client} --targets 2 --queues 2 --runtime 60")));
        assert!(text.contains("used element"), "{text}");
    }
}

#[test]
fn fill_writes_before_the_measurement() {
    let mut all = disks(2, 1, 64 << 10);
    all.values_mut().for_each(|disk| disk.bytes.fill(7));
    let rig = Rig::new(ScsiBehaviour { disks: all, ..ScsiBehaviour::default() });
    assert_eq!(
        rig.run("--targets 2 --rw read --bsrange 4k-16k --runtime 0 --queues 2 --fill --allow-write").unwrap(),
        0
    );
    // The client's buffers are zeros.
    assert!(rig.model.disks().values().all(|disk| disk.bytes.iter().all(|byte| *byte == 0)));
    rig.model.disks().get_mut(&LunAddress::default()).unwrap().read_only = true;
    assert!(refused(rig.run("--fill --allow-write")).contains("--fill: found logical unit 0:0, which is read-only"));
}

#[test]
fn options_are_checked() {
    for (line, word) in [
        ("--socket s --targets 2", "--targets: found virtio-blk"),
        ("--socket s --luns 2", "--luns: found virtio-blk"),
        ("--socket s --steer fixed", "--steer: found virtio-blk"),
        ("--interface virtio-scsi --socket s --targets 257", "--targets"),
        ("--interface virtio-scsi --socket s --targets 256 --luns 100", "--luns: found 100 for each of 256 targets"),
        ("--interface virtio-scsi --socket s --steer round", "round"),
        ("--interface scsi --socket s", "scsi"),
        ("--socket s --fill", "--allow-write"),
        ("--disk storage=null,size=1G --fill", "--allow-write"),
        ("--socket s --bsrange 4k", "--bsrange"),
        ("--socket s --bsrange 64k-4k", "--bsrange"),
        ("--socket s --bsrange 4k-10k", "--bsrange"),
        ("--socket s --bsrange 1000-2000", "--bsrange: found 1000-2000"),
        ("--socket s --bsrange 4k-64k --bs 4k", "--bs"),
        ("--socket s --bsrange 4k-64k --rw randread --runtime 0", "--bsrange: found 4K-64K, expected one size"),
    ] {
        match plan(line) {
            Err(BenchError::Usage(text)) => assert!(text.contains(word), "{line}: {text}"),
            other => panic!("{line}: {other:?}"),
        }
    }
    let swept =
        plan("--interface virtio-scsi --socket s --targets 1,3 --luns 2,4 --queues 2 --bsrange 4k-64k,512-1M").unwrap();
    let found: Vec<_> =
        swept.combinations.iter().map(|c| (c.sizes.min.0, c.targets, c.luns, c.jobs, c.threads())).collect();
    let expected = [(1, 2, 2, 2), (1, 4, 4, 2), (3, 2, 6, 2), (3, 4, 12, 2)];
    let expected: Vec<_> = [4096, 512].iter().flat_map(|min| expected.map(|(t, l, j, n)| (*min, t, l, j, n))).collect();
    assert_eq!(found, expected);
    let IoSizes { min, max } = swept.combinations[0].sizes;
    assert_eq!((min.0, max.0, swept.combinations[0].sizes.max_blocks()), (4096, 65536, 16));
}
