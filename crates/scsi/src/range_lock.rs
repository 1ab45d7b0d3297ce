//! Range locks of a logical unit: COMPARE AND WRITE and ORWRITE read blocks and then write them, and no other such
//! command may access the blocks in between (SBC-3 sections 5.2 and 5.11).
//!
//! Overlapping locks are granted in the order of arrival; others are independent.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use mqblk_core::lock::lock;
use mqblk_core::{ByteLen, ByteOffset, Wake};

/// Range locks of one logical unit.
#[derive(Debug, Default)]
pub struct RangeLocks {
    // In order of arrival. At most one for each command in flight, so it is searched linearly.
    queue: Mutex<LockQueue>,
}

#[derive(Debug, Default)]
struct LockQueue {
    next_id: u64,
    entries: VecDeque<LockEntry>,
}

struct LockEntry {
    id: u64,
    first: u64,
    end: u64,
    /// Waker of a lock that is not granted yet.
    waker: Option<Arc<dyn Wake>>,
}

impl fmt::Debug for LockEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}..{} waits {}", self.id, self.first, self.end, self.waker.is_some())
    }
}

impl LockEntry {
    fn overlaps(&self, other: &LockEntry) -> bool {
        self.first < other.end && other.first < self.end
    }
}

impl LockQueue {
    /// Grants all locks that no longer overlap an earlier one. Returns their wakers.
    fn grant(&mut self) -> Vec<Arc<dyn Wake>> {
        let mut wake = Vec::new();
        for index in 0..self.entries.len() {
            let entry = &self.entries[index];
            if entry.waker.is_some() && !self.entries.range(..index).any(|before| before.overlaps(entry)) {
                wake.extend(self.entries[index].waker.take());
            }
        }
        wake
    }
}

impl RangeLocks {
    /// Returns an empty set.
    pub fn new() -> Arc<RangeLocks> {
        Arc::default()
    }

    /// Requests a lock of `len` bytes from `start`. If it is not granted at once ([`RangeLock::is_granted`]), `waker`
    /// is woken when it is. Dropping the returned lock releases it, or withdraws the request.
    pub fn lock(self: &Arc<RangeLocks>, start: ByteOffset, len: ByteLen, waker: &Arc<dyn Wake>) -> RangeLock {
        let mut lines = self.queue();
        let id = lines.next_id;
        lines.next_id += 1;
        let first = start.0;
        let mut entry = LockEntry { id, first, end: first.saturating_add(len.0), waker: None };
        if lines.entries.iter().any(|before| before.overlaps(&entry)) {
            entry.waker = Some(Arc::clone(waker));
        }
        lines.entries.push_back(entry);
        RangeLock { locks: Arc::clone(self), id }
    }

    fn queue(&self) -> MutexGuard<'_, LockQueue> {
        // No code under the mutex can leave the queue half changed.
        lock(&self.queue)
    }
}

/// A range lock, granted or waiting. Dropping it releases it.
#[derive(Debug)]
#[must_use = "dropping it releases the lock"]
pub struct RangeLock {
    locks: Arc<RangeLocks>,
    id: u64,
}

impl RangeLock {
    /// Returns true if the lock is granted.
    pub fn is_granted(&self) -> bool {
        let lines = self.locks.queue();
        lines.entries.iter().any(|entry| entry.id == self.id && entry.waker.is_none())
    }
}

impl Drop for RangeLock {
    fn drop(&mut self) {
        let wake = {
            let mut lines = self.locks.queue();
            lines.entries.retain(|entry| entry.id != self.id);
            lines.grant()
        };
        // Outside the mutex: a waker may do anything but block.
        wake.iter().for_each(|waker| waker.wake());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use proptest::prelude::*;

    use super::*;

    #[derive(Default)]
    struct WakeCounter(AtomicU32);

    impl Wake for WakeCounter {
        fn wake(&self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn counter() -> (Arc<WakeCounter>, Arc<dyn Wake>) {
        let counter = Arc::<WakeCounter>::default();
        (Arc::clone(&counter), counter)
    }

    fn enter(sections: &Arc<RangeLocks>, first: u64, len: u64, waker: &Arc<dyn Wake>) -> RangeLock {
        sections.lock(ByteOffset(first), ByteLen(len), waker)
    }

    #[test]
    fn overlapping_locks_are_granted_in_order() {
        let sections = RangeLocks::new();
        let (wakes, waker) = counter();
        let first = enter(&sections, 0, 1024, &waker);
        let adjacent = enter(&sections, 1024, 512, &waker);
        assert!(first.is_granted() && adjacent.is_granted());
        let second = enter(&sections, 512, 1024, &waker);
        // Overlaps only the waiting one, which it must not overtake.
        let third = enter(&sections, 1535, 512, &waker);
        assert!(!second.is_granted() && !third.is_granted());
        drop(first);
        assert!(!second.is_granted(), "the adjacent lock is still held");
        assert_eq!(wakes.0.load(Ordering::SeqCst), 0);
        drop(adjacent);
        assert!(second.is_granted() && !third.is_granted());
        assert_eq!(wakes.0.load(Ordering::SeqCst), 1);
        drop(second);
        assert!(third.is_granted());
        assert_eq!(wakes.0.load(Ordering::SeqCst), 2);
        drop(third);
        assert!(sections.queue().entries.is_empty());
    }

    #[test]
    fn dropping_a_waiting_lock_withdraws_it() {
        let sections = RangeLocks::new();
        let (wakes, waker) = counter();
        let first = enter(&sections, 0, 512, &waker);
        let withdrawn = enter(&sections, 0, 1024, &waker);
        let behind = enter(&sections, 512, 512, &waker);
        assert!(!behind.is_granted(), "queued behind a waiting lock");
        drop(withdrawn);
        assert!(behind.is_granted(), "no earlier lock overlaps");
        assert_eq!(wakes.0.load(Ordering::SeqCst), 1);
        drop((first, behind));
        assert_eq!(wakes.0.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn empty_ranges_do_not_conflict() {
        let sections = RangeLocks::new();
        let (_, waker) = counter();
        let empty = enter(&sections, 512, 0, &waker);
        let around = enter(&sections, 512, 512, &waker);
        let last = enter(&sections, u64::MAX - 1, u64::MAX, &waker);
        assert!(empty.is_granted() && around.is_granted() && last.is_granted());
    }

    /// A read-modify-write that would lose an increment without the lock, from several threads.
    #[test]
    fn threads_exclude_each_other() {
        struct Unpark(std::thread::Thread);
        impl Wake for Unpark {
            fn wake(&self) {
                self.0.unpark();
            }
        }
        const ROUNDS: u32 = 2000;
        let sections = RangeLocks::new();
        let cells = [const { AtomicU32::new(0) }; 3];
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let (sections, cells) = (&sections, &cells);
                scope.spawn(move || {
                    let waker: Arc<dyn Wake> = Arc::new(Unpark(std::thread::current()));
                    for round in 0..u64::from(ROUNDS) {
                        let first = (thread + round) % 2;
                        let section = enter(sections, first, 2, &waker);
                        while !section.is_granted() {
                            std::thread::park();
                        }
                        for cell in &cells[first as usize..][..2] {
                            let seen = cell.load(Ordering::Relaxed);
                            std::thread::yield_now();
                            cell.store(seen + 1, Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        // Every round covers the middle cell.
        assert_eq!(cells[1].load(Ordering::Relaxed), 4 * ROUNDS);
        assert_eq!(cells[0].load(Ordering::Relaxed) + cells[2].load(Ordering::Relaxed), 4 * ROUNDS);
        assert!(sections.queue().entries.is_empty());
    }

    proptest! {
        /// Model: a lock is granted if it overlaps no earlier lock that has not been dropped.
        #[test]
        fn any_history(steps in proptest::collection::vec((any::<bool>(), 0u64..6, 0u64..4), 0..60)) {
            let sections = RangeLocks::new();
            let mut held: Vec<(u64, u64, RangeLock, Arc<WakeCounter>, bool)> = Vec::new();
            for (arrive, first, len) in steps {
                if arrive || held.is_empty() {
                    let (wakes, waker) = counter();
                    let section = enter(&sections, first, len, &waker);
                    let at_once = section.is_granted();
                    held.push((first, first + len, section, wakes, at_once));
                } else {
                    drop(held.remove(first as usize % held.len()));
                }
                for (index, (first, end, section, wakes, at_once)) in held.iter().enumerate() {
                    let free = held[..index].iter().all(|(other, other_end, ..)| first >= other_end || other >= end);
                    prop_assert_eq!(section.is_granted(), free);
                    prop_assert_eq!(wakes.0.load(Ordering::SeqCst), u32::from(free && !at_once));
                }
            }
        }
    }
}
