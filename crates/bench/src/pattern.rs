//! Order of a job's blocks.

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rand_distr::{Distribution as _, Zipf};

use crate::device::IoOp;
use crate::words::{Distribution, Rw};

/// A range of blocks of the benchmark's block size, counted from the start of the range to load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockRange {
    /// First block.
    pub first: u64,
    /// Number of blocks; at least 1.
    pub count: u64,
}

impl BlockRange {
    /// Returns part `index` of `parts` of `count` blocks. The parts differ by at most one block.
    pub(crate) fn part(count: u64, index: u64, parts: u64) -> BlockRange {
        let cut = |index: u64| (u128::from(count) * u128::from(index) / u128::from(parts)) as u64;
        BlockRange { first: cut(index), count: cut(index + 1) - cut(index) }
    }
}

/// The access pattern of one job.
#[derive(Clone, Debug)]
pub(crate) struct AccessPattern {
    rw: Rw,
    /// Share of reads of a mixed load, of 65536.
    read_below: u32,
    pub(crate) blocks: BlockRange,
    /// Next index of a sequence or of a walk; of a mixed sequence, of its reads.
    next: u64,
    /// Next index of the writes of a mixed sequence: as in fio, each direction has a position of its own.
    next_write: u64,
    /// Blocks that remain, if each is done once.
    remaining: Option<u64>,
    /// Step of a walk: coprime to the number of blocks, so that the walk meets each block once.
    stride: u64,
    /// Ranks of random blocks, if some are more likely than others.
    zipf: Option<Zipf<f64>>,
    rng: SmallRng,
}

/// An operation on one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockOp {
    pub op: IoOp,
    pub block: u64,
}

impl AccessPattern {
    /// Creates a pattern over `blocks`. With `once` each block is done once. Without, the pattern does not end, and a
    /// random block is independent of those before it (fio's `norandommap`). A mixed sequence that does each block once
    /// has one position for both directions.
    pub(crate) fn new(rw: Rw, read_share: u8, blocks: BlockRange, once: bool, seed: u64) -> AccessPattern {
        let mut rng = SmallRng::seed_from_u64(seed);
        // Near the golden section of the range, so that the walk scatters.
        let mut stride = ((blocks.count as f64 * 0.618) as u64).max(1);
        while gcd(stride, blocks.count) != 1 {
            stride += 1;
        }
        let next = if once && !rw.is_sequential() { rng.next_u64() % blocks.count } else { 0 };
        let read_below = (f64::from(read_share) / 100.0 * f64::from(1_u32 << 16)) as u32;
        AccessPattern {
            rw,
            read_below,
            blocks,
            next,
            next_write: 0,
            remaining: once.then_some(blocks.count),
            stride,
            zipf: None,
            rng,
        }
    }

    /// Returns the pattern with random blocks of this distribution.
    pub(crate) fn with_distribution(mut self, distribution: Distribution) -> AccessPattern {
        if let Distribution::Zipf(theta) = distribution {
            // The option has checked theta, and there is at least one block.
            self.zipf = Zipf::new(self.blocks.count as f64, theta).ok();
        }
        self
    }

    /// Returns an index by Zipf's law. Rank R is R strides from the start, so each block has one rank. The likeliest
    /// blocks are scattered over the range as in fio, and are the same for all jobs of a range.
    #[inline(never)]
    fn next_zipf(&mut self) -> u64 {
        let rank = self.zipf.map_or(1.0, |zipf| zipf.sample(&mut self.rng)) as u64 - 1;
        (u128::from(rank) * u128::from(self.stride) % u128::from(self.blocks.count)) as u64
    }

    /// Returns the next operation as [`next`](Self::next) does, and a number of blocks for it: 1 to `most`, equally
    /// likely, up to the end of the range. In sequence each block is still done once.
    pub(crate) fn next_run(&mut self, most: u32) -> Option<(BlockOp, u32)> {
        let op = self.next()?;
        if most == 1 {
            return Some((op, 1));
        }
        let rest = self.blocks.count - (op.block - self.blocks.first);
        // `next` has counted the first of them.
        let rest = self.remaining.map_or(rest, |left| rest.min(left + 1)).min(most.into());
        let run = 1 + ((u64::from(self.rng.next_u32()) * rest) >> 32);
        if self.rw.is_sequential() {
            let next = match op.op == IoOp::Write && self.rw == Rw::Mixed && self.remaining.is_none() {
                true => &mut self.next_write,
                false => &mut self.next,
            };
            *next = (*next + run - 1) % self.blocks.count;
            if let Some(left) = &mut self.remaining {
                *left -= run - 1;
            }
        }
        Some((op, run as u32))
    }

    /// Returns the next operation; `None` when each block was done.
    #[inline]
    pub(crate) fn next(&mut self) -> Option<BlockOp> {
        let count = self.blocks.count;
        let op = match self.rw {
            Rw::Read | Rw::Randread => IoOp::Read,
            Rw::Write | Rw::Randwrite => IoOp::Write,
            Rw::Trim | Rw::Randtrim => IoOp::Trim,
            Rw::Mixed | Rw::Randrw if self.rng.next_u32() >> 16 < self.read_below => IoOp::Read,
            Rw::Mixed | Rw::Randrw => IoOp::Write,
        };
        let index = match &mut self.remaining {
            Some(0) => return None,
            Some(left) => {
                *left -= 1;
                let index = self.next;
                let step = if self.rw.is_sequential() { 1 } else { self.stride };
                self.next = ((u128::from(index) + u128::from(step)) % u128::from(count)) as u64;
                index
            }
            None if self.rw.is_sequential() => {
                let next =
                    if op == IoOp::Write && self.rw == Rw::Mixed { &mut self.next_write } else { &mut self.next };
                let index = *next;
                *next = if index + 1 == count { 0 } else { index + 1 };
                index
            }
            None if self.zipf.is_some() => self.next_zipf(),
            // The high half of the product is uniform to within count / 2^64.
            None => ((u128::from(self.rng.next_u64()) * u128::from(count)) >> 64) as u64,
        };
        Some(BlockOp { op, block: self.blocks.first + index })
    }
}

fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_the_range() {
        for (count, parts) in [(10, 3), (7, 7), (1 << 40, 5), (100, 1), (65536, 4)] {
            let mut next = 0;
            for index in 0..parts {
                let part = BlockRange::part(count, index, parts);
                assert_eq!(part.first, next);
                assert!(part.count.abs_diff(count / parts) <= 1);
                next += part.count;
            }
            assert_eq!(next, count);
        }
    }

    #[test]
    fn once_meets_each_block_once() {
        for (rw, count) in
            [(Rw::Write, 1), (Rw::Write, 100), (Rw::Randwrite, 1), (Rw::Randwrite, 97), (Rw::Randread, 1024)]
        {
            let mut pattern = AccessPattern::new(rw, 50, BlockRange { first: 1000, count }, true, 7);
            let mut seen: Vec<u64> = std::iter::from_fn(|| pattern.next()).map(|op| op.block).collect();
            assert_eq!(rw.is_sequential(), seen.is_sorted() && count > 1 || count == 1 && rw.is_sequential());
            seen.sort_unstable();
            assert_eq!(seen, (1000..1000 + count).collect::<Vec<_>>());
        }
    }

    #[test]
    fn random_blocks_cover_the_range_evenly_and_sequences_wrap() {
        let mut pattern = AccessPattern::new(Rw::Randread, 0, BlockRange { first: 5, count: 10 }, false, 1);
        let mut counts = [0; 10];
        for _ in 0..10_000 {
            counts[(pattern.next().unwrap().block - 5) as usize] += 1;
        }
        assert!(counts.iter().all(|count| (800..1200).contains(count)), "{counts:?}");
        let mut pattern = AccessPattern::new(Rw::Read, 0, BlockRange { first: 5, count: 3 }, false, 1);
        let blocks: Vec<u64> = (0..7).map(|_| pattern.next().unwrap().block).collect();
        assert_eq!(blocks, [5, 6, 7, 5, 6, 7, 5]);
    }

    #[test]
    fn a_mixed_sequence_has_a_position_for_each_direction() {
        let mut pattern = AccessPattern::new(Rw::Mixed, 50, BlockRange { first: 5, count: 7 }, false, 1);
        let mut next = [5, 5];
        for _ in 0..1000 {
            let op = pattern.next().unwrap();
            let next = &mut next[op.op as usize];
            assert_eq!(op.block, *next);
            *next = if *next == 11 { 5 } else { *next + 1 };
        }
        let mut pattern = AccessPattern::new(Rw::Mixed, 50, BlockRange { first: 5, count: 100 }, true, 1);
        let all: Vec<BlockOp> = std::iter::from_fn(|| pattern.next()).collect();
        assert_eq!(all.iter().map(|op| op.block).collect::<Vec<_>>(), (5..105).collect::<Vec<_>>());
        let writes = all.iter().filter(|op| op.op == IoOp::Write).count();
        assert!((20..80).contains(&writes), "{writes}");
    }

    #[test]
    fn runs_cover_the_range_in_order_and_end_with_it() {
        let blocks = BlockRange { first: 100, count: 1000 };
        let mut pattern = AccessPattern::new(Rw::Write, 0, blocks, true, 9);
        let mut next = 100;
        while let Some((op, run)) = pattern.next_run(16) {
            assert!(op.block == next && (1..=16).contains(&run));
            next += u64::from(run);
        }
        assert_eq!(next, 1100);

        for rw in [Rw::Read, Rw::Mixed, Rw::Randrw] {
            let mut pattern = AccessPattern::new(rw, 50, blocks, false, 9);
            let (mut next, mut seen) = ([100, 100], [0; 17]);
            for _ in 0..20_000 {
                let (op, run) = pattern.next_run(16).unwrap();
                let end = op.block + u64::from(run);
                assert!(op.block >= 100 && end <= 1100);
                seen[run as usize] += 1;
                if rw.is_sequential() {
                    let next = &mut next[op.op as usize];
                    assert_eq!(op.block, *next);
                    *next = if end == 1100 { 100 } else { end };
                }
            }
            // Equally likely, except for those that the end of the range cuts.
            assert!(seen[1..].iter().all(|count| (1050..1500).contains(count)), "{rw:?} {seen:?}");
        }
    }

    #[test]
    fn the_share_of_reads_is_as_requested() {
        for (share, low, high) in [(0, 0, 0), (30, 2700, 3300), (100, 10_000, 10_000)] {
            let mut pattern = AccessPattern::new(Rw::Randrw, share, BlockRange { first: 0, count: 10 }, false, 3);
            let reads = (0..10_000).filter(|_| pattern.next().unwrap().op == IoOp::Read).count();
            assert!((low..=high).contains(&reads), "{share}: {reads}");
        }
    }

    #[test]
    fn zipf_has_hot_blocks_that_are_scattered() {
        let blocks = BlockRange { first: 100, count: 10_000 };
        let new =
            |seed| AccessPattern::new(Rw::Randread, 0, blocks, false, seed).with_distribution(Distribution::Zipf(1.2));
        let hottest = |seed| {
            let (mut pattern, mut counts) = (new(seed), vec![0_u32; 10_000]);
            for _ in 0..100_000 {
                counts[(pattern.next().unwrap().block - 100) as usize] += 1;
            }
            let mut order: Vec<usize> = (0..counts.len()).collect();
            order.sort_by_key(|at| std::cmp::Reverse(counts[*at]));
            let share = |first: usize| order[..first].iter().map(|at| counts[*at]).sum::<u32>() / 1000;
            (order[..4].to_vec(), share(1), share(100), counts.iter().filter(|count| **count > 0).count())
        };
        let (hot, first, hundred, met) = hottest(1);
        // By Zipf's law: the sum of 1/k^1.2 is 4.80 for 10,000 ranks and 3.60 for 100.
        assert!((18..24).contains(&first) && (70..80).contains(&hundred), "{first} % {hundred} %");
        assert!(met > 1000, "{met}");
        assert!(hot.iter().all(|a| hot.iter().all(|b| a == b || a.abs_diff(*b) > 100)), "{hot:?}");
        assert_eq!(hottest(2).0[..3], hot[..3], "jobs have their hot blocks in common");
        assert!((0..1000).all(|_| (100..10_100).contains(&new(3).next().unwrap().block)));
    }
}
