//! Numbers given out in runs: frames of a domain's memory, references of its grant table.

use std::collections::BTreeMap;

/// Free numbers. The search goes on where the last one ended, so a number that was given back is not soon given out again:
/// whoever uses it too late finds nothing there, as a test wants.
#[derive(Debug)]
pub(super) struct Runs {
    /// First of each run, and how many. No two touch.
    free: BTreeMap<u32, u32>,
    next: u32,
}

impl Runs {
    /// All numbers from `first` below `end` are free.
    pub(super) fn new(first: u32, end: u32) -> Runs {
        Runs { free: BTreeMap::from([(first, end - first)]), next: first }
    }

    /// Takes `count` numbers in a row (1 or more) and returns the first. `None` when there is no such run.
    pub(super) fn take(&mut self, count: u32) -> Option<u32> {
        let fits = |(_, len): &(&u32, &u32)| **len >= count;
        // The run that the last search ended in starts before `next`, if it is not used up.
        let found = self.free.range(self.next..).find(fits).or_else(|| self.free.iter().find(fits));
        let (&start, &len) = found?;
        self.free.remove(&start);
        if len > count {
            self.free.insert(start + count, len - count);
        }
        self.next = start + count;
        Some(start)
    }

    /// Gives one number back.
    pub(super) fn give(&mut self, number: u32) {
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

    /// How many are free.
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
    fn numbers_come_back_late() {
        let mut runs = Runs::new(8, 20);
        assert_eq!((runs.take(4), runs.take(2)), (Some(8), Some(12)));
        (8..12).for_each(|number| runs.give(number));
        assert_eq!((runs.take(4), runs.take(4), runs.take(4)), (Some(14), Some(8), None));
        assert_eq!(runs.take(2), Some(18));
        assert_eq!(runs.take(1), None);
    }

    #[test]
    fn what_is_out_is_out_once() {
        let mut runs = Runs::new(3, 103);
        let mut out = BTreeSet::new();
        for step in 0..2000u32 {
            let count = step * 7 % 5 + 1;
            if let Some(first) = runs.take(count) {
                assert!((first..first + count).all(|number| (3..103).contains(&number) && out.insert(number)));
            }
            for _ in 0..step * 13 % 6 {
                let Some(number) = out.iter().nth(step as usize * 31 % out.len().max(1)).copied() else { break };
                out.remove(&number);
                runs.give(number);
            }
            assert_eq!(runs.len() as usize + out.len(), 100);
        }
        out.iter().for_each(|number| runs.give(*number));
        assert_eq!(runs.free, BTreeMap::from([(3, 100)]));
    }
}
