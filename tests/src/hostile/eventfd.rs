//! eventfds, as a VMM creates them.

use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

/// An eventfd.
#[derive(Debug)]
pub struct TestEventFd(OwnedFd);

impl TestEventFd {
    /// Creates one whose reads and writes do not block.
    ///
    /// # Panics
    /// When the system refuses.
    pub fn new() -> TestEventFd {
        TestEventFd(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("eventfd"))
    }

    /// Creates one whose reads and writes block.
    ///
    /// # Panics
    /// When the system refuses.
    pub fn blocking() -> TestEventFd {
        TestEventFd(eventfd(0, EventfdFlags::CLOEXEC).expect("eventfd"))
    }

    /// Adds to the counter.
    ///
    /// # Panics
    /// When it would overflow.
    pub fn add(&self, value: u64) {
        rustix::io::write(&self.0, &value.to_ne_bytes()).expect("eventfd write");
    }

    /// Waits until the counter is not 0. Returns false on timeout.
    pub fn wait(&self, limit: Duration) -> bool {
        let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        matches!(poll(&mut fds, Some(&limit)), Ok(1))
    }

    /// Returns the counter, and resets it.
    pub fn take(&self) -> u64 {
        let mut value = [0; 8];
        match self.wait(Duration::ZERO) && rustix::io::read(&self.0, &mut value).is_ok() {
            true => u64::from_ne_bytes(value),
            false => 0,
        }
    }
}

impl Default for TestEventFd {
    fn default() -> Self {
        TestEventFd::new()
    }
}

impl AsFd for TestEventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
