//! A client thread: owns queues, keeps requests in flight on them, and counts.

mod parts;
mod verify;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use mqblk_core::{ByteOffset, Sector512};
use mqblk_driver::{DeviceError, DriverError, SubmitError};
use mqblk_memory::{GuestAddress, GuestMemory};

use crate::args::ClientMode;
use crate::control::{CompletionCounter, Phase, PhaseControl};
use crate::cpu;
use crate::interface::{CompletedTransfer, ThreadQueues, TransferStatus};
use crate::pattern::{AccessPattern, BlockOp};
use crate::verification::BlockGenerations;

/// Consecutive empty polls after which a polling client yields its CPU: some 100 us.
const POLLS_BEFORE_YIELD: u32 = 4096;
/// Messages that are kept; further errors are only counted.
const MAX_MESSAGES: usize = 5;
/// The system's smallest page.
const PAGE: usize = 4096;
/// Longest latency that is recorded exactly, in nanoseconds.
const MAX_LATENCY_NS: u64 = 100_000_000_000;

/// Why a thread gave up.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WorkerError {
    /// The main thread abandoned the run.
    #[error("abandoned")]
    Abandoned,
    /// The driver failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// A request was refused although there was space.
    #[error("a request was refused: {0}")]
    Refused(#[from] SubmitError),
    /// An eventfd failed.
    #[error("a queue's eventfd: {0}")]
    Eventfd(#[from] std::io::Error),
}

impl From<DeviceError> for WorkerError {
    fn from(error: DeviceError) -> Self {
        WorkerError::Driver(error.into())
    }
}

/// A job of this thread on one disk. A job with several disks takes them in turn.
#[derive(Debug)]
pub(crate) struct DiskJob {
    /// Number of the job; the same for all its disks.
    pub number: u16,
    /// The disk.
    pub disk: u16,
    /// Which blocks it does next.
    pub pattern: AccessPattern,
    /// What it wrote, if that is verified.
    pub generations: Option<BlockGenerations>,
}

/// Slot of one I/O in flight.
#[derive(Clone, Copy, Debug)]
struct IoSlot<S> {
    address: GuestAddress,
    start_ns: u64,
    block: u64,
    generation: u32,
    /// Index in the thread's jobs.
    job: u16,
    queue: u16,
    write: bool,
    /// The disk, if there are several.
    disk: u16,
    /// Bytes, if sizes are mixed.
    len: u32,
    /// Requests that have not completed.
    pending_parts: u32,
    /// The first bad status of its requests so far.
    status: S,
}

/// Settings of a client thread.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WorkerSettings {
    /// Bytes of a block: of the smallest I/O.
    pub bs: u32,
    /// Sectors of a block.
    pub bs_sectors: Sector512,
    /// Blocks of the largest I/O.
    pub most_blocks: u32,
    /// Disks.
    pub disks: u16,
    /// Most bytes of a request. A larger I/O is several.
    pub request_len: u32,
    /// Start of block 0.
    pub base: Sector512,
    /// Requests to submit, and to wait for, at once.
    pub batch: u16,
    /// I/Os in flight of each job.
    pub iodepth: u16,
    /// How to wait for completions.
    pub client: ClientMode,
    /// Blocks are verified.
    pub verify: bool,
}

impl WorkerSettings {
    /// Returns true if I/Os differ in size or disk.
    fn is_mixed(&self) -> bool {
        self.most_blocks > 1 || self.disks > 1
    }

    /// Returns the bytes of the largest I/O.
    fn max_len(&self) -> u32 {
        self.bs * self.most_blocks
    }
}

/// What a thread measured.
#[derive(Debug)]
pub(crate) struct WorkerStats {
    /// I/Os that completed in the measurement.
    pub ios: u64,
    /// Their bytes on each disk. 0 unless I/Os differ in size or disk.
    pub bytes: Vec<u64>,
    /// Requests handed over to other threads in it.
    pub handed_over: u64,
    /// Length of the measurement.
    pub elapsed: Duration,
    /// CPU time of this thread in it.
    pub cpu: Duration,
    /// Kicks in it.
    pub kicks: u64,
    /// Calls in it.
    pub calls: u64,
    /// I/Os that failed or did not verify, also outside of the measurement.
    pub errors: u64,
    /// Messages about some of them.
    pub messages: Vec<String>,
    /// Latencies in nanoseconds.
    pub latency: Histogram<u64>,
}

/// A client thread.
#[derive(Debug)]
pub(crate) struct Worker<Q: ThreadQueues> {
    set: Q,
    memory: Arc<GuestMemory>,
    slots: Vec<IoSlot<Q::Status>>,
    /// For each queue: slots of I/Os that it had no space for, and how many of their bytes were submitted.
    backlog: Vec<VecDeque<(u32, u32)>>,
    jobs: Vec<DiskJob>,
    /// For each of `jobs`: index of the same job's next disk.
    next_disk: Vec<u16>,
    /// True if a job has fewer I/Os in flight than queues: each I/O takes the queues in turn.
    rotates_queues: bool,
    settings: WorkerSettings,
    origin: Instant,
    scratch: Vec<u8>,
    progress: Arc<CompletionCounter>,
    done: u64,
    stats: WorkerStats,
    /// Time and CPU time at the start of the measurement.
    measurement_start: Option<(u64, Duration)>,
}

/// Faults in the pages of a buffer, as fio does and as a guest's are: large blocks have gigabytes of buffers, and clearing them
/// would be measured as the server's work.
fn prefault(memory: &GuestMemory, address: GuestAddress, len: u32) {
    for at in (0..len).step_by(PAGE) {
        memory.write(GuestAddress(address.0 + u64::from(at)), &[0]).expect("a buffer lies in shared memory");
    }
}

impl<Q: ThreadQueues> Worker<Q> {
    /// Creates a thread that keeps `settings.iodepth` I/Os of each job in flight on the queues of `set`, whose data memory has
    /// space for them. The disks of a job are adjacent in `jobs`.
    pub(crate) fn new(
        set: Q,
        jobs: Vec<DiskJob>,
        settings: WorkerSettings,
        progress: Arc<CompletionCounter>,
    ) -> Worker<Q> {
        let memory = Arc::clone(set.memory());
        let queues = set.queue_count();
        let groups: Vec<&[DiskJob]> = jobs.chunk_by(|a, b| a.number == b.number).collect();
        let mut used = vec![0; queues];
        let mut slots = Vec::with_capacity(groups.len() * usize::from(settings.iodepth));
        let mut next_disk = Vec::with_capacity(jobs.len());
        let spread = Q::SPREADS && groups.len() < queues;
        for (number, group) in groups.iter().enumerate() {
            let first = next_disk.len() as u16;
            let last = first + group.len() as u16 - 1;
            next_disk.extend((first..=last).map(|index| if index == last { first } else { index + 1 }));
            for _ in 0..settings.iodepth {
                let queue = if spread { slots.len() } else { number } % queues;
                let address = GuestAddress(set.data_start(queue).0 + used[queue]);
                used[queue] += u64::from(settings.max_len()).next_multiple_of(Q::DATA_ALIGN);
                prefault(&memory, address, settings.max_len());
                let (start_ns, block, generation, write) = (0, 0, 0, false);
                let (job, queue, waiting, status) = (first, queue as u16, 0, Q::Status::GOOD);
                let (disk, len) = (group[0].disk, settings.bs);
                let slot = IoSlot {
                    address,
                    start_ns,
                    block,
                    generation,
                    job,
                    queue,
                    write,
                    disk,
                    len,
                    pending_parts: waiting,
                    status,
                };
                slots.push(slot);
            }
        }
        let rotates_queues = spread && usize::from(settings.iodepth) < queues;
        let latency = Histogram::new_with_max(MAX_LATENCY_NS, 3).expect("bounds that the histogram takes");
        let stats = WorkerStats {
            ios: 0,
            bytes: vec![0; settings.disks.into()],
            handed_over: 0,
            elapsed: Duration::ZERO,
            cpu: Duration::ZERO,
            kicks: 0,
            calls: 0,
            errors: 0,
            messages: vec![],
            latency,
        };
        let scratch = if settings.verify { vec![0; settings.max_len() as usize] } else { vec![] };
        let origin = Instant::now();
        let backlog = vec![VecDeque::new(); queues];
        let (done, measurement_start) = (0, None);
        Worker {
            set,
            memory,
            slots,
            backlog,
            jobs,
            next_disk,
            rotates_queues,
            settings,
            origin,
            scratch,
            progress,
            done,
            stats,
            measurement_start,
        }
    }

    /// Returns what was measured, the jobs, and the queues.
    pub(crate) fn into_parts(self) -> (WorkerStats, Vec<DiskJob>, Q) {
        (self.stats, self.jobs, self.set)
    }

    /// Returns the jobs, to exchange them with another thread's for the verification.
    pub(crate) fn jobs_mut(&mut self) -> &mut Vec<DiskJob> {
        &mut self.jobs
    }

    fn now_ns(&self) -> u64 {
        self.origin.elapsed().as_nanos() as u64
    }

    /// Runs the load until each block is done, or the phase is [`Phase::Stop`].
    ///
    /// # Errors
    /// [`WorkerError`]: the queues cannot be used any more.
    pub(crate) fn load(&mut self, control: &PhaseControl) -> Result<(), WorkerError> {
        match (self.settings.verify, self.settings.is_mixed()) {
            (false, false) => self.run::<false, false>(control),
            (false, true) => self.run::<false, true>(control),
            (true, false) => self.run::<true, false>(control),
            (true, true) => self.run::<true, true>(control),
        }
    }

    fn run<const VERIFY: bool, const MIXED: bool>(&mut self, control: &PhaseControl) -> Result<(), WorkerError> {
        let mut phase = control.get();
        match phase {
            Phase::Measure => self.begin_measurement()?,
            // The server may end before the last thread has started.
            Phase::Abandon => return Err(WorkerError::Abandoned),
            Phase::Warmup | Phase::Stop => {}
        }
        let mut now = self.now_ns();
        for slot in 0..self.slots.len() {
            self.start_io::<VERIFY, MIXED>(slot, now)?;
        }
        self.publish_all()?;
        let mut idle = 0;
        loop {
            let current = control.get();
            if current != phase {
                phase = current;
                match phase {
                    Phase::Measure => self.begin_measurement()?,
                    Phase::Stop => self.end_measurement()?,
                    Phase::Warmup => {}
                    Phase::Abandon => return Err(WorkerError::Abandoned),
                }
            }
            let mut in_flight = 0;
            let mut worked = false;
            let more = phase < Phase::Stop;
            if Q::HANDS_OVER && self.set.receive_handovers()? != 0 {
                worked = true;
                now = self.now_ns();
                self.reap_handed_back::<VERIFY, MIXED>(now, more)?;
            }
            for index in 0..self.set.queue_count() {
                let (ready, waiting) = self.set.peek(index)?;
                in_flight += u32::from(waiting);
                if ready == 0 || ready < self.settings.batch.min(waiting) {
                    continue;
                }
                if !worked {
                    worked = true;
                    now = self.now_ns();
                }
                self.reap_queue::<VERIFY, MIXED>(index, now, more)?;
            }
            if worked {
                idle = 0;
                self.progress.0.store(self.done, Ordering::Relaxed);
            } else if in_flight + self.set.outstanding_elsewhere() == 0 && self.set.try_leave() {
                break;
            } else {
                self.wait_or_spin(&mut idle)?;
            }
        }
        self.end_measurement()
    }

    /// Sleeps until a completion, or spins.
    #[inline]
    fn wait_or_spin(&mut self, idle: &mut u32) -> Result<(), WorkerError> {
        match self.settings.client {
            ClientMode::Wait => Ok(self.set.wait(self.settings.batch)?),
            ClientMode::Poll => {
                *idle = idle.wrapping_add(1);
                match idle.is_multiple_of(POLLS_BEFORE_YIELD) {
                    true => std::thread::yield_now(),
                    false => std::hint::spin_loop(),
                }
                Ok(())
            }
        }
    }

    /// Reaps all completions of a queue, and starts a new I/O for each, in the order of the job's sequence. The new requests
    /// are published together at the end, full batches before.
    #[inline]
    fn reap_queue<const VERIFY: bool, const MIXED: bool>(
        &mut self,
        index: usize,
        now: u64,
        more: bool,
    ) -> Result<(), WorkerError> {
        while let Some(done) = self.set.reap(index)? {
            self.request_completed::<VERIFY, MIXED>(done, now, more)?;
            self.drain_backlog::<MIXED>(index)?;
        }
        if Q::HANDS_OVER {
            // All completions may have been other threads', and may have freed space.
            self.drain_backlog::<MIXED>(index)?;
        }
        // Without rotation all new requests are on this queue.
        self.set.publish(index)?;
        if self.rotates_queues { self.publish_all() } else { Ok(()) }
    }

    /// Does the same with the completions that other threads have handed back.
    fn reap_handed_back<const VERIFY: bool, const MIXED: bool>(
        &mut self,
        now: u64,
        more: bool,
    ) -> Result<(), WorkerError> {
        while let Some(done) = self.set.next_handed_back() {
            self.request_completed::<VERIFY, MIXED>(done, now, more)?;
        }
        for index in 0..self.set.queue_count() {
            self.drain_backlog::<MIXED>(index)?;
        }
        self.publish_all()
    }

    /// Handles the completion of a request.
    #[inline]
    fn request_completed<const VERIFY: bool, const MIXED: bool>(
        &mut self,
        done: CompletedTransfer<Q::Status>,
        now: u64,
        more: bool,
    ) -> Result<(), WorkerError> {
        let slot = done.user as usize;
        if let Some(status) = self.part_completed(done) {
            self.io_completed::<VERIFY, MIXED>(slot, status, now);
            if more {
                self.start_io::<VERIFY, MIXED>(slot, now)?;
            }
        }
        Ok(())
    }

    fn publish_all(&mut self) -> Result<(), WorkerError> {
        (0..self.set.queue_count()).try_for_each(|queue| self.set.publish(queue)).map_err(WorkerError::Eventfd)
    }

    #[inline]
    fn io_completed<const VERIFY: bool, const MIXED: bool>(&mut self, index: usize, status: Q::Status, now: u64) {
        let slot = self.slots[index];
        self.done += if MIXED { u64::from(slot.len / self.settings.bs) } else { 1 };
        if self.measurement_start.is_some() {
            self.stats.ios += 1;
            if MIXED {
                self.stats.bytes[usize::from(slot.disk)] += u64::from(slot.len);
            }
            self.stats.latency.saturating_record(now.saturating_sub(slot.start_ns));
        }
        let failed = status != Q::Status::GOOD;
        if failed {
            self.record_error(&slot, slot.block, format_args!("{status:?}"));
        }
        if VERIFY {
            self.record_completion(slot, failed);
        }
    }

    fn offset(&self, block: u64) -> ByteOffset {
        // The plan has checked that the whole range lies on the disk.
        self.sector(block).to_offset().unwrap_or_default()
    }

    #[inline]
    fn sector(&self, block: u64) -> Sector512 {
        Sector512(self.settings.base.0 + block * self.settings.bs_sectors.0)
    }

    #[cold]
    fn record_error(&mut self, slot: &IoSlot<Q::Status>, block: u64, what: std::fmt::Arguments<'_>) {
        self.stats.errors += 1;
        if self.stats.messages.len() < MAX_MESSAGES {
            let offset = self.offset(block).0;
            let disk = if self.settings.disks > 1 { format!("disk {}: ", slot.disk) } else { String::new() };
            self.stats.messages.push(format!("{disk}block at offset {offset}: {what}"));
        }
    }

    /// Starts the next I/O of a slot's job, if there is one.
    #[inline]
    fn start_io<const VERIFY: bool, const MIXED: bool>(&mut self, index: usize, now: u64) -> Result<(), WorkerError> {
        let WorkerSettings { bs, most_blocks, .. } = self.settings;
        let slot = &mut self.slots[index];
        let (op, run) = if MIXED {
            let Some(next) = next_of_job(&mut self.jobs, &self.next_disk, &mut slot.job, most_blocks) else {
                return Ok(());
            };
            (slot.disk, slot.len) = (self.jobs[usize::from(slot.job)].disk, next.1 * bs);
            next
        } else {
            let Some(op) = self.jobs[usize::from(slot.job)].pattern.next() else { return Ok(()) };
            (op, 1)
        };
        let job = &mut self.jobs[usize::from(slot.job)];
        (slot.block, slot.write, slot.start_ns) = (op.block, op.write, now);
        if let (true, Some(generations)) = (VERIFY, job.generations.as_mut()) {
            let Some(block) = generations.claim(op.block) else { return Ok(()) };
            slot.block = block;
            let more = (1..run).take_while(|more| generations.try_claim(block + u64::from(*more))).count() as u32;
            slot.len = (1 + more) * bs;
            if op.write {
                slot.generation = generations.next_generation();
                let slot = *slot;
                self.fill_buffer(slot);
            }
        }
        self.submit_io::<MIXED>(index)
    }

    /// Starts the measurement: resets all counters.
    fn begin_measurement(&mut self) -> Result<(), WorkerError> {
        self.stats.latency.reset();
        self.stats.ios = 0;
        self.stats.bytes.fill(0);
        (self.stats.kicks, self.stats.calls) = (self.set.kicks(), self.set.calls()?);
        self.stats.handed_over = self.set.handed_over();
        self.measurement_start = Some((self.now_ns(), cpu::thread_time()));
        Ok(())
    }

    /// Ends the measurement. Later completions are not counted.
    fn end_measurement(&mut self) -> Result<(), WorkerError> {
        let Some((start_ns, start_cpu)) = self.measurement_start.take() else { return Ok(()) };
        self.stats.elapsed = Duration::from_nanos(self.now_ns() - start_ns);
        self.stats.cpu = cpu::thread_time().saturating_sub(start_cpu);
        self.stats.kicks = self.set.kicks() - self.stats.kicks;
        self.stats.calls = self.set.calls()? - self.stats.calls;
        self.stats.handed_over = self.set.handed_over() - self.stats.handed_over;
        Ok(())
    }
}

/// Returns the next operation of a job, and its blocks. `current`: the index of its last one's disk; moves on to the job's next
/// disk that has something left to do.
fn next_of_job(jobs: &mut [DiskJob], next_disk: &[u16], current: &mut u16, most: u32) -> Option<(BlockOp, u32)> {
    let start = *current;
    loop {
        *current = next_disk[usize::from(*current)];
        let next = jobs[usize::from(*current)].pattern.next_run(most);
        if next.is_some() || *current == start {
            return next;
        }
    }
}
