//! Checks before the first measurement: an error of the last combination must not end hours of runs.

use crate::BenchError;
use crate::benchmark::Benchmark;
use crate::cpu;
use crate::device::DeviceDisk;
use crate::holes;
use crate::plan::{Case, Combination, Target};
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
        let cases = plan.combinations.iter().map(|one| plan.case(target, one));
        let shares = cases.filter_map(|case| benchmark.holes(&case));
        holes::warn(&target.label, shares, plan.size);
    }
    Ok(())
}

fn check_target(benchmark: &Benchmark, target: &Target) -> Result<(), BenchError> {
    let plan = &benchmark.plan;
    let cases: Vec<Case> = plan.combinations.iter().map(|one| plan.case(target, one)).collect();
    let mut known: Vec<((u16, u16, u16), Vec<DeviceDisk>)> = vec![];
    for case in &cases {
        let key = setup(case);
        if !known.iter().any(|(other, _)| *other == key) {
            plan.interrupt.check()?;
            // With this setup: most queues, then least memory.
            let same = cases.iter().filter(|other| setup(other) == key);
            let memory = |one: &Combination| u64::from(one.depth_per_queue()) * one.sizes.max.0;
            let chosen = same.min_by_key(|one| (u16::MAX - one.combination.queues, memory(&one.combination)));
            known.push((key, benchmark.interface.probe(chosen.unwrap_or(case))?));
        }
        let disks = known.iter().find(|(other, _)| *other == key).map(|(_, disks)| disks.as_slice());
        run::check(case, disks.unwrap_or_default())?;
    }
    Ok(())
}

/// Returns the properties of a server to check: its queues, unless it is started with this many, and its disks.
fn setup(Case { target, combination, .. }: &Case<'_>) -> (u16, u16, u16) {
    (if target.spec().is_some() { 0 } else { combination.queues }, combination.targets, combination.luns)
}
