//! Barriers between rings whose workers sleep: every ring has its own guest, which also sleeps until its requests are
//! complete. No wakeup is lost, of a guest, of a worker, or of a ring that waits for a barrier of another. Every wait
//! is bounded: a request without a response in time fails the test.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::blkif_rig::domain::Domain;
use crate::blkif_rig::front::{Front, direct, segment};
use crate::blkif_rig::{Shape, World};
use mqblk_blkif::{BlkifQueue, GrantMode, RingParts, Vbd};
use mqblk_core::settings::Settings;
use mqblk_core::{DiskSlot, EventChannel, Wake};
use mqblk_engine::{
    AnyDisk, Engine, EngineOptions, EventFd, Kick, PlugOptions, PollPolicy, QueueDisk, QueueHandle, QueueOptions,
    UringContext, UringOptions,
};
use mqblk_ring::blkif::{Abi, RingPosition, operation as o, status};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

const RINGS: usize = 3;
const ROUNDS: u64 = 6000;
/// Timeout of a wait: long enough for a busy machine.
const PATIENCE: Timespec = Timespec { tv_sec: 20, tv_nsec: 0 };

/// Two eventfds; one for each direction.
#[derive(Clone)]
struct Events {
    to_back: EventFd,
    to_front: EventFd,
}

fn drain(event: &EventFd) {
    // Without an event the read fails.
    let _ = rustix::io::read(event.as_fd(), &mut [0; 8]);
}

impl EventChannel for Events {
    fn notify(&self) {
        self.to_front.signal();
    }
    fn take(&self) {
        drain(&self.to_back);
    }
    fn unmask(&self) {}
}

/// One ring's guest: publishes a few requests, now and then a barrier, and sleeps until they are complete.
struct Guest {
    ring: usize,
    front: Front,
    events: Events,
    random: SmallRng,
    barriers: Arc<AtomicU64>,
}

impl Guest {
    fn round(&mut self, round: u64) {
        let count = self.random.random_range(1..5_u64);
        for at in 0..count {
            let sector = self.ring as u64 * 64 + at;
            let piece = [segment(self.ring as u32, at as u8, at as u8)];
            let op = match self.random.random_range(0..12) {
                0 => o::WRITE_BARRIER,
                1 => o::FLUSH_DISKCACHE,
                2..6 => o::READ,
                _ => o::WRITE,
            };
            self.barriers.fetch_add(u64::from(op == o::WRITE_BARRIER), Ordering::Relaxed);
            self.front.put(&direct(round << 8 | at, op, sector, if op == o::FLUSH_DISKCACHE { &[] } else { &piece }));
        }
        if self.front.ring.publish() {
            self.events.to_back.signal();
        }
        let mut left = count;
        while left > 0 {
            for (id, operation, status) in self.front.responses() {
                assert_eq!((id >> 8, status), (round, status::OKAY), "operation {operation}");
                left -= 1;
            }
            if left > 0 && self.front.ring.arm(1).expect("the backend keeps to the protocol") == 0 {
                let mut fds = [PollFd::new(&self.events.to_front, PollFlags::IN)];
                let woken = poll(&mut fds, Some(&PATIENCE)).expect("poll");
                assert!(woken > 0, "ring {}: {left} of {count} requests of round {round} are not answered", self.ring);
                drain(&self.events.to_front);
            }
        }
    }
}

fn disk() -> Arc<AnyDisk> {
    let mut settings = Settings::new("disk");
    settings.insert("size", "1M").unwrap();
    mqblk_storage::open("ram", &mut settings).unwrap()
}

type Queue = BlkifQueue<UringContext>;

struct Backend {
    engine: Engine,
    vbd: Arc<Vbd>,
    domain: Arc<Domain>,
    poll: PollPolicy,
    disk: Arc<AnyDisk>,
}

impl Backend {
    fn attach(&self, ring: usize, front: &Front, events: &Events) -> QueueHandle<Queue> {
        let disk = Arc::clone(&self.disk);
        let options = QueueOptions {
            disks: vec![QueueDisk {
                slot: DiskSlot::FIRST,
                disk,
                plug: PlugOptions::default(),
                health: Arc::default(),
            }],
            kick: Some(Kick::from(&events.to_back)),
            policy: self.poll.into(),
            paused: false,
            on_fault: Box::new(|fault| panic!("{fault:?}")),
        };
        let (vbd, back) = (Arc::clone(&self.vbd), front.back_end(RingPosition::default()));
        let (grants, channel) = (self.domain.access(), Box::new(events.clone()));
        let make = move |waker: &Arc<dyn Wake>| {
            let waker = Arc::clone(waker);
            let (journal, replay, fence, guard) = (None, vec![], None, None);
            let parts = RingParts { ring: back, grants, channel, waker, journal, replay, fence, guard };
            BlkifQueue::open(vbd, parts).map_err(|error| error.to_string())
        };
        self.engine.attach(ring, options, make).expect("a seat")
    }
}

fn soak(poll: PollPolicy, workers: usize, seed: u64) {
    let shape = Shape {
        rings: RINGS as u16,
        workers,
        ring_pages: 1,
        abi: Abi::X86_64,
        mode: GrantMode::Copy,
        plug: PlugOptions::default(),
    };
    let disk = disk();
    let World { domain, fronts, .. } = World::new(shape, RINGS as u32, Arc::clone(&disk));
    let options = EngineOptions { workers, pin: vec![], context: UringOptions::default() };
    let engine = Engine::start(&options).expect("workers");
    let back = Backend { engine, vbd: Vbd::new(shape.options(&*disk)), domain, poll, disk };
    let barriers = Arc::<AtomicU64>::default();
    let mut handles = vec![];
    let guests: Vec<_> = fronts
        .into_iter()
        .enumerate()
        .map(|(ring, front)| {
            let event = || EventFd::new().expect("an eventfd");
            let events = Events { to_back: event(), to_front: event() };
            handles.push(back.attach(ring, &front, &events));
            let random = SmallRng::seed_from_u64(seed * 10 + ring as u64);
            Guest { ring, front, events, random, barriers: Arc::clone(&barriers) }
        })
        .collect();
    std::thread::scope(|scope| {
        for mut guest in guests {
            scope.spawn(move || (0..ROUNDS).for_each(|round| guest.round(round)));
        }
    });
    for handle in handles {
        let mut draining = handle.drain().expect("the worker is there");
        draining.wait_until(|| None, |_| {}).expect("the worker is there");
    }
    let barriers = barriers.load(Ordering::Relaxed);
    assert!(barriers > ROUNDS / 4, "{barriers} barriers");
}

#[test]
fn no_ring_sleeps_through_a_barriers_end() {
    soak(PollPolicy::Off, 2, 1);
    soak(PollPolicy::Static(Duration::from_micros(20)), 3, 2);
    soak(PollPolicy::Off, 1, 3);
}
