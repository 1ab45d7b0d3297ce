//! Ranges of page slots. Each range is long enough for the largest request, so that a request's pages are adjacent and
//! whole pages merge into one buffer segment.

use mqblk_memory::{PageArena, PageSlot};

/// Maximum of buffer pages that keep their memory: Linux's `max_buffer_pages`.
const MAX_BUFFER_PAGES: u32 = 1024;

/// Maximum of ranges whose memory one trim releases.
const MAX_CLEARED_PER_TRIM: usize = 16;

/// A range of slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotRange(u32);

/// Allocator of the ranges of an arena. Allocation is last in, first out, so that few pages hold memory while few
/// requests are in flight.
#[derive(Debug)]
pub(crate) struct SlotRanges {
    /// Slots per range.
    stride: u32,
    /// Slots of all ranges.
    slots: u32,
    free_ranges: Vec<u32>,
    /// Number of slots, from the start of each range, that hold memory.
    filled: Vec<u16>,
    /// Sum of `filled`.
    filled_pages: u32,
    /// Minimum of free ranges since the last trim: this many at the bottom of the stack were unused since.
    min_free: usize,
}

impl SlotRanges {
    /// Creates `count` ranges of `stride` slots, from slot 0 on.
    pub(crate) fn new(count: u32, stride: u16) -> SlotRanges {
        SlotRanges {
            stride: stride.into(),
            slots: count * u32::from(stride),
            free_ranges: (0..count).rev().collect(),
            filled: vec![0; count as usize],
            filled_pages: 0,
            min_free: count as usize,
        }
    }

    /// Returns the number of slots of all ranges.
    #[inline]
    pub(crate) fn slots(&self) -> u32 {
        self.slots
    }

    /// Returns the first slot of a range.
    #[inline]
    pub(crate) fn first_slot(&self, range: SlotRange) -> PageSlot {
        PageSlot(range.0 * self.stride)
    }

    /// Allocates a range.
    #[inline]
    pub(crate) fn allocate(&mut self) -> Option<SlotRange> {
        let range = self.free_ranges.pop()?;
        self.min_free = self.min_free.min(self.free_ranges.len());
        Some(SlotRange(range))
    }

    /// Marks the first `count` slots as holding memory.
    #[inline]
    pub(crate) fn mark_filled(&mut self, range: SlotRange, count: u16) {
        let filled = &mut self.filled[range.0 as usize];
        if *filled < count {
            self.filled_pages += u32::from(count - *filled);
            *filled = count;
        }
    }

    /// Marks the range as holding no memory, if no more than its first `count` slots (which were unmapped) did.
    #[inline]
    pub(crate) fn mark_empty(&mut self, range: SlotRange, count: u16) {
        let filled = &mut self.filled[range.0 as usize];
        if *filled <= count {
            self.filled_pages -= u32::from(*filled);
            *filled = 0;
        }
    }

    /// Frees a range.
    #[inline]
    pub(crate) fn release(&mut self, range: SlotRange) {
        self.free_ranges.push(range.0);
    }

    /// Returns the number of slots that hold memory.
    pub(crate) fn filled_pages(&self) -> u32 {
        self.filled_pages
    }

    /// Returns true if this many slots hold memory that [`trim`](Self::trim) may release some.
    #[inline]
    pub(crate) fn needs_trim(&self) -> bool {
        self.filled_pages > MAX_BUFFER_PAGES
    }

    /// Releases memory of ranges that were not used since the last trim, down to the limit. Called periodically.
    pub(crate) fn trim(&mut self, arena: &PageArena) {
        let unused = std::mem::replace(&mut self.min_free, self.free_ranges.len());
        let mut left = MAX_CLEARED_PER_TRIM;
        for range in &self.free_ranges[..unused] {
            let filled = &mut self.filled[*range as usize];
            if self.filled_pages <= MAX_BUFFER_PAGES || left == 0 {
                return;
            }
            if *filled > 0 && arena.map_zero_pages(PageSlot(range * self.stride), (*filled).into()).is_ok() {
                self.filled_pages -= u32::from(*filled);
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
        let mut ranges = SlotRanges::new(20, 256);
        assert_eq!(ranges.slots(), 20 * 256);
        let taken: Vec<SlotRange> = std::iter::from_fn(|| ranges.allocate()).collect();
        assert_eq!(taken.len(), 20);
        for range in &taken {
            ranges.mark_filled(*range, 200);
            ranges.mark_filled(*range, 100);
        }
        assert_eq!(ranges.filled_pages(), 4000);
        for range in taken.iter().rev() {
            ranges.release(*range);
        }
        ranges.trim(&arena);
        assert_eq!(ranges.filled_pages(), 4000, "they were just in use");
        let one = ranges.allocate().unwrap();
        assert_eq!(ranges.first_slot(one), PageSlot(0));
        ranges.release(one);
        ranges.trim(&arena);
        assert_eq!(ranges.filled_pages(), 1000, "until no more than the limit is left");
        assert!(!ranges.needs_trim() && ranges.filled[0] == 200, "the range in use keeps its memory");
    }

    #[test]
    fn a_range_that_was_mapped_holds_no_memory() {
        let mut ranges = SlotRanges::new(1, 11);
        let range = ranges.allocate().unwrap();
        ranges.mark_filled(range, 5);
        ranges.mark_empty(range, 4);
        assert_eq!(ranges.filled_pages(), 5, "one page of it still does");
        ranges.mark_empty(range, 11);
        assert_eq!(ranges.filled_pages(), 0);
    }
}
