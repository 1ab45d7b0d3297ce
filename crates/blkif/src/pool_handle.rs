//! A ring's handle of its page pool, which is its own or shared by all rings of the device behind a lock.

use std::io;
use std::sync::{Arc, Mutex};

use mqblk_core::lock::lock;
use mqblk_memory::{GrantAccess, GrantCopy, GrantRef, GrantStatus, PageArena};

use crate::counters::GrantCounters;
use crate::options::VbdOptions;
use crate::page_backing::{PageBacking, RequestPage};
use crate::page_pool::PagePool;

/// A page pool that all rings of a device share.
pub(crate) type SharedPool = Arc<Mutex<PagePool>>;

/// A ring's handle of its page pool.
pub(crate) enum PoolHandle {
    Own(Box<PagePool>),
    Shared {
        pool: SharedPool,
        /// Grant access for this ring's copies. `None`: the pool uses this ring's for all mappings.
        copy_access: Option<Box<dyn GrantAccess>>,
    },
}

impl PoolHandle {
    /// Creates a pool for one ring.
    pub(crate) fn own(
        options: &VbdOptions,
        requests: u32,
        segments: u16,
        grants: Box<dyn GrantAccess>,
    ) -> io::Result<PoolHandle> {
        Ok(PoolHandle::Own(Box::new(PagePool::new(options, requests, segments, grants)?)))
    }

    /// Returns a handle of the shared pool in `shared`, which the first ring creates. `requests`: of all rings.
    pub(crate) fn shared(
        shared: &mut Option<SharedPool>,
        options: &VbdOptions,
        requests: u32,
        segments: u16,
        grants: Box<dyn GrantAccess>,
    ) -> io::Result<PoolHandle> {
        if let Some(pool) = shared {
            return Ok(PoolHandle::Shared { pool: Arc::clone(pool), copy_access: Some(grants) });
        }
        let pool = PagePool::new(options, requests, segments, grants)?;
        let pool = shared.insert(Arc::new(Mutex::new(pool)));
        Ok(PoolHandle::Shared { pool: Arc::clone(pool), copy_access: None })
    }

    #[inline(always)]
    fn with_pool<R>(&mut self, act: impl FnOnce(&mut PagePool) -> R) -> R {
        match self {
            PoolHandle::Own(pool) => act(pool),
            PoolHandle::Shared { pool: holder, .. } => act(&mut lock(holder)),
        }
    }

    /// Returns the arena of the page slots.
    pub(crate) fn arena(&mut self) -> Arc<PageArena> {
        self.with_pool(|pool| Arc::clone(pool.arena()))
    }

    /// Returns the ring's own pool. `None` if it is shared.
    #[inline(always)] // it has a few callers, which take a few instructions each
    pub(crate) fn own_pool(&mut self) -> Option<&mut PagePool> {
        match self {
            PoolHandle::Own(pool) => Some(pool),
            PoolHandle::Shared { .. } => None,
        }
    }

    /// Prepares the pages of a request. `fill`: the disk writes to them.
    #[inline(always)]
    pub(crate) fn prepare(
        &mut self,
        pages: &mut [RequestPage],
        fill: bool,
        now: u32,
        counters: &mut GrantCounters,
    ) -> Option<PageBacking> {
        self.with_pool(|pool| pool.prepare(pages, fill, now, counters))
    }

    /// Copies the data of a successful read from its buffer pages to the mapped pages, for [`PageBacking::Bounce`].
    #[inline(always)]
    pub(crate) fn copy_bounced(&mut self, pages: &[RequestPage]) {
        self.with_pool(|pool| pool.copy_bounced(pages));
    }

    /// Releases the pages of a request, whose buffer is released already.
    #[inline(always)]
    pub(crate) fn release(
        &mut self,
        place: PageBacking,
        pages: &[RequestPage],
        now: u32,
        counters: &mut GrantCounters,
    ) {
        self.with_pool(|pool| pool.release(place, pages, now, counters));
    }

    /// Reads a page through its persistent mapping, each byte once. Returns false if the page cannot be mapped.
    pub(crate) fn read_persistent(
        &mut self,
        gref: GrantRef,
        into: &mut [u8],
        now: u32,
        counters: &mut GrantCounters,
    ) -> bool {
        self.with_pool(|pool| pool.read_persistent(gref, into, now, counters))
    }

    /// Copies in one call, and sets the status of each copy.
    pub(crate) fn copy(&mut self, arena: &PageArena, copies: &mut [GrantCopy], counters: &mut GrantCounters) {
        if copies.is_empty() {
            return;
        }
        counters.copy_calls += 1;
        counters.copies += copies.len() as u64;
        let done = match self {
            PoolHandle::Own(pool) => pool.copy(arena, copies),
            PoolHandle::Shared { copy_access: Some(grants), .. } => grants.copy(arena, copies),
            PoolHandle::Shared { pool: holder, copy_access: None } => lock(holder).copy(arena, copies),
        };
        if done.is_err() {
            for copy in copies.iter_mut() {
                copy.status = GrantStatus::GENERAL_ERROR;
            }
        }
        counters.copy_errors += copies.iter().filter(|copy| copy.status != GrantStatus::OKAY).count() as u64;
    }

    /// Returns true if [`reclaim`](Self::reclaim) may release pages or memory.
    #[inline]
    pub(crate) fn needs_reclaim(&mut self) -> bool {
        self.with_pool(|pool| pool.needs_reclaim())
    }

    /// Unmaps idle pages and releases memory, at most every 100 ms. Returns true if more can be released.
    #[inline]
    pub(crate) fn reclaim(&mut self, now: u32, counters: &mut GrantCounters) -> bool {
        self.with_pool(|pool| pool.reclaim(now, counters))
    }

    /// Closes the ring's handle. The last ring unmaps all pages.
    pub(crate) fn close(&mut self, last: bool, counters: &mut GrantCounters) {
        self.with_pool(|pool| {
            if last {
                pool.close(counters);
            }
        });
    }

    /// Sets the counters of pages in use.
    pub(crate) fn set_gauges(&self, counters: &mut GrantCounters) {
        match self {
            PoolHandle::Own(pool) => pool.set_gauges(counters),
            PoolHandle::Shared { pool: holder, .. } => lock(holder).set_gauges(counters),
        }
    }
}
