//! What is measured: running devices, and disks that servers are started for.

use std::path::PathBuf;

use super::{Combination, QUEUE_SIZE_KEYS};
use crate::BenchError;
use crate::args::BenchArgs;
use crate::interface::{self, Interface, TargetVariant};

/// The server's default of a disk's `merge`.
const DEFAULT_MERGE: &str = "auto";

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
    /// Workers of the server that is started; `None`: the server's default, or a running server.
    pub workers: Option<u16>,
    /// Microseconds that a null disk takes for a request, in the results; `None` for other storage.
    pub latency_us: Option<u64>,
}

impl Target {
    /// Returns a target of which nothing else is known.
    fn running(source: TargetSource, label: &str, grants: Option<String>) -> Target {
        let [storage, poll, merge] = ["unknown"; 3].map(str::to_owned);
        Target {
            source,
            label: label.to_owned(),
            storage,
            poll,
            merge,
            grants,
            column: None,
            queues: None,
            workers: None,
            latency_us: None,
        }
    }

    /// Returns the combination of the sweep with the target's own queues.
    pub fn combination(&self, of: &Combination) -> Combination {
        Combination { queues: self.queues.unwrap_or(of.queues), ..*of }
    }
}

/// Returns the value of `key` in `KEY=VALUE,...`.
pub(crate) fn value_of<'a>(spec: &'a str, key: &str) -> Option<&'a str> {
    spec.split(',').find_map(|pair| pair.split_once('=').filter(|(found, _)| *found == key).map(|(_, value)| value))
}

/// Returns the microseconds that a null disk takes for a request; `None` for other storage.
pub(crate) fn null_latency(spec: &str) -> Option<u64> {
    let own = value_of(spec, "latency-us").unwrap_or("0");
    (value_of(spec, "storage") == Some("null")).then(|| own.parse().ok()).flatten()
}

/// Returns all targets of a command line.
///
/// # Errors
/// [`BenchError::Usage`].
pub(super) fn plan_targets(args: &BenchArgs, interface: &dyn Interface) -> Result<Vec<Target>, BenchError> {
    let mut targets = vec![];
    let sockets = args.socket.iter().map(|socket| (TargetSource::Socket(socket.clone()), socket.display().to_string()));
    let devices = interface.devices().into_iter().map(|device| {
        let name = device.name.clone();
        (TargetSource::Device(device), name)
    });
    for (index, (source, name)) in sockets.chain(devices).enumerate() {
        let label = args.label.get(index).unwrap_or(&name);
        for TargetVariant { grants, .. } in interface.variants(None)? {
            targets.push(Target::running(source.clone(), label, grants));
        }
    }
    let running = targets.len();
    for (index, spec) in args.disk.iter().enumerate() {
        let label = args.label.get(running + index).unwrap_or(spec);
        targets.extend(served(args, interface, spec, label)?);
    }
    if targets.is_empty() {
        let own = interface.definition().running;
        return Err(BenchError::Usage(format!("found no target, expected {own} or --disk KEY=VALUE,...")));
    }
    let of_server = !args.poll.is_empty() || args.server_cpus.is_some() || args.server_workers.is_some();
    if args.disk.is_empty() && of_server {
        let text = "--poll, --server-cpus, --server-workers: found without --disk, expected with it: a server that runs is not changed";
        return Err(BenchError::Usage(text.into()));
    }
    if args.label.len() > running + args.disk.len() {
        let found = format!("{} names", args.label.len());
        let expected = format!("at most one for each {} and --disk", interface::running_options());
        return Err(BenchError::option("label", found, expected));
    }
    Ok(targets)
}

/// Returns the targets of one `--disk`: for each poll policy and variant of the interface.
fn served(args: &BenchArgs, interface: &dyn Interface, spec: &str, label: &str) -> Result<Vec<Target>, BenchError> {
    if let Some(key) = interface::address_keys().find(|key| value_of(spec, key).is_some()) {
        let found = format!("a disk with the key {key}");
        return Err(BenchError::option("disk", found, "one without: the benchmark sets it"));
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
    let policies: Vec<Option<&String>> = match args.poll.is_empty() {
        true => vec![None],
        false => args.poll.iter().map(Some).collect(),
    };
    let variants = interface.variants(Some(spec))?;
    let target = |(poll, TargetVariant { keys, grants }): (Option<&String>, TargetVariant)| Target {
        storage: value_of(spec, "storage").unwrap_or("file").to_owned(),
        poll: poll.map(String::as_str).or(own).unwrap_or("default").to_owned(),
        merge: value_of(spec, "merge").unwrap_or(DEFAULT_MERGE).to_owned(),
        workers: args.server_workers,
        latency_us: null_latency(spec),
        ..Target::running(
            TargetSource::Disk { spec: spec.to_owned(), poll: poll.cloned(), merge: None, keys },
            label,
            grants,
        )
    };
    Ok(policies.into_iter().flat_map(|poll| variants.iter().cloned().map(move |own| (poll, own))).map(target).collect())
}
