//! One queue with its tag table, counters and poll window, behind one dynamic call per batch.

use std::any::Any;
use std::mem::discriminant;

use mqblk_core::{
    ArmResult, ByteLen, ByteOffset, Completion, DiskSlot, FinishedRequest, GuestQueue, Intake, LonePull, Op, Outcome,
    PublishResult, PullEnd, Request, Tag,
};
use mqblk_uring::UringContext;

use crate::clock::{Clock, Ticks};
use crate::coalesce::{CallCoalescer, CallDecision};
use crate::counters::{CountRequests, DiskCounters, OpClass, Polling, QueueCounters, QueueLatency, QueueStats};
use crate::options::Coalesce;
use crate::pace::Pace;
use crate::per_disk::PerDisk;
use crate::poll::{PollPolicy, PollState, WindowMode};
use crate::poll_list::IdleResult;
use crate::request::{AnyCompletion, AnyRequest, Buffer};
use crate::route::{Route, SubmitContext, ToDisks, ToOnlyDisk};
use crate::tags::{NO_TAG, TagTable, Timestamps};
use crate::wake_cost;
use crate::windows::TIMER_PERIOD;

/// A queue of any type, as its worker sees it.
pub(crate) trait AnyQueue: Any {
    /// Pulls one batch of requests of a queue of one disk.
    fn pull(&mut self, context: &mut UringContext, submit: &mut SubmitContext<ToOnlyDisk<'_>>) -> PullResult;
    /// Pulls one batch of requests.
    fn pull_for_any(&mut self, context: &mut UringContext, submit: &mut SubmitContext<ToDisks<'_>>) -> PullResult;
    /// Returns why the last pull found the ring broken.
    fn why_broken(&self) -> &'static str;
    /// Handles a wake of the queue.
    fn woken(
        &mut self,
        context: &mut UringContext,
        submit: &mut SubmitContext<ToDisks<'_>>,
        running: bool,
    ) -> Result<(), &'static str>;
    /// Records when requests are submitted to the storage: those of the queue in this slot, up to the first one of another queue. Returns how
    /// many.
    fn submitted(&mut self, slot: u16, requests: &[AnyRequest], now: Ticks) -> usize;
    /// Finishes completed requests, those of this queue up to the first one of another queue, and admits the next steps of multi-step commands.
    /// Returns how many. With `publish` also [publishes](Self::publish) them if they are all that were completed, and nothing was completed by
    /// that: in one call, because it is what most turns end with.
    fn complete(
        &mut self,
        context: &mut UringContext,
        completed: &mut [AnyCompletion],
        submit: &mut SubmitContext<ToDisks<'_>>,
        publish: Option<(&mut Clock, WindowMode)>,
    ) -> (usize, Option<AfterPublish>);
    /// Publishes what was finished, and calls the guest if it asked for that. Restarts the poll window. Reads the clock. `mode`: see
    /// [`poll_or_arm`](Self::poll_or_arm).
    fn publish(&mut self, finished: Ticks, clock: &mut Clock, mode: WindowMode) -> AfterPublish;
    /// Returns true if the last publish has disarmed the queue, which is to be polled again. Once.
    fn take_resumed(&mut self) -> bool;
    /// Returns when the deferred call is due, if there is one.
    fn call_due(&self) -> Option<Ticks>;
    /// Sends the deferred call if it is due. Otherwise returns when it will be.
    fn send_due_call(&mut self, now: Ticks) -> Option<Ticks>;
    /// After an idle turn: polls on while the window is open, else arms the queue and checks it again. `mode`: how the worker uses
    /// the windows of `auto`.
    fn poll_or_arm(&mut self, now: Ticks, mode: WindowMode) -> IdleResult;
    /// Handles a kick: disarms the queue, which is polled from here on.
    fn kicked(&mut self, now: Ticks);
    /// Changes how it is polled and how its calls are deferred. It is disarmed, and polled from here on. A deferred call is sent.
    fn set_polling(&mut self, poll: PollPolicy, coalesce: Coalesce, now: Ticks);
    /// Returns the number of requests in flight, including those that the queue has blocked.
    fn in_flight(&self) -> usize;
    /// Starts the counters of a disk that was opened in this slot.
    fn opened(&mut self, disk: DiskSlot);
    /// Returns true if requests to this disk are in flight.
    fn uses(&self, disk: DiskSlot) -> bool;
    /// Returns the queue's statistics. `mode`: how the worker uses the windows of `auto`.
    fn stats(&self, now: Ticks, mode: WindowMode) -> QueueStats;
    /// Calls `show` with the tag table's index, the disk and the timestamps of each request in flight.
    fn for_each_in_flight(&self, show: &mut dyn FnMut(u16, DiskSlot, Timestamps));
    /// Returns the tag table's indexes of the requests in flight to a disk.
    fn indexes_of_disk(&self, disk: DiskSlot) -> Vec<u16>;
    /// Returns the queue for access by its type.
    fn as_any(&mut self) -> &mut dyn Any;
    /// Returns the queue to be taken apart.
    fn into_any(self: Box<Self>) -> Box<dyn Any>;
}

/// What a pull resulted in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PullResult {
    /// No request.
    Nothing,
    /// Requests for the disk, or requests that the queue completed itself.
    Requests,
    /// Requests, and more are waiting.
    More,
    /// The ring is broken: [`why_broken`](AnyQueue::why_broken).
    Broken,
}

/// What a publish leaves to its worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AfterPublish {
    /// Nothing.
    Nothing,
    /// A call is [deferred](AnyQueue::call_due), or the queue [is to be polled again](AnyQueue::take_resumed).
    More,
}

/// A queue of a known type.
pub(crate) struct QueueRunner<Q: GuestQueue> {
    pub(crate) queue: Q,
    tags: TagTable<Q::Token>,
    counters: QueueCounters,
    latency: Box<QueueLatency>,
    /// Counters by disk, once the queue has had more than the first disk.
    per_disk: Option<Box<PerDisk>>,
    /// The queue has or had the first disk.
    has_first: bool,
    /// The last requests that are finished and whose latencies are not recorded yet; none of them: 0 times.
    ended: EndedRequests,
    /// Those before, that differ from it.
    ended_before: Vec<EndedRequests>,
    calls: CallCoalescer,
    poll: PollState,
    pace: Pace,
    /// Since when requests have been in flight; [`NOT_BUSY`] if none are.
    busy_since: Ticks,
    options: RunnerOptions,
    /// A publish has disarmed the queue, and its worker does not know yet that it is to be polled again.
    resumed: bool,
    /// Why the ring was found to be broken.
    why_broken: &'static str,
}

/// Not before any time.
const NOT_BUSY: Ticks = Ticks(u64::MAX);

/// How a queue is polled and its guest called.
#[derive(Clone, Copy)]
pub(crate) struct RunnerOptions {
    pub(crate) poll: PollPolicy,
    pub(crate) coalesce: Coalesce,
}

/// A queue and its counters, without a worker: no request is in flight, none waits to be published, and no call is deferred.
pub(crate) struct IdleQueue<Q> {
    pub(crate) queue: Q,
    counters: QueueCounters,
    latency: Box<QueueLatency>,
    per_disk: Option<Box<PerDisk>>,
    has_first: bool,
    options: RunnerOptions,
}

/// Finished requests of one operation, whatever its flags, with equal timestamps.
struct FinishedGroup {
    op: Op,
    stamps: Timestamps,
    times: u64,
    /// What they transferred in all.
    bytes: u64,
}

impl FinishedGroup {
    /// Adds requests of its operation and timestamps.
    #[inline]
    fn add(&mut self, times: u64, bytes: u64) {
        self.times += times;
        self.bytes += bytes;
    }
}

/// Requests of one class with equal timestamps: often all of a batch.
struct EndedRequests {
    class: OpClass,
    stamps: Timestamps,
    times: u64,
}

impl EndedRequests {
    const NONE: EndedRequests =
        EndedRequests { class: OpClass::Read, stamps: Timestamps { pulled: Ticks(0), submitted: Ticks(0) }, times: 0 };

    /// Records their latencies.
    #[inline]
    fn record(&self, latency: &mut QueueLatency, finished: Ticks, published: Ticks) {
        let parts = match self.class {
            OpClass::Read => &mut latency.reads,
            OpClass::Write => &mut latency.writes,
            OpClass::Other => &mut latency.others,
        };
        let Timestamps { pulled, submitted } = self.stamps;
        // Most are submitted at once. `stats` adds them to this histogram, with 0.
        if submitted > pulled {
            parts.queued.record(submitted.since(pulled), self.times);
        }
        parts.device.record(finished.since(submitted), self.times);
        parts.publish.record(published.since(finished), self.times);
        parts.total.record(published.since(pulled), self.times);
    }
}

/// Records the latencies of several, and removes them.
#[inline(never)] // a turn mostly ends requests of one kind
fn record_all(ended: &mut Vec<EndedRequests>, latency: &mut QueueLatency, finished: Ticks, published: Ticks) {
    ended.drain(..).for_each(|ended| ended.record(latency, finished, published));
}

impl<Q: GuestQueue<Context = UringContext> + 'static> QueueRunner<Q> {
    pub(crate) fn new(queue: Q, policy: PollPolicy, coalesce: Coalesce, now: Ticks) -> QueueRunner<Q> {
        let depth = queue.depth();
        QueueRunner {
            queue,
            tags: TagTable::new(depth),
            counters: QueueCounters::default(),
            latency: Box::default(),
            per_disk: None,
            has_first: false,
            ended: EndedRequests::NONE,
            ended_before: Vec::with_capacity(depth.into()),
            calls: CallCoalescer::new(coalesce),
            poll: PollState::new(policy, wake_cost::ns(), now),
            pace: Pace::new(),
            busy_since: NOT_BUSY,
            options: RunnerOptions { poll: policy, coalesce },
            resumed: false,
            why_broken: "",
        }
    }

    /// Returns the runner of a queue that has come from another worker, whose clock is not comparable.
    pub(crate) fn from_idle(idle: IdleQueue<Q>, now: Ticks) -> QueueRunner<Q> {
        let IdleQueue { queue, counters, latency, per_disk, has_first, options } = idle;
        let runner = QueueRunner::new(queue, options.poll, options.coalesce, now);
        let calls = CallCoalescer::resume(options.coalesce, counters.requests);
        QueueRunner { counters, latency, per_disk, has_first, calls, ..runner }
    }

    /// Returns the queue with its counters.
    pub(crate) fn into_idle(self) -> IdleQueue<Q> {
        debug_assert!(self.in_flight() == 0 && self.ended.times == 0, "the queue was drained");
        let poll_ns = self.counters.poll_ns + self.poll.empty_poll_ns();
        let counters = QueueCounters { poll_ns, ..self.counters };
        let QueueRunner { queue, latency, per_disk, has_first, options, .. } = self;
        IdleQueue { queue, counters, latency, per_disk, has_first, options }
    }
}

impl<Q: GuestQueue> QueueRunner<Q> {
    /// Returns how many parts of the request with this index have not completed.
    pub(crate) fn parts_left(&self, index: u16) -> Option<usize> {
        Some(self.tags.get(index)?.remaining.into())
    }

    /// Drops a part of a request that will not be completed. Returns the request's token with the last part.
    pub(crate) fn forget_part(&mut self, index: u16) -> Option<Q::Token> {
        self.tags.forget_part(index)
    }

    #[inline(always)] // it has two callers, each of which has its own kind of route
    fn pull_batch<R: Route>(&mut self, context: &mut UringContext, submit: &mut SubmitContext<R>) -> PullResult
    where
        Q: GuestQueue<Context = UringContext>,
    {
        if self.pace.holds(submit.now) {
            return PullResult::Nothing;
        }
        let pulled = if Q::SERVES_LONE {
            let (tags, counters) = (&mut self.tags, &mut self.counters);
            match self.queue.pull_lone(context, &mut QueueIntake { submit: &mut *submit, tags, counters }) {
                LonePull::Nothing => (0, PullResult::Nothing),
                LonePull::Admitted => {
                    self.took(1, false, submit.now);
                    return PullResult::Requests;
                }
                LonePull::Other => self.pull_several(context, submit),
            }
        } else {
            self.pull_any(context, submit)
        };
        let (taken, result) = pulled;
        if result == PullResult::Broken {
            return result;
        }
        if taken == 0 {
            self.counters.empty_turns += 1;
            self.pace.found_nothing();
            return PullResult::Nothing;
        }
        self.took(taken, result == PullResult::More, submit.now);
        result
    }

    /// Notes that a pull took requests, and whether `more` are waiting.
    #[inline(always)] // for a lone request, of which the numbers are known, and for several
    fn took(&mut self, requests: u64, more: bool, now: Ticks) {
        self.counters.turns += 1;
        if self.busy_since == NOT_BUSY {
            self.busy_since = now;
        }
        self.pace.took(requests, more, now);
        self.poll.active(true, now);
    }

    /// As [`pull_any`](Self::pull_any), in a function of its own: a lone request needs fewer registers.
    #[inline(never)]
    fn pull_several<R: Route>(&mut self, context: &mut UringContext, submit: &mut SubmitContext<R>) -> (u64, PullResult)
    where
        Q: GuestQueue<Context = UringContext>,
    {
        self.pull_any(context, submit)
    }

    /// Pulls a batch. Returns how many requests were taken.
    #[inline(always)] // of the two callers a queue type has one
    fn pull_any<R: Route>(&mut self, context: &mut UringContext, submit: &mut SubmitContext<R>) -> (u64, PullResult)
    where
        Q: GuestQueue<Context = UringContext>,
    {
        let before = self.tags.in_flight() as u64 + self.counters.answered_alone;
        let (tags, counters) = (&mut self.tags, &mut self.counters);
        let pulled = self.queue.pull(context, &mut QueueIntake { submit, tags, counters });
        let taken = self.tags.in_flight() as u64 + self.counters.answered_alone - before;
        match pulled {
            PullEnd::Broken(why) => {
                self.why_broken = why;
                (taken, PullResult::Broken)
            }
            PullEnd::Empty => (taken, PullResult::Requests),
            PullEnd::MoreWaiting => (taken, PullResult::More),
        }
    }

    /// Counts and finishes a request that completes alone: it is compared with no other. What it returns is to be noted, or recorded. `None`, and
    /// nothing is done, unless it has one part and has succeeded.
    #[inline(always)] // it has one caller
    fn finish_lone(
        &mut self,
        context: &mut UringContext,
        done: &mut AnyCompletion,
        submit: &mut SubmitContext<ToDisks<'_>>,
    ) -> Option<EndedRequests>
    where
        Q: GuestQueue<Context = UringContext>,
    {
        let outcome @ Outcome::Done(len) = done.outcome else { return None };
        let (token, op, stamps) = self.tags.end_single(done.tag.index())?;
        let class = self.counters.count(op, 1, len.0);
        let request = FinishedRequest { token, outcome, buffer: done.buffer.take() };
        let (tags, counters) = (&mut self.tags, &mut self.counters);
        self.queue.finish(context, request, &mut QueueIntake { submit, tags, counters });
        Some(EndedRequests { class, stamps, times: 1 })
    }

    /// As [`complete_any`](Self::complete_any), in a function of its own: one that completes alone needs fewer registers.
    #[inline(never)]
    fn complete_several(
        &mut self,
        context: &mut UringContext,
        completed: &mut [AnyCompletion],
        submit: &mut SubmitContext<ToDisks<'_>>,
        publish: Option<(&mut Clock, WindowMode)>,
    ) -> (usize, Option<AfterPublish>)
    where
        Q: GuestQueue<Context = UringContext> + 'static,
    {
        self.complete_any(context, completed, submit, publish)
    }

    /// As [`complete`](AnyQueue::complete), of any completions.
    #[inline(always)] // of the two callers a queue type has one
    fn complete_any(
        &mut self,
        context: &mut UringContext,
        completed: &mut [AnyCompletion],
        submit: &mut SubmitContext<ToDisks<'_>>,
        publish: Option<(&mut Clock, WindowMode)>,
    ) -> (usize, Option<AfterPublish>)
    where
        Q: GuestQueue<Context = UringContext> + 'static,
    {
        let count = self.finish(context, completed, submit);
        match publish {
            Some((clock, mode)) if count == completed.len() && !submit.route.channels.has_aside() => {
                let finished = clock.now();
                (count, Some(self.publish(finished, clock, mode)))
            }
            _ => (count, None),
        }
    }

    /// Finishes completed requests of any kind, those of this queue up to the first one of another queue. Returns how many.
    #[inline(always)] // it has one caller
    fn finish(
        &mut self,
        context: &mut UringContext,
        completed: &mut [AnyCompletion],
        submit: &mut SubmitContext<ToDisks<'_>>,
    ) -> usize
    where
        Q: GuestQueue<Context = UringContext>,
    {
        let slot = submit.slot;
        if self.per_disk.is_some() {
            let others = completed.iter().position(|done| done.tag.queue() != slot);
            self.count_by_disk(&completed[..others.unwrap_or(completed.len())]);
        }
        // In two passes, each of which has few values to keep: in one loop half of the instructions would move them to the stack and back.
        let count = self.account(slot, completed, &submit.route);
        for done in &mut completed[..count] {
            let Some(token) = self.tags.end(done.tag.index()) else { continue };
            let request = FinishedRequest { token, outcome: done.outcome, buffer: done.buffer.take() };
            let (tags, counters) = (&mut self.tags, &mut self.counters);
            self.queue.finish(context, request, &mut QueueIntake { submit: &mut *submit, tags, counters });
        }
        count
    }

    /// Counts the completed requests of the queue in this slot, up to the first one of another queue, and notes their latencies. Returns how
    /// many.
    #[inline]
    fn account(&mut self, slot: u16, completed: &mut [AnyCompletion], route: &ToDisks<'_>) -> usize {
        // Counted and noted as one while they have the same operation and timestamps: often all of a batch.
        let first = completed.first().and_then(|done| self.tags.kind(done.tag.index()));
        let (op, stamps) = first.unwrap_or((Op::Read, Timestamps::default()));
        let mut group = FinishedGroup { op, stamps, times: 0, bytes: 0 };
        let mut count = 0;
        // What is not in the group yet: values that need not be in memory.
        let (mut times, mut bytes) = (0, 0);
        while let Some(done) = completed.get_mut(count)
            && done.tag.queue() == slot
        {
            count += 1;
            match done.outcome {
                Outcome::Done(len) if self.tags.is_single(done.tag.index(), group.op, group.stamps) => {
                    times += 1;
                    bytes += len.0;
                }
                _ => {
                    group.add(std::mem::take(&mut times), std::mem::take(&mut bytes));
                    self.account_any(done, &mut group, route);
                }
            }
        }
        group.add(times, bytes);
        self.end_group(&group);
        count
    }

    /// Counts a completed request of any kind. One of several parts gets the outcome of all with the last part; the others get a tag that is
    /// never in use.
    #[inline(never)]
    fn account_any(&mut self, done: &mut AnyCompletion, group: &mut FinishedGroup, route: &ToDisks<'_>) {
        let index = done.tag.index();
        let Some((op, outcome, stamps)) = self.tags.complete_part(index, done.outcome) else {
            done.tag = Tag::new(done.tag.queue(), NO_TAG);
            return;
        };
        if group.stamps != stamps || discriminant(&group.op) != discriminant(&op) {
            self.end_group(group);
            *group = FinishedGroup { op, stamps, times: 0, bytes: 0 };
        }
        group.times += 1;
        match outcome {
            Outcome::Done(len) => group.bytes += len.0,
            failure => self.count_failed(index, op, failure, route),
        }
        done.outcome = outcome;
    }

    /// Counts finished requests of one operation, and notes their latencies.
    #[inline(always)] // else the group would travel through memory
    fn end_group(&mut self, group: &FinishedGroup) {
        let FinishedGroup { op, stamps, times, bytes } = *group;
        if times > 0 {
            let class = self.counters.count(op, times, bytes);
            self.note_ended(EndedRequests { class, stamps, times });
        }
    }

    /// Notes requests that have ended, until their latencies are recorded.
    #[inline(always)] // as `end_group`
    fn note_ended(&mut self, ended: EndedRequests) {
        if self.ended.times == 0 {
            self.ended = ended;
        } else if self.ended.stamps == ended.stamps && self.ended.class == ended.class {
            self.ended.times += ended.times;
        } else {
            self.ended_before.push(std::mem::replace(&mut self.ended, ended));
        }
    }

    /// Counts and logs a finished request that did not succeed.
    #[cold]
    fn count_failed(&mut self, index: u16, op: Op, failure: Outcome, route: &ToDisks<'_>) {
        self.counters.count_error(op);
        if let Some((disk, start)) = self.tags.place(index) {
            route.failed(disk, op, start, failure);
        }
    }

    #[inline]
    fn call(&mut self) {
        self.counters.calls += 1;
        self.queue.notify();
    }

    /// Calls now, or defers the call.
    #[cold]
    fn coalesce(&mut self, wanted: bool, now: Ticks) -> AfterPublish {
        match self.calls.published(wanted, self.counters.requests, self.tags.in_flight() > 0, now) {
            CallDecision::NoCall => {}
            CallDecision::Call => self.call(),
            CallDecision::Defer(_) => self.counters.calls_put_off += u64::from(wanted),
        }
        AfterPublish::More
    }

    /// Counts a run that is about to be finished, for a queue of several disks. Not part of [`finish`](AnyQueue::finish), where it would
    /// cost each request of a queue with one disk.
    #[inline(never)]
    fn count_by_disk(&mut self, run: &[AnyCompletion]) {
        let Some(per_disk) = &mut self.per_disk else { return };
        for (at, done) in run.iter().enumerate() {
            let index = done.tag.index();
            let Some(entry) = self.tags.get(index) else { continue };
            let mut outcome = done.outcome;
            if entry.parts > 1 {
                // It completes with its last part, and fails with any.
                let parts = || run[..=at].iter().filter(|part| part.tag == done.tag);
                if parts().count() < usize::from(entry.remaining) {
                    continue;
                }
                let failed = |outcome: &Outcome| !outcome.is_done();
                outcome = parts().map(|part| part.outcome).chain([entry.outcome]).find(failed).unwrap_or(outcome);
            }
            let transferred = match outcome {
                Outcome::Done(len) => Some(len),
                _ => None,
            };
            per_disk.finished(entry.disk, OpClass::of(entry.op), transferred, entry.stamps.pulled);
        }
    }

    /// As [`publish`](AnyQueue::publish). `lone`: a request that has ended and is not noted, of a queue of one disk.
    #[inline(always)] // few callers, each of which knows whether there is one
    fn publish_with(
        &mut self,
        lone: Option<EndedRequests>,
        finished: Ticks,
        clock: &mut Clock,
        mode: WindowMode,
    ) -> AfterPublish {
        self.poll.active(self.tags.in_flight() > 0, finished);
        if self.poll.should_resume(mode) {
            self.poll.resume(finished);
            self.queue.disarm();
            self.resumed = true;
        }
        let notify = self.queue.publish();
        if notify == PublishResult::Suppressed {
            self.counters.calls_suppressed += 1;
        }
        let mut after = if self.resumed { AfterPublish::More } else { AfterPublish::Nothing };
        if !self.calls.is_immediate() {
            after = self.coalesce(notify == PublishResult::Wanted, finished);
        } else if notify == PublishResult::Wanted {
            self.call();
        }
        let at = clock.read();
        self.record_latencies(lone, finished, at);
        if self.tags.in_flight() == 0 {
            self.counters.busy_ns += at.since(self.busy_since);
            self.busy_since = NOT_BUSY;
        }
        after
    }

    /// Records the latencies of the requests that were finished since the last publish, `lone` among them.
    #[inline(always)] // as `publish_with`
    fn record_latencies(&mut self, lone: Option<EndedRequests>, finished: Ticks, published: Ticks) {
        if let Some(lone) = lone {
            lone.record(&mut self.latency, finished, published);
            if self.ended.times > 0 {
                self.record_noted(finished, published);
            }
            return;
        }
        if self.ended.times > 0 {
            self.ended.record(&mut self.latency, finished, published);
            self.ended.times = 0;
            if !self.ended_before.is_empty() {
                record_all(&mut self.ended_before, &mut self.latency, finished, published);
            }
        }
        if let Some(per_disk) = &mut self.per_disk {
            per_disk.record_latencies(published);
        }
    }

    /// Records the latencies of what was noted before a lone request.
    #[cold]
    fn record_noted(&mut self, finished: Ticks, published: Ticks) {
        self.record_latencies(None, finished, published);
    }
}

/// The engine's side of one call to a queue.
struct QueueIntake<'a, R, T> {
    submit: &'a mut SubmitContext<R>,
    tags: &'a mut TagTable<T>,
    counters: &'a mut QueueCounters,
}

#[inline(always)] // else the token would travel through memory
fn take_tag<R, T>(
    submit: &SubmitContext<R>,
    tags: &mut TagTable<T>,
    token: T,
    what: (DiskSlot, Op, ByteOffset),
    parts: u16,
) -> Tag {
    let index = tags.take(token, what, parts, submit.now).expect("a queue checks room() before each request");
    Tag::new(submit.slot, index)
}

/// Admits a request that is refused. In a function of its own, so that the outcome of the check is not kept while others get their tags.
#[cold]
#[inline(never)]
fn refuse<R: Route, T>(
    submit: &mut SubmitContext<R>,
    tags: &mut TagTable<T>,
    token: T,
    what: (DiskSlot, Op, ByteOffset),
    outcome: Outcome,
    buffer: Option<Buffer>,
) {
    let tag = take_tag(submit, tags, token, what, 1);
    submit.route.refuse(Completion { outcome, tag, buffer });
}

impl<R: Route, T> Intake<T, Buffer> for QueueIntake<'_, R, T> {
    #[inline]
    fn room(&self) -> usize {
        self.tags.room()
    }

    #[inline(always)] // else the token would travel through memory
    fn admit(&mut self, token: T, disk: DiskSlot, op: Op, start: ByteOffset, len: ByteLen, buffer: Option<Buffer>) {
        match self.submit.route.check(disk, op, start, len) {
            Ok(at) => {
                let tag = take_tag(self.submit, self.tags, token, (disk, op, start), 1);
                self.submit.route.plug(at, Request { op, start, len, tag, buffer });
            }
            Err(outcome) => refuse(self.submit, self.tags, token, (disk, op, start), outcome, buffer),
        }
    }

    fn admit_parts(&mut self, token: T, disk: DiskSlot, op: Op, parts: &[(ByteOffset, ByteLen)]) {
        let bytes = parts.iter().map(|(_, len)| len.0).fold(0, u64::saturating_add);
        self.counters.other_bytes = self.counters.other_bytes.saturating_add(bytes);
        let mut checked = Err(Outcome::Done(ByteLen::ZERO));
        for &(start, len) in parts {
            checked = self.submit.route.check(disk, op, start, len);
            if checked.is_err() {
                break;
            }
        }
        let count = if checked.is_err() { 1 } else { parts.len() as u16 };
        let first = parts.first().map_or(ByteOffset(0), |(start, _)| *start);
        let tag = take_tag(self.submit, self.tags, token, (disk, op, first), count);
        match checked {
            Ok(at) => {
                for &(start, len) in parts {
                    self.submit.route.plug(at, Request { op, start, len, tag, buffer: None });
                }
            }
            Err(outcome) => self.submit.route.refuse(Completion { outcome, tag, buffer: None }),
        }
    }

    fn cancel(&mut self, pick: &mut dyn FnMut(&mut T) -> bool) {
        let slot = self.submit.slot;
        let picked = self.tags.pick(pick).map(|(index, disk)| (disk, Tag::new(slot, index)));
        self.submit.route.cancel(picked);
    }

    #[inline]
    fn completed_locally(&mut self, well_formed: bool) {
        self.counters.requests += 1;
        self.counters.answered_alone += 1;
        self.counters.malformed += u64::from(!well_formed);
    }
}

impl<Q: GuestQueue<Context = UringContext> + 'static> AnyQueue for QueueRunner<Q> {
    #[inline]
    fn pull(&mut self, context: &mut UringContext, submit: &mut SubmitContext<ToOnlyDisk<'_>>) -> PullResult {
        self.pull_batch(context, submit)
    }

    #[inline]
    fn pull_for_any(&mut self, context: &mut UringContext, submit: &mut SubmitContext<ToDisks<'_>>) -> PullResult {
        self.pull_batch(context, submit)
    }

    fn why_broken(&self) -> &'static str {
        self.why_broken
    }

    fn woken(
        &mut self,
        context: &mut UringContext,
        submit: &mut SubmitContext<ToDisks<'_>>,
        running: bool,
    ) -> Result<(), &'static str> {
        let (tags, counters) = (&mut self.tags, &mut self.counters);
        self.queue.woken(context, &mut QueueIntake { submit, tags, counters }, running)
    }

    #[inline]
    fn submitted(&mut self, slot: u16, requests: &[AnyRequest], now: Ticks) -> usize {
        let mut left = requests.iter();
        while let Some(request) = left.as_slice().first()
            && request.tag.queue() == slot
        {
            self.tags.submitted(request.tag.index(), now);
            left.next();
        }
        requests.len() - left.len()
    }

    fn complete(
        &mut self,
        context: &mut UringContext,
        completed: &mut [AnyCompletion],
        submit: &mut SubmitContext<ToDisks<'_>>,
        publish: Option<(&mut Clock, WindowMode)>,
    ) -> (usize, Option<AfterPublish>) {
        if !Q::SERVES_LONE {
            return self.complete_any(context, completed, submit, publish);
        }
        if let [done] = &mut *completed
            && self.per_disk.is_none()
            && let Some(ended) = self.finish_lone(context, done, submit)
        {
            // What has ended is recorded from registers, if it is published now.
            return match publish {
                Some((clock, mode)) if !submit.route.channels.has_aside() => {
                    let finished = clock.now();
                    (1, Some(self.publish_with(Some(ended), finished, clock, mode)))
                }
                _ => {
                    self.note_ended(ended);
                    (1, None)
                }
            };
        }
        self.complete_several(context, completed, submit, publish)
    }

    #[inline(always)] // it is compiled once beside the finish, and once alone
    fn publish(&mut self, finished: Ticks, clock: &mut Clock, mode: WindowMode) -> AfterPublish {
        self.publish_with(None, finished, clock, mode)
    }

    fn take_resumed(&mut self) -> bool {
        std::mem::take(&mut self.resumed)
    }

    fn call_due(&self) -> Option<Ticks> {
        self.calls.due()
    }

    fn send_due_call(&mut self, now: Ticks) -> Option<Ticks> {
        match self.calls.due() {
            Some(due) if due <= now => {
                self.calls.called(self.counters.requests);
                self.call();
                None
            }
            due => due,
        }
    }

    #[inline]
    fn poll_or_arm(&mut self, now: Ticks, mode: WindowMode) -> IdleResult {
        if self.pace.holds(now) {
            return IdleResult::Poll;
        }
        if let Some(polled) = self.poll.idle(now, mode) {
            return polled;
        }
        self.counters.arms += 1;
        match self.queue.arm() {
            ArmResult::Sleepable => IdleResult::Armed,
            ArmResult::WorkWaiting => IdleResult::Poll,
        }
    }

    fn kicked(&mut self, now: Ticks) {
        self.counters.kicks += 1;
        self.poll.resume(now);
        self.queue.disarm();
    }

    fn set_polling(&mut self, poll: PollPolicy, coalesce: Coalesce, now: Ticks) {
        self.send_due_call(Ticks(u64::MAX));
        self.calls = CallCoalescer::resume(coalesce, self.counters.requests);
        self.counters.poll_ns += self.poll.empty_poll_ns();
        self.poll = PollState::new(poll, wake_cost::ns(), now);
        self.options = RunnerOptions { poll, coalesce };
        self.queue.disarm();
    }

    fn in_flight(&self) -> usize {
        self.tags.in_flight() + self.queue.blocked()
    }

    fn opened(&mut self, disk: DiskSlot) {
        if self.per_disk.is_none() && (disk != DiskSlot::FIRST || self.has_first) {
            let first = self.has_first.then(|| DiskCounters::of_only(&self.counters, &self.latency));
            let per_disk = self.per_disk.insert(Box::new(PerDisk::new(self.queue.depth())));
            first.into_iter().for_each(|first| per_disk.open_with(first));
        }
        self.has_first |= disk == DiskSlot::FIRST;
        if let Some(per_disk) = &mut self.per_disk {
            per_disk.open(disk);
        }
    }

    fn uses(&self, disk: DiskSlot) -> bool {
        self.tags.uses(disk)
    }

    fn for_each_in_flight(&self, show: &mut dyn FnMut(u16, DiskSlot, Timestamps)) {
        self.tags.all().for_each(|(index, disk, stamps)| show(index, disk, stamps));
    }

    fn indexes_of_disk(&self, disk: DiskSlot) -> Vec<u16> {
        self.tags.of_disk(disk).collect()
    }

    fn stats(&self, now: Ticks, mode: WindowMode) -> QueueStats {
        let ages = || self.tags.pulls().map(|(disk, pulled)| (disk, now.since(pulled)));
        let oldest_ns = ages().map(|(_, age_ns)| age_ns).max();
        let (reason, window_ns) = self.poll.reason(mode);
        let timer_ns = self.poll.has_timer(mode).then_some(TIMER_PERIOD.as_nanos() as u64);
        let mut latency = self.latency.clone();
        for parts in [&mut latency.reads, &mut latency.writes, &mut latency.others] {
            parts.queued.record(0, parts.total.count() - parts.queued.count());
        }
        QueueStats {
            counters: QueueCounters {
                poll_ns: self.counters.poll_ns + self.poll.empty_poll_ns(),
                busy_ns: self.counters.busy_ns + now.since(self.busy_since),
                ..self.counters
            },
            latency,
            in_flight: self.tags.in_flight() as u32,
            slots: self.queue.depth().into(),
            oldest_ns,
            polling: Some(Polling { reason, window_ns, hold_ns: self.pace.hold_ns(), timer_ns }),
            disks: match &self.per_disk {
                Some(per_disk) => per_disk.stats(ages()),
                None if self.has_first => {
                    let counted = DiskCounters::of_only(&self.counters, &self.latency);
                    vec![DiskCounters { in_flight: self.tags.in_flight() as u32, oldest_ns, ..counted }]
                }
                None => Vec::new(),
            },
        }
    }

    fn as_any(&mut self) -> &mut dyn Any {
        self
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}
