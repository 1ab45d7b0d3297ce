//! Which part of the disk each job works on.

use mqblk_core::{ByteLen, ByteOffset, Sector512};

use crate::BenchError;
use crate::job::Blocks;
use crate::plan::{Combination, Plan};

/// Most blocks whose generation is kept.
const MOST_VERIFIED: u64 = 1 << 30;

/// The jobs' parts, in blocks of the combination's size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Streams {
    /// Where block 0 is.
    pub base: Sector512,
    /// One for each job.
    pub parts: Vec<Blocks>,
}

impl Streams {
    /// The parts on a disk of `capacity`.
    ///
    /// # Errors
    /// [`BenchError::Usage`] when a part does not lie on the disk, has no block, or is written by two jobs that verify.
    pub fn new(plan: &Plan, combination: &Combination, capacity: ByteLen) -> Result<Streams, BenchError> {
        let parts = match plan.offset_increment {
            Some(increment) => apart(plan, combination, capacity, increment)?,
            None => together(plan, combination, capacity)?,
        };
        let total: u64 = parts.iter().map(|part| part.count).sum();
        if plan.verify.is_some() && total > MOST_VERIFIED {
            let found = format!("{total} blocks");
            return Err(BenchError::option("size", found, format!("at most {MOST_VERIFIED} blocks with --verify")));
        }
        // The plan has checked that the offset is a multiple of 512.
        Ok(Streams { base: ByteOffset(plan.offset.0).to_sector().unwrap_or_default(), parts })
    }

    /// Blocks of all jobs.
    pub fn total(&self) -> u64 {
        self.parts.iter().map(|part| part.count).sum()
    }
}

/// One range, which the jobs share out, or which each has for itself.
fn together(plan: &Plan, combination: &Combination, capacity: ByteLen) -> Result<Vec<Blocks>, BenchError> {
    let rest = ByteLen(capacity.0.saturating_sub(plan.offset.0));
    let size = plan.size.unwrap_or(rest);
    if size > rest {
        let expected = format!("at most {rest}: the disk has {capacity}, and the range starts at {}", plan.offset);
        return Err(BenchError::option("size", size, expected));
    }
    let blocks = size.0 / combination.bs.0;
    let jobs = u64::from(combination.jobs);
    let shared_out = combination.rw.sequential() || plan.verify.is_some() || plan.runtime.is_none();
    if blocks < if shared_out { jobs } else { 1 } {
        return Err(BenchError::option("size", size, format!("a block of {} for each job, at least", combination.bs)));
    }
    let part = |index| if shared_out { Blocks::part(blocks, index, jobs) } else { Blocks { first: 0, count: blocks } };
    Ok((0..jobs).map(part).collect())
}

/// Job J's part starts at the offset plus J increments. Source: fio's `offset_increment`; there a part without a size goes on
/// to the end of the disk, here to where the next one starts, so that no two jobs work on the same blocks unless asked to.
fn apart(
    plan: &Plan,
    combination: &Combination,
    capacity: ByteLen,
    increment: ByteLen,
) -> Result<Vec<Blocks>, BenchError> {
    let (bs, jobs) = (combination.bs, combination.jobs);
    let mut parts = Vec::with_capacity(jobs.into());
    for job in 0..u64::from(jobs) {
        let start = increment.0.checked_mul(job).and_then(|ahead| ahead.checked_add(plan.offset.0));
        let rest = start.and_then(|start| capacity.0.checked_sub(start)).filter(|rest| *rest >= bs.0).map(ByteLen);
        let (Some(start), Some(rest)) = (start.map(ByteLen), rest) else {
            if job == 0 {
                let expected = format!("room for a block of {bs} behind it: the disk has {capacity}");
                return Err(BenchError::option("offset", plan.offset, expected));
            }
            let room = capacity.0.saturating_sub(plan.offset.0).saturating_sub(bs.0);
            let most = ByteLen(room / job / bs.0 * bs.0);
            let expected = format!(
                "at most {most}: the disk has {capacity}, and job {job} of {jobs} would have no block of {bs} there, from {} on",
                plan.offset
            );
            return Err(BenchError::option("offset-increment", increment, expected));
        };
        let own = if increment == ByteLen::ZERO { rest } else { increment.min(rest) };
        let size = plan.size.unwrap_or(own);
        if size > rest {
            let expected =
                format!("at most {rest}: the disk has {capacity}, and job {job} of {jobs} starts at {start}");
            return Err(BenchError::option("size", size, expected));
        }
        if size < bs {
            return Err(BenchError::option("size", size, format!("a block of {bs} for each job, at least")));
        }
        if plan.verify.is_some() && jobs > 1 && size > increment {
            let expected = format!("at least {size}, the size of a job's part: two jobs cannot verify the same blocks");
            return Err(BenchError::option("offset-increment", increment, expected));
        }
        // The plan has checked that the increment is a multiple of the block size.
        parts.push(Blocks { first: increment.0 / bs.0 * job, count: size.0 / bs.0 });
    }
    Ok(parts)
}
