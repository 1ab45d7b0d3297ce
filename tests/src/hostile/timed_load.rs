//! A correct client of any device. It verifies all reads, and records the latency of each request.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use mqblk_memory::GuestAddress;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};

use super::TIMEOUT;
use super::load::{BLOCK, block, block_fault};
use crate::load_queues::{DeviceQueues, LoadRequest, RequestOutcome, RequestType};

/// Requests in flight on each queue.
const DEPTH: usize = 4;
/// Blocks in use on each disk.
const BLOCKS: usize = 1024;
/// Pause between rounds: keeps the load below the daemon's capacity, as guests with other work do.
const THINK_TIME: Duration = Duration::from_micros(500);
/// Priority of a load's thread. It runs as soon as it is woken, as a guest with CPUs of its own, so that the latencies
/// are the daemon's.
const HIGH_PRIORITY: i32 = -15;
/// Sectors of a block.
const BLOCK_SECTORS: u64 = BLOCK as u64 / 512;

/// Measurements of a load in a phase.
#[derive(Clone, Debug)]
pub struct LoadRecord {
    /// Latencies in nanoseconds.
    latencies: Histogram<u64>,
    began: Instant,
}

impl LoadRecord {
    fn new() -> LoadRecord {
        let latencies = Histogram::new(3).expect("a histogram of three digits");
        LoadRecord { latencies, began: Instant::now() }
    }

    /// Returns the number of completed requests.
    pub fn completed(&self) -> u64 {
        self.latencies.len()
    }

    /// Returns a quantile of the latencies.
    pub fn quantile(&self, quantile: f64) -> Duration {
        Duration::from_nanos(self.latencies.value_at_quantile(quantile))
    }

    /// Returns the longest latency.
    pub fn worst(&self) -> Duration {
        Duration::from_nanos(self.latencies.max())
    }
}

/// A phase of a load: its measurements and its length.
#[derive(Clone, Debug)]
pub struct LoadPhase {
    /// The measurements.
    pub record: LoadRecord,
    /// Its length.
    pub length: Duration,
}

impl LoadPhase {
    /// Returns the completed requests per second.
    pub fn throughput(&self) -> f64 {
        self.record.completed() as f64 / self.length.as_secs_f64()
    }

    /// Returns the phase as JSON. Latencies are in microseconds.
    pub fn to_json(&self) -> Value {
        let us = |time: Duration| time.as_micros() as u64;
        json!({
            "seconds": self.length.as_secs_f64(), "requests": self.record.completed(), "requests_per_second": self.throughput(),
            "p50_us": us(self.record.quantile(0.5)), "p99_us": us(self.record.quantile(0.99)),
            "p99_9_us": us(self.record.quantile(0.999)), "p99_99_us": us(self.record.quantile(0.9999)), "worst_us": us(self.record.worst()),
        })
    }
}

struct Job {
    disk: usize,
    number: usize,
    generation: u32,
    write: bool,
}

/// The load of one thread over all queues and disks of a device.
struct TimedLoad<Q> {
    queues: Q,
    /// Last written generation of each block, by disk; 0: never.
    generations: Vec<Vec<u32>>,
    random: SmallRng,
}

impl<Q: DeviceQueues> TimedLoad<Q> {
    fn new(queues: Q, disks: usize, seed: u64) -> TimedLoad<Q> {
        TimedLoad { queues, generations: vec![vec![0; BLOCKS]; disks], random: SmallRng::seed_from_u64(seed) }
    }

    fn data(&mut self, at: usize) -> GuestAddress {
        GuestAddress(self.queues.data_address(at / DEPTH).0 + (at % DEPTH * BLOCK) as u64)
    }

    fn jobs(&mut self, count: usize) -> Vec<Job> {
        let mut jobs: Vec<Job> = Vec::with_capacity(count);
        while jobs.len() < count {
            let (disk, number) =
                (self.random.random_range(0..self.generations.len()), self.random.random_range(0..BLOCKS));
            if jobs.iter().all(|job| (job.disk, job.number) != (disk, number)) {
                let old = self.generations[disk][number];
                let write = old == 0 || self.random.random_bool(0.5);
                jobs.push(Job { disk, number, generation: old + u32::from(write), write });
            }
        }
        jobs
    }

    /// Runs one round: fills all queues with writes and reads of different blocks.
    fn round(&mut self, record: &Mutex<LoadRecord>) {
        let count = self.queues.queue_count() * DEPTH;
        let memory = self.queues.memory();
        let jobs = self.jobs(count);
        for (at, job) in jobs.iter().enumerate() {
            let data = self.data(at);
            let content = match job.write {
                true => block(block_id(job), job.generation.into()),
                false => vec![0xaa; BLOCK],
            };
            memory.write(data, &content).expect("data memory");
            let request = LoadRequest {
                disk: job.disk,
                request_type: if job.write { RequestType::Write } else { RequestType::Read },
                ranges: vec![(job.number as u64 * BLOCK_SECTORS, BLOCK_SECTORS as u32)],
                data,
            };
            assert!(self.queues.submit(at / DEPTH, at as u32, &request), "a queue is full");
        }
        let began = Instant::now();
        self.queues.publish();
        let mut done = Vec::with_capacity(count);
        let mut left = count;
        while left > 0 {
            self.queues.reap(&mut done);
            if done.is_empty() {
                self.queues.wait();
                continue;
            }
            let latency = began.elapsed().as_nanos() as u64;
            left -= done.len();
            let mut record = record.lock().unwrap_or_else(PoisonError::into_inner);
            record.latencies.record_n(latency, done.len() as u64).expect("a histogram that grows");
            drop(record);
            for (at, outcome) in done.drain(..) {
                let job = &jobs[at as usize];
                assert_eq!(outcome, RequestOutcome::Good, "block {} of disk {}", job.number, job.disk);
                self.check(at as usize, job);
            }
        }
    }

    fn check(&mut self, at: usize, job: &Job) {
        if job.write {
            self.generations[job.disk][job.number] = job.generation;
            return;
        }
        let mut bytes = vec![0; BLOCK];
        let data = self.data(at);
        self.queues.memory().read(data, &mut bytes).expect("data memory");
        if let Some(fault) = block_fault(&bytes, block_id(job), job.generation) {
            panic!("disk {}: {fault}", job.disk);
        }
    }
}

/// Returns a number that differs between all blocks of a device's disks.
fn block_id(job: &Job) -> u64 {
    (job.disk * BLOCKS + job.number) as u64
}

/// A load in a thread of its own.
#[derive(Debug)]
pub struct RunningTimedLoad {
    /// The name of its device.
    pub name: &'static str,
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    record: Arc<Mutex<LoadRecord>>,
    last_progress: Mutex<(u64, Instant)>,
    thread: Option<JoinHandle<()>>,
}

impl RunningTimedLoad {
    /// Starts the thread on a device with this many `disks`. `connect` returns the owner of the connection, and the
    /// queues.
    pub fn start<D, Q: DeviceQueues>(
        name: &'static str,
        disks: usize,
        seed: u64,
        connect: impl FnOnce() -> (D, Q) + Send + 'static,
    ) -> RunningTimedLoad {
        let (stop, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let record = Arc::new(Mutex::new(LoadRecord::new()));
        let (stop2, rounds2, record2) = (Arc::clone(&stop), Arc::clone(&rounds), Arc::clone(&record));
        let thread = std::thread::spawn(move || {
            // Needs root or CAP_SYS_NICE. Without it the latencies include scheduling delays.
            let _ = rustix::process::setpriority_process(None, HIGH_PRIORITY);
            let (_device, queues) = connect();
            let mut load = TimedLoad::new(queues, disks, seed);
            while !stop2.load(Ordering::Relaxed) {
                load.round(&record2);
                rounds2.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(THINK_TIME);
            }
        });
        let last_progress = Mutex::new((0, Instant::now()));
        RunningTimedLoad { name, stop, rounds, record, last_progress, thread: Some(thread) }
    }

    /// Checks that it has not failed, and that a round has ended since the last call or recently.
    ///
    /// # Panics
    /// When it has failed or hangs.
    pub fn assert_runs(&self) {
        let ended = self.thread.as_ref().is_none_or(JoinHandle::is_finished);
        assert!(!ended, "{}: the load has failed", self.name);
        let rounds = self.rounds.load(Ordering::Relaxed);
        let mut last = self.last_progress.lock().unwrap_or_else(PoisonError::into_inner);
        if rounds != last.0 {
            *last = (rounds, Instant::now());
        }
        assert!(
            !TIMEOUT.times(2).is_exceeded_since(last.1),
            "{}: no request has completed for {:?}",
            self.name,
            last.1.elapsed()
        );
    }

    /// Ends a phase, and begins the next one. Returns the measurements of the phase.
    pub fn end_phase(&self) -> LoadPhase {
        let mut record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        let record = std::mem::replace(&mut *record, LoadRecord::new());
        LoadPhase { length: record.began.elapsed(), record }
    }

    /// Ends the load.
    ///
    /// # Panics
    /// When it has failed.
    pub fn finish(mut self) {
        self.assert_runs();
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().expect("a running load");
        assert!(thread.join().is_ok(), "{}: the load has failed", self.name);
    }
}

impl Drop for RunningTimedLoad {
    fn drop(&mut self) {
        // Not joined: after a failure it may wait for a completion that never comes.
        self.stop.store(true, Ordering::Relaxed);
    }
}
