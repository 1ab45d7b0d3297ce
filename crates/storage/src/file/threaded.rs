//! Operations that block a kernel thread: `fdatasync` and `fallocate`. A disk with hundreds of flushes in flight would
//! take hundreds of threads, or, if the kernel has fewer, delay the buffered writes of all other disks. So a channel
//! has one flush in the kernel at a time, and later ones share the next. It has few `fallocate` calls, which would wait
//! for each other at the file's lock. Pure: it decides, the channel acts.

use std::collections::VecDeque;

use super::inflight::OpStage;

/// Most `fallocate` calls in the kernel: one runs, one follows at once.
const MAX_FALLOCATES: usize = 2;

/// The requests of blocking operations, by index in the channel's table: those in the kernel, and waiting ones.
#[derive(Debug)]
pub(super) struct ThreadedOps {
    /// The requests that share the flush in the kernel; the first one's index is its cookie.
    syncing: Vec<u32>,
    /// Requests that share the next flush, which must begin after their arrival.
    next_sync: Vec<u32>,
    fallocates: usize,
    waiting: VecDeque<u32>,
}

impl ThreadedOps {
    /// Creates it with room for this many requests: none of them allocates.
    pub(super) fn new(requests: usize) -> ThreadedOps {
        let list = || Vec::with_capacity(requests);
        ThreadedOps { syncing: list(), next_sync: list(), fallocates: 0, waiting: VecDeque::with_capacity(requests) }
    }

    /// Returns true for operations that are counted here.
    #[inline]
    pub(super) fn counts(stage: OpStage) -> bool {
        matches!(stage, OpStage::Sync | OpStage::Punch | OpStage::ZeroRange)
    }

    /// Adds a request. Returns true if its operation must be issued now; else it waits, and [`next`](Self::next)
    /// returns it.
    pub(super) fn begin(&mut self, index: u32, stage: OpStage) -> bool {
        if stage == OpStage::Sync {
            let free = self.syncing.is_empty();
            let list = if free { &mut self.syncing } else { &mut self.next_sync };
            list.push(index);
            return free;
        }
        let free = self.fallocates < MAX_FALLOCATES;
        match free {
            true => self.fallocates += 1,
            false => self.waiting.push_back(index),
        }
        free
    }

    /// Ends the operation of a request. Adds the requests that shared it to `ended`.
    pub(super) fn end(&mut self, index: u32, stage: OpStage, ended: &mut Vec<u32>) {
        if stage == OpStage::Sync {
            ended.append(&mut self.syncing);
            return;
        }
        self.fallocates -= 1;
        ended.push(index);
    }

    /// Called if the operation of a request cannot be issued. Requests that shared it wait for another one.
    pub(super) fn end_unissued(&mut self, index: u32, stage: OpStage) {
        let mut shared = Vec::new();
        self.end(index, stage, &mut shared);
        if stage == OpStage::Sync {
            shared.retain(|other| *other != index);
            self.next_sync.splice(..0, shared);
        }
    }

    /// Returns a waiting request whose operation must be issued now.
    pub(super) fn next(&mut self) -> Option<u32> {
        if self.syncing.is_empty() && !self.next_sync.is_empty() {
            std::mem::swap(&mut self.syncing, &mut self.next_sync);
            return self.syncing.first().copied();
        }
        let index = if self.fallocates < MAX_FALLOCATES { self.waiting.pop_front() } else { None }?;
        self.fallocates += 1;
        Some(index)
    }

    /// Removes the waiting requests that `chosen` picks, and returns them.
    pub(super) fn cancel(&mut self, mut chosen: impl FnMut(u32) -> bool) -> Vec<u32> {
        let mut cancelled: Vec<u32> = self.next_sync.extract_if(.., |index| chosen(*index)).collect();
        self.waiting.retain(|index| {
            let keep = !chosen(*index);
            if !keep {
                cancelled.push(*index);
            }
            keep
        });
        cancelled
    }

    /// Returns the number of requests without an operation of their own in the kernel.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len() + self.next_sync.len() + self.syncing.len().saturating_sub(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(ops: &mut ThreadedOps, index: u32, stage: OpStage) -> Vec<u32> {
        let mut ended = Vec::new();
        ops.end(index, stage, &mut ended);
        ended
    }

    #[test]
    fn flushes_that_come_during_one_share_the_next() {
        let mut ops = ThreadedOps::new(16);
        assert!(ops.begin(7, OpStage::Sync));
        assert!(!ops.begin(8, OpStage::Sync) && !ops.begin(9, OpStage::Sync));
        assert_eq!((ops.next(), ops.waiting()), (None, 2), "the one in the kernel may have begun before they came");
        assert_eq!(end(&mut ops, 7, OpStage::Sync), [7]);
        assert_eq!((ops.next(), ops.waiting()), (Some(8), 1));
        assert!(!ops.begin(7, OpStage::Sync));
        assert_eq!(end(&mut ops, 8, OpStage::Sync), [8, 9]);
        assert_eq!(ops.next(), Some(7));
        assert_eq!(end(&mut ops, 7, OpStage::Sync), [7]);
        assert_eq!((ops.next(), ops.waiting()), (None, 0));
    }

    #[test]
    fn few_fallocates_are_in_the_kernel() {
        let mut ops = ThreadedOps::new(16);
        assert!(ops.begin(0, OpStage::Punch) && ops.begin(1, OpStage::ZeroRange));
        assert!(!ops.begin(2, OpStage::Punch) && !ops.begin(3, OpStage::Punch));
        assert!(ops.begin(4, OpStage::Sync), "a flush does not wait for them");
        assert_eq!((ops.next(), ops.waiting()), (None, 2));
        assert_eq!(end(&mut ops, 1, OpStage::ZeroRange), [1]);
        assert_eq!((ops.next(), ops.next()), (Some(2), None));
    }

    #[test]
    fn waiting_requests_can_be_cancelled() {
        let mut ops = ThreadedOps::new(16);
        (0..4).for_each(|index| _ = ops.begin(index, OpStage::Sync));
        (4..8).for_each(|index| _ = ops.begin(index, OpStage::Punch));
        // Requests in the kernel stay: 0, and 4 and 5.
        assert_eq!(ops.cancel(|index| index != 2), [1, 3, 6, 7]);
        assert_eq!(end(&mut ops, 0, OpStage::Sync), [0]);
        assert_eq!((ops.next(), ops.next()), (Some(2), None));
        // The context had no room for the operation of 2: requests that shared it get another one.
        (8..10).for_each(|index| _ = ops.begin(index, OpStage::Sync));
        ops.end_unissued(2, OpStage::Sync);
        ops.end_unissued(5, OpStage::Punch);
        assert_eq!((ops.next(), ops.waiting()), (Some(8), 1));
        assert_eq!(end(&mut ops, 8, OpStage::Sync), [8, 9]);
    }
}
