//! Event counters: how threads and processes wake each other.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
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

    /// Adds 1 and wakes whoever waits. Only for counters of our own: to signal one that another process made is to wait for
    /// that process when the counter is full. A [`Notifier`](crate::Notifier) does not.
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
}

impl TryFrom<OwnedFd> for EventFd {
    type Error = io::Error;

    /// Takes a descriptor that another process passed. It must be an eventfd: nothing else can be signalled
    /// without a wait. Its flags are left alone, because clients wait by reading it.
    fn try_from(fd: OwnedFd) -> io::Result<EventFd> {
        // Without /proc the kind cannot be known; the descriptor is then taken on trust.
        if let Ok(kind) = rustix::fs::readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new())
            && kind.as_bytes() != b"anon_inode:[eventfd]"
        {
            let text = format!("found {}, expected an eventfd", kind.to_string_lossy());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        Ok(EventFd(Arc::new(fd)))
    }
}

/// What is watched for a guest's kicks: whatever becomes readable with them. Clones name the same.
#[derive(Clone, Debug)]
pub struct Kick(Arc<OwnedFd>);

impl Kick {
    pub(crate) fn shared(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.0)
    }
}

impl From<EventFd> for Kick {
    fn from(event: EventFd) -> Kick {
        Kick(event.0)
    }
}

impl From<&EventFd> for Kick {
    fn from(event: &EventFd) -> Kick {
        Kick(Arc::clone(&event.0))
    }
}

impl From<&Kick> for Kick {
    fn from(kick: &Kick) -> Kick {
        kick.clone()
    }
}

impl From<OwnedFd> for Kick {
    /// A descriptor that somebody else reads: the device node of an event channel.
    fn from(descriptor: OwnedFd) -> Kick {
        Kick(Arc::new(descriptor))
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_event_counters_are_taken_from_others() {
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        let error = EventFd::try_from(reader).unwrap_err().to_string();
        assert!(error.contains("pipe:") && error.contains("expected an eventfd"), "{error}");
        let theirs = rustix::event::eventfd(0, EventfdFlags::empty()).unwrap();
        let event = EventFd::try_from(theirs).unwrap();
        event.signal();
        event.signal();
        assert_eq!(event.take(), 2);
    }
}
