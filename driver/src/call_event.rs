//! Waiting for a device's calls: one eventfd for all queues that a thread owns.

use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;

use mqblk_ring::split::SplitDriver;
use mqblk_vhost_user_client::EventFd;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use crate::{DeviceError, DriverError};

/// Wakes a thread that waits for its queues.
#[derive(Debug)]
pub struct Waker(EventFd);

impl Waker {
    /// Of an eventfd that a wait watches.
    pub(crate) fn new(event: EventFd) -> Waker {
        Waker(event)
    }

    /// Makes the wait return, this time or the next.
    pub fn wake(&self) {
        // It fails only when the counter is full, and then the wait returns anyway.
        let _ = self.0.write(1);
    }
}

/// The call eventfd that the queues of one thread share, so that the thread waits in one place, with one system call.
#[derive(Debug)]
pub(crate) struct CallEvent {
    call: EventFd,
    /// Edge triggered on `call`: waiting need not read the eventfd, whose counter then counts the calls. (A blocking read
    /// of it would not do: a server may set O_NONBLOCK, which is the eventfd's and not the descriptor's.)
    epoll: Epoll,
    total: u64,
}

/// What arming the rings of a thread found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ArmedRings {
    /// Something is in flight, so a call will come.
    pub(crate) has_in_flight: bool,
    /// Enough answers are there already.
    pub(crate) is_ready: bool,
}

impl CallEvent {
    /// Of an eventfd that devices write to.
    pub(crate) fn new(call: EventFd) -> io::Result<CallEvent> {
        let waiting = Epoll::new()?;
        let event = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, 0);
        waiting.ctl(ControlOperation::Add, call.as_raw_fd(), event)?;
        Ok(CallEvent { call, epoll: waiting, total: 0 })
    }

    /// Calls so far. A use of a [`Waker`] counts as one.
    pub(crate) fn count(&mut self) -> io::Result<u64> {
        // The counter is never 0 at the read, so the read does not block.
        self.call.write(1)?;
        self.total += self.call.read()? - 1;
        Ok(self.total)
    }

    /// Something to end a [`sleep`](Self::sleep) with from another thread.
    pub(crate) fn waker(&self) -> io::Result<Waker> {
        self.call.try_clone().map(Waker::new)
    }

    /// Sleeps until a call or a waker, also one that came since the last sleep. May return early.
    pub(crate) fn sleep(&self, limit: Option<Duration>) -> Result<(), DriverError> {
        let limit = limit.map_or(-1, |limit| i32::try_from(limit.as_millis()).unwrap_or(i32::MAX));
        match self.epoll.wait(limit, &mut [EpollEvent::default()]) {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                Err(DriverError::System { what: "wait for a call", source: error })
            }
            _ => Ok(()),
        }
    }
}

/// Has each ring with something in flight call for `count` answers (or all, if fewer are in flight there), and checks again.
pub(crate) fn arm_rings<'a>(
    rings: impl Iterator<Item = &'a mut SplitDriver>,
    count: u16,
) -> Result<ArmedRings, DeviceError> {
    let mut armed = ArmedRings::default();
    for ring in rings.filter(|ring| ring.in_flight() != 0) {
        let count = count.clamp(1, ring.in_flight());
        armed.is_ready |= ring.arm(count)? >= count;
        armed.has_in_flight = true;
    }
    Ok(armed)
}
