//! A client thread: owns queues, keeps requests in flight on them, and counts.

mod counting;
mod pace;
mod parts;
mod series;
mod slot;
mod stats;
mod verify;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mqblk_driver::{DeviceError, DriverError, SubmitError};
use mqblk_memory::{GuestAddress, GuestMemory};

use crate::control::{CompletionCounter, Phase, PhaseControl};
use crate::device::{CompletedTransfer, IoOp, ThreadQueues, TransferStatus};
use crate::words::ClientMode;
use pace::Pacer;
use series::SeriesRecorder;
use slot::{IoSlot, next_of_job};

pub(crate) use pace::PaceStats;
pub(crate) use series::{Interval, MAX_INTERVALS, SeriesSettings, TimeSeries};
pub(crate) use slot::{DiskJob, WorkerSettings};
pub(crate) use stats::{OpStats, WorkerStats};

/// Consecutive empty polls after which a polling client yields its CPU: some 100 us.
const POLLS_BEFORE_YIELD: u32 = 4096;
/// The system's smallest page.
const PAGE: usize = 4096;
/// Longest sleep of an open-loop client: the phase may change meanwhile.
const MAX_SLEEP: Duration = Duration::from_millis(20);

/// Reason why a thread ended early.
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

/// A client thread.
#[derive(Debug)]
pub(crate) struct Worker<Q: ThreadQueues> {
    set: Q,
    memory: Arc<GuestMemory>,
    slots: Vec<IoSlot<Q::Status>>,
    /// For each queue: slots of I/Os that it had no space for, and how many of their bytes were submitted.
    backlog: Vec<VecDeque<(u32, u32)>>,
    /// Exchanged with another thread's for the verification.
    pub jobs: Vec<DiskJob>,
    /// For each of `jobs`: index of the same job's next disk.
    next_disk: Vec<u16>,
    /// True if a job has fewer I/Os in flight than queues: each I/O takes the queues in turn.
    rotates_queues: bool,
    settings: WorkerSettings,
    /// Starts the I/Os of an open-loop load.
    pacer: Option<Pacer>,
    origin: Instant,
    scratch: Vec<u8>,
    progress: Arc<CompletionCounter>,
    done: u64,
    stats: WorkerStats,
    /// Time and CPU time at the start of the measurement.
    measurement_start: Option<(u64, Duration)>,
    /// Records the time series until the end of the measurement, if there is one.
    series: Option<SeriesRecorder>,
}

/// Faults in the pages of a buffer, as fio does: large blocks have gigabytes of buffers, and clearing them would count
/// as the server's work.
fn prefault(memory: &GuestMemory, address: GuestAddress, len: u32) {
    for at in (0..len).step_by(PAGE) {
        memory.write(GuestAddress(address.0 + u64::from(at)), &[0]).expect("a buffer lies in shared memory");
    }
}

impl<Q: ThreadQueues> Worker<Q> {
    /// Creates a thread that keeps `settings.iodepth` I/Os of each job in flight on the queues of `set`, whose data
    /// memory has space for them. The disks of a job are adjacent in `jobs`.
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
                slots.push(IoSlot {
                    address,
                    start_ns: 0,
                    block: 0,
                    generation: 0,
                    job: first,
                    queue: queue as u16,
                    op: IoOp::Read,
                    disk: group[0].disk,
                    len: settings.bs,
                    pending_parts: 0,
                    status: Q::Status::GOOD,
                });
            }
        }
        let numbers = groups.iter().map(|group| group[0].number);
        Worker {
            pacer: settings.rate.map(|rate| Pacer::new(rate, numbers, settings.jobs, settings.iodepth)),
            set,
            memory,
            slots,
            backlog: vec![VecDeque::new(); queues],
            jobs,
            next_disk,
            rotates_queues: spread && usize::from(settings.iodepth) < queues,
            settings,
            origin: Instant::now(),
            scratch: if settings.verify { vec![0; settings.max_len() as usize] } else { vec![] },
            progress,
            done: 0,
            stats: WorkerStats::new(settings.disks),
            measurement_start: None,
            series: settings.series.map(SeriesRecorder::new),
        }
    }

    /// Returns the stats and the queues.
    pub(crate) fn into_parts(self) -> (WorkerStats, Q) {
        (self.stats, self.set)
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
            Phase::Measure => self.begin_measurement(control)?,
            // The server may end before the last thread has started.
            Phase::Abandon => return Err(WorkerError::Abandoned),
            Phase::Warmup | Phase::Stop => {}
        }
        let mut now = self.now_ns();
        match &mut self.pacer {
            Some(pacer) => pacer.restart(now),
            None => {
                for slot in 0..self.slots.len() {
                    self.start_io::<VERIFY, MIXED>(slot, now)?;
                }
                self.publish_all()?;
            }
        }
        let mut idle = 0;
        loop {
            let current = control.get();
            if current != phase {
                phase = current;
                match phase {
                    Phase::Measure => self.begin_measurement(control)?,
                    Phase::Stop => self.end_measurement()?,
                    Phase::Warmup => {}
                    Phase::Abandon => return Err(WorkerError::Abandoned),
                }
            }
            let mut in_flight = 0;
            let mut worked = false;
            let more = phase < Phase::Stop;
            // The completions after it have a later time.
            let started = more && self.pacer.is_some() && self.start_due::<VERIFY, MIXED>(self.now_ns())?;
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
            if worked || started {
                idle = 0;
                self.progress.0.store(self.done, Ordering::Relaxed);
            } else if in_flight + self.set.outstanding_elsewhere() == 0
                && !(more && self.pacer.as_ref().is_some_and(|pacer| !pacer.is_done()))
                && self.set.try_leave()
            {
                break;
            } else {
                self.wait_or_spin(&mut idle, more)?;
            }
        }
        self.end_measurement()
    }

    /// Sleeps until a completion or until an I/O is due, or spins. `more`: I/Os are still started.
    #[inline]
    fn wait_or_spin(&mut self, idle: &mut u32, more: bool) -> Result<(), WorkerError> {
        match self.settings.client {
            ClientMode::Wait if more && self.pacer.is_some() => self.wait_until_due(),
            ClientMode::Wait => Ok(self.set.wait(self.settings.batch, None)?),
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

    fn wait_until_due(&mut self) -> Result<(), WorkerError> {
        let due = self.pacer.as_ref().and_then(Pacer::next_ns);
        let left = due.map(|due| Duration::from_nanos(due.saturating_sub(self.now_ns())).min(MAX_SLEEP));
        match left {
            Some(Duration::ZERO) => Ok(()),
            left => Ok(self.set.wait(self.settings.batch, left)?),
        }
    }

    /// Starts the I/Os of an open-loop load that are due, as many as there are slots for. Returns true if there were
    /// any.
    fn start_due<const VERIFY: bool, const MIXED: bool>(&mut self, now: u64) -> Result<bool, WorkerError> {
        let mut any = false;
        for job in 0..self.pacer.as_ref().map_or(0, Pacer::job_count) {
            while let Some((slot, due)) = self.pacer.as_mut().and_then(|pacer| pacer.take(job, now)) {
                any = true;
                if !self.start_io::<VERIFY, MIXED>(slot, due)?
                    && let Some(pacer) = &mut self.pacer
                {
                    pacer.exhaust(job);
                }
            }
        }
        if any {
            self.publish_all()?;
        }
        Ok(any)
    }

    /// Reaps all completions of a queue, and starts a new I/O for each, in the order of the job's sequence. The new
    /// requests are published together at the end, full batches before.
    #[inline]
    fn reap_queue<const VERIFY: bool, const MIXED: bool>(
        &mut self,
        index: usize,
        now: u64,
        more: bool,
    ) -> Result<(), WorkerError> {
        // Once for all completions: without a series it costs a request nothing.
        match self.seek_series(now) {
            true => self.reap_all::<VERIFY, MIXED, true>(index, now, more)?,
            false => self.reap_all::<VERIFY, MIXED, false>(index, now, more)?,
        }
        if Q::HANDS_OVER {
            // Completions of other threads' requests may have freed space.
            self.drain_backlog::<MIXED>(index)?;
        }
        // Without rotation all new requests are on this queue.
        self.set.publish(index)?;
        if self.rotates_queues { self.publish_all() } else { Ok(()) }
    }

    #[inline]
    fn reap_all<const VERIFY: bool, const MIXED: bool, const SERIES: bool>(
        &mut self,
        index: usize,
        now: u64,
        more: bool,
    ) -> Result<(), WorkerError> {
        while let Some(done) = self.set.reap(index)? {
            self.request_completed::<VERIFY, MIXED, SERIES>(done, now, more)?;
            self.drain_backlog::<MIXED>(index)?;
        }
        Ok(())
    }

    /// Reaps completions that other threads have handed back, as [`reap_queue`](Self::reap_queue) does.
    fn reap_handed_back<const VERIFY: bool, const MIXED: bool>(
        &mut self,
        now: u64,
        more: bool,
    ) -> Result<(), WorkerError> {
        self.seek_series(now);
        while let Some(done) = self.set.next_handed_back() {
            // The check for a series is negligible beside a handover.
            self.request_completed::<VERIFY, MIXED, true>(done, now, more)?;
        }
        for index in 0..self.set.queue_count() {
            self.drain_backlog::<MIXED>(index)?;
        }
        self.publish_all()
    }

    /// Handles the completion of a request.
    #[inline]
    fn request_completed<const VERIFY: bool, const MIXED: bool, const SERIES: bool>(
        &mut self,
        done: CompletedTransfer<Q::Status>,
        now: u64,
        more: bool,
    ) -> Result<(), WorkerError> {
        let slot = done.user as usize;
        if self.part_completed(&done) {
            self.io_completed::<VERIFY, MIXED, SERIES>(slot, now);
            if let Some(pacer) = &mut self.pacer {
                pacer.put_back(slot);
            } else if more {
                self.start_io::<VERIFY, MIXED>(slot, now)?;
            }
        }
        Ok(())
    }

    fn publish_all(&mut self) -> Result<(), WorkerError> {
        (0..self.set.queue_count()).try_for_each(|queue| self.set.publish(queue)).map_err(WorkerError::Eventfd)
    }

    /// Starts the next I/O of a slot's job. Returns false if there is none. `now`: its start, or its due time.
    #[inline]
    fn start_io<const VERIFY: bool, const MIXED: bool>(&mut self, index: usize, now: u64) -> Result<bool, WorkerError> {
        let WorkerSettings { bs, most_blocks, fsync, .. } = self.settings;
        let slot = &mut self.slots[index];
        slot.start_ns = now;
        if MIXED && fsync != 0 && self.jobs[usize::from(slot.job)].unflushed >= fsync {
            return self.start_flush(index);
        }
        let (op, run) = if MIXED {
            let Some(next) = next_of_job::<VERIFY>(&mut self.jobs, &self.next_disk, &mut slot.job, most_blocks) else {
                return Ok(false);
            };
            (slot.disk, slot.len) = (self.jobs[usize::from(slot.job)].disk, next.1 * bs);
            next
        } else {
            let job = &mut self.jobs[usize::from(slot.job)];
            let next = if VERIFY { job.next_run::<true>(1) } else { job.pattern.next().map(|op| (op, 1)) };
            let Some(next) = next else { return Ok(false) };
            next
        };
        let job = &mut self.jobs[usize::from(slot.job)];
        (slot.block, slot.op) = (op.block, op.op);
        if MIXED && fsync != 0 && op.op == IoOp::Write {
            job.unflushed += 1;
        }
        if let (true, Some(generations)) = (VERIFY, job.generations.as_mut()) {
            let Some(block) = generations.claim(op.block) else { return Ok(false) };
            slot.block = block;
            let more = (1..run).take_while(|more| generations.try_claim(block + u64::from(*more))).count() as u32;
            slot.len = (1 + more) * bs;
            if op.op == IoOp::Write {
                slot.generation = generations.next_generation();
                let slot = *slot;
                self.fill_buffer(slot);
            }
        }
        self.submit_io::<MIXED>(index).map(|()| true)
    }

    /// Flushes the disk that the slot's job has written to.
    #[cold]
    fn start_flush(&mut self, index: usize) -> Result<bool, WorkerError> {
        let slot = &mut self.slots[index];
        let job = &mut self.jobs[usize::from(slot.job)];
        job.unflushed = 0;
        // The length is that of one request.
        (slot.op, slot.disk, slot.len) = (IoOp::Flush, job.disk, self.settings.bs.min(self.settings.request_len));
        self.submit_io::<true>(index).map(|()| true)
    }
}
