//! Host-wide limit of mapped pages of other domains, over all disks.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A host-wide budget of mapped pages. Xen tracks every mapping in a table of limited size (`gnttab_max_maptrack_frames`) that all
/// backends of a domain share, and Linux counts every range of mapped pages against `vm.max_map_count`. When the budget is exhausted,
/// requests use grant copy, which needs neither, so that one disk with many rings never makes another one fail.
///
/// Accessed only when a page is mapped or unmapped, not by requests whose pages stay mapped.
#[derive(Debug)]
pub struct GrantBudget {
    limit: u64,
    used: AtomicU64,
}

impl GrantBudget {
    /// Creates a budget of `limit` pages.
    pub fn new(limit: u64) -> Arc<GrantBudget> {
        Arc::new(GrantBudget { limit, used: AtomicU64::new(0) })
    }

    /// Creates the budget of a host that tracks `maptrack` mappings and allows a process `max_map_count` memory ranges, half of which
    /// are left to the rest of the process.
    pub fn for_host(maptrack: u64, max_map_count: u64) -> Arc<GrantBudget> {
        GrantBudget::new(maptrack.min(max_map_count / 2))
    }

    /// Reserves `pages` pages. Returns false, and reserves none, if fewer are left.
    pub fn try_reserve(&self, pages: u32) -> bool {
        let pages = u64::from(pages);
        let more = |used: u64| used.checked_add(pages).filter(|used| *used <= self.limit);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// Releases reserved pages.
    pub fn release(&self, pages: u32) {
        let before = self.used.fetch_sub(pages.into(), Ordering::Relaxed);
        debug_assert!(before >= u64::from(pages), "more is released than reserved");
    }

    /// Returns the number of reserved pages.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Returns the limit in pages.
    pub fn limit(&self) -> u64 {
        self.limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reservation_is_all_or_nothing() {
        let budget = GrantBudget::new(10);
        assert!(budget.try_reserve(7) && !budget.try_reserve(4) && budget.try_reserve(3));
        assert!(!budget.try_reserve(1) && budget.try_reserve(0));
        budget.release(3);
        assert_eq!((budget.used(), budget.limit()), (7, 10));
        assert!(!budget.try_reserve(u32::MAX));
    }

    #[test]
    fn the_smaller_limit_of_a_host_applies() {
        assert_eq!(GrantBudget::for_host(262_144, 65_530).limit(), 32_765);
        assert_eq!(GrantBudget::for_host(1024, 65_530).limit(), 1024);
    }
}
