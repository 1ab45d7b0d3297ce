//! Host-wide limit of mapped pages of other domains, over all disks.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use mqblk_core::MappingBudget;

/// A host-wide budget of mapped pages. Xen tracks every mapping in a table of limited size
/// (`gnttab_max_maptrack_frames`) that all backends of a domain share. The process has one budget for all mappings that
/// guests cause, and `gntdev` maps each page apart. When either is exhausted, requests use grant copy, which needs
/// neither. So one disk with many rings never makes another one fail.
///
/// Accessed only when a page is mapped or unmapped, not by requests whose pages stay mapped.
#[derive(Debug)]
pub struct GrantBudget {
    limit: u64,
    used: AtomicU64,
    mappings: &'static MappingBudget,
}

impl GrantBudget {
    /// Creates a budget of `limit` pages, in a process with these mappings.
    pub fn new(limit: u64, mappings: &'static MappingBudget) -> Arc<GrantBudget> {
        Arc::new(GrantBudget { limit, used: AtomicU64::new(0), mappings })
    }

    /// Creates the budget of a host that tracks `maptrack` mappings. Half of the process's mappings are left to the
    /// rest.
    pub fn for_host(maptrack: u64, mappings: &'static MappingBudget) -> Arc<GrantBudget> {
        GrantBudget::new(maptrack.min(mappings.limit() / 2 / MappingBudget::OF_PAGE), mappings)
    }

    /// Reserves `pages` pages. Returns false, and reserves none, if fewer are left.
    pub fn try_reserve(&self, pages: u32) -> bool {
        let pages = u64::from(pages);
        if !self.mappings.try_take(pages * MappingBudget::OF_PAGE) {
            return false;
        }
        let more = |used: u64| used.checked_add(pages).filter(|used| *used <= self.limit);
        let reserved = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok();
        if !reserved {
            self.mappings.release(pages * MappingBudget::OF_PAGE);
        }
        reserved
    }

    /// Releases reserved pages.
    pub fn release(&self, pages: u32) {
        self.mappings.release(u64::from(pages) * MappingBudget::OF_PAGE);
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
        static MAPPINGS: MappingBudget = MappingBudget::new(1000);
        let budget = GrantBudget::new(10, &MAPPINGS);
        assert!(budget.try_reserve(7) && !budget.try_reserve(4) && budget.try_reserve(3));
        assert!(!budget.try_reserve(1) && budget.try_reserve(0));
        budget.release(3);
        assert_eq!((budget.used(), budget.limit(), MAPPINGS.held()), (7, 10, 14));
        assert!(!budget.try_reserve(u32::MAX));
    }

    #[test]
    fn a_page_takes_two_mappings_of_the_process() {
        static MAPPINGS: MappingBudget = MappingBudget::new(800);
        let (budget, of_vmm) = (GrantBudget::new(1000, &MAPPINGS), MAPPINGS.hold(600).unwrap());
        assert!(!budget.try_reserve(51) && budget.try_reserve(50) && !budget.try_reserve(1));
        drop(of_vmm);
        assert!(budget.try_reserve(1));
        budget.release(51);
        assert_eq!((budget.used(), MAPPINGS.held()), (0, 0));
    }

    #[test]
    fn the_smaller_limit_of_a_host_applies() {
        static MAPPINGS: MappingBudget = MappingBudget::new(65_530);
        assert_eq!(GrantBudget::for_host(262_144, &MAPPINGS).limit(), 16_382);
        assert_eq!(GrantBudget::for_host(1024, &MAPPINGS).limit(), 1024);
    }
}
