//! The server: a thread that accepts, and one for each client, so that a verb that takes its time, a client that is silent in
//! mid-line or one that does not read its answers holds up nobody else.

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{JoinHandle, Scope};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use crate::lines::{Line, Lines, Timeouts, timespec};
use crate::protocol;
use crate::verbs::Verbs;

/// How long accepting pauses after it failed: out of descriptors, most likely, and the connection stays in the queue.
const PAUSE: Duration = Duration::from_millis(100);

/// Bounds of what clients can cost.
#[derive(Clone, Copy, Debug)]
pub struct ServerOptions {
    /// Clients at once. The next is told so, and closed.
    pub clients: usize,
    /// Longest request, in bytes without its newline.
    pub line_bytes: usize,
    /// Longest time from the first byte of a request to its last, and for taking an answer. Between requests a client may be
    /// silent for as long as it likes.
    pub timeouts: Duration,
}

impl Default for ServerOptions {
    fn default() -> Self {
        ServerOptions { clients: 16, line_bytes: 64 << 10, timeouts: Duration::from_secs(10) }
    }
}

/// An admin socket that is answered. Stopped by dropping it, which waits for the verbs being run.
#[derive(Debug)]
pub struct Server {
    /// Dropped to stop: the other end hangs up.
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Answers clients of `listener` from `verbs`. The listener's place in the file system is the caller's.
    ///
    /// # Errors
    /// When a thread or a descriptor cannot be had.
    pub fn start(listener: UnixListener, verbs: Verbs, options: ServerOptions) -> io::Result<Server> {
        listener.set_nonblocking(true)?;
        let (stop, stopped) = UnixStream::pair()?;
        let house = House { verbs, options, stopped: Arc::new(stopped), clients: AtomicUsize::new(0) };
        let thread = std::thread::Builder::new()
            .name("admin".to_owned())
            .spawn(move || std::thread::scope(|scope| house.accept_until_stopped(scope, &listener)))?;
        Ok(Server { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("a thread of the admin socket had panicked");
        }
    }
}

struct House {
    verbs: Verbs,
    options: ServerOptions,
    /// Hangs up when the server is to stop.
    stopped: Arc<UnixStream>,
    /// Clients connected.
    clients: AtomicUsize,
}

/// A client's place among those that may be connected.
struct Place<'a>(&'a AtomicUsize);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl House {
    fn accept_until_stopped<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>, listener: &UnixListener) {
        loop {
            let mut fds = [PollFd::new(listener, PollFlags::IN), PollFd::new(&*self.stopped, PollFlags::IN)];
            let polled = rustix::event::poll(&mut fds, None);
            if polled.is_ok() && !fds[1].revents().is_empty() {
                return;
            }
            match listener.accept() {
                Ok((stream, _)) => self.welcome(scope, stream),
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                Err(error) => {
                    tracing::warn!("admin socket: accept: {error}");
                    let mut stop = [PollFd::new(&*self.stopped, PollFlags::IN)];
                    // Whatever it says, the loop asks again.
                    let _ = rustix::event::poll(&mut stop, Some(&timespec(PAUSE)));
                }
            }
        }
    }

    fn welcome<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>, stream: UnixStream) {
        // Only this thread adds, so that the bound cannot be passed in between.
        let place = (self.clients.load(Ordering::Relaxed) < self.options.clients).then(|| {
            self.clients.fetch_add(1, Ordering::Relaxed);
            Place(&self.clients)
        });
        let Some(place) = place else {
            self.turn_away(stream);
            return;
        };
        let spawned = std::thread::Builder::new().name("admin-client".to_owned()).spawn_scoped(scope, move || {
            if let Err(error) = self.converse(stream) {
                tracing::debug!("an admin client was dropped: {error}");
            }
            drop(place);
        });
        if let Err(error) = spawned {
            tracing::warn!("an admin client was refused: no thread: {error}");
        }
    }

    fn turn_away(&self, stream: UnixStream) {
        tracing::debug!("an admin client was refused: {} are connected", self.options.clients);
        // Whoever cannot take one line at once has nothing in its way: the socket is fresh.
        let told = Lines::new(stream, None, 0)
            .and_then(|mut lines| lines.write(&protocol::too_many_clients(self.options.clients), Instant::now()));
        if let Err(error) = told {
            tracing::debug!("an admin client was not told that it is one too many: {error}");
        }
    }

    /// Answers one client until it leaves, breaks a bound, or the server stops.
    fn converse(&self, stream: UnixStream) -> io::Result<()> {
        let ServerOptions { line_bytes, timeouts, .. } = self.options;
        let mut lines = Lines::new(stream, Some(Arc::clone(&self.stopped)), line_bytes)?;
        loop {
            let answer = match lines.read(Timeouts::FromFirstByte(timeouts))? {
                Line::Whole(line) => protocol::answer(&line, &self.verbs),
                Line::TooLong => {
                    // Where the next request begins is anybody's guess.
                    return lines.write(&protocol::too_long(line_bytes), Instant::now() + timeouts);
                }
                Line::Ended | Line::Stopped => return Ok(()),
                Line::Late => return Err(io::Error::new(io::ErrorKind::TimedOut, "half a line, and then nothing")),
            };
            if let Some(answer) = answer {
                lines.write(&answer, Instant::now() + timeouts)?;
            }
        }
    }
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
