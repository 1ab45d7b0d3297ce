//! The page pool of a ring, or of all rings of a device: buffer pages, pages mapped for a request, and persistent
//! grants. Falls back to grant copy when pages cannot be mapped.

use std::io;
use std::sync::Arc;

use mqblk_memory::{GrantAccess, GrantCopy, GrantRef, PageArena, PageSlot};

use crate::budget::GrantBudget;
use crate::counters::GrantCounters;
use crate::options::{ResolvedGrantMode, VbdOptions};
use crate::page_backing::{PageBacking, RequestPage};
use crate::persistent::{PersistentGrants, PersistentSlot};
use crate::slot_ranges::{SlotRange, SlotRanges};

/// Minimum interval of scans for pages to unmap, in milliseconds: Linux's LRU_INTERVAL.
const RECLAIM_INTERVAL_MS: u32 = 100;

/// One in this many persistent grants is unmapped under pressure: 5 percent, Linux's LRU_PERCENT_CLEAN.
const PRESSURE_DIVISOR: u32 = 20;

/// Maximum of pages that one scan unmaps.
const MAX_RECLAIM_BATCH: usize = 64;

/// State of a page pool, without the grant access.
#[derive(Debug)]
struct PoolState {
    arena: Arc<PageArena>,
    mode: ResolvedGrantMode,
    ranges: SlotRanges,
    /// Persistent grant `n` is mapped in the `n`th slot after the ranges.
    persistent: PersistentGrants,
    idle_ms: u32,
    /// A page could not be mapped for lack of space since the last scan.
    under_pressure: bool,
    last_reclaim_ms: u32,
    budget: Arc<GrantBudget>,
    /// Mapped pages, which are reserved from the budget.
    mapped_pages: u32,
    /// Mapped pages whose unmap failed.
    stuck_pages: u32,
    /// Reused for the grants of a request that is being mapped.
    grefs: Vec<GrantRef>,
}

impl PoolState {
    /// Creates the state for `requests` requests of at most `segments` segments.
    fn new(options: &VbdOptions, requests: u32, segments: u16) -> io::Result<PoolState> {
        let mode = options.resolved_mode();
        let persistent = if mode.is_persistent() { options.persistent_max } else { 0 };
        let ranges = SlotRanges::new(requests, segments);
        Ok(PoolState {
            arena: Arc::new(PageArena::reserve(ranges.slots() + persistent)?),
            mode,
            ranges,
            persistent: PersistentGrants::new(persistent),
            idle_ms: u32::try_from(options.persistent_idle.as_millis()).unwrap_or(u32::MAX),
            under_pressure: false,
            last_reclaim_ms: 0,
            budget: Arc::clone(&options.budget),
            mapped_pages: 0,
            stuck_pages: 0,
            grefs: Vec::with_capacity(segments.into()),
        })
    }

    #[inline]
    fn page_slot(&self, persistent: PersistentSlot) -> PageSlot {
        PageSlot(self.ranges.slots() + persistent.0)
    }

    #[inline]
    fn persistent_slot(&self, slot: PageSlot) -> PersistentSlot {
        PersistentSlot(slot.0 - self.ranges.slots())
    }

    fn reserve_budget(&mut self, pages: u32, counters: &mut GrantCounters) -> bool {
        let reserved = self.budget.try_reserve(pages);
        if reserved {
            self.mapped_pages += pages;
        } else {
            counters.over_budget += 1;
            self.under_pressure = true;
        }
        reserved
    }

    fn release_budget(&mut self, pages: u32) {
        self.budget.release(pages);
        self.mapped_pages -= pages;
    }

    /// Allocates buffer pages for a request.
    #[inline]
    fn allocate_buffer(&mut self, pages: &mut [RequestPage]) -> Option<PageBacking> {
        let range = self.ranges.allocate()?;
        self.ranges.mark_filled(range, pages.len() as u16);
        self.assign_slots(range, pages);
        Some(PageBacking::Copy(range))
    }

    #[inline]
    fn assign_slots(&self, range: SlotRange, pages: &mut [RequestPage]) {
        let first = self.ranges.first_slot(range).0;
        for (slot, page) in (first..).zip(pages) {
            page.slot = PageSlot(slot);
        }
    }
}

impl Drop for PoolState {
    fn drop(&mut self) {
        // Remaining mappings end with the grant access.
        self.budget.release(self.mapped_pages);
    }
}

/// A page pool, with the grant access that maps and unmaps pages.
pub(crate) struct PagePool {
    state: PoolState,
    grants: Box<dyn GrantAccess>,
}

impl PagePool {
    /// Creates a pool for `requests` requests of at most `segments` segments.
    pub(crate) fn new(
        options: &VbdOptions,
        requests: u32,
        segments: u16,
        grants: Box<dyn GrantAccess>,
    ) -> io::Result<PagePool> {
        Ok(PagePool { state: PoolState::new(options, requests, segments)?, grants })
    }

    /// Returns the arena of the page slots.
    pub(crate) fn arena(&self) -> &Arc<PageArena> {
        &self.state.arena
    }

    /// See [`GrantAccess::copy`].
    pub(crate) fn copy(&mut self, arena: &PageArena, copies: &mut [GrantCopy]) -> io::Result<()> {
        self.grants.copy(arena, copies)
    }

    /// Reads a page through its persistent mapping, each byte once. Returns false if the page cannot be mapped.
    pub(crate) fn read_persistent(
        &mut self,
        gref: GrantRef,
        into: &mut [u8],
        now: u32,
        counters: &mut GrantCounters,
    ) -> bool {
        if !self.state.mode.is_persistent() {
            return false;
        }
        let Some(slot) = self.acquire(gref, now, counters) else { return false };
        let read = self.state.arena.memory().read(slot.address(0), into).is_some();
        self.release_page(slot, now);
        read
    }

    /// Returns true if [`reclaim`](Self::reclaim) may release pages or memory.
    #[inline]
    pub(crate) fn needs_reclaim(&self) -> bool {
        self.state.mode.is_persistent() || self.state.ranges.needs_trim()
    }

    /// Sets the counters of pages in use.
    pub(crate) fn set_gauges(&self, counters: &mut GrantCounters) {
        counters.mapped_pages = self.state.mapped_pages.into();
        counters.stuck_pages = self.state.stuck_pages.into();
        counters.buffer_pages = self.state.ranges.filled_pages().into();
    }

    /// Returns true if the disk accesses pages where they are mapped persistently.
    pub(crate) fn maps_for_disk(&self) -> bool {
        self.state.mode == ResolvedGrantMode::Persistent
    }

    /// Returns the slot of a page that is mapped persistently.
    #[inline(always)]
    pub(crate) fn find_mapped(&self, gref: GrantRef) -> Option<PageSlot> {
        self.state.persistent.find(gref).map(|persistent| self.state.page_slot(persistent))
    }

    /// Starts a use of a page that [`find_mapped`](Self::find_mapped) found.
    #[inline(always)]
    pub(crate) fn use_mapped(&mut self, slot: PageSlot, now: u32, counters: &mut GrantCounters) {
        counters.persistent_hits += 1;
        let persistent = self.state.persistent_slot(slot);
        self.state.persistent.use_found(persistent, now);
    }

    /// Prepares the pages of a request: maps them if the mode requires it, else allocates buffer pages. `None` if no
    /// slots are free.
    #[inline(always)]
    pub(crate) fn prepare(
        &mut self,
        pages: &mut [RequestPage],
        fill: bool,
        now: u32,
        counters: &mut GrantCounters,
    ) -> Option<PageBacking> {
        match self.state.mode {
            ResolvedGrantMode::Persistent => {
                if self.acquire_all(pages, now, counters) {
                    return Some(PageBacking::Persistent);
                }
            }
            ResolvedGrantMode::PersistentBounce => {
                if self.acquire_all(pages, now, counters) {
                    return self.bounce(pages, fill, now);
                }
            }
            ResolvedGrantMode::Map => {
                if let Some(place) = self.map_request(pages, fill, counters) {
                    return Some(place);
                }
            }
            ResolvedGrantMode::Copy => {}
        }
        self.state.allocate_buffer(pages)
    }

    /// Allocates buffer pages for a request whose persistent grants are acquired, and copies the data of a write to
    /// them.
    #[inline(always)]
    fn bounce(&mut self, pages: &mut [RequestPage], fill: bool, now: u32) -> Option<PageBacking> {
        let Some(range) = self.state.ranges.allocate() else {
            self.release_all(pages, now);
            return None;
        };
        self.state.ranges.mark_filled(range, pages.len() as u16);
        let first = self.state.ranges.first_slot(range).0;
        let memory = self.state.arena.memory();
        for (slot, page) in (first..).zip(pages) {
            let mapped = page.address();
            page.slot = PageSlot(slot);
            if !fill {
                let copied = memory.copy_to(mapped, memory, page.address(), page.len().into());
                debug_assert!(copied.is_some(), "slots lie in one region");
            }
        }
        Some(PageBacking::Bounce(range))
    }

    /// Copies a read's data from buffer pages to the mapped pages.
    #[inline(always)]
    pub(crate) fn copy_bounced(&self, pages: &[RequestPage]) {
        let memory = self.state.arena.memory();
        for page in pages {
            if let Some(persistent) = self.state.persistent.find(page.gref) {
                let mapped = RequestPage { slot: self.state.page_slot(persistent), ..*page };
                let copied = memory.copy_to(page.address(), memory, mapped.address(), page.len().into());
                debug_assert!(copied.is_some(), "slots lie in one region");
            }
        }
    }

    /// Starts a use of each page. Returns false, and uses none, if one cannot be mapped.
    #[inline(always)]
    fn acquire_all(&mut self, pages: &mut [RequestPage], now: u32, counters: &mut GrantCounters) -> bool {
        for at in 0..pages.len() {
            match self.acquire(pages[at].gref, now, counters) {
                Some(slot) => pages[at].slot = slot,
                None => {
                    self.release_all(&pages[..at], now);
                    return false;
                }
            }
        }
        true
    }

    /// Starts a use of a persistent grant, which it maps first if necessary.
    #[inline(always)]
    fn acquire(&mut self, gref: GrantRef, now: u32, counters: &mut GrantCounters) -> Option<PageSlot> {
        match self.state.persistent.acquire(gref, now) {
            Some(persistent) => {
                counters.persistent_hits += 1;
                Some(self.state.page_slot(persistent))
            }
            None => self.map_persistent(gref, now, counters),
        }
    }

    fn map_persistent(&mut self, gref: GrantRef, now: u32, counters: &mut GrantCounters) -> Option<PageSlot> {
        counters.persistent_misses += 1;
        let store = &mut self.state;
        let Some(free_slot) = store.persistent.free_slot() else {
            counters.over_cap += 1;
            store.under_pressure = true;
            return None;
        };
        let slot = store.page_slot(free_slot);
        if !store.reserve_budget(1, counters) {
            return None;
        }
        // Writable regardless of the request: the next one may use the page in the other direction.
        counters.map_calls += 1;
        if self.grants.map(&store.arena, slot, &[gref], true).is_err() {
            counters.map_errors += 1;
            store.release_budget(1);
            return None;
        }
        counters.maps += 1;
        store.persistent.insert(gref, now);
        Some(slot)
    }

    #[inline(always)]
    fn release_all(&mut self, pages: &[RequestPage], now: u32) {
        for page in pages {
            self.release_page(page.slot, now);
        }
    }

    /// Ends a use of a page that is mapped persistently.
    #[inline(always)]
    pub(crate) fn release_page(&mut self, slot: PageSlot, now: u32) {
        let persistent = self.state.persistent_slot(slot);
        self.state.persistent.release(persistent, now);
    }

    /// Maps a request's pages to adjacent slots.
    fn map_request(
        &mut self,
        pages: &mut [RequestPage],
        fill: bool,
        counters: &mut GrantCounters,
    ) -> Option<PageBacking> {
        let store = &mut self.state;
        let count = pages.len() as u32;
        let range = store.ranges.allocate()?;
        if store.reserve_budget(count, counters) {
            store.grefs.clear();
            store.grefs.extend(pages.iter().map(|page| page.gref));
            counters.map_calls += 1;
            match self.grants.map(&store.arena, store.ranges.first_slot(range), &store.grefs, fill) {
                Ok(()) => {
                    counters.maps += u64::from(count);
                    store.assign_slots(range, pages);
                    return Some(PageBacking::Map(range));
                }
                Err(_) => {
                    counters.map_errors += 1;
                    store.release_budget(count);
                }
            }
        }
        store.ranges.release(range);
        None
    }

    /// Releases the pages of a request.
    #[inline(always)]
    pub(crate) fn release(
        &mut self,
        place: PageBacking,
        pages: &[RequestPage],
        now: u32,
        counters: &mut GrantCounters,
    ) {
        match place {
            PageBacking::None => {}
            PageBacking::Persistent => self.release_all(pages, now),
            PageBacking::Copy(range) => self.state.ranges.release(range),
            PageBacking::Bounce(range) => {
                for page in pages {
                    if let Some(persistent) = self.state.persistent.find(page.gref) {
                        self.state.persistent.release(persistent, now);
                    }
                }
                self.state.ranges.release(range);
            }
            PageBacking::Map(range) => {
                let count = pages.len() as u16;
                // A range whose unmap failed is not reused.
                if self.unmap(self.state.ranges.first_slot(range), count, counters) {
                    self.state.ranges.mark_empty(range, count);
                    self.state.ranges.release(range);
                }
            }
        }
    }

    fn unmap(&mut self, first: PageSlot, count: u16, counters: &mut GrantCounters) -> bool {
        counters.unmap_calls += 1;
        match self.grants.unmap(&self.state.arena, first) {
            Ok(()) => {
                counters.unmaps += u64::from(count);
                self.state.release_budget(count.into());
                true
            }
            Err(_) => {
                self.state.stuck_pages += u32::from(count);
                false
            }
        }
    }

    /// Unmaps idle persistent grants, and a few others under pressure, and releases memory of buffer pages. Returns
    /// true if more grants are idle.
    pub(crate) fn reclaim(&mut self, now: u32, counters: &mut GrantCounters) -> bool {
        if now.wrapping_sub(self.state.last_reclaim_ms) < RECLAIM_INTERVAL_MS {
            return false;
        }
        self.state.last_reclaim_ms = now;
        self.state.ranges.trim(&self.state.arena);
        let idle = self.state.idle_ms;
        let mut more = false;
        if idle > 0 {
            let idle_grants = self.state.persistent.select_lru(now, MAX_RECLAIM_BATCH, |unused| unused >= idle);
            self.unmap_selected(idle_grants, counters);
            more = idle_grants == MAX_RECLAIM_BATCH;
            if more {
                self.state.last_reclaim_ms = now.wrapping_sub(RECLAIM_INTERVAL_MS);
            }
        }
        if std::mem::take(&mut self.state.under_pressure) {
            let limit = (self.state.persistent.capacity() / PRESSURE_DIVISOR).max(1) as usize;
            let selected = self.state.persistent.select_lru(now, limit.min(MAX_RECLAIM_BATCH), |_| true);
            self.unmap_selected(selected, counters);
        }
        more
    }

    /// Unmaps the selected persistent grants.
    fn unmap_selected(&mut self, count: usize, counters: &mut GrantCounters) {
        for at in 0..count {
            let persistent = self.state.persistent.selected(at);
            self.state.persistent.remove(persistent);
            let slot = self.state.page_slot(persistent);
            if self.unmap(slot, 1, counters) {
                self.state.persistent.return_slot(persistent);
                counters.persistent_purged += 1;
            }
        }
    }

    /// Unmaps all persistent grants. Nothing is in flight.
    pub(crate) fn close(&mut self, counters: &mut GrantCounters) {
        while let Some(persistent) = { self.state.persistent.iter().next() } {
            self.state.persistent.remove(persistent);
            let slot = self.state.page_slot(persistent);
            self.unmap(slot, 1, counters);
        }
    }
}
