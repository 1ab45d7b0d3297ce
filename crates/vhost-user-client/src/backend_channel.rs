//! Messages from the backend over the socket of SET_BACKEND_REQ_FD: CONFIG_CHANGE_MSG.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Bytes of a message header: request, flags, payload size; each a u32 in host byte order.
const HEADER: usize = 12;
/// Source: QEMU's vhost-user.rst, "Back-end message types" and "Header".
const CONFIG_CHANGE: u32 = 2;
const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;

/// The frontend's end of the socket.
#[derive(Debug)]
pub struct BackendChannel {
    socket: UnixStream,
}

/// A CONFIG_CHANGE_MSG. The backend may wait for [`reply`](Self::reply).
#[derive(Debug)]
#[must_use = "the backend may wait for a reply"]
pub struct ConfigChange<'a> {
    socket: &'a UnixStream,
    needs_reply: bool,
}

impl BackendChannel {
    /// Creates a socket pair: the frontend's end and the backend's.
    pub(crate) fn pair() -> io::Result<(BackendChannel, UnixStream)> {
        let (socket, theirs) = UnixStream::pair()?;
        Ok((BackendChannel { socket }, theirs))
    }

    /// Waits at most `timeout` for a CONFIG_CHANGE_MSG.
    ///
    /// # Errors
    /// When another message arrives, or the backend has closed its end.
    pub fn wait_config_change(&self, timeout: Duration) -> io::Result<Option<ConfigChange<'_>>> {
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
        Ok(Some(ConfigChange { socket: &self.socket, needs_reply: flags & NEED_REPLY != 0 }))
    }
}

impl ConfigChange<'_> {
    /// Returns true if the backend waits for [`reply`](Self::reply).
    pub fn needs_reply(&self) -> bool {
        self.needs_reply
    }

    /// Replies with success or failure, if the backend waits for a reply.
    ///
    /// # Errors
    /// When the backend has closed its end.
    pub fn reply(self, success: bool) -> io::Result<()> {
        if !self.needs_reply {
            return Ok(());
        }
        let mut reply = [CONFIG_CHANGE, VERSION | REPLY, 8].map(u32::to_ne_bytes).concat();
        reply.extend(u64::from(!success).to_ne_bytes());
        (&mut &*self.socket).write_all(&reply)
    }
}
