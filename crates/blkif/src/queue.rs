//! The queue of one ring.

use std::io;
use std::marker::PhantomData;
use std::sync::Arc;

use mqblk_core::{ArmResult, ByteLen, FinishedRequest, GuestQueue, Intake, Outcome, PublishResult, PullEnd, Wake};
use mqblk_memory::{Buffer, MemoryShare, PooledContext};
use mqblk_ring::blkif::request::MAX_SEGMENTS;
use mqblk_ring::blkif::{BlkifRingError, RingPosition};

use crate::barrier::BarrierAction;
use crate::batch::Batch;
use crate::counters::GrantCounters;
use crate::parse::RequestParser;
use crate::request_pages::RequestPages;
use crate::request_table::RequestTable;
use crate::ring_barrier::RingBarrier;
use crate::ring_side::{BATCH, RingSide};
use crate::vbd::{RingParts, Vbd};

/// Token of a request: its index in the request table.
#[derive(Debug)]
pub struct BlkifToken(pub(crate) u16);

/// The queue of one ring of a [`Vbd`].
pub struct BlkifQueue<L> {
    vbd: Arc<Vbd>,
    waker: Arc<dyn Wake>,
    pub(crate) parser: RequestParser,
    pub(crate) ring: RingSide,
    pub(crate) requests: RequestTable,
    pub(crate) pages: RequestPages,
    pub(crate) barrier: RingBarrier,
    pub(crate) batch: Batch,
    /// The pages' memory, and the queue's other resources of its worker.
    pub(crate) share: MemoryShare,
    /// Counters of events, barriers and indirect requests; `pages` has those of grants.
    pub(crate) counters: GrantCounters,
    _guard: Option<Box<dyn std::any::Any + Send>>,
    _context: PhantomData<fn(L)>,
}

impl<L: PooledContext> BlkifQueue<L> {
    /// Opens the queue of a ring.
    ///
    /// # Errors
    /// When the system cannot reserve addresses for the queue's pages.
    pub fn open(vbd: Arc<Vbd>, parts: RingParts) -> io::Result<BlkifQueue<L>> {
        let RingParts { ring, grants, channel, waker, journal, replay, fence, guard } = parts;
        let options = vbd.options();
        let (size, most) = (ring.size() as u16, options.max_indirect_segments);
        let segments = most.max(MAX_SEGMENTS as u16);
        let batch = Batch::new(most)?;
        let pages = RequestPages::new(vbd.open_pool(size.into(), segments, grants)?, size, segments);
        let share = MemoryShare::new(Arc::clone(pages.arena().memory()), size.into()).with_fence(fence);
        vbd.ring_opened(&waker);
        Ok(BlkifQueue {
            parser: RequestParser::new(options),
            barrier: RingBarrier::new(&vbd.gate, Arc::clone(&waker)),
            ring: RingSide::new(ring, channel, journal, replay),
            requests: RequestTable::new(size, segments),
            pages,
            batch,
            share,
            counters: GrantCounters::default(),
            waker,
            vbd,
            _guard: guard,
            _context: PhantomData,
        })
    }

    /// Returns the counters.
    pub fn grant_counters(&self) -> GrantCounters {
        let mut counters = self.counters;
        counters.add(&self.pages.counters());
        counters
    }

    /// Returns the size of the disk.
    #[inline]
    pub(crate) fn disk_size(&self) -> ByteLen {
        self.vbd.size()
    }

    /// Advances the active barrier, if there is one. Submits this ring's when all earlier requests are completed.
    fn advance_barrier<I: Intake<BlkifToken, Buffer>>(
        &mut self,
        context: &mut L,
        into: &mut I,
        running: bool,
    ) -> Result<(), BlkifRingError> {
        let mut pulled = Ok(());
        loop {
            let others = self.requests.in_use() - self.barrier.waiting() + self.ring.unpublished_responses();
            match self.barrier.advance(others) {
                BarrierAction::Nothing => return pulled,
                // An error is returned only after this ring has reported to the gate: other rings wait for the report.
                BarrierAction::TakeEarlier if running => pulled = self.pull_earlier(context, into),
                BarrierAction::TakeEarlier => {}
                BarrierAction::Submit => {
                    if let Some(at) = self.barrier.take_waiting() {
                        self.counters.barriers += 1;
                        self.admit(context.pool(), at, into);
                    }
                    return pulled;
                }
            }
        }
    }

    /// Takes the requests that the ring holds now, up to a barrier.
    fn pull_earlier<I: Intake<BlkifToken, Buffer>>(
        &mut self,
        context: &mut L,
        into: &mut I,
    ) -> Result<(), BlkifRingError> {
        let mut left = self.ring.waiting()?;
        while left > 0 && self.barrier.waiting() == 0 {
            let (taken, _) = self.pull_batch(context.pool(), into, left)?;
            if taken == 0 {
                return Ok(());
            }
            left -= taken;
        }
        Ok(())
    }

    /// Takes the requests that the ring holds, and arms it. For a queue that is not polled when a barrier ends: its
    /// event channel may have stayed masked meanwhile.
    fn pull_and_arm<I: Intake<BlkifToken, Buffer>>(
        &mut self,
        context: &mut L,
        into: &mut I,
    ) -> Result<(), BlkifRingError> {
        // Bound: a full ring and a few later requests; then other queues run.
        for _ in 0..=self.ring.ring().size() as usize / BATCH {
            let (_, more) = self.pull_batch(context.pool(), into, usize::MAX)?;
            if !self.barrier.is_open() || (!more && self.ring.arm() == ArmResult::Sleepable) {
                return Ok(());
            }
        }
        self.waker.wake();
        Ok(())
    }

    /// Unmaps idle persistent grants and releases memory of buffer pages.
    #[inline(never)]
    fn reclaim(&mut self) {
        if self.pages.reclaim() {
            self.waker.wake();
        }
    }
}

impl<L: PooledContext> GuestQueue for BlkifQueue<L> {
    type Token = BlkifToken;
    type Position = RingPosition;
    type Context = L;

    fn depth(&self) -> u16 {
        self.ring.ring().size() as u16
    }

    fn enter(&mut self, context: &mut L) -> Result<(), String> {
        self.share.enter(context)
    }

    fn leave(&mut self, context: &mut L) {
        self.share.leave(context);
    }

    /// Unmaps all pages.
    fn close(&mut self) {
        self.barrier.close();
        let last = self.vbd.ring_closed(&self.waker);
        self.pages.close(last);
    }

    #[inline]
    fn pull<I: Intake<BlkifToken, Buffer>>(&mut self, context: &mut L, into: &mut I) -> PullEnd {
        if !self.barrier.is_open() {
            // The gate wakes the queue when it opens.
            return PullEnd::Empty { taken: 0 };
        }
        match self.pull_batch(context.pool(), into, usize::MAX) {
            Ok((taken, more)) => PullEnd::of(taken, more),
            Err(broken) => PullEnd::Broken(broken.0),
        }
    }

    #[inline(always)] // the engine calls it in two places
    fn finish<I: Intake<BlkifToken, Buffer>>(
        &mut self,
        context: &mut L,
        done: FinishedRequest<BlkifToken, Buffer>,
        into: &mut I,
    ) {
        if let Some(buffer) = done.buffer {
            context.pool().release_usual(buffer);
        }
        if matches!(done.outcome, Outcome::Done(_)) && self.complete_single(done.token.0) {
            return;
        }
        self.step_completed(done.token, done.outcome, into);
    }

    fn woken<I: Intake<BlkifToken, Buffer>>(
        &mut self,
        context: &mut L,
        into: &mut I,
        running: bool,
    ) -> Result<(), &'static str> {
        self.advance_barrier(context, into, running).map_err(|broken| broken.0)?;
        if running && self.ring.is_armed() && self.barrier.is_open() {
            self.pull_and_arm(context, into).map_err(|broken| broken.0)?;
        }
        self.pages.update_time();
        self.reclaim();
        Ok(())
    }

    fn blocked(&self) -> usize {
        self.barrier.waiting()
    }

    #[inline]
    fn publish(&mut self) -> PublishResult {
        if self.pages.deferred_count() > 0 {
            self.complete_deferred();
        }
        if self.ring.unpublished_responses() == 0 {
            return PublishResult::Nothing;
        }
        let notify = self.ring.publish();
        if !self.barrier.is_open() {
            self.published_during_barrier();
        }
        if self.pages.needs_reclaim() {
            self.reclaim();
        }
        notify
    }

    fn notify(&mut self) {
        self.counters.events_sent += 1;
        self.ring.notify();
    }

    fn arm(&mut self) -> ArmResult {
        let result = if self.barrier.is_open() {
            self.ring.arm()
        } else {
            // Requests wait until the barrier ends, when the gate wakes the queue. An earlier event is useless.
            ArmResult::Sleepable
        };
        self.ring.set_armed(result == ArmResult::Sleepable);
        result
    }

    fn disarm(&mut self) {
        self.counters.events_received += 1;
        self.ring.disarm();
    }

    /// The next backend process replays the request from the journal.
    fn abandon(&mut self, context: &mut L, token: BlkifToken, buffer: Option<Buffer>) {
        if let Some(buffer) = buffer {
            context.pool().release(buffer);
        }
        let (entry, pages) = self.requests.with_pages(token.0);
        self.pages.release(entry.backing, pages);
        self.requests.remove(token.0);
    }

    fn position(&self) -> RingPosition {
        self.ring.position()
    }
}

impl<L> BlkifQueue<L> {
    /// Handles a publish while a barrier is active.
    fn published_during_barrier(&mut self) {
        self.barrier.response_published();
        if self.requests.in_use() == self.barrier.waiting() {
            // The queue reports that nothing is in flight in `woken`, where it can also continue.
            self.waker.wake();
        }
    }
}

impl<L> std::fmt::Debug for BlkifQueue<L> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BlkifQueue").field("ring", &self.ring).finish_non_exhaustive()
    }
}
