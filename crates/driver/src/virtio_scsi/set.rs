//! The request queues that a thread owns, and the handover of commands to other threads' queues.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use mqblk_vhost_user_client::EventFd;

use super::command::Command;
use super::handover::Mailbox;
use super::queue::{CommandInFlight, ScsiCompletion, ScsiQueue, tag};
use super::steering::TargetSteering;
use crate::call_event::{self, CallEvent, new_eventfd};
use crate::{DeviceError, DriverError, SubmitError, Waker};

/// Initial capacity of a mailbox.
const MAILBOX_CAPACITY: usize = 256;
/// Number of targets of a controller.
const TARGETS: usize = 256;

/// Selects the queue of a command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SteeringPolicy {
    /// A target's commands stay on one queue while any of them is in flight. A command that is alone moves the target
    /// to its submitter's queue: the rule of the multi-queue virtio-scsi driver of 2012.
    #[default]
    Target,
    /// The submitter's queue, as in later kernels. A target's commands are not ordered.
    Submitter,
    /// Queue T modulo the number of queues for target T.
    Fixed,
}

/// A command that is handed over to the owner of its queue.
#[derive(Clone, Copy, Debug)]
struct RemoteCommand {
    command: Command,
    user_data: u32,
    origin: u16,
    /// The queue's index in its owner's set.
    queue: u16,
}

/// A message between threads.
#[derive(Clone, Copy, Debug)]
enum Message {
    Command(RemoteCommand),
    Completion(ScsiCompletion),
}

/// State that all sets of a device share: steering and mailboxes.
#[derive(Debug)]
pub(crate) struct CommandExchange {
    policy: SteeringPolicy,
    targets: Box<[TargetSteering]>,
    mailboxes: Box<[Mailbox<Message>]>,
    wakers: Box<[Waker]>,
    queue_count: u16,
    /// Number of times that a thread has finished a round of work, over all threads.
    finished: AtomicU64,
}

impl CommandExchange {
    pub(crate) fn new(policy: SteeringPolicy, queue_count: u16, wakers: Vec<Waker>) -> CommandExchange {
        // The one queue of one thread needs no count.
        let is_alone = queue_count == 1 && wakers.len() == 1;
        CommandExchange {
            policy: if is_alone { SteeringPolicy::Submitter } else { policy },
            targets: (0..TARGETS).map(|_| TargetSteering::default()).collect(),
            mailboxes: wakers.iter().map(|_| Mailbox::new(MAILBOX_CAPACITY)).collect(),
            wakers: wakers.into(),
            queue_count,
            finished: AtomicU64::new(0),
        }
    }

    fn threads(&self) -> u16 {
        self.wakers.len() as u16
    }

    #[inline]
    fn begin(&self, target: u8, own: u16) -> u16 {
        match self.policy {
            SteeringPolicy::Target => self.targets[usize::from(target)].begin(own),
            SteeringPolicy::Submitter => own,
            SteeringPolicy::Fixed => u16::from(target) % self.queue_count,
        }
    }

    #[inline]
    fn end(&self, target: u8) {
        if self.policy == SteeringPolicy::Target {
            self.targets[usize::from(target)].end();
        }
    }

    fn push(&self, to: u16, message: Message) {
        let to = usize::from(to);
        if self.mailboxes[to].push(message) {
            self.wakers[to].wake();
        }
    }
}

/// The latest end of a wait.
#[derive(Clone, Copy, Debug)]
enum SleepLimit {
    /// No limit; at once if there is nothing to wait for.
    None,
    /// As `None`, and after this time, in milliseconds.
    Millis(Duration),
    /// After this time, exact to microseconds.
    Exact(Duration),
}

/// The request queues that a thread owns: no other thread submits to them or reaps from them. A command whose target is
/// bound to another thread's queue is handed over to that thread, and its completion comes back
/// ([`receive`](Self::receive)). So a thread that has finished its own work serves the others until
/// [`finish`](Self::finish) returns true.
#[derive(Debug)]
pub struct ScsiQueueSet {
    /// Index of this set. Its queues have the numbers `index`, `index` plus the number of sets, and so on.
    index: u16,
    queues: Vec<ScsiQueue>,
    call_event: CallEvent,
    exchange: Arc<CommandExchange>,
    /// For each queue, in order: commands of other threads that wait for space in the ring.
    waiting: Vec<VecDeque<RemoteCommand>>,
    messages: Vec<Message>,
    /// Completions of own commands, received from other threads.
    received: VecDeque<ScsiCompletion>,
    /// Own commands on other threads' queues that are not completed.
    remote_count: u32,
    /// Own commands that are not reaped.
    outstanding: u32,
    max_outstanding: u32,
    handed_over: u64,
    /// Rounds of work that this thread has finished.
    rounds: u64,
    is_finished: bool,
}

impl ScsiQueueSet {
    pub(crate) fn new(
        index: u16,
        queues: Vec<ScsiQueue>,
        call_event: CallEvent,
        exchange: Arc<CommandExchange>,
        max_outstanding: u32,
    ) -> ScsiQueueSet {
        ScsiQueueSet {
            index,
            waiting: queues.iter().map(|_| VecDeque::new()).collect(),
            queues,
            call_event,
            exchange,
            messages: Vec::with_capacity(MAILBOX_CAPACITY),
            received: VecDeque::with_capacity(MAILBOX_CAPACITY),
            remote_count: 0,
            outstanding: 0,
            max_outstanding,
            handed_over: 0,
            rounds: 0,
            is_finished: false,
        }
    }

    /// Returns the queues.
    #[inline]
    pub fn queues_mut(&mut self) -> &mut [ScsiQueue] {
        &mut self.queues
    }

    /// Returns the number of own commands submitted and not yet reaped, on all threads' queues.
    #[inline]
    pub fn outstanding(&self) -> u32 {
        self.outstanding
    }

    /// Returns the number of own commands on other threads' queues.
    #[inline]
    pub fn remote_outstanding(&self) -> u32 {
        self.remote_count
    }

    /// Returns true if commands of any thread are in flight on this set's queues.
    pub fn is_serving(&self) -> bool {
        self.queues.iter().any(|queue| queue.in_flight() != 0)
    }

    /// Returns the number of own commands handed over to other threads so far.
    pub fn handed_over(&self) -> u64 {
        self.handed_over
    }

    /// Returns the tag of this set's command with `user_data`, for task management.
    pub fn tag(&self, user_data: u32) -> u64 {
        tag(self.index, user_data)
    }

    /// Submits a command to this set's queue `own`, unless the steering selects another one. The completion returns
    /// `user_data`, which must not be in flight already: it is part of the command's tag.
    ///
    /// # Errors
    /// [`SubmitError::Full`] until a completion is reaped.
    #[inline]
    pub fn submit(&mut self, own: usize, user_data: u32, command: &Command) -> Result<(), SubmitError> {
        if self.outstanding == self.max_outstanding {
            return Err(SubmitError::Full);
        }
        let (threads, target) = (self.exchange.threads(), command.address.target);
        let preferred = own as u16 * threads + self.index;
        let chosen = self.exchange.begin(target, preferred);
        let (owner, queue) = match chosen == preferred {
            true => (self.index, own as u16),
            false => (chosen % threads, chosen / threads),
        };
        if owner == self.index {
            let queue = usize::from(queue);
            // Commands of other threads that wait come first.
            let outcome = match self.waiting[queue].is_empty() {
                true => self.queues[queue].submit(user_data, self.index, command),
                false => Err(SubmitError::Full),
            };
            if let Err(error) = outcome {
                self.exchange.end(target);
                return Err(error);
            }
        } else {
            let remote = RemoteCommand { command: *command, user_data, origin: self.index, queue };
            self.exchange.push(owner, Message::Command(remote));
            self.remote_count += 1;
            self.handed_over += 1;
        }
        self.outstanding += 1;
        Ok(())
    }

    /// Publishes all submitted commands of this set's queues.
    ///
    /// # Errors
    /// If a kick cannot be written.
    #[inline]
    pub fn publish(&mut self) -> io::Result<()> {
        self.queues.iter_mut().try_for_each(ScsiQueue::publish)
    }

    /// Checks queue `index` for completions. Returns their number, including those of other threads' commands.
    ///
    /// # Errors
    /// If the device violates the protocol. The queue cannot be used any more.
    #[inline]
    pub fn poll(&mut self, index: usize) -> Result<u16, DeviceError> {
        self.queues[index].poll()
    }

    /// Reaps one own completion of those that the last [`poll`](Self::poll) of queue `index` has found. Completions of
    /// other threads' commands before it are forwarded to them.
    ///
    /// # Errors
    /// If the device violates the protocol. The queue cannot be used any more.
    #[inline(always)] // else the completion travels through memory
    pub fn reap(&mut self, index: usize) -> Result<Option<ScsiCompletion>, DeviceError> {
        while let Some((CommandInFlight { origin, target, .. }, completion)) = self.queues[index].reap()? {
            self.exchange.end(target);
            if !self.waiting[index].is_empty() {
                self.submit_waiting(index);
            }
            if origin == self.index {
                self.outstanding -= 1;
                return Ok(Some(completion));
            }
            self.exchange.push(origin, Message::Completion(completion));
        }
        Ok(None)
    }

    /// Receives messages of other threads. Submits and publishes their commands. Completions of own commands are taken
    /// by [`reap_received`](Self::reap_received); returns their number.
    ///
    /// # Errors
    /// If a kick cannot be written.
    #[inline]
    pub fn receive(&mut self) -> io::Result<usize> {
        let mut messages = std::mem::take(&mut self.messages);
        self.exchange.mailboxes[usize::from(self.index)].drain_into(&mut messages);
        let mut has_commands = false;
        for message in messages.drain(..) {
            match message {
                Message::Completion(completion) => self.received.push_back(completion),
                Message::Command(remote) => {
                    let queue = usize::from(remote.queue);
                    self.waiting[queue].push_back(remote);
                    self.submit_waiting(queue);
                    has_commands = true;
                }
            }
        }
        self.messages = messages;
        if has_commands {
            self.publish()?;
        }
        Ok(self.received.len())
    }

    /// Takes one completion of an own command that was received from another thread.
    #[inline]
    pub fn reap_received(&mut self) -> Option<ScsiCompletion> {
        let completion = self.received.pop_front()?;
        self.remote_count -= 1;
        self.outstanding -= 1;
        Some(completion)
    }

    /// Submits other threads' waiting commands to queue `index`, as far as the ring has space. The caller, or the next
    /// own command, publishes them.
    fn submit_waiting(&mut self, index: usize) {
        while let Some(remote) = self.waiting[index].front() {
            if self.queues[index].submit(remote.user_data, remote.origin, &remote.command).is_err() {
                // An empty ring of 4 entries has space for a command, so completions make space.
                break;
            }
            self.waiting[index].pop_front();
        }
    }

    /// Marks this thread's own work as finished. Returns true if all threads have finished. Until then the thread
    /// serves the others and calls this again. Then the next round begins.
    pub fn finish(&mut self) -> bool {
        let threads = u64::from(self.exchange.threads());
        if !self.is_finished {
            self.is_finished = true;
            self.rounds += 1;
            if self.exchange.finished.fetch_add(1, Ordering::AcqRel) + 1 == self.rounds * threads {
                // Wakes threads that only serve others: they may end.
                for (mailbox, waker) in self.exchange.mailboxes.iter().zip(&self.exchange.wakers) {
                    if mailbox.idle_wait().claim_wakeup() {
                        waker.wake();
                    }
                }
            }
        }
        let all = self.all_finished();
        self.is_finished = !all;
        all
    }

    fn all_finished(&self) -> bool {
        self.exchange.finished.load(Ordering::Acquire) >= self.rounds * u64::from(self.exchange.threads())
    }

    /// Returns the number of calls so far. A use of the [`Waker`], also by other threads, counts as one.
    ///
    /// # Errors
    /// If the eventfd cannot be read.
    pub fn calls(&mut self) -> io::Result<u64> {
        self.call_event.count()
    }

    /// Returns the number of kicks of all queues.
    pub fn kicks(&self) -> u64 {
        self.queues.iter().map(ScsiQueue::kicks).sum()
    }

    /// Sleeps until a queue has `count` completions (or all, if fewer are in flight), another thread has sent a
    /// message, or the [`Waker`] is used. Returns at once if there is nothing to wait for. May return early.
    ///
    /// # Errors
    /// If the device violates the protocol, or the wait fails.
    pub fn wait(&mut self, count: u16) -> Result<(), DriverError> {
        self.arm_and_sleep(count, SleepLimit::None)
    }

    /// As [`wait`](Self::wait), for at most `limit`, exact to microseconds. Sleeps also if there is nothing to wait
    /// for.
    ///
    /// # Errors
    /// Those of [`wait`](Self::wait).
    pub fn wait_at_most(&mut self, count: u16, limit: Duration) -> Result<(), DriverError> {
        self.arm_and_sleep(count, SleepLimit::Exact(limit))
    }

    /// As [`wait`](Self::wait), for at most `limit`, in milliseconds.
    pub(crate) fn wait_timeout(&mut self, count: u16, limit: Duration) -> Result<(), DriverError> {
        self.arm_and_sleep(count, SleepLimit::Millis(limit))
    }

    fn arm_and_sleep(&mut self, count: u16, limit: SleepLimit) -> Result<(), DriverError> {
        let idle = self.exchange.mailboxes[usize::from(self.index)].idle_wait();
        let pending = idle.prepare_to_wait();
        let armed = call_event::arm_rings(self.queues.iter_mut().map(|queue| &mut queue.ring), count)?;
        let serving = self.is_finished && !self.all_finished();
        let busy = armed.has_in_flight || self.remote_count != 0 || serving;
        if !pending && !armed.is_ready && self.received.is_empty() {
            match limit {
                SleepLimit::Exact(limit) => self.call_event.sleep_exactly(limit)?,
                SleepLimit::Millis(limit) if busy => self.call_event.sleep(Some(limit))?,
                SleepLimit::None if busy => self.call_event.sleep(None)?,
                SleepLimit::Millis(_) | SleepLimit::None => {}
            }
        }
        idle.finish_wait();
        for queue in &self.queues {
            queue.ring.disarm();
        }
        Ok(())
    }

    /// Returns a handle that ends a [`wait`](Self::wait) from another thread.
    ///
    /// # Errors
    /// If a system call fails.
    pub fn waker(&self) -> io::Result<Waker> {
        self.call_event.waker()
    }
}

/// Creates a call eventfd, and its owner's end of it.
pub(crate) fn call_event() -> Result<(EventFd, CallEvent), DriverError> {
    let call = new_eventfd().map_err(DriverError::eventfd)?;
    let calls = call.try_clone().and_then(CallEvent::new).map_err(DriverError::eventfd)?;
    Ok((call, calls))
}
