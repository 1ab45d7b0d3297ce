//! Ends a sleep in an epoll instance after a time that is exact to microseconds: `epoll_wait` counts in milliseconds,
//! and timers of its own are late by the thread's timer slack.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

/// A timer of one epoll instance. Created at its first use: most sleeps have no limit.
#[derive(Debug, Default)]
pub(crate) struct SleepTimer(Option<OwnedFd>);

impl SleepTimer {
    /// Lets the next or current `epoll_wait` of `epoll` return after `limit`, with an event of `key` at the latest. An
    /// earlier timer no longer ends it, unless it has already expired.
    pub(crate) fn set(&mut self, epoll: &Epoll, key: u64, limit: Duration) -> io::Result<()> {
        let timer = match &mut self.0 {
            Some(timer) => timer,
            none => {
                let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC)?;
                // Edge triggered: nobody reads it.
                let event = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, key);
                epoll.ctl(ControlOperation::Add, timer.as_raw_fd(), event)?;
                none.insert(timer)
            }
        };
        // A value of 0 would be no timer.
        let nanos = limit.max(Duration::from_nanos(1));
        let it_value = Timespec { tv_sec: nanos.as_secs() as i64, tv_nsec: nanos.subsec_nanos().into() };
        let it_interval = Timespec { tv_sec: 0, tv_nsec: 0 };
        timerfd_settime(&*timer, TimerfdTimerFlags::empty(), &Itimerspec { it_interval, it_value })?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn each_sleep_ends_and_not_before_its_time() {
        let (epoll, mut timer) = (Epoll::new().unwrap(), SleepTimer::default());
        for micros in [0, 1, 300, 2500, 700] {
            let (limit, start) = (Duration::from_micros(micros), Instant::now());
            timer.set(&epoll, 7, limit).unwrap();
            let mut events = [EpollEvent::default()];
            assert_eq!(epoll.wait(-1, &mut events).unwrap(), 1, "{micros}");
            assert!(events[0].data() == 7 && start.elapsed() >= limit);
        }
    }
}
