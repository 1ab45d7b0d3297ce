//! A ring's way to its pages: they are its own, or those of all rings of its device, behind a lock.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mqblk_memory::{GrantAccess, GrantCopy, GrantRef, GrantStatus, PageArena};

use crate::counters::GrantCounters;
use crate::holder::Holder;
use crate::options::VbdOptions;
use crate::place::{PageUse, Place};

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
        Ok(Pages::Own(Box::new(Holder::new(options, requests, segments, grants)?)))
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
        let holder = Holder::new(options, requests, segments, grants)?;
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
        self.with(|holder| Arc::clone(holder.arena()))
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
        self.with(|holder| holder.peek(gref, into, now, counters))
    }

    /// Copies, in one call. Each copy has its status afterwards.
    pub(crate) fn copy(&mut self, arena: &PageArena, copies: &mut [GrantCopy], counters: &mut GrantCounters) {
        if copies.is_empty() {
            return;
        }
        counters.copy_calls += 1;
        counters.copies += copies.len() as u64;
        let done = match self {
            Pages::Own(holder) => holder.copy(arena, copies),
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

    /// Whether [`tend`](Self::tend) may find something to do.
    #[inline]
    pub(crate) fn needs_tending(&mut self) -> bool {
        self.with(|holder| holder.needs_tending())
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
        match self {
            Pages::Own(holder) => holder.count(counters),
            Pages::Shared { holder, .. } => lock(holder).count(counters),
        }
    }
}
