//! The pages of a ring's requests: a page pool, the copies that wait for the next publish, and the counters of both.

use std::sync::Arc;

use mqblk_memory::{CopyDirection, GrantCopy, GrantRef, GrantStatus, PageArena, PageSlot};
use nix::time::{ClockId, clock_gettime};

use crate::counters::GrantCounters;
use crate::page_backing::{PageBacking, RequestPage};
use crate::pool_handle::PoolHandle;

/// Returns the milliseconds of CLOCK_MONOTONIC_COARSE, which is cheap to read and has a resolution of a few
/// milliseconds.
fn coarse_now_ms() -> u32 {
    // Without this clock nothing becomes idle.
    // Not rustix: it reads the vDSO's ELF header, which valgrind hides, and the instruction budget runs under valgrind.
    let Ok(now) = clock_gettime(ClockId::CLOCK_MONOTONIC_COARSE) else { return 0 };
    // Wraps after 49 days; only differences are used.
    (now.tv_sec() as u64).wrapping_mul(1000).wrapping_add(now.tv_nsec() as u64 / 1_000_000) as u32
}

/// The pages of a ring's requests.
pub(crate) struct RequestPages {
    pool: PoolHandle,
    /// True if the disk accesses pages where they are mapped, and the pool is the ring's own.
    finds_mapped: bool,
    arena: Arc<PageArena>,
    /// Time of the last batch in milliseconds.
    now_ms: u32,
    /// Copies to the frontend for the reads in `deferred`, in their order. The next publish executes them.
    read_copies: Vec<GrantCopy>,
    /// Table indices of completed requests whose pages the next publish copies or unmaps.
    deferred: Vec<u16>,
    counters: GrantCounters,
}

impl RequestPages {
    /// Creates the pages of a ring of `size` entries, each a request of at most `segments` segments.
    pub(crate) fn new(mut pool: PoolHandle, size: u16, segments: u16) -> RequestPages {
        RequestPages {
            arena: pool.arena(),
            finds_mapped: pool.own_pool().is_some_and(|pool| pool.maps_for_disk()),
            pool,
            now_ms: coarse_now_ms(),
            // Capacity for all requests; memory is allocated on first touch.
            read_copies: Vec::with_capacity(usize::from(size) * usize::from(segments)),
            deferred: Vec::with_capacity(size.into()),
            counters: GrantCounters::default(),
        }
    }

    /// Returns the arena that the pages lie in.
    #[inline]
    pub(crate) fn arena(&self) -> &Arc<PageArena> {
        &self.arena
    }

    /// Returns the counters.
    pub(crate) fn counters(&self) -> GrantCounters {
        let mut counters = self.counters;
        self.pool.set_gauges(&mut counters);
        counters
    }

    /// Unmaps all pages if this is the device's last ring.
    pub(crate) fn close(&mut self, last: bool) {
        self.pool.close(last, &mut self.counters);
    }

    /// Reads the clock, if it matters when the pages of a batch are used.
    #[inline]
    pub(crate) fn begin_batch(&mut self) {
        if self.pool.needs_reclaim() {
            self.now_ms = coarse_now_ms();
        }
    }

    /// Returns true if [`find_mapped`](Self::find_mapped) may find a page.
    #[inline(always)]
    pub(crate) fn finds_mapped(&self) -> bool {
        self.finds_mapped
    }

    /// Returns the slot of a page that is mapped persistently in the ring's own pool, and that the disk may access
    /// there.
    #[inline(always)]
    pub(crate) fn find_mapped(&mut self, gref: GrantRef) -> Option<PageSlot> {
        self.pool.own_pool()?.find_mapped(gref)
    }

    /// Starts a use of a page that [`find_mapped`](Self::find_mapped) found.
    #[inline(always)]
    pub(crate) fn use_mapped(&mut self, slot: PageSlot) {
        if let Some(pool) = self.pool.own_pool() {
            pool.use_mapped(slot, self.now_ms, &mut self.counters);
        }
    }

    /// Ends this use.
    #[inline(always)]
    pub(crate) fn release_mapped(&mut self, slot: PageSlot) {
        if let Some(pool) = self.pool.own_pool() {
            pool.release_page(slot, self.now_ms);
        }
    }

    /// Prepares the pages of a request. `fill`: the disk writes to them.
    #[inline(always)]
    pub(crate) fn prepare(&mut self, pages: &mut [RequestPage], fill: bool) -> Option<PageBacking> {
        self.pool.prepare(pages, fill, self.now_ms, &mut self.counters)
    }

    /// Copies the data of a successful read from its buffer pages to the mapped pages, for [`PageBacking::Bounce`].
    #[inline(always)]
    pub(crate) fn copy_bounced(&mut self, pages: &[RequestPage]) {
        self.pool.copy_bounced(pages);
    }

    /// Releases the pages of a request, whose buffer is released already.
    #[inline(always)]
    pub(crate) fn release(&mut self, backing: PageBacking, pages: &[RequestPage]) {
        if backing != PageBacking::None {
            self.pool.release(backing, pages, self.now_ms, &mut self.counters);
        }
    }

    /// Reads a page through its persistent mapping, each byte once. Returns false if the page cannot be mapped.
    pub(crate) fn read_persistent(&mut self, gref: GrantRef, into: &mut [u8]) -> bool {
        self.pool.read_persistent(gref, into, self.now_ms, &mut self.counters)
    }

    /// Copies between the frontend's pages and slots of `arena` in one call, and sets the status of each copy.
    pub(crate) fn copy(&mut self, arena: &PageArena, copies: &mut [GrantCopy]) {
        self.pool.copy(arena, copies, &mut self.counters);
    }

    /// Copies between the frontend's pages and the pages of requests in one call, and sets the status of each copy.
    pub(crate) fn copy_data(&mut self, copies: &mut [GrantCopy]) {
        self.pool.copy(&self.arena, copies, &mut self.counters);
    }

    /// Defers a completed request whose pages the next publish unmaps.
    #[inline]
    pub(crate) fn defer(&mut self, at: u16) {
        self.deferred.push(at);
    }

    /// Defers a completed read whose data the next publish copies to the frontend.
    #[inline]
    pub(crate) fn defer_read(&mut self, at: u16, pages: &[RequestPage]) {
        self.read_copies.extend(pages.iter().map(|page| page.grant_copy(CopyDirection::ToGrant)));
        self.deferred.push(at);
    }

    /// Returns the number of deferred requests.
    #[inline]
    pub(crate) fn deferred_count(&self) -> usize {
        self.deferred.len()
    }

    /// Returns the table index of deferred request `number`.
    #[inline]
    pub(crate) fn deferred(&self, number: usize) -> u16 {
        self.deferred[number]
    }

    /// Copies the data of the deferred reads to the frontend in one call.
    #[inline]
    pub(crate) fn copy_deferred_reads(&mut self) {
        self.pool.copy(&self.arena, &mut self.read_copies, &mut self.counters);
    }

    /// Returns true if `count` copies of the deferred reads succeeded, from copy `first` on.
    #[inline]
    pub(crate) fn are_copied(&self, first: usize, count: usize) -> bool {
        self.read_copies[first..first + count].iter().all(|copy| copy.status == GrantStatus::OKAY)
    }

    /// Forgets the deferred requests, which are completed.
    #[inline]
    pub(crate) fn clear_deferred(&mut self) {
        self.deferred.clear();
        self.read_copies.clear();
    }

    /// Returns true if [`reclaim`](Self::reclaim) may release pages or memory.
    #[inline]
    pub(crate) fn needs_reclaim(&mut self) -> bool {
        self.pool.needs_reclaim()
    }

    /// Unmaps idle persistent grants and releases memory of buffer pages, at most every 100 ms. Returns true if more
    /// can be released.
    pub(crate) fn reclaim(&mut self) -> bool {
        self.pool.reclaim(self.now_ms, &mut self.counters)
    }

    /// Reads the clock.
    pub(crate) fn update_time(&mut self) {
        self.now_ms = coarse_now_ms();
    }
}
