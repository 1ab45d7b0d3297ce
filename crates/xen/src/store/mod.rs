//! Xenstore client, over xenstored's socket or the kernel's node `/dev/xen/xenbus`. Source: Xen's
//! `public/io/xs_wire.h` and `docs/misc/xenstore.txt`.
//!
//! Calls block until the reply arrives or the timeout expires. Messages from the server are validated: a violation of
//! the protocol ends the connection.

mod connection;
mod error;
mod events;
mod operations;
mod permission;
pub mod wire;

#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};

use connection::{Connection, Deadline, Message};
use events::EventQueue;
use wire::{HEADER_BYTES, Header, PAYLOAD_MAX, Verb, path_error, split_strings};

pub use error::{XenstoreError, XenstoreErrorKind};
pub use events::WatchEvent;
pub use operations::Transaction;
pub use permission::{Access, Permission};

/// Sockets and nodes of a real xenstore, in the order in which they are tried.
pub const CONNECTION_PATHS: [&str; 4] =
    ["/run/xenstored/socket", "/var/run/xenstored/socket", "/dev/xen/xenbus", "/proc/xen/xenbus"];

/// Default timeout of a reply; see [`Xenstore::set_timeout`].
pub const REPLY_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum number of messages read ahead before an event is returned, so that events of one path are merged.
const MESSAGES_AHEAD: usize = 512;

/// A connection to xenstore, for the requests and watches of one thread.
///
/// A path without a leading `/` is relative to the own domain's directory.
#[derive(Debug)]
pub struct Xenstore {
    connection: Connection,
    events: EventQueue,
    timeout: Duration,
    last_request: u32,
}

impl Xenstore {
    /// Connects to a socket of xenstored, or to a node such as `/dev/xen/xenbus`.
    ///
    /// # Errors
    /// When it does not exist, or a system call fails.
    pub fn connect(path: &Path) -> io::Result<Xenstore> {
        if !std::fs::metadata(path)?.file_type().is_socket() {
            let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
            return Ok(Xenstore::new(rustix::fs::open(path, flags, Mode::empty())?));
        }
        Xenstore::from_socket(UnixStream::connect(path)?)
    }

    /// Connects to the xenstore of this host.
    ///
    /// # Errors
    /// When none of the [`CONNECTION_PATHS`] works.
    pub fn connect_real() -> io::Result<Xenstore> {
        let mut tried = vec![];
        for path in CONNECTION_PATHS {
            match Xenstore::connect(Path::new(path)) {
                Ok(store) => return Ok(store),
                Err(error) => tried.push((path, error)),
            }
        }
        let found: Vec<String> = tried.iter().map(|(path, error)| format!("{path}: {error}")).collect();
        let mut kinds = tried.iter().map(|(_, error)| error.kind());
        let kind = kinds.find(|kind| *kind != io::ErrorKind::NotFound).unwrap_or(io::ErrorKind::NotFound);
        let text = format!("{}; is this a domain of Xen, and does xenstored run?", found.join(", "));
        Err(io::Error::new(kind, text))
    }

    /// Uses a connected socket.
    ///
    /// # Errors
    /// When the socket cannot be made non-blocking.
    pub fn from_socket(socket: UnixStream) -> io::Result<Xenstore> {
        socket.set_nonblocking(true)?;
        Ok(Xenstore::new(socket.into()))
    }

    fn new(descriptor: OwnedFd) -> Xenstore {
        let connection = Connection::new(descriptor);
        Xenstore { connection, events: EventQueue::default(), timeout: REPLY_TIMEOUT, last_request: 0 }
    }

    /// Sets the timeout of a reply. After a timeout the connection is lost, because the outcome of the request is
    /// unknown.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Returns the descriptor to poll for input. Before polling, the caller must take all events with
    /// [`next_event`](Self::next_event): some may have arrived with the reply to a request.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.connection.descriptor()
    }

    /// Watches a path and everything below it. An initial event for the path arrives at once. Each event carries
    /// `token`.
    ///
    /// # Errors
    /// When xenstore refuses: `EEXIST` if there is a watch with this path and token.
    pub fn watch(&mut self, path: &str, token: &str) -> Result<(), XenstoreError> {
        let payload = self.check_watch(Verb::WATCH, path, token)?;
        // The initial event may arrive before the reply.
        if !self.events.add(path, token) {
            return Err(XenstoreError::new(Verb::WATCH, path, XenstoreErrorKind::Refused("EEXIST".to_owned())));
        }
        let reply = self.request(Verb::WATCH, 0, path, &[&payload]);
        if reply.is_err() {
            self.events.remove(path, token);
        }
        reply.map(|_| ())
    }

    /// Removes a watch and drops its queued events.
    ///
    /// # Errors
    /// When there is no such watch (`ENOENT`), or the connection is lost.
    pub fn unwatch(&mut self, path: &str, token: &str) -> Result<(), XenstoreError> {
        let payload = self.check_watch(Verb::UNWATCH, path, token)?;
        // The kernel's node accepts any.
        if !self.events.contains(path, token) {
            return Err(XenstoreError::new(Verb::UNWATCH, path, XenstoreErrorKind::Refused("ENOENT".to_owned())));
        }
        self.request(Verb::UNWATCH, 0, path, &[&payload])?;
        self.events.remove(path, token);
        Ok(())
    }

    fn check_watch(&self, verb: Verb, path: &str, token: &str) -> Result<Vec<u8>, XenstoreError> {
        check_path(verb, path)?;
        if token.bytes().any(|byte| byte == 0) {
            let text = "found a zero byte in a token, expected none".to_owned();
            return Err(XenstoreError::new(verb, path, XenstoreErrorKind::Invalid(text)));
        }
        Ok([path.as_bytes(), &[0], token.as_bytes(), &[0]].concat())
    }

    /// Returns the next event; `None` if none arrives within `timeout` (`None`: waits for ever; zero: does not wait).
    ///
    /// # Errors
    /// When the connection is lost.
    pub fn next_event(&mut self, timeout: Option<Duration>) -> Result<Option<WatchEvent>, XenstoreError> {
        let now = Instant::now();
        // A timeout beyond the clock's range waits for ever.
        let deadline = timeout.and_then(|timeout| now.checked_add(timeout));
        for _ in 0..MESSAGES_AHEAD {
            if !self.receive_unsolicited(Some(now))? {
                break;
            }
        }
        loop {
            if let Some(event) = self.events.pop() {
                return Ok(Some(event));
            }
            if !self.receive_unsolicited(deadline)? {
                return Ok(None);
            }
        }
    }

    /// Receives one message outside a request. Returns false if none arrives by the deadline.
    fn receive_unsolicited(&mut self, deadline: Deadline) -> Result<bool, XenstoreError> {
        let received = self.connection.receive(deadline);
        let received = received.map_err(|why| lost(Verb::WATCH_EVENT, "", why))?;
        let Some(message) = received else { return Ok(false) };
        self.dispatch(message);
        Ok(true)
    }

    /// Queues a watch event and drops any other message.
    fn dispatch(&mut self, message: Message) {
        if message.header.verb != Verb::WATCH_EVENT {
            tracing::debug!(?message.header, "unexpected reply from xenstore");
            return;
        }
        let mut parts = split_strings(&message.payload).map(std::str::from_utf8);
        match (parts.next(), parts.next()) {
            (Some(Ok(path)), Some(Ok(token))) => self.events.push(path, token),
            _ => tracing::debug!("a watch event from xenstore without a path and a token"),
        }
    }

    /// Sends a request and returns the payload of its reply.
    fn request(&mut self, verb: Verb, transaction: u32, path: &str, parts: &[&[u8]]) -> Result<Vec<u8>, XenstoreError> {
        let len: usize = parts.iter().map(|part| part.len()).sum();
        if len > PAYLOAD_MAX {
            let text = format!("found a request of {len} bytes, expected at most {PAYLOAD_MAX} (path and value)");
            return Err(XenstoreError::new(verb, path, XenstoreErrorKind::Invalid(text)));
        }
        self.last_request = self.last_request.wrapping_add(1);
        let header = Header { verb, request: self.last_request, transaction, len: len as u32 };
        let mut bytes = Vec::with_capacity(HEADER_BYTES + len);
        bytes.extend(header.encode());
        parts.iter().for_each(|part| bytes.extend(*part));
        let deadline = Instant::now().checked_add(self.timeout);
        self.connection.send(&bytes, deadline).map_err(|why| lost(verb, path, why))?;
        self.wait_reply(header, path, deadline)
    }

    fn wait_reply(&mut self, request: Header, path: &str, deadline: Deadline) -> Result<Vec<u8>, XenstoreError> {
        let verb = request.verb;
        loop {
            let received = self.connection.receive(deadline).map_err(|why| lost(verb, path, why))?;
            // Checked although a message arrived: a flood of other messages must not extend the deadline.
            let late = deadline.is_some_and(|deadline| Instant::now() > deadline);
            let Some(message) = received else {
                let why = format!("no answer within {:?}", self.timeout);
                return Err(lost(verb, path, self.connection.mark_lost(why)));
            };
            if message.header.request == request.request && message.header.verb == verb {
                return Ok(message.payload);
            }
            if message.header.request == request.request && message.header.verb == Verb::ERROR {
                return Err(XenstoreError::new(verb, path, parse_errno(&message.payload)));
            }
            if message.header.request == request.request && message.header.verb != Verb::WATCH_EVENT {
                let why = format!("found an answer of type {}, expected {}", message.header.verb.0, verb.0);
                return Err(lost(verb, path, self.connection.mark_lost(why)));
            }
            self.dispatch(message);
            if late {
                let why = format!("no answer within {:?}", self.timeout);
                return Err(lost(verb, path, self.connection.mark_lost(why)));
            }
        }
    }
}

/// Returns the errno name of an error reply; EIO if it does not look like one.
fn parse_errno(payload: &[u8]) -> XenstoreErrorKind {
    let name = payload.strip_suffix(&[0]).unwrap_or(payload);
    let plausible = name.first() == Some(&b'E')
        && name.len() <= 16
        && name.iter().all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit());
    let text = String::from_utf8_lossy(name);
    if plausible { XenstoreErrorKind::Refused(text.into_owned()) } else { XenstoreErrorKind::Refused("EIO".to_owned()) }
}

fn lost(verb: Verb, path: &str, why: String) -> XenstoreError {
    XenstoreError::new(verb, path, XenstoreErrorKind::Lost(why))
}

fn check_path(verb: Verb, path: &str) -> Result<(), XenstoreError> {
    match path_error(path) {
        Some(wrong) => Err(XenstoreError::new(verb, "", XenstoreErrorKind::Invalid(wrong))),
        None => Ok(()),
    }
}
