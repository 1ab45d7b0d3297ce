//! Waits for a device's calls: one eventfd for all queues that a thread owns.

use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;

use mqblk_ring::driver_ring::DriverRing;
use mqblk_vhost_user_client::EventFd;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EFD_CLOEXEC;

use crate::sleep_timer::SleepTimer;
use crate::{DeviceError, DriverError};

/// Returns a new eventfd, which programs that this one starts do not inherit.
pub(crate) fn new_eventfd() -> io::Result<EventFd> {
    EventFd::new(EFD_CLOEXEC)
}

/// Wakes a thread that waits for its queues.
#[derive(Debug)]
pub struct Waker(EventFd);

impl Waker {
    /// Signals `event`, which the thread waits for.
    pub(crate) fn new(event: EventFd) -> Waker {
        Waker(event)
    }

    /// Makes the thread's current or next wait return.
    pub fn wake(&self) {
        // A write fails only if the counter is full. The wait returns then too.
        let _ = self.0.write(1);
    }
}

/// The call eventfd of all queues of a thread: the thread waits for it with one system call.
#[derive(Debug)]
pub(crate) struct CallEvent {
    call: EventFd,
    /// Watches `call`, edge triggered. So a wait does not read the eventfd, and its counter counts the calls. A
    /// blocking read cannot be the wait: a server may set O_NONBLOCK, which belongs to the open file and not to
    /// the descriptor.
    epoll: Epoll,
    timer: SleepTimer,
    total: u64,
}

/// Result of [`arm_rings`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ArmedRings {
    /// True if requests are in flight, so a call will come.
    pub(crate) has_in_flight: bool,
    /// True if a ring has as many completions as requested.
    pub(crate) is_ready: bool,
}

impl CallEvent {
    /// Waits for `call`, which the devices signal.
    pub(crate) fn new(call: EventFd) -> io::Result<CallEvent> {
        let epoll = Epoll::new()?;
        let event = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, 0);
        epoll.ctl(ControlOperation::Add, call.as_raw_fd(), event)?;
        Ok(CallEvent { call, epoll, timer: SleepTimer::default(), total: 0 })
    }

    /// Returns the number of calls so far. A use of a [`Waker`] counts as one.
    pub(crate) fn count(&mut self) -> io::Result<u64> {
        // The write makes the counter nonzero, so the read does not block.
        self.call.write(1)?;
        self.total += self.call.read()? - 1;
        Ok(self.total)
    }

    /// Returns a handle that ends a [`sleep`](Self::sleep) from another thread.
    pub(crate) fn waker(&self) -> io::Result<Waker> {
        self.call.try_clone().map(Waker::new)
    }

    /// Sleeps until a call comes, a waker is used, or `limit` is over. Calls since the last sleep count. May return
    /// early.
    pub(crate) fn sleep(&self, limit: Option<Duration>) -> Result<(), DriverError> {
        let limit = limit.map_or(-1, |limit| i32::try_from(limit.as_millis()).unwrap_or(i32::MAX));
        self.wait(limit)
    }

    /// As [`sleep`](Self::sleep), for a time that is exact to microseconds. Makes one more system call.
    pub(crate) fn sleep_exactly(&mut self, limit: Duration) -> Result<(), DriverError> {
        let system = |source| DriverError::System { what: "timer of a wait", source };
        self.timer.set(&self.epoll, 0, limit).map_err(system)?;
        self.wait(-1)
    }

    fn wait(&self, limit: i32) -> Result<(), DriverError> {
        match self.epoll.wait(limit, &mut [EpollEvent::default()]) {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                Err(DriverError::System { what: "wait for a call", source: error })
            }
            _ => Ok(()),
        }
    }
}

/// Arms each ring with requests in flight: it calls when `count` completions are available, or all if fewer are in
/// flight. Then checks the rings again.
pub(crate) fn arm_rings<'a>(
    rings: impl Iterator<Item = &'a mut DriverRing>,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_that_are_started_do_not_inherit_an_eventfd() {
        let event = new_eventfd().expect("an eventfd");
        for event in [event.try_clone().expect("a clone"), event] {
            let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", event.as_raw_fd())).expect("its flags");
            let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).expect("its flags").trim();
            assert_ne!(u32::from_str_radix(flags, 8).expect("an octal number") & EFD_CLOEXEC as u32, 0, "{info}");
        }
    }
}
