//! Sends and receives whole messages over xenstored's socket or the kernel's node.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::SendFlags;

use super::wire::{HEADER_BYTES, Header, PAYLOAD_MAX};

/// Deadline of an operation. `None`: unlimited.
pub(super) type Deadline = Option<Instant>;

/// One message.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) header: Header,
    pub(super) payload: Vec<u8>,
}

/// A descriptor that carries messages: a socket, or `/dev/xen/xenbus`, which has the same byte format.
#[derive(Debug)]
pub(super) struct Connection {
    descriptor: OwnedFd,
    /// The descriptor is a socket: `send` with MSG_NOSIGNAL avoids SIGPIPE.
    socket: bool,
    /// A partially received message.
    input: Vec<u8>,
    /// Reason of the lost connection.
    lost: Option<String>,
}

impl Connection {
    /// Uses a descriptor, which must be non-blocking.
    pub(super) fn new(descriptor: OwnedFd) -> Connection {
        let socket = rustix::net::sockopt::socket_type(&descriptor).is_ok();
        Connection { descriptor, socket, input: Vec::with_capacity(HEADER_BYTES + PAYLOAD_MAX), lost: None }
    }

    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    /// Marks the connection as lost: every later call fails with the first reason, which is returned.
    pub(super) fn mark_lost(&mut self, why: impl Into<String>) -> String {
        let why = why.into();
        self.lost.get_or_insert(why).clone()
    }

    fn check_usable(&self) -> Result<(), String> {
        self.lost.clone().map_or(Ok(()), Err)
    }

    /// Sends a message.
    ///
    /// # Errors
    /// The reason of the lost connection, also if only a part of the message could be sent by the deadline.
    pub(super) fn send(&mut self, bytes: &[u8], deadline: Deadline) -> Result<(), String> {
        self.check_usable()?;
        let mut sent = 0;
        while sent < bytes.len() {
            let rest = &bytes[sent..];
            let written = match self.socket {
                true => rustix::net::send(&self.descriptor, rest, SendFlags::NOSIGNAL),
                false => rustix::io::write(&self.descriptor, rest),
            };
            match written {
                Ok(0) => return Err(self.mark_lost("it takes no bytes")),
                Ok(count) => sent += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => match self.wait_ready(PollFlags::OUT, deadline) {
                    Ok(true) => {}
                    Ok(false) => return Err(self.mark_lost("it did not take a request in time")),
                    Err(error) => return Err(self.mark_lost(error.to_string())),
                },
                Err(error) => return Err(self.mark_lost(format!("writing: {error}"))),
            }
        }
        Ok(())
    }

    /// Returns the next message, or `None` if it is incomplete at the deadline. The received part is kept.
    ///
    /// # Errors
    /// The reason of the lost connection.
    pub(super) fn receive(&mut self, deadline: Deadline) -> Result<Option<Message>, String> {
        self.check_usable()?;
        loop {
            let missing = match self.missing_bytes() {
                Ok(missing) => missing,
                Err(why) => return Err(self.mark_lost(why)),
            };
            if missing == 0 {
                return Ok(self.take_message());
            }
            let have = self.input.len();
            self.input.resize(have + missing, 0);
            let read = rustix::io::read(&self.descriptor, &mut self.input[have..]);
            self.input.truncate(have + *read.as_ref().unwrap_or(&0));
            match read {
                Ok(0) => return Err(self.mark_lost("it was closed by the other side")),
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => match self.wait_ready(PollFlags::IN, deadline) {
                    Ok(true) => {}
                    Ok(false) => return Ok(None),
                    Err(error) => return Err(self.mark_lost(error.to_string())),
                },
                Err(error) => return Err(self.mark_lost(format!("reading: {error}"))),
            }
        }
    }

    /// Returns the number of missing bytes: of the header first, then of the payload.
    fn missing_bytes(&self) -> Result<usize, String> {
        let Some(header) = self.input.first_chunk() else { return Ok(HEADER_BYTES - self.input.len()) };
        let len = Header::decode(*header).len as usize;
        if len > PAYLOAD_MAX {
            return Err(format!("found a message of {len} bytes, expected at most {PAYLOAD_MAX}"));
        }
        Ok(HEADER_BYTES + len - self.input.len())
    }

    fn take_message(&mut self) -> Option<Message> {
        let header = Header::decode(*self.input.first_chunk()?);
        let payload = self.input[HEADER_BYTES..].to_vec();
        self.input.clear();
        Some(Message { header, payload })
    }

    /// Waits until the descriptor is ready. Returns false after the deadline.
    fn wait_ready(&self, flags: PollFlags, deadline: Deadline) -> io::Result<bool> {
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Ok(false);
            }
            // A timeout beyond the kernel's range waits for ever.
            let timeout = left.and_then(|left| Timespec::try_from(left).ok());
            match poll(&mut [PollFd::new(&self.descriptor, flags)], timeout.as_ref()) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return Ok(true),
                Err(error) => return Err(error.into()),
            }
        }
    }
}
