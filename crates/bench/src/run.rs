//! One run: the threads of one combination on one device.

mod meters;
mod supervisor;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rand::Rng;

use crate::BenchError;
use crate::connector::Connector;
use crate::control::CompletionCounter;
use crate::device::{Device, DeviceDisk, IoOp, MAX_PARTS, ThreadQueues};
use crate::machine::ServerInfo;
use crate::pattern::AccessPattern;
use crate::plan::{Case, Combination, Plan};
use crate::progress::ProgressDisplay;
use crate::server::{ServerProcess, Session};
use crate::streams::{JobRange, Streams};
use crate::verification::BlockGenerations;
use crate::words::Rw;
use crate::worker::{DiskJob, OpStats, SeriesSettings, Worker, WorkerSettings, WorkerStats};
use meters::{ServerMeters, ServerUsage};
use supervisor::RunSupervisor;

/// Result of one run.
#[derive(Debug)]
pub struct RunResult {
    /// When the run began.
    pub started: SystemTime,
    pub server: ServerInfo,
    /// Measurements of all threads together, with the bytes of all I/Os.
    pub stats: WorkerStats,
    /// The server's usage in the measurement.
    pub used: ServerUsage,
    /// Requests of the largest I/O: 1 unless the disk takes less than the block size at once.
    pub requests_per_io: u32,
    /// True if a signal ended it early.
    pub cut_short: bool,
    /// Blocks read back and checked after the load.
    pub verified: u64,
}

impl RunResult {
    /// Returns the counts of each operation that is an I/O: all but flushes.
    pub fn transfers(&self) -> &[OpStats] {
        &self.stats.ops[..IoOp::Flush as usize]
    }

    /// Returns the I/Os that completed in the measurement, without failures.
    pub fn ios(&self) -> u64 {
        self.transfers().iter().map(|op| op.ios).sum()
    }

    /// Returns a count as a rate over the measurement.
    pub fn per_second(&self, count: u64) -> f64 {
        count as f64 / self.stats.elapsed.as_secs_f64().max(1e-9)
    }

    /// Returns the I/Os per second.
    pub fn iops(&self) -> f64 {
        self.per_second(self.ios())
    }

    /// Returns the bytes per second.
    pub fn bandwidth(&self) -> f64 {
        self.per_second(self.stats.bytes.iter().sum())
    }

    /// Returns the bytes per second of each disk.
    pub fn disk_bandwidths(&self) -> impl Iterator<Item = f64> {
        self.stats.bytes.iter().map(|bytes| self.per_second(*bytes))
    }
}

/// Measures targets. The load is compiled for each [`Connector`].
pub trait Measure {
    /// Connects to the target, and measures once. `seed`: that of random blocks.
    ///
    /// # Errors
    /// [`BenchError::Usage`] when the options do not fit the disk; [`BenchError::Failed`] when the server goes away, is
    /// stuck, or violates the protocol.
    fn measure(&self, case: &Case<'_>, seed: u64, progress: &ProgressDisplay) -> Result<RunResult, BenchError>;

    /// Connects to the target, and returns its disks.
    ///
    /// # Errors
    /// As [`measure`](Self::measure), before the first request.
    fn probe(&self, case: &Case<'_>) -> Result<Vec<DeviceDisk>, BenchError>;
}

impl<C: Connector> Measure for C {
    fn measure(&self, case: &Case<'_>, seed: u64, progress: &ProgressDisplay) -> Result<RunResult, BenchError> {
        measure_once(case, Session::open(self, case)?, seed, progress)
    }

    fn probe(&self, case: &Case<'_>) -> Result<Vec<DeviceDisk>, BenchError> {
        let Session { mut device, server } = Session::open(self, case)?;
        let disks = device.disks(&case.combination)?;
        let sets = device.take_queues();
        device.stop(sets)?;
        server.map_or(Ok(()), ServerProcess::stop)?;
        Ok(disks)
    }
}

/// Checks a combination against the disks.
///
/// # Errors
/// [`BenchError::Usage`], naming the option.
pub(crate) fn check(case: &Case<'_>, disks: &[DeviceDisk]) -> Result<(), BenchError> {
    let Case { plan, combination, .. } = case;
    let streams = check_disks(plan, combination, disks)?;
    worker_settings(plan, combination, disks, &streams).map(|_| ())
}

fn measure_once<D: Device>(
    case: &Case<'_>,
    session: Session<D>,
    seed: u64,
    progress: &ProgressDisplay,
) -> Result<RunResult, BenchError> {
    let Case { plan, combination, .. } = case;
    let started = SystemTime::now();
    let Session { mut device, server } = session;
    let disks = device.disks(combination)?;
    let streams = check_disks(plan, combination, &disks)?;
    let settings = worker_settings(plan, combination, &disks, &streams)?;
    let mut sets = device.take_queues();
    let event = |error: std::io::Error| BenchError::failed("a queue's eventfd", error);
    let wakers = sets.iter().map(ThreadQueues::waker).collect::<Result<Vec<_>, _>>().map_err(event)?;
    let monitor = device.monitor()?;
    let process = server.as_ref().map(ServerProcess::monitor).transpose().map_err(event)?;
    let pid = device.server_pid().or(server.as_ref().map(ServerProcess::pid));
    let info = ServerInfo::of(pid, server.is_some());
    let meters = ServerMeters { pid, admin: server.as_ref().map(|server| server.admin.clone()) };
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
    if plan.fill {
        let writes = Combination { rw: Rw::Write, rate_iops: None, ..*combination };
        let own = worker_settings(plan, &writes, &disks, &streams)?;
        let own = WorkerSettings { fsync: 0, series: None, verify: false, ..own };
        let (workers, counters) = workers(plan, seed, Rw::Write, true, sets, own, &streams);
        watch.counters = counters;
        sets = watch.load_whole(workers, None)?.into_iter().map(|worker| worker.into_parts().1).collect();
    }
    let (workers, counters) = workers(plan, seed, combination.rw, plan.runtime.is_none(), sets, settings, &streams);
    watch.counters = counters;

    let (mut workers, outcome) = watch.load(workers)?;
    let mut verified = 0;
    if plan.verify.is_some() && outcome.cut_short {
        // The written blocks are not checked, so the run does not count.
        plan.interrupt.check()?;
    }
    if plan.verify.is_some() {
        let jobs = workers.iter().flat_map(|worker| &worker.jobs);
        verified = jobs.filter_map(|job| job.generations.as_ref()).map(BlockGenerations::written_count).sum();
        // Each thread verifies what another one has written.
        let mut jobs: Vec<Vec<DiskJob>> = workers.iter_mut().map(|worker| std::mem::take(&mut worker.jobs)).collect();
        jobs.rotate_left(1);
        let readers = workers.into_iter().zip(jobs).map(|(worker, jobs)| worker.reading_back(jobs));
        workers = watch.load_whole(readers.collect(), Some(verified))?;
    }

    let mut stats = WorkerStats::new(settings.disks);
    let mut sets = vec![];
    for worker in workers {
        let (thread, set) = worker.into_parts();
        stats.add(thread);
        sets.push(set);
    }
    if let (Some(series), Some(length)) = (&mut stats.series, outcome.stopped_after) {
        series.end_at(length);
    }
    if let [bytes @ 0] = stats.bytes.as_mut_slice() {
        // One size and one disk: workers count I/Os only.
        let transfers = &mut stats.ops[..IoOp::Flush as usize];
        transfers.iter_mut().for_each(|op| op.bytes = op.ios * combination.sizes.min.0);
        *bytes = transfers.iter().map(|op| op.bytes).sum();
    }
    device.stop(sets)?;
    server.map_or(Ok(()), ServerProcess::stop)?;
    Ok(RunResult {
        started,
        server: info,
        stats,
        used: outcome.used,
        requests_per_io: (settings.bs * settings.most_blocks).div_ceil(settings.request_len),
        cut_short: outcome.cut_short,
        verified,
    })
}

/// Checks the options against the disks.
fn check_disks(plan: &Plan, combination: &Combination, disks: &[DeviceDisk]) -> Result<Streams, BenchError> {
    for DeviceDisk { name, block, read_only, max_trim, flush, .. } in disks {
        if let (true, Err(missing)) = (combination.rw.trims(), max_trim) {
            let expected = format!("read or write: {name} does not offer {missing}");
            return Err(BenchError::option("rw", combination.rw.name(), expected));
        }
        if let (true, Err(missing)) = (plan.fsync > 0, flush) {
            let expected = format!("0: {name} does not offer {missing}, so there is nothing to flush");
            return Err(BenchError::option("fsync", plan.fsync, expected));
        }
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
    // Benchmark has checked that it is at most 1 GiB.
    let [bs, largest] = [combination.sizes.min.0, combination.sizes.max.0].map(|len| len as u32);
    // A request is a multiple of the largest block, which is a multiple of all others.
    let block = disks.iter().map(|disk| u64::from(disk.block.bytes())).max().unwrap_or(1);
    let least = |disk: &DeviceDisk| match combination.rw.trims() {
        true => disk.max_trim.unwrap_or(disk.max_request),
        false => disk.max_request,
    };
    let least = disks.iter().map(least).min().unwrap_or(u64::MAX);
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
        jobs: combination.jobs,
        rate: combination.rate_iops,
        fsync: plan.fsync,
        request_len: part,
        base: streams.base,
        batch: u32::from(combination.batch).saturating_mul(parts).min(u16::MAX.into()) as u16,
        iodepth: combination.iodepth,
        client: plan.client,
        verify: plan.verify.is_some(),
        series: plan.interval.map(|interval| SeriesSettings { interval, expected: expected_intervals(plan, interval) }),
    })
}

/// Returns the number of intervals of a run, if it takes no longer than planned.
fn expected_intervals(plan: &Plan, interval: Duration) -> usize {
    // Without a runtime: an arbitrary time.
    let time = plan.runtime.unwrap_or(Duration::from_secs(60)) + Duration::from_secs(1);
    time.div_duration_f64(interval).ceil() as usize
}

/// Creates the threads of one pass: the fill, or the measurement. `once`: each block is done once.
fn workers<Q: ThreadQueues>(
    plan: &Plan,
    seed: u64,
    rw: Rw,
    once: bool,
    sets: Vec<Q>,
    settings: WorkerSettings,
    streams: &Streams,
) -> (Vec<Worker<Q>>, Vec<Arc<CompletionCounter>>) {
    // A generation has 31 bits: half of them differ between runs, those with the same seed too, the other half count.
    let generation = rand::rng().next_u32() >> 2;
    let threads = sets.len();
    let mut jobs: Vec<Vec<DiskJob>> = (0..threads).map(|_| vec![]).collect();
    for (index, &JobRange { job, disk, blocks }) in streams.ranges.iter().enumerate() {
        let seed_of_part = seed.wrapping_add((index as u64) << 32);
        let pattern =
            AccessPattern::new(rw, plan.read_share, blocks, once, seed_of_part).with_distribution(plan.distribution);
        let generations = settings.verify.then(|| BlockGenerations::new(blocks.first, blocks.count, generation));
        jobs[usize::from(job) % threads].push(DiskJob {
            number: job,
            disk,
            pattern,
            generations,
            unflushed: 0,
            read_back: None,
        });
    }
    // The disks of a job are adjacent.
    jobs.iter_mut().for_each(|jobs| jobs.sort_by_key(|job| job.number));
    let counters: Vec<Arc<CompletionCounter>> = (0..threads).map(|_| Arc::default()).collect();
    let workers = sets.into_iter().zip(jobs).zip(&counters);
    (workers.map(|((set, jobs), progress)| Worker::new(set, jobs, settings, Arc::clone(progress))).collect(), counters)
}
