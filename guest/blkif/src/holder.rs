//! The page pool of a ring, or of all rings of a device: buffer pages, pages mapped for a request, and persistent grants. Falls back to
//! grant copy when pages cannot be mapped.

use std::io;
use std::sync::Arc;

use mqblk_memory::{GrantAccess, GrantCopy, GrantRef, PageArena, PageSlot};

use crate::budget::GrantBudget;
use crate::counters::GrantCounters;
use crate::options::{Mode, VbdOptions};
use crate::persistent::{Held, Persistent};
use crate::place::{PageUse, Place};
use crate::ranges::{Range, Ranges};

/// Minimum interval of scans for pages to unmap, in milliseconds: Linux's LRU_INTERVAL.
const TEND_INTERVAL: u32 = 100;

/// One in this many persistent grants is unmapped under pressure: 5 percent, Linux's LRU_PERCENT_CLEAN.
const PRESSED_PART: u32 = 20;

/// Maximum of pages that one scan unmaps.
const MOST_AT_ONCE: usize = 64;

/// State of a page pool, without the grant access.
#[derive(Debug)]
struct PageStore {
    arena: Arc<PageArena>,
    mode: Mode,
    ranges: Ranges,
    /// Persistent grant `n` is mapped in the `n`th slot after the ranges.
    persistent: Persistent,
    idle: u32,
    /// A page could not be mapped for lack of space since the last scan.
    pressed: bool,
    tended_at: u32,
    budget: Arc<GrantBudget>,
    /// Mapped pages, which are reserved from the budget.
    held: u32,
    /// Mapped pages whose unmap failed.
    stuck: u32,
    /// Reused for the grants of a request that is being mapped.
    refs: Vec<GrantRef>,
}

impl PageStore {
    /// Creates the state for `requests` requests of at most `segments` segments.
    fn new(options: &VbdOptions, requests: u32, segments: u16) -> io::Result<PageStore> {
        let mode = options.resolved_mode();
        let persistent = if mode.keeps_pages() { options.persistent_max } else { 0 };
        let ranges = Ranges::new(requests, segments);
        Ok(PageStore {
            arena: Arc::new(PageArena::reserve(ranges.slots() + persistent)?),
            mode,
            ranges,
            persistent: Persistent::new(persistent),
            idle: u32::try_from(options.persistent_idle.as_millis()).unwrap_or(u32::MAX),
            pressed: false,
            tended_at: 0,
            budget: Arc::clone(&options.budget),
            held: 0,
            stuck: 0,
            refs: Vec::with_capacity(segments.into()),
        })
    }

    #[inline]
    fn slot(&self, persistent: Held) -> PageSlot {
        PageSlot(self.ranges.slots() + persistent.0)
    }

    #[inline]
    fn held_in(&self, slot: PageSlot) -> Held {
        Held(slot.0 - self.ranges.slots())
    }

    fn budget_for(&mut self, pages: u32, counters: &mut GrantCounters) -> bool {
        let reserved = self.budget.take(pages);
        if reserved {
            self.held += pages;
        } else {
            counters.over_budget += 1;
            self.pressed = true;
        }
        reserved
    }

    fn give_back(&mut self, pages: u32) {
        self.budget.give(pages);
        self.held -= pages;
    }

    /// Allocates buffer pages for a request.
    #[inline]
    fn own(&mut self, pages: &mut [PageUse]) -> Option<Place> {
        let range = self.ranges.take()?;
        self.ranges.fill(range, pages.len() as u16);
        self.line_up(range, pages);
        Some(Place::Copy(range))
    }

    #[inline]
    fn line_up(&self, range: Range, pages: &mut [PageUse]) {
        let first = self.ranges.first(range).0;
        for (slot, page) in (first..).zip(pages) {
            page.slot = PageSlot(slot);
        }
    }
}

impl Drop for PageStore {
    fn drop(&mut self) {
        // Remaining mappings end with the grant access.
        self.budget.give(self.held);
    }
}

/// A page pool, with the grant access that maps and unmaps pages.
pub(crate) struct Holder {
    store: PageStore,
    grants: Box<dyn GrantAccess>,
}

impl Holder {
    /// Creates a pool for `requests` requests of at most `segments` segments.
    pub(crate) fn new(
        options: &VbdOptions,
        requests: u32,
        segments: u16,
        grants: Box<dyn GrantAccess>,
    ) -> io::Result<Holder> {
        Ok(Holder { store: PageStore::new(options, requests, segments)?, grants })
    }

    /// Returns the arena of the page slots.
    pub(crate) fn arena(&self) -> &Arc<PageArena> {
        &self.store.arena
    }

    /// See [`GrantAccess::copy`].
    pub(crate) fn copy(&mut self, arena: &PageArena, copies: &mut [GrantCopy]) -> io::Result<()> {
        self.grants.copy(arena, copies)
    }

    /// Reads a page through its persistent mapping, each byte once. Returns false if the page cannot be mapped.
    pub(crate) fn peek(&mut self, gref: GrantRef, into: &mut [u8], now: u32, counters: &mut GrantCounters) -> bool {
        if !self.store.mode.keeps_pages() {
            return false;
        }
        let Some(slot) = self.begin(gref, now, counters) else { return false };
        let read = self.store.arena.memory().read(slot.address(0), into).is_some();
        self.end(slot, now);
        read
    }

    /// Returns true if [`reclaim`](Self::reclaim) may find something to release.
    #[inline]
    pub(crate) fn needs_tending(&self) -> bool {
        self.store.mode.keeps_pages() || self.store.ranges.is_large()
    }

    /// Sets the counters of pages in use.
    pub(crate) fn count(&self, counters: &mut GrantCounters) {
        counters.held = self.store.held.into();
        counters.stuck = self.store.stuck.into();
        counters.buffer_pages = self.store.ranges.pages().into();
    }

    /// Prepares the pages of a request: maps them if the mode says so, else allocates buffer pages. `None` if no slots are free.
    #[inline(always)]
    pub(crate) fn place(
        &mut self,
        pages: &mut [PageUse],
        fill: bool,
        now: u32,
        counters: &mut GrantCounters,
    ) -> Option<Place> {
        match self.store.mode {
            Mode::Persistent => {
                if self.begin_all(pages, now, counters) {
                    return Some(Place::Persistent);
                }
            }
            Mode::PersistentCopy => {
                if self.begin_all(pages, now, counters) {
                    return self.bounce(pages, fill, now);
                }
            }
            Mode::Map => {
                if let Some(place) = self.map(pages, fill, counters) {
                    return Some(place);
                }
            }
            Mode::Copy => {}
        }
        self.store.own(pages)
    }

    /// Allocates buffer pages for a request whose persistent grants are acquired, and copies the data of a write to them.
    #[inline(always)]
    fn bounce(&mut self, pages: &mut [PageUse], fill: bool, now: u32) -> Option<Place> {
        let Some(range) = self.store.ranges.take() else {
            self.end_all(pages, now);
            return None;
        };
        self.store.ranges.fill(range, pages.len() as u16);
        let first = self.store.ranges.first(range).0;
        let memory = self.store.arena.memory();
        for (slot, page) in (first..).zip(pages) {
            let mapped = page.address();
            page.slot = PageSlot(slot);
            if !fill {
                let copied = memory.copy_to(mapped, memory, page.address(), page.len().into());
                debug_assert!(copied.is_some(), "slots lie in one region");
            }
        }
        Some(Place::Bounce(range))
    }

    /// Copies a read's data from buffer pages to the mapped pages.
    #[inline(always)]
    pub(crate) fn deliver(&self, pages: &[PageUse]) {
        let memory = self.store.arena.memory();
        for page in pages {
            if let Some(persistent) = self.store.persistent.find(page.gref) {
                let mapped = PageUse { slot: self.store.slot(persistent), ..*page };
                let copied = memory.copy_to(page.address(), memory, mapped.address(), page.len().into());
                debug_assert!(copied.is_some(), "slots lie in one region");
            }
        }
    }

    /// Starts a use of each page. Returns false, and uses none, if one cannot be mapped.
    #[inline(always)]
    fn begin_all(&mut self, pages: &mut [PageUse], now: u32, counters: &mut GrantCounters) -> bool {
        for at in 0..pages.len() {
            match self.begin(pages[at].gref, now, counters) {
                Some(slot) => pages[at].slot = slot,
                None => {
                    self.end_all(&pages[..at], now);
                    return false;
                }
            }
        }
        true
    }

    /// Starts a use of a persistent grant, which it maps first if necessary.
    #[inline(always)]
    fn begin(&mut self, gref: GrantRef, now: u32, counters: &mut GrantCounters) -> Option<PageSlot> {
        match self.store.persistent.begin(gref, now) {
            Some(persistent) => {
                counters.persistent_hits += 1;
                Some(self.store.slot(persistent))
            }
            None => self.map_for_good(gref, now, counters),
        }
    }

    #[cold]
    fn map_for_good(&mut self, gref: GrantRef, now: u32, counters: &mut GrantCounters) -> Option<PageSlot> {
        counters.persistent_misses += 1;
        let store = &mut self.store;
        let Some(free_slot) = store.persistent.vacancy() else {
            counters.over_cap += 1;
            store.pressed = true;
            return None;
        };
        let slot = store.slot(free_slot);
        if !store.budget_for(1, counters) {
            return None;
        }
        // Writable regardless of the request: the next one may use the page in the other direction.
        counters.map_calls += 1;
        if self.grants.map(&store.arena, slot, &[gref], true).is_err() {
            counters.map_errors += 1;
            store.give_back(1);
            return None;
        }
        counters.maps += 1;
        store.persistent.insert(gref, now);
        Some(slot)
    }

    #[inline(always)]
    fn end_all(&mut self, pages: &[PageUse], now: u32) {
        for page in pages {
            self.end(page.slot, now);
        }
    }

    #[inline(always)]
    fn end(&mut self, slot: PageSlot, now: u32) {
        let persistent = self.store.held_in(slot);
        self.store.persistent.end(persistent, now);
    }

    /// Maps a request's pages to adjacent slots.
    fn map(&mut self, pages: &mut [PageUse], fill: bool, counters: &mut GrantCounters) -> Option<Place> {
        let store = &mut self.store;
        let count = pages.len() as u32;
        let range = store.ranges.take()?;
        if store.budget_for(count, counters) {
            store.refs.clear();
            store.refs.extend(pages.iter().map(|page| page.gref));
            counters.map_calls += 1;
            match self.grants.map(&store.arena, store.ranges.first(range), &store.refs, fill) {
                Ok(()) => {
                    counters.maps += u64::from(count);
                    store.line_up(range, pages);
                    return Some(Place::Map(range));
                }
                Err(_) => {
                    counters.map_errors += 1;
                    store.give_back(count);
                }
            }
        }
        store.ranges.give(range);
        None
    }

    /// Releases the pages of a request.
    #[inline(always)]
    pub(crate) fn let_go(&mut self, place: Place, pages: &[PageUse], now: u32, counters: &mut GrantCounters) {
        match place {
            Place::None => {}
            Place::Persistent => self.end_all(pages, now),
            Place::Copy(range) => self.store.ranges.give(range),
            Place::Bounce(range) => {
                for page in pages {
                    if let Some(persistent) = self.store.persistent.find(page.gref) {
                        self.store.persistent.end(persistent, now);
                    }
                }
                self.store.ranges.give(range);
            }
            Place::Map(range) => {
                let count = pages.len() as u16;
                // A range whose unmap failed is not used again.
                if self.unmap(self.store.ranges.first(range), count, counters) {
                    self.store.ranges.refreshed(range, count);
                    self.store.ranges.give(range);
                }
            }
        }
    }

    fn unmap(&mut self, first: PageSlot, count: u16, counters: &mut GrantCounters) -> bool {
        counters.unmap_calls += 1;
        match self.grants.unmap(&self.store.arena, first) {
            Ok(()) => {
                counters.unmaps += u64::from(count);
                self.store.give_back(count.into());
                true
            }
            Err(_) => {
                self.store.stuck += u32::from(count);
                false
            }
        }
    }

    /// Unmaps idle persistent grants, and a few others under pressure, and releases memory of buffer pages. Returns true if more grants are
    /// idle.
    pub(crate) fn tend(&mut self, now: u32, counters: &mut GrantCounters) -> bool {
        if now.wrapping_sub(self.store.tended_at) < TEND_INTERVAL {
            return false;
        }
        self.store.tended_at = now;
        self.store.ranges.trim(&self.store.arena);
        let idle = self.store.idle;
        let mut more = false;
        if idle > 0 {
            let idle_grants = self.store.persistent.choose(now, MOST_AT_ONCE, |unused| unused >= idle);
            self.purge(idle_grants, counters);
            more = idle_grants == MOST_AT_ONCE;
            if more {
                self.store.tended_at = now.wrapping_sub(TEND_INTERVAL);
            }
        }
        if std::mem::take(&mut self.store.pressed) {
            let limit = (self.store.persistent.max() / PRESSED_PART).max(1) as usize;
            let selected = self.store.persistent.choose(now, limit.min(MOST_AT_ONCE), |_| true);
            self.purge(selected, counters);
        }
        more
    }

    /// Unmaps the selected persistent grants.
    fn purge(&mut self, count: usize, counters: &mut GrantCounters) {
        for at in 0..count {
            let persistent = self.store.persistent.chosen(at);
            self.store.persistent.remove(persistent);
            let slot = self.store.slot(persistent);
            if self.unmap(slot, 1, counters) {
                self.store.persistent.vacate(persistent);
                counters.persistent_purged += 1;
            }
        }
    }

    /// Unmaps all persistent grants. Nothing is in flight.
    pub(crate) fn close(&mut self, counters: &mut GrantCounters) {
        while let Some(persistent) = { self.store.persistent.live().next() } {
            self.store.persistent.remove(persistent);
            let slot = self.store.slot(persistent);
            self.unmap(slot, 1, counters);
        }
    }
}
