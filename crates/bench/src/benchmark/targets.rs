//! The targets of a command line.

use crate::BenchError;
use crate::args::BenchArgs;
use crate::interface::{self, Interface};
use crate::plan::{QUEUE_SIZE_KEYS, Target, TargetSource, value_of};

/// Returns all targets of a command line.
///
/// # Errors
/// [`BenchError::Usage`].
pub(super) fn plan_targets(args: &BenchArgs, interface: &dyn Interface) -> Result<Vec<Target>, BenchError> {
    let sockets = args.socket.iter().map(|socket| (socket.display().to_string(), TargetSource::Socket(socket.clone())));
    let devices = interface.devices().into_iter().map(|device| (device.name.clone(), TargetSource::Device(device)));
    let mut sources: Vec<(String, TargetSource)> = sockets.chain(devices).collect();
    let running = sources.len();
    sources.iter_mut().zip(&args.label).for_each(|((name, _), label)| name.clone_from(label));
    for (index, spec) in args.disk.iter().enumerate() {
        let label = args.label.get(running + index).unwrap_or(spec);
        let served = served(args, interface, spec)?.into_iter();
        sources.extend(served.map(|settings| (label.clone(), TargetSource::Disk(settings))));
    }
    if sources.is_empty() {
        let own = args.definition().running;
        return Err(BenchError::Usage(format!("found no target, expected {own} or --disk KEY=VALUE,...")));
    }
    let of_server = !args.poll.is_empty() || args.server_cpus.is_some() || args.server_workers.is_some();
    if args.disk.is_empty() && of_server {
        let options = "poll, --server-cpus, --server-workers";
        return Err(BenchError::option(options, "without --disk", "with it: a server that runs is not changed"));
    }
    if args.label.len() > running + args.disk.len() {
        let found = format!("{} names", args.label.len());
        let expected = format!("at most one for each {} and --disk", interface::running_options());
        return Err(BenchError::option("label", found, expected));
    }
    let target = |(label, source): (String, TargetSource)| {
        let unknown = Target { source, label, grants: None, column: None, queues: None, workers: None };
        let workers = args.server_workers.filter(|_| unknown.spec().is_some());
        Target { grants: interface.grants(&unknown), workers, ..unknown }
    };
    Ok(sources.into_iter().map(target).collect())
}

/// Returns the settings of one `--disk` with each poll policy and variant of the interface.
fn served(args: &BenchArgs, interface: &dyn Interface, spec: &str) -> Result<Vec<String>, BenchError> {
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
    if value_of(spec, "poll").is_some() && !args.poll.is_empty() {
        return Err(BenchError::option("poll", "a policy in --disk as well", "one of the two"));
    }
    let policies = match args.poll.is_empty() {
        true => vec![String::new()],
        false => args.poll.iter().map(|policy| format!(",poll={policy}")).collect(),
    };
    let variants = interface.variants(spec)?;
    Ok(policies.iter().flat_map(|poll| variants.iter().map(move |own| format!("{spec}{poll}{own}"))).collect())
}
