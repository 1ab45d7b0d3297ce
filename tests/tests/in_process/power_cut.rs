//! Thousands of power cuts under the project's drivers: durable data is there, and unwritten data is not.
//!
//! Each test also cuts the power of a disk that violates durability, and must detect that.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::process::{Command, Output};
use std::sync::Arc;

use mqblk_core::{ByteLen, Sector512};
use mqblk_driver::virtio_blk::{BlkConnectOptions, BlkQueue, BlkStatus, DataSegment, SectorRange};
use mqblk_engine::{AnyDisk, PlugOptions, PollPolicy};
use mqblk_memory::GuestAddress;
use mqblk_tests::in_process::{Plan, Rig, disk, try_disk};
use mqblk_tests::power::{CacheModel, Position, PowerLog, PowerMount, SECTOR, WriteHistory, WriteId, record_writes};
use mqblk_tests::stepped_scsi::{CommandData, SteppedController};
use mqblk_virtio_scsi::LunAddress;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

/// Cuts of each test.
const CUTS: u64 = 1000;
const BLOCK_SECTORS: u64 = 8;
const BLOCKS: u64 = 128;
const SIZE: usize = (BLOCKS * BLOCK_SECTORS) as usize * SECTOR;
const DEPTH: u32 = 16;

/// A file with reordered completions, recorded in a log.
fn recorded(folder: &std::path::Path, log: &Arc<PowerLog>) -> Arc<AnyDisk> {
    let path = folder.join("disk");
    std::fs::File::create(&path).and_then(|file| file.set_len(SIZE as u64)).expect("the disk's file");
    let path = path.to_str().expect("plain text");
    let settings =
        [("inner", "file"), ("path", path), ("direct", "off"), ("block-size", "512"), ("fault-reorder", "3")];
    record_writes(disk("fault", &settings), log, 0)
}

/// Returns the number of sectors that violate durability, over seeded cuts at random positions.
fn faults(log: &PowerLog, history: &WriteHistory, cache: CacheModel) -> Vec<String> {
    let mut random = SmallRng::seed_from_u64(11);
    let mut faults = vec![];
    for seed in 0..CUTS {
        let at = random.random_range(0..=log.position());
        faults.extend(history.faults(&log.cut(0, SIZE, at, cache, seed), at));
    }
    faults
}

fn none(faults: &[String]) {
    assert!(faults.is_empty(), "{} faults, such as\n{}", faults.len(), faults[..faults.len().min(5)].join("\n"));
}

/// The request of a slot of a queue.
enum Sent {
    Change { write: WriteId, block: u64, discard: bool },
    Flush(u64),
}

/// Keeps several queues busy with random changes and flushes. At most one change of a block is in flight.
fn load(writeback: bool) -> (Arc<PowerLog>, WriteHistory) {
    let log = Arc::<PowerLog>::default();
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a temporary folder");
    let history = load_disk(recorded(folder.path(), &log), &log, writeback, WriteHistory::default());
    (log, history)
}

/// As [`load`], for a disk whose storage is recorded in `log`.
fn load_disk(disk: Arc<AnyDisk>, log: &PowerLog, writeback: bool, mut history: WriteHistory) -> WriteHistory {
    const QUEUES: u16 = 3;
    const OPERATIONS: u64 = 3000;
    let plan = Plan {
        disk,
        workers: 2,
        policy: PollPolicy::default().into(),
        plug: PlugOptions::default(),
        health: Default::default(),
    };
    let (mut rig, mut sets) = Rig::new(plan, |options: &mut BlkConnectOptions| {
        options.queues = QUEUES;
        options.data_per_queue = ByteLen(u64::from(DEPTH) * BLOCK_SECTORS * SECTOR as u64);
    });
    rig.set_writeback(writeback);
    let set = &mut sets[0];
    let mut random = SmallRng::seed_from_u64(5);
    let mut free: Vec<Vec<u32>> = vec![(0..DEPTH).collect(); QUEUES.into()];
    let mut sent: HashMap<(usize, u32), Sent> = HashMap::new();
    let mut busy = vec![false; BLOCKS as usize];
    let (mut started, mut ended) = (0, 0);
    while ended < OPERATIONS {
        while started < OPERATIONS {
            let at = (started % u64::from(QUEUES)) as usize;
            // Close to each other, so that some are merged.
            let block = (started / 2 + random.random_range(0..8)) % BLOCKS;
            if busy[block as usize] {
                break;
            }
            let Some(slot) = free[at].pop() else { break };
            let queue = &mut set.queues_mut()[at];
            started += 1;
            let one = if random.random_bool(0.05) {
                let promise = history.send_flush();
                queue.flush(slot).expect("the ring has room");
                Sent::Flush(promise)
            } else {
                busy[block as usize] = true;
                change(queue, slot, block, started, &mut history, log, &mut random)
            };
            sent.insert((at, slot), one);
        }
        let before = ended;
        for (at, queue) in set.queues_mut().iter_mut().enumerate() {
            queue.publish().expect("a kick can be sent");
            queue.poll().expect("the device keeps to the protocol");
            while let Some(done) = queue.reap().expect("the device keeps to the protocol") {
                assert_eq!(done.status, BlkStatus::Ok);
                let now = log.position();
                match sent.remove(&(at, done.user_data)).expect("answered once") {
                    Sent::Flush(promise) => history.complete_flush(promise, now),
                    Sent::Change { write, block, discard } => {
                        busy[block as usize] = false;
                        history.complete_write(write, !writeback && !discard, now);
                    }
                }
                free[at].push(done.user_data);
                ended += 1;
            }
        }
        if ended == before {
            set.wait(1).expect("a call comes");
        }
    }
    rig.stop(sets);
    history
}

/// Submits a write, zeroes or a discard within a block.
fn change(
    queue: &mut BlkQueue,
    slot: u32,
    block: u64,
    stamp: u64,
    history: &mut WriteHistory,
    log: &PowerLog,
    random: &mut SmallRng,
) -> Sent {
    let kind = random.random_range(0..20);
    let from = random.random_range(0..BLOCK_SECTORS);
    // A discard of a part of a cluster of qcow2 does nothing.
    let (from, count) =
        if kind == 1 { (0, BLOCK_SECTORS) } else { (from, random.random_range(1..=BLOCK_SECTORS - from)) };
    let first = block * BLOCK_SECTORS + from;
    let range = [SectorRange { start: Sector512(first), sectors: count as u32, unmap: false }];
    let write = history.send(first, count, if kind < 2 { 0 } else { stamp }, log.position());
    match kind {
        0 => queue.write_zeroes(slot, &range).expect("the ring has room"),
        1 => queue.discard(slot, &range).expect("the ring has room"),
        _ => {
            let address = GuestAddress(queue.data().0.0 + u64::from(slot) * BLOCK_SECTORS * SECTOR as u64);
            let data: Vec<u8> =
                (first..first + count).flat_map(|sector| WriteHistory::content(sector, stamp)).collect();
            queue.memory().write(address, &data).expect("mapped");
            let piece = DataSegment { address, len: data.len() as u32 };
            queue.write(slot, Sector512(first), piece).expect("the ring has room");
        }
    }
    Sent::Change { write, block, discard: kind == 1 }
}

#[test]
fn a_flush_holds_over_several_queues() {
    let (log, history) = load(true);
    assert!(history.guaranteed_writes(log.position()) > 1000, "most writes were flushed");
    none(&faults(&log, &history, CacheModel::Honest));
    let lost = faults(&log, &history, CacheModel::IgnoresFlushFrom(0));
    assert!(!lost.is_empty(), "a disk that ignores flushes was not seen");
}

#[test]
fn a_write_through_disk_keeps_completed_writes() {
    let (log, history) = load(false);
    none(&faults(&log, &history, CacheModel::Honest));
    let lost = faults(&log, &history, CacheModel::IgnoresDurable);
    assert!(!lost.is_empty(), "a disk that ignores write-through was not seen");
}

/// Stamp of the backing file's content.
const BELOW: u64 = u64::MAX;
/// Bytes of a qcow2 image file: its tables, and clusters that are released and reallocated.
const IMAGE_SIZE: usize = 4 << 20;
const IMAGE_CUTS: u64 = 60;

fn qemu_img(arguments: &[&str]) -> Output {
    let output = Command::new("qemu-img").args(arguments).output();
    output.unwrap_or_else(|error| panic!("qemu-img: {error}; apt-get install qemu-utils"))
}

/// Makes this daemon or QEMU repair an image's refcounts, as at a first open. Returns the faults that remain.
fn repair(image: &str, by_qemu: bool) -> Option<String> {
    // The dirty bit (incompatible_features, docs/interop/qcow2.rst of QEMU) allows refcounts to be late.
    let is_dirty = std::fs::read(image).expect("the image")[79] & 1 == 1;
    let before = qemu_img(&["check", "-f", "qcow2", image]);
    if !is_dirty && before.status.code() != Some(0) {
        return Some(format!("not marked dirty: {before:?}"));
    }
    if by_qemu {
        qemu_img(&["check", "-f", "qcow2", "-r", "all", image]);
    } else if let Err(error) = try_disk("qcow2", &[("path", image), ("backing", "allow")]) {
        return Some(format!("{before:?}, then {error}"));
    }
    // 3: clusters without a reference, which a cut may leave.
    let after = qemu_img(&["check", "-f", "qcow2", image]);
    (!matches!(after.status.code(), Some(0 | 3))).then(|| format!("by QEMU {by_qemu}: {before:?}, then {after:?}"))
}

/// Returns the faults that QEMU's programs find in the images of cuts after `from`, and the missing data of the disk.
fn image_faults(log: &PowerLog, from: Position, history: &WriteHistory, cache: CacheModel) -> Vec<String> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let [image, raw] = ["image", "raw"].map(|name| folder.path().join(name).display().to_string());
    let mut random = SmallRng::seed_from_u64(12);
    let mut faults = vec![];
    for seed in 0..IMAGE_CUTS {
        let at = random.random_range(from..=log.position());
        std::fs::write(&image, log.cut(0, IMAGE_SIZE, at, cache, seed)).expect("the image");
        if let Some(fault) = repair(&image, seed % 2 == 0) {
            faults.push(format!("cut at {at}, seed {seed}: {fault}"));
            continue;
        }
        let converted = qemu_img(&["convert", "-f", "qcow2", "-O", "raw", &image, &raw]);
        assert!(converted.status.success(), "{converted:?}");
        faults.extend(history.faults(&std::fs::read(&raw).expect("the disk"), at));
    }
    faults
}

/// The daemon's requests to the kernel are recorded: data and tables of the image, in their order.
#[test]
#[ignore = "needs root"]
fn as_root_a_qcow2_image_is_whole_after_each_cut_and_has_what_was_flushed() {
    // A cluster is a block of the load, so that most writes allocate; or a sector, with a table for each 32 KiB.
    for (cluster, writeback, backing) in [("4k", true, 0), ("4k", false, 0), ("512", true, 0), ("4k", true, BELOW)] {
        let log = Arc::<PowerLog>::default();
        let mount = PowerMount::new(&log, &[("image", IMAGE_SIZE), ("marks", SECTOR)]).expect("a mount");
        let folder = tempfile::tempdir().expect("a temporary folder");
        let empty = folder.path().join("empty").display().to_string();
        let below = folder.path().join("below").display().to_string();
        let sectors = 0..(SIZE / SECTOR) as u64;
        let content: Vec<u8> = sectors.flat_map(|sector| WriteHistory::content(sector, backing)).collect();
        std::fs::write(&below, content).expect("the backing file");
        let (shape, size) = (format!("cluster_size={cluster}"), SIZE.to_string());
        let mut words = vec!["create", "-q", "-f", "qcow2", "-o", &shape];
        if backing != 0 {
            words.extend(["-b", &below, "-F", "raw"]);
        }
        words.extend([empty.as_str(), &size]);
        let created = qemu_img(&words);
        assert!(created.status.success(), "{created:?}");
        let path = mount.path("image");
        let file = File::options().write(true).open(&path).expect("the image");
        file.write_all_at(&std::fs::read(&empty).expect("the empty image"), 0).expect("space");
        file.sync_all().expect("its content");
        drop(file);
        let from = log.position();
        let disk = disk("qcow2", &[("path", path.to_str().expect("plain text")), ("backing", "allow")]);
        let history = load_disk(disk, &log, writeback, WriteHistory::of_disk_with(backing));
        let faults = image_faults(&log, from, &history, CacheModel::Honest);
        let shape = format!("clusters of {cluster}, writeback {writeback}, backing {backing}");
        none(&faults.into_iter().map(|fault| format!("{shape}: {fault}")).collect::<Vec<_>>());
        let lost = image_faults(&log, from, &history, CacheModel::IgnoresFlushFrom(from));
        assert!(!lost.is_empty(), "a disk that ignores flushes was not seen");
    }
}

#[test]
fn a_scsi_write_with_fua_is_kept_and_one_without_by_the_next_flush() {
    let log = Arc::<PowerLog>::default();
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a temporary folder");
    let place = LunAddress { target: 0, lun: 0 };
    let disk = recorded(folder.path(), &log);
    let mut controller = SteppedController::new(1, 1, &[(place, disk, PlugOptions::default())]);
    controller.clear_unit_attentions(&[place]);
    let (mut history, mut random) = (WriteHistory::default(), SmallRng::seed_from_u64(6));
    for stamp in 1..=1000 {
        if random.random_bool(0.03) {
            let promise = history.send_flush();
            let outcome = controller.run_command(place, &[0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0], CommandData::None);
            assert_eq!(outcome.status, 0, "{outcome:?}");
            history.complete_flush(promise, log.position());
            continue;
        }
        let (first, count) = (random.random_range(0..(BLOCKS - 1) * BLOCK_SECTORS), random.random_range(1..=8));
        let fua = random.random_bool(0.2);
        let data: Vec<u8> = (first..first + count).flat_map(|sector| WriteHistory::content(sector, stamp)).collect();
        let [a, b, c, d] = (first as u32).to_be_bytes();
        let write = history.send(first, count, stamp, log.position());
        // WRITE (10); FUA is bit 3 of byte 1. Source: SBC-4 section 5.41.
        let cdb = [0x2a, u8::from(fua) << 3, a, b, c, d, 0, 0, count as u8, 0];
        let outcome = controller.run_command(place, &cdb, CommandData::Out(&data));
        assert_eq!(outcome.status, 0, "{outcome:?}");
        history.complete_write(write, fua, log.position());
    }
    none(&faults(&log, &history, CacheModel::Honest));
    for cache in [CacheModel::IgnoresFlushFrom(0), CacheModel::IgnoresDurable] {
        assert!(!faults(&log, &history, cache).is_empty(), "{cache:?} was not seen");
    }
}
