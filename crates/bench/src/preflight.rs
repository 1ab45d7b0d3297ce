//! Checks before the first measurement: an error of the last combination must not end hours of runs.

use crate::BenchError;
use crate::benchmark::Benchmark;
use crate::cpu;
use crate::device::DeviceDisk;
use crate::holes;
use crate::plan::{Combination, Target, TargetSource};
use crate::run;

/// Checks CPUs, and connects to each target (starts its server first if it has none) to check all combinations against
/// its disks. Warns of holes in the blocks that are read.
///
/// # Errors
/// [`BenchError::Usage`] when an option does not fit; [`BenchError::Failed`] when a target cannot be reached.
pub(crate) fn check(benchmark: &Benchmark) -> Result<(), BenchError> {
    let plan = &benchmark.plan;
    cpu::check("pin", &plan.pin)?;
    cpu::check("server-cpus", &plan.server_cpus)?;
    // A single run begins with the same checks.
    if plan.run_count() > 1 {
        plan.targets.iter().try_for_each(|target| check_target(benchmark, target))?;
    }
    for target in &plan.targets {
        let combinations = plan.combinations.iter().map(|one| target.combination(one));
        let shares = combinations.filter_map(|one| benchmark.holes(target, &one));
        holes::warn(&target.label, shares, plan.size);
    }
    Ok(())
}

fn check_target(benchmark: &Benchmark, target: &Target) -> Result<(), BenchError> {
    let plan = &benchmark.plan;
    let combinations: Vec<Combination> = plan.combinations.iter().map(|one| target.combination(one)).collect();
    let mut known: Vec<((u16, u16, u16), Vec<DeviceDisk>)> = vec![];
    for combination in &combinations {
        let key = setup(target, combination);
        if !known.iter().any(|(other, _)| *other == key) {
            plan.interrupt.check()?;
            // With this setup: most queues, then least memory.
            let same = combinations.iter().filter(|other| setup(target, other) == key);
            let memory = |one: &Combination| u64::from(one.depth_per_queue()) * one.sizes.max.0;
            let chosen = same.min_by_key(|one| (u16::MAX - one.queues, memory(one)));
            known.push((key, benchmark.interface.probe(plan, chosen.unwrap_or(combination), target)?));
        }
        let disks = known.iter().find(|(other, _)| *other == key).map(|(_, disks)| disks.as_slice());
        run::check(plan, combination, disks.unwrap_or_default())?;
    }
    Ok(())
}

/// Returns the properties of a server to check: its queues, unless it is started with this many, and its disks.
fn setup(target: &Target, combination: &Combination) -> (u16, u16, u16) {
    let started = matches!(target.source, TargetSource::Disk(_));
    (if started { 0 } else { combination.queues }, combination.targets, combination.luns)
}
