//! Continuous verified requests on a raw queue, while the test reconfigures the queue.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::eventfd::TestEventFd;
use super::frontend::FrontendQueue;
use super::request::{
    SECTOR, STATUS_OK, STATUS_POISON, header, readable, request_type, writable, write_direct, write_indirect,
};
use super::ring::HostileRing;
use super::{TIMEOUT, wait_for};

/// Requests in flight.
const DEPTH: u16 = 16;
/// Sectors of one request.
const SECTORS: usize = 4;
/// Bytes of one request.
const BYTES: usize = SECTORS * SECTOR;
/// Guest memory of one request: header, status and indirect table, then data.
const REQUEST_MEMORY: u64 = 0x1000;

/// Guest memory of a queue load.
pub const QUEUE_LOAD_MEMORY: u64 = DEPTH as u64 * REQUEST_MEMORY;

/// The eventfds of a queue, which may be replaced while it runs. They are signalled under the lock. A test that
/// replaces them holds it until the daemon has acknowledged.
#[derive(Debug)]
pub struct QueueEventFds {
    /// Signals the device.
    pub kick: TestEventFd,
    /// Signalled by the device.
    pub call: TestEventFd,
}

/// Memory and disk range of a queue load.
#[derive(Clone, Copy, Debug)]
pub struct QueueLoadArea {
    /// Guest memory, [`QUEUE_LOAD_MEMORY`] bytes.
    pub memory: u64,
    /// First sector of its range of the disk.
    pub sector: u64,
    /// Length of its range of the disk, in requests.
    pub blocks: usize,
    /// Seed of its random generator.
    pub seed: u64,
}

/// A load of verified requests on one queue.
#[derive(Debug)]
pub struct QueueLoad {
    ring: HostileRing,
    eventfds: Arc<Mutex<QueueEventFds>>,
    area: QueueLoadArea,
    expected_content: Vec<u8>,
    random: SmallRng,
}

impl QueueLoad {
    /// Takes over a running queue. Its range of the disk is all zero.
    pub fn new(queue: FrontendQueue, area: QueueLoadArea) -> QueueLoad {
        let eventfds = Arc::new(Mutex::new(QueueEventFds { kick: queue.kick, call: queue.call }));
        let expected_content = vec![0; area.blocks * BYTES];
        QueueLoad { ring: queue.ring, eventfds, area, expected_content, random: SmallRng::seed_from_u64(area.seed) }
    }

    /// Returns the queue's eventfds.
    pub fn bells(&self) -> Arc<Mutex<QueueEventFds>> {
        Arc::clone(&self.eventfds)
    }

    /// Returns the expected content of its range of the disk.
    pub fn model(&self) -> &[u8] {
        &self.expected_content
    }

    /// Runs a batch of requests: writes and reads, direct and indirect, of different blocks, each verified.
    ///
    /// # Panics
    /// When a completion is wrong or missing.
    pub fn run_batch(&mut self) {
        let mut jobs = Vec::new();
        for slot in 0..DEPTH {
            let block = self.random.random_range(0..self.area.blocks);
            if jobs.iter().all(|(_, other, _)| *other != block) {
                let write = self.random.random_bool(0.5);
                self.offer(slot, block, write);
                jobs.push((slot, block, write));
            }
        }
        self.ring.set_used_event(self.ring.last_used);
        self.ring.publish();
        self.eventfds.lock().unwrap_or_else(PoisonError::into_inner).kick.add(1);
        let mut left = jobs.len();
        let mut until = TIMEOUT.begin();
        while left > 0 {
            let Some((head, len)) = self.ring.take() else {
                assert!(!until.has_passed(), "{left} of {} answers did not come", jobs.len());
                std::thread::sleep(Duration::from_micros(20));
                continue;
            };
            left -= 1;
            let job = jobs.iter().find(|(slot, ..)| u32::from(*slot) * 4 == head);
            let (slot, block, write) = *job.unwrap_or_else(|| panic!("an answer for head {head}"));
            self.check(slot, block, write, len);
        }
    }

    fn request_address(&self, slot: u16) -> u64 {
        self.area.memory + u64::from(slot) * REQUEST_MEMORY
    }

    fn data_address(&self, slot: u16) -> u64 {
        self.request_address(slot) + REQUEST_MEMORY - BYTES as u64
    }

    fn offer(&mut self, slot: u16, block: usize, write: bool) {
        let (at, data) = (self.request_address(slot), self.data_address(slot));
        let memory = Arc::clone(&self.ring.memory);
        let sector = self.area.sector + (block * SECTORS) as u64;
        memory.write(at, &header(if write { request_type::OUT } else { request_type::IN }, sector));
        memory.write(at + 16, &[STATUS_POISON]);
        let range = block * BYTES..(block + 1) * BYTES;
        if write {
            self.random.fill(&mut self.expected_content[range.clone()]);
            memory.write(data, &self.expected_content[range]);
        } else {
            memory.write(data, &[STATUS_POISON; BYTES]);
        }
        let cut = self.random.random_range(1..BYTES as u32);
        let segment = if write { readable } else { writable };
        let segments = [
            readable(at, 16),
            segment(data, cut),
            segment(data + u64::from(cut), BYTES as u32 - cut),
            writable(at + 16, 1),
        ];
        let first = slot * 4;
        if self.random.random_bool(0.5) {
            write_direct(&self.ring, &[first, first + 1, first + 2, first + 3], &segments);
        } else {
            self.ring.write_descriptor(first, write_indirect(&memory, at + 64, 4, &[0, 1, 2, 3], &segments));
        }
        self.ring.offer(first);
    }

    fn check(&self, slot: u16, block: usize, write: bool, len: u32) {
        let memory = &self.ring.memory;
        assert_eq!(len, if write { 1 } else { BYTES as u32 + 1 }, "the used length of a write ({write})");
        assert_eq!(memory.read(self.request_address(slot) + 16, 1), [STATUS_OK], "the status of a write ({write})");
        if !write {
            let found = memory.read(self.data_address(slot), BYTES);
            assert!(
                found == self.expected_content[block * BYTES..(block + 1) * BYTES],
                "block {block}: other data was read"
            );
        }
    }

    /// Runs one request, and waits for its call instead of polling.
    ///
    /// # Panics
    /// When the call does not come.
    pub fn run_one_by_call(&mut self) {
        let eventfds = self.bells();
        let eventfds = eventfds.lock().unwrap_or_else(PoisonError::into_inner);
        eventfds.call.take();
        self.ring.set_used_event(self.ring.last_used);
        self.offer(0, 0, false);
        self.ring.publish();
        eventfds.kick.add(1);
        assert!(eventfds.call.wait(TIMEOUT.time()), "no call came");
        let (_, len) = wait_for("the answer that the call was for", || self.ring.take());
        self.check(0, 0, false, len);
    }
}

/// A queue load in a thread of its own.
#[derive(Debug)]
pub struct RunningQueueLoad {
    stop: Arc<AtomicBool>,
    batches: Arc<AtomicU64>,
    thread: Option<JoinHandle<QueueLoad>>,
}

impl RunningQueueLoad {
    /// Starts the thread.
    pub fn start(mut pusher: QueueLoad) -> RunningQueueLoad {
        let (stop, batches) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stop2, batches2) = (Arc::clone(&stop), Arc::clone(&batches));
        let thread = std::thread::spawn(move || {
            while !stop2.load(Ordering::Relaxed) {
                pusher.run_batch();
                batches2.fetch_add(1, Ordering::Relaxed);
            }
            pusher
        });
        RunningQueueLoad { stop, batches, thread: Some(thread) }
    }

    /// Returns the number of completed batches.
    pub fn batches(&self) -> u64 {
        self.batches.load(Ordering::Relaxed)
    }

    /// Waits for the next batch.
    ///
    /// # Panics
    /// When it does not end.
    pub fn assert_progress(&self, after: &str) {
        let now = self.batches();
        wait_for(&format!("the next batch after {after}"), || {
            assert!(!self.thread.as_ref().is_none_or(JoinHandle::is_finished), "after {after}: the pusher failed");
            (self.batches() >= now + 2).then_some(())
        });
    }

    /// Stops after the current batch.
    ///
    /// # Panics
    /// When it has failed.
    pub fn finish(mut self) -> QueueLoad {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().expect("a running pusher").join().expect("the pusher")
    }
}

impl Drop for RunningQueueLoad {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
