//! An allocator of consecutive numbers: frames of a domain's memory, references of its grant table.

use std::collections::BTreeMap;

/// Free numbers. Each search starts where the last one ended (next fit), so a freed number is reused late: a test
/// detects a use after free.
#[derive(Debug)]
pub(super) struct RangeAllocator {
    /// Start and length of each free range. No two are adjacent.
    free: BTreeMap<u32, u32>,
    next: u32,
}

impl RangeAllocator {
    /// Creates an allocator of the numbers from `first` up to, but not including, `end`.
    pub(super) fn new(first: u32, end: u32) -> RangeAllocator {
        RangeAllocator { free: BTreeMap::from([(first, end - first)]), next: first }
    }

    /// Allocates `count` (1 or more) consecutive numbers and returns the first. `None` if no free range is long enough.
    pub(super) fn allocate(&mut self, count: u32) -> Option<u32> {
        let fits = |(_, len): &(&u32, &u32)| **len >= count;
        // A range that contains `next` may start before it: the second search finds it.
        let found = self.free.range(self.next..).find(fits).or_else(|| self.free.iter().find(fits));
        let (&start, &len) = found?;
        self.free.remove(&start);
        if len > count {
            self.free.insert(start + count, len - count);
        }
        self.next = start + count;
        Some(start)
    }

    /// Frees one number.
    pub(super) fn release(&mut self, number: u32) {
        let mut start = number;
        let mut len = 1;
        if let Some((&before, &count)) = self.free.range(..number).next_back()
            && before + count == number
        {
            start = before;
            len += count;
        }
        if let Some(after) = self.free.remove(&(number + 1)) {
            len += after;
        }
        self.free.insert(start, len);
    }

    /// Returns the number of free numbers.
    #[cfg(test)]
    fn len(&self) -> u32 {
        self.free.values().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn freed_numbers_are_reused_late() {
        let mut runs = RangeAllocator::new(8, 20);
        assert_eq!((runs.allocate(4), runs.allocate(2)), (Some(8), Some(12)));
        (8..12).for_each(|number| runs.release(number));
        assert_eq!((runs.allocate(4), runs.allocate(4), runs.allocate(4)), (Some(14), Some(8), None));
        assert_eq!(runs.allocate(2), Some(18));
        assert_eq!(runs.allocate(1), None);
    }

    #[test]
    fn a_number_is_allocated_once() {
        let mut runs = RangeAllocator::new(3, 103);
        let mut allocated = BTreeSet::new();
        for step in 0..2000u32 {
            let count = step * 7 % 5 + 1;
            if let Some(first) = runs.allocate(count) {
                assert!((first..first + count).all(|number| (3..103).contains(&number) && allocated.insert(number)));
            }
            for _ in 0..step * 13 % 6 {
                let Some(number) = allocated.iter().nth(step as usize * 31 % allocated.len().max(1)).copied() else {
                    break;
                };
                allocated.remove(&number);
                runs.release(number);
            }
            assert_eq!(runs.len() as usize + allocated.len(), 100);
        }
        allocated.iter().for_each(|number| runs.release(*number));
        assert_eq!(runs.free, BTreeMap::from([(3, 100)]));
    }
}
