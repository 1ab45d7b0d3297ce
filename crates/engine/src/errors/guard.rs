//! The guard stands between a worker's plugs and the channel of a disk that may stop or retry. It tracks each request
//! at the channel, parks or repeats those that failed, and holds back new ones while the disk is stopped.
//!
//! Disks whose errors are only reported have no guard. A merged request is never parked: it fails, so that the plug
//! splits it, and its members are parked one by one. So a parked request can be cancelled or dropped without others.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use mqblk_core::{ByteLen, ByteOffset, DiskChannel, Limits, Op, Outcome, Tag};
use mqblk_uring::UringContext;

use super::health::DiskHealth;
use super::policy::{Disposition, is_lost, retry_delay};
use crate::request::{AnyCompletion, AnyRequest, Buffer, MERGED_SLOT};
use crate::slices::SlicedChannel;

/// Most failed merged requests whose members keep the arrival number. Bounds the entries of members that never arrive
/// because they were cancelled.
const MAX_SPLITS: usize = 64;

/// Wraps a channel in a guard and returns both. Returns the channel unchanged for a disk whose errors are only
/// reported.
pub(crate) fn guarded(
    channel: SlicedChannel,
    health: &Arc<DiskHealth>,
    limits: &Limits,
) -> (EngineChannel, Option<SharedGuard>) {
    if health.policy().always_reports() {
        return (EngineChannel::Plain(channel), None);
    }
    let guard = Guard {
        health: Arc::clone(health),
        // Direct I/O bypasses the page cache, and pins the guest's memory. Storage without a volatile cache loses
        // nothing.
        cached: limits.volatile_cache && !limits.pins_memory,
        submitted: Vec::new(),
        free: Vec::new(),
        arrivals: 0,
        parked: Vec::new(),
        waiting: Vec::new(),
        repeats: Vec::new(),
        splits: Vec::new(),
        leaving: Vec::new(),
    };
    let guard = Rc::new(RefCell::new(guard));
    (EngineChannel::Guarded(GuardedChannel { inner: channel, guard: Rc::clone(&guard) }), Some(guard))
}

/// A guard, shared by its channel and its worker.
pub(crate) type SharedGuard = Rc<RefCell<Guard>>;

/// A request at the channel.
#[derive(Clone, Copy, Debug)]
struct SubmittedRequest {
    /// Its queue's tag.
    tag: Tag,
    op: Op,
    start: ByteOffset,
    len: ByteLen,
    /// Its arrival number; 0: the entry is free.
    arrival: u64,
    /// Time of its first failure, and the number of its repetitions.
    failed: Option<Instant>,
    tries: u32,
    /// True if it was cancelled: it is completed with any outcome.
    cancelled: bool,
}

/// A request that is held back from the channel.
#[derive(Debug)]
struct HeldRequest {
    request: AnyRequest,
    arrival: u64,
    failed: Option<Instant>,
    tries: u32,
    /// The failed outcome, if it was tried.
    outcome: Option<Outcome>,
    /// True if it must not be repeated: see [`is_lost`].
    lost: bool,
    /// Time of its next repetition.
    due: Option<Instant>,
}

impl HeldRequest {
    fn complete(self, outcome: Outcome) -> AnyCompletion {
        AnyCompletion { outcome, tag: self.request.tag, buffer: self.request.buffer }
    }
}

/// A merged request that failed: its members follow.
#[derive(Debug)]
struct Split {
    op: Op,
    start: u64,
    end: u64,
    left: u64,
    arrival: u64,
}

/// The state of a worker's guard of a disk.
pub(crate) struct Guard {
    pub(crate) health: Arc<DiskHealth>,
    /// True if the storage goes through the host's page cache.
    cached: bool,
    /// Requests at the channel, by the channel's tag.
    submitted: Vec<SubmittedRequest>,
    free: Vec<u32>,
    arrivals: u64,
    /// Requests that wait for `resume`.
    parked: Vec<HeldRequest>,
    /// Requests that wait for their next repetition.
    waiting: Vec<HeldRequest>,
    /// Requests to be submitted before all others, the oldest last.
    repeats: Vec<HeldRequest>,
    splits: Vec<Split>,
    /// Slots of draining queues: their requests are completed even if they fail.
    leaving: Vec<u16>,
}

/// A channel with its guard.
pub(crate) struct GuardedChannel {
    inner: SlicedChannel,
    guard: SharedGuard,
}

impl DiskChannel<UringContext> for GuardedChannel {
    fn submit(
        &mut self,
        context: &mut UringContext,
        batch: &mut Vec<AnyRequest>,
        finished: &mut Vec<AnyCompletion>,
    ) -> usize {
        let guard = &mut *self.guard.borrow_mut();
        let must_repeat = !guard.repeats.is_empty() && !guard.is_holding();
        if must_repeat && !guard.submit_repeats(&mut self.inner, context, finished) {
            return 0;
        }
        // A repeated request may have stopped the disk.
        if guard.is_holding() {
            let taken = batch.len();
            batch.drain(..).for_each(|request| guard.hold(request, finished));
            return taken;
        }
        for request in &mut *batch {
            let arrival = guard.arrival(request);
            request.tag = guard.track(request, arrival, None, 0);
        }
        let before = finished.len();
        let taken = self.inner.submit(context, batch, finished);
        for request in batch {
            request.tag = guard.untrack(request.tag).tag;
        }
        guard.filter_completions(before, finished);
        taken
    }

    fn reap(&mut self, context: &mut UringContext, finished: &mut Vec<AnyCompletion>) -> usize {
        let guard = &mut *self.guard.borrow_mut();
        let before = finished.len();
        self.inner.reap(context, finished);
        guard.filter_completions(before, finished);
        if !guard.waiting.is_empty() {
            guard.repeat_due(finished);
        }
        if !guard.repeats.is_empty() {
            guard.submit_repeats(&mut self.inner, context, finished);
        }
        finished.len() - before
    }

    fn cancel(&mut self, context: &mut UringContext, tags: &[Tag], finished: &mut Vec<AnyCompletion>) {
        let guard = &mut *self.guard.borrow_mut();
        let chosen = |tag: Tag| tags.binary_search(&tag).is_ok();
        guard.abort(chosen, finished);
        let mut channel_tags = Vec::new();
        for (index, submitted) in (0..).zip(&mut guard.submitted) {
            if submitted.arrival > 0 && chosen(submitted.tag) {
                submitted.cancelled = true;
                channel_tags.push(own_tag(index));
            }
        }
        if channel_tags.is_empty() {
            return;
        }
        let before = finished.len();
        self.inner.cancel(context, &channel_tags, finished);
        guard.filter_completions(before, finished);
    }

    /// Returns the number of requests that wait for storage, without parked ones.
    fn outstanding(&self) -> u32 {
        let guard = self.guard.borrow();
        self.inner.outstanding() + (guard.waiting.len() + guard.repeats.len()) as u32
    }

    fn deadline(&self) -> Option<Instant> {
        let due = self.guard.borrow().waiting.iter().filter_map(|held| held.due).min();
        [due, self.inner.deadline()].into_iter().flatten().min()
    }

    fn close(&mut self, context: &mut UringContext) {
        debug_assert!(self.guard.borrow().parked.is_empty(), "a channel is drained before it is closed");
        self.inner.close(context);
    }
}

/// A channel as the engine uses it. An enum: dynamic calls would cost about ten instructions each.
#[repr(u8)] // a separate byte for the variant
pub(crate) enum EngineChannel {
    /// Of a disk whose errors are only reported.
    Plain(SlicedChannel),
    /// Of a disk that may stop or retry.
    Guarded(GuardedChannel),
}

impl EngineChannel {
    /// Returns the channel below the guard.
    pub(crate) fn sliced(&mut self) -> &mut SlicedChannel {
        match self {
            EngineChannel::Plain(channel) => channel,
            EngineChannel::Guarded(channel) => &mut channel.inner,
        }
    }
}

impl DiskChannel<UringContext> for EngineChannel {
    #[inline]
    fn submit(
        &mut self,
        context: &mut UringContext,
        batch: &mut Vec<AnyRequest>,
        finished: &mut Vec<AnyCompletion>,
    ) -> usize {
        match self {
            EngineChannel::Plain(channel) => channel.submit(context, batch, finished),
            EngineChannel::Guarded(channel) => channel.submit(context, batch, finished),
        }
    }

    #[inline]
    fn reap(&mut self, context: &mut UringContext, finished: &mut Vec<AnyCompletion>) -> usize {
        match self {
            EngineChannel::Plain(channel) => channel.reap(context, finished),
            EngineChannel::Guarded(channel) => channel.reap(context, finished),
        }
    }

    fn cancel(&mut self, context: &mut UringContext, tags: &[Tag], finished: &mut Vec<AnyCompletion>) {
        match self {
            EngineChannel::Plain(channel) => channel.cancel(context, tags, finished),
            EngineChannel::Guarded(channel) => channel.cancel(context, tags, finished),
        }
    }

    #[inline]
    fn outstanding(&self) -> u32 {
        match self {
            EngineChannel::Plain(channel) => channel.outstanding(),
            EngineChannel::Guarded(channel) => channel.outstanding(),
        }
    }

    fn deadline(&self) -> Option<Instant> {
        match self {
            EngineChannel::Plain(channel) => channel.deadline(),
            EngineChannel::Guarded(channel) => channel.deadline(),
        }
    }

    fn close(&mut self, context: &mut UringContext) {
        match self {
            EngineChannel::Plain(channel) => channel.close(context),
            EngineChannel::Guarded(channel) => channel.close(context),
        }
    }
}

const fn own_tag(index: u32) -> Tag {
    Tag::new((index >> 16) as u16, index as u16)
}

fn own_index(tag: Tag) -> usize {
    usize::from(tag.queue()) << 16 | usize::from(tag.index())
}

impl Guard {
    /// Returns a request's arrival number. Members of a failed merged request have the number of that request.
    #[inline]
    fn arrival(&mut self, request: &AnyRequest) -> u64 {
        if !self.splits.is_empty()
            && let Some(arrival) = self.arrival_of_member(request)
        {
            return arrival;
        }
        self.arrivals += 1;
        self.arrivals
    }

    fn arrival_of_member(&mut self, request: &AnyRequest) -> Option<u64> {
        let (start, len) = (request.start.0, request.len.0);
        let within = |split: &Split| split.op == request.op && split.start <= start && start + len <= split.end;
        let at = self.splits.iter().position(within)?;
        let split = &mut self.splits[at];
        split.left = split.left.saturating_sub(len);
        let arrival = split.arrival;
        if split.left == 0 {
            self.splits.remove(at);
        }
        Some(arrival)
    }

    /// Tracks a request that is offered to the channel. Returns the channel's tag.
    #[inline]
    fn track(&mut self, request: &AnyRequest, arrival: u64, failed: Option<Instant>, tries: u32) -> Tag {
        let AnyRequest { tag, op, start, len, .. } = *request;
        let submitted = SubmittedRequest { tag, op, start, len, arrival, failed, tries, cancelled: false };
        match self.free.pop() {
            Some(index) => {
                self.submitted[index as usize] = submitted;
                own_tag(index)
            }
            None => {
                self.submitted.push(submitted);
                // So that `untrack` does not allocate.
                self.free.reserve(self.submitted.len());
                own_tag(self.submitted.len() as u32 - 1)
            }
        }
    }

    /// Frees the entry of a request that the channel has completed or not taken.
    #[inline]
    fn untrack(&mut self, tag: Tag) -> SubmittedRequest {
        let index = own_index(tag);
        self.free.push(index as u32);
        let submitted = self.submitted[index];
        self.submitted[index].arrival = 0;
        submitted
    }

    /// Restores the tags of the channel's completions from index `from` on, and removes those of requests to park or
    /// repeat.
    #[inline]
    fn filter_completions(&mut self, from: usize, finished: &mut Vec<AnyCompletion>) {
        let mut at = from;
        while let Some(done) = finished.get_mut(at) {
            let submitted = self.untrack(done.tag);
            done.tag = submitted.tag;
            let disposition =
                if done.outcome.is_done() { Disposition::Report } else { self.disposition(&submitted, done.outcome) };
            if disposition == Disposition::Report {
                at += 1;
            } else {
                // The last one takes its index and is checked next.
                let done = finished.swap_remove(at);
                self.hold_failed(submitted, done, disposition);
            }
        }
    }

    fn disposition(&mut self, submitted: &SubmittedRequest, outcome: Outcome) -> Disposition {
        let disposition = self.health.policy().disposition(submitted.op, outcome, self.cached);
        if disposition == Disposition::Report || submitted.cancelled {
            return Disposition::Report;
        }
        if submitted.tag.queue() == MERGED_SLOT {
            self.split(submitted.op, submitted.start, submitted.len, submitted.arrival);
            return Disposition::Report;
        }
        match disposition {
            _ if self.leaving.contains(&submitted.tag.queue()) => Disposition::Report,
            Disposition::Retry(time) if submitted.failed.is_some_and(|failed| failed.elapsed() >= time) => {
                Disposition::Report
            }
            disposition => disposition,
        }
    }

    fn hold_failed(&mut self, submitted: SubmittedRequest, done: AnyCompletion, disposition: Disposition) {
        let AnyCompletion { outcome, tag, buffer } = done;
        let SubmittedRequest { op, start, len, arrival, tries, .. } = submitted;
        let request = AnyRequest { op, start, len, tag, buffer };
        let lost = is_lost(op, outcome, self.cached);
        let mut held =
            HeldRequest { request, arrival, failed: submitted.failed, tries, outcome: Some(outcome), lost, due: None };
        match disposition {
            Disposition::Retry(time) => {
                let now = Instant::now();
                let failed = *held.failed.get_or_insert(now);
                held.due = Some((now + retry_delay(tries)).min(failed + time));
                held.tries = tries.saturating_add(1);
                self.health.retried(outcome, op, start);
                self.waiting.push(held);
            }
            _ => {
                self.health.stop(outcome, op, start);
                self.park(held);
            }
        }
    }

    fn park(&mut self, held: HeldRequest) {
        self.health.parked(1);
        self.parked.push(held);
    }

    /// Parks a request of a stopped disk, or completes it if its queue is draining.
    fn park_or_complete(&mut self, held: HeldRequest, finished: &mut Vec<AnyCompletion>) {
        if self.leaving.contains(&held.request.tag.queue()) {
            let outcome = held.outcome.unwrap_or_else(|| self.untried_outcome());
            finished.push(held.complete(outcome));
        } else {
            self.park(held);
        }
    }

    /// Records a merged request that is about to be split.
    fn split(&mut self, op: Op, start: ByteOffset, len: ByteLen, arrival: u64) {
        if self.splits.len() >= MAX_SPLITS {
            self.splits.remove(0);
        }
        self.splits.push(Split { op, start: start.0, end: start.0 + len.0, left: len.0, arrival });
    }

    /// Returns true if new requests must wait: the disk is stopped, or its parked requests are not resumed yet.
    fn is_holding(&self) -> bool {
        self.health.is_stopped() || !self.parked.is_empty()
    }

    /// Holds back a request that comes while the disk is stopped.
    fn hold(&mut self, request: AnyRequest, finished: &mut Vec<AnyCompletion>) {
        let arrival = self.arrival(&request);
        let held = HeldRequest { arrival, failed: None, tries: 0, outcome: None, lost: false, due: None, request };
        if held.request.tag.queue() == MERGED_SLOT {
            self.split(held.request.op, held.request.start, held.request.len, arrival);
            let outcome = self.untried_outcome();
            finished.push(held.complete(outcome));
        } else {
            self.park_or_complete(held, finished);
        }
    }

    /// Returns the outcome of requests that were not tried because of the stop.
    fn untried_outcome(&self) -> Outcome {
        let first = self.parked.iter().find_map(|held| held.outcome);
        self.health.stop_outcome().or(first).unwrap_or(Outcome::Aborted)
    }

    /// Repeats the requests that are due.
    fn repeat_due(&mut self, finished: &mut Vec<AnyCompletion>) {
        let now = Instant::now();
        let due = self.waiting.extract_if(.., |held| held.due.is_some_and(|due| due <= now));
        let due: Vec<HeldRequest> = due.collect();
        if self.health.is_stopped() {
            due.into_iter().for_each(|held| self.park_or_complete(held, finished));
        } else {
            self.queue_repeats(due);
        }
    }

    /// Queues requests to be submitted before all others, in the order of their arrival.
    fn queue_repeats(&mut self, requests: Vec<HeldRequest>) {
        if !requests.is_empty() {
            self.repeats.extend(requests);
            self.repeats.sort_by_key(|held| std::cmp::Reverse(held.arrival));
        }
    }

    /// Submits the queued repetitions. Returns true if the channel took all of them.
    fn submit_repeats(
        &mut self,
        channel: &mut SlicedChannel,
        context: &mut UringContext,
        finished: &mut Vec<AnyCompletion>,
    ) -> bool {
        // One by one: if one stops the disk again, the others are not tried.
        let mut batch = Vec::with_capacity(1);
        while let Some(held) = self.repeats.pop() {
            if self.health.is_stopped() {
                self.park_or_complete(held, finished);
                continue;
            }
            let HeldRequest { request, arrival, failed, tries, outcome, lost, due } = held;
            let (tag, before) = (request.tag, finished.len());
            let channel_tag = self.track(&request, arrival, failed, tries);
            batch.push(AnyRequest { tag: channel_tag, ..request });
            channel.submit(context, &mut batch, finished);
            if let Some(request) = batch.pop() {
                self.untrack(channel_tag);
                let request = AnyRequest { tag, ..request };
                self.repeats.push(HeldRequest { request, arrival, failed, tries, outcome, lost, due });
                self.filter_completions(before, finished);
                return false;
            }
            self.filter_completions(before, finished);
        }
        true
    }

    /// Aborts the chosen requests among those held back.
    fn abort(&mut self, chosen: impl Fn(Tag) -> bool, finished: &mut Vec<AnyCompletion>) {
        let chosen = |held: &mut HeldRequest| chosen(held.request.tag);
        let before = finished.len();
        finished.extend(self.parked.extract_if(.., chosen).map(|held| held.complete(Outcome::Aborted)));
        self.health.unparked(finished.len() - before);
        finished.extend(self.waiting.extract_if(.., chosen).map(|held| held.complete(Outcome::Aborted)));
        finished.extend(self.repeats.extract_if(.., chosen).map(|held| held.complete(Outcome::Aborted)));
    }

    /// Resumes the disk: repeats parked requests in the order of their arrival. With `report` all of them fail;
    /// requests that were never tried fail with that outcome.
    pub(crate) fn resume(&mut self, report: Option<Outcome>, finished: &mut Vec<AnyCompletion>) {
        let parked = std::mem::take(&mut self.parked);
        self.health.unparked(parked.len());
        let mut again = Vec::new();
        for held in parked {
            match (report, held.outcome) {
                (Some(untried), outcome) => finished.push(held.complete(outcome.unwrap_or(untried))),
                (None, Some(outcome)) if held.lost => finished.push(held.complete(outcome)),
                (None, _) => again.push(HeldRequest { failed: None, tries: 0, due: None, ..held }),
            }
        }
        self.queue_repeats(again);
    }

    /// Completes a draining queue's parked and waiting requests: with their own error, or with the one that stopped the
    /// disk. Requests of it that fail later are completed.
    pub(crate) fn begin_leave(&mut self, slot: u16, finished: &mut Vec<AnyCompletion>) {
        if !self.leaving.contains(&slot) {
            self.leaving.push(slot);
        }
        let untried = self.untried_outcome();
        let mut taken: Vec<HeldRequest> = self.parked.extract_if(.., |one| one.request.tag.queue() == slot).collect();
        self.health.unparked(taken.len());
        taken.extend(self.waiting.extract_if(.., |one| one.request.tag.queue() == slot));
        finished.extend(taken.into_iter().map(|held| {
            let outcome = held.outcome.unwrap_or(untried);
            held.complete(outcome)
        }));
    }

    /// Ends [`begin_leave`](Self::begin_leave): the queue is detached, and its slot may be reused.
    pub(crate) fn end_leave(&mut self, slot: u16) {
        self.leaving.retain(|leaving| *leaving != slot);
    }

    /// Returns the tags of a queue's parked requests, one for each part.
    pub(crate) fn parked_of(&self, slot: u16) -> impl Iterator<Item = Tag> {
        self.parked.iter().map(|held| held.request.tag).filter(move |tag| tag.queue() == slot)
    }

    /// Removes chosen parked requests without completing them. Returns their tags and buffers.
    pub(crate) fn drop_parked(&mut self, chosen: impl Fn(Tag) -> bool) -> Vec<(Tag, Option<Buffer>)> {
        let taken: Vec<HeldRequest> = self.parked.extract_if(.., |held| chosen(held.request.tag)).collect();
        self.health.unparked(taken.len());
        taken.into_iter().map(|held| (held.request.tag, held.request.buffer)).collect()
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.health.unparked(self.parked.len());
    }
}
