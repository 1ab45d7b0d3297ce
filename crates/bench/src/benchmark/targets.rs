//! The targets of a command line.

use crate::BenchError;
use crate::args::BenchArgs;
use crate::interface::{self, Interface, TargetVariant};
use crate::plan::{QUEUE_SIZE_KEYS, Target, TargetSource, null_latency, value_of};

/// The server's default of a disk's `merge`.
const DEFAULT_MERGE: &str = "auto";

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
