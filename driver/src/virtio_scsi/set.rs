//! The request queues that one thread owns, and the way from it to those that others own.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use mqblk_vhost_user_client::EventFd;

use super::command::Command;
use super::handover::Inbox;
use super::queue::{Completion, Pending, Queue, tag};
use super::steering::Steering;
use crate::calls::{self, Calls};
use crate::{DeviceError, DriverError, Refused, Waker};

/// Messages that a thread's box has room for at first.
const INBOX_ROOM: usize = 256;
/// Targets that a controller can have.
const TARGETS: usize = 256;

/// Which queue a command goes to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Steer {
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
struct Order {
    command: Command,
    user: u32,
    origin: u16,
    /// The queue's place in its owner's set.
    queue: u16,
}

/// What threads leave for each other.
#[derive(Clone, Copy, Debug)]
enum Message {
    Order(Order),
    Done(Completion),
}

/// What all sets of a device share.
#[derive(Debug)]
pub(crate) struct Net {
    steer: Steer,
    targets: Box<[Steering]>,
    inboxes: Box<[Inbox<Message>]>,
    wakers: Box<[Waker]>,
    queues: u16,
    /// Threads that have ended a spell of work, over all spells.
    departed: AtomicU64,
}

impl Net {
    pub(crate) fn new(steer: Steer, queues: u16, wakers: Vec<Waker>) -> Net {
        Net {
            steer,
            targets: (0..TARGETS).map(|_| Steering::default()).collect(),
            inboxes: wakers.iter().map(|_| Inbox::new(INBOX_ROOM)).collect(),
            wakers: wakers.into(),
            queues,
            departed: AtomicU64::new(0),
        }
    }

    fn threads(&self) -> u16 {
        self.wakers.len() as u16
    }

    #[inline]
    fn begin(&self, target: u8, own: u16) -> u16 {
        match self.steer {
            Steer::Target => self.targets[usize::from(target)].begin(own),
            Steer::Submitter => own,
            Steer::Fixed => u16::from(target) % self.queues,
        }
    }

    #[inline]
    fn end(&self, target: u8) {
        if self.steer == Steer::Target {
            self.targets[usize::from(target)].end();
        }
    }

    fn push(&self, to: u16, message: Message) {
        let to = usize::from(to);
        if self.inboxes[to].push(message) {
            self.wakers[to].wake();
        }
    }
}

/// The request queues that one thread owns: it alone puts commands on them and reaps their ends. A command whose target is
/// bound to another thread's queue is handed over to that thread, and its end comes back ([`collect`](Self::collect)); so a
/// thread that has ended its own work serves the others until [`depart`](Self::depart) says that all have.
#[derive(Debug)]
pub struct QueueSet {
    /// Which of the device's sets this is; its queues are this one, this plus the number of sets, and so on.
    index: u16,
    queues: Vec<Queue>,
    calls: Calls,
    net: Arc<Net>,
    /// For each queue, in order: commands of other threads that it had no room for.
    parked: Vec<VecDeque<Order>>,
    messages: Vec<Message>,
    /// Ends of own commands that came back.
    arrived: VecDeque<Completion>,
    /// Own commands on others' queues whose ends have not come back.
    away: u32,
    /// Own commands that were not reaped.
    outstanding: u32,
    most_outstanding: u32,
    handed_over: u64,
    /// Spells of work that this thread has ended.
    spells: u64,
    departed: bool,
}

impl QueueSet {
    pub(crate) fn new(index: u16, queues: Vec<Queue>, calls: Calls, net: Arc<Net>, most_outstanding: u32) -> QueueSet {
        QueueSet {
            index,
            parked: queues.iter().map(|_| VecDeque::new()).collect(),
            queues,
            calls,
            net,
            messages: Vec::with_capacity(INBOX_ROOM),
            arrived: VecDeque::with_capacity(INBOX_ROOM),
            away: 0,
            outstanding: 0,
            most_outstanding,
            handed_over: 0,
            spells: 0,
            departed: false,
        }
    }

    /// The queues.
    #[inline]
    pub fn queues(&mut self) -> &mut [Queue] {
        &mut self.queues
    }

    /// Own commands that were submitted and not yet reaped, whoever's queue they are on.
    #[inline]
    pub fn outstanding(&self) -> u32 {
        self.outstanding
    }

    /// Own commands on other threads' queues.
    #[inline]
    pub fn away(&self) -> u32 {
        self.away
    }

    /// Whether anything is in flight on this set's queues, whoever it is from.
    pub fn is_serving(&self) -> bool {
        self.queues.iter().any(|queue| queue.in_flight() != 0)
    }

    /// Own commands that were handed over to other threads so far.
    pub fn handed_over(&self) -> u64 {
        self.handed_over
    }

    /// The tag of a command that this set submits for `user`, for task management.
    pub fn tag(&self, user: u32) -> u64 {
        tag(self.index, user)
    }

    /// Submits a command from this set's queue `own`, which is the one it goes to unless the steering says otherwise. `user`
    /// comes back with its end, and must not be in flight already: the command's tag is made of it.
    ///
    /// # Errors
    /// [`Refused::Full`] until something is reaped.
    #[inline]
    pub fn submit(&mut self, own: usize, user: u32, command: &Command) -> Result<(), Refused> {
        if self.outstanding == self.most_outstanding {
            return Err(Refused::Full);
        }
        let (threads, target) = (self.net.threads(), command.to.target);
        let chosen = self.net.begin(target, own as u16 * threads + self.index);
        let (owner, queue) = (chosen % threads, chosen / threads);
        if owner == self.index {
            let queue = usize::from(queue);
            // Behind those of other threads that came before.
            let outcome = match self.parked[queue].is_empty() {
                true => self.queues[queue].submit(user, self.index, command),
                false => Err(Refused::Full),
            };
            if let Err(refused) = outcome {
                self.net.end(target);
                return Err(refused);
            }
        } else {
            let order = Order { command: *command, user, origin: self.index, queue };
            self.net.push(owner, Message::Order(order));
            self.away += 1;
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
        self.queues.iter_mut().try_for_each(Queue::publish)
    }

    /// Looks for answers on queue `index`; returns how many there are, those to other threads' commands included.
    ///
    /// # Errors
    /// When the device breaks the protocol: the queue is of no more use.
    #[inline]
    pub fn look(&mut self, index: usize) -> Result<u16, DeviceError> {
        Ok(self.queues[index].ring.poll_used()?)
    }

    /// Takes one own answer of those that the last [`look`](Self::look) saw on queue `index`. Answers to other threads' commands
    /// before it are sent on to them.
    ///
    /// # Errors
    /// When the device breaks the protocol: the queue is of no more use.
    #[inline]
    pub fn reap(&mut self, index: usize) -> Result<Option<Completion>, DeviceError> {
        while let Some((Pending { origin, target, .. }, completion)) = self.queues[index].reap()? {
            self.net.end(target);
            if !self.parked[index].is_empty() {
                self.unpark(index);
            }
            if origin == self.index {
                self.outstanding -= 1;
                return Ok(Some(completion));
            }
            self.net.push(origin, Message::Done(completion));
        }
        Ok(None)
    }

    /// Takes what other threads have left: their commands are put on this set's queues and published, and the ends of own
    /// commands can be taken by [`arrived`](Self::arrived). Returns how many of those there are.
    ///
    /// # Errors
    /// When a kick cannot be written.
    #[inline]
    pub fn collect(&mut self) -> io::Result<usize> {
        let mut messages = std::mem::take(&mut self.messages);
        self.net.inboxes[usize::from(self.index)].take(&mut messages);
        let mut orders = false;
        for message in messages.drain(..) {
            match message {
                Message::Done(completion) => self.arrived.push_back(completion),
                Message::Order(order) => {
                    let queue = usize::from(order.queue);
                    self.parked[queue].push_back(order);
                    self.unpark(queue);
                    orders = true;
                }
            }
        }
        self.messages = messages;
        if orders {
            self.publish()?;
        }
        Ok(self.arrived.len())
    }

    /// Takes one end of an own command that came back.
    #[inline]
    pub fn arrived(&mut self) -> Option<Completion> {
        let completion = self.arrived.pop_front()?;
        self.away -= 1;
        self.outstanding -= 1;
        Some(completion)
    }

    /// Puts other threads' commands on queue `index`, as far as it has room. What is put on is published with the next own
    /// command, or by whoever calls.
    fn unpark(&mut self, index: usize) {
        while let Some(order) = self.parked[index].front() {
            if self.queues[index].submit(order.user, order.origin, &order.command).is_err() {
                // A ring of 4 entries has room for a command when it is empty, so what is in flight makes room.
                break;
            }
            self.parked[index].pop_front();
        }
    }

    /// This thread has ended its own work. Returns whether all have: until then this thread serves the others. To be called
    /// again until it does; then the next spell begins.
    pub fn depart(&mut self) -> bool {
        let threads = u64::from(self.net.threads());
        if !self.departed {
            self.departed = true;
            self.spells += 1;
            if self.net.departed.fetch_add(1, Ordering::AcqRel) + 1 == self.spells * threads {
                // Those that only serve may end.
                for (inbox, waker) in self.net.inboxes.iter().zip(&self.net.wakers) {
                    if inbox.doze().must_wake() {
                        waker.wake();
                    }
                }
            }
        }
        let all = self.all_departed();
        self.departed = !all;
        all
    }

    fn all_departed(&self) -> bool {
        self.net.departed.load(Ordering::Acquire) >= self.spells * u64::from(self.net.threads())
    }

    /// Calls that the server has sent so far. A use of the [`Waker`], also by other threads of the set, counts as one.
    ///
    /// # Errors
    /// When the eventfd cannot be read.
    pub fn calls(&mut self) -> io::Result<u64> {
        self.calls.count()
    }

    /// Kicks written on all the queues.
    pub fn kicks(&self) -> u64 {
        self.queues.iter().map(Queue::kicks).sum()
    }

    /// Sleeps until on one of the queues `count` answers are there (or all, if fewer are in flight there), another thread has
    /// left something, or the [`Waker`] is used. Returns at once when there is nothing to wait for. May return early.
    ///
    /// # Errors
    /// When a device breaks the protocol, or the wait fails.
    pub fn wait(&mut self, count: u16) -> Result<(), DriverError> {
        self.wait_for(count, None)
    }

    /// As [`wait`](Self::wait), at most so long.
    pub(crate) fn wait_for(&mut self, count: u16, limit: Option<Duration>) -> Result<(), DriverError> {
        let doze = self.net.inboxes[usize::from(self.index)].doze();
        let found = doze.lie_down();
        let armed = calls::arm(self.queues.iter_mut().map(|queue| &mut queue.ring), count)?;
        let serving = self.departed && !self.all_departed();
        let busy = armed.busy || self.away != 0 || serving;
        if busy && !found && !armed.ready && self.arrived.is_empty() {
            self.calls.sleep(limit)?;
        }
        doze.get_up();
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
        self.calls.waker()
    }
}

/// A call eventfd and a way to wake its owner.
pub(crate) fn bell() -> Result<(EventFd, Calls), DriverError> {
    let call = EventFd::new(0).map_err(DriverError::event)?;
    let calls = call.try_clone().and_then(Calls::new).map_err(DriverError::event)?;
    Ok((call, calls))
}
