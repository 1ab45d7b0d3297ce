//! The queues that one thread owns, and how it waits for them.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use mqblk_vhost_user_client::EventFd;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use super::BlkfrontQueue;
use crate::{DriverError, Waker};

/// Events taken in one wait; others wait for the next one.
const MAX_EVENTS: usize = 32;
/// What the wait says of the waker; queues are said by their number.
const WAKER_KEY: u64 = u64::MAX;

/// The queues that one thread owns.
#[derive(Debug)]
pub struct BlkfrontQueueSet {
    queues: Vec<BlkfrontQueue>,
    /// Watches each queue's event channel while it has an event that was not taken, and the waker, once for each use.
    epoll: Epoll,
    waker: EventFd,
    /// What is watched lives as long as the watching.
    _descriptors: Vec<OwnedFd>,
    events: u64,
}

impl BlkfrontQueueSet {
    pub(super) fn new(queues: Vec<(BlkfrontQueue, OwnedFd)>) -> io::Result<BlkfrontQueueSet> {
        let waiting = Epoll::new()?;
        let waker = EventFd::new(0)?;
        let once = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, WAKER_KEY);
        waiting.ctl(ControlOperation::Add, waker.as_raw_fd(), once)?;
        for (index, (_, descriptor)) in queues.iter().enumerate() {
            let event = EpollEvent::new(EventSet::IN, index as u64);
            waiting.ctl(ControlOperation::Add, descriptor.as_raw_fd(), event)?;
        }
        let (queues, descriptors) = queues.into_iter().unzip();
        Ok(BlkfrontQueueSet { queues, epoll: waiting, waker, _descriptors: descriptors, events: 0 })
    }

    /// The queues.
    #[inline]
    pub fn queues_mut(&mut self) -> &mut [BlkfrontQueue] {
        &mut self.queues
    }

    /// The queues, to look at.
    #[inline]
    pub fn queues(&self) -> &[BlkfrontQueue] {
        &self.queues
    }

    /// Events that have come so far, each of which may stand for several.
    pub fn calls(&self) -> u64 {
        self.events
    }

    /// Events sent on all the queues.
    pub fn kicks(&self) -> u64 {
        self.queues.iter().map(BlkfrontQueue::kicks).sum()
    }

    /// Sleeps until on one of the queues `count` answers are there (or all, if fewer are in flight there), or the [`Waker`]
    /// is used. Returns at once if nothing is in flight. May return early.
    ///
    /// # Errors
    /// When a backend breaks the protocol, or the wait fails.
    pub fn wait(&mut self, count: u16) -> Result<(), DriverError> {
        let (mut busy, mut ready) = (false, false);
        for queue in self.queues.iter_mut().filter(|queue| queue.in_flight() != 0) {
            busy = true;
            ready |= queue.arm(count)?;
        }
        if busy && !ready {
            self.sleep()?;
        }
        for queue in &self.queues {
            queue.ring.disarm();
        }
        Ok(())
    }

    fn sleep(&mut self) -> Result<(), DriverError> {
        let mut found = [EpollEvent::default(); MAX_EVENTS];
        let count = match self.epoll.wait(-1, &mut found) {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            Err(error) => return Err(DriverError::System { what: "wait for an event", source: error }),
        };
        for event in &found[..count] {
            if let Some(queue) = usize::try_from(event.data()).ok().and_then(|index| self.queues.get_mut(index)) {
                queue.take_event();
                self.events += 1;
            }
        }
        Ok(())
    }

    /// Something to end a [`wait`](Self::wait) with from another thread.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn waker(&self) -> io::Result<Waker> {
        self.waker.try_clone().map(Waker::new)
    }
}
