//! Where the pages of requests are: in pages of our own, mapped for a request, or mapped for good.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mqblk_core::Sector512;
use mqblk_memory::{CopyDirection, GrantAccess, GrantCopy, GrantRef, GrantStatus, GuestAddress, PageArena, PageSlot};
use mqblk_ring::blkif::Segment;

use crate::budget::GrantBudget;
use crate::counters::GrantCounters;
use crate::options::{Mode, VbdOptions};
use crate::persistent::{Held, Persistent};
use crate::ranges::{Range, Ranges};

/// How often mapped pages are looked through for such as can be let go, in milliseconds: Linux's LRU_INTERVAL.
const TEND_INTERVAL: u32 = 100;

/// What part of the mapped pages is let go when there is no room for others: 5 percent, Linux's LRU_PERCENT_CLEAN.
const PRESSED_PART: u32 = 20;

/// Most mapped pages that are let go at a time.
const MOST_AT_ONCE: usize = 64;

/// A segment of a request, and where its page is. `first` and `last` are judged before anything else is asked of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageUse {
    pub(crate) gref: GrantRef,
    pub(crate) slot: PageSlot,
    /// First sector in the page.
    pub(crate) first: u8,
    /// Last sector in it.
    pub(crate) last: u8,
}

/// Sectors of a page in bytes.
#[inline]
fn bytes(sectors: u8) -> u16 {
    Sector512(sectors.into()).to_len().map_or(0, |len| len.0 as u16)
}

impl PageUse {
    pub(crate) const NONE: PageUse = PageUse { gref: GrantRef(0), slot: PageSlot(0), first: 0, last: 0 };

    #[inline]
    pub(crate) fn of(segment: Segment) -> PageUse {
        let Segment { gref, first_sect, last_sect } = segment;
        PageUse { gref, slot: PageSlot(0), first: first_sect, last: last_sect }
    }

    /// Its first byte in the page.
    #[inline]
    fn offset(&self) -> u16 {
        bytes(self.first)
    }

    /// Its bytes.
    #[inline]
    pub(crate) fn len(&self) -> u32 {
        bytes(self.last - self.first + 1).into()
    }

    /// Where its first byte is in the arena.
    #[inline]
    pub(crate) fn address(&self) -> GuestAddress {
        self.slot.address(self.offset().into())
    }

    #[inline]
    pub(crate) fn copy(&self, direction: CopyDirection) -> GrantCopy {
        GrantCopy {
            gref: self.gref,
            offset: self.offset(),
            len: self.len() as u16,
            slot: self.slot,
            slot_offset: self.offset(),
            direction,
            // Of a copy that nobody looks at.
            status: GrantStatus::GENERAL_ERROR,
        }
    }
}

/// Where the pages of a request are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Nowhere: it has none.
    None,
    /// In own pages.
    Copy(Range),
    /// Mapped, for this request.
    Map(Range),
    /// Mapped, each for itself, for good.
    Persistent,
    /// The same, with data in own pages.
    Bounce(Range),
}

/// Whether pages stay mapped.
#[inline]
fn keeps(mode: Mode) -> bool {
    matches!(mode, Mode::Persistent | Mode::PersistentCopy)
}

/// The pages of a ring, or of all rings of a device.
#[derive(Debug)]
pub(crate) struct PageStore {
    arena: Arc<PageArena>,
    mode: Mode,
    ranges: Ranges,
    /// Its page `n` is in the `n`th slot behind the ranges.
    persistent: Persistent,
    idle: u32,
    /// There was no room for a page since the last look.
    pressed: bool,
    tended_at: u32,
    budget: Arc<GrantBudget>,
    /// Pages that are mapped, and so taken from the budget.
    held: u32,
    /// Those of them that cannot be let go.
    stuck: u32,
    /// For mapping a request.
    refs: Vec<GrantRef>,
}

impl PageStore {
    /// Pages for `requests` requests of at most `segments` segments.
    fn new(options: &VbdOptions, requests: u32, segments: u16) -> io::Result<PageStore> {
        let mode = options.resolved_mode();
        let persistent = if keeps(mode) { options.persistent_max } else { 0 };
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
    fn slot(&self, held: Held) -> PageSlot {
        PageSlot(self.ranges.slots() + held.0)
    }

    #[inline]
    fn held_in(&self, slot: PageSlot) -> Held {
        Held(slot.0 - self.ranges.slots())
    }

    fn budget_for(&mut self, pages: u32, counters: &mut GrantCounters) -> bool {
        let taken = self.budget.take(pages);
        if taken {
            self.held += pages;
        } else {
            counters.over_budget += 1;
            self.pressed = true;
        }
        taken
    }

    fn give_back(&mut self, pages: u32) {
        self.budget.give(pages);
        self.held -= pages;
    }

    /// Slots of our own for the pages.
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
        // What is left is let go with the way to the grants.
        self.budget.give(self.held);
    }
}

/// Pages, and the way to the grants that maps and unmaps them.
pub(crate) struct Holder {
    store: PageStore,
    grants: Box<dyn GrantAccess>,
}

impl Holder {
    /// Finds places for a request's pages, and maps them if they are to be and can be. `None` when there is no room at all.
    #[inline(always)]
    fn place(&mut self, pages: &mut [PageUse], fill: bool, now: u32, counters: &mut GrantCounters) -> Option<Place> {
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

    /// Finds own pages for a request whose pages are in use; with the data, if it is a write's.
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

    /// Copies a read's data from own pages to the mapped ones.
    #[inline(always)]
    fn deliver(&self, pages: &[PageUse]) {
        let memory = self.store.arena.memory();
        for page in pages {
            if let Some(held) = self.store.persistent.find(page.gref) {
                let mapped = PageUse { slot: self.store.slot(held), ..*page };
                let copied = memory.copy_to(page.address(), memory, mapped.address(), page.len().into());
                debug_assert!(copied.is_some(), "slots lie in one region");
            }
        }
    }

    /// Begins a use of each page. If one cannot be mapped: of none.
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

    /// Begins a use of a page that is mapped for good, and maps it first if it is not.
    #[inline(always)]
    fn begin(&mut self, gref: GrantRef, now: u32, counters: &mut GrantCounters) -> Option<PageSlot> {
        match self.store.persistent.begin(gref, now) {
            Some(held) => {
                counters.persistent_hits += 1;
                Some(self.store.slot(held))
            }
            None => self.map_for_good(gref, now, counters),
        }
    }

    #[cold]
    fn map_for_good(&mut self, gref: GrantRef, now: u32, counters: &mut GrantCounters) -> Option<PageSlot> {
        counters.persistent_misses += 1;
        let store = &mut self.store;
        let Some(held) = store.persistent.vacancy() else {
            counters.over_cap += 1;
            store.pressed = true;
            return None;
        };
        let slot = store.slot(held);
        if !store.budget_for(1, counters) {
            return None;
        }
        // Writable whatever the request: the next one may go the other way.
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
        let held = self.store.held_in(slot);
        self.store.persistent.end(held, now);
    }

    /// Maps a request's pages, side by side.
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

    /// The request needs its pages no more.
    #[inline(always)]
    fn let_go(&mut self, place: Place, pages: &[PageUse], now: u32, counters: &mut GrantCounters) {
        match place {
            Place::None => {}
            Place::Persistent => self.end_all(pages, now),
            Place::Copy(range) => self.store.ranges.give(range),
            Place::Bounce(range) => {
                for page in pages {
                    if let Some(held) = self.store.persistent.find(page.gref) {
                        self.store.persistent.end(held, now);
                    }
                }
                self.store.ranges.give(range);
            }
            Place::Map(range) => {
                let count = pages.len() as u16;
                // A range whose pages cannot be let go is not used again.
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

    /// Lets pages go that were not used for long, or a few if there was no room, and gives memory back. Whether there are more to let
    /// go.
    fn tend(&mut self, now: u32, counters: &mut GrantCounters) -> bool {
        if now.wrapping_sub(self.store.tended_at) < TEND_INTERVAL {
            return false;
        }
        self.store.tended_at = now;
        self.store.ranges.trim(&self.store.arena);
        let idle = self.store.idle;
        let mut more = false;
        if idle > 0 {
            let old = self.store.persistent.choose(now, MOST_AT_ONCE, |unused| unused >= idle);
            self.purge(old, counters);
            more = old == MOST_AT_ONCE;
            if more {
                self.store.tended_at = now.wrapping_sub(TEND_INTERVAL);
            }
        }
        if std::mem::take(&mut self.store.pressed) {
            let few = (self.store.persistent.max() / PRESSED_PART).max(1) as usize;
            let few = self.store.persistent.choose(now, few.min(MOST_AT_ONCE), |_| true);
            self.purge(few, counters);
        }
        more
    }

    /// Lets go of those that were chosen.
    fn purge(&mut self, count: usize, counters: &mut GrantCounters) {
        for at in 0..count {
            let held = self.store.persistent.chosen(at);
            self.store.persistent.remove(held);
            let slot = self.store.slot(held);
            if self.unmap(slot, 1, counters) {
                self.store.persistent.vacate(held);
                counters.persistent_purged += 1;
            }
        }
    }

    /// Lets go of all pages that are mapped for good. Nothing is in flight.
    fn close(&mut self, counters: &mut GrantCounters) {
        while let Some(held) = { self.store.persistent.live().next() } {
            self.store.persistent.remove(held);
            let slot = self.store.slot(held);
            self.unmap(slot, 1, counters);
        }
    }
}

/// What the rings of a device share, if they do.
pub(crate) type SharedHolder = Arc<Mutex<Holder>>;

fn lock(holder: &SharedHolder) -> MutexGuard<'_, Holder> {
    holder.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A ring's pages: its own, or its part in those of all rings.
pub(crate) enum Pages {
    Own(Box<Holder>),
    Shared {
        holder: SharedHolder,
        /// What this ring copies with. The ring that came first has lent it to all for mapping.
        own: Option<Box<dyn GrantAccess>>,
    },
}

impl Pages {
    /// A ring's own.
    pub(crate) fn own(
        options: &VbdOptions,
        requests: u32,
        segments: u16,
        grants: Box<dyn GrantAccess>,
    ) -> io::Result<Pages> {
        Ok(Pages::Own(Box::new(Holder { store: PageStore::new(options, requests, segments)?, grants })))
    }

    /// Those of all rings. The first ring makes them: room for `requests` of all of them.
    pub(crate) fn shared(
        place: &mut Option<SharedHolder>,
        options: &VbdOptions,
        requests: u32,
        segments: u16,
        grants: Box<dyn GrantAccess>,
    ) -> io::Result<Pages> {
        if let Some(holder) = place {
            return Ok(Pages::Shared { holder: Arc::clone(holder), own: Some(grants) });
        }
        let holder = Holder { store: PageStore::new(options, requests, segments)?, grants };
        let holder = place.insert(Arc::new(Mutex::new(holder)));
        Ok(Pages::Shared { holder: Arc::clone(holder), own: None })
    }

    #[inline(always)]
    fn with<R>(&mut self, act: impl FnOnce(&mut Holder) -> R) -> R {
        match self {
            Pages::Own(holder) => act(holder),
            Pages::Shared { holder, .. } => act(&mut lock(holder)),
        }
    }

    /// Where the slots are.
    pub(crate) fn arena(&mut self) -> Arc<PageArena> {
        self.with(|holder| Arc::clone(&holder.store.arena))
    }

    /// Finds places for a request's pages. `fill`: they are written to.
    #[inline(always)]
    pub(crate) fn place(
        &mut self,
        pages: &mut [PageUse],
        fill: bool,
        now: u32,
        counters: &mut GrantCounters,
    ) -> Option<Place> {
        self.with(|holder| holder.place(pages, fill, now, counters))
    }

    /// A read has succeeded whose pages are [`Place::Bounce`].
    #[inline(always)]
    pub(crate) fn deliver(&mut self, pages: &[PageUse]) {
        self.with(|holder| holder.deliver(pages));
    }

    /// The request needs its pages no more: its buffer was given back.
    #[inline(always)]
    pub(crate) fn let_go(&mut self, place: Place, pages: &[PageUse], now: u32, counters: &mut GrantCounters) {
        self.with(|holder| holder.let_go(place, pages, now, counters));
    }

    /// Reads a page through its mapping, if it is to be mapped for good and can be. The bytes are read once.
    pub(crate) fn peek(&mut self, gref: GrantRef, into: &mut [u8], now: u32, counters: &mut GrantCounters) -> bool {
        self.with(|holder| {
            if !keeps(holder.store.mode) {
                return false;
            }
            let Some(slot) = holder.begin(gref, now, counters) else { return false };
            let read = holder.store.arena.memory().read(slot.address(0), into).is_some();
            holder.end(slot, now);
            read
        })
    }

    /// Copies, in one call. Each copy has its status afterwards.
    pub(crate) fn copy(&mut self, arena: &PageArena, copies: &mut [GrantCopy], counters: &mut GrantCounters) {
        if copies.is_empty() {
            return;
        }
        counters.copy_calls += 1;
        counters.copies += copies.len() as u64;
        let done = match self {
            Pages::Own(holder) => holder.grants.copy(arena, copies),
            Pages::Shared { own: Some(grants), .. } => grants.copy(arena, copies),
            Pages::Shared { holder, own: None } => lock(holder).grants.copy(arena, copies),
        };
        if done.is_err() {
            for copy in copies.iter_mut() {
                copy.status = GrantStatus::GENERAL_ERROR;
            }
        }
        counters.copy_errors += copies.iter().filter(|copy| copy.status != GrantStatus::OKAY).count() as u64;
    }

    /// Whether [`tend`](Self::tend) may find something to do.
    #[inline]
    pub(crate) fn needs_tending(&mut self) -> bool {
        self.with(|holder| keeps(holder.store.mode) || holder.store.ranges.is_large())
    }

    /// Lets go of what was not used for long. Looks at most every 100 ms. Whether there is more to let go.
    #[inline]
    pub(crate) fn tend(&mut self, now: u32, counters: &mut GrantCounters) -> bool {
        self.with(|holder| holder.tend(now, counters))
    }

    /// The ring ends. Pages that other rings have too stay until the last of them ends.
    pub(crate) fn close(&mut self, last: bool, counters: &mut GrantCounters) {
        self.with(|holder| {
            if last {
                holder.close(counters);
            }
        });
    }

    /// Adds what is held now.
    pub(crate) fn count(&self, counters: &mut GrantCounters) {
        let mut count = |store: &PageStore| {
            counters.held = store.held.into();
            counters.stuck = store.stuck.into();
            counters.buffer_pages = store.ranges.pages().into();
        };
        match self {
            Pages::Own(holder) => count(&holder.store),
            Pages::Shared { holder, .. } => count(&lock(holder).store),
        }
    }
}
