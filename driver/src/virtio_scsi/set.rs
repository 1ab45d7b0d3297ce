//! The request queues that one thread owns, and the way from it to those that others own.

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
use crate::call_event::{self, CallEvent};
use crate::{DeviceError, DriverError, SubmitError, Waker};

/// Messages that a thread's box has room for at first.
const MAILBOX_CAPACITY: usize = 256;
/// Targets that a controller can have.
const TARGETS: usize = 256;

/// Which queue a command goes to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SteeringPolicy {
    /// A target's commands stay on one queue while any of them is in flight, and move to the submitter's queue with one that is
    /// alone: the rule of the multi-queue virtio-scsi driver of 2012.
    #[default]
    Target,
    /// The submitter's queue, as later kernels have it: nothing keeps a target's commands in order.
    Submitter,
    /// Target T is on queue T modulo queues, always.
    Fixed,
}

/// A command on its way to the owner of its queue.
#[derive(Clone, Copy, Debug)]
struct RemoteCommand {
    command: Command,
    user_data: u32,
    origin: u16,
    /// The queue's place in its owner's set.
    queue: u16,
}

/// What threads leave for each other.
#[derive(Clone, Copy, Debug)]
enum Message {
    Command(RemoteCommand),
    Completion(ScsiCompletion),
}

/// What all sets of a device share.
#[derive(Debug)]
pub(crate) struct CommandExchange {
    policy: SteeringPolicy,
    targets: Box<[TargetSteering]>,
    mailboxes: Box<[Mailbox<Message>]>,
    wakers: Box<[Waker]>,
    queue_count: u16,
    /// Threads that have ended a spell of work, over all spells.
    finished: AtomicU64,
}

impl CommandExchange {
    pub(crate) fn new(policy: SteeringPolicy, queue_count: u16, wakers: Vec<Waker>) -> CommandExchange {
        CommandExchange {
            policy,
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

/// The request queues that one thread owns: it alone puts commands on them and reaps their ends. A command whose target is
/// bound to another thread's queue is handed over to that thread, and its end comes back ([`collect`](Self::collect)); so a
/// thread that has ended its own work serves the others until [`depart`](Self::depart) says that all have.
#[derive(Debug)]
pub struct ScsiQueueSet {
    /// Which of the device's sets this is; its queues are this one, this plus the number of sets, and so on.
    index: u16,
    queues: Vec<ScsiQueue>,
    call_event: CallEvent,
    exchange: Arc<CommandExchange>,
    /// For each queue, in order: commands of other threads that it had no room for.
    waiting: Vec<VecDeque<RemoteCommand>>,
    messages: Vec<Message>,
    /// Ends of own commands that came back.
    received: VecDeque<ScsiCompletion>,
    /// Own commands on others' queues whose ends have not come back.
    remote_count: u32,
    /// Own commands that were not reaped.
    outstanding: u32,
    max_outstanding: u32,
    handed_over: u64,
    /// Spells of work that this thread has ended.
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

    /// The queues.
    #[inline]
    pub fn queues_mut(&mut self) -> &mut [ScsiQueue] {
        &mut self.queues
    }

    /// Own commands that were submitted and not yet reaped, whoever's queue they are on.
    #[inline]
    pub fn outstanding(&self) -> u32 {
        self.outstanding
    }

    /// Own commands on other threads' queues.
    #[inline]
    pub fn remote_outstanding(&self) -> u32 {
        self.remote_count
    }

    /// Whether anything is in flight on this set's queues, whoever it is from.
    pub fn is_serving(&self) -> bool {
        self.queues.iter().any(|queue| queue.in_flight() != 0)
    }

    /// Own commands that were handed over to other threads so far.
    pub fn handed_over(&self) -> u64 {
        self.handed_over
    }

    /// The tag of a command that this set submits for `user_data`, for task management.
    pub fn tag(&self, user_data: u32) -> u64 {
        tag(self.index, user_data)
    }

    /// Submits a command from this set's queue `own`, which is the one it goes to unless the steering says otherwise. `user_data`
    /// comes back with its end, and must not be in flight already: the command's tag is made of it.
    ///
    /// # Errors
    /// [`Refused::Full`] until something is reaped.
    #[inline]
    pub fn submit(&mut self, own: usize, user_data: u32, command: &Command) -> Result<(), SubmitError> {
        if self.outstanding == self.max_outstanding {
            return Err(SubmitError::Full);
        }
        let (threads, target) = (self.exchange.threads(), command.address.target);
        let chosen = self.exchange.begin(target, own as u16 * threads + self.index);
        let (owner, queue) = (chosen % threads, chosen / threads);
        if owner == self.index {
            let queue = usize::from(queue);
            // Behind those of other threads that came before.
            let outcome = match self.waiting[queue].is_empty() {
                true => self.queues[queue].submit(user_data, self.index, command),
                false => Err(SubmitError::Full),
            };
            if let Err(refused) = outcome {
                self.exchange.end(target);
                return Err(refused);
            }
        } else {
            let order = RemoteCommand { command: *command, user_data, origin: self.index, queue };
            self.exchange.push(owner, Message::Command(order));
            self.remote_count += 1;
            self.handed_over += 1;
        }
        self.outstanding += 1;
        Ok(())
    }

    /// Makes what was put on the queues visible to the server.
    ///
    /// # Errors
    /// When a kick cannot be written.
    #[inline]
    pub fn publish(&mut self) -> io::Result<()> {
        self.queues.iter_mut().try_for_each(ScsiQueue::publish)
    }

    /// Looks for answers on queue `index`; returns how many there are, those to other threads' commands included.
    ///
    /// # Errors
    /// When the device breaks the protocol: the queue is of no more use.
    #[inline]
    pub fn poll(&mut self, index: usize) -> Result<u16, DeviceError> {
        Ok(self.queues[index].ring.poll_used()?)
    }

    /// Takes one own answer of those that the last [`look`](Self::look) saw on queue `index`. Answers to other threads' commands
    /// before it are sent on to them.
    ///
    /// # Errors
    /// When the device breaks the protocol: the queue is of no more use.
    #[inline]
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

    /// Takes what other threads have left: their commands are put on this set's queues and published, and the ends of own
    /// commands can be taken by [`arrived`](Self::arrived). Returns how many of those there are.
    ///
    /// # Errors
    /// When a kick cannot be written.
    #[inline]
    pub fn receive(&mut self) -> io::Result<usize> {
        let mut messages = std::mem::take(&mut self.messages);
        self.exchange.mailboxes[usize::from(self.index)].drain_into(&mut messages);
        let mut orders = false;
        for message in messages.drain(..) {
            match message {
                Message::Completion(completion) => self.received.push_back(completion),
                Message::Command(order) => {
                    let queue = usize::from(order.queue);
                    self.waiting[queue].push_back(order);
                    self.submit_waiting(queue);
                    orders = true;
                }
            }
        }
        self.messages = messages;
        if orders {
            self.publish()?;
        }
        Ok(self.received.len())
    }

    /// Takes one end of an own command that came back.
    #[inline]
    pub fn reap_received(&mut self) -> Option<ScsiCompletion> {
        let completion = self.received.pop_front()?;
        self.remote_count -= 1;
        self.outstanding -= 1;
        Some(completion)
    }

    /// Puts other threads' commands on queue `index`, as far as it has room. What is put on is published with the next own
    /// command, or by whoever calls.
    fn submit_waiting(&mut self, index: usize) {
        while let Some(order) = self.waiting[index].front() {
            if self.queues[index].submit(order.user_data, order.origin, &order.command).is_err() {
                // A ring of 4 entries has room for a command when it is empty, so what is in flight makes room.
                break;
            }
            self.waiting[index].pop_front();
        }
    }

    /// This thread has ended its own work. Returns whether all have: until then this thread serves the others. To be called
    /// again until it does; then the next spell begins.
    pub fn finish(&mut self) -> bool {
        let threads = u64::from(self.exchange.threads());
        if !self.is_finished {
            self.is_finished = true;
            self.rounds += 1;
            if self.exchange.finished.fetch_add(1, Ordering::AcqRel) + 1 == self.rounds * threads {
                // Those that only serve may end.
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

    /// Calls that the server has sent so far. A use of the [`Waker`], also by other threads of the set, counts as one.
    ///
    /// # Errors
    /// When the eventfd cannot be read.
    pub fn calls(&mut self) -> io::Result<u64> {
        self.call_event.count()
    }

    /// Kicks written on all the queues.
    pub fn kicks(&self) -> u64 {
        self.queues.iter().map(ScsiQueue::kicks).sum()
    }

    /// Sleeps until on one of the queues `count` answers are there (or all, if fewer are in flight there), another thread has
    /// left something, or the [`Waker`] is used. Returns at once when there is nothing to wait for. May return early.
    ///
    /// # Errors
    /// When a device breaks the protocol, or the wait fails.
    pub fn wait(&mut self, count: u16) -> Result<(), DriverError> {
        self.wait_timeout(count, None)
    }

    /// As [`wait`](Self::wait), at most so long.
    pub(crate) fn wait_timeout(&mut self, count: u16, limit: Option<Duration>) -> Result<(), DriverError> {
        let doze = self.exchange.mailboxes[usize::from(self.index)].idle_wait();
        let found = doze.prepare_to_wait();
        let armed = call_event::arm_rings(self.queues.iter_mut().map(|queue| &mut queue.ring), count)?;
        let serving = self.is_finished && !self.all_finished();
        let busy = armed.has_in_flight || self.remote_count != 0 || serving;
        if busy && !found && !armed.is_ready && self.received.is_empty() {
            self.call_event.sleep(limit)?;
        }
        doze.finish_wait();
        for queue in &self.queues {
            queue.ring.disarm();
        }
        Ok(())
    }

    /// Something to end a [`wait`](Self::wait) with from another thread.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn waker(&self) -> io::Result<Waker> {
        self.call_event.waker()
    }
}

/// A call eventfd and a way to wake its owner.
pub(crate) fn call_event() -> Result<(EventFd, CallEvent), DriverError> {
    let call = EventFd::new(0).map_err(DriverError::eventfd)?;
    let calls = call.try_clone().and_then(CallEvent::new).map_err(DriverError::eventfd)?;
    Ok((call, calls))
}
