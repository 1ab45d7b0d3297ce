//! Between a worker's plugs and the channel of a disk that may stop or try again: remembers what each request asks while the
//! channel has it, parks or repeats what failed, and holds back what comes while the disk is stopped.
//!
//! Disks whose errors are only reported have none of this. A merged request is never parked: it fails, so that the plug offers its
//! members one by one, and these are. So whoever cancels a parked request, or leaves with it, has just that one.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use mqblk_core::{ByteLen, ByteOffset, DiskChannel, Limits, Op, Outcome, Tag};
use mqblk_uring::UringContext;

use super::health::DiskHealth;
use super::policy::{Fate, is_lost, pause};
use crate::plug::MERGED_SLOT;
use crate::runner::{AnyCompletion, AnyRequest, Buffer};

/// Merged requests that failed, whose members are remembered to be as old as they were. Bounds what members that never come (they
/// were cancelled) leave behind.
const SPLITS: usize = 64;

/// The channel, and what its worker asks of the guard. A disk whose errors are only reported gets its channel back as it is.
pub(crate) fn guarded(
    channel: Box<dyn DiskChannel<UringContext>>,
    health: &Arc<DiskHealth>,
    limits: &Limits,
) -> (Box<dyn DiskChannel<UringContext>>, Option<SharedGuard>) {
    if health.policy().always_reports() {
        return (channel, None);
    }
    let guard = Guard {
        health: Arc::clone(health),
        // Direct I/O pins the guest's memory; of what does not, only what has no cache at all is as durable.
        cached: limits.volatile_cache && !limits.pins_memory,
        inside: Vec::new(),
        free: Vec::new(),
        arrivals: 0,
        parked: Vec::new(),
        waiting: Vec::new(),
        again: Vec::new(),
        splits: Vec::new(),
        leaving: Vec::new(),
    };
    let guard = Rc::new(RefCell::new(guard));
    (Box::new(GuardedChannel { inner: channel, guard: Rc::clone(&guard) }), Some(guard))
}

/// A guard, as its channel and its worker share it.
pub(crate) type SharedGuard = Rc<RefCell<Guard>>;

/// A request that the channel has.
#[derive(Clone, Copy, Debug)]
struct Inside {
    /// Its queue's tag.
    tag: Tag,
    op: Op,
    start: ByteOffset,
    len: ByteLen,
    /// Its place in the order of arrival; 0: nothing is here.
    arrival: u64,
    /// When it failed first, and how often it was tried again.
    failed: Option<Instant>,
    tries: u32,
    /// It was cancelled: however it ends, it is answered.
    cancelled: bool,
}

/// A request that the channel does not have.
#[derive(Debug)]
struct Outside {
    request: AnyRequest,
    arrival: u64,
    failed: Option<Instant>,
    tries: u32,
    /// How it failed, if it was tried.
    outcome: Option<Outcome>,
    /// Not to be tried again, whatever happens: see [`is_lost`].
    lost: bool,
    /// When it is tried again.
    due: Option<Instant>,
}

impl Outside {
    fn end(self, outcome: Outcome) -> AnyCompletion {
        AnyCompletion { outcome, tag: self.request.tag, buffer: self.request.buffer }
    }
}

/// A merged request that failed: its members come next.
#[derive(Debug)]
struct Split {
    op: Op,
    start: u64,
    end: u64,
    left: u64,
    arrival: u64,
}

/// What a worker's guard of a disk knows.
pub(crate) struct Guard {
    pub(crate) health: Arc<DiskHealth>,
    /// The storage goes through the host's page cache.
    cached: bool,
    /// By the tag that the channel sees.
    inside: Vec<Inside>,
    free: Vec<u32>,
    arrivals: u64,
    /// Waits for `resume`.
    parked: Vec<Outside>,
    /// Waits to be tried again by the clock.
    waiting: Vec<Outside>,
    /// Offered before all others, the oldest last.
    again: Vec<Outside>,
    splits: Vec<Split>,
    /// Slots of queues that leave: what fails of theirs is answered.
    leaving: Vec<u16>,
}

/// A channel with its guard.
struct GuardedChannel {
    inner: Box<dyn DiskChannel<UringContext>>,
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
        let offers_again = !guard.again.is_empty() && !guard.holds_back();
        if offers_again && !guard.offer_again(self.inner.as_mut(), context, finished) {
            return 0;
        }
        // What was tried again may have stopped the disk.
        if guard.holds_back() {
            let taken = batch.len();
            batch.drain(..).for_each(|request| guard.hold_back(request, finished));
            return taken;
        }
        for request in &mut *batch {
            let arrival = guard.arrival(request);
            request.tag = guard.enter(request, arrival, None, 0);
        }
        let before = finished.len();
        let taken = self.inner.submit(context, batch, finished);
        for request in batch {
            request.tag = guard.leave(request.tag).tag;
        }
        guard.judge(before, finished);
        taken
    }

    fn reap(&mut self, context: &mut UringContext, finished: &mut Vec<AnyCompletion>) -> usize {
        let guard = &mut *self.guard.borrow_mut();
        let before = finished.len();
        self.inner.reap(context, finished);
        guard.judge(before, finished);
        if !guard.waiting.is_empty() {
            guard.wake(finished);
        }
        if !guard.again.is_empty() {
            guard.offer_again(self.inner.as_mut(), context, finished);
        }
        finished.len() - before
    }

    fn cancel(&mut self, context: &mut UringContext, tags: &[Tag], finished: &mut Vec<AnyCompletion>) {
        let guard = &mut *self.guard.borrow_mut();
        let chosen = |tag: Tag| tags.binary_search(&tag).is_ok();
        guard.abort(chosen, finished);
        let mut own = Vec::new();
        for (index, inside) in (0..).zip(&mut guard.inside) {
            if inside.arrival > 0 && chosen(inside.tag) {
                inside.cancelled = true;
                own.push(own_tag(index));
            }
        }
        if own.is_empty() {
            return;
        }
        let before = finished.len();
        self.inner.cancel(context, &own, finished);
        guard.judge(before, finished);
    }

    /// Those that are parked wait for no storage.
    fn outstanding(&self) -> u32 {
        let guard = self.guard.borrow();
        self.inner.outstanding() + (guard.waiting.len() + guard.again.len()) as u32
    }

    fn deadline(&self) -> Option<Instant> {
        let due = self.guard.borrow().waiting.iter().filter_map(|outside| outside.due).min();
        [due, self.inner.deadline()].into_iter().flatten().min()
    }

    fn close(&mut self, context: &mut UringContext) {
        debug_assert!(self.guard.borrow().parked.is_empty(), "a channel is drained before it is closed");
        self.inner.close(context);
    }
}

const fn own_tag(index: u32) -> Tag {
    Tag::new((index >> 16) as u16, index as u16)
}

fn own_index(tag: Tag) -> usize {
    usize::from(tag.queue()) << 16 | usize::from(tag.index())
}

impl Guard {
    /// The place of a request in the order of arrival. Members of a merged request that failed are as old as that was.
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

    #[cold]
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

    /// Notes a request that the channel is offered; its tag from here on.
    #[inline]
    fn enter(&mut self, request: &AnyRequest, arrival: u64, failed: Option<Instant>, tries: u32) -> Tag {
        let AnyRequest { tag, op, start, len, .. } = *request;
        let inside = Inside { tag, op, start, len, arrival, failed, tries, cancelled: false };
        match self.free.pop() {
            Some(index) => {
                self.inside[index as usize] = inside;
                own_tag(index)
            }
            None => {
                self.inside.push(inside);
                // So that giving it back does not allocate.
                self.free.reserve(self.inside.len());
                own_tag(self.inside.len() as u32 - 1)
            }
        }
    }

    /// The channel has it no more.
    #[inline]
    fn leave(&mut self, tag: Tag) -> Inside {
        let index = own_index(tag);
        self.free.push(index as u32);
        let inside = self.inside[index];
        self.inside[index].arrival = 0;
        inside
    }

    /// Gives what the channel ended, from index `from` on, its own tag again, and takes out what is not to be answered.
    #[inline]
    fn judge(&mut self, from: usize, finished: &mut Vec<AnyCompletion>) {
        let mut at = from;
        while let Some(done) = finished.get_mut(at) {
            let inside = self.leave(done.tag);
            done.tag = inside.tag;
            let fate = if done.outcome.is_done() { Fate::Report } else { self.fate(&inside, done.outcome) };
            if fate == Fate::Report {
                at += 1;
            } else {
                // The last one takes its place and is looked at next.
                let done = finished.swap_remove(at);
                self.failed(inside, done, fate);
            }
        }
    }

    #[cold]
    fn fate(&mut self, inside: &Inside, outcome: Outcome) -> Fate {
        let fate = self.health.policy().judge(inside.op, outcome, self.cached);
        if fate == Fate::Report || inside.cancelled {
            return Fate::Report;
        }
        if inside.tag.queue() == MERGED_SLOT {
            self.split(inside.op, inside.start, inside.len, inside.arrival);
            return Fate::Report;
        }
        match fate {
            _ if self.leaving.contains(&inside.tag.queue()) => Fate::Report,
            Fate::Retry(time) if inside.failed.is_some_and(|failed| failed.elapsed() >= time) => Fate::Report,
            fate => fate,
        }
    }

    #[cold]
    fn failed(&mut self, inside: Inside, done: AnyCompletion, fate: Fate) {
        let AnyCompletion { outcome, tag, buffer } = done;
        let Inside { op, start, len, arrival, tries, .. } = inside;
        let request = AnyRequest { op, start, len, tag, buffer };
        let lost = is_lost(op, outcome, self.cached);
        let mut outside =
            Outside { request, arrival, failed: inside.failed, tries, outcome: Some(outcome), lost, due: None };
        match fate {
            Fate::Retry(time) => {
                let now = Instant::now();
                let failed = *outside.failed.get_or_insert(now);
                outside.due = Some((now + pause(tries)).min(failed + time));
                outside.tries = tries.saturating_add(1);
                self.health.retried(outcome, op, start);
                self.waiting.push(outside);
            }
            _ => {
                self.health.stop(outcome, op, start);
                self.park(outside);
            }
        }
    }

    fn park(&mut self, outside: Outside) {
        self.health.parked(1);
        self.parked.push(outside);
    }

    /// The disk is stopped: parks a request, unless its queue leaves.
    fn park_or_end(&mut self, outside: Outside, finished: &mut Vec<AnyCompletion>) {
        if self.leaving.contains(&outside.request.tag.queue()) {
            let outcome = outside.outcome.unwrap_or_else(|| self.reason());
            finished.push(outside.end(outcome));
        } else {
            self.park(outside);
        }
    }

    /// A merged request is to be taken apart.
    fn split(&mut self, op: Op, start: ByteOffset, len: ByteLen, arrival: u64) {
        if self.splits.len() >= SPLITS {
            self.splits.remove(0);
        }
        self.splits.push(Split { op, start: start.0, end: start.0 + len.0, left: len.0, arrival });
    }

    /// Whether what comes now has to wait: the disk is stopped, or was, and what was parked then has not been let go.
    fn holds_back(&self) -> bool {
        self.health.is_stopped() || !self.parked.is_empty()
    }

    /// A request comes while the disk is stopped.
    #[cold]
    fn hold_back(&mut self, request: AnyRequest, finished: &mut Vec<AnyCompletion>) {
        let arrival = self.arrival(&request);
        let outside = Outside { arrival, failed: None, tries: 0, outcome: None, lost: false, due: None, request };
        if outside.request.tag.queue() == MERGED_SLOT {
            self.split(outside.request.op, outside.request.start, outside.request.len, arrival);
            let outcome = self.reason();
            finished.push(outside.end(outcome));
        } else {
            self.park_or_end(outside, finished);
        }
    }

    /// How requests fail that were not tried because of the stop.
    fn reason(&self) -> Outcome {
        let first = self.parked.iter().find_map(|outside| outside.outcome);
        self.health.stop_outcome().or(first).unwrap_or(Outcome::Aborted)
    }

    /// Has those tried again whose time has come.
    #[cold]
    fn wake(&mut self, finished: &mut Vec<AnyCompletion>) {
        let now = Instant::now();
        let due = self.waiting.extract_if(.., |outside| outside.due.is_some_and(|due| due <= now));
        let due: Vec<Outside> = due.collect();
        if self.health.is_stopped() {
            due.into_iter().for_each(|outside| self.park_or_end(outside, finished));
        } else {
            self.offer_first(due);
        }
    }

    /// Puts requests before those that are to be offered.
    fn offer_first(&mut self, requests: Vec<Outside>) {
        if !requests.is_empty() {
            self.again.extend(requests);
            self.again.sort_by_key(|outside| std::cmp::Reverse(outside.arrival));
        }
    }

    /// Offers what is to be done again. Whether the channel took all of it.
    #[cold]
    fn offer_again(
        &mut self,
        channel: &mut dyn DiskChannel<UringContext>,
        context: &mut UringContext,
        finished: &mut Vec<AnyCompletion>,
    ) -> bool {
        // One by one: the first that stops the disk again keeps the others from being tried.
        let mut batch = Vec::with_capacity(1);
        while let Some(outside) = self.again.pop() {
            if self.health.is_stopped() {
                self.park_or_end(outside, finished);
                continue;
            }
            let Outside { request, arrival, failed, tries, outcome, lost, due } = outside;
            let (tag, before) = (request.tag, finished.len());
            let own = self.enter(&request, arrival, failed, tries);
            batch.push(AnyRequest { tag: own, ..request });
            channel.submit(context, &mut batch, finished);
            if let Some(request) = batch.pop() {
                self.leave(own);
                let request = AnyRequest { tag, ..request };
                self.again.push(Outside { request, arrival, failed, tries, outcome, lost, due });
                self.judge(before, finished);
                return false;
            }
            self.judge(before, finished);
        }
        true
    }

    /// Ends chosen requests that the channel does not have.
    fn abort(&mut self, chosen: impl Fn(Tag) -> bool, finished: &mut Vec<AnyCompletion>) {
        let chosen = |outside: &mut Outside| chosen(outside.request.tag);
        let before = finished.len();
        finished.extend(self.parked.extract_if(.., chosen).map(|outside| outside.end(Outcome::Aborted)));
        self.health.unparked(finished.len() - before);
        finished.extend(self.waiting.extract_if(.., chosen).map(|outside| outside.end(Outcome::Aborted)));
        finished.extend(self.again.extract_if(.., chosen).map(|outside| outside.end(Outcome::Aborted)));
    }

    /// The disk goes on: parked requests are done again in the order of their arrival, or with `report` all fail, those that were
    /// never tried with that outcome.
    pub(crate) fn resume(&mut self, report: Option<Outcome>, finished: &mut Vec<AnyCompletion>) {
        let parked = std::mem::take(&mut self.parked);
        self.health.unparked(parked.len());
        let mut again = Vec::new();
        for outside in parked {
            match (report, outside.outcome) {
                (Some(untried), outcome) => finished.push(outside.end(outcome.unwrap_or(untried))),
                (None, Some(outcome)) if outside.lost => finished.push(outside.end(outcome)),
                (None, _) => again.push(Outside { failed: None, tries: 0, due: None, ..outside }),
            }
        }
        self.offer_first(again);
    }

    /// A queue leaves: what fails of its requests is answered from here on. What waits here is
    /// answered: as it failed, or as what stopped the disk did.
    pub(crate) fn begin_leave(&mut self, slot: u16, finished: &mut Vec<AnyCompletion>) {
        if !self.leaving.contains(&slot) {
            self.leaving.push(slot);
        }
        let untried = self.reason();
        let mut taken: Vec<Outside> = self.parked.extract_if(.., |one| one.request.tag.queue() == slot).collect();
        self.health.unparked(taken.len());
        taken.extend(self.waiting.extract_if(.., |one| one.request.tag.queue() == slot));
        finished.extend(taken.into_iter().map(|outside| {
            let outcome = outside.outcome.unwrap_or(untried);
            outside.end(outcome)
        }));
    }

    /// It has left: the slot is another one's.
    pub(crate) fn end_leave(&mut self, slot: u16) {
        self.leaving.retain(|leaving| *leaving != slot);
    }

    /// The requests of a queue that are parked, one tag for each part.
    pub(crate) fn parked_of(&self, slot: u16) -> impl Iterator<Item = Tag> {
        self.parked.iter().map(|outside| outside.request.tag).filter(move |tag| tag.queue() == slot)
    }

    /// Takes parked requests out, to be answered by nobody here. Their buffers.
    pub(crate) fn drop_parked(&mut self, chosen: impl Fn(Tag) -> bool) -> Vec<(Tag, Option<Buffer>)> {
        let taken: Vec<Outside> = self.parked.extract_if(.., |outside| chosen(outside.request.tag)).collect();
        self.health.unparked(taken.len());
        taken.into_iter().map(|outside| (outside.request.tag, outside.request.buffer)).collect()
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.health.unparked(self.parked.len());
    }
}
