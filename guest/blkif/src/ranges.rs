//! Ranges of page slots. Each range is long enough for the largest request, so that a request's pages are adjacent and whole pages merge
//! into one buffer segment.

use mqblk_memory::{PageArena, PageSlot};

/// Maximum of buffer pages that keep their memory: Linux's `max_buffer_pages`.
const KEPT_PAGES: u32 = 1024;

/// Maximum of ranges whose memory one trim releases.
const MOST_CLEARED: usize = 16;

/// A range of slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range(u32);

/// Allocator of the ranges of an arena. Allocation is last in, first out, so that few pages hold memory while few requests are in flight.
#[derive(Debug)]
pub(crate) struct Ranges {
    /// Slots per range.
    stride: u32,
    free: Vec<u32>,
    /// Number of slots, from the start of each range, that hold memory.
    filled: Vec<u16>,
    /// Sum of `filled`.
    pages: u32,
    /// Minimum of free ranges since the last trim: as many at the bottom of the stack were not used since.
    fewest: usize,
}

impl Ranges {
    /// Creates `count` ranges of `stride` slots, from slot 0 on.
    pub(crate) fn new(count: u32, stride: u16) -> Ranges {
        Ranges {
            stride: stride.into(),
            free: (0..count).rev().collect(),
            filled: vec![0; count as usize],
            pages: 0,
            fewest: count as usize,
        }
    }

    /// Returns the number of slots of all ranges.
    pub(crate) fn slots(&self) -> u32 {
        self.filled.len() as u32 * self.stride
    }

    /// Returns the first slot of a range.
    #[inline]
    pub(crate) fn first(&self, range: Range) -> PageSlot {
        PageSlot(range.0 * self.stride)
    }

    /// Allocates a range.
    #[inline]
    pub(crate) fn take(&mut self) -> Option<Range> {
        let range = self.free.pop()?;
        self.fewest = self.fewest.min(self.free.len());
        Some(Range(range))
    }

    /// Marks the first `count` slots as holding memory.
    #[inline]
    pub(crate) fn fill(&mut self, range: Range, count: u16) {
        let filled = &mut self.filled[range.0 as usize];
        if *filled < count {
            self.pages += u32::from(count - *filled);
            *filled = count;
        }
    }

    /// Marks the range as holding no memory, if no more than its first `count` slots (which were unmapped) did.
    #[inline]
    pub(crate) fn refreshed(&mut self, range: Range, count: u16) {
        let filled = &mut self.filled[range.0 as usize];
        if *filled <= count {
            self.pages -= u32::from(*filled);
            *filled = 0;
        }
    }

    /// Frees a range.
    #[inline]
    pub(crate) fn give(&mut self, range: Range) {
        self.free.push(range.0);
    }

    /// Returns the number of slots that hold memory.
    pub(crate) fn pages(&self) -> u32 {
        self.pages
    }

    /// Returns true if so many slots hold memory that [`trim`](Self::trim) may release some.
    #[inline]
    pub(crate) fn is_large(&self) -> bool {
        self.pages > KEPT_PAGES
    }

    /// Releases memory of ranges that were not used since the last trim, down to the limit. Called periodically.
    pub(crate) fn trim(&mut self, arena: &PageArena) {
        let unused = std::mem::replace(&mut self.fewest, self.free.len());
        let mut left = MOST_CLEARED;
        for range in &self.free[..unused] {
            let filled = &mut self.filled[*range as usize];
            if self.pages <= KEPT_PAGES || left == 0 {
                return;
            }
            if *filled > 0 && arena.map_zero_pages(PageSlot(range * self.stride), (*filled).into()).is_ok() {
                self.pages -= u32::from(*filled);
                *filled = 0;
                left -= 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocation_is_lifo_and_a_burst_s_memory_is_released_later() {
        let arena = PageArena::reserve(20 * 256).unwrap();
        let mut ranges = Ranges::new(20, 256);
        assert_eq!(ranges.slots(), 20 * 256);
        let taken: Vec<Range> = std::iter::from_fn(|| ranges.take()).collect();
        assert_eq!(taken.len(), 20);
        for range in &taken {
            ranges.fill(*range, 200);
            ranges.fill(*range, 100);
        }
        assert_eq!(ranges.pages(), 4000);
        for range in taken.iter().rev() {
            ranges.give(*range);
        }
        ranges.trim(&arena);
        assert_eq!(ranges.pages(), 4000, "they were just in use");
        let one = ranges.take().unwrap();
        assert_eq!(ranges.first(one), PageSlot(0));
        ranges.give(one);
        ranges.trim(&arena);
        assert_eq!(ranges.pages(), 1000, "until no more than the limit is left");
        assert!(!ranges.is_large() && ranges.filled[0] == 200, "the range in use keeps its memory");
    }

    #[test]
    fn a_range_that_was_mapped_holds_no_memory() {
        let mut ranges = Ranges::new(1, 11);
        let range = ranges.take().unwrap();
        ranges.fill(range, 5);
        ranges.refreshed(range, 4);
        assert_eq!(ranges.pages(), 5, "one page of it still does");
        ranges.refreshed(range, 11);
        assert_eq!(ranges.pages(), 0);
    }
}
