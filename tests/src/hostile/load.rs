//! A correct client: writes through the project's own driver, and verifies all reads.

use std::path::PathBuf;
use std::time::Duration;

use mqblk_core::{ByteLen, Sector512};
use mqblk_driver::virtio_blk::{BlkCompletion, BlkConnectOptions, BlkDevice, BlkQueueSet, BlkStatus, DataSegment};
use mqblk_memory::GuestAddress;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::neighbour::{NEIGHBOUR_BLOCKS, Neighbour, NeighbourClient};
use super::{TIMEOUT, wait_for};

/// Bytes of a block, written and verified as a whole.
pub const BLOCK: usize = 4096;
/// Requests in flight on each queue.
const DEPTH: usize = 8;

/// Returns the content of block `number` in generation `generation`: checksummed, and unique.
pub fn block(number: u64, generation: u64) -> Vec<u8> {
    let mut random = SmallRng::seed_from_u64(number << 32 ^ generation);
    let mut bytes = vec![0; BLOCK];
    random.fill(&mut bytes[16..]);
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    let sum = crc32c::crc32c_append(crc32c::crc32c(&bytes[..8]), &bytes[16..]);
    bytes[8..12].copy_from_slice(&sum.to_le_bytes());
    bytes[12..16].copy_from_slice(&(generation as u32).to_le_bytes());
    bytes
}

/// Returns the fault of a block that was read, or `None`.
pub fn block_fault(bytes: &[u8], number: u64, generation: u32) -> Option<String> {
    let sum = crc32c::crc32c_append(crc32c::crc32c(&bytes[..8]), &bytes[16..]);
    let found = (bytes[..8].to_vec(), bytes[8..12].to_vec(), bytes[12..16].to_vec());
    let wanted = (number.to_le_bytes().to_vec(), sum.to_le_bytes().to_vec(), generation.to_le_bytes().to_vec());
    (found != wanted).then(|| format!("block {number}: found {found:x?}, expected {wanted:x?}"))
}

/// A device driven by one thread over all its queues, and the generations it has written.
#[derive(Debug)]
pub struct VhostUserLoad {
    device: BlkDevice,
    set: BlkQueueSet,
    /// Last written generation of each block; 0: never.
    generations: Vec<u32>,
    random: SmallRng,
    /// Blocks verified.
    pub verified: u64,
}

/// A request in flight: block number, and the written or expected generation.
#[derive(Clone, Copy, Debug)]
struct Job {
    number: usize,
    generation: u32,
    write: bool,
}

impl VhostUserLoad {
    /// Connects to a disk. Uses its first `blocks` blocks of [`BLOCK`] bytes.
    ///
    /// # Panics
    /// When the daemon rejects the connection.
    pub fn connect(socket: PathBuf, queues: u16, blocks: usize, seed: u64) -> VhostUserLoad {
        VhostUserLoad::connect_as(socket, queues, blocks, seed, false)
    }

    /// As [`connect`](Self::connect), with configuration change notifications for [`device`](Self::device).
    ///
    /// # Panics
    /// As [`connect`](Self::connect).
    pub fn connect_with_config_changes(socket: PathBuf, queues: u16, blocks: usize, seed: u64) -> VhostUserLoad {
        VhostUserLoad::connect_as(socket, queues, blocks, seed, true)
    }

    fn connect_as(socket: PathBuf, queues: u16, blocks: usize, seed: u64, config_changes: bool) -> VhostUserLoad {
        let mut options = BlkConnectOptions::new(socket);
        options.queues = queues;
        options.queue_size = 64;
        options.depth = DEPTH as u16;
        options.data_per_queue = ByteLen((DEPTH * BLOCK) as u64);
        options.poison_status = true;
        options.config_changes = config_changes;
        options.connect_timeout = TIMEOUT.time();
        options.reply_timeout = TIMEOUT.time();
        let mut device = BlkDevice::connect(&options).expect("the disk");
        let set = device.take_queues().pop().expect("one set of queues");
        let random = SmallRng::seed_from_u64(seed);
        VhostUserLoad { device, set, generations: vec![0; blocks], random, verified: 0 }
    }

    /// Returns the device.
    pub fn device(&mut self) -> &mut BlkDevice {
        &mut self.device
    }

    /// Uses the first `blocks` blocks from now on.
    pub fn use_blocks(&mut self, blocks: usize) {
        self.generations.resize(blocks, 0);
    }

    /// Reads one block. Returns the status.
    ///
    /// # Panics
    /// When the request does not complete.
    pub fn try_read(&mut self, number: u64) -> BlkStatus {
        let segment = self.segment(0);
        let queue = &mut self.set.queues_mut()[0];
        let start = Sector512(number * BLOCK as u64 / mqblk_core::units::SECTOR_BYTES);
        queue.read(0, start, segment).expect("room");
        queue.publish().expect("the kick");
        wait_for("an answer", || self.reap().pop()).status
    }

    /// Reads and verifies every block that another client has written in these generations.
    ///
    /// # Panics
    /// When a block differs or cannot be read.
    pub fn read_all(&mut self, generations: &[u32]) {
        generations.clone_into(&mut self.generations);
        for (number, generation) in generations.iter().enumerate().filter(|(_, generation)| **generation > 0) {
            assert_eq!(self.try_read(number as u64), BlkStatus::Ok, "block {number}");
            let mut bytes = vec![0; BLOCK];
            let address = self.segment(0).address;
            self.set.queues_mut()[0].memory().read(address, &mut bytes).expect("data memory");
            assert_eq!(block_fault(&bytes, number as u64, *generation), None);
        }
    }

    /// Returns the last written generation of each block; 0: never.
    pub fn generations(&self) -> &[u32] {
        &self.generations
    }

    /// Sets the generation of all blocks, as written by another client.
    pub fn expect_generation(&mut self, generation: u32) {
        self.generations.fill(generation);
    }

    /// Runs one round: a batch of writes and reads of different blocks on every queue, each verified.
    ///
    /// # Panics
    /// When a completion is wrong or missing.
    pub fn round(&mut self) {
        let queues = self.set.queues_mut().len();
        let mut jobs = Vec::with_capacity(queues * DEPTH);
        let mut taken = std::collections::HashSet::new();
        for _ in 0..queues * DEPTH {
            let number = self.random.random_range(0..self.generations.len());
            if taken.insert(number) {
                let old = self.generations[number];
                let write = old == 0 || self.random.random_bool(0.5);
                jobs.push(Job { number, generation: if write { old + 1 } else { old }, write });
            }
        }
        let mut last = 0;
        for (at, job) in jobs.iter().enumerate() {
            last = at / DEPTH;
            self.submit(at, job);
        }
        for queue in &mut self.set.queues_mut()[..=last] {
            queue.publish().expect("the kick");
        }
        let mut left = jobs.len();
        let mut until = TIMEOUT.begin();
        while left > 0 {
            let done = self.reap();
            if done.is_empty() {
                assert!(!until.has_passed(), "{left} of {} answers did not come", jobs.len());
                std::thread::sleep(Duration::from_micros(20));
            }
            for done in done {
                left -= 1;
                self.check(done, &jobs);
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
        match job.write {
            true => {
                let content = block(job.number as u64, job.generation.into());
                queue.memory().write(segment.address, &content).expect("data memory");
                queue.write(at as u32, start, segment).expect("room");
            }
            false => {
                queue.memory().write(segment.address, &[0xaa; BLOCK]).expect("data memory");
                queue.read(at as u32, start, segment).expect("room");
            }
        }
    }

    fn reap(&mut self) -> Vec<BlkCompletion> {
        let mut all = Vec::new();
        for queue in self.set.queues_mut() {
            queue.poll().expect("a device that keeps the protocol");
            while let Some(done) = queue.reap().expect("a device that keeps the protocol") {
                all.push(done);
            }
        }
        all
    }

    fn check(&mut self, done: BlkCompletion, jobs: &[Job]) {
        let at = done.user_data as usize;
        let job = jobs[at];
        let written = if job.write { 1 } else { BLOCK as u32 + 1 };
        assert_eq!((done.status, done.written), (BlkStatus::Ok, written), "{job:?}");
        if job.write {
            self.generations[job.number] = job.generation;
            return;
        }
        let segment = self.segment(at);
        let mut bytes = vec![0; BLOCK];
        self.set.queues_mut()[0].memory().read(segment.address, &mut bytes).expect("data memory");
        if let Some(fault) = block_fault(&bytes, job.number as u64, job.generation) {
            panic!("{fault}");
        }
        self.verified += 1;
    }
}

impl NeighbourClient for VhostUserLoad {
    fn round(&mut self) {
        VhostUserLoad::round(self);
    }

    fn verified(&self) -> u64 {
        self.verified
    }

    fn end(self) -> Vec<u32> {
        self.generations
    }
}

/// Starts a client of all `queues` of a disk beside the one under test.
///
/// # Panics
/// When it fails.
pub fn start_neighbour(socket: PathBuf, queues: u16, seed: u64) -> Neighbour {
    let connect = move || VhostUserLoad::connect(socket, queues, NEIGHBOUR_BLOCKS, seed);
    let neighbour = Neighbour::start(Duration::from_micros(300), connect);
    neighbour.assert_progress("its start");
    neighbour
}
