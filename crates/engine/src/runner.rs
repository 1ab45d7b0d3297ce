//! One queue with its tag table, counters and poll window, behind one dynamic call per batch.

use std::any::Any;

use mqblk_core::{ArmResult, DiskSlot, GuestQueue, PublishResult};
use mqblk_uring::UringContext;

use crate::clock::{Clock, Ticks};
use crate::coalesce::{CallCoalescer, CallDecision};
use crate::counters::{DiskCounters, Polling, QueueCounters, QueueLatency, QueueStats};
use crate::options::QueuePolicy;
use crate::per_disk::PerDisk;
use crate::poll::{PollReason, PollState, TIMER_PERIOD};
use crate::poll_list::IdleResult;
use crate::queue_options::{FaultHandler, QueueFault};
use crate::request::{AnyCompletion, AnyRequest, Buffer};
use crate::route::{SubmitContext, ToDisks, ToOnlyDisk};
use crate::sleep_cost;
use crate::tags::{TagTable, Timestamps};

mod ended;
mod finishing;
mod intake;
mod pulling;
use ended::EndedRequests;
use intake::QueueIntake;

/// A queue of any type, as its worker sees it.
pub(crate) trait AnyQueue: Any {
    /// Pulls one batch of requests of a queue of one disk.
    fn pull(&mut self, context: &mut UringContext, submit: &mut SubmitContext<ToOnlyDisk<'_>>) -> PullResult;
    /// Pulls one batch of requests.
    fn pull_for_any(&mut self, context: &mut UringContext, submit: &mut SubmitContext<ToDisks<'_>>) -> PullResult;
    /// Returns the reason if the last pull found the ring broken.
    fn why_broken(&self) -> &'static str;
    /// Reports a fault of the guest's driver.
    fn report(&mut self, fault: QueueFault<'_>);
    /// Handles a wake of the queue.
    fn woken(
        &mut self,
        context: &mut UringContext,
        submit: &mut SubmitContext<ToDisks<'_>>,
        running: bool,
    ) -> Result<(), &'static str>;
    /// Records the submission of requests to the storage: those of the queue in this slot, up to the first one of
    /// another queue. Returns their number.
    fn submitted(&mut self, slot: u16, requests: &[AnyRequest], now: Ticks) -> usize;
    /// Finishes completed requests, those of this queue up to the first one of another queue, and admits the next steps
    /// of multi-step commands. Returns their number. With `publish` it also [publishes](Self::publish) them if they are
    /// all completed ones and the finish has completed no others: one call, because most turns end so.
    fn complete(
        &mut self,
        context: &mut UringContext,
        completed: &mut [AnyCompletion],
        submit: &mut SubmitContext<ToDisks<'_>>,
        publish: Option<&mut Clock>,
    ) -> (usize, Option<AfterPublish>);
    /// Publishes the finished requests, and calls the guest if it asked for a call. Restarts the poll window. Reads the
    /// clock.
    fn publish(&mut self, finished: Ticks, clock: &mut Clock) -> AfterPublish;
    /// Returns true, once, if the last publish has disarmed the queue, which must be polled again.
    fn take_resumed(&mut self) -> bool;
    /// Returns when the deferred call is due, if there is one.
    fn call_due(&self) -> Option<Ticks>;
    /// Sends the deferred call if it is due. Otherwise returns when it will be.
    fn send_due_call(&mut self, now: Ticks) -> Option<Ticks>;
    /// After an idle turn: polls on while the window is open, else arms the queue and checks it again. `is_wanted`:
    /// others want the worker's CPU.
    fn poll_or_arm(&mut self, now: Ticks, is_wanted: bool) -> IdleResult;
    /// Handles a kick: disarms the queue, which is polled from here on.
    fn kicked(&mut self, now: Ticks);
    /// Changes how it is polled and how its calls are deferred. Disarms the queue, which is polled from here on. Sends
    /// a deferred call.
    fn set_policy(&mut self, policy: QueuePolicy, now: Ticks);
    /// Returns the number of requests in flight, including those that the queue has blocked.
    fn in_flight(&self) -> usize;
    /// Starts the counters of a disk that was opened in this slot.
    fn opened(&mut self, disk: DiskSlot);
    /// Returns true if requests to this disk are in flight.
    fn uses(&self, disk: DiskSlot) -> bool;
    /// Returns the queue's statistics. `is_wanted`: others want the worker's CPU.
    fn stats(&self, now: Ticks, is_wanted: bool) -> QueueStats;
    /// Calls `show` with the tag table's index, the disk and the timestamps of each request in flight.
    fn for_each_in_flight(&self, show: &mut dyn FnMut(u16, DiskSlot, Timestamps));
    /// Returns the tag table's indexes of the requests in flight to a disk.
    fn indexes_of_disk(&self, disk: DiskSlot) -> Vec<u16>;
    /// Returns the number of parts of the request with this index that have not completed.
    fn parts_left(&self, index: u16) -> Option<usize>;
    /// Drops a part of a request that will not be completed. Abandons the request with the last part.
    fn abandon_part(&mut self, context: &mut UringContext, index: u16, buffer: Option<Buffer>);
    /// Returns the queue's position.
    fn position(&self) -> Box<dyn Any + Send>;
    /// Returns the queue for access by its type.
    fn as_any(&mut self) -> &mut dyn Any;
    /// Closes the queue, which leaves the context. Returns its position.
    fn detach(self: Box<Self>, context: &mut UringContext) -> Box<dyn Any + Send>;
    /// Returns the [`IdleQueue`], which has left the context.
    fn leave(self: Box<Self>, context: &mut UringContext) -> Box<dyn Any + Send>;
}

/// Result of a pull.
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

/// The worker's remaining work after a publish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AfterPublish {
    /// Nothing.
    Nothing,
    /// A call is [deferred](AnyQueue::call_due), or the queue [must be polled again](AnyQueue::take_resumed).
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
    /// True if the queue has or had the first disk.
    has_first: bool,
    /// The last finished requests whose latencies are not recorded yet; 0 times if there are none.
    ended: EndedRequests,
    /// Earlier ones that differ from it.
    ended_before: Vec<EndedRequests>,
    calls: CallCoalescer,
    poll: PollState,
    /// Time since which requests have been in flight; [`NOT_BUSY`] if none are.
    busy_since: Ticks,
    policy: QueuePolicy,
    /// True if a publish has disarmed the queue, and its worker does not know yet that it must be polled.
    resumed: bool,
    /// The reason why the ring is broken.
    why_broken: &'static str,
    on_fault: FaultHandler,
}

/// Later than any time.
const NOT_BUSY: Ticks = Ticks(u64::MAX);

/// A queue and its counters, without a worker: no request is in flight, none waits to be published, and no call is
/// deferred.
pub(crate) struct IdleQueue<Q> {
    pub(crate) queue: Q,
    counters: QueueCounters,
    latency: Box<QueueLatency>,
    per_disk: Option<Box<PerDisk>>,
    has_first: bool,
    policy: QueuePolicy,
    on_fault: FaultHandler,
}

impl<Q: GuestQueue<Context = UringContext>> QueueRunner<Q> {
    /// Returns the runner of a queue.
    pub(crate) fn new(queue: Q, policy: QueuePolicy, on_fault: FaultHandler, now: Ticks) -> QueueRunner<Q> {
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
            calls: CallCoalescer::new(policy.coalesce),
            poll: PollState::new(policy.poll, sleep_cost::get(), now),
            busy_since: NOT_BUSY,
            policy,
            resumed: false,
            why_broken: "",
            on_fault,
        }
    }

    /// Returns the runner of a queue that has come from another worker, whose clock is not comparable.
    pub(crate) fn from_idle(idle: IdleQueue<Q>, now: Ticks) -> QueueRunner<Q> {
        let IdleQueue { queue, counters, latency, per_disk, has_first, policy, on_fault } = idle;
        let runner = QueueRunner::new(queue, policy, on_fault, now);
        let calls = CallCoalescer::resume(policy.coalesce, counters.requests);
        QueueRunner { counters, latency, per_disk, has_first, calls, ..runner }
    }

    /// Returns the queue with its counters.
    pub(crate) fn into_idle(self) -> IdleQueue<Q> {
        debug_assert!(self.in_flight() == 0 && self.ended.times == 0, "the queue was drained");
        let poll_ns = self.counters.poll_ns + self.poll.empty_poll_ns();
        let counters = QueueCounters { poll_ns, ..self.counters };
        let QueueRunner { queue, latency, per_disk, has_first, policy, on_fault, .. } = self;
        IdleQueue { queue, counters, latency, per_disk, has_first, policy, on_fault }
    }
}

impl<Q: GuestQueue> QueueRunner<Q> {
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

    /// As [`publish`](AnyQueue::publish). `lone`: an ended request that is not noted, of a queue of one disk.
    #[inline(always)] // few callers, each of which knows whether there is one
    fn publish_with(&mut self, lone: Option<EndedRequests>, finished: Ticks, clock: &mut Clock) -> AfterPublish {
        self.poll.active(self.tags.in_flight() > 0, finished);
        if self.poll.should_resume() {
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
}

impl<Q: GuestQueue<Context = UringContext>> AnyQueue for QueueRunner<Q> {
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

    fn report(&mut self, fault: QueueFault<'_>) {
        (self.on_fault)(fault);
    }

    fn woken(
        &mut self,
        context: &mut UringContext,
        submit: &mut SubmitContext<ToDisks<'_>>,
        running: bool,
    ) -> Result<(), &'static str> {
        let (tags, counters, on_fault) = (&mut self.tags, &mut self.counters, &mut self.on_fault);
        self.queue.woken(context, &mut QueueIntake { submit, tags, counters, on_fault }, running)
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
        publish: Option<&mut Clock>,
    ) -> (usize, Option<AfterPublish>) {
        if let [done] = &mut *completed
            && self.per_disk.is_none()
            && let Some(ended) = self.finish_lone(context, done, submit)
        {
            // Ended requests are recorded from registers, if they are published now.
            return match publish {
                Some(clock) if !submit.route.channels.has_aside() => {
                    let finished = clock.now();
                    (1, Some(self.publish_with(Some(ended), finished, clock)))
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
    fn publish(&mut self, finished: Ticks, clock: &mut Clock) -> AfterPublish {
        self.publish_with(None, finished, clock)
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
    fn poll_or_arm(&mut self, now: Ticks, is_wanted: bool) -> IdleResult {
        if let Some(polled) = self.poll.idle(now, is_wanted) {
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

    fn set_policy(&mut self, policy: QueuePolicy, now: Ticks) {
        self.send_due_call(Ticks(u64::MAX));
        self.calls = CallCoalescer::resume(policy.coalesce, self.counters.requests);
        self.counters.poll_ns += self.poll.empty_poll_ns();
        self.poll = PollState::new(policy.poll, sleep_cost::get(), now);
        self.policy = policy;
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

    fn stats(&self, now: Ticks, is_wanted: bool) -> QueueStats {
        let ages = || self.tags.pulls().map(|(disk, pulled)| (disk, now.since(pulled)));
        let oldest_ns = ages().map(|(_, age_ns)| age_ns).max();
        let (reason, window_ns) = self.poll.reason(is_wanted);
        let timer_ns = (reason == PollReason::CpuWanted).then_some(TIMER_PERIOD.as_nanos() as u64);
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
            polling: Some(Polling { reason, window_ns, timer_ns }),
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

    fn parts_left(&self, index: u16) -> Option<usize> {
        Some(self.tags.get(index)?.remaining.into())
    }

    fn abandon_part(&mut self, context: &mut UringContext, index: u16, buffer: Option<Buffer>) {
        if let Some(token) = self.tags.forget_part(index) {
            self.queue.abandon(context, token, buffer);
        }
    }

    fn position(&self) -> Box<dyn Any + Send> {
        Box::new(self.queue.position())
    }

    fn as_any(&mut self) -> &mut dyn Any {
        self
    }

    fn detach(mut self: Box<Self>, context: &mut UringContext) -> Box<dyn Any + Send> {
        self.queue.close();
        self.queue.leave(context);
        Box::new(self.queue.position())
    }

    fn leave(mut self: Box<Self>, context: &mut UringContext) -> Box<dyn Any + Send> {
        self.queue.leave(context);
        Box::new(self.into_idle())
    }
}
