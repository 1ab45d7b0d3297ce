//! What will be measured: every combination, checked before anything starts.

mod targets;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use mqblk_core::ByteLen;

use crate::BenchError;
use crate::args::BenchArgs;
use crate::defaults;
use crate::experiment::Experiment;
use crate::interface::Interface;
use crate::interrupt::Interrupt;
use crate::machine::Invocation;
use crate::words::{ClientMode, Descriptors, Distribution, IoSizes, Rw, Verify};
use crate::worker::MAX_INTERVALS;
use targets::plan_targets;

pub(crate) use targets::{DeviceName, DiskKeys, MergeMode, Target, TargetSource};
pub(crate) use targets::{null_latency, value_of};

/// The setting of a disk that exists during a run only.
const IN_MEMORY: &str = "storage=ram";

/// Keys of a disk: most entries of a virtqueue.
pub(crate) const QUEUE_SIZE_KEYS: [&str; 2] = ["queue-size", "queue_size"];

/// Default of the entries of a virtqueue.
const DEFAULT_QUEUE_SIZE: u16 = 256;

/// Most I/Os in flight on one queue: the most entries of a virtqueue.
pub(crate) const MAX_DEPTH: u32 = 32768;

/// How long a server may complete no request before it is called stuck.
const STUCK_TIMEOUT: Duration = Duration::from_secs(30);

/// Shortest interval of a time series.
const SHORTEST_INTERVAL: Duration = Duration::from_millis(1);

/// One combination of the sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Combination {
    /// What to do.
    pub rw: Rw,
    /// Bytes of an I/O.
    pub sizes: IoSizes,
    /// Queues.
    pub queues: u16,
    /// Targets; 1 where the interface has none.
    pub targets: u16,
    /// Logical units of each target; 1 where the interface has none.
    pub luns: u16,
    /// Jobs.
    pub jobs: u16,
    /// Most client threads.
    pub max_threads: u16,
    /// I/Os in flight, of each job.
    pub iodepth: u16,
    /// I/Os submitted and waited for at once.
    pub batch: u16,
    /// I/Os per second that each job starts; `None`: one when another has completed.
    pub rate_iops: Option<u32>,
}

impl Combination {
    /// Returns the number of disks: all logical units.
    pub fn disks(&self) -> u16 {
        // The interface has checked that there are few enough.
        self.targets * self.luns
    }

    /// Returns the number of client threads: each owns queues, and has jobs.
    pub fn threads(&self) -> u16 {
        self.max_threads.min(self.jobs).min(self.queues)
    }

    /// Returns the most I/Os in flight on one queue.
    pub fn depth_per_queue(&self) -> u32 {
        let threads = self.threads();
        // For the thread that has the most jobs on the fewest queues.
        let (jobs, queues) = (self.jobs.div_ceil(threads), self.queues / threads);
        // Fewer jobs than queues take the queues in turn, and may all be on the same one.
        let on_one = if jobs >= queues { jobs.div_ceil(queues) } else { jobs };
        u32::from(on_one) * u32::from(self.iodepth)
    }
}

/// Everything that is measured, and how.
#[derive(Clone, Debug)]
pub struct Plan {
    /// At least one. The others are compared to the first.
    pub targets: Vec<Target>,
    /// The guest interface of all targets.
    pub interface: Arc<dyn Interface>,
    /// At least one.
    pub combinations: Vec<Combination>,
    /// The experiment whose table is printed.
    pub experiment: Option<&'static Experiment>,
    /// How the client waits for completions.
    pub client: ClientMode,
    /// Share of reads of a mixed load, in percent.
    pub read_share: u8,
    /// Length of the measurement; `None`: each block once.
    pub runtime: Option<Duration>,
    /// Load before the measurement.
    pub warmup: Duration,
    /// Length of an interval of the time series; `None`: there is none.
    pub interval: Option<Duration>,
    /// Runs of each combination and target.
    pub runs: u16,
    /// Start of the range.
    pub offset: ByteLen,
    /// Length of the range; `None`: to the end of the disk.
    pub size: Option<ByteLen>,
    /// Distance of the jobs' ranges; `None`: the jobs share one range, or share it out.
    pub offset_increment: Option<ByteLen>,
    /// Which blocks a random load prefers.
    pub distribution: Distribution,
    /// A job flushes a disk after this many writes to it; 0: never.
    pub fsync: u32,
    /// Seed of the first run; `None`: another one each time.
    pub seed: Option<u64>,
    /// Write the range once before each run.
    pub fill: bool,
    /// Verification of what was written.
    pub verify: Option<Verify>,
    /// CPUs of the client's threads.
    pub pin: Vec<u16>,
    /// CPUs of the started server's workers.
    pub server_cpus: Vec<u16>,
    /// Entries of a virtqueue.
    pub queue_size: u16,
    /// The same if it was chosen: what a started server has to take.
    pub chosen_queue_size: Option<u16>,
    /// Descriptor layout.
    pub descriptors: Descriptors,
    /// Packed virtqueues.
    pub packed: bool,
    /// File for the JSON.
    pub json: Option<PathBuf>,
    /// How long a server may complete no request.
    pub stuck_timeout: Duration,
    /// What ends the benchmark early.
    pub interrupt: Interrupt,
    /// Where and how it was started.
    pub invocation: Invocation,
}

impl Plan {
    /// Checks the command line.
    ///
    /// # Errors
    /// [`BenchError::Usage`], naming the option.
    pub fn new(args: &BenchArgs) -> Result<Plan, BenchError> {
        let (args, fills) = defaults::complete(args);
        let args = &args;
        if args.rw.iter().any(|rw| rw.writes()) && !args.allow_write {
            let text =
                "--rw: found a benchmark that writes, expected --allow-write with it: it destroys what is on the disk";
            return Err(BenchError::Usage(text.into()));
        }
        // A disk in memory exists during a run only, so `--fill` destroys nothing.
        let running = !args.socket.is_empty() || !args.xen.vdev.is_empty();
        let in_memory = !running && args.disk.iter().all(|spec| crate::target::split_pairs(spec).contains(&IN_MEMORY));
        if args.fill && !args.allow_write && !in_memory {
            let text = "--fill: found disks that are not in memory, expected --allow-write with it: it destroys what is on them";
            return Err(BenchError::Usage(text.into()));
        }
        if args.verify.is_some() && !args.rw.iter().all(|rw| rw.writes()) {
            return Err(BenchError::option("verify", "a benchmark that only reads", "one that writes what is checked"));
        }
        check_load(args)?;
        let queue_size = args.queue_size.unwrap_or(DEFAULT_QUEUE_SIZE);
        if !queue_size.is_power_of_two() {
            return Err(BenchError::option("queue-size", queue_size, "a power of two from 4 to 32768"));
        }
        let seconds = |value: Option<f64>| Duration::from_secs_f64(value.unwrap_or(0.0));
        let (runtime, warmup) = (seconds(args.runtime), seconds(args.warmup));
        if runtime.is_zero() && !warmup.is_zero() {
            return Err(BenchError::option(
                "warmup",
                "a time",
                "0 where each block is done once: there is nothing to warm",
            ));
        }
        let interval = series_interval(args, runtime)?;
        let interface = args.chosen();
        crate::interface::check_others(interface.definition(), args)?;
        interface.check(args)?;
        let mut targets = plan_targets(args, &*interface)?;
        let mut queues = args.queues.clone();
        if let Some(experiment) = args.experiment {
            targets = (experiment.columns)(&queues, &targets)?;
            if let (Some(_), Some(workers)) = (&args.server_cpus, targets.iter().find_map(|target| target.workers)) {
                let expected = format!("none: the experiment has {workers} workers and other numbers of them");
                return Err(BenchError::option("server-cpus", "CPUs", expected));
            }
            // Each column has its own number of queues.
            queues.truncate(1);
        }
        let combinations = plan_combinations(args, &*interface, &queues)?;
        let max_depth = interface.max_depth(queue_size).min(MAX_DEPTH);
        for combination in &combinations {
            targets
                .iter()
                .try_for_each(|target| check_combination(args, &target.combination(combination), max_depth))?;
        }
        Ok(Plan {
            interface,
            targets,
            combinations,
            experiment: args.experiment,
            client: args.client,
            read_share: args.rwmixread,
            runtime: (!runtime.is_zero()).then_some(runtime),
            warmup,
            interval,
            runs: args.runs.unwrap_or(1),
            offset: args.offset,
            size: args.size,
            offset_increment: args.offset_increment,
            distribution: args.random_distribution,
            fsync: args.fsync,
            seed: args.seed,
            fill: args.fill || fills && in_memory,
            verify: args.verify,
            pin: args.pin.clone().map(|list| list.0).unwrap_or_default(),
            server_cpus: args.server_cpus.clone().map(|list| list.0).unwrap_or_default(),
            queue_size,
            chosen_queue_size: args.queue_size,
            descriptors: args.descriptors,
            packed: args.packed,
            json: args.json.clone(),
            stuck_timeout: STUCK_TIMEOUT,
            interrupt: Interrupt::default(),
            invocation: Invocation::of_this_process(),
        })
    }
}

impl Plan {
    /// Returns the number of all runs.
    pub fn run_count(&self) -> u64 {
        self.combinations.len() as u64 * self.targets.len() as u64 * u64::from(self.runs)
    }
}

/// Returns the length of an interval of the time series, if there is one.
fn series_interval(args: &BenchArgs, runtime: Duration) -> Result<Option<Duration>, BenchError> {
    let (name, seconds) = match (args.interval, args.log_avg_msec) {
        (Some(seconds), _) => ("interval", seconds),
        (None, Some(ms)) => ("log_avg_msec", f64::from(ms) / 1e3),
        (None, None) => return Ok(None),
    };
    let interval = Duration::from_secs_f64(seconds);
    let wrong = |expected: String| Err(BenchError::option(name, format!("{interval:?}"), expected));
    if interval < SHORTEST_INTERVAL {
        return wrong(format!("at least {SHORTEST_INTERVAL:?}"));
    }
    let most = MAX_INTERVALS as f64;
    if runtime.div_duration_f64(interval) > most {
        let least = Duration::from_millis((runtime.as_secs_f64() * 1e3 / most).ceil() as u64);
        return wrong(format!("at least {least:?} with --runtime {runtime:?}, for at most {MAX_INTERVALS} intervals"));
    }
    if args.json.is_none() {
        return wrong("--json FILE with it: the time series is in the results, not in the table".into());
    }
    Ok(Some(interval))
}

/// Checks the options that say what a job does.
fn check_load(args: &BenchArgs) -> Result<(), BenchError> {
    if args.verify.is_some() && args.rw.iter().any(|rw| rw.trims()) {
        return Err(BenchError::option("verify", "a benchmark that trims", "one that writes what is checked"));
    }
    if args.fsync > 0 && !args.rw.iter().all(|rw| rw.writes() && !rw.trims()) {
        return Err(BenchError::option("fsync", args.fsync, "a --rw that writes with it: there is nothing to flush"));
    }
    if args.random_distribution != Distribution::Uniform {
        let sequence = args.rw.iter().find(|rw| rw.is_sequential());
        let once = args.runtime == Some(0.0);
        if let (Some(_), _) | (_, true) = (sequence, once) {
            let why = sequence.map_or("--runtime 0 does each block once", |rw| rw.name());
            let expected = format!("random with it: found {why}, which leaves nothing to prefer");
            return Err(BenchError::option("random-distribution", args.random_distribution, expected));
        }
    }
    Ok(())
}

fn plan_combinations(
    args: &BenchArgs,
    interface: &dyn Interface,
    queues: &[u16],
) -> Result<Vec<Combination>, BenchError> {
    let mut all = vec![];
    let sizes =
        args.bs.iter().flat_map(|word| &word.0).copied().map(IoSizes::single).chain(args.bsrange.iter().copied());
    let sizes: Vec<IoSizes> = sizes.collect();
    let disk_counts = interface.disk_counts()?;
    let rates: Vec<Option<u32>> = match args.rate_iops.is_empty() {
        true => vec![None],
        false => args.rate_iops.iter().copied().map(Some).collect(),
    };
    let batches = |iodepth: u16| {
        // fio: "If set to 0 the iodepth value will be used"; and a larger batch than the depth is the depth.
        args.batch.iter().map(move |&batch| if batch == 0 { iodepth } else { batch.min(iodepth) })
    };
    for &rw in &args.rw {
        for &sizes in &sizes {
            for &(targets, luns) in &disk_counts {
                for &queues in queues {
                    for &iodepth in &args.iodepth {
                        for (batch, rate_iops) in
                            batches(iodepth).flat_map(|batch| rates.iter().map(move |rate| (batch, *rate)))
                        {
                            all.push(Combination {
                                rw,
                                sizes,
                                queues,
                                targets,
                                luns,
                                jobs: args.jobs.unwrap_or(interface.default_jobs(queues, targets * luns)),
                                max_threads: args.threads.unwrap_or(u16::MAX),
                                iodepth,
                                batch,
                                rate_iops,
                            });
                        }
                    }
                }
            }
        }
    }
    Ok(all)
}

fn check_combination(args: &BenchArgs, combination: &Combination, max_depth: u32) -> Result<(), BenchError> {
    let IoSizes { min, max } = combination.sizes;
    let name = if combination.sizes.is_mixed() { "bsrange" } else { "bs" };
    if min.0 == 0 || !min.is_aligned(mqblk_core::BlockSize::B512) || max.0 > 1 << 30 {
        return Err(BenchError::option(name, combination.sizes, "a multiple of 512 bytes, at most 1G"));
    }
    if combination.sizes.is_mixed() && !combination.rw.is_sequential() && args.runtime == Some(0.0) {
        let expected = "one size, a sequence, or a --runtime: blocks at random, each once, have one size";
        return Err(BenchError::option(name, combination.sizes, expected));
    }
    if !args.offset.is_aligned(mqblk_core::BlockSize::B512) {
        return Err(BenchError::option("offset", args.offset, "a multiple of 512 bytes"));
    }
    if let Some(increment) = args.offset_increment.filter(|increment| !increment.0.is_multiple_of(min.0)) {
        return Err(BenchError::option("offset-increment", increment, format!("a multiple of --bs, {min}")));
    }
    let depth = combination.depth_per_queue();
    if depth > max_depth {
        let found = format!("{depth} I/Os in flight on a queue");
        let what = if max_depth == MAX_DEPTH { "" } else { ", --queue-size" };
        return Err(BenchError::option("iodepth", found, format!("at most {max_depth}{what}")));
    }
    Ok(())
}
