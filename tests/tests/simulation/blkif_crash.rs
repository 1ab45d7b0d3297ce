//! A Xen guest that verifies its data while its backend is killed repeatedly: between turns, and within them, wherever
//! the backend accesses the guest's pages, its event channel, another worker or the storage. Each time another backend
//! resumes the rings and replays the journals. The storage completes out of order, and several workers serve the rings.
//! Always:
//!
//! * every request gets exactly one response;
//! * written data stays, and is read back, to the byte;
//! * when a barrier has its response, so has every request that was published on any ring before it.
//!
//! `MQBLK_BLKIF_SEEDS=600` runs more seeds, `MQBLK_BLKIF_SEED=7` one.

use std::collections::HashMap;

use crate::blkif_rig::front::{direct, indirect, segment};
use crate::blkif_rig::{Host, PAGE, Shape, World};
use mqblk_blkif::GrantMode;
use mqblk_ring::blkif::{Abi, Segment, operation as o, status};
use mqblk_tests::crash::oracle::WriteOutcome;
use mqblk_tests::load_queues::SectorRange;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use crate::harness::disk_model::{DiskModel, contents};
use crate::harness::seeds::{Simulation, counters, run_seeds};
use crate::harness::storage::{any_merge, late_disk};

const SECTOR: u64 = mqblk_core::units::SECTOR_BYTES;
const SECTORS: u64 = 2048;
/// Most requests of the guest on a ring.
const SLOTS: u32 = 24;
/// Pages of a request's data; one more is for its segments.
const DATA_PAGES: u32 = 16;
const SLOT_PAGES: u32 = DATA_PAGES + 1;
const UNKNOWN: u8 = 77;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Read,
    Write,
    Flush,
    Barrier,
    /// An unknown operation.
    Unknown,
    /// A read beyond the disk's end.
    Outside,
}

/// A segment of a request's data: a page, and sectors of it.
type Piece = (u32, Segment);

#[derive(Clone, Debug)]
struct Sent {
    ring: usize,
    slot: u32,
    work: Work,
    sector: u64,
    pieces: Vec<Piece>,
    /// The operation of its response.
    operation: u8,
    /// The first step in which the backend could see it.
    shown: u64,
}

/// Later than all steps.
const NOT_SHOWN: u64 = u64::MAX;

impl Sent {
    /// Returns its sectors of the disk.
    fn range(&self) -> [SectorRange; 1] {
        [(self.sector, self.pieces.iter().map(|(_, segment)| sectors_of(segment)).sum())]
    }

    fn writes(&self) -> bool {
        matches!(self.work, Work::Write | Work::Barrier)
    }
}

fn sectors_of(segment: &Segment) -> u32 {
    u32::from(segment.last_sect - segment.first_sect) + 1
}

counters! { struct Counts { completed, barriers, kills, kills_in_midst, clean, replayed } }

struct KilledBackends {
    random: SmallRng,
    world: World,
    host: Option<Host>,
    /// Keyed by identifier, which increases.
    sent: HashMap<u64, Sent>,
    next: u64,
    time: u64,
    free: Vec<Vec<u32>>,
    model: DiskModel,
    counts: Counts,
}

impl KilledBackends {
    fn new(seed: u64) -> KilledBackends {
        let mut random = SmallRng::seed_from_u64(seed);
        let modes = [GrantMode::Copy, GrantMode::Map, GrantMode::Persistent];
        let shape = Shape {
            rings: random.random_range(1..=4),
            workers: random.random_range(1..=3),
            ring_pages: 1 << random.random_range(0..2),
            abi: Abi::ALL[random.random_range(0..3_usize)],
            mode: modes[seed as usize % modes.len()],
            plug: any_merge(&mut random),
        };
        let disk = late_disk(&mut random, SECTORS * SECTOR);
        let rings = u32::from(shape.rings);
        let world = World::new(shape, rings * SLOTS * SLOT_PAGES, disk);
        let host = world.host();
        KilledBackends {
            random,
            host,
            sent: HashMap::new(),
            next: 1,
            time: 0,
            free: (0..rings).map(|_| (0..SLOTS).collect()).collect(),
            model: DiskModel::new(SECTORS, false),
            counts: Counts::default(),
            world,
        }
    }

    fn page(ring: usize, slot: u32, page: u32) -> u32 {
        (ring as u32 * SLOTS + slot) * SLOT_PAGES + page
    }

    /// Returns the segments of a request: mostly whole pages.
    fn pieces(&mut self, ring: usize, slot: u32, work: Work) -> Vec<Piece> {
        let none = matches!(work, Work::Flush | Work::Unknown | Work::Outside)
            || (work == Work::Barrier && self.random.random_ratio(1, 4));
        let most = if self.random.random_ratio(1, 4) { DATA_PAGES } else { 4 };
        let count = if none { 0 } else { self.random.random_range(1..=most) };
        let piece = |page: u32| {
            let page = KilledBackends::page(ring, slot, page);
            let first = self.random.random_range(0..8);
            let whole = self.random.random_ratio(2, 3);
            let (first, last) = if whole { (0, 7) } else { (first, self.random.random_range(first..8)) };
            (page, segment(page, first, last))
        };
        (0..count).map(piece).collect()
    }

    fn send(&mut self) {
        let ring = self.random.random_range(0..self.world.fronts.len());
        let Some(slot) = self.free[ring].pop() else { return };
        let work = match self.random.random_range(0..40) {
            0..14 => Work::Read,
            14..34 => Work::Write,
            34..37 => Work::Flush,
            37 => Work::Unknown,
            38 => Work::Outside,
            _ => Work::Barrier,
        };
        let pieces = self.pieces(ring, slot, work);
        // Only reads and writes have an indirect form.
        let is_plain = matches!(work, Work::Read | Work::Write);
        if pieces.len() > 11 && !is_plain {
            self.free[ring].push(slot);
            return;
        }
        let sectors = pieces.iter().map(|(_, segment)| u64::from(sectors_of(segment))).sum::<u64>();
        let sector = self.random.random_range(0..=SECTORS - sectors);
        let id = self.next;
        let operation = match work {
            Work::Read => o::READ,
            Work::Write => o::WRITE,
            Work::Flush => o::FLUSH_DISKCACHE,
            Work::Barrier => o::WRITE_BARRIER,
            Work::Unknown => UNKNOWN,
            Work::Outside => o::READ,
        };
        let sent = Sent { ring, slot, work, sector, pieces, operation, shown: NOT_SHOWN };
        let may_overlap = match sent.writes() {
            true => self.model.send_write(id, id, &sent.range()),
            false => self.model.send_read(id, &sent.range()),
        };
        if !may_overlap {
            self.free[ring].push(slot);
            return;
        }
        self.next += 1;
        self.fill(id, &sent);
        let segments: Vec<Segment> = sent.pieces.iter().map(|(_, segment)| *segment).collect();
        let front = &mut self.world.fronts[ring];
        if segments.len() > 11 || (is_plain && self.random.random_ratio(1, 4)) {
            let page = KilledBackends::page(ring, slot, DATA_PAGES);
            front.write_segments(&segments, &[(page, page)]);
            front.put(&indirect(id, operation, sector, segments.len() as u16, &[page]));
        } else {
            let at = if work == Work::Outside { SECTORS } else { sector };
            let nowhere = [segment(0, 0, 0)];
            front.put(&direct(id, operation, at, if work == Work::Outside { &nowhere } else { &segments }));
        }
        self.sent.insert(id, sent);
    }

    /// Fills the request's pages: with the data of a write, or, for a read, with data that is never written.
    fn fill(&self, id: u64, sent: &Sent) {
        let mut bytes = contents(id, &sent.range());
        if !sent.writes() {
            bytes.fill(0xee);
        }
        let mut rest = &bytes[..];
        for (page, segment) in &sent.pieces {
            let bytes = rest.split_off(..(u64::from(sectors_of(segment)) * SECTOR) as usize).expect("enough");
            self.world.domain.write(*page, u64::from(segment.first_sect) * SECTOR, bytes);
        }
    }

    fn publish(&mut self) {
        for (ring, front) in self.world.fronts.iter_mut().enumerate() {
            let _polled = front.ring.publish();
            self.time += 1;
            for sent in self.sent.values_mut().filter(|sent| sent.ring == ring && sent.shown == NOT_SHOWN) {
                sent.shown = self.time;
            }
        }
    }

    /// Takes all responses of all rings, and checks the barriers among them.
    fn reap(&mut self) {
        let barriers = self.take_responses();
        for (id, sent) in &barriers {
            self.check_barrier(*id, sent, &barriers);
        }
    }

    /// Takes all responses of all rings once. Returns the barriers among them.
    fn take_responses(&mut self) -> Vec<(u64, Sent)> {
        let mut barriers = vec![];
        for ring in 0..self.world.fronts.len() {
            for (id, operation, status) in self.world.fronts[ring].responses() {
                let sent = self.sent.remove(&id);
                let sent = sent.unwrap_or_else(|| panic!("{id} is completed again, or was never sent"));
                let expected = match sent.work {
                    Work::Unknown => status::NOT_SUPPORTED,
                    Work::Outside => status::ERROR,
                    _ => status::OKAY,
                };
                let response = (sent.ring, sent.operation, expected);
                assert_eq!((ring, operation, status), response, "{id} {sent:?}");
                self.learn(id, &sent);
                self.free[ring].push(sent.slot);
                self.counts.completed += 1;
                if sent.work == Work::Barrier {
                    barriers.push((id, sent));
                }
            }
        }
        self.counts.barriers += barriers.len() as u64;
        barriers
    }

    /// Checks a completed barrier, like those in `completed`: every request before it must have a response.
    fn check_barrier(&self, barrier: u64, sent: &Sent, completed: &[(u64, Sent)]) {
        let earlier = self.sent.iter().filter(|(id, other)| match other.ring == sent.ring {
            true => **id < barrier,
            false => other.shown < sent.shown,
        });
        for (id, left) in earlier {
            // Requests that wait, or waited then, behind a barrier of their own ring come after it.
            let is_before = |before: u64, by: &Sent| by.ring == left.ring && by.work == Work::Barrier && before <= *id;
            let behind = self.sent.iter().any(|(before, by)| is_before(*before, by))
                || completed.iter().any(|(before, by)| *before != barrier && is_before(*before, by));
            assert!(behind, "barrier {barrier} {sent:?} was completed before {id} {left:?}");
        }
    }

    fn learn(&mut self, id: u64, sent: &Sent) {
        if sent.writes() {
            return self.model.complete_write(id, &sent.range(), WriteOutcome::Completed);
        }
        let piece = |(page, segment): &Piece| {
            let (at, len) = (u64::from(segment.first_sect) * SECTOR, u64::from(sectors_of(segment)) * SECTOR);
            self.world.domain.read(*page, at, len)
        };
        let found: Vec<u8> = sent.pieces.iter().flat_map(piece).collect();
        self.model.complete_read(id, &sent.range(), Some(&found));
    }

    /// Kills the backend and starts another one.
    fn replace_backend(&mut self) {
        self.world.drop_killed(self.host.take().expect("a backend"));
        self.start_backend();
    }

    fn start_backend(&mut self) {
        // The next backend may also be killed here.
        while self.host.is_none() {
            if self.random.random_ratio(1, 6) {
                self.world.kill.arm(self.random.random_range(0..8));
            }
            self.host = self.world.host();
            self.counts.kills_in_midst += u64::from(self.host.is_none());
        }
        self.counts.replayed += self.host.as_ref().map_or(0, |host| host.replayed.iter().sum::<usize>() as u64);
    }

    fn turn(&mut self) {
        let worker = self.random.random_range(0..self.world.shape.workers);
        let host = self.host.as_mut().expect("a back end");
        let survived = host.turn(worker).is_some();
        assert!(host.broken.lock().is_ok_and(|broken| broken.is_empty()), "a good ring is broken");
        if !survived {
            self.counts.kills_in_midst += 1;
            self.replace_backend();
        }
    }

    /// Checks that all data reported as written is on the disk.
    fn check_disk(&mut self) {
        let pages = (PAGE / SECTOR) as usize;
        for first in (0..SECTORS).step_by(pages) {
            let id = self.next;
            self.next += 1;
            let page = KilledBackends::page(0, 0, 0);
            let sent = Sent {
                ring: 0,
                slot: self.free[0].pop().expect("nothing is in flight"),
                work: Work::Read,
                sector: first,
                pieces: vec![(page, segment(page, 0, 7))],
                operation: o::READ,
                shown: NOT_SHOWN,
            };
            self.world.fronts[0].put(&direct(id, o::READ, first, &[sent.pieces[0].1]));
            self.model.send_read(id, &sent.range());
            self.sent.insert(id, sent);
            self.publish();
            self.settle_all();
        }
    }
}

impl Simulation for KilledBackends {
    type Counts = Counts;
    const STEPS: u32 = 1200;

    fn step(&mut self) {
        match self.random.random_range(0..1000) {
            0..350 => self.send(),
            350..450 => self.publish(),
            450..890 => self.turn(),
            890..985 => self.reap(),
            985..990 => {
                self.counts.kills += 1;
                self.replace_backend();
            }
            990..998 => self.world.kill.arm(self.random.random_range(0..60)),
            _ => {
                // After an orderly stop the next backend has nothing to replay, only requests on the rings.
                self.reap();
                let drained = self.host.as_mut().is_some_and(Host::drain);
                // A pulled barrier is executed; requests on other rings are left to the next backend.
                self.take_responses();
                self.counts.clean += u64::from(drained);
                self.replace_backend();
            }
        }
    }

    fn settle(&mut self) {
        self.publish();
        self.turn();
        self.reap();
    }

    fn in_flight(&self) -> usize {
        self.sent.len()
    }

    fn finish(mut self) -> Counts {
        self.check_disk();
        self.counts
    }
}

#[test]
fn a_killed_backend_loses_nothing_and_completes_nothing_twice() {
    let Some(sum) = run_seeds("BLKIF", 0..60, |seed| KilledBackends::new(seed).run()) else { return };
    // The simulation is not trivial.
    let useful =
        sum.kills > 100 && sum.kills_in_midst > 100 && sum.replayed > 1000 && sum.barriers > 100 && sum.clean > 20;
    assert!(useful, "{sum:?}");
}
