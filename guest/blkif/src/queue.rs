//! A queue: the personality over one ring.

use std::io;
use std::marker::PhantomData;
use std::sync::Arc;

use mqblk_core::{ArmResult, ByteLen, EventChannel, FinishedRequest, GuestQueue, Intake, PublishResult, PullEnd, Wake};
use mqblk_memory::{Buffer, GrantCopy, LeaseId, PageArena, PooledContext};
use mqblk_ring::blkif::request::MAX_SEGMENTS;
use mqblk_ring::blkif::{BackRing, BlkifRingError, RingPosition};
use nix::time::{ClockId, clock_gettime};

use crate::barrier::{RingGate, Step as GateStep};
use crate::counters::GrantCounters;
use crate::journal::Journal;
use crate::judge::Rules;
use crate::pages::Pages;
use crate::pull::{BATCH, Batch, Replay};
use crate::requests::Requests;
use crate::vbd::{RingParts, Vbd};

/// What the answer to a request needs: its place in the table of requests.
#[derive(Debug)]
pub struct BlkifToken(pub(crate) u16);

/// Milliseconds of a clock that is cheap to read and runs in steps of a few.
pub(crate) fn coarse_milliseconds() -> u32 {
    // Without such a clock nothing ever gets old.
    // Not rustix: it reads the vDSO's ELF header, which valgrind hides, and the instruction budget runs under valgrind.
    let Ok(now) = clock_gettime(ClockId::CLOCK_MONOTONIC_COARSE) else { return 0 };
    // It wraps after 49 days; only differences count.
    (now.tv_sec() as u64).wrapping_mul(1000).wrapping_add(now.tv_nsec() as u64 / 1_000_000) as u32
}

/// One ring of a [`Vbd`].
pub struct BlkifQueue<L> {
    pub(crate) vbd: Arc<Vbd>,
    pub(crate) rules: Rules,
    pub(crate) ring: BackRing,
    channel: Box<dyn EventChannel>,
    /// An event may have come, which is not let through again yet.
    masked: bool,
    pub(crate) waker: Arc<dyn Wake>,
    pub(crate) pages: Pages,
    pub(crate) arena: Arc<PageArena>,
    pub(crate) lease: LeaseId,
    pub(crate) requests: Requests,
    pub(crate) batch: Batch,
    pub(crate) replay: Replay,
    pub(crate) journal: Option<Journal>,
    /// `None` when the queue is closed.
    gate: Option<RingGate>,
    /// The ring's barrier, which waits for what comes before it.
    pub(crate) barrier: Option<u16>,
    /// The ring's barrier is answered; that is still to be published.
    pub(crate) barrier_answered: bool,
    /// Copies to the frontend that its next publish makes, for the reads of `ending`, in their order.
    pub(crate) reads: Vec<GrantCopy>,
    /// Requests that ended and whose pages are still to be copied or let go.
    pub(crate) ending: Vec<u16>,
    /// Responses that are not published.
    pub(crate) unpublished: usize,
    /// The worker was told that the ring needs no look before an event.
    sleeping: bool,
    /// In milliseconds, as of the last batch.
    pub(crate) now: u32,
    pub(crate) counters: GrantCounters,
    /// Every write is durable before it is answered.
    pub(crate) fua: bool,
    /// Longest discard that the storage takes at once.
    pub(crate) max_discard: ByteLen,
    _keep: Option<Box<dyn std::any::Any + Send>>,
    _lane: PhantomData<fn(L)>,
}

impl<L: PooledContext> BlkifQueue<L> {
    pub(crate) fn new(vbd: Arc<Vbd>, lane: &mut L, parts: RingParts) -> io::Result<BlkifQueue<L>> {
        let RingParts { ring, grants, channel, waker, journal, replay, keep } = parts;
        let options = vbd.options();
        let (size, most) = (ring.size() as u16, options.max_indirect_segments);
        let segments = most.max(MAX_SEGMENTS as u16);
        let batch = Batch::new(most)?;
        let mut pages = vbd.pages(size.into(), segments, grants)?;
        let arena = pages.arena();
        let lease = lane.pool().acquire_lease(Arc::clone(arena.memory()), vec![]);
        lane.pool().reserve(size.into());
        vbd.opened(&waker);
        Ok(BlkifQueue {
            rules: Rules::new(options),
            fua: options.write_through,
            max_discard: options.limits.discard.map_or(ByteLen::ZERO, |discard| discard.max_len),
            gate: Some(vbd.gate.open_ring(Arc::clone(&waker))),
            ring,
            channel,
            masked: true,
            waker,
            pages,
            arena,
            lease,
            requests: Requests::new(size, segments),
            batch,
            replay: Replay::new(replay),
            journal,
            barrier: None,
            barrier_answered: false,
            // Room for all; memory is taken on first touch.
            reads: Vec::with_capacity(usize::from(size) * usize::from(segments)),
            ending: Vec::with_capacity(size.into()),
            unpublished: 0,
            sleeping: false,
            now: coarse_milliseconds(),
            counters: GrantCounters::default(),
            _keep: keep,
            vbd,
            _lane: PhantomData,
        })
    }

    /// The queue ends; nothing is in flight. Lets go of all pages and gives back what it holds of the lane.
    pub fn close(&mut self, lane: &mut L) {
        if self.gate.take().is_none() {
            return;
        }
        let last = self.vbd.closed(&self.waker);
        self.pages.close(last, &mut self.counters);
        lane.pool().unreserve(self.ring.size() as usize);
        lane.pool().retire_lease(self.lease);
    }

    /// What was counted so far.
    pub fn grant_counters(&self) -> GrantCounters {
        let mut counters = self.counters;
        self.pages.count(&mut counters);
        counters
    }

    /// Whether requests may be taken: no barrier is on.
    #[inline]
    pub(crate) fn may_take(&self) -> bool {
        self.gate.as_ref().is_some_and(RingGate::may_take)
    }

    /// The ring's barrier, which was just taken, is on, or in the line.
    #[cold]
    pub(crate) fn begin_barrier(&mut self, at: u16) {
        self.barrier = Some(at);
        if let Some(gate) = &mut self.gate {
            // Wakes this queue too, which goes on from there.
            gate.begin();
        }
    }

    /// A barrier is on, or was. Carries out this ring's, when it may be.
    #[cold]
    fn settle<I: Intake<BlkifToken, Buffer>>(
        &mut self,
        lane: &mut L,
        into: &mut I,
        running: bool,
    ) -> Result<(), BlkifRingError> {
        let mut taken = Ok(());
        loop {
            let others = self.requests.in_use() - usize::from(self.barrier.is_some()) + self.unpublished;
            let Some(gate) = &mut self.gate else { return Ok(()) };
            match gate.settle(others) {
                GateStep::Nothing => return taken,
                // A broken ring says so, but not before it has reported: others wait for that.
                GateStep::TakeEarlier if running => taken = self.take_earlier(lane, into),
                GateStep::TakeEarlier => {}
                GateStep::Go => {
                    if let Some(at) = self.barrier.take() {
                        self.counters.barriers += 1;
                        self.admit_seldom(lane.pool(), at, into);
                    }
                    return taken;
                }
            }
        }
    }

    /// Takes what the ring holds now, up to a barrier.
    fn take_earlier<I: Intake<BlkifToken, Buffer>>(
        &mut self,
        lane: &mut L,
        into: &mut I,
    ) -> Result<(), BlkifRingError> {
        let mut left = self.replay.left() + self.ring.waiting()? as usize;
        while left > 0 && self.barrier.is_none() {
            let (taken, _) = self.take_batch(lane.pool(), into, left)?;
            if taken == 0 {
                return Ok(());
            }
            left -= taken;
        }
        Ok(())
    }

    /// The worker does not look at the ring, and its events may have been left masked while a barrier was on: takes what it holds, and
    /// asks for an event again.
    fn catch_up<I: Intake<BlkifToken, Buffer>>(&mut self, lane: &mut L, into: &mut I) -> Result<(), BlkifRingError> {
        // As many as there can be, and a few that come meanwhile; then others have their turn.
        for _ in 0..=self.ring.size() as usize / BATCH {
            let (_, more) = self.take_batch(lane.pool(), into, usize::MAX)?;
            if !self.may_take() || (!more && self.ask_for_event() == ArmResult::Sleepable) {
                return Ok(());
            }
        }
        self.waker.wake();
        Ok(())
    }

    /// Lets events through, asks for one with the next request, and looks again.
    fn ask_for_event(&mut self) -> ArmResult {
        if self.replay.left() > 0 {
            return ArmResult::WorkWaiting;
        }
        // Late: what came while the ring was polled needs no event.
        if std::mem::take(&mut self.masked) {
            self.channel.unmask();
        }
        self.ring.arm()
    }

    /// Lets go of pages that were not used for long.
    #[inline(never)]
    fn tend(&mut self) {
        if self.pages.tend(self.now, &mut self.counters) {
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
    fn pull<I: Intake<BlkifToken, Buffer>>(&mut self, lane: &mut L, into: &mut I) -> PullEnd {
        if !self.may_take() {
            // Its waker rings when it may.
            return PullEnd::Empty;
        }
        match self.take_batch(lane.pool(), into, usize::MAX) {
            Ok((_, true)) => PullEnd::MoreWaiting,
            Ok((_, false)) => PullEnd::Empty,
            Err(broken) => PullEnd::Broken(broken.0),
        }
    }

    #[inline]
    fn finish<I: Intake<BlkifToken, Buffer>>(
        &mut self,
        lane: &mut L,
        done: FinishedRequest<BlkifToken, Buffer>,
        into: &mut I,
    ) {
        if let Some(buffer) = done.buffer {
            lane.pool().release(buffer);
        }
        self.ended(done.token, done.outcome, into);
    }

    fn woken<I: Intake<BlkifToken, Buffer>>(
        &mut self,
        lane: &mut L,
        into: &mut I,
        running: bool,
    ) -> Result<(), &'static str> {
        self.settle(lane, into, running).map_err(|broken| broken.0)?;
        if running && self.sleeping && self.may_take() {
            self.catch_up(lane, into).map_err(|broken| broken.0)?;
        }
        self.now = coarse_milliseconds();
        self.tend();
        Ok(())
    }

    fn blocked(&self) -> usize {
        usize::from(self.barrier.is_some())
    }

    #[inline]
    fn publish(&mut self) -> PublishResult {
        if !self.ending.is_empty() {
            self.settle_pages();
        }
        if self.unpublished == 0 {
            return PublishResult::Nothing;
        }
        self.unpublished = 0;
        let notify = match &mut self.journal {
            None => self.ring.publish(),
            Some(journal) => journal.publish(self.ring.position().rsp_prod, || self.ring.publish()),
        };
        if !self.may_take() {
            self.published_at_barrier();
        }
        if self.pages.needs_tending() {
            self.tend();
        }
        notify
    }

    fn notify(&mut self) {
        self.counters.events_sent += 1;
        self.channel.notify();
    }

    fn arm(&mut self) -> ArmResult {
        let armed = if self.may_take() {
            self.ask_for_event()
        } else {
            // What lies in the ring, and what comes, waits for a barrier's end; then the waker rings. No event is of use before.
            ArmResult::Sleepable
        };
        self.sleeping = armed == ArmResult::Sleepable;
        armed
    }

    fn disarm(&mut self) {
        self.sleeping = false;
        self.masked = true;
        self.counters.events_taken += 1;
        self.channel.take();
    }

    fn position(&self) -> RingPosition {
        self.ring.position()
    }
}

impl<L> BlkifQueue<L> {
    /// Responses were published while a barrier is on.
    #[cold]
    fn published_at_barrier(&mut self) {
        if std::mem::take(&mut self.barrier_answered)
            && let Some(gate) = &mut self.gate
        {
            gate.end();
        }
        if self.requests.in_use() == usize::from(self.barrier.is_some()) {
            // It reports that nothing is in flight where it can also go on: when it is woken.
            self.waker.wake();
        }
    }
}

impl<L> std::fmt::Debug for BlkifQueue<L> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BlkifQueue").field("ring", &self.ring).finish_non_exhaustive()
    }
}
