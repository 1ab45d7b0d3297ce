//! A worker's turn: pull a bounded batch from each queue, submit once per channel, reap, finish, publish once per queue, one
//! call per queue that wants it. If nothing happened: poll on while a window lasts, else arm, look again, and sleep.

use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use mqblk_core::{DiskSlot, Tag};
use mqblk_uring::{Kick, UringContext, UringOptions, Wait};

use crate::attached_disks::QueueDisk;
use crate::channels::Channels;
use crate::clock::{Clock, Ticks};
use crate::counters::{QueueId, QueueStats, WorkerStats};
use crate::draining::Detached;
use crate::engine::{AttachError, WorkerGone};
use crate::mailbox::MailboxReceiver;
use crate::plug::{MERGED_SLOT, Merges};
use crate::poll_list::{IdleDecision, IdleResult, Phase, PollList};
use crate::runner::{AnyCompletion, AnyQueue, AnyRequest, PullResult, Route, SubmitContext};
use crate::watchdog::Age;

mod attached_queue;
pub(crate) use attached_queue::AttachedQueue;

/// Cookie of the mailbox's eventfd; queues have their slot and the attached's generation.
const MAILBOX: u64 = u64::MAX;

/// Most messages read in one turn.
const MAX_MESSAGES: usize = 16;

/// Most further pulls in one turn: a queue that answers requests itself fills no plug.
const MAX_DEEP_PULLS: usize = 64;

/// How often the mailbox is looked at when the ring has no room to watch its eventfd.
const MAILBOX_CHECK: Duration = Duration::from_millis(1);

/// Everything that one worker thread owns.
pub(crate) struct Worker {
    pub(crate) context: UringContext,
    pub(crate) clock: Clock,
    pub(crate) channels: Channels,
    pub(crate) queues: Vec<Option<AttachedQueue>>,
    poll_list: PollList,
    owner: mqblk_uring::ClientId,
    pub(crate) mailbox: MailboxReceiver,
    /// The ring reports the eventfd.
    mailbox_polled: bool,
    /// Ended requests that are being handed back.
    completing: Vec<AnyCompletion>,
    /// Queues whose wakers rang, by slot and generation; kept for its room.
    woken_queues: Vec<(u16, u32)>,
    /// A disk of some queue is about to leave.
    closing: bool,
    /// Slots with answers to publish.
    dirty: Vec<u16>,
    /// Slots whose queue owes its guest a call, and when it is due.
    deferred_calls: Vec<(u16, Ticks)>,
    /// When the clock was last read.
    now: Ticks,
    counters: WorkerStats,
    /// Slots of queues to pull on from in this turn.
    waiting: Vec<u16>,
    generation: u32,
    stopping: bool,
}

impl Worker {
    /// A worker without queues. Must be made on its own thread.
    pub(crate) fn new(options: UringOptions, mailbox: MailboxReceiver) -> std::io::Result<Worker> {
        let mut context = UringContext::new(options)?;
        let owner = context.add_client();
        context
            .watch(owner, MAILBOX, &mailbox.eventfd)
            .map_err(|_| std::io::Error::other("the ring has no room for its mailbox"))?;
        Ok(Worker {
            context,
            clock: Clock::new(),
            channels: Channels::new(),
            queues: Vec::new(),
            poll_list: PollList::default(),
            owner,
            mailbox,
            mailbox_polled: true,
            completing: Vec::with_capacity(4096),
            woken_queues: Vec::new(),
            closing: false,
            dirty: Vec::with_capacity(256),
            deferred_calls: Vec::with_capacity(256),
            now: Ticks::default(),
            counters: WorkerStats::default(),
            waiting: Vec::with_capacity(256),
            generation: 0,
            stopping: false,
        })
    }

    /// Works until told to stop.
    pub(crate) fn run(&mut self) {
        while !self.stopping {
            if self.turn() {
                self.counters.turns += 1;
            } else {
                self.counters.empty_turns += 1;
                match self.rest() {
                    IdleDecision::Turn => std::hint::spin_loop(),
                    IdleDecision::Sleep => self.sleep(),
                }
            }
        }
    }

    /// Ends [`run`](Self::run) after this turn.
    pub(crate) fn stop(&mut self) {
        self.stopping = true;
    }

    /// One turn. Whether anything happened.
    #[inline(always)] // it has one caller in a worker thread, and one where it is stepped
    pub(crate) fn turn(&mut self) -> bool {
        if !self.mailbox_polled {
            self.mailbox_polled = self.context.watch(self.owner, MAILBOX, &self.mailbox.eventfd).is_ok();
        }
        if !self.deferred_calls.is_empty() {
            self.send_deferred_calls();
        }
        let mut happened = self.read_signals();
        let mut pulled = false;
        for at in 0..self.poll_list.polled().len() {
            pulled |= self.pull(self.poll_list.polled()[at]);
        }
        if self.channels.has_pending() {
            self.flush_pending();
        }
        if pulled || self.channels.has_left() {
            if !self.waiting.is_empty() {
                self.pull_on();
            }
            let (queues, clock, now) = (&mut self.queues, &self.clock, &mut self.now);
            let stamp = |requests: &[AnyRequest]| {
                *now = clock.now();
                for run in requests.chunk_by(|one, next| one.tag.queue() == next.tag.queue()) {
                    if let Some(attached) = queues[usize::from(run[0].tag.queue())].as_mut() {
                        attached.runner.submitted(run, *now);
                    }
                }
            };
            happened |= pulled | (self.channels.submit(&mut self.context, stamp) > 0);
        }
        self.context.turn(Wait::No);
        happened |= self.channels.reap(&mut self.context);
        if self.context.has_unread() {
            happened |= self.reap_unread();
        }
        happened |= self.complete();
        happened
    }

    /// Completions are unread after the channels with outstanding requests were reaped. Whether some were of channels; else they are kicks
    /// and messages, which the next turn reads. Without this the worker would neither read them nor sleep.
    #[cold]
    fn reap_unread(&mut self) -> bool {
        let before = self.context.unread_besides(self.owner);
        if before > 0 {
            self.channels.reap_all(&mut self.context);
        }
        // A turn follows even if no request has ended: a channel may take requests now that it did not take before.
        self.context.unread_besides(self.owner) < before
    }

    /// Kicks and messages.
    #[inline]
    fn read_signals(&mut self) -> bool {
        if !self.context.has_completions(self.owner) {
            return false;
        }
        let mut messages = false;
        while let Some(signal) = self.context.next(self.owner) {
            if signal.cookie == MAILBOX {
                messages = true;
                self.mailbox_polled = signal.more;
            } else {
                self.kicked(signal.cookie, signal.result, signal.more);
            }
        }
        if messages {
            self.read_messages();
        }
        true
    }

    fn read_messages(&mut self) {
        let mut rung = std::mem::take(&mut self.woken_queues);
        self.mailbox.take_rung(&mut rung);
        for (slot, generation) in rung.drain(..) {
            self.woken(slot, generation);
        }
        self.woken_queues = rung;
        for _ in 0..MAX_MESSAGES {
            match self.mailbox.messages.try_recv() {
                Ok(message) => message(self),
                Err(_) => return,
            }
        }
        // More may wait: ring again rather than starve the queues.
        self.mailbox.eventfd.signal();
    }

    /// The waker of the queue in `slot` rang.
    fn woken(&mut self, slot: u16, generation: u32) {
        let running = self.poll_list.phase(slot) == Some(Phase::Running);
        let Some(attached) = queue_of(&mut self.queues, slot, generation).filter(|attached| !attached.frozen) else {
            return;
        };
        let way = Route::Any { disks: &attached.disks, channels: &mut self.channels };
        let mut door = SubmitContext { slot, now: self.now, way };
        let taken = attached.runner.woken(&mut self.context, &mut door, running);
        mark_dirty(&mut self.dirty, &mut attached.dirty, slot);
        if let Err(why) = taken {
            self.retire(slot, why);
        }
        self.flush_pending();
    }

    /// Requests came in otherwise than by a pull, or are to end early.
    #[cold]
    fn flush_pending(&mut self) {
        if self.channels.flush_pending() {
            self.cancel();
        }
    }

    /// Ends early what queues asked for.
    #[cold]
    fn cancel(&mut self) {
        let mut cancelled = std::mem::take(&mut self.channels.cancelled);
        cancelled.sort_unstable();
        let mut tags = Vec::new();
        for run in cancelled.chunk_by(|one, next| one.0 == next.0) {
            tags.clear();
            tags.extend(run.iter().map(|(_, tag)| *tag));
            self.channels.cancel(&mut self.context, run[0].0, &tags);
        }
    }

    fn kicked(&mut self, cookie: u64, result: i32, watching: bool) {
        let slot = cookie as u16;
        let Some(attached) = self.queues.get_mut(usize::from(slot)).and_then(Option::as_mut) else { return };
        if attached.cookie(slot) != cookie {
            return;
        }
        if result < 0 {
            self.retire(slot, "its kick descriptor cannot be polled");
            return;
        }
        attached.runner.kicked();
        self.poll_list.kicked(slot);
        if !watching {
            // The kernel ends a watch when its completion queue is full. The counter was never read, so that a new watch
            // reports at once what was missed.
            self.poll_list.watch(slot, false);
        }
    }

    /// Watches again what the ring had no room to watch. Queues without a kick have nothing to watch: they stay polled.
    fn renew_watches(&mut self) {
        loop {
            let lapsed = self.poll_list.unwatched().find(|slot| self.is_watchable(*slot));
            match lapsed {
                Some(slot) if self.watch(slot) => {}
                _ => return,
            }
        }
    }

    fn is_watchable(&self, slot: u16) -> bool {
        self.queues[usize::from(slot)].as_ref().is_some_and(|attached| attached.kick.is_some())
    }

    /// Has the ring report a queue's kicks. Whether it does: there may be no room, or no kick.
    fn watch(&mut self, slot: u16) -> bool {
        let Some(attached) = self.queues[usize::from(slot)].as_ref() else { return false };
        let watched = attached
            .kick
            .as_ref()
            .is_some_and(|kick| self.context.watch(self.owner, attached.cookie(slot), kick).is_ok());
        self.poll_list.watch(slot, watched);
        watched
    }

    /// Ends the service of a queue whose ring is broken, and says so, once.
    fn retire(&mut self, slot: u16, why: &str) {
        self.poll_list.retire(slot);
        if let Some(tell) = self.queues[usize::from(slot)].as_mut().and_then(|attached| attached.on_broken.take()) {
            tell(why);
        }
    }

    /// Pulls one batch from the queue in `slot`.
    #[inline(always)] // also where it is called for deep pulls, which are rare
    fn pull(&mut self, slot: u16) -> bool {
        if self.poll_list.phase(slot) != Some(Phase::Running) {
            return false;
        }
        let Some(attached) = self.queues[usize::from(slot)].as_mut() else { return false };
        let only = attached.disks.only();
        let way = match only {
            Some(disk) => self.channels.route_to(disk),
            None => Route::Any { disks: &attached.disks, channels: &mut self.channels },
        };
        let found = attached.runner.pull(&mut self.context, &mut SubmitContext { slot, now: self.now, way });
        if found == PullResult::Nothing {
            return false;
        }
        // Answers that the queue wrote itself are published with the others.
        mark_dirty(&mut self.dirty, &mut attached.dirty, slot);
        let only = only.map(|disk| disk.channel);
        if let Some(at) = only {
            self.channels.note_plugged(at);
        }
        match found {
            PullResult::More if self.channels.wants_more(only) => self.waiting.push(slot),
            PullResult::Broken(why) => self.retire(slot, why),
            PullResult::Nothing | PullResult::Requests | PullResult::More => {}
        }
        if only.is_none() {
            self.channels.forget_plugged();
        }
        true
    }

    /// Pulls on from queues that have more, for disks whose requests may be merged, until the plugs are deep enough.
    #[inline(never)]
    fn pull_on(&mut self) {
        let mut at = 0;
        while let Some(slot) = self.waiting.get(at).copied()
            && at < MAX_DEEP_PULLS
        {
            self.pull(slot);
            at += 1;
        }
        self.waiting.clear();
    }

    /// Gives ended requests to their queues, publishes and calls.
    #[inline]
    fn complete(&mut self) -> bool {
        // What a queue asks next may be refused, and so end at once; or it cancels.
        let mut more = !self.channels.completions.is_empty();
        while more {
            std::mem::swap(&mut self.channels.completions, &mut self.completing);
            self.complete_batch();
            more = !self.channels.completions.is_empty();
        }
        if self.dirty.is_empty() {
            return false;
        }
        let finished = self.clock.now();
        let mut ended = false;
        for at in 0..self.dirty.len() {
            let slot = self.dirty[at];
            let Some(attached) = self.queues[usize::from(slot)].as_mut() else { continue };
            attached.dirty = false;
            let published = attached.runner.publish(finished, &self.clock);
            self.now = published.at;
            if let Some(due) = published.owes {
                defer_call(&mut self.deferred_calls, slot, due);
            }
            ended |= self.poll_list.phase(slot) == Some(Phase::Draining) && attached.runner.in_flight() == 0;
        }
        self.dirty.clear();
        if self.closing {
            self.end_closing();
        }
        if ended {
            self.end_drained();
        }
        true
    }

    /// Gives ended requests to their queues.
    #[inline]
    fn complete_batch(&mut self) {
        for run in self.completing.chunk_by_mut(|one, next| one.tag.queue() == next.tag.queue()) {
            let slot = run[0].tag.queue();
            let Some(attached) = self.queues[usize::from(slot)].as_mut().filter(|attached| !attached.frozen) else {
                continue;
            };
            let way = Route::Any { disks: &attached.disks, channels: &mut self.channels };
            let mut door = SubmitContext { slot, now: self.now, way };
            attached.runner.finish(&mut self.context, run, &mut door);
            mark_dirty(&mut self.dirty, &mut attached.dirty, slot);
        }
        self.completing.clear();
        if self.channels.has_pending() {
            self.flush_pending();
        }
    }

    /// Makes the calls that are due of those that were put off.
    #[cold]
    fn send_deferred_calls(&mut self) {
        let (queues, now) = (&mut self.queues, self.now);
        self.deferred_calls.retain_mut(|(slot, due)| {
            if *due > now {
                return true;
            }
            let attached = queues[usize::from(*slot)].as_mut();
            // It may owe another one by now, or none.
            match attached.and_then(|attached| attached.runner.pay_call(now)) {
                Some(later) => {
                    *due = later;
                    true
                }
                None => false,
            }
        });
    }

    /// Nothing happened: arms queues whose window has closed. Whether the worker may sleep.
    pub(crate) fn rest(&mut self) -> IdleDecision {
        self.now = self.clock.now();
        let now = self.now;
        self.renew_watches();
        let queues = &mut self.queues;
        // The turn may have brought kicks and messages after it had looked for them.
        self.poll_list.rest(self.context.has_unread(), |slot| match queues[usize::from(slot)].as_mut() {
            Some(attached) => attached.runner.rest(now),
            None => IdleResult::Armed,
        })
    }

    /// Waits for kicks, messages and completions, and for what is due by the clock.
    fn sleep(&mut self) {
        // A full channel makes room with its next completion, which the ring brings, or by the clock.
        let storage = self.channels.deadline().map(|due| due.saturating_duration_since(Instant::now()));
        let calls = self.deferred_calls.iter().map(|(_, due)| *due);
        let clock = calls.min().map(|due| Duration::from_nanos(due.since(self.now)));
        // A eventfd that cannot be watched is looked at now and then.
        let eventfd = (!self.mailbox_polled).then_some(MAILBOX_CHECK);
        let wait = [storage, clock, eventfd].into_iter().flatten().min().map_or(Wait::Completion, Wait::AtMost);
        let before = self.now;
        self.context.turn(wait);
        self.now = self.clock.now();
        self.counters.sleeps += 1;
        self.counters.slept_ns += self.now.since(before);
    }

    /// Whether there is a slot for another queue. The last number is that of no queue but of merged requests.
    pub(crate) fn has_free_slot(&self) -> bool {
        self.queues.len() < usize::from(MERGED_SLOT) || self.queues.iter().any(Option::is_none)
    }

    /// A free slot, and the generation of the queue that will take it.
    pub(crate) fn free_slot(&mut self) -> (u16, u32) {
        self.generation = self.generation.wrapping_add(1);
        let slot = self.queues.iter().position(Option::is_none).unwrap_or_else(|| {
            self.queues.push(None);
            self.queues.len() - 1
        });
        assert!(slot < usize::from(MERGED_SLOT), "whoever queues a queue looks for room first");
        (slot as u16, self.generation)
    }

    /// Puts a queue in a free slot and starts serving it.
    pub(crate) fn attach(&mut self, slot: u16, phase: Phase, attached: AttachedQueue) {
        self.queues[usize::from(slot)] = Some(attached);
        self.poll_list.attached(slot, phase);
        self.watch(slot);
    }

    /// Lets a queue's requests go to one more disk. No such queue: nothing.
    pub(crate) fn open_disk(&mut self, slot: u16, generation: u32, disk: &QueueDisk) -> Result<(), AttachError> {
        if let Some(attached) = queue_of(&mut self.queues, slot, generation) {
            attached.disks.open(&mut self.context, &mut self.channels, disk)?;
            attached.runner.opened(disk.slot);
        }
        Ok(())
    }

    /// Lets no more of a queue's requests go to a disk; `left` is told when none is in flight there.
    pub(crate) fn close_disk(&mut self, slot: u16, generation: u32, disk: DiskSlot, left: SyncSender<()>) {
        if let Some((attached, _)) = self.find(slot, generation) {
            let channel = attached.disks.channel(disk);
            let tags: Vec<Tag> = attached.runner.of_disk(disk).into_iter().map(|index| Tag::new(slot, index)).collect();
            attached.disks.begin_close(disk, left);
            // Else it would wait for those that are parked, or are going to be, until somebody says `resume`.
            if let Some(at) = channel.filter(|at| !tags.is_empty() && self.channels.get(*at).guard.is_some()) {
                self.channels.cancel(&mut self.context, at, &tags);
            }
            self.closing = true;
            self.end_closing();
        }
    }

    fn end_closing(&mut self) {
        self.closing = false;
        for attached in self.queues.iter_mut().flatten() {
            attached.disks.end_close(&mut self.context, &mut self.channels, |disk| attached.runner.uses(disk));
            self.closing |= attached.disks.is_closing();
        }
    }

    /// Has a queue see a disk's new size.
    pub(crate) fn refresh_disk(&mut self, slot: u16, generation: u32, disk: DiskSlot) {
        if let Some(attached) = queue_of(&mut self.queues, slot, generation) {
            attached.disks.refresh(&mut self.channels, disk);
        }
    }

    /// The queue at `slot`, if it is still the same one.
    pub(crate) fn find(&mut self, slot: u16, generation: u32) -> Option<(&mut AttachedQueue, &mut UringContext)> {
        queue_of(&mut self.queues, slot, generation).map(|attached| (attached, &mut self.context))
    }

    /// Stops or goes on pulling from a queue; requests in flight end as usual.
    pub(crate) fn set_enabled(&mut self, slot: u16, generation: u32, enabled: bool) {
        if self.find(slot, generation).is_some() {
            self.poll_list.enable(slot, enabled);
        }
    }

    /// Replaces a queue's kick.
    pub(crate) fn set_kick(&mut self, slot: u16, generation: u32, kick: Option<Kick>) {
        self.generation = self.generation.wrapping_add(1);
        let fresh = self.generation;
        let Some((attached, _)) = self.find(slot, generation) else { return };
        let old = attached.cookie(slot);
        // A new watch number tells the old watch's last signal from the new one's.
        attached.watch = fresh;
        attached.kick = kick;
        self.context.cancel(self.owner, old);
        self.watch(slot);
    }

    /// Stops pulling from a queue and lets `done` know when nothing of it is in flight. What is parked fails.
    pub(crate) fn drain(&mut self, slot: u16, generation: u32, done: SyncSender<Leaving>) {
        if self.find(slot, generation).is_some() {
            self.channels.begin_leave(slot);
            self.drain_as_it_is(slot, generation, done);
        }
    }

    /// The same, but what is parked stays so: somebody else sees to it.
    pub(crate) fn drain_as_it_is(&mut self, slot: u16, generation: u32, done: SyncSender<Leaving>) {
        let Some((attached, _)) = self.find(slot, generation) else { return };
        attached.leave = Some(done);
        self.poll_list.drain(slot);
        self.end_drained();
    }

    /// Leaves a draining queue's requests unanswered from here on. All that was finished before is published first.
    pub(crate) fn freeze(&mut self, slot: u16, generation: u32) {
        self.complete();
        if let Some((attached, _)) = self.find(slot, generation) {
            attached.frozen = true;
        }
    }

    /// All that the worker and its queues have counted. `number`: the worker's, for the queues' names.
    pub(crate) fn stats(&self, number: u32) -> WorkerStats {
        let now = self.clock.now();
        let cpu = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        let queue = |(slot, attached): (usize, &Option<AttachedQueue>)| {
            let attached = attached.as_ref()?;
            let id = QueueId { worker: number, generation: attached.generation };
            Some((id, with_merges(attached.runner.report(now), self.channels.merges(slot as u16))))
        };
        WorkerStats {
            cpu_ns: cpu.tv_sec as u64 * 1_000_000_000 + cpu.tv_nsec as u64,
            merge_splits: self.channels.counts().splits,
            queues: self.queues.iter().enumerate().filter_map(queue).collect(),
            ..self.counters.clone()
        }
    }

    /// The oldest request of each disk that has any.
    pub(crate) fn ages(&self) -> Vec<Age> {
        let now = self.clock.now();
        let mut ages: Vec<Age> = Vec::new();
        for attached in self.queues.iter().flatten() {
            attached.runner.each_pull(&mut |disk, pulled| {
                let Some(open) = attached.disks.channel(disk).and_then(|at| self.channels.look(at)) else { return };
                let oldest = Duration::from_nanos(now.since(pulled));
                match ages.iter_mut().find(|age| Arc::ptr_eq(&age.health, &open.health)) {
                    Some(age) => {
                        age.oldest = age.oldest.max(oldest);
                        age.in_flight += 1;
                    }
                    None => ages.push(Age { health: Arc::clone(&open.health), oldest, in_flight: 1 }),
                }
            });
        }
        ages
    }

    pub(crate) fn end_drained(&mut self) {
        for slot in 0..self.queues.len() as u16 {
            let place = &mut self.queues[usize::from(slot)];
            let idle = place.as_ref().is_some_and(|attached| attached.runner.in_flight() == 0 && !attached.frozen);
            if !idle || self.poll_list.phase(slot) != Some(Phase::Draining) {
                continue;
            }
            let Some(mut attached) = place.take() else { continue };
            // A call that was put off is due now: nobody makes it later.
            attached.runner.pay_call(Ticks(u64::MAX));
            self.context.cancel(self.owner, attached.cookie(slot));
            self.poll_list.leave(slot);
            self.deferred_calls.retain(|(deferred, _)| *deferred != slot);
            self.channels.end_leave(slot);
            attached.disks.close_all(&mut self.context, &mut self.channels);
            let merges = self.channels.take_merges(slot);
            if let Some(leave) = attached.leave.take() {
                let report = with_merges(attached.runner.report(self.now), merges);
                let finish = attached.unseat;
                let position = finish(attached.runner, &mut self.context);
                // Whoever asked may have gone; the queue ends all the same.
                let _ = leave.send(Leaving { position, report });
            }
        }
    }
}

/// The queue in a slot, if it is still the same one.
fn queue_of(queues: &mut [Option<AttachedQueue>], slot: u16, generation: u32) -> Option<&mut AttachedQueue> {
    queues.get_mut(usize::from(slot))?.as_mut().filter(|attached| attached.generation == generation)
}

/// What is left of a queue that was drained.
pub(crate) struct Leaving {
    /// The queue's position, boxed by its own type.
    pub(crate) position: Box<dyn std::any::Any + Send>,
    pub(crate) report: QueueStats,
}

impl Leaving {
    /// What is left of a queue with positions of a known type.
    pub(crate) fn detached<P: 'static>(self) -> Result<Detached<P>, WorkerGone> {
        let position = self.position.downcast::<P>().map_err(|_| WorkerGone)?;
        Ok(Detached { position: *position, report: self.report })
    }
}

/// Adds what the plugs counted of a queue.
fn with_merges(mut report: QueueStats, merges: Merges) -> QueueStats {
    report.counters.read_merges = merges.reads;
    report.counters.write_merges = merges.writes;
    report.counters.other_merges = merges.others;
    report
}

/// Notes that the queue in `slot` owes a call.
#[cold]
fn defer_call(list: &mut Vec<(u16, Ticks)>, slot: u16, due: Ticks) {
    if !list.iter().any(|(deferred, _)| *deferred == slot) {
        list.push((slot, due));
    }
}

#[inline]
fn mark_dirty(list: &mut Vec<u16>, mark: &mut bool, slot: u16) {
    if !*mark {
        *mark = true;
        list.push(slot);
    }
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker").field("queues", &self.queues.iter().flatten().count()).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for dyn AnyQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("queue")
    }
}

#[cfg(test)]
mod counting;
#[cfg(test)]
mod fairness;
#[cfg(test)]
mod signals;
#[cfg(test)]
mod stopping;
#[cfg(test)]
mod tests;
