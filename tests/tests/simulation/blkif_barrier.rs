//! Write barriers of a Xen disk with several rings, as the storage sees them. Several workers serve the rings in any
//! order, the storage is slow and completes out of order, and rings close and break during barriers. For every barrier:
//!
//! * requests published before it, on its own ring or on another ring without a barrier before them there, have
//!   completed before it begins;
//! * no other request is at the storage while it is written and flushed, and its response comes after that;
//! * requests behind it on its ring, and requests published on any ring after its response, begin later;
//! * no request waits for ever.
//!
//! `MQBLK_BARRIER_SEEDS=600` runs more seeds, `MQBLK_BARRIER_SEED=7` one.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::blkif_rig::front::{direct, segment};
use crate::blkif_rig::{Host, Shape, World};
use mqblk_blkif::GrantMode;
use mqblk_core::{ByteLen, ByteOffset, Completion, DiskChannel, Op, Request, Tag};
use mqblk_engine::{AnyDisk, UringContext};
use mqblk_memory::Buffer;
use mqblk_ring::blkif::{Abi, operation as o, status};
use mqblk_tests::filter_disk::{AnyChannel, FilterDisk};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use crate::harness::seeds::{Simulation, counters, run_seeds};
use crate::harness::storage::{any_merge, late_disk};

const SECTOR: u64 = mqblk_core::units::SECTOR_BYTES;
/// Most requests of the guest on a ring; each writes one sector of its own page.
const SLOTS: u32 = 24;

/// Times at which a request was at the storage, in steps of its log.
#[derive(Clone, Copy, Debug)]
struct Stay {
    began: usize,
    ended: Option<usize>,
}

/// The log of the storage.
#[derive(Default)]
struct Log {
    now: usize,
    /// By sector: each is written once.
    writes: BTreeMap<u64, Stay>,
    flushes: Vec<Stay>,
}

impl Log {
    fn tick(&mut self) -> usize {
        self.now += 1;
        self.now
    }
}

/// A request at the storage.
#[derive(Clone, Copy)]
enum Running {
    Write { first: u64, sectors: u64 },
    Flush(usize),
}

/// A channel that logs the requests.
struct Recording {
    inner: AnyChannel,
    log: Arc<Mutex<Log>>,
    running: HashMap<Tag, Running>,
}

impl Recording {
    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().expect("one thread")
    }

    fn begin(&mut self, op: Op, start: ByteOffset, len: ByteLen, tag: Tag) {
        let mut log = self.log.lock().expect("one thread");
        let began = log.tick();
        let stay = Stay { began, ended: None };
        let running = match op {
            Op::Flush => {
                log.flushes.push(stay);
                Running::Flush(log.flushes.len() - 1)
            }
            Op::Write { .. } => {
                let (first, sectors) = (start.0 / SECTOR, len.0 / SECTOR);
                for sector in first..first + sectors {
                    assert!(log.writes.insert(sector, stay).is_none(), "sector {sector} is written twice");
                }
                Running::Write { first, sectors }
            }
            other => panic!("{other:?}"),
        };
        self.running.insert(tag, running);
    }

    fn end(&mut self, finished: &[Completion<Buffer>]) {
        for done in finished {
            let running = self.running.remove(&done.tag).expect("what ends was begun");
            let mut log = self.log();
            let now = log.tick();
            match running {
                Running::Flush(at) => log.flushes[at].ended = Some(now),
                Running::Write { first, sectors } => {
                    for (_, stay) in log.writes.range_mut(first..first + sectors) {
                        stay.ended = Some(now);
                    }
                }
            }
        }
    }
}

impl DiskChannel<UringContext> for Recording {
    fn submit(
        &mut self,
        context: &mut UringContext,
        batch: &mut Vec<Request<Buffer>>,
        finished: &mut Vec<Completion<Buffer>>,
    ) -> usize {
        let before = finished.len();
        let offered: Vec<_> =
            batch.iter().map(|request| (request.op, request.start, request.len, request.tag)).collect();
        let taken = self.inner.submit(context, batch, finished);
        // The rest is offered again.
        for (op, start, len, tag) in offered.into_iter().take(taken) {
            self.begin(op, start, len, tag);
        }
        self.end(&finished[before..]);
        taken
    }

    fn reap(&mut self, context: &mut UringContext, finished: &mut Vec<Completion<Buffer>>) -> usize {
        let before = finished.len();
        let count = self.inner.reap(context, finished);
        self.end(&finished[before..]);
        count
    }

    fn outstanding(&self) -> u32 {
        self.inner.outstanding()
    }

    fn deadline(&self) -> Option<std::time::Instant> {
        self.inner.deadline()
    }

    fn close(&mut self, context: &mut UringContext) {
        self.inner.close(context);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Write,
    Flush,
    Barrier,
}

/// A request. Its identifier, which increases, is also the sector that it writes.
#[derive(Clone, Copy, Debug)]
struct Sent {
    ring: usize,
    slot: u32,
    work: Work,
    /// The first time that the backend could see it, in steps of the guest and of the storage.
    shown: Option<(u64, usize)>,
    /// The time at which the guest saw the response, in steps of the storage.
    completed: Option<usize>,
}

counters! { struct Counts { barriers, earlier, later, closed, broken } }

struct Barriers {
    random: SmallRng,
    world: World,
    host: Host,
    log: Arc<Mutex<Log>>,
    sent: BTreeMap<u64, Sent>,
    time: u64,
    free: Vec<Vec<u32>>,
    /// Rings that are neither closed nor broken.
    open: Vec<bool>,
    /// Times at which rings were lost, in steps of the storage: requests on them are not executed.
    gone: Vec<usize>,
    barriers: u32,
    counts: Counts,
}

fn disk(random: &mut SmallRng, log: &Arc<Mutex<Log>>) -> Arc<AnyDisk> {
    let inner = late_disk(random, 4 << 20);
    let log = Arc::clone(log);
    Arc::new(FilterDisk::new(inner, move |inner| {
        Box::new(Recording { inner, log: Arc::clone(&log), running: HashMap::new() }) as AnyChannel
    }))
}

impl Barriers {
    fn new(seed: u64) -> Barriers {
        let mut random = SmallRng::seed_from_u64(seed);
        let modes = [GrantMode::Copy, GrantMode::Map, GrantMode::Persistent];
        let shape = Shape {
            rings: random.random_range(2..=4),
            workers: random.random_range(1..=3),
            ring_pages: 1,
            abi: Abi::ALL[random.random_range(0..3_usize)],
            mode: modes[seed as usize % modes.len()],
            plug: any_merge(&mut random),
        };
        let log = Arc::default();
        let disk = disk(&mut random, &log);
        let rings = usize::from(shape.rings);
        let world = World::new(shape, rings as u32 * SLOTS, disk);
        Barriers {
            host: world.host().expect("nobody kills it"),
            log,
            sent: BTreeMap::new(),
            time: 0,
            free: (0..rings).map(|_| (0..SLOTS).collect()).collect(),
            open: vec![true; rings],
            gone: vec![],
            barriers: random.random_range(4..40),
            random,
            world,
            counts: Counts::default(),
        }
    }

    fn ring(&mut self) -> usize {
        self.random.random_range(0..self.open.len())
    }

    fn now(&self) -> usize {
        self.log.lock().expect("one thread").now
    }

    fn send(&mut self) {
        let ring = self.ring();
        if !self.open[ring] {
            return;
        }
        let Some(slot) = self.free[ring].pop() else { return };
        let work = match self.random.random_range(0..self.barriers) {
            0 => Work::Barrier,
            1 => Work::Flush,
            _ => Work::Write,
        };
        let id = self.sent.len() as u64;
        let piece = [segment(ring as u32 * SLOTS + slot, 0, 0)];
        let request = match work {
            Work::Write => direct(id, o::WRITE, id, &piece),
            Work::Barrier => direct(id, o::WRITE_BARRIER, id, &piece),
            Work::Flush => direct(id, o::FLUSH_DISKCACHE, 0, &[]),
        };
        self.world.fronts[ring].put(&request);
        self.sent.insert(id, Sent { ring, slot, work, shown: None, completed: None });
    }

    fn publish(&mut self, ring: usize) {
        let _polled = self.world.fronts[ring].ring.publish();
        self.time += 1;
        let shown = Some((self.time, self.now()));
        for sent in self.sent.values_mut().filter(|sent| sent.ring == ring && sent.shown.is_none()) {
            sent.shown = shown;
        }
    }

    fn reap(&mut self, ring: usize) {
        let now = self.now();
        for (id, _, status) in self.world.fronts[ring].responses() {
            let sent = self.sent.get_mut(&id).expect("an answer to a request");
            assert!(sent.completed.is_none() && sent.ring == ring && status == status::OKAY, "{sent:?}");
            sent.completed = Some(now);
            self.free[ring].push(sent.slot);
        }
    }

    /// Closes or breaks a ring, unless it is the last one.
    fn lose(&mut self, ring: usize, breaks: bool) {
        if !self.open[ring] || self.open.iter().filter(|open| **open).count() == 1 {
            return;
        }
        self.open[ring] = false;
        self.gone.push(self.now());
        if breaks {
            let put = self.sent.values().filter(|sent| sent.ring == ring).count() as u32;
            let front = &mut self.world.fronts[ring].ring;
            front.publish_index(put + front.size() * 3);
            self.counts.broken += 1;
        } else {
            self.host.close(ring);
            self.counts.closed += 1;
        }
    }

    fn turn(&mut self) {
        let worker = self.random.random_range(0..self.world.shape.workers);
        self.host.turn(worker).expect("nobody kills it");
        let broken = self.host.broken.lock().expect("one thread").clone();
        assert!(broken.iter().all(|ring| !self.open[*ring]), "a good ring is broken");
    }

    /// Returns true if a request has a response, or was on a lost ring.
    fn is_over(&self, sent: &Sent) -> bool {
        sent.completed.is_some() || !self.open[sent.ring]
    }

    fn check(&mut self) {
        let log = Arc::clone(&self.log);
        let log = log.lock().expect("one thread");
        let barriers = self.sent.iter().filter(|(_, sent)| sent.work == Work::Barrier);
        let barriers: Vec<(u64, Sent)> = barriers.map(|(id, sent)| (*id, *sent)).collect();
        for (id, barrier) in &barriers {
            let Some(stay) = log.writes.get(id).copied() else {
                assert!(!self.open[barrier.ring], "barrier {id} was not written");
                continue;
            };
            self.check_barrier(&log, *id, barrier, stay, &barriers);
        }
    }

    fn check_barrier(&mut self, log: &Log, id: u64, barrier: &Sent, stay: Stay, barriers: &[(u64, Sent)]) {
        let ended = stay.ended.expect("everything ends");
        let flush = log.flushes.iter().find(|flush| flush.began > ended);
        let over = flush.and_then(|flush| flush.ended).unwrap_or(usize::MAX);
        if let Some(completed) = barrier.completed {
            assert!(completed >= over, "barrier {id} was answered at {completed}, before {flush:?}");
        }
        let alone = |other: &Stay| other.ended.is_some_and(|ended| ended < stay.began) || other.began > over;
        for other in log.flushes.iter().filter(|other| other.began != flush.map_or(0, |flush| flush.began)) {
            assert!(alone(other), "barrier {id} at {stay:?} {flush:?} beside a flush at {other:?}");
        }
        for (sector, other) in log.writes.iter().filter(|(sector, _)| **sector != id) {
            let sent = &self.sent[sector];
            let what = || format!("barrier {id} {barrier:?} {stay:?}, {flush:?}: {sector} {sent:?} {other:?}");
            assert!(alone(other), "{}", what());
            let is_before = other.began < stay.began;
            if sent.ring == barrier.ring {
                assert_eq!(is_before, *sector < id, "{}", what());
            } else if self.comes_before(*sector, sent, id, barrier, barriers) {
                assert!(is_before, "{}", what());
                self.counts.earlier += 1;
            } else if barrier.completed.is_some_and(|at| sent.shown.is_some_and(|(_, shown)| shown > at)) {
                assert!(!is_before, "{}", what());
                self.counts.later += 1;
            }
        }
        self.counts.barriers += 1;
    }

    /// Returns true if a write on another ring was published before a barrier, and not behind a barrier of its own
    /// ring.
    fn comes_before(&self, id: u64, sent: &Sent, barrier_id: u64, barrier: &Sent, barriers: &[(u64, Sent)]) -> bool {
        let (Some((shown, _)), Some((barrier_shown, _))) = (sent.shown, barrier.shown) else { return false };
        let own = |other: &&(u64, Sent)| other.0 != barrier_id && other.1.ring == sent.ring && other.0 < id;
        // A barrier that completed before this one was published delays nothing.
        let holds = |other: &(u64, Sent)| match (other.1.completed, barrier.shown) {
            (Some(completed), Some((_, at))) => completed > at,
            _ => true,
        };
        // Barriers of several rings are executed in the order in which they were pulled.
        let plain = sent.work != Work::Barrier;
        plain && shown < barrier_shown && self.open[sent.ring] && !barriers.iter().filter(own).any(holds)
    }
}

impl Simulation for Barriers {
    type Counts = Counts;
    const STEPS: u32 = 1500;

    fn step(&mut self) {
        let ring = self.ring();
        match self.random.random_range(0..2000) {
            0..800 => self.send(),
            800..1000 if self.open[ring] => self.publish(ring),
            1000..1800 => self.turn(),
            1800..1998 => self.reap(ring),
            1998 => self.lose(ring, false),
            1999 => self.lose(ring, true),
            _ => {}
        }
    }

    fn settle(&mut self) {
        for ring in 0..self.open.len() {
            if self.open[ring] {
                self.publish(ring);
            }
            self.reap(ring);
        }
        self.turn();
    }

    fn in_flight(&self) -> usize {
        self.sent.values().filter(|sent| !self.is_over(sent)).count()
    }

    fn finish(mut self) -> Counts {
        self.check();
        self.counts
    }
}

#[test]
fn a_barrier_holds_for_all_rings() {
    let Some(sum) = run_seeds("BARRIER", 0..80, |seed| Barriers::new(seed).run()) else { return };
    // The simulation is not trivial.
    let useful = sum.barriers > 500 && sum.earlier > 1000 && sum.later > 1000 && sum.closed > 10 && sum.broken > 10;
    assert!(useful, "{sum:?}");
}
