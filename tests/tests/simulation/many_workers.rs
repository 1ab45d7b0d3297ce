//! 64 workers, more than the test machines have CPUs. Every queue of one disk is served alike, an idle queue waits for
//! no busy one, and queues move between workers under load, for any order of the workers' turns.
//!
//! `MQBLK_WORKERS_SEEDS=100` runs more seeds, `MQBLK_WORKERS_SEED=7` one.

use std::sync::Arc;

use mqblk_core::{Op, Outcome};
use mqblk_engine::{AnyDisk, PlugOptions, SteppedWorker, UringOptions};
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

use crate::harness::disk_model::DiskModel;
use crate::harness::scripted_guest::{GuestRequest, ScriptedGuest};
use crate::harness::seeds::{counters, run_seeds};
use crate::harness::storage::{open_disk, queue_disk};

const WORKERS: usize = 64;
const QUEUES: usize = 2 * WORKERS;
const SECTORS: u64 = 1 << 16;
/// Requests in flight of a busy guest.
const BUSY: usize = 12;
const ROUNDS: u32 = 60;

counters! {
    /// Coverage of a run.
    struct Counts {
        submitted,
        completed,
        moved,
        alone,
    }
}

/// A queue: its guest, and its worker.
struct Queue {
    guest: ScriptedGuest,
    worker: usize,
    /// The queue drains, and goes there next.
    target: Option<usize>,
    in_flight: usize,
    completed: u64,
}

struct Host {
    random: SmallRng,
    disk: Arc<AnyDisk>,
    workers: Vec<SteppedWorker>,
    queues: Vec<Queue>,
    model: DiskModel,
    counts: Counts,
}

impl Host {
    fn new(seed: u64) -> Host {
        let mut random = SmallRng::seed_from_u64(seed);
        let disk = open_disk("ram", &[("size", &(SECTORS * 512).to_string())]);
        let worker = |_| SteppedWorker::new(UringOptions::default()).expect("a worker");
        let mut host = Host {
            workers: (0..WORKERS).map(worker).collect(),
            queues: vec![],
            model: DiskModel::new(SECTORS, true),
            counts: Counts::default(),
            disk,
            random: SmallRng::seed_from_u64(random.random()),
        };
        for at in 0..QUEUES {
            let worker = at % WORKERS;
            let guest = ScriptedGuest::new();
            host.queues.push(Queue { guest, worker, target: None, in_flight: 0, completed: 0 });
            host.attach(at);
        }
        host
    }

    fn attach(&mut self, at: usize) {
        let random = SmallRng::seed_from_u64(self.random.random());
        let disks = vec![queue_disk(0, &self.disk, PlugOptions::default())];
        let queue = &mut self.queues[at];
        queue.guest.attach(&mut self.workers[queue.worker], disks, random, false);
    }

    /// Makes a guest read a sector.
    fn read(&mut self, at: usize) {
        let sector = self.random.random_range(0..SECTORS);
        let request = GuestRequest::new(self.counts.submitted + 1, 0, Op::Read, vec![(sector, 1)]);
        let sent = self.queues[at].guest.send(request, &mut self.model, &mut self.random);
        assert!(sent, "reads overlap with anything, and there is room");
        self.queues[at].in_flight += 1;
        self.counts.submitted += 1;
    }

    /// Runs one turn of each worker, in any order.
    fn round(&mut self) {
        let mut order: Vec<usize> = (0..WORKERS).collect();
        order.shuffle(&mut self.random);
        for worker in order {
            self.workers[worker].turn();
        }
        for at in 0..QUEUES {
            self.take_completed(at);
        }
    }

    fn take_completed(&mut self, at: usize) {
        let queue = &mut self.queues[at];
        for (request, outcome) in queue.guest.take_completed() {
            assert!(matches!(outcome, Outcome::Done(_)), "{outcome:?} for {request:?}");
            self.model.complete_read(request.id, &request.ranges, Some(&queue.guest.data(&request)));
            queue.in_flight -= 1;
            queue.completed += 1;
            self.counts.completed += 1;
        }
        queue.guest.notice_detached(&mut self.workers[queue.worker]);
        if let (None, Some(target)) = (queue.guest.queue(), queue.target) {
            (queue.worker, queue.target) = (target, None);
            self.counts.moved += 1;
            self.attach(at);
        }
    }

    /// Begins to move a queue to another worker.
    fn begin_move(&mut self) {
        let (at, target) = (self.random.random_range(0..QUEUES), self.random.random_range(0..WORKERS));
        let queue = &mut self.queues[at];
        if let (Some(attached), None) = (queue.guest.queue(), queue.target) {
            queue.target = Some(target);
            self.workers[queue.worker].drain(attached);
        }
    }

    fn settle(&mut self) {
        for _ in 0..1000 {
            if self.counts.completed == self.counts.submitted && self.queues.iter().all(|queue| queue.target.is_none())
            {
                return;
            }
            self.round();
        }
        panic!("{} of {} requests are complete", self.counts.completed, self.counts.submitted);
    }
}

/// All guests keep the same number of requests in flight: none completes much less than another.
#[test]
fn all_queues_of_a_disk_are_served_alike() {
    let counts = run_seeds("WORKERS", 0..4, |seed| {
        let mut host = Host::new(seed);
        for _ in 0..ROUNDS {
            for at in 0..QUEUES {
                (host.queues[at].in_flight..BUSY).for_each(|_| host.read(at));
            }
            host.round();
        }
        let served = host.queues.iter().map(|queue| queue.completed);
        let (least, most) = (served.clone().min().unwrap_or(0), served.max().unwrap_or(0));
        // A turn pulls 1 to 16 requests of a queue, depending on the seed.
        assert!(2 * least > most, "a queue completed {least} requests, another {most}");
        host.settle();
        host.counts
    });
    assert!(counts.is_none_or(|counts| counts.completed > 4 * u64::from(ROUNDS) * QUEUES as u64), "not trivial");
}

/// Half of the queues have as much in flight as allowed. A request of an idle one completes within two turns of its
/// worker.
#[test]
fn an_idle_queue_does_not_wait_for_busy_ones() {
    let counts = run_seeds("WORKERS", 0..4, |seed| {
        let mut host = Host::new(seed);
        for _ in 0..ROUNDS {
            // A worker has an even and an odd queue.
            for at in 0..WORKERS {
                (host.queues[at].in_flight..BUSY).for_each(|_| host.read(at));
            }
            let alone = host.random.random_range(WORKERS..QUEUES);
            host.read(alone);
            host.round();
            host.round();
            assert_eq!(host.queues[alone].in_flight, 0, "queue {alone} waits behind a busy one");
            host.counts.alone += 1;
        }
        host.settle();
        host.counts
    });
    assert!(counts.is_none_or(|counts| counts.alone == 4 * u64::from(ROUNDS)), "not trivial");
}

/// Queues are drained and attached to other workers, many of them to the same one, while all are busy: each request
/// completes once.
#[test]
fn queues_move_between_workers_under_load() {
    let counts = run_seeds("WORKERS", 0..4, |seed| {
        let mut host = Host::new(seed);
        for _ in 0..ROUNDS {
            for at in 0..QUEUES {
                let most = host.random.random_range(0..=BUSY);
                (host.queues[at].in_flight..most).for_each(|_| host.read(at));
            }
            (0..8).for_each(|_| host.begin_move());
            host.round();
        }
        host.settle();
        host.counts
    });
    assert!(counts.is_none_or(|counts| counts.moved > 500 && counts.completed > 10_000), "not trivial");
}
