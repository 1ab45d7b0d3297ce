//! One run: the threads of one combination on one device.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use mqblk_driver::Waker;

use crate::BenchError;
use crate::args::Rw;
use crate::control::{CompletionCounter, Phase, PhaseControl};
use crate::cpu;
use crate::interface::{Connector, Device, DeviceDisk, MAX_PARTS, ServerMonitor, ThreadQueues};
use crate::merges::{MergeCounters, MergeRates};
use crate::pattern::AccessPattern;
use crate::plan::{Combination, Plan, Target};
use crate::progress;
use crate::streams::{JobRange, Streams};
use crate::target::{ServerProcess, Session};
use crate::verification::BlockGenerations;
use crate::worker::{DiskJob, Worker, WorkerError, WorkerSettings, WorkerStats};

/// Interval at which the main thread checks the others.
const TICK: Duration = Duration::from_millis(50);

/// What one run measured.
#[derive(Debug)]
pub struct RunResult {
    /// I/Os that completed in the measurement.
    pub ios: u64,
    /// Their bytes on each disk.
    pub bytes: Vec<u64>,
    /// Requests of the largest I/O: 1 unless the disk takes less than the block size at once.
    pub requests_per_io: u32,
    /// Requests that were handed over to the thread that owns their queue.
    pub handed_over: u64,
    /// Length of the measurement.
    pub elapsed: Duration,
    /// The server's CPU time in it, if it can be read.
    pub server_cpu: Option<Duration>,
    /// The client threads' CPU time in it.
    pub client_cpu: Duration,
    /// Requests that the server merged in it, if it is known.
    pub merges: Option<MergeRates>,
    /// Kicks in it.
    pub kicks: u64,
    /// Calls in it.
    pub calls: u64,
    /// I/Os that failed or did not verify.
    pub errors: u64,
    /// Messages about some of them.
    pub messages: Vec<String>,
    /// Blocks read back and checked after the load.
    pub verified: u64,
    /// Latencies in nanoseconds.
    pub latency: Histogram<u64>,
}

impl RunResult {
    fn per_second(&self, count: u64) -> f64 {
        count as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }

    /// Returns the I/Os per second.
    pub fn iops(&self) -> f64 {
        self.per_second(self.ios)
    }

    /// Returns the bytes per second.
    pub fn bandwidth(&self) -> f64 {
        self.per_second(self.bytes.iter().sum())
    }

    /// Returns the bytes per second of each disk.
    pub fn disk_bandwidths(&self) -> impl Iterator<Item = f64> {
        self.bytes.iter().map(|bytes| self.per_second(*bytes))
    }
}

/// The input of one run.
#[derive(Clone, Copy, Debug)]
pub struct RunInput<'a> {
    /// The plan.
    pub plan: &'a Plan,
    /// The combination.
    pub combination: &'a Combination,
    /// The target.
    pub target: &'a Target,
    /// Seed of random blocks and of generations.
    pub seed: u64,
    /// Display of the progress.
    pub progress: &'a progress::ProgressDisplay,
}

/// Connects to the target, which is of the connector's interface, and measures once.
///
/// # Errors
/// [`BenchError::Usage`] when the options do not fit the disk; [`BenchError::Failed`] when the server goes away, is stuck, or
/// breaks the protocol.
pub(crate) fn measure_on<C: Connector>(connector: &C, input: &RunInput<'_>) -> Result<RunResult, BenchError> {
    let session = Session::open(connector, input.plan, input.combination, input.target)?;
    measure_once(input, session)
}

fn measure_once<D: Device>(input: &RunInput<'_>, session: Session<D>) -> Result<RunResult, BenchError> {
    let RunInput { plan, combination, seed, progress, .. } = *input;
    let Session { mut device, server } = session;
    let disks = device.disks(combination)?;
    let streams = check_disks(plan, combination, &disks)?;
    let settings = worker_settings(plan, combination, &disks, &streams)?;
    let mut sets = device.take_queues();
    let event = |error: std::io::Error| BenchError::Failed(format!("a queue's eventfd: {error}"));
    let wakers = sets.iter().map(ThreadQueues::waker).collect::<Result<Vec<_>, _>>().map_err(event)?;
    let monitor = device.monitor().map_err(|error| BenchError::Failed(error.to_string()))?;
    let process = server.as_ref().map(ServerProcess::monitor).transpose().map_err(event)?;
    let pid = device.server_pid().or(server.as_ref().map(ServerProcess::pid));
    let meters = ServerMeters { pid, admin: server.as_ref().map(ServerProcess::admin) };
    let mut watch = RunSupervisor {
        plan,
        counters: vec![],
        wakers,
        monitor,
        process,
        meters,
        progress,
        total: streams.total_blocks(),
    };
    let load = WorkerLoad { rw: combination.rw, once: plan.runtime.is_none(), verify: plan.verify.is_some() };
    if plan.fill {
        let fill = WorkerLoad { rw: Rw::Write, once: true, verify: false };
        let (workers, counters) = workers(plan, fill, sets, settings, &streams, seed);
        watch.counters = counters;
        sets = watch.fill(workers)?.into_iter().map(|worker| worker.into_parts().2).collect();
    }
    let (workers, counters) = workers(plan, load, sets, settings, &streams, seed);
    watch.counters = counters;

    let (mut workers, measured) = watch.load(workers)?;
    let mut verified = 0;
    if plan.verify.is_some() {
        verified = workers
            .iter_mut()
            .flat_map(|w| w.jobs_mut().iter())
            .filter_map(|j| j.generations.as_ref())
            .map(BlockGenerations::written_count)
            .sum();
        // Each thread verifies what another one has written.
        let mut jobs: Vec<Vec<DiskJob>> = workers.iter_mut().map(|worker| std::mem::take(worker.jobs_mut())).collect();
        jobs.rotate_left(1);
        for (worker, jobs) in workers.iter_mut().zip(jobs) {
            *worker.jobs_mut() = jobs;
        }
        workers = watch.verify(workers, verified)?;
    }

    let mut stats = vec![];
    let mut sets = vec![];
    for worker in workers {
        let (thread, _, set) = worker.into_parts();
        stats.push(thread);
        sets.push(set);
    }
    let requests_per_io = (settings.bs * settings.most_blocks).div_ceil(settings.request_len);
    device.stop(sets).map_err(|error| BenchError::Failed(error.to_string()))?;
    if let Some(server) = server {
        server.stop()?;
    }
    let mut result = merge_stats(stats, measured, requests_per_io, verified);
    if let [bytes @ 0] = result.bytes.as_mut_slice() {
        // Of one size, on one disk: workers count I/Os only.
        *bytes = result.ios * combination.sizes.min.0;
    }
    Ok(result)
}

/// Checks the options against the disks.
fn check_disks(plan: &Plan, combination: &Combination, disks: &[DeviceDisk]) -> Result<Streams, BenchError> {
    for DeviceDisk { name, block, read_only, .. } in disks {
        if plan.fill && *read_only {
            return Err(BenchError::option("fill", format!("{name}, which is read-only"), "disks that can be written"));
        }
        if combination.rw.writes() && *read_only {
            let expected = format!("read or randread: {name} is read-only");
            return Err(BenchError::option("rw", combination.rw.name(), expected));
        }
        for (option, len) in [("bs", combination.sizes.min), ("offset", plan.offset)] {
            if !len.is_aligned(*block) {
                let expected = format!("a multiple of the block of {name}, {} bytes", block.bytes());
                return Err(BenchError::option(option, len, expected));
            }
        }
    }
    Streams::new(plan, combination, disks)
}

fn worker_settings(
    plan: &Plan,
    combination: &Combination,
    disks: &[DeviceDisk],
    streams: &Streams,
) -> Result<WorkerSettings, BenchError> {
    // The plan has checked that it is at most 1 GiB.
    let [bs, largest] = [combination.sizes.min.0, combination.sizes.max.0].map(|len| len as u32);
    // A request is a multiple of the largest block, which is a multiple of all others.
    let block = disks.iter().map(|disk| u64::from(disk.block.bytes())).max().unwrap_or(1);
    let least = disks.iter().map(|disk| disk.max_request).min().unwrap_or(u64::MAX);
    let part = (least / block * block).max(block).min(largest.into()) as u32;
    let parts = largest.div_ceil(part);
    if parts > MAX_PARTS {
        let expected = format!("at most {} requests of {part} bytes, what a disk takes", MAX_PARTS);
        return Err(BenchError::option("bs", combination.sizes, expected));
    }
    Ok(WorkerSettings {
        bs,
        bs_sectors: combination.sizes.min.sectors(),
        most_blocks: combination.sizes.max_blocks(),
        disks: disks.len() as u16,
        request_len: part,
        base: streams.base,
        batch: u32::from(combination.batch).saturating_mul(parts).min(u16::MAX.into()) as u16,
        iodepth: combination.iodepth,
        client: plan.client,
        verify: plan.verify.is_some(),
    })
}

/// The load of one pass: the fill, or the measurement.
#[derive(Clone, Copy, Debug)]
struct WorkerLoad {
    rw: Rw,
    once: bool,
    verify: bool,
}

fn workers<Q: ThreadQueues>(
    plan: &Plan,
    load: WorkerLoad,
    sets: Vec<Q>,
    settings: WorkerSettings,
    streams: &Streams,
    seed: u64,
) -> (Vec<Worker<Q>>, Vec<Arc<CompletionCounter>>) {
    let threads = sets.len();
    let mut jobs: Vec<Vec<DiskJob>> = (0..threads).map(|_| vec![]).collect();
    for (index, &JobRange { job, disk, blocks }) in streams.ranges.iter().enumerate() {
        let seed_of_part = seed.wrapping_add((index as u64) << 32);
        let pattern = AccessPattern::new(load.rw, plan.read_share, blocks, load.once, seed_of_part);
        // A generation has 31 bits: half of them differ between runs, the other half count.
        let generations = load.verify.then(|| BlockGenerations::new(blocks.first, blocks.count, (seed as u32) >> 2));
        jobs[usize::from(job) % threads].push(DiskJob { number: job, disk, pattern, generations });
    }
    // The disks of a job are adjacent.
    jobs.iter_mut().for_each(|jobs| jobs.sort_by_key(|job| job.number));
    let settings = WorkerSettings { verify: load.verify, ..settings };
    let counters: Vec<Arc<CompletionCounter>> = (0..threads).map(|_| Arc::default()).collect();
    let workers = sets.into_iter().zip(jobs).zip(&counters);
    (workers.map(|((set, jobs), progress)| Worker::new(set, jobs, settings, Arc::clone(progress))).collect(), counters)
}

/// Reads what the server has used, before and after the measurement.
#[derive(Debug)]
struct ServerMeters {
    pid: Option<i32>,
    admin: Option<PathBuf>,
}

/// The values at one time.
#[derive(Debug)]
struct MeterReading {
    at: Instant,
    cpu: Option<Duration>,
    merges: Option<MergeCounters>,
}

/// What the server used and merged in the measurement.
#[derive(Debug, Default)]
struct ServerUsage {
    cpu: Option<Duration>,
    merges: Option<MergeRates>,
}

impl ServerMeters {
    fn read(&self) -> MeterReading {
        let merges = self.admin.as_deref().and_then(MergeCounters::read);
        let at = Instant::now();
        // Last, so that the measurement begins or ends right after it.
        let cpu = self.pid.and_then(cpu::process_time);
        MeterReading { at, cpu, merges }
    }

    fn since(&self, before: &MeterReading) -> ServerUsage {
        let now = self.read();
        let cpu = now.cpu.zip(before.cpu).map(|(now, before)| now.saturating_sub(before));
        let time = now.at - before.at;
        let merges = now.merges.zip(before.merges).map(|(now, before)| now.rates_since(before, time));
        ServerUsage { cpu, merges }
    }
}

/// Supervises the client threads from the main thread.
struct RunSupervisor<'a> {
    plan: &'a Plan,
    counters: Vec<Arc<CompletionCounter>>,
    wakers: Vec<Waker>,
    monitor: Box<dyn ServerMonitor>,
    /// The process of a started server: not every interface reports that a server was killed.
    process: Option<Box<dyn ServerMonitor>>,
    meters: ServerMeters,
    progress: &'a progress::ProgressDisplay,
    total: u64,
}

impl RunSupervisor<'_> {
    fn done(&self) -> u64 {
        self.counters.iter().map(|counter| counter.0.load(Ordering::Relaxed)).sum()
    }

    /// Runs `work` on a thread for each worker, and `steer` on this one. Returns the workers.
    fn run<Q: ThreadQueues>(
        &self,
        control: &PhaseControl,
        workers: Vec<Worker<Q>>,
        work: fn(&mut Worker<Q>, &PhaseControl) -> Result<(), WorkerError>,
        steer: impl FnOnce(&dyn Fn() -> bool) -> Result<(), BenchError>,
    ) -> Result<Vec<Worker<Q>>, BenchError> {
        std::thread::scope(|scope| {
            let mut threads = vec![];
            for (index, mut worker) in workers.into_iter().enumerate() {
                let pin = (!self.plan.pin.is_empty()).then(|| self.plan.pin[index % self.plan.pin.len()]);
                let thread = std::thread::Builder::new().name(format!("client-{index}"));
                let started = thread.spawn_scoped(scope, move || {
                    if let Some(cpu) = pin {
                        cpu::pin(cpu)?;
                    }
                    match work(&mut worker, control) {
                        Ok(()) => Ok(Some(worker)),
                        Err(WorkerError::Abandoned) => Ok(None),
                        Err(error) => {
                            // Other threads may wait for this one.
                            self.abandon(control);
                            Err(BenchError::Failed(error.to_string()))
                        }
                    }
                });
                match started {
                    Ok(thread) => threads.push(thread),
                    Err(error) => {
                        self.abandon(control);
                        return Err(BenchError::Failed(format!("client thread: {error}")));
                    }
                }
            }
            let steered = steer(&|| threads.iter().all(std::thread::ScopedJoinHandle::is_finished));
            if steered.is_err() {
                self.abandon(control);
            }
            let mut workers = vec![];
            let mut failure = None;
            for thread in threads {
                match thread.join() {
                    Ok(Ok(worker)) => workers.extend(worker),
                    Ok(Err(error)) => failure = failure.or(Some(error)),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
            // The main thread's error is the cause of the others'.
            steered?;
            failure.map_or(Ok(workers), Err)
        })
    }

    fn abandon(&self, control: &PhaseControl) {
        control.set(Phase::Abandon);
        self.wakers.iter().for_each(Waker::wake);
    }

    /// Waits until `over` returns true or all threads have ended.
    fn supervise(&self, finished: &dyn Fn() -> bool, mut over: impl FnMut() -> bool) -> Result<(), BenchError> {
        let (mut seen, mut at) = (self.done(), Instant::now());
        while !finished() && !over() {
            let ended = |process: &dyn ServerMonitor| process.wait_gone(Duration::ZERO);
            if self.monitor.wait_gone(TICK) || self.process.as_deref().is_some_and(ended) {
                return Err(BenchError::Failed("the server went away: it closed the connection in mid-run".into()));
            }
            let done = self.done();
            if done != seen {
                (seen, at) = (done, Instant::now());
            } else if at.elapsed() > self.plan.stuck_timeout {
                let text = format!("the server is stuck: it answered no request for {:?}", self.plan.stuck_timeout);
                return Err(BenchError::Failed(text));
            }
        }
        Ok(())
    }

    /// Runs the load. Returns the workers, and what the server used.
    fn load<Q: ThreadQueues>(&self, workers: Vec<Worker<Q>>) -> Result<(Vec<Worker<Q>>, ServerUsage), BenchError> {
        let control = PhaseControl::new(if self.plan.runtime.is_some() { Phase::Warmup } else { Phase::Measure });
        let mut measured = ServerUsage::default();
        let workers = self.run(&control, workers, Worker::load, |finished| {
            let start = Instant::now();
            let Some(runtime) = self.plan.runtime else {
                let before = self.meters.read();
                self.supervise(finished, || {
                    self.progress.update(self.done() as f64 / self.total as f64);
                    false
                })?;
                measured = self.meters.since(&before);
                return Ok(());
            };
            let whole = self.plan.warmup + runtime;
            let until = |end: Duration| {
                move || {
                    self.progress.update(start.elapsed().as_secs_f64() / whole.as_secs_f64());
                    start.elapsed() + TICK / 2 >= end
                }
            };
            self.supervise(finished, until(self.plan.warmup))?;
            let before = self.meters.read();
            control.set(Phase::Measure);
            self.supervise(finished, until(whole))?;
            measured = self.meters.since(&before);
            control.set(Phase::Stop);
            self.supervise(finished, || false)
        })?;
        Ok((workers, measured))
    }

    /// Writes the whole range.
    fn fill<Q: ThreadQueues>(&self, workers: Vec<Worker<Q>>) -> Result<Vec<Worker<Q>>, BenchError> {
        let control = PhaseControl::new(Phase::Measure);
        self.run(&control, workers, Worker::load, |finished| self.supervise(finished, || false))
    }

    /// Reads everything back and checks it.
    fn verify<Q: ThreadQueues>(&self, workers: Vec<Worker<Q>>, blocks: u64) -> Result<Vec<Worker<Q>>, BenchError> {
        let control = PhaseControl::new(Phase::Measure);
        let before = self.done();
        self.run(&control, workers, Worker::verify, |finished| {
            self.supervise(finished, || {
                self.progress.update((self.done() - before) as f64 / blocks.max(1) as f64);
                false
            })
        })
    }
}

fn merge_stats(stats: Vec<WorkerStats>, measured: ServerUsage, requests_per_io: u32, verified: u64) -> RunResult {
    let mut stats = stats.into_iter();
    let first = stats.next().expect("at least one thread");
    let mut total = RunResult {
        ios: first.ios,
        bytes: first.bytes,
        handed_over: first.handed_over,
        elapsed: first.elapsed,
        requests_per_io,
        server_cpu: measured.cpu,
        merges: measured.merges,
        client_cpu: first.cpu,
        kicks: first.kicks,
        calls: first.calls,
        errors: first.errors,
        messages: first.messages,
        verified,
        latency: first.latency,
    };
    for thread in stats {
        total.ios += thread.ios;
        total.bytes.iter_mut().zip(&thread.bytes).for_each(|(total, bytes)| *total += bytes);
        total.handed_over += thread.handed_over;
        total.elapsed = total.elapsed.max(thread.elapsed);
        total.client_cpu += thread.cpu;
        total.kicks += thread.kicks;
        total.calls += thread.calls;
        total.errors += thread.errors;
        total.messages.extend(thread.messages);
        total.latency.add(&thread.latency).expect("all histograms have the same bounds");
    }
    total
}
