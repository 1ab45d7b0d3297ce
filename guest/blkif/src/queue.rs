//! The queue of one ring.

use std::io;
use std::marker::PhantomData;
use std::sync::Arc;

use mqblk_core::{ArmResult, ByteLen, EventChannel, FinishedRequest, GuestQueue, Intake, PublishResult, PullEnd, Wake};
use mqblk_memory::{Buffer, GrantCopy, LeaseId, PageArena, PooledContext};
use mqblk_ring::blkif::request::MAX_SEGMENTS;
use mqblk_ring::blkif::{BackRing, BlkifRingError, RingPosition};
use nix::time::{ClockId, clock_gettime};

use crate::barrier::{BarrierAction, RingGate};
use crate::counters::GrantCounters;
use crate::journal::Journal;
use crate::parse::RequestParser;
use crate::pool_handle::PoolHandle;
use crate::pull::{BATCH, Batch, ReplayQueue};
use crate::request_table::RequestTable;
use crate::vbd::{RingParts, Vbd};

/// Token of a request: its index in the request table.
#[derive(Debug)]
pub struct BlkifToken(pub(crate) u16);

/// Returns the milliseconds of CLOCK_MONOTONIC_COARSE, which is cheap to read and has a resolution of a few milliseconds.
pub(crate) fn coarse_now_ms() -> u32 {
    // Without this clock nothing becomes idle.
    // Not rustix: it reads the vDSO's ELF header, which valgrind hides, and the instruction budget runs under valgrind.
    let Ok(now) = clock_gettime(ClockId::CLOCK_MONOTONIC_COARSE) else { return 0 };
    // Wraps after 49 days; only differences are used.
    (now.tv_sec() as u64).wrapping_mul(1000).wrapping_add(now.tv_nsec() as u64 / 1_000_000) as u32
}

/// The queue of one ring of a [`Vbd`].
pub struct BlkifQueue<L> {
    pub(crate) vbd: Arc<Vbd>,
    pub(crate) parser: RequestParser,
    pub(crate) ring: BackRing,
    channel: Box<dyn EventChannel>,
    /// The event channel is masked.
    masked: bool,
    pub(crate) waker: Arc<dyn Wake>,
    pub(crate) page_pool: PoolHandle,
    pub(crate) arena: Arc<PageArena>,
    pub(crate) lease: LeaseId,
    pub(crate) requests: RequestTable,
    pub(crate) batch: Batch,
    pub(crate) replay: ReplayQueue,
    pub(crate) journal: Option<Journal>,
    /// `None` after the queue is closed.
    gate: Option<RingGate>,
    /// Table index of the ring's barrier while it waits for earlier requests.
    pub(crate) barrier: Option<u16>,
    /// The ring's barrier is completed, and its response not published.
    pub(crate) barrier_completed: bool,
    /// Copies to the frontend for the reads in `deferred`, in their order. The next publish executes them.
    pub(crate) read_copies: Vec<GrantCopy>,
    /// Table indices of completed requests whose pages the next publish copies or unmaps.
    pub(crate) deferred: Vec<u16>,
    /// Number of responses that are not published.
    pub(crate) unpublished_responses: usize,
    /// The last arm returned [`ArmResult::Sleepable`]: the worker does not poll the ring until an event.
    armed: bool,
    /// Time of the last batch in milliseconds.
    pub(crate) now_ms: u32,
    pub(crate) counters: GrantCounters,
    /// Every write is durable before its response.
    pub(crate) fua: bool,
    /// Longest discard that the storage accepts.
    pub(crate) max_discard: ByteLen,
    _guard: Option<Box<dyn std::any::Any + Send>>,
    _context: PhantomData<fn(L)>,
}

impl<L: PooledContext> BlkifQueue<L> {
    pub(crate) fn new(vbd: Arc<Vbd>, context: &mut L, parts: RingParts) -> io::Result<BlkifQueue<L>> {
        let RingParts { ring, grants, channel, waker, journal, replay, guard: keep } = parts;
        let options = vbd.options();
        let (size, most) = (ring.size() as u16, options.max_indirect_segments);
        let segments = most.max(MAX_SEGMENTS as u16);
        let batch = Batch::new(most)?;
        let mut pages = vbd.open_pool(size.into(), segments, grants)?;
        let arena = pages.arena();
        let lease = context.pool().acquire_lease(Arc::clone(arena.memory()), vec![]);
        context.pool().reserve(size.into());
        vbd.ring_opened(&waker);
        Ok(BlkifQueue {
            parser: RequestParser::new(options),
            fua: options.write_through,
            max_discard: options.limits.discard.map_or(ByteLen::ZERO, |discard| discard.max_len),
            gate: Some(vbd.gate.open_ring(Arc::clone(&waker))),
            ring,
            channel,
            masked: true,
            waker,
            page_pool: pages,
            arena,
            lease,
            requests: RequestTable::new(size, segments),
            batch,
            replay: ReplayQueue::new(replay),
            journal,
            barrier: None,
            barrier_completed: false,
            // Capacity for all requests; memory is allocated on first touch.
            read_copies: Vec::with_capacity(usize::from(size) * usize::from(segments)),
            deferred: Vec::with_capacity(size.into()),
            unpublished_responses: 0,
            armed: false,
            now_ms: coarse_now_ms(),
            counters: GrantCounters::default(),
            _guard: keep,
            vbd,
            _context: PhantomData,
        })
    }

    /// Closes the queue, which has nothing in flight. Unmaps all pages and releases the queue's share of the buffer pool.
    pub fn close(&mut self, context: &mut L) {
        if self.gate.take().is_none() {
            return;
        }
        let last = self.vbd.ring_closed(&self.waker);
        self.page_pool.close(last, &mut self.counters);
        context.pool().unreserve(self.ring.size() as usize);
        context.pool().retire_lease(self.lease);
    }

    /// Releases the queue's share of this worker's buffer pool, before the queue moves to another worker. Nothing is in flight.
    pub fn leave_context(&mut self, context: &mut L) {
        context.pool().unreserve(self.ring.size() as usize);
        context.pool().retire_lease(self.lease);
    }

    /// Takes a share of this worker's buffer pool, after the queue has come from another worker.
    pub fn enter_context(&mut self, context: &mut L) {
        self.lease = context.pool().acquire_lease(Arc::clone(self.arena.memory()), vec![]);
        context.pool().reserve(self.ring.size() as usize);
    }

    /// Returns the counters.
    pub fn grant_counters(&self) -> GrantCounters {
        let mut counters = self.counters;
        self.page_pool.set_gauges(&mut counters);
        counters
    }

    /// Returns true if requests may be taken off the ring: no barrier is active.
    #[inline]
    pub(crate) fn may_pull(&self) -> bool {
        self.gate.as_ref().is_some_and(RingGate::is_open)
    }

    /// Queues the ring's barrier, which was just taken off the ring, behind those of other rings.
    #[cold]
    pub(crate) fn begin_barrier(&mut self, at: u16) {
        self.barrier = Some(at);
        if let Some(gate) = &mut self.gate {
            // Wakes this queue too, which continues in `woken`.
            gate.begin();
        }
    }

    /// Advances the active barrier, if there is one. Submits this ring's when all earlier requests are completed.
    #[cold]
    fn advance_barrier<I: Intake<BlkifToken, Buffer>>(
        &mut self,
        context: &mut L,
        into: &mut I,
        running: bool,
    ) -> Result<(), BlkifRingError> {
        let mut pulled = Ok(());
        loop {
            let others = self.requests.in_use() - usize::from(self.barrier.is_some()) + self.unpublished_responses;
            let Some(gate) = &mut self.gate else { return Ok(()) };
            match gate.advance(others) {
                BarrierAction::Nothing => return pulled,
                // An error is returned only after this ring has reported to the gate: other rings wait for the report.
                BarrierAction::TakeEarlier if running => pulled = self.pull_earlier(context, into),
                BarrierAction::TakeEarlier => {}
                BarrierAction::Submit => {
                    if let Some(at) = self.barrier.take() {
                        self.counters.barriers += 1;
                        self.admit_outlined(context.pool(), at, into);
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
        let mut left = self.replay.remaining() + self.ring.waiting()? as usize;
        while left > 0 && self.barrier.is_none() {
            let (taken, _) = self.pull_batch(context.pool(), into, left)?;
            if taken == 0 {
                return Ok(());
            }
            left -= taken;
        }
        Ok(())
    }

    /// Takes the requests that the ring holds, and arms it. For a queue that is not polled when a barrier ends: its event channel may
    /// have stayed masked meanwhile.
    fn pull_and_arm<I: Intake<BlkifToken, Buffer>>(
        &mut self,
        context: &mut L,
        into: &mut I,
    ) -> Result<(), BlkifRingError> {
        // Bound: a full ring and a few requests that arrive meanwhile; then other queues run.
        for _ in 0..=self.ring.size() as usize / BATCH {
            let (_, more) = self.pull_batch(context.pool(), into, usize::MAX)?;
            if !self.may_pull() || (!more && self.arm_event() == ArmResult::Sleepable) {
                return Ok(());
            }
        }
        self.waker.wake();
        Ok(())
    }

    /// Unmasks the event channel, requests an event for the next request, and re-checks the ring.
    fn arm_event(&mut self) -> ArmResult {
        if self.replay.remaining() > 0 {
            return ArmResult::WorkWaiting;
        }
        // As late as possible: requests that arrive while the ring is polled need no event.
        if std::mem::take(&mut self.masked) {
            self.channel.unmask();
        }
        self.ring.arm()
    }

    /// Unmaps idle persistent grants and releases memory of buffer pages.
    #[inline(never)]
    fn reclaim(&mut self) {
        if self.page_pool.reclaim(self.now_ms, &mut self.counters) {
            self.waker.wake();
        }
    }
}

impl<L: PooledContext> GuestQueue for BlkifQueue<L> {
    type Token = BlkifToken;
    type Position = RingPosition;
    type Context = L;

    fn depth(&self) -> u16 {
        self.ring.size() as u16
    }

    #[inline]
    fn pull<I: Intake<BlkifToken, Buffer>>(&mut self, context: &mut L, into: &mut I) -> PullEnd {
        if !self.may_pull() {
            // The gate wakes the queue when it opens.
            return PullEnd::Empty;
        }
        match self.pull_batch(context.pool(), into, usize::MAX) {
            Ok((_, true)) => PullEnd::MoreWaiting,
            Ok((_, false)) => PullEnd::Empty,
            Err(broken) => PullEnd::Broken(broken.0),
        }
    }

    #[inline]
    fn finish<I: Intake<BlkifToken, Buffer>>(
        &mut self,
        context: &mut L,
        done: FinishedRequest<BlkifToken, Buffer>,
        into: &mut I,
    ) {
        if let Some(buffer) = done.buffer {
            context.pool().release(buffer);
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
        if running && self.armed && self.may_pull() {
            self.pull_and_arm(context, into).map_err(|broken| broken.0)?;
        }
        self.now_ms = coarse_now_ms();
        self.reclaim();
        Ok(())
    }

    fn blocked(&self) -> usize {
        usize::from(self.barrier.is_some())
    }

    #[inline]
    fn publish(&mut self) -> PublishResult {
        if !self.deferred.is_empty() {
            self.complete_deferred();
        }
        if self.unpublished_responses == 0 {
            return PublishResult::Nothing;
        }
        self.unpublished_responses = 0;
        let notify = match &mut self.journal {
            None => self.ring.publish(),
            Some(journal) => journal.publish(self.ring.position().rsp_prod, || self.ring.publish()),
        };
        if !self.may_pull() {
            self.published_during_barrier();
        }
        if self.page_pool.needs_reclaim() {
            self.reclaim();
        }
        notify
    }

    fn notify(&mut self) {
        self.counters.events_sent += 1;
        self.channel.notify();
    }

    fn arm(&mut self) -> ArmResult {
        let result = if self.may_pull() {
            self.arm_event()
        } else {
            // Requests wait until the barrier ends, when the gate wakes the queue. An event before that is of no use.
            ArmResult::Sleepable
        };
        self.armed = result == ArmResult::Sleepable;
        result
    }

    fn disarm(&mut self) {
        self.armed = false;
        self.masked = true;
        self.counters.events_received += 1;
        self.channel.take();
    }

    fn position(&self) -> RingPosition {
        self.ring.position()
    }
}

impl<L> BlkifQueue<L> {
    /// Handles a publish while a barrier is active.
    #[cold]
    fn published_during_barrier(&mut self) {
        if std::mem::take(&mut self.barrier_completed)
            && let Some(gate) = &mut self.gate
        {
            gate.complete();
        }
        if self.requests.in_use() == usize::from(self.barrier.is_some()) {
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
