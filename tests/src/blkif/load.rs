//! A correct guest: writes through the project's own frontend, and verifies all reads.

use std::time::Duration;

use mqblk_core::{ByteLen, Sector512};
use mqblk_driver::DataSegment;
use mqblk_driver::blkfront::{BlkfrontDevice, BlkfrontOptions, BlkfrontQueueSet, BlkfrontStatus};
use mqblk_memory::GuestAddress;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use crate::hostile::TIMEOUT;
use crate::hostile::load::{BLOCK, block, block_fault};
use crate::hostile::neighbour::{NEIGHBOUR_BLOCKS, Neighbour, NeighbourClient};

/// Requests in flight on each queue.
const DEPTH: usize = 8;

/// A device driven by one thread over all its queues, and the generations it has written.
pub struct BlkfrontLoad {
    device: BlkfrontDevice,
    set: BlkfrontQueueSet,
    /// Last written generation of each block; 0: never.
    generations: Vec<u32>,
    random: SmallRng,
    /// Blocks verified.
    pub verified: u64,
}

#[derive(Clone, Copy, Debug)]
struct Job {
    number: usize,
    generation: u32,
    write: bool,
}

impl BlkfrontLoad {
    /// Connects with `options`. Uses the first `blocks` blocks of [`BLOCK`] bytes, whose content is unknown.
    ///
    /// # Panics
    /// When the backend does not connect.
    pub fn connect(options: &BlkfrontOptions, blocks: usize, seed: u64) -> BlkfrontLoad {
        let mut options = options.clone();
        options.depth = DEPTH as u16;
        options.data_per_queue = ByteLen((DEPTH * BLOCK) as u64);
        let mut device = BlkfrontDevice::connect(&options).expect("the disk");
        let set = device.take_queues().pop().expect("one set of queues");
        BlkfrontLoad { device, set, generations: vec![0; blocks], random: SmallRng::seed_from_u64(seed), verified: 0 }
    }

    /// Returns the device.
    pub fn device(&mut self) -> &mut BlkfrontDevice {
        &mut self.device
    }

    /// Sets the generations on the disk, written by another client.
    #[must_use]
    pub fn with_generations(mut self, other: Vec<u32>) -> BlkfrontLoad {
        self.generations = other;
        self
    }

    /// Runs one round: a batch of writes and reads of different blocks on every queue, each verified.
    ///
    /// # Panics
    /// When a completion is wrong or missing.
    pub fn round(&mut self) {
        let all = self.set.queues_mut().len() * DEPTH;
        let mut jobs = Vec::with_capacity(all);
        let mut taken = std::collections::HashSet::new();
        for _ in 0..all {
            let number = self.random.random_range(0..self.generations.len());
            if taken.insert(number) {
                let old = self.generations[number];
                let write = old == 0 || self.random.random_bool(0.5);
                jobs.push(Job { number, generation: if write { old + 1 } else { old }, write });
            }
        }
        self.run(&jobs);
    }

    /// Reads every block that was written.
    ///
    /// # Panics
    /// As [`round`](Self::round).
    pub fn verify_all(&mut self) {
        let known = self.generations.iter().enumerate().filter(|(_, generation)| **generation > 0);
        let jobs: Vec<Job> =
            known.map(|(number, generation)| Job { number, generation: *generation, write: false }).collect();
        for jobs in jobs.chunks(self.set.queues_mut().len() * DEPTH) {
            self.run(jobs);
        }
    }

    fn run(&mut self, jobs: &[Job]) {
        for (at, job) in jobs.iter().enumerate() {
            self.submit(at, job);
        }
        for queue in self.set.queues_mut() {
            queue.publish();
        }
        let mut left = jobs.len();
        let mut until = TIMEOUT.begin();
        while left > 0 {
            let mut done = Vec::new();
            for queue in self.set.queues_mut() {
                queue.poll().expect("a backend that keeps the protocol");
                while let Some(one) = queue.reap().expect("a backend that keeps the protocol") {
                    done.push(one);
                }
            }
            if done.is_empty() {
                assert!(!until.has_passed(), "{left} of {} answers did not come", jobs.len());
                std::thread::sleep(Duration::from_micros(20));
            }
            for one in done {
                left -= 1;
                self.check(one.user_data as usize, one.status, jobs);
            }
        }
    }

    fn segment(&mut self, at: usize) -> DataSegment {
        let (data, _) = self.set.queues_mut()[at / DEPTH].data();
        DataSegment { address: GuestAddress(data.0 + (at % DEPTH * BLOCK) as u64), len: BLOCK as u32 }
    }

    fn submit(&mut self, at: usize, job: &Job) {
        let segment = self.segment(at);
        let queue = &mut self.set.queues_mut()[at / DEPTH];
        let start = Sector512((job.number * BLOCK) as u64 / mqblk_core::units::SECTOR_BYTES);
        if job.write {
            let content = block(job.number as u64, job.generation.into());
            queue.memory().write(segment.address, &content).expect("data memory");
            queue.write(at as u32, start, segment).expect("room");
        } else {
            queue.memory().write(segment.address, &[0xaa; BLOCK]).expect("data memory");
            queue.read(at as u32, start, segment).expect("room");
        }
    }

    fn check(&mut self, at: usize, status: BlkfrontStatus, jobs: &[Job]) {
        let job = jobs[at];
        assert_eq!(status, BlkfrontStatus::Ok, "{job:?}");
        if job.write {
            self.generations[job.number] = job.generation;
            return;
        }
        let segment = self.segment(at);
        let mut bytes = vec![0; BLOCK];
        self.set.queues_mut()[at / DEPTH].memory().read(segment.address, &mut bytes).expect("data memory");
        if let Some(fault) = block_fault(&bytes, job.number as u64, job.generation) {
            panic!("{fault}");
        }
        self.verified += 1;
    }

    /// Closes the device. Returns the generations on the disk, for another client.
    ///
    /// # Panics
    /// When the backend does not close.
    pub fn finish(self) -> Vec<u32> {
        self.device.stop(vec![self.set]).expect("an end in good order");
        self.generations
    }
}

impl NeighbourClient for BlkfrontLoad {
    fn round(&mut self) {
        BlkfrontLoad::round(self);
    }

    fn verified(&self) -> u64 {
        self.verified
    }

    fn end(self) -> Vec<u32> {
        self.finish()
    }
}

/// Starts a guest beside the one under test.
///
/// # Panics
/// When it fails.
pub fn start_neighbour(options: BlkfrontOptions, seed: u64) -> Neighbour {
    let connect = move || BlkfrontLoad::connect(&options, NEIGHBOUR_BLOCKS, seed);
    let neighbour = Neighbour::start(Duration::from_micros(300), connect);
    neighbour.assert_progress("its start");
    neighbour
}
