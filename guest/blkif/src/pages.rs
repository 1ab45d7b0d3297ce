//! A ring's handle of its page pool, which is its own or shared by all rings of the device behind a lock.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mqblk_memory::{GrantAccess, GrantCopy, GrantRef, GrantStatus, PageArena};

use crate::counters::GrantCounters;
use crate::holder::Holder;
use crate::options::VbdOptions;
use crate::place::{PageUse, Place};

/// A page pool that all rings of a device share.
pub(crate) type SharedHolder = Arc<Mutex<Holder>>;

fn lock(pool: &SharedHolder) -> MutexGuard<'_, Holder> {
    pool.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A ring's handle of its page pool.
pub(crate) enum Pages {
    Own(Box<Holder>),
    Shared {
        holder: SharedHolder,
        /// Grant access for this ring's copies. `None`: the pool has this ring's, for all mappings.
        own: Option<Box<dyn GrantAccess>>,
    },
}

impl Pages {
    /// Creates a pool for one ring.
    pub(crate) fn own(
        options: &VbdOptions,
        requests: u32,
        segments: u16,
        grants: Box<dyn GrantAccess>,
    ) -> io::Result<Pages> {
        Ok(Pages::Own(Box::new(Holder::new(options, requests, segments, grants)?)))
    }

    /// Returns a handle of the shared pool in `shared`, which the first ring creates. `requests`: of all rings.
    pub(crate) fn shared(
        shared: &mut Option<SharedHolder>,
        options: &VbdOptions,
        requests: u32,
        segments: u16,
        grants: Box<dyn GrantAccess>,
    ) -> io::Result<Pages> {
        if let Some(pool) = shared {
            return Ok(Pages::Shared { holder: Arc::clone(pool), own: Some(grants) });
        }
        let pool = Holder::new(options, requests, segments, grants)?;
        let pool = shared.insert(Arc::new(Mutex::new(pool)));
        Ok(Pages::Shared { holder: Arc::clone(pool), own: None })
    }

    #[inline(always)]
    fn with<R>(&mut self, act: impl FnOnce(&mut Holder) -> R) -> R {
        match self {
            Pages::Own(pool) => act(pool),
            Pages::Shared { holder, .. } => act(&mut lock(holder)),
        }
    }

    /// Returns the arena of the page slots.
    pub(crate) fn arena(&mut self) -> Arc<PageArena> {
        self.with(|pool| Arc::clone(pool.arena()))
    }

    /// Prepares the pages of a request. `fill`: the disk writes to them.
    #[inline(always)]
    pub(crate) fn place(
        &mut self,
        pages: &mut [PageUse],
        fill: bool,
        now: u32,
        counters: &mut GrantCounters,
    ) -> Option<Place> {
        self.with(|pool| pool.place(pages, fill, now, counters))
    }

    /// Copies the data of a successful read from its buffer pages to the mapped pages, for [`PageBacking::Bounce`].
    #[inline(always)]
    pub(crate) fn deliver(&mut self, pages: &[PageUse]) {
        self.with(|pool| pool.deliver(pages));
    }

    /// Releases the pages of a request, whose buffer is released already.
    #[inline(always)]
    pub(crate) fn let_go(&mut self, place: Place, pages: &[PageUse], now: u32, counters: &mut GrantCounters) {
        self.with(|pool| pool.let_go(place, pages, now, counters));
    }

    /// Reads a page through its persistent mapping, each byte once. Returns false if the page cannot be mapped.
    pub(crate) fn peek(&mut self, gref: GrantRef, into: &mut [u8], now: u32, counters: &mut GrantCounters) -> bool {
        self.with(|pool| pool.peek(gref, into, now, counters))
    }

    /// Copies in one call, and sets the status of each copy.
    pub(crate) fn copy(&mut self, arena: &PageArena, copies: &mut [GrantCopy], counters: &mut GrantCounters) {
        if copies.is_empty() {
            return;
        }
        counters.copy_calls += 1;
        counters.copies += copies.len() as u64;
        let done = match self {
            Pages::Own(pool) => pool.copy(arena, copies),
            Pages::Shared { own: Some(grants), .. } => grants.copy(arena, copies),
            Pages::Shared { holder, own: None } => lock(holder).copy(arena, copies),
        };
        if done.is_err() {
            for copy in copies.iter_mut() {
                copy.status = GrantStatus::GENERAL_ERROR;
            }
        }
        counters.copy_errors += copies.iter().filter(|copy| copy.status != GrantStatus::OKAY).count() as u64;
    }

    /// Returns true if [`reclaim`](Self::reclaim) may find something to release.
    #[inline]
    pub(crate) fn needs_tending(&mut self) -> bool {
        self.with(|pool| pool.needs_tending())
    }

    /// Unmaps idle pages and releases memory, at most every 100 ms. Returns true if more can be released.
    #[inline]
    pub(crate) fn tend(&mut self, now: u32, counters: &mut GrantCounters) -> bool {
        self.with(|pool| pool.tend(now, counters))
    }

    /// Closes the ring's handle. The last ring unmaps all pages.
    pub(crate) fn close(&mut self, last: bool, counters: &mut GrantCounters) {
        self.with(|pool| {
            if last {
                pool.close(counters);
            }
        });
    }

    /// Sets the counters of pages in use.
    pub(crate) fn count(&self, counters: &mut GrantCounters) {
        match self {
            Pages::Own(pool) => pool.count(counters),
            Pages::Shared { holder, .. } => lock(holder).count(counters),
        }
    }
}
