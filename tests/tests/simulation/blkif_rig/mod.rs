//! A Xen guest's disk whose backend can be killed: a domain with rings, and stepped workers over real queues and a real
//! engine. [`World`] holds the state that survives the backend, [`Host`] the backend's own.
#![allow(dead_code, reason = "each test uses a part of it")]

#[path = "../../../../crates/blkif/tests/rig/domain.rs"]
pub(crate) mod domain;
#[path = "../../../../crates/blkif/tests/rig/front.rs"]
pub(crate) mod front;

use std::fs::File;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use mqblk_blkif::journal::Journal;
use mqblk_blkif::{BlkifQueue, DEFAULT_PERSISTENT_MAX, GrantBudget, GrantMode, PoolScope, RingParts, Vbd, VbdOptions};
use mqblk_engine::{AnyDisk, PlugOptions, QueueFault, QueueOptions, SteppedQueue, SteppedWorker};
use mqblk_memory::create_memfd;
use mqblk_ring::blkif::{Abi, RingPosition};
use mqblk_tests::stepped::{polled_queue, start_workers};

use self::domain::Domain;
use self::front::Front;
use crate::harness::storage::queue_disk;
use crate::killable::{KillSwitch, Killable, NoEvents, killable_disk};

/// Bytes of a page.
pub(crate) const PAGE: u64 = mqblk_memory::PAGE_BYTES as u64;

/// Turns of each worker between two attachments of rings.
const TURNS: u32 = 4;

/// The parameters of a device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub rings: u16,
    pub workers: usize,
    pub ring_pages: u32,
    pub abi: Abi,
    pub mode: GrantMode,
    pub plug: PlugOptions,
}

impl Shape {
    /// The device over `disk`.
    pub(crate) fn options(&self, disk: &AnyDisk) -> VbdOptions {
        VbdOptions {
            geometry: disk.geometry(),
            limits: disk.limits(),
            abi: self.abi,
            persistent: self.mode == GrantMode::Persistent,
            max_indirect_segments: 64,
            discard: true,
            discard_secure: false,
            barrier: true,
            flush: true,
            write_through: false,
            mode: self.mode,
            pages_may_be_pinned: false,
            pool: PoolScope::PerRing,
            budget: GrantBudget::new(1 << 20, mqblk_core::MappingBudget::of_process()),
            persistent_max: DEFAULT_PERSISTENT_MAX,
            persistent_idle: Duration::ZERO,
            rings: self.rings,
        }
    }
}

/// The state that survives the backend: the guest, its shared pages, the journals, and the storage.
pub(crate) struct World {
    pub shape: Shape,
    pub domain: Arc<Domain>,
    pub fronts: Vec<Front>,
    pub journals: Vec<File>,
    pub kill: Arc<KillSwitch>,
    disk: Arc<AnyDisk>,
}

impl World {
    /// Returns a guest with this many pages, all granted under their numbers.
    pub(crate) fn new(shape: Shape, pages: u32, disk: Arc<AnyDisk>) -> World {
        let domain = Domain::new(pages);
        (0..pages).for_each(|page| domain.grant(page, page, true));
        let fronts: Vec<_> = (0..shape.rings).map(|_| Front::new(&domain, shape.abi, shape.ring_pages)).collect();
        let entries = shape.abi.entries(shape.ring_pages);
        let journals: Vec<_> = fronts.iter().map(|_| create_memfd("journal", 0).expect("a memfd")).collect();
        for (ring, file) in (0..).zip(&journals) {
            Journal::create(file, entries, ring, RingPosition::default()).expect("a journal");
        }
        let kill = KillSwitch::new();
        let disk = killable_disk(disk, &kill);
        World { shape, domain, fronts, journals, kill, disk }
    }

    /// Starts a backend that resumes these rings. Returns `None` if it was killed meanwhile.
    pub(crate) fn host(&self) -> Option<Host> {
        let mut host = Host {
            vbd: Vbd::new(self.shape.options(&*self.disk)),
            workers: start_workers(self.shape.workers),
            seats: vec![],
            replayed: vec![],
            broken: Arc::default(),
        };
        let attached = KillSwitch::run(|| {
            for ring in 0..self.fronts.len() {
                host.attach(self, ring);
                // The attached rings are served while the others are resumed.
                (0..TURNS).for_each(|_| host.workers.iter_mut().for_each(|worker| _ = worker.turn()));
            }
        });
        if attached.is_none() {
            self.drop_killed(host);
            return None;
        }
        Some(host)
    }

    /// Returns the memory that a backend shares with others.
    fn traces(&self) -> Vec<Vec<u8>> {
        let journals = self.journals.iter().map(|file| {
            let mut bytes = vec![0; file.metadata().expect("a file").len() as usize];
            std::os::unix::fs::FileExt::read_exact_at(file, &mut bytes, 0).expect("its bytes");
            bytes
        });
        journals.chain(self.fronts.iter().map(Front::bytes)).collect()
    }

    /// Drops a killed backend, and checks that this changes no shared memory.
    pub(crate) fn drop_killed(&self, host: Host) {
        let before = self.traces();
        self.kill.arm(KillSwitch::NEVER);
        drop(host);
        assert!(before == self.traces(), "it was killed, not shut down");
        self.domain.forget_mappings();
    }
}

/// A backend.
pub(crate) struct Host {
    pub vbd: Arc<Vbd>,
    pub workers: Vec<SteppedWorker>,
    pub seats: Vec<(usize, SteppedQueue)>,
    /// Requests that each ring has replayed.
    pub replayed: Vec<usize>,
    /// Rings found broken.
    pub broken: Arc<Mutex<Vec<usize>>>,
}

impl Host {
    fn attach(&mut self, world: &World, ring: usize) {
        world.kill.kill_point();
        let front = &world.fronts[ring];
        let published = front.back_end(RingPosition::default()).published();
        let entries = front.ring.size();
        let resumed = Journal::resume(&world.journals[ring], entries, ring as u64, published);
        let (journal, recovery) = resumed.expect("a journal that was killed is as good as any");
        world.kill.kill_point();
        self.replayed.push(recovery.replay.len());
        let broken = Arc::clone(&self.broken);
        let options = QueueOptions {
            on_fault: Box::new(move |fault| {
                if matches!(fault, QueueFault::BrokenRing(_)) {
                    broken.lock().unwrap_or_else(PoisonError::into_inner).push(ring);
                }
            }),
            ..polled_queue(vec![queue_disk(0, &world.disk, world.shape.plug)])
        };
        let worker = ring % self.workers.len();
        let vbd = &self.vbd;
        let seat = self.workers[worker].attach(options, |waker| {
            let parts = RingParts {
                ring: front.back_end(recovery.position),
                grants: Box::new(Killable(world.domain.access(), Arc::clone(&world.kill))),
                channel: Box::new(Killable(NoEvents, Arc::clone(&world.kill))),
                waker: Arc::new(Killable(Arc::clone(waker), Arc::clone(&world.kill))),
                journal: Some(journal),
                replay: recovery.replay,
                fence: None,
                guard: None,
            };
            BlkifQueue::open(Arc::clone(vbd), parts).map_err(|error| error.to_string())
        });
        self.seats.push((worker, seat.expect("a seat")));
    }

    /// Runs one turn of one worker. Returns `None` if the backend was killed in it.
    pub(crate) fn turn(&mut self, worker: usize) -> Option<bool> {
        KillSwitch::run(|| self.workers[worker].turn())
    }

    /// Drains a ring.
    pub(crate) fn close(&mut self, ring: usize) {
        let (worker, seat) = self.seats[ring];
        self.workers[worker].drain(seat);
    }

    /// Drains all rings, and steps the workers until they are detached. Returns false if the backend was killed
    /// meanwhile.
    pub(crate) fn drain(&mut self) -> bool {
        KillSwitch::run(|| {
            (0..self.seats.len()).for_each(|ring| self.close(ring));
            while self.seats.iter().any(|(worker, seat)| self.workers[*worker].serves(*seat)) {
                self.workers.iter_mut().for_each(|worker| _ = worker.turn());
            }
        })
        .is_some()
    }
}
