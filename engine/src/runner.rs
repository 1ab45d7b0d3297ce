//! One queue with its tag table, counters and poll window, behind one dynamic call a batch.

use std::any::Any;

use mqblk_core::units::in_range;
use mqblk_core::{
    ArmResult, ByteLen, ByteOffset, Completion, DiskSlot, FinishedRequest, GuestQueue, Intake,
    IoContext as ContextTypes, Op, Outcome, PublishResult, PullEnd, Request, Tag,
};
use mqblk_uring::UringContext;

use crate::attached_disks::{AttachedDisk, AttachedDisks};
use crate::channels::Channels;
use crate::clock::{Clock, Ticks};
use crate::coalesce::{Calls, Verdict};
use crate::counters::{DiskCounters, Kind, QueueCounters, QueueLatency, QueueStats};
use crate::options::Coalesce;
use crate::per_disk::PerDisk;
use crate::poll::{Idle, PollPolicy, PollState};
use crate::poll_list::IdleResult;
use crate::tags::{TagTable, Timestamps};

pub(crate) type Buffer = <UringContext as ContextTypes>::Buffer;
pub(crate) type AnyRequest = Request<Buffer>;
pub(crate) type AnyCompletion = Completion<Buffer>;

/// A queue as its worker sees it.
pub(crate) trait AnyQueue: Any {
    /// Takes one batch of requests in.
    fn pull(&mut self, context: &mut UringContext, door: &mut SubmitContext<'_>) -> PullResult;
    /// The queue's waker rang.
    fn woken(
        &mut self,
        context: &mut UringContext,
        door: &mut SubmitContext<'_>,
        running: bool,
    ) -> Result<(), &'static str>;
    /// A run of requests, all of this queue, is being handed to the storage.
    fn submitted(&mut self, run: &[AnyRequest], now: Ticks);
    /// Writes the answers of a run of ended requests, all of this queue, and takes in what they ask next.
    fn finish(&mut self, context: &mut UringContext, run: &mut [AnyCompletion], door: &mut SubmitContext<'_>);
    /// Publishes what was finished, and calls the guest if it wants that. The poll window starts again.
    fn publish(&mut self, finished: Ticks, clock: &Clock) -> Published;
    /// Makes a call that was put off, if it is due. When it is not yet: when it will be.
    fn pay_call(&mut self, now: Ticks) -> Option<Ticks>;
    /// Nothing happened: poll on, or arm and look again.
    fn rest(&mut self, now: Ticks) -> IdleResult;
    /// The guest kicked: it is polled from here on.
    fn kicked(&mut self);
    /// Requests in flight, and such as the queue holds itself.
    fn in_flight(&self) -> usize;
    /// A disk was opened for it in this slot.
    fn opened(&mut self, disk: DiskSlot);
    /// Whether requests to this disk are in flight.
    fn uses(&self, disk: DiskSlot) -> bool;
    /// All that was counted until now.
    fn report(&self, now: Ticks) -> QueueStats;
    /// Shows the disks and pulls of the requests in flight.
    fn each_pull(&self, show: &mut dyn FnMut(DiskSlot, Ticks));
    /// The places of the requests in flight to a disk, in the tag table.
    fn of_disk(&self, disk: DiskSlot) -> Vec<u16>;
    /// For typed access.
    fn as_any(&mut self) -> &mut dyn Any;
    /// For taking it apart.
    fn into_any(self: Box<Self>) -> Box<dyn Any>;
}

/// What a pull brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PullResult {
    /// No request.
    Nothing,
    /// Requests for the disk, or such as the queue answered itself.
    Requests,
    /// Such, and more are waiting.
    More,
    /// The ring is broken; why.
    Broken(&'static str),
}

/// What a publish leads to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Published {
    /// When it was done.
    pub(crate) at: Ticks,
    /// When a call is due that was put off.
    pub(crate) owes: Option<Ticks>,
}

/// A queue of a known type.
pub(crate) struct QueueRunner<Q: GuestQueue> {
    pub(crate) queue: Q,
    tags: TagTable<Q::Token>,
    counters: QueueCounters,
    latency: Box<QueueLatency>,
    /// Of a queue that has more than the first disk, or had.
    per_disk: Option<Box<PerDisk>>,
    /// It has the first disk, or had.
    has_first: bool,
    /// Requests that were finished and not yet settled.
    ended: Vec<Ended>,
    calls: Calls,
    poll: PollState,
}

/// Requests of one kind that took the same time: all of a batch, often.
struct Ended {
    kind: Kind,
    stamps: Timestamps,
    times: u64,
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
            ended: Vec::with_capacity(depth.into()),
            calls: Calls::new(coalesce),
            poll: PollState::new(policy, now),
        }
    }
}

impl<Q: GuestQueue> QueueRunner<Q> {
    /// The parts of the request in this place that have not ended.
    pub(crate) fn parts_left(&self, index: u16) -> Option<usize> {
        Some(self.tags.look(index)?.left.into())
    }

    /// A part of a request will not end, and the request not be answered. Its token with the last part.
    pub(crate) fn forget_part(&mut self, index: u16) -> Option<Q::Token> {
        self.tags.forget_part(index)
    }

    #[inline]
    fn call(&mut self) {
        self.counters.calls += 1;
        self.queue.notify();
    }

    /// Calls now or later. When later: until when.
    #[cold]
    fn coalesce(&mut self, wanted: bool, now: Ticks) -> Option<Ticks> {
        match self.calls.published(wanted, self.counters.requests, self.tags.in_flight() > 0, now) {
            Verdict::Nothing => None,
            Verdict::Call => {
                self.call();
                None
            }
            Verdict::PutOff(due) => {
                self.counters.calls_put_off += u64::from(wanted);
                Some(due)
            }
        }
    }

    /// Counts a run that is about to be finished, for a queue of several disks. Apart from [`finish`](Served::finish), which would
    /// pay for it with each request of a queue that has one.
    #[inline(never)]
    fn count_by_disk(&mut self, run: &[AnyCompletion]) {
        let Some(per_disk) = &mut self.per_disk else { return };
        for (at, done) in run.iter().enumerate() {
            let index = done.tag.index();
            let Some(entry) = self.tags.look(index) else { continue };
            let mut outcome = done.outcome;
            if entry.parts > 1 {
                // It ends with its last part, and fails with any.
                let parts = || run[..=at].iter().filter(|part| part.tag == done.tag);
                if parts().count() < usize::from(entry.left) {
                    continue;
                }
                let failed = |outcome: &Outcome| !outcome.is_done();
                outcome = parts().map(|part| part.outcome).chain([entry.outcome]).find(failed).unwrap_or(outcome);
            }
            let transferred = match outcome {
                Outcome::Done(len) => Some(len),
                _ => None,
            };
            per_disk.finished(entry.disk, Kind::of(entry.op), transferred, entry.stamps.pulled);
        }
    }

    /// Counts how long the requests took that were finished since the last time.
    #[inline]
    fn settle(&mut self, finished: Ticks, published: Ticks) {
        let latency = &mut *self.latency;
        for ended in &self.ended {
            let parts = match ended.kind {
                Kind::Read => &mut latency.reads,
                Kind::Write => &mut latency.writes,
                Kind::Other => &mut latency.others,
            };
            let Timestamps { pulled, submitted } = ended.stamps;
            // Most are handed over at once: the others are made up for in the report.
            if submitted > pulled {
                parts.queued.record(submitted.since(pulled), ended.times);
            }
            parts.device.record(finished.since(submitted), ended.times);
            parts.publish.record(published.since(finished), ended.times);
            parts.total.record(published.since(pulled), ended.times);
        }
        self.ended.clear();
        if let Some(per_disk) = &mut self.per_disk {
            per_disk.settle(published);
        }
    }
}

/// What a queue's requests pass through: into the plugs of its disks, or straight back when they are refused.
pub(crate) struct SubmitContext<'a> {
    /// The queue's slot.
    pub(crate) slot: u16,
    pub(crate) now: Ticks,
    pub(crate) way: Route<'a>,
}

/// Where they go.
pub(crate) enum Route<'a> {
    /// To a queue's only disk, in a pull: its plug is looked for once a batch.
    One {
        disk: &'a AttachedDisk,
        plug: &'a mut Vec<AnyRequest>,
        finished: &'a mut Vec<AnyCompletion>,
        cancelled: &'a mut Vec<(usize, Tag)>,
    },
    /// To any of a queue's disks.
    Any { disks: &'a AttachedDisks, channels: &'a mut Channels },
}

impl Route<'_> {
    /// The place of the disk's channel; or why the request is refused.
    #[inline]
    fn judge(&self, disk: DiskSlot, op: Op, start: ByteOffset, len: ByteLen) -> Result<usize, Outcome> {
        match self {
            Route::One { disk: only, .. } if disk == DiskSlot::FIRST => judge(only, op, start, len),
            Route::One { .. } => Err(Outcome::Aborted),
            Route::Any { disks, .. } => judge_any(disks, disk, op, start, len),
        }
    }

    #[inline]
    fn plug(&mut self, at: usize, request: AnyRequest) {
        match self {
            Route::One { plug, .. } => plug.push(request),
            Route::Any { channels, .. } => channels.plug(at, request),
        }
    }

    #[inline]
    fn refuse(&mut self, ended: AnyCompletion) {
        match self {
            Route::One { finished, .. } => finished.push(ended),
            Route::Any { channels, .. } => channels.completions.push(ended),
        }
    }
}

#[inline(never)]
fn judge_any(disks: &AttachedDisks, disk: DiskSlot, op: Op, start: ByteOffset, len: ByteLen) -> Result<usize, Outcome> {
    match disks.get(disk) {
        Some(disk) => judge(disk, op, start, len),
        // It was taken away.
        None => Err(Outcome::Aborted),
    }
}

#[inline]
fn judge(disk: &AttachedDisk, op: Op, start: ByteOffset, len: ByteLen) -> Result<usize, Outcome> {
    if op.modifies() && disk.geometry.read_only {
        return Err(Outcome::ReadOnly);
    }
    if in_range(start, len, disk.geometry.size) { Ok(disk.channel) } else { Err(Outcome::OutOfRange) }
}

/// The engine's side of one call to a queue.
struct QueueIntake<'a, 'd, T> {
    door: &'a mut SubmitContext<'d>,
    tags: &'a mut TagTable<T>,
    counters: &'a mut QueueCounters,
}

impl<T> QueueIntake<'_, '_, T> {
    #[inline(always)] // else the token would travel through memory
    fn tag(&mut self, token: T, disk: DiskSlot, op: Op, parts: u16) -> Tag {
        let index =
            self.tags.take(token, disk, op, parts, self.door.now).expect("a queue looks at room() before each request");
        Tag::new(self.door.slot, index)
    }
}

impl<T> Intake<T, Buffer> for QueueIntake<'_, '_, T> {
    #[inline]
    fn room(&self) -> usize {
        self.tags.room()
    }

    #[inline(always)] // else the token would travel through memory
    fn admit(&mut self, token: T, disk: DiskSlot, op: Op, start: ByteOffset, len: ByteLen, buffer: Option<Buffer>) {
        let verdict = self.door.way.judge(disk, op, start, len);
        let tag = self.tag(token, disk, op, 1);
        match verdict {
            Ok(at) => self.door.way.plug(at, Request { op, start, len, tag, buffer }),
            Err(outcome) => self.door.way.refuse(Completion { outcome, tag, buffer }),
        }
    }

    fn admit_parts(&mut self, token: T, disk: DiskSlot, op: Op, parts: &[(ByteOffset, ByteLen)]) {
        let bytes = parts.iter().map(|(_, len)| len.0).fold(0, u64::saturating_add);
        self.counters.other_bytes = self.counters.other_bytes.saturating_add(bytes);
        let mut verdict = Err(Outcome::Done(ByteLen::ZERO));
        for &(start, len) in parts {
            verdict = self.door.way.judge(disk, op, start, len);
            if verdict.is_err() {
                break;
            }
        }
        let count = if verdict.is_err() { 1 } else { parts.len() as u16 };
        let tag = self.tag(token, disk, op, count);
        match verdict {
            Ok(at) => {
                for &(start, len) in parts {
                    self.door.way.plug(at, Request { op, start, len, tag, buffer: None });
                }
            }
            Err(outcome) => self.door.way.refuse(Completion { outcome, tag, buffer: None }),
        }
    }

    fn cancel(&mut self, pick: &mut dyn FnMut(&mut T) -> bool) {
        let slot = self.door.slot;
        let picked = self.tags.pick(pick).map(|(index, disk)| (disk, Tag::new(slot, index)));
        match &mut self.door.way {
            Route::One { disk, cancelled, .. } => cancelled.extend(picked.map(|(_, tag)| (disk.channel, tag))),
            Route::Any { disks, channels } => {
                channels.cancelled.extend(picked.filter_map(|(disk, tag)| Some((disks.channel(disk)?, tag))));
            }
        }
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
    fn pull(&mut self, context: &mut UringContext, door: &mut SubmitContext<'_>) -> PullResult {
        let before = self.tags.in_flight() as u64 + self.counters.answered_alone;
        let (tags, counters) = (&mut self.tags, &mut self.counters);
        let pulled = self.queue.pull(context, &mut QueueIntake { door, tags, counters });
        if let PullEnd::Broken(why) = pulled {
            PullResult::Broken(why)
        } else if self.tags.in_flight() as u64 + self.counters.answered_alone > before {
            self.counters.turns += 1;
            if pulled == PullEnd::MoreWaiting { PullResult::More } else { PullResult::Requests }
        } else {
            self.counters.empty_turns += 1;
            PullResult::Nothing
        }
    }

    fn woken(
        &mut self,
        context: &mut UringContext,
        door: &mut SubmitContext<'_>,
        running: bool,
    ) -> Result<(), &'static str> {
        let (tags, counters) = (&mut self.tags, &mut self.counters);
        self.queue.woken(context, &mut QueueIntake { door, tags, counters }, running)
    }

    #[inline]
    fn submitted(&mut self, run: &[AnyRequest], now: Ticks) {
        for request in run {
            self.tags.submitted(request.tag.index(), now);
        }
    }

    #[inline]
    fn finish(&mut self, context: &mut UringContext, run: &mut [AnyCompletion], door: &mut SubmitContext<'_>) {
        if self.per_disk.is_some() {
            self.count_by_disk(run);
        }
        for done in run {
            let Some((token, op, outcome, stamps)) = self.tags.finish_part(done.tag.index(), done.outcome) else {
                continue;
            };
            let transferred = match outcome {
                Outcome::Done(len) => Some(len),
                _ => None,
            };
            let kind = self.counters.count(op, transferred);
            match self.ended.last_mut() {
                Some(last) if last.stamps == stamps && last.kind == kind => last.times += 1,
                _ => self.ended.push(Ended { kind, stamps, times: 1 }),
            }
            let completed = FinishedRequest { token, outcome, buffer: done.buffer.take() };
            let (tags, counters) = (&mut self.tags, &mut self.counters);
            self.queue.finish(context, completed, &mut QueueIntake { door: &mut *door, tags, counters });
        }
    }

    #[inline]
    fn publish(&mut self, finished: Ticks, clock: &Clock) -> Published {
        self.poll.active(finished);
        let notify = self.queue.publish();
        if notify == PublishResult::Suppressed {
            self.counters.calls_suppressed += 1;
        }
        let mut owes = None;
        if !self.calls.is_immediate() {
            owes = self.coalesce(notify == PublishResult::Wanted, finished);
        } else if notify == PublishResult::Wanted {
            self.call();
        }
        let at = clock.now();
        self.settle(finished, at);
        Published { at, owes }
    }

    fn pay_call(&mut self, now: Ticks) -> Option<Ticks> {
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
    fn rest(&mut self, now: Ticks) -> IdleResult {
        if self.poll.idle(now) == Idle::KeepPolling {
            return IdleResult::Poll;
        }
        self.counters.arms += 1;
        match self.queue.arm() {
            ArmResult::Sleepable => IdleResult::Armed,
            ArmResult::WorkWaiting => IdleResult::Poll,
        }
    }

    fn kicked(&mut self) {
        self.counters.kicks += 1;
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

    fn each_pull(&self, show: &mut dyn FnMut(DiskSlot, Ticks)) {
        self.tags.pulls().for_each(|(disk, pulled)| show(disk, pulled));
    }

    fn of_disk(&self, disk: DiskSlot) -> Vec<u16> {
        self.tags.of_disk(disk).collect()
    }

    fn report(&self, now: Ticks) -> QueueStats {
        let ages = || self.tags.pulls().map(|(disk, pulled)| (disk, now.since(pulled)));
        let oldest_ns = ages().map(|(_, age_ns)| age_ns).max();
        let mut latency = self.latency.clone();
        for parts in [&mut latency.reads, &mut latency.writes, &mut latency.others] {
            parts.queued.record(0, parts.total.count() - parts.queued.count());
        }
        QueueStats {
            counters: QueueCounters { poll_ns: self.poll.in_vain(), ..self.counters },
            latency,
            in_flight: self.tags.in_flight() as u32,
            oldest_ns,
            disks: match &self.per_disk {
                Some(per_disk) => per_disk.report(ages()),
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
