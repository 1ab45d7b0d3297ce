//! Eventfds: how threads and processes wake each other.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::EventfdFlags;
use rustix::net::{AddressFamily, SocketType, sockopt};

/// An eventfd, created here or received from a VMM. Clones share the counter.
#[derive(Clone, Debug)]
pub struct EventFd(Arc<OwnedFd>);

impl EventFd {
    /// Creates a non-blocking eventfd with a counter of 0.
    ///
    /// # Errors
    /// When the process is out of file descriptors.
    pub fn new() -> io::Result<EventFd> {
        let fd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(EventFd(Arc::new(fd)))
    }

    /// Adds 1 and wakes the waiters. Only for eventfds created here: writing to one of another process blocks when its
    /// counter is full. A [`Notifier`](crate::Notifier) does not.
    #[inline]
    pub fn signal(&self) {
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Returns the counter's value and resets it to 0. Returns 0 if a non-blocking eventfd was not signalled.
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

    /// Accepts a descriptor that another process passed. It must be an eventfd: nothing else can be signalled without
    /// blocking. Its flags are unchanged, because the other process may block in a read.
    fn try_from(fd: OwnedFd) -> io::Result<EventFd> {
        // Without /proc the type cannot be checked; the descriptor is then accepted.
        if let Ok(kind) = rustix::fs::readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new())
            && kind.as_bytes() != b"anon_inode:[eventfd]"
        {
            let text = format!("found {}, expected an eventfd", kind.to_string_lossy());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        Ok(EventFd(Arc::new(fd)))
    }
}

/// A descriptor by which another process is called: an eventfd, or an end of a stream between processes of this host
/// (User-Mode Linux), to which 8 bytes are sent. Clones share it.
#[derive(Clone, Debug)]
pub enum CallDescriptor {
    /// An eventfd.
    Event(EventFd),
    /// A connected Unix stream socket.
    Stream(Arc<OwnedFd>),
}

impl TryFrom<OwnedFd> for CallDescriptor {
    type Error = io::Error;

    /// Accepts a descriptor that another process passed. Nothing else can be signalled without blocking.
    fn try_from(fd: OwnedFd) -> io::Result<CallDescriptor> {
        let is_unix = sockopt::socket_domain(&fd).is_ok_and(|domain| domain == AddressFamily::UNIX);
        if is_unix && sockopt::socket_type(&fd)? == SocketType::STREAM {
            return Ok(CallDescriptor::Stream(Arc::new(fd)));
        }
        EventFd::try_from(fd).map(CallDescriptor::Event)
    }
}

impl AsFd for CallDescriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            CallDescriptor::Event(event) => event.as_fd(),
            CallDescriptor::Stream(stream) => stream.as_fd(),
        }
    }
}

/// A guest's kick descriptor: it becomes readable with a kick. Clones share it.
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
    /// Wraps a descriptor that its owner reads: the device node of an event channel.
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
    fn only_eventfds_are_accepted_from_other_processes() {
        let (reader, _writer) = std::io::pipe().unwrap();
        let error = EventFd::try_from(OwnedFd::from(reader)).unwrap_err().to_string();
        assert!(error.contains("pipe:") && error.contains("expected an eventfd"), "{error}");
        let theirs = rustix::event::eventfd(0, EventfdFlags::empty()).unwrap();
        let event = EventFd::try_from(theirs).unwrap();
        event.signal();
        event.signal();
        assert_eq!(event.take(), 2);
    }
}
