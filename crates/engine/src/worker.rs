//! A worker's turn: pull a bounded batch from each queue, submit once per channel, reap, finish, publish once per
//! queue, call each guest at most once. If nothing happened: continue to poll while a window is open, continuously or
//! by a timer, else arm, check again, and sleep.

use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use mqblk_core::{DiskSlot, Tag};
use mqblk_uring::{Kick, UringContext, UringOptions, Wait};

use crate::attach_error::AttachError;
use crate::channels::Channels;
use crate::clock::{Clock, Ticks};
use crate::counters::WorkerStats;
use crate::mailbox::MailboxReceiver;
use crate::options::QueuePolicy;
use crate::poll::{CpuOffers, PollPolicy, TIMER_PERIOD};
use crate::poll_list::{IdleDecision, IdleResult, Phase, PollList};
use crate::queue_options::{QueueDisk, QueueFault};
use crate::request::{AnyCompletion, AnyRequest, QUEUE_SLOTS};
use crate::route::{SubmitContext, ToDisks, ToOnlyDisk};
use crate::runner::{AnyQueue, PullResult};

mod attached_queue;
mod attaching;
mod completing;
mod leaving;
mod report;
pub use attached_queue::Detached;
pub(crate) use attached_queue::{AttachedQueue, LeavingQueue, LeftQueue, MovingParts, OnDrained};
pub(crate) use report::Age;

/// Cookie of the mailbox's eventfd. The cookie of a queue's kick is its slot and the number of the watch.
const MAILBOX: u64 = u64::MAX;

/// Most messages handled in one turn.
const MAX_MESSAGES: usize = 16;

/// Most further pulls in one turn: a queue that completes requests itself fills no plug.
const MAX_DEEP_PULLS: usize = 64;

/// Interval at which the mailbox is checked while the ring is too full to poll its eventfd.
const MAILBOX_CHECK: Duration = Duration::from_millis(1);

/// Everything that one worker thread owns.
pub(crate) struct Worker {
    pub(crate) context: UringContext,
    pub(crate) clock: Clock,
    pub(crate) channels: Channels,
    /// Boxed, so that a lookup by slot takes a few instructions.
    pub(crate) queues: Vec<Option<Box<AttachedQueue>>>,
    poll_list: PollList,
    client: mqblk_uring::ClientId,
    pub(crate) mailbox: MailboxReceiver<Worker>,
    /// True if the ring polls the mailbox's eventfd.
    mailbox_polled: bool,
    /// Completions on their way to their queues.
    completing: Vec<AnyCompletion>,
    /// Woken queues, by slot and generation; kept for its capacity.
    woken_queues: Vec<(u16, u32)>,
    /// True if a disk of some queue is being closed.
    closing: bool,
    /// Slots of queues that drain.
    draining: Vec<u16>,
    /// True if a disk is being closed, or a queue drains.
    leaving: bool,
    /// Slots of queues with completions to publish.
    dirty: Vec<u16>,
    /// Slots of queues with a deferred call, and its due time.
    deferred_calls: Vec<(u16, Ticks)>,
    offers: CpuOffers,
    /// True if a window of a polled queue is open. Otherwise the worker sleeps soon, or its CPU is its own.
    offers_cpu: bool,
    counters: WorkerStats,
    /// Slots of queues to pull from again in this turn.
    deep_pulls: Vec<u16>,
    generation: u32,
    stopping: bool,
}

impl Worker {
    /// Returns a worker without queues. Must be called on the worker's thread.
    pub(crate) fn new(options: UringOptions, mailbox: MailboxReceiver<Worker>) -> std::io::Result<Worker> {
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
            client: owner,
            mailbox,
            mailbox_polled: true,
            completing: Vec::with_capacity(4096),
            woken_queues: Vec::new(),
            closing: false,
            draining: Vec::new(),
            leaving: false,
            dirty: Vec::with_capacity(256),
            deferred_calls: Vec::with_capacity(256),
            offers: CpuOffers::new(),
            offers_cpu: false,
            counters: WorkerStats::default(),
            deep_pulls: Vec::with_capacity(256),
            generation: 0,
            stopping: false,
        })
    }

    /// Runs turns until [`stop`](Self::stop).
    pub(crate) fn run(&mut self) {
        while !self.stopping {
            if self.turn() {
                self.counters.turns += 1;
                self.offers.active();
            } else {
                self.counters.empty_turns += 1;
                match self.poll_or_arm() {
                    IdleDecision::Turn => self.poll_on(),
                    IdleDecision::Timer => self.sleep(Some(TIMER_PERIOD)),
                    IdleDecision::Sleep => self.sleep(None),
                }
            }
        }
    }

    /// Between two idle turns: offers the CPU to other threads from time to time.
    #[inline]
    fn poll_on(&mut self) {
        std::hint::spin_loop();
        if self.offers_cpu && self.offers.is_due(self.clock.last()) {
            self.offer_cpu();
        }
    }

    /// Yields the CPU to a thread that is ready to run: often one of the guest that the worker polls for.
    #[inline(never)]
    fn offer_cpu(&mut self) {
        let before = self.clock.now();
        rustix::thread::sched_yield();
        let now = self.clock.read();
        let away = now.since(before);
        self.counters.yields += 1;
        if self.offers.offered(away, now) {
            self.counters.away_ns += away;
        }
    }

    /// Ends [`run`](Self::run) after this turn.
    pub(crate) fn stop(&mut self) {
        self.stopping = true;
    }

    /// As [`stop`](Self::stop), unless it serves queues. Returns their number.
    pub(crate) fn stop_if_unused(&mut self) -> usize {
        let queues = self.queues.iter().flatten().count();
        self.stopping |= queues == 0;
        queues
    }

    /// Runs one turn. Returns true if anything happened.
    #[inline(always)] // it has one caller in a worker thread, and one where it is stepped
    pub(crate) fn turn(&mut self) -> bool {
        if !self.mailbox_polled {
            self.mailbox_polled = self.context.watch(self.client, MAILBOX, &self.mailbox.eventfd).is_ok();
        }
        if !self.deferred_calls.is_empty() {
            self.send_deferred_calls();
        }
        // Counted, not OR-ed: saves a load and a store.
        let mut happened = usize::from(self.read_signals());
        let pulled = match *self.poll_list.polled() {
            [only] => self.pull(only),
            _ => self.pull_polled(),
        };
        if self.channels.has_pending() {
            self.flush_pending();
        }
        if pulled || self.channels.has_left() {
            if !self.deep_pulls.is_empty() {
                self.pull_deep();
            }
            let (queues, clock) = (&mut self.queues, &mut self.clock);
            let stamp = |requests: &[AnyRequest]| {
                let now = clock.read();
                let mut left = requests;
                while let [first, others @ ..] = left {
                    let slot = first.tag.queue();
                    left = match queues[usize::from(slot)].as_mut() {
                        Some(attached) => &left[attached.runner.submitted(slot, left, now)..],
                        None => others,
                    };
                }
            };
            // After a pull `complete` has something to publish.
            happened += self.channels.submit(&mut self.context, &mut self.completing, stamp);
        }
        self.context.turn(Wait::No);
        if !self.channels.is_settled() {
            happened += usize::from(self.channels.reap(&mut self.context, &mut self.completing));
        }
        if self.context.has_unread() {
            happened += usize::from(self.reap_unread());
        }
        self.complete() || happened > 0
    }

    /// Reaps idle channels with unread completions. Returns true if there were any; otherwise they are kicks and
    /// messages, for the next turn. Without this the worker would neither read them nor sleep.
    #[cold]
    fn reap_unread(&mut self) -> bool {
        let before = self.context.unread_besides(self.client);
        if before > 0 {
            self.channels.reap_all(&mut self.context, &mut self.completing);
        }
        // A turn follows even if no request has ended: a channel may now take requests that it refused before.
        self.context.unread_besides(self.client) < before
    }

    /// Handles kicks and messages. Returns true if there were any.
    #[inline]
    fn read_signals(&mut self) -> bool {
        if !self.context.has_unread() || !self.context.has_completions(self.client) {
            return false;
        }
        let mut messages = false;
        while let Some(signal) = self.context.next(self.client) {
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
        let mut woken = std::mem::take(&mut self.woken_queues);
        self.mailbox.take_woken(&mut woken);
        for (slot, generation) in woken.drain(..) {
            self.woken(slot, generation);
        }
        self.woken_queues = woken;
        for _ in 0..MAX_MESSAGES {
            match self.mailbox.messages.try_recv() {
                Ok(message) => message(self),
                Err(_) => return,
            }
        }
        // More may wait: signal again rather than starve the queues.
        self.mailbox.eventfd.signal();
    }

    /// Handles a wake of the queue in `slot`.
    pub(crate) fn woken(&mut self, slot: u16, generation: u32) {
        let phase = self.poll_list.phase(slot);
        let Some(attached) = queue_of(&mut self.queues, slot, generation).filter(|attached| !attached.frozen) else {
            return;
        };
        // A queue that is about to move may take requests: another queue's barrier waits for the earlier ones.
        let moves_running = matches!(attached.on_drained, Some(OnDrained::Move(Phase::Running, _)));
        let running = phase == Some(Phase::Running) || moves_running;
        let route = ToDisks { disks: &attached.disks, channels: &mut self.channels };
        let mut submit = SubmitContext { slot, now: self.clock.last(), route };
        let taken = attached.runner.woken(&mut self.context, &mut submit, running);
        mark_dirty(&mut self.dirty, &mut attached.dirty, slot);
        if let Err(why) = taken {
            self.stop_broken(slot, why);
        }
        self.flush_pending();
    }

    /// Flushes requests that were plugged outside of a pull, and cancellations.
    #[cold]
    fn flush_pending(&mut self) {
        if self.channels.flush_pending() {
            self.cancel();
        }
    }

    /// Cancels the requests that queues have chosen.
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
            self.stop_broken(slot, "its kick descriptor cannot be polled");
            return;
        }
        attached.runner.kicked(self.clock.last());
        self.poll_list.kicked(slot);
        if !watching {
            // The kernel ends a multishot poll when the completion queue is full. The eventfd was never read, so a new
            // poll completes at once if a kick was missed.
            self.poll_list.set_watched(slot, false);
        }
    }

    /// Watches again the kicks for which the ring was too full. Queues without a kick stay polled.
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

    /// Polls the queue's kick descriptor through the ring. Returns false if the ring is full or the queue has no kick.
    fn watch(&mut self, slot: u16) -> bool {
        let Some(attached) = self.queues[usize::from(slot)].as_ref() else { return false };
        let watched = attached
            .kick
            .as_ref()
            .is_some_and(|kick| self.context.watch(self.client, attached.cookie(slot), kick).is_ok());
        self.poll_list.set_watched(slot, watched);
        watched
    }

    /// Stops pulling from a queue whose ring is broken, and reports that once.
    fn stop_broken(&mut self, slot: u16, why: &str) {
        self.poll_list.mark_broken(slot);
        if let Some(attached) = self.queues[usize::from(slot)].as_mut() {
            attached.runner.report(QueueFault::BrokenRing(why));
        }
    }

    /// Pulls one batch from each polled queue. Returns true if one had requests. Kept out of line: a worker with one
    /// queue does not pay for the loop's registers.
    #[inline(never)]
    fn pull_polled(&mut self) -> bool {
        let mut pulled = false;
        for at in 0..self.poll_list.polled().len() {
            pulled |= self.pull(self.poll_list.polled()[at]);
        }
        pulled
    }

    /// Pulls one batch from the queue in `slot`. Returns true if it had requests.
    #[inline(always)] // for the only queue, for each of several, and for deep pulls, which are rare
    fn pull(&mut self, slot: u16) -> bool {
        if !self.poll_list.is_running(slot) {
            return false;
        }
        let Some(attached) = self.queues[usize::from(slot)].as_deref_mut() else { return false };
        let now = self.clock.last();
        let Some(disk) = attached.disks.only() else { return self.pull_for_any(slot) };
        let route = ToOnlyDisk::new(disk, &mut self.channels, &mut self.completing);
        let found = attached.runner.pull(&mut self.context, &mut SubmitContext { slot, now, route });
        if found == PullResult::Nothing {
            return false;
        }
        // Requests that the queue completed itself are published with the others.
        mark_dirty(&mut self.dirty, &mut attached.dirty, slot);
        self.channels.mark_plugged(disk.channel);
        if found != PullResult::Requests {
            let channel = disk.channel;
            self.follow_pull(slot, found, Some(channel));
        }
        true
    }

    /// As [`pull`](Self::pull), for a queue that has other disks than the first.
    #[inline(never)]
    fn pull_for_any(&mut self, slot: u16) -> bool {
        let Some(attached) = self.queues[usize::from(slot)].as_mut() else { return false };
        let route = ToDisks { disks: &attached.disks, channels: &mut self.channels };
        let mut submit = SubmitContext { slot, now: self.clock.last(), route };
        let found = attached.runner.pull_for_any(&mut self.context, &mut submit);
        if found == PullResult::Nothing {
            return false;
        }
        mark_dirty(&mut self.dirty, &mut attached.dirty, slot);
        self.follow_pull(slot, found, None);
        self.channels.forget_plugged();
        true
    }

    /// Notes that a queue has more requests, or stops a broken one. `only`: the channel of its only disk.
    fn follow_pull(&mut self, slot: u16, found: PullResult, only: Option<usize>) {
        match found {
            PullResult::More if self.channels.wants_more(only) => self.deep_pulls.push(slot),
            PullResult::Broken => {
                let why = self.queues[usize::from(slot)].as_ref().map_or("", |attached| attached.runner.why_broken());
                self.stop_broken(slot, why);
            }
            PullResult::Nothing | PullResult::Requests | PullResult::More => {}
        }
    }

    /// Pulls again from queues that have more, for disks whose requests may be merged, until the plugs are deep enough.
    #[inline(never)]
    fn pull_deep(&mut self) {
        let mut at = 0;
        while let Some(slot) = self.deep_pulls.get(at).copied()
            && at < MAX_DEEP_PULLS
        {
            self.pull(slot);
            at += 1;
        }
        self.deep_pulls.clear();
    }

    /// After an idle turn: arms the queues whose poll window has closed, and decides whether the worker may sleep.
    pub(crate) fn poll_or_arm(&mut self) -> IdleDecision {
        let now = self.clock.read();
        self.renew_watches();
        let queues = &mut self.queues;
        let mut offers_cpu = false;
        let is_wanted = self.offers.is_wanted(now);
        // Kicks and messages may have arrived in the turn after it had checked for them.
        let decision = self.poll_list.decide_when_idle(self.context.has_unread(), |slot| {
            let Some(attached) = queues[usize::from(slot)].as_mut() else { return IdleResult::Armed };
            let result = attached.runner.poll_or_arm(now, is_wanted);
            offers_cpu |= result == IdleResult::PollInWindow;
            result
        });
        self.offers_cpu = offers_cpu;
        decision
    }

    /// Sleeps until a kick, a message or a completion arrives, or a deadline passes; for `at_most`.
    fn sleep(&mut self, at_most: Option<Duration>) {
        self.channels.begin_sleep();
        // A full channel has space again after its next completion, which arrives in the ring, or at its deadline.
        let storage = self.channels.deadline().map(|due| due.saturating_duration_since(Instant::now()));
        let calls = self.deferred_calls.iter().map(|(_, due)| *due);
        let clock = calls.min().map(|due| Duration::from_nanos(due.since(self.clock.last())));
        // An eventfd that the ring does not poll is checked periodically.
        let eventfd = (!self.mailbox_polled).then_some(MAILBOX_CHECK);
        let wait =
            [at_most, storage, clock, eventfd].into_iter().flatten().min().map_or(Wait::Completion, Wait::AtMost);
        let before = self.clock.last();
        self.context.turn(wait);
        self.channels.end_sleep();
        let now = self.clock.read();
        self.counters.sleeps += 1;
        self.counters.slept_ns += now.since(before);
    }

    /// Returns true if there is a slot for another queue.
    pub(crate) fn has_free_slot(&self) -> bool {
        self.queues.len() < QUEUE_SLOTS || self.queues.iter().any(Option::is_none)
    }

    /// Returns a free slot, and the generation of the queue that will take it.
    pub(crate) fn free_slot(&mut self) -> (u16, u32) {
        self.generation = self.generation.wrapping_add(1);
        let slot = self.queues.iter().position(Option::is_none).unwrap_or_else(|| {
            self.queues.push(None);
            self.queues.len() - 1
        });
        assert!(slot < QUEUE_SLOTS, "the caller has checked for a free slot");
        (slot as u16, self.generation)
    }

    /// Attaches a queue in a free slot and starts to serve it.
    pub(crate) fn insert(&mut self, slot: u16, phase: Phase, attached: AttachedQueue) {
        self.queues[usize::from(slot)] = Some(Box::new(attached));
        self.poll_list.attach(slot, phase);
        self.watch(slot);
    }

    /// Opens one more disk for a queue. Does nothing if the queue is gone.
    pub(crate) fn open_disk(&mut self, slot: u16, generation: u32, disk: &QueueDisk) -> Result<(), AttachError> {
        if let Some(attached) = queue_of(&mut self.queues, slot, generation) {
            attached.disks.open(&mut self.context, &mut self.channels, disk)?;
            attached.runner.opened(disk.slot);
        }
        Ok(())
    }

    /// Closes a disk for a queue. Signals `left` when none of the queue's requests is in flight there.
    pub(crate) fn close_disk(&mut self, slot: u16, generation: u32, disk: DiskSlot, left: SyncSender<()>) {
        if let Some((attached, _)) = self.find(slot, generation) {
            let channel = attached.disks.channel(disk);
            let tags: Vec<Tag> =
                attached.runner.indexes_of_disk(disk).into_iter().map(|index| Tag::new(slot, index)).collect();
            attached.disks.begin_close(disk, left);
            if let Some(at) = channel {
                self.channels.let_go(at, slot, false);
            }
            // Otherwise it would wait for parked requests, present or future, until the disk is resumed.
            if let Some(at) = channel.filter(|at| !tags.is_empty() && self.channels.get(*at).guard.is_some()) {
                self.channels.cancel(&mut self.context, at, &tags);
            }
            (self.closing, self.leaving) = (true, true);
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

    /// Makes a queue use a disk's new size.
    pub(crate) fn refresh_disk(&mut self, slot: u16, generation: u32, disk: DiskSlot) {
        if let Some(attached) = queue_of(&mut self.queues, slot, generation) {
            attached.disks.refresh(&mut self.channels, disk);
        }
    }

    /// Returns the queue in `slot`, if its generation matches.
    pub(crate) fn find(&mut self, slot: u16, generation: u32) -> Option<(&mut AttachedQueue, &mut UringContext)> {
        queue_of(&mut self.queues, slot, generation).map(|attached| (attached, &mut self.context))
    }

    /// Starts or stops pulling from a queue. Requests in flight complete as usual.
    pub(crate) fn set_enabled(&mut self, slot: u16, generation: u32, enabled: bool) {
        if self.find(slot, generation).is_some() {
            self.poll_list.enable(slot, enabled);
        }
    }

    /// Changes how a queue is polled, and how its calls are deferred. Without a kick it is always polled.
    pub(crate) fn set_policy(&mut self, slot: u16, generation: u32, policy: QueuePolicy) {
        let now = self.clock.now();
        let Some((attached, _)) = self.find(slot, generation) else { return };
        let poll = if attached.kick.is_some() { policy.poll } else { PollPolicy::Busy };
        let policy = QueuePolicy { poll, ..policy };
        attached.runner.set_policy(policy, now);
        // As after a kick: its new window begins now.
        self.poll_list.kicked(slot);
    }

    /// Replaces a queue's kick descriptor.
    pub(crate) fn set_kick(&mut self, slot: u16, generation: u32, kick: Option<Kick>) {
        self.generation = self.generation.wrapping_add(1);
        let fresh = self.generation;
        let Some((attached, _)) = self.find(slot, generation) else { return };
        let old = attached.cookie(slot);
        // A new number distinguishes the last completion of the old watch from those of the new one.
        attached.watch = fresh;
        attached.kick = kick;
        self.context.cancel(self.client, old);
        self.watch(slot);
    }
}

/// Returns the queue in a slot, if its generation matches.
fn queue_of(queues: &mut [Option<Box<AttachedQueue>>], slot: u16, generation: u32) -> Option<&mut AttachedQueue> {
    queues.get_mut(usize::from(slot))?.as_deref_mut().filter(|attached| attached.generation == generation)
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
#[cfg(test)]
mod throttling;
