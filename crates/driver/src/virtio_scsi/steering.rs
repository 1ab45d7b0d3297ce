//! Selects the request queue of a target's commands. Pure: no ring, no thread, no system call. `tests/loom_steering.rs`
//! checks it under all interleavings.
//!
//! The rule of the multi-queue virtio-scsi driver of 2012: while a target has commands in flight its queue does not
//! change, so that they stay in order. A command that is alone moves the target to its submitter's queue. In that
//! driver the count and the queue pointer are two words, guarded by a sequence counter: the submitter that raises the
//! count from 0 to 1 re-checks the count before it changes the pointer. Here both are in one word, so no guard is
//! needed:
//!
//! * begin: add one. If other commands are in flight, the returned word has the queue, which cannot change, because
//!   only a command that began alone changes it. Otherwise exchange the word, which must still be "one in flight, old
//!   queue", for "one in flight, own queue". This comparison is the re-check: it fails if another command has begun in
//!   between. That command has gone to the old queue, so this one does too.
//! * end, after the completion is reaped: subtract one.
//!
//! No lock and no loop: one atomic addition if the target is busy, and one compare-exchange if it was idle.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bits of the count. The queue is above them. No driver has 2^32 commands in flight.
const COUNT_BITS: u32 = 32;
const COUNT: u64 = (1 << COUNT_BITS) - 1;

/// An atomic word. A model checker has its own implementation.
pub trait AtomicWord {
    /// Returns a word of zero.
    fn zero() -> Self;
    /// Adds `value`, and returns the previous value.
    fn fetch_add(&self, value: u64, order: Ordering) -> u64;
    /// Subtracts `value`, and returns the previous value.
    fn fetch_sub(&self, value: u64, order: Ordering) -> u64;
    /// Replaces `old` with `new`. Returns false, and changes nothing, if the value is not `old`.
    fn compare_exchange(&self, old: u64, new: u64, order: Ordering) -> bool;
    /// Returns the value.
    fn load(&self, order: Ordering) -> u64;
}

impl AtomicWord for AtomicU64 {
    fn zero() -> Self {
        AtomicU64::new(0)
    }
    #[inline]
    fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
        self.fetch_add(value, order)
    }
    #[inline]
    fn fetch_sub(&self, value: u64, order: Ordering) -> u64 {
        self.fetch_sub(value, order)
    }
    #[inline]
    fn compare_exchange(&self, old: u64, new: u64, order: Ordering) -> bool {
        self.compare_exchange(old, new, order, Ordering::Relaxed).is_ok()
    }
    #[inline]
    fn load(&self, order: Ordering) -> u64 {
        self.load(order)
    }
}

/// A target's number of commands in flight, and their queue. Has a cache line of its own.
#[derive(Debug)]
#[repr(align(64))]
pub struct TargetSteering<W = AtomicU64>(W);

impl<W: AtomicWord> Default for TargetSteering<W> {
    fn default() -> Self {
        TargetSteering(W::zero())
    }
}

impl<W: AtomicWord> TargetSteering<W> {
    /// Begins a command whose submitter prefers queue `own`. Returns the queue to submit it to.
    ///
    /// Acquire: pairs with the Release of the last command's end, so that the new queue starts after the old one is
    /// done.
    #[inline]
    pub fn begin(&self, own: u16) -> u16 {
        let before = self.0.fetch_add(1, Ordering::Acquire);
        let queue = (before >> COUNT_BITS) as u16;
        if before & COUNT != 0 || queue == own {
            return queue;
        }
        let alone = before + 1;
        match self.0.compare_exchange(alone, u64::from(own) << COUNT_BITS | 1, Ordering::Acquire) {
            true => own,
            false => queue,
        }
    }

    /// Ends a command: its completion was reaped, or its submission has failed.
    #[inline]
    pub fn end(&self) {
        let before = self.0.fetch_sub(1, Ordering::Release);
        debug_assert!(before & COUNT != 0, "a command ends that did not begin");
    }

    /// Returns the number of commands in flight.
    pub fn in_flight(&self) -> u32 {
        (self.0.load(Ordering::Acquire) & COUNT) as u32
    }

    /// Returns the queue that is in use, or was last in use.
    pub fn queue(&self) -> u16 {
        (self.0.load(Ordering::Acquire) >> COUNT_BITS) as u16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_target_stays_and_an_idle_one_moves() {
        let target: TargetSteering = TargetSteering::default();
        assert_eq!(target.begin(3), 3);
        assert_eq!((target.begin(1), target.begin(0)), (3, 3));
        target.end();
        target.end();
        assert_eq!((target.begin(1), target.in_flight()), (3, 2));
        target.end();
        target.end();
        assert_eq!((target.begin(1), target.queue(), target.in_flight()), (1, 1, 1));
        target.end();
        assert_eq!((target.begin(1), target.begin(u16::MAX)), (1, 1));
    }
}
