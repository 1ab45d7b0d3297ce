//! Range locks of a logical unit: COMPARE AND WRITE and ORWRITE read blocks and then write them, and no other such
//! command may access the blocks in between (SBC-3 sections 5.2 and 5.11).
//!
//! Overlapping locks are granted in the order of arrival; others are independent.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mqblk_core::{ByteLen, ByteOffset, Wake};

/// Range locks of one logical unit.
#[derive(Debug, Default)]
pub struct Sections {
    // In order of arrival. At most one for each command in flight, so it is searched linearly.
    lines: Mutex<Lines>,
}

#[derive(Debug, Default)]
struct Lines {
    next: u64,
    entries: VecDeque<Entry>,
}

struct Entry {
    id: u64,
    first: u64,
    end: u64,
    /// Waker of a lock that is not granted yet.
    waits: Option<Arc<dyn Wake>>,
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}..{} waits {}", self.id, self.first, self.end, self.waits.is_some())
    }
}

impl Entry {
    fn overlaps(&self, other: &Entry) -> bool {
        self.first < other.end && other.first < self.end
    }
}

impl Lines {
    /// Grants all locks that no earlier one overlaps any more. Returns their wakers.
    fn admit(&mut self) -> Vec<Arc<dyn Wake>> {
        let mut wake = Vec::new();
        for index in 0..self.entries.len() {
            let entry = &self.entries[index];
            if entry.waits.is_some() && !self.entries.range(..index).any(|before| before.overlaps(entry)) {
                wake.extend(self.entries[index].waits.take());
            }
        }
        wake
    }
}

impl Sections {
    /// Returns an empty set.
    pub fn new() -> Arc<Sections> {
        Arc::default()
    }

    /// Requests a lock of `len` bytes from `start`. If it is not granted at once ([`RangeLock::is_granted`]), `waker`
    /// is woken when it is. Dropping the returned lock releases it, or withdraws the request.
    pub fn enter(self: &Arc<Sections>, start: ByteOffset, len: ByteLen, waker: &Arc<dyn Wake>) -> Section {
        let mut lines = self.lines();
        let id = lines.next;
        lines.next += 1;
        let first = start.0;
        let mut entry = Entry { id, first, end: first.saturating_add(len.0), waits: None };
        if lines.entries.iter().any(|before| before.overlaps(&entry)) {
            entry.waits = Some(Arc::clone(waker));
        }
        lines.entries.push_back(entry);
        Section { sections: Arc::clone(self), id }
    }

    fn lines(&self) -> MutexGuard<'_, Lines> {
        // No code under the mutex can leave the queue half changed.
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A range lock, granted or waiting. Dropping it releases it.
#[derive(Debug)]
#[must_use = "dropping it releases the lock"]
pub struct Section {
    sections: Arc<Sections>,
    id: u64,
}

impl Section {
    /// Returns true if the lock is granted.
    pub fn entered(&self) -> bool {
        let lines = self.sections.lines();
        lines.entries.iter().any(|entry| entry.id == self.id && entry.waits.is_none())
    }
}

impl Drop for Section {
    fn drop(&mut self) {
        let wake = {
            let mut lines = self.sections.lines();
            lines.entries.retain(|entry| entry.id != self.id);
            lines.admit()
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

    fn enter(sections: &Arc<Sections>, first: u64, len: u64, waker: &Arc<dyn Wake>) -> Section {
        sections.enter(ByteOffset(first), ByteLen(len), waker)
    }

    #[test]
    fn overlapping_locks_are_granted_in_order() {
        let sections = Sections::new();
        let (wakes, waker) = counter();
        let first = enter(&sections, 0, 1024, &waker);
        let adjacent = enter(&sections, 1024, 512, &waker);
        assert!(first.entered() && adjacent.entered());
        let second = enter(&sections, 512, 1024, &waker);
        // Overlaps only the waiting one, which it must not overtake.
        let third = enter(&sections, 1535, 512, &waker);
        assert!(!second.entered() && !third.entered());
        drop(first);
        assert!(!second.entered(), "the adjacent lock is still held");
        assert_eq!(wakes.0.load(Ordering::SeqCst), 0);
        drop(adjacent);
        assert!(second.entered() && !third.entered());
        assert_eq!(wakes.0.load(Ordering::SeqCst), 1);
        drop(second);
        assert!(third.entered());
        assert_eq!(wakes.0.load(Ordering::SeqCst), 2);
        drop(third);
        assert!(sections.lines().entries.is_empty());
    }

    #[test]
    fn dropping_a_waiting_lock_withdraws_it() {
        let sections = Sections::new();
        let (wakes, waker) = counter();
        let first = enter(&sections, 0, 512, &waker);
        let withdrawn = enter(&sections, 0, 1024, &waker);
        let behind = enter(&sections, 512, 512, &waker);
        assert!(!behind.entered(), "queued behind a waiting lock");
        drop(withdrawn);
        assert!(behind.entered(), "no earlier lock overlaps");
        assert_eq!(wakes.0.load(Ordering::SeqCst), 1);
        drop((first, behind));
        assert_eq!(wakes.0.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn empty_ranges_do_not_conflict() {
        let sections = Sections::new();
        let (_, waker) = counter();
        let empty = enter(&sections, 512, 0, &waker);
        let around = enter(&sections, 512, 512, &waker);
        let last = enter(&sections, u64::MAX - 1, u64::MAX, &waker);
        assert!(empty.entered() && around.entered() && last.entered());
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
        let sections = Sections::new();
        let cells = [const { AtomicU32::new(0) }; 3];
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let (sections, cells) = (&sections, &cells);
                scope.spawn(move || {
                    let waker: Arc<dyn Wake> = Arc::new(Unpark(std::thread::current()));
                    for round in 0..u64::from(ROUNDS) {
                        let first = (thread + round) % 2;
                        let section = enter(sections, first, 2, &waker);
                        while !section.entered() {
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
        assert!(sections.lines().entries.is_empty());
    }

    proptest! {
        /// Model: a lock is granted if it overlaps none that came before and has not been dropped.
        #[test]
        fn any_history(steps in proptest::collection::vec((any::<bool>(), 0u64..6, 0u64..4), 0..60)) {
            let sections = Sections::new();
            let mut held: Vec<(u64, u64, Section, Arc<WakeCounter>, bool)> = Vec::new();
            for (arrive, first, len) in steps {
                if arrive || held.is_empty() {
                    let (wakes, waker) = counter();
                    let section = enter(&sections, first, len, &waker);
                    let at_once = section.entered();
                    held.push((first, first + len, section, wakes, at_once));
                } else {
                    drop(held.remove(first as usize % held.len()));
                }
                for (index, (first, end, section, wakes, at_once)) in held.iter().enumerate() {
                    let free = held[..index].iter().all(|(other, other_end, ..)| first >= other_end || other >= end);
                    prop_assert_eq!(section.entered(), free);
                    prop_assert_eq!(wakes.0.load(Ordering::SeqCst), u32::from(free && !at_once));
                }
            }
        }
    }
}
