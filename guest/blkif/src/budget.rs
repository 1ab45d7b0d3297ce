//! How many pages of other domains this host maps at a time, over all disks.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A host-wide budget of mapped pages. Xen tracks every mapping in a table of limited size (`gnttab_max_maptrack_frames`) that all
/// back-ends of a domain share, and Linux counts every stretch of mapped pages against `vm.max_map_count`. Who finds the budget
/// used up copies instead (grant copy needs neither), so that one disk with many rings never makes another one fail.
///
/// Touched only when a page is mapped or let go, not by a request whose pages are mapped.
#[derive(Debug)]
pub struct GrantBudget {
    limit: u64,
    used: AtomicU64,
}

impl GrantBudget {
    /// A budget of so many pages.
    pub fn new(limit: u64) -> Arc<GrantBudget> {
        Arc::new(GrantBudget { limit, used: AtomicU64::new(0) })
    }

    /// What a host allows that tracks `maptrack` mappings and lets a process have `max_map_count` stretches of memory, of which half
    /// are left to the rest of the process.
    pub fn of_host(maptrack: u64, max_map_count: u64) -> Arc<GrantBudget> {
        GrantBudget::new(maptrack.min(max_map_count / 2))
    }

    /// Takes `pages` of it, if there are as many left: all or none.
    pub fn take(&self, pages: u32) -> bool {
        let pages = u64::from(pages);
        let more = |used: u64| used.checked_add(pages).filter(|used| *used <= self.limit);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// Gives back what was taken.
    pub fn give(&self, pages: u32) {
        let before = self.used.fetch_sub(pages.into(), Ordering::Relaxed);
        debug_assert!(before >= u64::from(pages), "more was given back than taken");
    }

    /// Pages that are mapped.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Pages that may be.
    pub fn limit(&self) -> u64 {
        self.limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_taken_whole_or_not_at_all() {
        let budget = GrantBudget::new(10);
        assert!(budget.take(7) && !budget.take(4) && budget.take(3));
        assert!(!budget.take(1) && budget.take(0));
        budget.give(3);
        assert_eq!((budget.used(), budget.limit()), (7, 10));
        assert!(!budget.take(u32::MAX));
    }

    #[test]
    fn a_host_s_smaller_limit_counts() {
        assert_eq!(GrantBudget::of_host(262_144, 65_530).limit(), 32_765);
        assert_eq!(GrantBudget::of_host(1024, 65_530).limit(), 1024);
    }
}
