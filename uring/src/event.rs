//! Event counters: how threads and processes wake each other.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::EventfdFlags;

/// An eventfd, ours or received from a VMM. Clones name the same counter.
#[derive(Clone, Debug)]
pub struct EventFd(Arc<OwnedFd>);

impl EventFd {
    /// A new counter at 0, not blocking.
    ///
    /// # Errors
    /// When the process is out of file descriptors.
    pub fn new() -> io::Result<EventFd> {
        let fd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(EventFd(Arc::new(fd)))
    }

    /// Adds 1 and wakes whoever waits. A full counter (2^64 - 2 signals unread) or a peer's odd descriptor is ignored: the
    /// other side is awake already, or broke its own bell.
    #[inline]
    pub fn signal(&self) {
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Takes the counter's value and sets it to 0; 0 when nothing was signalled (for a non-blocking counter).
    pub fn take(&self) -> u64 {
        let mut value = [0; 8];
        match rustix::io::read(&self.0, &mut value) {
            Ok(8) => u64::from_ne_bytes(value),
            _ => 0,
        }
    }

    pub(crate) fn shared(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.0)
    }
}

impl From<OwnedFd> for EventFd {
    fn from(fd: OwnedFd) -> EventFd {
        EventFd(Arc::new(fd))
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
