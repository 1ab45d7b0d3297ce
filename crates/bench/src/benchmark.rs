//! A benchmark as requested: all combinations and targets, checked before anything starts.

mod targets;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::BenchError;
use crate::args::{BenchArgs, parse_options};
use crate::defaults;
use crate::experiment::{BenchCommand, Experiment};
use crate::holes;
use crate::interface::{self, Interface};
use crate::interrupt::Interrupt;
use crate::machine::{Machine, command_line};
use crate::plan::{Case, Combination, MAX_DEPTH, Plan, Target, value_of};
use crate::report::ResultRow;
use crate::run::RunResult;
use crate::words::{Distribution, IoSizes};
use crate::worker::MAX_INTERVALS;
use targets::plan_targets;

/// Default of the entries of a virtqueue.
const DEFAULT_QUEUE_SIZE: u16 = 256;

/// A server that completes no request for this long is stuck.
const STUCK_TIMEOUT: Duration = Duration::from_secs(30);

/// Shortest interval of a time series.
const SHORTEST_INTERVAL: Duration = Duration::from_millis(1);

/// A plan with its interface and experiment.
#[derive(Clone, Debug)]
pub(crate) struct Benchmark {
    pub plan: Plan,
    /// The guest interface of all targets.
    pub interface: Arc<dyn Interface>,
    /// The experiment whose table is printed.
    pub experiment: Option<&'static Experiment>,
}

impl Benchmark {
    /// Checks a command line.
    ///
    /// # Errors
    /// [`BenchError::Usage`], naming the option.
    pub(crate) fn new(args: &BenchArgs) -> Result<Benchmark, BenchError> {
        let (args, fills) = defaults::complete(args);
        let args = &args;
        // A disk in memory exists only during a run: `--fill` destroys nothing.
        let running = !args.socket.is_empty() || !args.xen.vdev.is_empty();
        let in_memory = !running && args.disk.iter().all(|spec| value_of(spec, "storage") == Some("ram"));
        check_writes(args, in_memory)?;
        check_load(args)?;
        let queue_size = args.queue_size.unwrap_or(DEFAULT_QUEUE_SIZE);
        if !queue_size.is_power_of_two() {
            return Err(BenchError::option("queue-size", queue_size, "a power of two from 4 to 32768"));
        }
        let seconds = |value: Option<f64>| Duration::from_secs_f64(value.unwrap_or(0.0));
        let (runtime, warmup) = (seconds(args.runtime), seconds(args.warmup));
        if runtime.is_zero() && !warmup.is_zero() {
            let expected = "0 where each block is done once: there is nothing to warm";
            return Err(BenchError::option("warmup", "a time", expected));
        }
        let interval = series_interval(args, runtime)?;
        let (definition, options) = (args.definition(), args.interface_options());
        interface::check_others(definition, &options)?;
        let interface = (definition.of)(&options);
        interface.check(&options)?;
        let (targets, queues) = plan_columns(args, &*interface)?;
        let combinations = plan_combinations(args, &*interface, &queues)?;
        let max_depth = interface.max_depth(queue_size).min(MAX_DEPTH);
        for combination in &combinations {
            targets
                .iter()
                .try_for_each(|target| check_combination(args, &target.combination(combination), max_depth))?;
        }
        let plan = Plan {
            targets,
            combinations,
            interface: definition.name,
            experiment: args.experiment.map(|experiment| experiment.option),
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
            command: command_line(),
            machine: Machine::read(),
        };
        Ok(Benchmark { plan, interface, experiment: args.experiment })
    }

    /// Checks the command line of an experiment as `mqblk bench` checks it.
    ///
    /// # Errors
    /// [`BenchError::Usage`], with the command.
    pub(crate) fn of_command(command: &BenchCommand) -> Result<Benchmark, BenchError> {
        let wrong = |why: &dyn fmt::Display| BenchError::Usage(format!("{command}: {why}"));
        let args = parse_options(&command.options).map_err(|error| wrong(&error))?;
        Benchmark::new(&args).map_err(|error| wrong(&error))
    }

    /// Returns the share of holes among the blocks that are read, from 0 to 1; `None` if it is unknown: so that of a
    /// running server.
    pub(crate) fn holes(&self, case: &Case<'_>) -> Option<f64> {
        holes::share(case.plan, &case.combination, &self.interface.disk_settings(case))
    }

    /// Returns the row of the runs of a target, at least one.
    pub(crate) fn row(&self, case: &Case<'_>, holes: Option<f64>, results: &[RunResult]) -> ResultRow {
        ResultRow::new(case, self.interface.results(case), holes, results)
    }
}

/// Checks that nothing is destroyed without `--allow-write`, and that only written blocks are verified.
fn check_writes(args: &BenchArgs, in_memory: bool) -> Result<(), BenchError> {
    if args.rw.iter().any(|rw| rw.writes()) && !args.allow_write {
        let expected = "--allow-write with it: it destroys what is on the disk";
        return Err(BenchError::option("rw", "a benchmark that writes", expected));
    }
    if args.fill && !args.allow_write && !in_memory {
        let expected = "--allow-write with it: it destroys what is on them";
        return Err(BenchError::option("fill", "disks that are not in memory", expected));
    }
    if args.verify.is_some() && !args.rw.iter().all(|rw| rw.writes()) {
        return Err(BenchError::option("verify", "a benchmark that only reads", "one that writes what is checked"));
    }
    Ok(())
}

/// Returns all targets (the columns of an experiment), and the numbers of queues to measure.
fn plan_columns(args: &BenchArgs, interface: &dyn Interface) -> Result<(Vec<Target>, Vec<u16>), BenchError> {
    let mut targets = plan_targets(args, interface)?;
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
    Ok((targets, queues))
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

/// Checks the options of a job's load.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_of_an_experiment_is_a_benchmark() {
        let of = |options| Benchmark::of_command(&BenchCommand::new(options, ""));
        let plan = of("--disk storage=null,size=1G --queues 1,2 --runs 2").unwrap().plan;
        assert_eq!((plan.combinations.len(), plan.runs), (2, 2));
        let error = of("--disk storage=null,size=1G --bs 5").unwrap_err().to_string();
        assert!(error.starts_with("mqblk bench --disk storage=null,size=1G --bs 5: --bs: found 5"), "{error}");
        assert!(of("--wrong").is_err());
    }
}
