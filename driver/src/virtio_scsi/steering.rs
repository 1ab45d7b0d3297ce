//! Which request queue a target's commands go to. Pure: no ring, no thread, no system call; `tests/loom_steering.rs` runs it
//! under every interleaving.
//!
//! The rule of the multi-queue virtio-scsi driver of 2012: while a target has commands in flight its queue does not change, so
//! that they stay in order; the command that is the only one moves the target to its submitter's queue. There a count and a
//! pointer are two words, guarded by a sequence counter: who gets the count from 0 to 1 looks at the count once more before
//! changing the pointer. Here both are in one word, so there is nothing between them to guard:
//!
//! * begin: add one. If others are in flight, the word that came back names the queue, and nobody can change it, because only
//!   the one that began alone may. If not, replace the word, which must still be "one in flight, old queue", by "one in
//!   flight, my queue". That comparison is the second look: it fails when somebody has come in between, and he has gone to
//!   the old queue, so that is where this command goes too.
//! * end, after the answer was reaped: subtract one.
//!
//! No lock and no loop: one atomic addition where the target is busy, one more exchange where it was idle.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bits of the count; the queue is above them. No driver has 2^32 commands in flight.
const COUNT_BITS: u32 = 32;
const COUNT: u64 = (1 << COUNT_BITS) - 1;

/// The word that threads share; a model checker brings its own.
pub trait AtomicWord {
    /// Zero.
    fn zero() -> Self;
    /// Adds, and returns what was there.
    fn fetch_add(&self, value: u64, order: Ordering) -> u64;
    /// Subtracts, and returns what was there.
    fn fetch_sub(&self, value: u64, order: Ordering) -> u64;
    /// Replaces `old` by `new`. `false`: something else was there, and still is.
    fn compare_exchange(&self, old: u64, new: u64, order: Ordering) -> bool;
    /// What is there.
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

/// One target: commands in flight, and the queue that they are on. On a cache line of its own.
#[derive(Debug)]
#[repr(align(64))]
pub struct TargetSteering<W = AtomicU64>(W);

impl<W: AtomicWord> Default for TargetSteering<W> {
    fn default() -> Self {
        TargetSteering(W::zero())
    }
}

impl<W: AtomicWord> TargetSteering<W> {
    /// A command begins; its submitter would use queue `own`. Returns the queue to put it on.
    ///
    /// Acquire: what the one that ended the last command did before is done, so that a new queue starts after the old one.
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

    /// A command has ended: its answer was reaped (or it was never put on a queue).
    #[inline]
    pub fn end(&self) {
        let before = self.0.fetch_sub(1, Ordering::Release);
        debug_assert!(before & COUNT != 0, "a command ends that did not begin");
    }

    /// Commands in flight.
    pub fn in_flight(&self) -> u32 {
        (self.0.load(Ordering::Acquire) & COUNT) as u32
    }

    /// The queue in use, or last in use.
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
