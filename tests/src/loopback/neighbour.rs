//! A frontend that does nothing wrong, on another disk of the same worker: it writes through the project's own driver, and checks
//! all that it reads.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use mqblk_core::units::SECTOR_BYTES;
use mqblk_core::{ByteLen, Sector512};
use mqblk_driver::Piece;
use mqblk_driver::blkfront::toolstack::Vbd;
use mqblk_driver::blkfront::{Device, Options, QueueSet, Status};
use mqblk_memory::GuestAddress;
use mqblk_xen::Xen;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::{PATIENCE, wait_for};
use crate::hostile::load::{BLOCK, block, fault};

/// Requests in flight.
const DEPTH: usize = 8;
/// Blocks of the disk that it uses.
const BLOCKS: usize = 200;

/// Bytes of disk that it needs.
pub const BYTES: u64 = (BLOCKS * BLOCK) as u64;

struct Load {
    device: Device,
    set: QueueSet,
    /// The generation last written of each block; 0: never.
    generations: Vec<u32>,
    random: SmallRng,
    verified: u64,
}

#[derive(Clone, Copy, Debug)]
struct Job {
    number: usize,
    generation: u32,
    write: bool,
}

impl Load {
    fn connect(xen: Arc<dyn Xen>, vbd: &Vbd) -> Result<Load> {
        let mut options = Options::new(xen, vbd.devid);
        options.ring_order = Some(0);
        options.indirect_segments = 0;
        options.depth = DEPTH as u16;
        options.data_per_queue = ByteLen((DEPTH * BLOCK) as u64);
        (options.patience, options.answer_limit) = (PATIENCE, PATIENCE);
        let mut device = Device::connect(&options).context("connecting the good disk")?;
        let set = device.take_queues().pop().context("a set of queues")?;
        let random = SmallRng::seed_from_u64(5);
        Ok(Load { device, set, generations: vec![0; BLOCKS], random, verified: 0 })
    }

    fn piece(&mut self, at: usize) -> Piece {
        let (data, _) = self.set.queues()[0].data();
        Piece { address: GuestAddress(data.0 + (at * BLOCK) as u64), len: BLOCK as u32 }
    }

    /// A batch of writes and reads of different blocks, and all answers checked.
    fn round(&mut self) -> Result<()> {
        let (mut jobs, mut taken) = (Vec::with_capacity(DEPTH), HashSet::new());
        while jobs.len() < DEPTH {
            let number = self.random.random_range(0..BLOCKS);
            if taken.insert(number) {
                let old = self.generations[number];
                let write = old == 0 || self.random.random_bool(0.5);
                jobs.push(Job { number, generation: if write { old + 1 } else { old }, write });
            }
        }
        for (at, job) in jobs.iter().enumerate() {
            let piece = self.piece(at);
            let start = Sector512((job.number * BLOCK) as u64 / SECTOR_BYTES);
            let content = if job.write { block(job.number as u64, job.generation.into()) } else { vec![0xaa; BLOCK] };
            let queue = &mut self.set.queues()[0];
            queue.memory().write(piece.address, &content).context("data memory")?;
            if job.write { queue.write(at as u32, start, piece) } else { queue.read(at as u32, start, piece) }?;
        }
        self.set.queues()[0].publish();
        let until = Instant::now() + PATIENCE;
        let mut left = jobs.len();
        while left > 0 {
            if self.set.queues()[0].look()? == 0 {
                ensure!(Instant::now() < until, "{left} of {} answers did not come", jobs.len());
                std::thread::sleep(Duration::from_micros(50));
            }
            while let Some(done) = self.set.queues()[0].reap()? {
                left -= 1;
                ensure!(done.status == Status::Ok, "{:?}: {:?}", jobs[done.user as usize], done.status);
                self.check(done.user as usize, jobs[done.user as usize])?;
            }
        }
        Ok(())
    }

    fn check(&mut self, at: usize, job: Job) -> Result<()> {
        if job.write {
            self.generations[job.number] = job.generation;
            return Ok(());
        }
        let piece = self.piece(at);
        let mut bytes = vec![0; BLOCK];
        self.set.queues()[0].memory().read(piece.address, &mut bytes).context("data memory")?;
        if let Some(fault) = fault(&bytes, job.number as u64, job.generation) {
            bail!("{fault}");
        }
        self.verified += 1;
        Ok(())
    }
}

/// The good disk and its client, which goes on verifying until it is stopped.
pub struct Neighbour {
    vbd: Vbd,
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    thread: Option<JoinHandle<Result<u64>>>,
}

impl Neighbour {
    /// Has the toolstack make the device, and starts to verify.
    ///
    /// # Errors
    /// When it cannot be connected.
    pub fn start(front: &Arc<dyn Xen>, tool: &dyn Xen, vbd: Vbd) -> Result<Neighbour> {
        vbd.create(&mut tool.store()?)?;
        let mut load = Load::connect(Arc::clone(front), &vbd)?;
        let (stop, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stop2, rounds2) = (Arc::clone(&stop), Arc::clone(&rounds));
        let thread = std::thread::spawn(move || {
            while !stop2.load(Ordering::Relaxed) {
                load.round()?;
                rounds2.fetch_add(1, Ordering::Relaxed);
                // Leaves the processors to the others; the worker sleeps now and then, as it would with a real guest.
                std::thread::sleep(Duration::from_millis(1));
            }
            load.device.stop(vec![load.set])?;
            Ok(load.verified)
        });
        let mut neighbour = Neighbour { vbd, stop, rounds, thread: Some(thread) };
        neighbour.must_go_on()?;
        Ok(neighbour)
    }

    /// Rounds verified so far.
    pub fn rounds(&self) -> u64 {
        self.rounds.load(Ordering::Relaxed)
    }

    fn end(&mut self) -> Result<u64> {
        let thread = self.thread.take().context("the good disk's client has ended before")?;
        thread.join().map_err(|_| anyhow!("the good disk's client panicked"))?.context("the good disk's client")
    }

    /// Waits for two more rounds: one that began after now is among them.
    ///
    /// # Errors
    /// What was wrong with an answer; or none comes.
    pub fn must_go_on(&mut self) -> Result<()> {
        let now = self.rounds();
        wait_for("the good disk's next round", || {
            if self.thread.as_ref().is_none_or(JoinHandle::is_finished) {
                self.end()?;
            }
            Ok((self.rounds() >= now + 2).then_some(()))
        })
    }

    /// Ends it and has the toolstack take the device away; how many blocks it has verified.
    ///
    /// # Errors
    /// What was wrong.
    pub fn finish(mut self, tool: &dyn Xen) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        let verified = self.end()?;
        let mut store = tool.store()?;
        self.vbd.detach(&mut store)?;
        let state = format!("{}/state", self.vbd.back_path());
        wait_for("the good disk closes", || Ok((store.read(&state)?.is_none_or(|state| state == "6")).then_some(())))?;
        self.vbd.remove(&mut store)?;
        Ok(verified)
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
