//! What a back-end asks of us on the backend request socket: that we read the configuration again.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Bytes of a message's header: request, flags, size of what follows; u32 each, in the host's order.
const HEADER: usize = 12;
/// Source: QEMU's vhost-user.rst, "Back-end message types" and "Header".
const CONFIG_CHANGE: u32 = 2;
const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;

/// Our end of the socket.
#[derive(Debug)]
pub struct BackendRequests {
    socket: UnixStream,
}

/// The back-end says that the configuration has changed. It may wait for [`done`](Self::done).
#[derive(Debug)]
#[must_use = "the back-end may wait for an answer"]
pub struct ConfigChange<'a> {
    socket: &'a UnixStream,
    wants_reply: bool,
}

impl BackendRequests {
    /// Our end, and the one for the back-end.
    pub(crate) fn pair() -> io::Result<(BackendRequests, UnixStream)> {
        let (socket, theirs) = UnixStream::pair()?;
        Ok((BackendRequests { socket }, theirs))
    }

    /// Waits at most `timeout` for the back-end to say that the configuration has changed.
    ///
    /// # Errors
    /// When it says something else, or has closed its end.
    pub fn config_change(&self, timeout: Duration) -> io::Result<Option<ConfigChange<'_>>> {
        let until = Instant::now() + timeout;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            match poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&left)) {
                Ok(0) => return Ok(None),
                Ok(_) => break,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let mut header = [0; HEADER];
        (&self.socket).read_exact(&mut header)?;
        let word = |at: usize| u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let [request, flags, size] = [word(0), word(4), word(8)];
        if (request, flags & VERSION_MASK, flags & REPLY, size) != (CONFIG_CHANGE, VERSION, 0, 0) {
            let found =
                format!("found message {request} with flags {flags:#x} and {size} bytes, expected CONFIG_CHANGE_MSG");
            return Err(io::Error::new(io::ErrorKind::InvalidData, found));
        }
        Ok(Some(ConfigChange { socket: &self.socket, wants_reply: flags & NEED_REPLY != 0 }))
    }
}

impl ConfigChange<'_> {
    /// Whether the back-end waits for [`done`](Self::done).
    pub fn wants_reply(&self) -> bool {
        self.wants_reply
    }

    /// Answers that it was done, or that it could not be, where the back-end wants to know.
    ///
    /// # Errors
    /// When the back-end has closed its end.
    pub fn done(self, well: bool) -> io::Result<()> {
        if !self.wants_reply {
            return Ok(());
        }
        let mut reply = [CONFIG_CHANGE, VERSION | REPLY, 8].map(u32::to_ne_bytes).concat();
        reply.extend(u64::from(!well).to_ne_bytes());
        (&mut &*self.socket).write_all(&reply)
    }
}
