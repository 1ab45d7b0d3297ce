//! The server: a thread that accepts, and one for each client, so that a slow verb, a client that stops in mid-line or one that does not
//! read its responses does not block other clients.

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, Scope};
use std::time::{Duration, Instant};

use mqblk_core::thread::{join_within, refused, spawn};
use rustix::event::{PollFd, PollFlags};

use crate::lines::{Line, LineDeadline, Lines, timespec};
use crate::protocol;
use crate::verbs::{Caller, Verbs};

/// Pause after a failed accept: most likely the process is out of descriptors, and the connection stays in the backlog.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Name of the threads of clients.
const CLIENT: &str = "admin-client";

/// The limits for clients.
#[derive(Clone, Copy, Debug)]
pub struct ServerOptions {
    /// Most clients at once. Further ones get an error and are closed.
    pub clients: usize,
    /// Longest request, in bytes without its newline.
    pub line_bytes: usize,
    /// Longest time from the first byte of a request to its last, and for reading a response. Between requests a client may be silent for
    /// ever.
    pub timeout: Duration,
}

impl Default for ServerOptions {
    fn default() -> Self {
        ServerOptions { clients: 16, line_bytes: 64 << 10, timeout: Duration::from_secs(10) }
    }
}

/// How long a stop waits for verbs that are running, such as one whose storage does not answer.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// A server on an admin socket. Stopped by dropping it, which waits for the verbs that are running, but not for ever.
#[derive(Debug)]
pub struct Server {
    /// Dropped to stop: the other end hangs up.
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves the clients of `listener` with `verbs`. The socket's file belongs to the caller.
    ///
    /// # Errors
    /// When a thread or a descriptor cannot be created.
    pub fn start(listener: UnixListener, verbs: Verbs, options: ServerOptions) -> io::Result<Server> {
        listener.set_nonblocking(true)?;
        let (stop, stopped) = UnixStream::pair()?;
        let state = ServerState { verbs, options, stopped: Arc::new(stopped), clients: AtomicUsize::new(0) };
        let accept = move || std::thread::scope(|scope| state.accept_until_stopped(scope, &listener));
        let thread = spawn("admin", accept)?;
        Ok(Server { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop = None;
        match self.thread.take().map(|thread| join_within(thread, STOP_TIMEOUT)) {
            None | Some(Some(Ok(()))) => {}
            Some(Some(Err(_))) => tracing::error!("a thread of the admin socket had panicked"),
            Some(None) => {
                tracing::warn!("a verb of the admin socket does not end: it waits for storage, and is left behind")
            }
        }
    }
}

struct ServerState {
    verbs: Verbs,
    options: ServerOptions,
    /// Hangs up when the server must stop.
    stopped: Arc<UnixStream>,
    /// Clients connected.
    clients: AtomicUsize,
}

/// One of the limited number of clients. Freed by dropping it.
struct ClientSlot<'a>(&'a AtomicUsize);

impl Drop for ClientSlot<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl ServerState {
    fn accept_until_stopped<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>, listener: &UnixListener) {
        loop {
            let mut fds = [PollFd::new(listener, PollFlags::IN), PollFd::new(&*self.stopped, PollFlags::IN)];
            let polled = rustix::event::poll(&mut fds, None);
            if polled.is_ok() && !fds[1].revents().is_empty() {
                return;
            }
            match listener.accept() {
                Ok((stream, _)) => self.accept_client(scope, stream),
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                Err(error) => {
                    tracing::warn!("admin socket: accept: {error}");
                    let mut stop = [PollFd::new(&*self.stopped, PollFlags::IN)];
                    // The loop polls again in any case.
                    let _ = rustix::event::poll(&mut stop, Some(&timespec(ACCEPT_RETRY)));
                }
            }
        }
    }

    fn accept_client<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>, stream: UnixStream) {
        // Only this thread adds clients, so the limit cannot be exceeded meanwhile.
        let slot = (self.clients.load(Ordering::Relaxed) < self.options.clients).then(|| {
            self.clients.fetch_add(1, Ordering::Relaxed);
            ClientSlot(&self.clients)
        });
        let Some(slot) = slot else {
            tracing::debug!("an admin client was refused: {} are connected", self.options.clients);
            refuse_client(stream, &protocol::too_many_clients(self.options.clients));
            return;
        };
        // Recovers the stream if the thread cannot be started.
        let stream = Arc::new(Mutex::new(Some(stream)));
        let of_thread = Arc::clone(&stream);
        let spawned = std::thread::Builder::new().name(CLIENT.to_owned()).spawn_scoped(scope, move || {
            let served = take(&of_thread).map_or(Ok(()), |stream| self.serve_client(stream));
            if let Err(error) = served {
                tracing::debug!("an admin client was dropped: {error}");
            }
            drop(slot);
        });
        if let Err(error) = spawned {
            let error = refused(CLIENT, &error);
            tracing::warn!("an admin client was refused: {error}");
            if let Some(stream) = take(&stream) {
                refuse_client(stream, &protocol::no_thread(&error));
            }
        }
    }

    /// Serves one client until it disconnects, exceeds a limit, or the server stops.
    fn serve_client(&self, stream: UnixStream) -> io::Result<()> {
        let ServerOptions { line_bytes, timeout, .. } = self.options;
        let mut lines = Lines::new(stream, Some(Arc::clone(&self.stopped)), line_bytes)?;
        loop {
            let response = match lines.read(LineDeadline::FromFirstByte(timeout))? {
                Line::Whole(line) => {
                    let descriptor = lines.take_descriptor();
                    protocol::respond_to(&line, &self.verbs, Caller { descriptor, ..caller_of(lines.stream()) })
                }
                Line::TooLong => {
                    // The start of the next request is not known.
                    return lines.write(&protocol::too_long(line_bytes), Instant::now() + timeout);
                }
                Line::Closed | Line::Stopped => return Ok(()),
                Line::TimedOut => return Err(io::Error::new(io::ErrorKind::TimedOut, "half a line, and then nothing")),
            };
            if let Some(response) = response {
                lines.write(&response, Instant::now() + timeout)?;
            }
        }
    }
}

/// Returns the process at the other end.
fn caller_of(stream: &UnixStream) -> Caller {
    let peer = rustix::net::sockopt::socket_peercred(stream).ok();
    Caller {
        uid: peer.map(|peer| peer.uid.as_raw()),
        pid: peer.map(|peer| peer.pid.as_raw_nonzero().get()),
        descriptor: None,
    }
}

fn take(stream: &Mutex<Option<UnixStream>>) -> Option<UnixStream> {
    stream.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// Sends a new client this response, and closes its connection.
fn refuse_client(stream: UnixStream, response: &[u8]) {
    // The deadline is now: the socket is new, so its buffer has space for one line.
    let sent = Lines::new(stream, None, 0).and_then(|mut lines| lines.write(response, Instant::now()));
    if let Err(error) = sent {
        tracing::debug!("an admin client was refused without a response: {error}");
    }
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
