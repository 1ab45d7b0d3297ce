//! Defaults of options.

use crate::args::{BenchArgs, parse_options};
use crate::interface::TABLE;

/// Defaults of options that neither the command line nor an experiment sets.
const USUAL: &str = "--rw randread --bs 4k --iodepth 1 --batch 1 --queues 1 --runtime 5 --warmup 1";
/// Runs of each combination with a runtime: several, so that the mean has a standard error.
const RUNS: u16 = 3;

/// Returns `args` with defaults filled in, and true if the experiment fills disks in memory.
pub(crate) fn complete(args: &BenchArgs) -> (BenchArgs, bool) {
    let mut args = args.clone();
    let own = args.experiment.map_or("", |experiment| experiment.defaults);
    let mut fills = false;
    for line in [own, USUAL] {
        let options: Vec<&str> = line.split_ascii_whitespace().collect();
        let defaults = parse_options(&options).expect("defaults are options");
        fills |= defaults.fill;
        fill_in(&mut args, defaults);
    }
    args.interface.get_or_insert(&TABLE[0]);
    let once = args.runtime == Some(0.0);
    args.runs.get_or_insert(if once { 1 } else { RUNS });
    (args, fills)
}

fn fill_in(args: &mut BenchArgs, defaults: BenchArgs) {
    fn fill<T>(list: &mut Vec<T>, default: Vec<T>) {
        if list.is_empty() {
            *list = default;
        }
    }
    if let Some(own) = defaults.interface
        && args.interface.get_or_insert(own).name == own.name
    {
        fill(&mut args.scsi.targets, defaults.scsi.targets);
        args.xen.ring_order = args.xen.ring_order.or(defaults.xen.ring_order);
    }
    if args.socket.is_empty() && args.xen.vdev.is_empty() {
        fill(&mut args.disk, defaults.disk);
    }
    if args.bs.is_empty() && args.bsrange.is_empty() {
        (args.bs, args.bsrange) = (defaults.bs, defaults.bsrange);
    }
    fill(&mut args.rw, defaults.rw);
    fill(&mut args.iodepth, defaults.iodepth);
    fill(&mut args.batch, defaults.batch);
    fill(&mut args.queues, defaults.queues);
    args.jobs = args.jobs.or(defaults.jobs);
    // A verified load does each block once.
    let runtime = if args.verify.is_some() { Some(0.0) } else { defaults.runtime };
    args.runtime = args.runtime.or(runtime);
    let warmup = if args.runtime == Some(0.0) { Some(0.0) } else { defaults.warmup };
    args.warmup = args.warmup.or(warmup);
}
