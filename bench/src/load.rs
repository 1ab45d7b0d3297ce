//! One run: the threads of one combination on one device.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use mqblk_driver::virtio_blk::{Info, QueueSet, Waker};
use mqblk_vhost_user_client::Lifeline;

use crate::BenchError;
use crate::control::{Control, Phase, Progress};
use crate::cpu;
use crate::job::Pattern;
use crate::ledger::Ledger;
use crate::merges::{Merges, PerSecond};
use crate::plan::{Combination, Plan};
use crate::progress;
use crate::streams::Streams;
use crate::target::{Server, Session};
use crate::worker::{Job, Settings, Tally, Worker, WorkerError};

/// How often the main thread looks.
const TICK: Duration = Duration::from_millis(50);
/// Most data pieces of a request that the driver composes.
const MOST_PIECES: u64 = 14;

/// What one run measured.
#[derive(Debug)]
pub struct RunResult {
    /// I/Os that ended in the measurement.
    pub requests: u64,
    /// Requests that each I/O was: 1 unless the disk takes less than the block size at once.
    pub requests_per_io: u32,
    /// Its length.
    pub elapsed: Duration,
    /// The server's CPU time in it, when it can be read.
    pub server_cpu: Option<Duration>,
    /// Our threads' CPU time in it.
    pub client_cpu: Duration,
    /// Requests that the server merged in it, when it says.
    pub merges: Option<PerSecond>,
    /// Kicks in it.
    pub kicks: u64,
    /// Calls in it.
    pub calls: u64,
    /// I/Os that failed or did not verify.
    pub errors: u64,
    /// About some of them.
    pub complaints: Vec<String>,
    /// Blocks read back and checked after the load.
    pub verified: u64,
    /// In nanoseconds.
    pub latency: Histogram<u64>,
}

impl RunResult {
    /// I/Os per second.
    pub fn iops(&self) -> f64 {
        self.requests as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }
}

/// Measures once.
///
/// # Errors
/// [`BenchError::Usage`] when the options do not fit the disk; [`BenchError::Failed`] when the server goes away, is stuck, or
/// breaks the protocol.
pub fn run(
    plan: &Plan,
    combination: &Combination,
    session: Session,
    seed: u64,
    progress: &progress::Progress,
) -> Result<RunResult, BenchError> {
    let Session { mut device, server } = session;
    let info = *device.info();
    let streams = fit(plan, combination, &info)?;
    let settings = settings(plan, combination, &info, &streams)?;
    let sets = device.take_queues();
    let event = |error: std::io::Error| BenchError::Failed(format!("a queue's eventfd: {error}"));
    let wakers = sets.iter().map(QueueSet::waker).collect::<Result<Vec<_>, _>>().map_err(event)?;
    let lifeline = device.lifeline().map_err(event)?;
    let meters = Meters { pid: device.server_pid(), admin: server.as_ref().map(Server::admin) };
    let (workers, counters) = workers(plan, combination, sets, settings, &streams, seed);
    let watch = Watch { plan, counters, wakers, lifeline, meters, progress, total: streams.total() };

    let (mut workers, measured) = watch.load(workers)?;
    let mut verified = 0;
    if plan.verify.is_some() {
        verified = workers
            .iter_mut()
            .flat_map(|w| w.jobs_mut().iter())
            .filter_map(|j| j.ledger.as_ref())
            .map(Ledger::written_count)
            .sum();
        // What one thread wrote, another reads.
        let mut jobs: Vec<Vec<Job>> = workers.iter_mut().map(|worker| std::mem::take(worker.jobs_mut())).collect();
        jobs.rotate_left(1);
        for (worker, jobs) in workers.iter_mut().zip(jobs) {
            *worker.jobs_mut() = jobs;
        }
        workers = watch.verify(workers, verified)?;
    }

    let mut tallies = vec![];
    let mut sets = vec![];
    for worker in workers {
        let (tally, _, set) = worker.into_parts();
        tallies.push(tally);
        sets.push(set);
    }
    let requests_per_io = settings.bs.div_ceil(settings.part);
    device.stop(sets).map_err(|error| BenchError::Failed(error.to_string()))?;
    if let Some(server) = server {
        server.stop()?;
    }
    Ok(merge(tallies, measured, requests_per_io, verified))
}

/// Judges the options by the disk.
fn fit(plan: &Plan, combination: &Combination, info: &Info) -> Result<Streams, BenchError> {
    if combination.rw.writes() && info.read_only {
        return Err(BenchError::option("rw", combination.rw.name(), "read or randread: the disk is read-only"));
    }
    for (name, len) in [("bs", combination.bs), ("offset", plan.offset)] {
        if !len.is_aligned(info.block) {
            return Err(BenchError::option(
                name,
                len,
                format!("a multiple of the disk's block, {} bytes", info.block.bytes()),
            ));
        }
    }
    let too_big =
        || BenchError::Failed(format!("the disk says it has {} sectors, more than 2^64 bytes", info.capacity.0));
    let capacity = info.capacity.to_len().ok_or_else(too_big)?;
    Streams::new(plan, combination, capacity)
}

/// The largest piece that the device takes.
fn piece_max(info: &Info) -> u32 {
    info.size_max.filter(|max| *max != 0).unwrap_or(u32::MAX)
}

/// The most bytes of a request: whole blocks, in as many pieces as the device and the driver take. Blocks that are larger are
/// several requests, as Linux splits a bio by the limits of its queue.
///
/// # Errors
/// [`BenchError::Failed`] when the device takes less than a block.
fn part_max(bs: u32, info: &Info) -> Result<u32, BenchError> {
    let pieces = info.seg_max.map_or(MOST_PIECES, |max| MOST_PIECES.min(max.max(1).into()));
    let most = pieces * u64::from(piece_max(info));
    let block = u64::from(info.block.bytes());
    if most < block {
        let text =
            format!("the disk's SEG_MAX and SIZE_MAX: found {most} bytes a request, expected a block of {block}");
        return Err(BenchError::Failed(text));
    }
    Ok((most / block * block).min(bs.into()) as u32)
}

fn settings(plan: &Plan, combination: &Combination, info: &Info, streams: &Streams) -> Result<Settings, BenchError> {
    // The plan has checked that it is at most 1 GiB.
    let bs = combination.bs.0 as u32;
    let part = part_max(bs, info)?;
    Ok(Settings {
        bs,
        bs_sectors: combination.bs.sectors(),
        part,
        base: streams.base,
        piece_max: piece_max(info),
        batch: u32::from(combination.batch).saturating_mul(bs.div_ceil(part)).min(u16::MAX.into()) as u16,
        iodepth: combination.iodepth,
        client: plan.client,
        verify: plan.verify.is_some(),
    })
}

fn workers(
    plan: &Plan,
    combination: &Combination,
    sets: Vec<QueueSet>,
    settings: Settings,
    streams: &Streams,
    seed: u64,
) -> (Vec<Worker>, Vec<Arc<Progress>>) {
    let threads = sets.len();
    let mut jobs: Vec<Vec<Job>> = (0..threads).map(|_| vec![]).collect();
    for (index, &blocks) in streams.parts.iter().enumerate() {
        let once = plan.runtime.is_none();
        let seed_of_job = seed.wrapping_add((index as u64) << 32);
        let pattern = Pattern::new(combination.rw, plan.read_share, blocks, once, seed_of_job);
        // Half of the 31 bits tell runs apart, the other half count.
        let ledger = plan.verify.map(|_| Ledger::new(blocks.first, blocks.count, (seed as u32) >> 2));
        jobs[index % threads].push(Job { pattern, ledger });
    }
    let counters: Vec<Arc<Progress>> = (0..threads).map(|_| Arc::default()).collect();
    let workers = sets.into_iter().zip(jobs).zip(&counters);
    (workers.map(|((set, jobs), progress)| Worker::new(set, jobs, settings, Arc::clone(progress))).collect(), counters)
}

/// What is read of the server before and after the measurement.
#[derive(Debug)]
struct Meters {
    pid: Option<i32>,
    admin: Option<PathBuf>,
}

/// The meters at one time.
#[derive(Debug)]
struct Reading {
    at: Instant,
    cpu: Option<Duration>,
    merges: Option<Merges>,
}

/// What the server did in the measurement.
#[derive(Debug, Default)]
struct Measured {
    cpu: Option<Duration>,
    merges: Option<PerSecond>,
}

impl Meters {
    fn read(&self) -> Reading {
        let merges = self.admin.as_deref().and_then(Merges::read);
        let at = Instant::now();
        // Last: the measurement begins or ends right after it.
        let cpu = self.pid.and_then(cpu::of_process);
        Reading { at, cpu, merges }
    }

    fn since(&self, before: &Reading) -> Measured {
        let now = self.read();
        let cpu = now.cpu.zip(before.cpu).map(|(now, before)| now.saturating_sub(before));
        let time = now.at - before.at;
        let merges = now.merges.zip(before.merges).map(|(now, before)| now.per_second(before, time));
        Measured { cpu, merges }
    }
}

/// What the main thread does while the others work.
struct Watch<'a> {
    plan: &'a Plan,
    counters: Vec<Arc<Progress>>,
    wakers: Vec<Waker>,
    lifeline: Lifeline,
    meters: Meters,
    progress: &'a progress::Progress,
    total: u64,
}

impl Watch<'_> {
    fn done(&self) -> u64 {
        self.counters.iter().map(|counter| counter.0.load(Ordering::Relaxed)).sum()
    }

    /// Runs `work` on a thread for each worker while `steer` looks on, and gives the workers back.
    fn run(
        &self,
        control: &Control,
        workers: Vec<Worker>,
        work: fn(&mut Worker, &Control) -> Result<(), WorkerError>,
        steer: impl FnOnce(&dyn Fn() -> bool) -> Result<(), BenchError>,
    ) -> Result<Vec<Worker>, BenchError> {
        std::thread::scope(|scope| {
            let mut threads = vec![];
            for (index, mut worker) in workers.into_iter().enumerate() {
                let pin = (!self.plan.pin.is_empty()).then(|| self.plan.pin[index % self.plan.pin.len()]);
                let thread = std::thread::Builder::new().name(format!("client-{index}"));
                let started = thread.spawn_scoped(scope, move || {
                    if let Some(cpu) = pin {
                        cpu::pin(cpu)?;
                    }
                    work(&mut worker, control).map_err(|error| BenchError::Failed(error.to_string()))?;
                    Ok(worker)
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
                    Ok(Ok(worker)) => workers.push(worker),
                    Ok(Err(error)) => failure = failure.or(Some(error)),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
            // Why the main thread gave up says more than that the others were told to.
            steered?;
            failure.map_or(Ok(workers), Err)
        })
    }

    fn abandon(&self, control: &Control) {
        control.set(Phase::Abandon);
        self.wakers.iter().for_each(Waker::wake);
    }

    /// Looks on until `over` says so or all threads have ended.
    fn look_on(&self, finished: &dyn Fn() -> bool, mut over: impl FnMut() -> bool) -> Result<(), BenchError> {
        let (mut seen, mut at) = (self.done(), Instant::now());
        while !finished() && !over() {
            if self.lifeline.wait_gone(TICK) {
                return Err(BenchError::Failed("the server went away: it closed the connection in mid-run".into()));
            }
            let done = self.done();
            if done != seen {
                (seen, at) = (done, Instant::now());
            } else if at.elapsed() > self.plan.stuck {
                let text = format!("the server is stuck: it answered no request for {:?}", self.plan.stuck);
                return Err(BenchError::Failed(text));
            }
        }
        Ok(())
    }

    /// The load. Returns the workers, and what the server did in the measurement.
    fn load(&self, workers: Vec<Worker>) -> Result<(Vec<Worker>, Measured), BenchError> {
        let control = Control::new(if self.plan.runtime.is_some() { Phase::Warm } else { Phase::Measure });
        let mut measured = Measured::default();
        let workers = self.run(&control, workers, Worker::load, |finished| {
            let start = Instant::now();
            let Some(runtime) = self.plan.runtime else {
                let before = self.meters.read();
                self.look_on(finished, || {
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
            self.look_on(finished, until(self.plan.warmup))?;
            let before = self.meters.read();
            control.set(Phase::Measure);
            self.look_on(finished, until(whole))?;
            measured = self.meters.since(&before);
            control.set(Phase::Stop);
            self.look_on(finished, || false)
        })?;
        Ok((workers, measured))
    }

    /// Reads everything back.
    fn verify(&self, workers: Vec<Worker>, blocks: u64) -> Result<Vec<Worker>, BenchError> {
        let control = Control::new(Phase::Measure);
        let before = self.done();
        self.run(&control, workers, Worker::verify, |finished| {
            self.look_on(finished, || {
                self.progress.update((self.done() - before) as f64 / blocks.max(1) as f64);
                false
            })
        })
    }
}

fn merge(tallies: Vec<Tally>, measured: Measured, requests_per_io: u32, verified: u64) -> RunResult {
    let mut tallies = tallies.into_iter();
    let first = tallies.next().expect("at least one thread");
    let mut total = RunResult {
        requests: first.requests,
        elapsed: first.elapsed,
        requests_per_io,
        server_cpu: measured.cpu,
        merges: measured.merges,
        client_cpu: first.cpu,
        kicks: first.kicks,
        calls: first.calls,
        errors: first.errors,
        complaints: first.complaints,
        verified,
        latency: first.latency,
    };
    for tally in tallies {
        total.requests += tally.requests;
        total.elapsed = total.elapsed.max(tally.elapsed);
        total.client_cpu += tally.cpu;
        total.kicks += tally.kicks;
        total.calls += tally.calls;
        total.errors += tally.errors;
        total.complaints.extend(tally.complaints);
        total.latency.add(&tally.latency).expect("all histograms have the same bounds");
    }
    total
}
