//! A virtio guest that verifies its data while its backend is killed repeatedly: between turns, and within them,
//! between two requests of a pull, before and after a submission, a completion, a finish and a publish, sometimes with
//! other workers that survive for a while. Each time another backend resumes the rings and replays the in-flight
//! tables. The storage completes out of order and in parts. Requests overlap, are merged, have several steps, and are
//! cancelled. Always:
//!
//! * every request completes exactly once;
//! * a read returns data that the order of requests and completions allows, to the sector, and so does the disk at the
//!   end;
//! * nothing changes a sector after the last request for it has completed;
//! * the number of successful COMPARE AND WRITEs of a counter is its value.
//!
//! `MQBLK_VIRTIO_CRASH_SEEDS=600` runs more seeds, `MQBLK_VIRTIO_CRASH_SEED=7` one. The tests of
//! `crates/ring/src/split/inflight` and of `packed` beside it test kills between two stores of a table.

use std::cell::RefCell;
use std::ops::Range;
use std::process::Command;
use std::rc::Rc;
use std::sync::Arc;

use crate::crash_rig::port::{Blk, Form, Guest, Scsi, place};
use crate::crash_rig::store::StoreCounts;
use crate::crash_rig::{Counts, MakeDevice, RING, Shape, World};
use mqblk_core::{ByteLen, DiskSlot};
use mqblk_engine::AnyDisk;
use mqblk_ring::virtqueue::RingFormat;
use mqblk_scsi::Nexus;
use mqblk_tests::crash::load::{CrashLoad, DISK_SECTORS, LoadControl, LoadHistory};
use mqblk_tests::crash::stats::CrashStats;
use mqblk_tests::stepped_scsi::logical_unit;
use mqblk_virtio_blk::{BlkOptions, VirtioBlk};
use mqblk_virtio_scsi::{ScsiOptions, VirtioScsi};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use crate::harness::seeds::{Counts as _, run_seeds};
use crate::harness::storage::{ChannelCounts, any_plug};

/// Steps of a seed's world.
const STEPS: u64 = 6000;
/// One of these has detected a critical section that was left before its completion was visible.
const SEEDS: Range<u64> = 100..124;

/// Coverage of a run: counters of the load, the world, the storage, and the channels.
type Covered = ((CrashStats, Counts), (StoreCounts, ChannelCounts));

/// The run of one seed.
fn run<F: Form>(
    (seed, format): (u64, RingFormat),
    form: F,
    disks: usize,
    queues: u16,
    make: MakeDevice<F::Device>,
    heard: Heard,
) -> Covered {
    let mut random = SmallRng::seed_from_u64(seed);
    let shape = Shape {
        make,
        heard,
        workers: random.random_range(1..=3),
        disks,
        sectors: DISK_SECTORS,
        plug: any_plug(&mut random),
        memory: Guest::<F>::bytes(queues.into()),
        format,
    };
    let shared = Arc::new(LoadControl::default());
    let guest = Guest::new(form, World::new(shape, seed), STEPS, &shared);
    let load = CrashLoad::new(&format!("seed {seed}"), guest, LoadHistory::new(disks), &shared, seed);
    let (mut history, guest) = load.run();
    let mut stores = StoreCounts::default();
    for (disk, store) in guest.world.stores.iter().enumerate() {
        if let Err(why) = history.check_disk(disk, &store.bytes()) {
            panic!("disk {disk}: {why}");
        }
        stores.add(&store.counts());
    }
    ((history.stats, guest.world.counts), (stores, guest.world.stinginess.counts()))
}

type Heard = Box<dyn Fn()>;

#[test]
fn a_killed_block_device_loses_nothing_and_completes_nothing_twice() {
    killed_block_device(RingFormat::Split);
}

#[test]
fn a_killed_block_device_with_packed_rings_loses_nothing_and_completes_nothing_twice() {
    killed_block_device(RingFormat::Packed);
}

fn run_block_device(seed: u64, format: RingFormat) -> Covered {
    let queues = 1 + seed as u16 % 3;
    let options = BlkOptions { serial: "crash".to_owned(), queues, queue_size: RING, writeback: true };
    let make =
        move |disks: &[Arc<AnyDisk>]| Arc::new(VirtioBlk::new(disks[0].geometry(), disks[0].limits(), options.clone()));
    run((seed, format), Blk, 1, queues, Box::new(make), Box::new(|| {}))
}

fn killed_block_device(format: RingFormat) {
    let sum = run_seeds("VIRTIO_CRASH", SEEDS, |seed| run_block_device(seed, format));
    // The simulation is not trivial.
    let Some(((figures, counts), (stores, channels))) = sum else { return };
    let met = [counts.kills, counts.stops, counts.outlived, channels.merged, channels.refused, stores.late];
    assert!(met.iter().all(|met| *met > 20), "{counts:?} {stores:?} {channels:?}");
    assert!(counts.kills_in_midst > 200 && counts.replayed > 1000 && figures.requests > 10_000, "{counts:?}");
}

#[test]
fn a_killed_controller_loses_nothing_and_completes_nothing_twice() {
    killed_controller(RingFormat::Split);
}

#[test]
fn a_killed_controller_with_packed_rings_loses_nothing_and_completes_nothing_twice() {
    killed_controller(RingFormat::Packed);
}

fn run_controller(seed: u64, format: RingFormat) -> Covered {
    let queues = 1 + seed as u16 % 3;
    let options = ScsiOptions { queues, queue_size: RING, cmd_per_lun: 16, max_transfer: ByteLen(1 << 20) };
    let nexuses: Rc<RefCell<Vec<Arc<Nexus>>>> = Rc::default();
    let known = Rc::clone(&nexuses);
    let make = move |disks: &[Arc<AnyDisk>]| {
        known.borrow_mut().clear();
        let controller = Arc::new(VirtioScsi::new(options));
        for (at, disk) in disks.iter().enumerate() {
            let nexus = logical_unit(&**disk, &at.to_string()).login("guest", 1).expect("a name that is free");
            known.borrow_mut().push(Arc::clone(&nexus));
            controller.map(place(at), DiskSlot(at as u16), nexus).expect("a free place");
        }
        controller
    };
    let heard = move || nexuses.borrow().iter().for_each(|nexus| nexus.initiator_resumed(true));
    run((seed, format), Scsi, 3, queues, Box::new(make), Box::new(heard))
}

fn killed_controller(format: RingFormat) {
    let sum = run_seeds("VIRTIO_CRASH", SEEDS, |seed| run_controller(seed, format));
    let Some(((figures, counts), (stores, channels))) = sum else { return };
    let [late, cancelled, refused] = [stores.late, stores.cancelled, channels.refused];
    let met = [counts.kills, counts.stops, counts.outlived, counts.noted, late, cancelled, refused];
    assert!(met.iter().all(|met| *met > 20), "{counts:?} {stores:?} {channels:?}");
    assert!(counts.kills_in_midst > 200 && counts.replayed > 1000 && figures.requests > 10_000, "{counts:?}");
    assert!(figures.compare_writes > 200 && figures.cancelled > 20, "{figures:?}");
}

/// Set in the process that counts its descriptors.
const COUNTS: &str = "MQBLK_COUNT_DESCRIPTORS";

/// Each killed backend has workers, and each worker has descriptors.
#[test]
fn a_killed_backend_leaves_no_descriptors_behind() {
    if std::env::var_os(COUNTS).is_none() {
        // Other tests of this process open and close descriptors at the same time.
        let mut alone = Command::new(std::env::current_exe().expect("this program's path"));
        let name = "virtio_crash::a_killed_backend_leaves_no_descriptors_behind";
        let output = alone.args(["--exact", name, "--nocapture"]).env(COUNTS, "1").output().expect("this program");
        let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
        return;
    }
    let open = || std::fs::read_dir("/proc/self/fd").expect("/proc/self/fd").count();
    let run_both = |seed| {
        let ((_, controller), _) = run_controller(seed, RingFormat::Split);
        let ((_, block_device), _) = run_block_device(seed, RingFormat::Packed);
        [controller, block_device].iter().map(|counts| counts.kills + counts.kills_in_midst).sum::<u64>()
    };
    // The first run opens descriptors that the process keeps.
    run_both(SEEDS.start);
    let before = open();
    let kills: u64 = (SEEDS.start + 1..SEEDS.start + 6).map(run_both).sum();
    assert!(kills > 100, "{kills} kills");
    assert_eq!(open(), before, "descriptors after {kills} kills, and before");
}
