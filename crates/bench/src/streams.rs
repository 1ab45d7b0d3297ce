//! The parts of the disks that each job works on.

use mqblk_core::{ByteLen, ByteOffset, Sector512};

use crate::BenchError;
use crate::device::DeviceDisk;
use crate::pattern::BlockRange;
use crate::plan::{Combination, Plan};

/// Most blocks that can be verified.
const MAX_VERIFIED_BLOCKS: u64 = 1 << 30;

/// The blocks of one disk that a job works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct JobRange {
    pub job: u16,
    pub disk: u16,
    /// Blocks of the combination's smallest size.
    pub blocks: BlockRange,
}

/// The ranges of all jobs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Streams {
    /// Start of block 0 on each disk.
    pub base: Sector512,
    /// One for each job, or for each disk of a job that has several.
    pub ranges: Vec<JobRange>,
}

impl Streams {
    /// Deals the disks to the jobs. Job J works on disk J modulo disks; if there are fewer jobs, on disk J, J + jobs,
    /// and so on.
    ///
    /// # Errors
    /// [`BenchError::Usage`] when a range does not lie on its disk, has no block, or is written by two jobs that
    /// verify.
    pub(crate) fn new(plan: &Plan, combination: &Combination, disks: &[DeviceDisk]) -> Result<Streams, BenchError> {
        let mut parts = vec![];
        // Benchmark has checked that there are few enough.
        let count = disks.len() as u16;
        for (disk, DeviceDisk { capacity, .. }) in (0..count).zip(disks) {
            let jobs: Vec<u16> = match combination.jobs >= count {
                true => (disk..combination.jobs).step_by(count.into()).collect(),
                false => vec![disk % combination.jobs],
            };
            let own = Combination { jobs: jobs.len() as u16, ..*combination };
            let blocks = match plan.offset_increment {
                Some(increment) => spaced_ranges(plan, &own, *capacity, increment)?,
                None => shared_range(plan, &own, *capacity)?,
            };
            parts.extend(jobs.into_iter().zip(blocks).map(|(job, blocks)| JobRange { job, disk, blocks }));
        }
        let streams = Streams {
            // Benchmark has checked that the offset is a multiple of 512.
            base: ByteOffset(plan.offset.0).to_sector().unwrap_or_default(),
            ranges: parts,
        };
        if plan.verify.is_some() && streams.total_blocks() > MAX_VERIFIED_BLOCKS {
            let found = format!("{} blocks", streams.total_blocks());
            return Err(BenchError::option(
                "size",
                found,
                format!("at most {MAX_VERIFIED_BLOCKS} blocks with --verify"),
            ));
        }
        if plan.verify.is_some() && combination.rate_iops.is_some() {
            streams.check_free_blocks(combination)?;
        }
        Ok(streams)
    }

    /// Checks that a job finds a block without an I/O in flight whenever one is due: a verified block has at most one,
    /// and the start of an I/O cannot wait for another one's end.
    fn check_free_blocks(&self, combination: &Combination) -> Result<(), BenchError> {
        let (depth, most) = (u64::from(combination.iodepth), u64::from(combination.sizes.max_blocks()));
        let fewest = self.ranges.iter().map(|range| range.blocks.count).min().unwrap_or(u64::MAX);
        if (depth - 1) * most < fewest {
            return Ok(());
        }
        let expected = format!(
            "at most {} with --verify and --rate-iops: a job has {fewest} blocks, and a block one I/O in flight",
            (fewest - 1) / most + 1
        );
        Err(BenchError::option("iodepth", depth, expected))
    }

    /// Returns the blocks of all jobs.
    pub(crate) fn total_blocks(&self) -> u64 {
        self.ranges.iter().map(|part| part.blocks.count).sum()
    }
}

/// Returns ranges within one range: divided among the jobs, or the whole range for each job.
fn shared_range(plan: &Plan, combination: &Combination, capacity: ByteLen) -> Result<Vec<BlockRange>, BenchError> {
    let rest = ByteLen(capacity.0.saturating_sub(plan.offset.0));
    let size = plan.size.unwrap_or(rest);
    if size > rest {
        let expected = format!("at most {rest}: the disk has {capacity}, and the range starts at {}", plan.offset);
        return Err(BenchError::option("size", size, expected));
    }
    let blocks = size.0 / combination.sizes.min.0;
    let jobs = u64::from(combination.jobs);
    let shared_out = combination.rw.is_sequential() || plan.verify.is_some() || plan.runtime.is_none();
    if blocks < if shared_out { jobs } else { 1 } {
        return Err(BenchError::option(
            "size",
            size,
            format!("a block of {} for each job, at least", combination.sizes.min),
        ));
    }
    let part =
        |index| if shared_out { BlockRange::part(blocks, index, jobs) } else { BlockRange { first: 0, count: blocks } };
    Ok((0..jobs).map(part).collect())
}

/// Returns ranges that start at the offset plus J increments. Source: fio's `offset_increment`; there a range without a
/// size ends at the end of the disk, here where the next one starts, so that no two jobs work on the same blocks unless
/// requested.
fn spaced_ranges(
    plan: &Plan,
    combination: &Combination,
    capacity: ByteLen,
    increment: ByteLen,
) -> Result<Vec<BlockRange>, BenchError> {
    let (bs, jobs) = (combination.sizes.min, combination.jobs);
    let mut parts = Vec::with_capacity(jobs.into());
    for job in 0..u64::from(jobs) {
        let start = increment.0.checked_mul(job).and_then(|ahead| ahead.checked_add(plan.offset.0));
        let rest = start.and_then(|start| capacity.0.checked_sub(start)).filter(|rest| *rest >= bs.0).map(ByteLen);
        let (Some(start), Some(rest)) = (start.map(ByteLen), rest) else {
            if job == 0 {
                let expected = format!("room for a block of {bs} behind it: the disk has {capacity}");
                return Err(BenchError::option("offset", plan.offset, expected));
            }
            let last = u64::from(jobs) - 1;
            let space = capacity.0.saturating_sub(plan.offset.0).saturating_sub(bs.0);
            let most = ByteLen(space / last / bs.0 * bs.0);
            let expected = format!("at most {most}, so that job {last} has a block of {bs}: the disk has {capacity}");
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
        // Benchmark has checked that the increment is a multiple of the block size.
        parts.push(BlockRange { first: increment.0 / bs.0 * job, count: size.0 / bs.0 });
    }
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pattern::AccessPattern;
    use crate::tests::plan;

    /// Returns the ranges of the first combination on a disk of 1 MiB, as (first, count).
    fn parts(line: &str) -> Result<Vec<(u64, u64)>, String> {
        let line = format!("--socket s {line}");
        let plan = plan(&line).map_err(|error| error.to_string())?;
        let streams = Streams::new(&plan, &plan.combinations[0], &[disk()]).map_err(|error| error.to_string())?;
        assert_eq!(streams.base.to_offset(), Some(ByteOffset(plan.offset.0)));
        assert_eq!(streams.total_blocks(), streams.ranges.iter().map(|part| part.blocks.count).sum::<u64>());
        assert!(streams.ranges.iter().enumerate().all(|(job, part)| (usize::from(part.job), part.disk) == (job, 0)));
        Ok(streams.ranges.iter().map(|part| (part.blocks.first, part.blocks.count)).collect())
    }

    fn disk() -> DeviceDisk {
        let (capacity, block) = (ByteLen(1 << 20), mqblk_core::BlockSize::B512);
        DeviceDisk {
            name: "a disk".into(),
            capacity,
            block,
            read_only: false,
            max_request: 1 << 20,
            max_trim: Ok(1 << 20),
            flush: Ok(()),
        }
    }

    #[test]
    fn jobs_are_dealt_to_disks_and_disks_to_jobs() {
        let dealt = |line: &str, disks: usize| -> Vec<(u16, u16, u64)> {
            let line = format!("--interface virtio-scsi --socket s --rw read --bs 64k {line}");
            let plan = plan(&line).unwrap();
            let streams = Streams::new(&plan, &plan.combinations[0], &vec![disk(); disks]).unwrap();
            streams.ranges.iter().map(|part| (part.job, part.disk, part.blocks.count)).collect()
        };
        assert_eq!(dealt("--targets 3", 3), [(0, 0, 16), (1, 1, 16), (2, 2, 16)]);
        assert_eq!(dealt("--targets 2 --jobs 5", 2), [(0, 0, 5), (2, 0, 5), (4, 0, 6), (1, 1, 8), (3, 1, 8)]);
        assert_eq!(dealt("--targets 3 --jobs 2", 3), [(0, 0, 16), (1, 1, 16), (0, 2, 16)]);
        assert_eq!(dealt("--luns 2 --jobs 1", 2), [(0, 0, 16), (0, 1, 16)]);
    }

    #[test]
    fn sequences_split_the_range_and_random_jobs_share_it() {
        assert_eq!(parts("--rw read --jobs 4").unwrap(), [(0, 64), (64, 64), (128, 64), (192, 64)]);
        assert_eq!(parts("--rw read --jobs 3 --offset 64k --size 40k").unwrap(), [(0, 3), (3, 3), (6, 4)]);
        assert_eq!(parts("--rw rw --allow-write --jobs 2 --bs 512").unwrap(), [(0, 1024), (1024, 1024)]);
        assert_eq!(parts("--rw randread --jobs 2").unwrap(), [(0, 256), (0, 256)]);
        assert_eq!(parts("--rw randread --jobs 2 --runtime 0").unwrap(), [(0, 128), (128, 128)]);
    }

    #[test]
    fn an_increment_separates_the_jobs() {
        let apart = |line: &str| {
            let rw = if line.contains("--rw") { "" } else { "--rw read" };
            parts(&format!("--jobs 4 {rw} {line}")).unwrap()
        };
        assert_eq!(apart("--offset-increment 256k"), [(0, 64), (64, 64), (128, 64), (192, 64)]);
        // The last range ends with the disk.
        assert_eq!(apart("--offset-increment 256k --offset 128k"), [(0, 64), (64, 64), (128, 64), (192, 32)]);
        // As in fio, the size is that of each job, and may be more or less than the distance of two starts.
        assert_eq!(apart("--offset-increment 128k --size 64k"), [(0, 16), (32, 16), (64, 16), (96, 16)]);
        assert_eq!(apart("--offset-increment 4k --size 1000k"), [(0, 250), (1, 250), (2, 250), (3, 250)]);
        assert_eq!(apart("--offset-increment 0 --bs 64k"), [(0, 16); 4]);
        assert_eq!(
            apart("--offset-increment 128k --bs 512 --rw randread"),
            [(0, 256), (256, 256), (512, 256), (768, 256)]
        );
        // Only whole blocks of a range are used.
        assert_eq!(apart("--offset-increment 48k --bs 16k --size 40k"), [(0, 2), (3, 2), (6, 2), (9, 2)]);
        let verified = "--rw write --allow-write --verify crc32c --offset-increment";
        assert_eq!(apart(&format!("{verified} 64k --size 64k")), [(0, 16), (16, 16), (32, 16), (48, 16)]);
    }

    #[test]
    fn a_sequence_wraps_within_its_own_range() {
        let blocks = BlockRange { first: 64, count: 3 };
        assert_eq!(parts("--rw read --jobs 2 --offset-increment 256k --size 12k").unwrap()[1], (64, 3));
        let mut pattern = AccessPattern::new(crate::words::Rw::Read, 0, blocks, false, 1);
        let seen: Vec<u64> = std::iter::from_fn(|| pattern.next()).take(7).map(|choice| choice.block).collect();
        assert_eq!(seen, [64, 65, 66, 64, 65, 66, 64]);
    }

    #[test]
    fn what_does_not_fit_is_a_usage_error() {
        for (line, want) in [
            ("--offset-increment 10k", "--offset-increment: found 10K, expected a multiple of --bs, 4K"),
            (
                "--offset-increment 512k",
                "--offset-increment: found 512K, expected at most 340K, so that job 3 has a block of 4K: the disk has 1M",
            ),
            (
                "--offset 1M --offset-increment 4k",
                "--offset: found 1M, expected room for a block of 4K behind it: the disk has 1M",
            ),
            (
                "--offset-increment 256k --size 512k",
                "--size: found 512K, expected at most 256K: the disk has 1M, and job 3 of 4 starts at 768K",
            ),
            ("--offset-increment 256k --size 1k", "--size: found 1K, expected a block of 4K for each job, at least"),
            (
                "--offset-increment 64k --size 128k --rw write --allow-write --verify crc32c",
                "--offset-increment: found 64K, expected at least 128K, the size of a job's part: two jobs cannot verify the same blocks",
            ),
            (
                "--offset-increment 0 --rw write --allow-write --verify crc32c",
                "--offset-increment: found 0, expected at least 1M, the size of a job's part: two jobs cannot verify the same blocks",
            ),
            ("--size 2M", "--size: found 2M, expected at most 1M: the disk has 1M, and the range starts at 0"),
            ("--size 12k", "--size: found 12K, expected a block of 4K for each job, at least"),
        ] {
            let rw = if line.contains("--rw") { "" } else { "--rw read" };
            assert_eq!(parts(&format!("--jobs 4 {rw} {line}")).unwrap_err(), want);
        }
        // Two increments are 2^64 bytes.
        let huge = parts("--rw read --jobs 4 --offset 4k --offset-increment 9007199254740992K").unwrap_err();
        assert!(huge.contains("expected at most 336K, so that job 3"), "{huge}");
    }
}
