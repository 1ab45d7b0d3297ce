//! Plans the merges of a batch. Pure: no clock, no I/O, and no allocation once its lists have grown.
//!
//! A batch is cut into sections at every flush. The requests of a section are sorted by their start, and neighbours of
//! the same operation and flags whose ranges touch exactly are merged, as far as the bounds allow. One sort over all
//! operations also shows every overlap. A section is left in the order of arrival if a request that modifies overlaps
//! another, or if a request is empty or ends past 64 bits: this is rare, and the order may matter to the guest.

use mqblk_core::{BlockSize, ByteLen, Limits, Op, Request};

use crate::options::PlugOptions;

/// The bounds of a merged request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bounds {
    /// Longest read or write, in bytes.
    data: u64,
    /// Longest discard, in bytes.
    discard: u64,
    /// Longest write-zeroes, in bytes.
    zeroes: u64,
    /// Most memory segments of reads and writes.
    segments: u32,
    /// The alignment of ranges that may be merged: storage refuses others, but might accept them merged.
    block: BlockSize,
}

impl Bounds {
    /// Returns the tighter of the user's and the storage's bounds.
    pub(crate) fn new(options: &PlugOptions, limits: &Limits, block: BlockSize) -> Bounds {
        let most = options.merge_bytes.0;
        Bounds {
            data: most.min(limits.max_transfer.0),
            discard: most.min(limits.discard.map_or(0, |discard| discard.max_len.0)),
            zeroes: most.min(limits.write_zeroes.map_or(0, |len| len.0)),
            // A buffer's maximum.
            segments: options.merge_segments.min(limits.max_segments).min(u16::MAX.into()),
            block,
        }
    }

    /// Returns the longest merged request of an operation, in bytes.
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

/// A request in the planned order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlannedRequest {
    /// The request's index in the batch.
    pub(crate) index: u32,
    /// True if it is merged into the planned request before.
    pub(crate) merged: bool,
}

/// The merged request that grows during the sweep over a section.
struct GrowingRequest {
    op: Op,
    end: u64,
    len: u64,
    segments: u32,
    /// True if others may be merged into it.
    open: bool,
}

/// Entries of the table of marks for each request: with 32, one end in 32 finds the mark of another start.
const MARKS_PER_REQUEST: usize = 32;

/// A planner of batches. Keeps its lists for their capacity.
#[derive(Debug, Default)]
pub(crate) struct Planner {
    /// Marks of the starts of requests, see [`Planner::may_merge`].
    marks: Vec<bool>,
    /// Start and index of a section's requests.
    keys: Vec<u128>,
    planned: Vec<PlannedRequest>,
}

impl Planner {
    /// Returns a planner with capacity for batches of `requests`.
    pub(crate) fn with_capacity(requests: usize) -> Planner {
        Planner {
            marks: Vec::with_capacity(MARKS_PER_REQUEST * requests.next_power_of_two()),
            keys: Vec::with_capacity(requests),
            planned: Vec::with_capacity(requests),
        }
    }

    /// Plans a batch. Returns the number of its requests to merge into another; if any, [`planned`](Self::planned) has
    /// the order. `segments` returns a request's number of memory segments (0 for one without data), or `None` when it
    /// must not be merged.
    #[inline]
    pub(crate) fn plan<B>(
        &mut self,
        batch: &[Request<B>],
        bounds: &Bounds,
        segments: impl Fn(&Request<B>) -> Option<u32>,
    ) -> usize {
        if self.may_merge(batch) { self.sort_and_merge(batch, bounds, segments) } else { 0 }
    }

    /// Returns the planned order: each index of the batch once.
    pub(crate) fn planned(&self) -> &[PlannedRequest] {
        &self.planned
    }

    /// Returns true if a request ends where another one starts. Filters out random I/O, which has nothing to merge, at
    /// a fraction of the cost of sorting: each start sets a mark in a table of [`MARKS_PER_REQUEST`] entries a request,
    /// and each end checks for one. A comparison with all starts excludes marks of other starts.
    #[inline]
    fn may_merge<B>(&mut self, batch: &[Request<B>]) -> bool {
        // 2^64 divided by the golden ratio: multiples of any block spread evenly over the top bits.
        const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
        let entries = MARKS_PER_REQUEST * batch.len().next_power_of_two();
        self.marks.clear();
        self.marks.resize(entries, false);
        let marks = self.marks.as_mut_slice();
        let (shift, mask) = (64 - entries.trailing_zeros(), marks.len() - 1);
        let entry = |at: u64| (at.wrapping_mul(SPREAD) >> shift) as usize & mask;
        for request in batch {
            marks[entry(request.start.0)] = true;
        }
        // A guest that provokes such collisions must not make this quadratic: after a bounded number of comparisons it
        // is sorted.
        let mut comparisons = 8 + batch.len() / 8;
        for request in batch {
            let end = request.start.0.wrapping_add(request.len.0);
            if marks[entry(end)] {
                if comparisons == 0 || is_start(batch, end) {
                    return true;
                }
                comparisons -= 1;
            }
        }
        false
    }

    #[inline(never)]
    fn sort_and_merge<B>(
        &mut self,
        batch: &[Request<B>],
        bounds: &Bounds,
        segments: impl Fn(&Request<B>) -> Option<u32>,
    ) -> usize {
        self.planned.clear();
        let mut merged = 0;
        let mut from = 0;
        while from < batch.len() {
            let flush = batch[from..].iter().position(|request| request.op == Op::Flush);
            let to = flush.map_or(batch.len(), |at| from + at);
            match self.merge_section(batch, from, to, bounds, &segments) {
                Some(count) => merged += count,
                None => {
                    self.planned.truncate(from);
                    self.planned.extend((from..to).map(|index| PlannedRequest { index: index as u32, merged: false }));
                }
            }
            if to < batch.len() {
                self.planned.push(PlannedRequest { index: to as u32, merged: false });
            }
            from = to + 1;
        }
        merged
    }

    /// Plans the requests from index `from` to `to`. `None` if they must stay in the order of arrival.
    fn merge_section<B>(
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
            // The index makes all keys different and keeps requests with the same start in the order of arrival.
            self.keys.sort_unstable();
        }
        let mut merged = 0;
        let (mut all_end, mut modified_end) = (0, 0);
        let mut growing = GrowingRequest { op: Op::Flush, end: 0, len: 0, segments: 0, open: false };
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
                    // No overflow: all ranges end below 2^64, and counts have 16 bits and their sum is bounded.
                    growing.len + len <= bounds.longest(op) && growing.segments.saturating_add(count) <= bounds.segments
                });
            if merges {
                growing.end = end;
                growing.len += len;
                growing.segments += count.unwrap_or(0);
                merged += 1;
            } else {
                growing = GrowingRequest { op, end, len, segments: count.unwrap_or(0), open: count.is_some() };
            }
            self.planned.push(PlannedRequest { index, merged: merges });
        }
        Some(merged)
    }
}

/// Returns true if a request of the batch starts at `at`.
#[inline(never)]
fn is_start<B>(batch: &[Request<B>], at: u64) -> bool {
    batch.iter().any(|request| request.start.0 == at)
}

#[cfg(test)]
mod tests;
