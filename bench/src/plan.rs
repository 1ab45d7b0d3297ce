//! What will be measured: every combination, checked before anything starts.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use mqblk_core::ByteLen;

use crate::BenchError;
use crate::args::{BenchArgs, ClientMode, Descriptors, IoSizes, Rw, Verify};
use crate::defaults::Defaults;
use crate::experiment::Experiment;
use crate::interface::{self, Interface, TargetVariant};
use crate::interrupt::Interrupt;

/// The server's default of a disk's `merge`.
const DEFAULT_MERGE: &str = "auto";

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

/// Where a target is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetSource {
    /// A running server.
    Socket(PathBuf),
    /// A device that an interface's options name.
    Device(DeviceName),
    /// A disk, for which a server is started for each run.
    Disk {
        /// The argument of `mqblk serve --disk`, without socket, queues and poll; for a controller, of each logical unit.
        spec: String,
        /// Poll policy.
        poll: Option<String>,
        /// Merging.
        merge: Option<MergeMode>,
        /// Keys of the interface.
        keys: DiskKeys,
    },
}

/// Name and number of a running device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceName {
    /// The name as it was given.
    pub name: String,
    /// The device's number.
    pub number: u32,
}

/// Keys and values that are appended to the settings of a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiskKeys(Vec<(&'static str, &'static str)>);

impl DiskKeys {
    /// Returns the value of `key`.
    pub fn get(&self, key: &str) -> Option<&'static str> {
        self.0.iter().find(|(name, _)| *name == key).map(|(_, value)| *value)
    }

    /// Sets `key`; `None` removes it: the server's default holds.
    pub fn set(&mut self, key: &'static str, value: Option<&'static str>) {
        self.0.retain(|(name, _)| *name != key);
        self.0.extend(value.map(|value| (key, value)));
    }

    /// Returns all keys and values, in the order in which they were set.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &'static str)> + use<'_> {
        self.0.iter().copied()
    }
}

/// Request merging of a served disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MergeMode {
    /// Adjacent requests are merged.
    On,
    /// Nothing is merged.
    Off,
}

impl MergeMode {
    /// Returns the value of the disk's key `merge`.
    pub fn name(self) -> &'static str {
        match self {
            MergeMode::On => "on",
            MergeMode::Off => "off",
        }
    }
}

/// A target, and what the results say about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Where it is.
    pub source: TargetSource,
    /// `target` in the results.
    pub label: String,
    /// `storage` in the results.
    pub storage: String,
    /// `poll` in the results.
    pub poll: String,
    /// `merge` in the results.
    pub merge: String,
    /// `grants` in the results; `None` where the interface has none.
    pub grants: Option<String>,
    /// `column` in the results: an experiment's heading for it.
    pub column: Option<String>,
    /// Queues, if not those of the combination.
    pub queues: Option<u16>,
}

impl Target {
    /// Returns the combination of the sweep with the target's own queues.
    pub fn combination(&self, of: &Combination) -> Combination {
        Combination { queues: self.queues.unwrap_or(of.queues), ..*of }
    }
}

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
    pub experiment: Option<&'static dyn Experiment>,
    /// How the client waits for completions.
    pub client: ClientMode,
    /// Share of reads of a mixed load, in percent.
    pub read_share: u8,
    /// Length of the measurement; `None`: each block once.
    pub runtime: Option<Duration>,
    /// Load before the measurement.
    pub warmup: Duration,
    /// Runs of each combination and target.
    pub runs: u16,
    /// Start of the range.
    pub offset: ByteLen,
    /// Length of the range; `None`: to the end of the disk.
    pub size: Option<ByteLen>,
    /// Distance of the jobs' ranges; `None`: the jobs share one range, or share it out.
    pub offset_increment: Option<ByteLen>,
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
}

impl Plan {
    /// Checks the command line.
    ///
    /// # Errors
    /// [`BenchError::Usage`], naming the option.
    pub fn new(args: &BenchArgs) -> Result<Plan, BenchError> {
        let defaults = args.experiment.map_or_else(Defaults::default, Experiment::defaults);
        let args = &defaults.apply(args);
        if args.rw.iter().any(|rw| rw.writes()) && !args.allow_write {
            let text =
                "--rw: found a benchmark that writes, expected --allow-write with it: it destroys what is on the disk";
            return Err(BenchError::Usage(text.into()));
        }
        // A disk in memory exists during a run only, so `--fill` destroys nothing.
        let running = !args.socket.is_empty() || args.interfaces.has_devices();
        let in_memory = !running && args.disk.iter().all(|spec| crate::target::split_pairs(spec).contains(&IN_MEMORY));
        if args.fill && !args.allow_write && !in_memory {
            let text = "--fill: found disks that are not in memory, expected --allow-write with it: it destroys what is on them";
            return Err(BenchError::Usage(text.into()));
        }
        if args.verify.is_some() && !args.rw.iter().all(|rw| rw.writes()) {
            return Err(BenchError::option("verify", "a benchmark that only reads", "one that writes what is checked"));
        }
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
        let interface = args.chosen();
        args.interfaces.check_others(interface.definition())?;
        interface.check(args)?;
        let mut targets = plan_targets(args, &**interface)?;
        let mut queues = args.queues.clone();
        if let Some(experiment) = args.experiment {
            targets = experiment.columns(&queues, targets)?;
            // Each column has its own number of queues.
            queues.truncate(1);
        }
        let combinations = plan_combinations(args, &**interface, &queues)?;
        let max_depth = interface.max_depth(queue_size).min(MAX_DEPTH);
        for combination in &combinations {
            targets
                .iter()
                .try_for_each(|target| check_combination(args, &target.combination(combination), max_depth))?;
        }
        Ok(Plan {
            interface: Arc::clone(interface),
            targets,
            combinations,
            experiment: args.experiment,
            client: args.client,
            read_share: args.rwmixread,
            runtime: (!runtime.is_zero()).then_some(runtime),
            warmup,
            runs: args.runs.unwrap_or(1),
            offset: args.offset,
            size: args.size,
            offset_increment: args.offset_increment,
            fill: args.fill || defaults.fill && in_memory,
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
        })
    }
}

impl Plan {
    /// Returns the number of all runs.
    pub fn run_count(&self) -> u64 {
        self.combinations.len() as u64 * self.targets.len() as u64 * u64::from(self.runs)
    }
}

/// Returns the value of `key` in `KEY=VALUE,...`.
pub(crate) fn value_of<'a>(spec: &'a str, key: &str) -> Option<&'a str> {
    spec.split(',').find_map(|pair| pair.split_once('=').filter(|(found, _)| *found == key).map(|(_, value)| value))
}

fn plan_targets(args: &BenchArgs, interface: &dyn Interface) -> Result<Vec<Target>, BenchError> {
    let mut targets = vec![];
    let sockets = args.socket.iter().map(|socket| (TargetSource::Socket(socket.clone()), socket.display().to_string()));
    let devices = interface.devices().into_iter().map(|device| {
        let name = device.name.clone();
        (TargetSource::Device(device), name)
    });
    for (index, (source, name)) in sockets.chain(devices).enumerate() {
        let label = args.label.get(index).cloned().unwrap_or(name);
        for TargetVariant { grants, .. } in interface.variants(None)? {
            let [storage, poll, merge] = std::array::from_fn(|_| "unknown".to_owned());
            let (source, label) = (source.clone(), label.clone());
            targets.push(Target { source, label, storage, poll, merge, grants, column: None, queues: None });
        }
    }
    let running = targets.len();
    for (index, spec) in args.disk.iter().enumerate() {
        for key in interface::address_keys() {
            if value_of(spec, key).is_some() {
                let found = format!("a disk with the key {key}");
                return Err(BenchError::option("disk", found, "one without: the benchmark sets it"));
            }
        }
        if let Some(queue_size) = args.queue_size {
            let own = QUEUE_SIZE_KEYS.iter().find_map(|key| value_of(spec, key)?.parse::<u16>().ok());
            if let Some(own) = own.filter(|own| *own < queue_size) {
                let expected = format!("at most {own}, the queue-size of --disk");
                return Err(BenchError::option("queue-size", queue_size, expected));
            }
        }
        let own = value_of(spec, "poll");
        if own.is_some() && !args.poll.is_empty() {
            return Err(BenchError::option("poll", "a policy in --disk as well", "one of the two"));
        }
        let variants = interface.variants(Some(spec))?;
        let label = args.label.get(running + index).unwrap_or(spec);
        let storage = value_of(spec, "storage").unwrap_or("file").to_owned();
        let policies: Vec<Option<&String>> = match args.poll.is_empty() {
            true => vec![None],
            false => args.poll.iter().map(Some).collect(),
        };
        let merge = value_of(spec, "merge").unwrap_or(DEFAULT_MERGE);
        for (poll, variant) in policies.iter().flat_map(|poll| variants.iter().map(move |variant| (*poll, variant))) {
            let TargetVariant { keys, grants } = variant.clone();
            let source = TargetSource::Disk { spec: spec.clone(), poll: poll.cloned(), merge: None, keys };
            let poll = poll.map(String::as_str).or(own).unwrap_or("default").to_owned();
            let (label, storage, merge) = (label.clone(), storage.clone(), merge.to_owned());
            targets.push(Target { source, label, storage, poll, merge, grants, column: None, queues: None });
        }
    }
    if targets.is_empty() {
        let own = interface.definition().running;
        return Err(BenchError::Usage(format!("found no target, expected {own} or --disk KEY=VALUE,...")));
    }
    if args.disk.is_empty() && (!args.poll.is_empty() || args.server_cpus.is_some()) {
        let text = "--poll, --server-cpus: found without --disk, expected with it: a server that runs is not changed";
        return Err(BenchError::Usage(text.into()));
    }
    if args.label.len() > running + args.disk.len() {
        let found = format!("{} names", args.label.len());
        let expected = format!("at most one for each {} and --disk", interface::running_options());
        return Err(BenchError::option("label", found, expected));
    }
    Ok(targets)
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
    let batches = |iodepth: u16| {
        // fio: "If set to 0 the iodepth value will be used"; and a larger batch than the depth is the depth.
        args.batch.iter().map(move |&batch| if batch == 0 { iodepth } else { batch.min(iodepth) })
    };
    for &rw in &args.rw {
        for &sizes in &sizes {
            for &(targets, luns) in &disk_counts {
                for &queues in queues {
                    for &iodepth in &args.iodepth {
                        for batch in batches(iodepth) {
                            let jobs = args.jobs.unwrap_or(interface.default_jobs(queues, targets * luns));
                            let most_threads = args.threads.unwrap_or(u16::MAX);
                            let combination = Combination {
                                rw,
                                sizes,
                                queues,
                                targets,
                                luns,
                                jobs,
                                max_threads: most_threads,
                                iodepth,
                                batch,
                            };
                            all.push(combination);
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
