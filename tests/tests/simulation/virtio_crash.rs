//! A virtio guest that verifies its data while its backend is killed, again and again: between turns, and within them, between two requests
//! of a pull, before and after a submission, a completion, a finish and a publish; sometimes with other workers that live on for a while.
//! Each time another backend resumes the rings and replays the in-flight tables. The storage completes out of order and in parts, requests
//! overlap, are merged, have several steps, and are cancelled. Whatever happens:
//!
//! * every request completes exactly once;
//! * a read returns what the order of requests and completions allows, to the sector, and so does the disk in the end;
//! * nothing changes a sector after the last request for it has completed;
//! * as many COMPARE AND WRITEs of a counter succeed as it counts.
//!
//! `MQBLK_VIRTIO_CRASH_SEEDS=600` runs more seeds, `MQBLK_VIRTIO_CRASH_SEED=7` one. `ring/src/split/inflight/tests.rs` tests kills between
//! two stores of a table.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use crate::crash_rig::port::{Blk, Form, Guest, Scsi, place};
use crate::crash_rig::store::Seen;
use crate::crash_rig::{Counts, MakeDevice, RING, Shape, World};
use mqblk_core::{ByteLen, DiskSlot};
use mqblk_engine::{AnyDisk, MergeMode, PlugOptions};
use mqblk_scsi::Nexus;
use mqblk_tests::crash::load::{CrashLoad, DISK_SECTORS, LoadControl, LoadHistory};
use mqblk_tests::crash::stats::{CrashStats, print_uncaptured};
use mqblk_tests::stepped_scsi::logical_unit;
use mqblk_virtio_blk::{BlkOptions, VirtioBlk};
use mqblk_virtio_scsi::{ScsiOptions, VirtioScsi};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

/// Steps of a seed's world.
const STEPS: u64 = 6000;
/// The first seed.
const FIRST: u64 = 100;

#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    figures: CrashStats,
    counts: Counts,
    seen: Seen,
}

impl Sum {
    fn add(&mut self, other: &Sum) {
        self.figures.add(&other.figures);
        let (counts, more) = (&mut self.counts, &other.counts);
        counts.kills += more.kills;
        counts.kills_in_midst += more.kills_in_midst;
        counts.outlived += more.outlived;
        counts.stops += more.stops;
        counts.replayed += more.replayed;
        counts.noted += more.noted;
        let (seen, more) = (&mut self.seen, &other.seen);
        seen.requests += more.requests;
        seen.merged += more.merged;
        seen.refused += more.refused;
        seen.cancelled += more.cancelled;
        seen.late += more.late;
    }
}

fn plug(random: &mut SmallRng) -> PlugOptions {
    let merge = if random.random() { MergeMode::On } else { MergeMode::Off };
    let depth = if random.random() { 0 } else { random.random_range(1..12) };
    PlugOptions { merge, depth, ..PlugOptions::default() }
}

/// The run of one seed.
fn run<F: Form>(seed: u64, form: F, disks: usize, queues: u16, make: MakeDevice<F::Device>, heard: Heard) -> Sum {
    let mut random = SmallRng::seed_from_u64(seed);
    let shape = Shape {
        make,
        heard,
        workers: random.random_range(1..=3),
        disks,
        sectors: DISK_SECTORS,
        plug: plug(&mut random),
        memory: Guest::<F>::bytes(queues.into()),
    };
    let shared = Arc::new(LoadControl::default());
    let guest = Guest::new(form, World::new(shape, seed), STEPS, &shared);
    let load = CrashLoad::new(&format!("seed {seed}"), guest, LoadHistory::new(disks), &shared, seed);
    let (mut history, guest) = load.run();
    let mut sum = Sum { counts: guest.world.counts, ..Sum::default() };
    for (disk, store) in guest.world.stores.iter().enumerate() {
        if let Err(why) = history.check_disk(disk, &store.bytes()) {
            panic!("seed {seed}: disk {disk}: {why}");
        }
        sum.add(&Sum { seen: store.seen(), ..Sum::default() });
    }
    sum.figures = history.stats;
    sum
}

type Heard = Box<dyn Fn()>;

/// Prints the seed when its world panics.
struct ToldOnPanic(u64);

impl Drop for ToldOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            print_uncaptured(&format!("MQBLK_VIRTIO_CRASH_SEED={}", self.0));
        }
    }
}

fn seeds(usual: u64, run: impl Fn(u64) -> Sum) -> Option<Sum> {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number"));
    let seeds = match number("MQBLK_VIRTIO_CRASH_SEED") {
        Some(seed) => seed..seed + 1,
        // One of these has detected a critical section that was left before its completion was visible.
        None => FIRST..FIRST + number("MQBLK_VIRTIO_CRASH_SEEDS").unwrap_or(usual),
    };
    let whole = seeds.end - seeds.start >= usual;
    let mut sum = Sum::default();
    for seed in seeds {
        let _told = ToldOnPanic(seed);
        sum.add(&run(seed));
    }
    print_uncaptured(&format!("{sum:?}"));
    whole.then_some(sum)
}

#[test]
fn a_killed_block_device_loses_nothing_and_completes_nothing_twice() {
    let sum = seeds(24, |seed| {
        let queues = 1 + seed as u16 % 3;
        let options = BlkOptions { serial: "crash".to_owned(), queues, queue_size: RING, writeback: true };
        let make = move |disks: &[Arc<AnyDisk>]| {
            Arc::new(VirtioBlk::new(disks[0].geometry(), disks[0].limits(), options.clone()))
        };
        run(seed, Blk, 1, queues, Box::new(make), Box::new(|| {}))
    });
    // The simulation is not trivial.
    let Some(Sum { figures, counts, seen }) = sum else { return };
    let met = [counts.kills, counts.stops, counts.outlived, seen.merged, seen.refused, seen.late];
    assert!(met.iter().all(|met| *met > 20), "{counts:?} {seen:?}");
    assert!(counts.kills_in_midst > 200 && counts.replayed > 1000 && figures.requests > 10_000, "{counts:?}");
}

#[test]
fn a_killed_controller_loses_nothing_and_completes_nothing_twice() {
    let sum = seeds(24, |seed| {
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
        run(seed, Scsi, 3, queues, Box::new(make), Box::new(heard))
    });
    let Some(Sum { figures, counts, seen }) = sum else { return };
    let met = [counts.kills, counts.stops, counts.outlived, counts.noted, seen.refused, seen.late, seen.cancelled];
    assert!(met.iter().all(|met| *met > 20), "{counts:?} {seen:?}");
    assert!(counts.kills_in_midst > 200 && counts.replayed > 1000 && figures.requests > 10_000, "{counts:?}");
    assert!(figures.compare_writes > 200 && figures.cancelled > 20, "{figures:?}");
}
