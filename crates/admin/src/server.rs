//! The server: a thread that accepts, and one for each client. So a slow verb, a client that stops in mid-line or one
//! that does not read its responses does not block other clients.

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread::{JoinHandle, Scope};
use std::time::{Duration, Instant};

use mqblk_core::lock::RankedMutex;
use mqblk_core::thread::{join_within, spawn, spawn_scoped};
use rustix::event::{PollFd, PollFlags};

use crate::clients::{ClientLimits, ClientSlot, Clients};
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
    /// Most clients at once. For one more, the longest idle client makes room. If none is idle for
    /// [`settled`](Self::settled), the new one gets an error and is closed.
    pub clients: usize,
    /// Clients of root and of the daemon's own user that have room besides those.
    pub reserved: usize,
    /// Idle time after which a client makes room for another one.
    pub settled: Duration,
    /// Longest request, in bytes without its newline.
    pub line_bytes: usize,
    /// Longest time from the first byte of a request to its last, and for reading a response. Between requests a
    /// client may be silent without a limit, as long as others have room.
    pub timeout: Duration,
}

impl Default for ServerOptions {
    fn default() -> Self {
        ServerOptions {
            clients: 16,
            reserved: 4,
            settled: Duration::from_secs(1),
            line_bytes: 64 << 10,
            timeout: Duration::from_secs(10),
        }
    }
}

/// Runtime of a verb before it is logged, and the interval of the check while verbs run.
const SLOW_VERB: Duration = Duration::from_secs(10);
const SLOW_VERB_CHECK: Duration = Duration::from_secs(1);

/// Longest wait of a stop for running verbs, for example one whose storage does not answer.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// A server on an admin socket. Dropping it stops it, and waits for running verbs for a limited time.
#[derive(Debug)]
pub struct Server {
    /// Dropped to stop: the other end hangs up.
    stop: Option<UnixStream>,
    clients: Arc<Clients>,
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
        let ServerOptions { clients, reserved, settled, .. } = options;
        let clients = Arc::new(Clients::new(ClientLimits { clients, reserved, settled }));
        let (stopped, own_uid) = (Arc::new(stopped), rustix::process::geteuid().as_raw());
        let state = ServerState { verbs, options, stopped, clients: Arc::clone(&clients), own_uid };
        let accept = move || std::thread::scope(|scope| state.accept_until_stopped(scope, &listener));
        let thread = spawn("admin", accept)?;
        Ok(Server { stop: Some(stop), clients, thread: Some(thread) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop = None;
        match self.thread.take().map(|thread| join_within(thread, STOP_TIMEOUT)) {
            None | Some(Some(Ok(()))) => {}
            Some(Some(Err(_))) => tracing::error!("a thread of the admin socket had panicked"),
            Some(None) => {
                let verbs = self.clients.running_verbs();
                tracing::warn!("verbs of the admin socket do not end, and are left behind: {verbs}");
            }
        }
    }
}

struct ServerState {
    verbs: Verbs,
    options: ServerOptions,
    /// Hangs up when the server must stop.
    stopped: Arc<UnixStream>,
    clients: Arc<Clients>,
    /// The daemon's user.
    own_uid: u32,
}

impl ServerState {
    fn accept_until_stopped<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>, listener: &UnixListener) {
        loop {
            let mut fds = [PollFd::new(listener, PollFlags::IN), PollFd::new(&*self.stopped, PollFlags::IN)];
            let running = self.clients.log_slow_verbs(SLOW_VERB);
            let polled = rustix::event::poll(&mut fds, running.then(|| timespec(SLOW_VERB_CHECK)).as_ref());
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
        let is_privileged = caller_of(&stream).uid.is_some_and(|uid| uid == 0 || uid == self.own_uid);
        let admitted = match stream.try_clone() {
            Ok(of_list) => self.clients.admit(of_list, is_privileged),
            Err(error) => return tracing::warn!("an admin client was refused: {error}"),
        };
        let slot = match admitted {
            Ok(slot) => slot,
            Err(count) => {
                tracing::debug!("an admin client was refused: {count} are connected");
                return refuse_client(stream, &protocol::too_many_clients(count));
            }
        };
        // Recovers the stream if the thread cannot be started.
        let stream = Arc::new(RankedMutex::leaf(Some(stream)));
        let of_thread = Arc::clone(&stream);
        let spawned = spawn_scoped(scope, CLIENT, move || {
            let taken = of_thread.lock().take();
            let served = taken.map_or(Ok(()), |stream| self.serve_client(stream, &slot));
            if let Err(error) = served {
                tracing::debug!("an admin client was dropped: {error}");
            }
            drop(slot);
        });
        if let Err(error) = spawned {
            tracing::warn!("an admin client was refused: {error}");
            let taken = stream.lock().take();
            if let Some(stream) = taken {
                refuse_client(stream, &protocol::no_thread(&error));
            }
        }
    }

    /// Serves one client until it disconnects, exceeds a limit, or the server stops.
    fn serve_client(&self, stream: UnixStream, slot: &ClientSlot<'_>) -> io::Result<()> {
        let ServerOptions { line_bytes, timeout, .. } = self.options;
        let mut lines = Lines::new(stream, Some(Arc::clone(&self.stopped)), line_bytes)?;
        loop {
            let response = match lines.read(LineDeadline::FromFirstByte(timeout))? {
                Line::Whole(line) => {
                    let descriptor = lines.take_descriptor();
                    let caller = Caller { descriptor, ..caller_of(lines.stream()) };
                    let began = |method: &str| slot.begin_verb(method);
                    let response = protocol::respond_to(&line, &self.verbs, caller, &began);
                    slot.end_verb();
                    response
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
