//! Which requests of a batch become one. Pure: no clock, no I/O, and once its lists have grown no allocation.
//!
//! A batch is cut at every flush. Within a piece requests are sorted by where they start, and neighbours of the same operation
//! and flags whose ranges touch exactly are merged, as far as the bounds allow. One sort over all operations also shows every
//! overlap. A piece in which a request that modifies overlaps another, or a request is empty or ends past 64 bits, is left as
//! it arrived: it is rare, and its order may matter to the guest.

use mqblk_core::{BlockSize, ByteLen, Limits, Op, Request};

use crate::options::PlugOptions;

/// What bounds a merged request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bounds {
    /// Longest, for reads and writes.
    data: u64,
    /// Longest, for discards.
    discard: u64,
    /// Longest, for write-zeroes.
    zeroes: u64,
    /// Most memory segments of reads and writes.
    segments: u32,
    /// What a range must be a multiple of to be merged: storage refuses others, and merged they might pass.
    block: BlockSize,
}

impl Bounds {
    /// The tighter of what the user and the storage allow.
    pub(crate) fn new(options: &PlugOptions, limits: &Limits, block: BlockSize) -> Bounds {
        let most = options.merge_bytes.0;
        Bounds {
            data: most.min(limits.max_transfer.0),
            discard: most.min(limits.discard.map_or(0, |discard| discard.max_len.0)),
            zeroes: most.min(limits.write_zeroes.map_or(0, |len| len.0)),
            // As many as a buffer can have.
            segments: options.merge_segments.min(limits.max_segments).min(u16::MAX.into()),
            block,
        }
    }

    /// Longest merged request of a kind.
    pub(crate) fn longest(&self, op: Op) -> u64 {
        match op {
            Op::Read | Op::Write { .. } => self.data,
            Op::Discard { .. } => self.discard,
            Op::WriteZeroes { .. } => self.zeroes,
            Op::Flush => 0,
        }
    }

    fn aligned<B>(&self, request: &Request<B>) -> bool {
        request.start.is_aligned(self.block) && request.len.is_aligned(self.block)
    }
}

/// One request's place in the order that was planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    /// The request's index in the batch.
    pub(crate) index: u32,
    /// It is merged to the request of the step before.
    pub(crate) merged: bool,
}

/// The merged request that grows during the sweep over a piece.
struct Growing {
    op: Op,
    end: u64,
    len: u64,
    segments: u32,
    /// Whether it can take others at all.
    open: bool,
}

/// Places of the table of starts for each request: with 32 of them one end in 32 is compared in vain.
const PLACES: usize = 32;

/// Plans batches; keeps its lists for their room.
#[derive(Debug, Default)]
pub(crate) struct Planner {
    /// Where something starts, see [`Planner::may_join`].
    starts: Vec<bool>,
    /// Start and index of a piece's requests.
    keys: Vec<u128>,
    steps: Vec<Step>,
}

impl Planner {
    /// Room for batches of `requests`.
    pub(crate) fn with_capacity(requests: usize) -> Planner {
        Planner {
            starts: Vec::with_capacity(PLACES * requests.next_power_of_two()),
            keys: Vec::with_capacity(requests),
            steps: Vec::with_capacity(requests),
        }
    }

    /// How many requests of the batch are to be merged to another; when there are any, [`steps`](Self::steps) tells which.
    /// `segments` gives a request's number of memory segments (0 for one without data), or `None` when it is not to be merged.
    #[inline]
    pub(crate) fn plan<B>(
        &mut self,
        batch: &[Request<B>],
        bounds: &Bounds,
        segments: impl Fn(&Request<B>) -> Option<u32>,
    ) -> usize {
        if self.may_join(batch) { self.sort_and_join(batch, bounds, segments) } else { 0 }
    }

    /// The planned order: each index of the batch once.
    pub(crate) fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Whether a request ends where another one starts. It answers for random I/O, which has nothing to join, at a fraction of
    /// what sorting costs: a mark for each start in a table of [`PLACES`] a request, then a look for each end. A mark that
    /// another start made is found out by comparing with all of them.
    #[inline]
    fn may_join<B>(&mut self, batch: &[Request<B>]) -> bool {
        // 2^64 divided by the golden ratio: multiples of any block spread evenly over the top bits.
        const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
        let places = PLACES * batch.len().next_power_of_two();
        self.starts.clear();
        self.starts.resize(places, false);
        let starts = self.starts.as_mut_slice();
        let (shift, mask) = (64 - places.trailing_zeros(), starts.len() - 1);
        let place = |at: u64| (at.wrapping_mul(SPREAD) >> shift) as usize & mask;
        for request in batch {
            starts[place(request.start.0)] = true;
        }
        // A guest that aims at marks of others must not make it quadratic: after so many the sort decides.
        let mut looks = 8 + batch.len() / 8;
        for request in batch {
            let end = request.start.0.wrapping_add(request.len.0);
            if starts[place(end)] {
                if looks == 0 || is_start(batch, end) {
                    return true;
                }
                looks -= 1;
            }
        }
        false
    }

    #[inline(never)]
    fn sort_and_join<B>(
        &mut self,
        batch: &[Request<B>],
        bounds: &Bounds,
        segments: impl Fn(&Request<B>) -> Option<u32>,
    ) -> usize {
        self.steps.clear();
        let mut merged = 0;
        let mut from = 0;
        while from < batch.len() {
            let piece = batch[from..].iter().position(|request| request.op == Op::Flush);
            let to = piece.map_or(batch.len(), |at| from + at);
            match self.join_piece(batch, from, to, bounds, &segments) {
                Some(count) => merged += count,
                None => {
                    self.steps.truncate(from);
                    self.steps.extend((from..to).map(|index| Step { index: index as u32, merged: false }));
                }
            }
            if to < batch.len() {
                self.steps.push(Step { index: to as u32, merged: false });
            }
            from = to + 1;
        }
        merged
    }

    /// Plans the requests from index `from` to `to`. `None` when they must stay as they are.
    fn join_piece<B>(
        &mut self,
        batch: &[Request<B>],
        from: usize,
        to: usize,
        bounds: &Bounds,
        segments: impl Fn(&Request<B>) -> Option<u32>,
    ) -> Option<usize> {
        self.keys.clear();
        let mut sorted = true;
        let mut last = 0;
        for (index, request) in (from..to).zip(&batch[from..to]) {
            let start = request.start.0;
            if request.len == ByteLen::ZERO || request.start.end(request.len).is_none() {
                return None;
            }
            sorted &= start >= last;
            last = start;
            self.keys.push(u128::from(start) << 64 | index as u128);
        }
        if !sorted {
            // The index makes all keys different and keeps requests that start together in the order of their arrival.
            self.keys.sort_unstable();
        }
        let mut merged = 0;
        let (mut all_end, mut modified_end) = (0, 0);
        let mut growing = Growing { op: Op::Flush, end: 0, len: 0, segments: 0, open: false };
        for key in &self.keys {
            let index = *key as u32;
            let request = &batch[index as usize];
            let (op, start, len) = (request.op, request.start.0, request.len.0);
            let modifies = op.modifies();
            if start < modified_end || (modifies && start < all_end) {
                return None;
            }
            let end = start + len;
            all_end = all_end.max(end);
            if modifies {
                modified_end = end;
            }
            let count = segments(request).filter(|_| bounds.aligned(request));
            let merges = growing.open
                && growing.end == start
                && growing.op == op
                && count.is_some_and(|count| {
                    // No overflow: all of it lies below 2^64, and counts have 16 bits and a sum of them is bounded.
                    growing.len + len <= bounds.longest(op) && growing.segments.saturating_add(count) <= bounds.segments
                });
            if merges {
                growing.end = end;
                growing.len += len;
                growing.segments += count.unwrap_or(0);
                merged += 1;
            } else {
                growing = Growing { op, end, len, segments: count.unwrap_or(0), open: count.is_some() };
            }
            self.steps.push(Step { index, merged: merges });
        }
        Some(merged)
    }
}

/// Whether a request of the batch starts there.
#[inline(never)]
fn is_start<B>(batch: &[Request<B>], at: u64) -> bool {
    batch.iter().any(|request| request.start.0 == at)
}

#[cfg(test)]
mod tests;
