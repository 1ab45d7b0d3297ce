//! The queues that a thread owns, and its wait for them.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use mqblk_vhost_user_client::EventFd;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use super::BlkfrontQueue;
use crate::call_event::new_eventfd;
use crate::sleep_timer::SleepTimer;
use crate::{DriverError, Waker};

/// Largest number of events taken in one wait.
const MAX_EVENTS: usize = 32;
/// The epoll key of the waker. A queue's key is its index.
const WAKER_KEY: u64 = u64::MAX;
/// The epoll key of the timer.
const TIMER_KEY: u64 = u64::MAX - 1;

/// The queues that a thread owns.
#[derive(Debug)]
pub struct BlkfrontQueueSet {
    queues: Vec<BlkfrontQueue>,
    /// Watches each queue's event channel, level triggered, and the waker, edge triggered.
    epoll: Epoll,
    waker: EventFd,
    timer: SleepTimer,
    /// Keeps the watched descriptors open.
    _descriptors: Vec<OwnedFd>,
    events: u64,
}

impl BlkfrontQueueSet {
    pub(super) fn new(queues: Vec<(BlkfrontQueue, OwnedFd)>) -> io::Result<BlkfrontQueueSet> {
        let epoll = Epoll::new()?;
        let waker = new_eventfd()?;
        let once = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, WAKER_KEY);
        epoll.ctl(ControlOperation::Add, waker.as_raw_fd(), once)?;
        for (index, (_, descriptor)) in queues.iter().enumerate() {
            let event = EpollEvent::new(EventSet::IN, index as u64);
            epoll.ctl(ControlOperation::Add, descriptor.as_raw_fd(), event)?;
        }
        let (queues, descriptors) = queues.into_iter().unzip();
        Ok(BlkfrontQueueSet {
            queues,
            epoll,
            waker,
            timer: SleepTimer::default(),
            _descriptors: descriptors,
            events: 0,
        })
    }

    /// Returns the queues.
    #[inline]
    pub fn queues_mut(&mut self) -> &mut [BlkfrontQueue] {
        &mut self.queues
    }

    /// Returns the queues.
    #[inline]
    pub fn queues(&self) -> &[BlkfrontQueue] {
        &self.queues
    }

    /// Returns the number of events taken so far. One may stand for several that were sent.
    pub fn calls(&self) -> u64 {
        self.events
    }

    /// Returns the number of events sent by all queues.
    pub fn kicks(&self) -> u64 {
        self.queues.iter().map(BlkfrontQueue::kicks).sum()
    }

    /// Sleeps until a queue has `count` responses (or all, if fewer are in flight), or the [`Waker`] is used. Returns
    /// at once if nothing is in flight. May return early.
    ///
    /// # Errors
    /// If the backend violates the protocol, or the wait fails.
    pub fn wait(&mut self, count: u16) -> Result<(), DriverError> {
        self.arm_and_sleep(count, None)
    }

    /// As [`wait`](Self::wait), for at most `limit`, exact to microseconds. Sleeps also if nothing is in flight.
    ///
    /// # Errors
    /// Those of [`wait`](Self::wait).
    pub fn wait_at_most(&mut self, count: u16, limit: Duration) -> Result<(), DriverError> {
        self.arm_and_sleep(count, Some(limit))
    }

    fn arm_and_sleep(&mut self, count: u16, limit: Option<Duration>) -> Result<(), DriverError> {
        let (mut busy, mut ready) = (false, false);
        for queue in self.queues.iter_mut().filter(|queue| queue.in_flight() != 0) {
            busy = true;
            ready |= queue.arm(count)?;
        }
        if let Some(limit) = limit.filter(|_| !ready) {
            let system = |source| DriverError::System { what: "timer of a wait", source };
            self.timer.set(&self.epoll, TIMER_KEY, limit).map_err(system)?;
        }
        if !ready && (busy || limit.is_some()) {
            self.sleep()?;
        }
        for queue in &self.queues {
            queue.ring.disarm();
        }
        Ok(())
    }

    fn sleep(&mut self) -> Result<(), DriverError> {
        let mut events = [EpollEvent::default(); MAX_EVENTS];
        let count = match self.epoll.wait(-1, &mut events) {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            Err(error) => return Err(DriverError::System { what: "wait for an event", source: error }),
        };
        for event in &events[..count] {
            if let Some(queue) = usize::try_from(event.data()).ok().and_then(|index| self.queues.get_mut(index)) {
                queue.take_event();
                self.events += 1;
            }
        }
        Ok(())
    }

    /// Returns a handle that ends a [`wait`](Self::wait) from another thread.
    ///
    /// # Errors
    /// If a system call fails.
    pub fn waker(&self) -> io::Result<Waker> {
        self.waker.try_clone().map(Waker::new)
    }
}
