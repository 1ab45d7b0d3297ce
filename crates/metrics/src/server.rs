//! The server: one thread for all clients, which never waits for one of them.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mqblk_core::thread::{join_within, spawn};
use mqblk_core::thread_role::{self, ThreadRole};
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::accept::TextFormat;
use crate::connection::{Connection, Progress};
use crate::limits::ServerLimits;
use crate::listener::{MetricsListener, Peer, ScraperStream};
use crate::request::{self, Detail};

/// Pause after a failed accept: most likely the process is out of descriptors, and the connection stays in the backlog.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// Longest wait of a stop for a sample that is being taken.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Takes a sample and encodes it, or returns the reason for a failure.
pub type Sample = dyn FnMut(TextFormat, Detail) -> Result<String, String> + Send;

/// A server of metrics. Dropping it stops it, and waits for a sample that is being taken for a limited time.
#[derive(Debug)]
pub struct Server {
    /// Dropped to stop: the other end hangs up.
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves the clients of `listener`. `sample` is called on the server's thread, which has the role
    /// [`ThreadRole::Metrics`].
    ///
    /// # Errors
    /// When the thread or a descriptor cannot be created.
    pub fn start(listener: MetricsListener, sample: Box<Sample>, limits: ServerLimits) -> io::Result<Server> {
        listener.prepare()?;
        let (stop, stopped) = UnixStream::pair()?;
        let thread = spawn("metrics", move || match thread_role::enter(ThreadRole::Metrics) {
            Ok(()) => Clients {
                listener,
                limits,
                stopped,
                clients: Vec::new(),
                samples: Samples::new(sample, limits.sample_age),
            }
            .serve(),
            Err(error) => tracing::error!("metrics are not served: the thread cannot be restricted: {error}"),
        })?;
        Ok(Server { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop = None;
        match self.thread.take().map(|thread| join_within(thread, STOP_TIMEOUT)) {
            None | Some(Some(Ok(()))) => {}
            Some(Some(Err(_))) => tracing::error!("the metrics thread had panicked"),
            Some(None) => tracing::warn!("the metrics thread does not end: it waits for a worker, and is left behind"),
        }
    }
}

/// The newest text of each format and detail.
struct Samples {
    sample: Box<Sample>,
    max_age: Duration,
    texts: Vec<(TextFormat, Detail, Instant, Arc<str>)>,
}

impl Samples {
    fn new(sample: Box<Sample>, max_age: Duration) -> Samples {
        Samples { sample, max_age, texts: Vec::new() }
    }

    fn text(&mut self, format: TextFormat, detail: Detail) -> Result<Arc<str>, String> {
        let max_age = self.max_age;
        self.texts.retain(|(_, _, at, _)| at.elapsed() < max_age);
        let same = self.texts.iter().find(|(of, with, ..)| (*of, *with) == (format, detail));
        if let Some((.., text)) = same {
            return Ok(Arc::clone(text));
        }
        let text: Arc<str> = (self.sample)(format, detail)?.into();
        self.texts.push((format, detail, Instant::now(), Arc::clone(&text)));
        Ok(text)
    }
}

/// The server's thread.
struct Clients {
    listener: MetricsListener,
    limits: ServerLimits,
    /// Hangs up when the server must stop.
    stopped: UnixStream,
    clients: Vec<Connection>,
    samples: Samples,
}

impl Clients {
    fn serve(mut self) {
        let mut pause_until: Option<Instant> = None;
        loop {
            let now = Instant::now();
            pause_until = pause_until.filter(|until| *until > now);
            let Some(ready) = self.wait(pause_until) else { return };
            let (limits, samples) = (self.limits, &mut self.samples);
            let now = Instant::now();
            let mut index = 0;
            self.clients.retain_mut(|client| {
                index += 1;
                if !ready.clients[index - 1] {
                    return client.deadline > now;
                }
                let progress = client.advance(&limits, &mut |format, detail| samples.text(format, detail));
                progress == Progress::Open && client.deadline > now
            });
            if ready.listener && !self.accept() {
                pause_until = Some(Instant::now() + ACCEPT_RETRY);
            }
        }
    }

    /// Waits for the next event. `None` when the server must stop.
    fn wait(&self, pause_until: Option<Instant>) -> Option<ReadySockets> {
        let deadlines = self.clients.iter().map(|client| client.deadline);
        let next = deadlines.chain(pause_until).min();
        let timeout = next.map(|at| timespec(at.saturating_duration_since(Instant::now())));
        let waits = self.clients.iter().map(Connection::waits_for);
        let mut fds = vec![PollFd::new(&self.stopped, PollFlags::IN)];
        fds.extend(waits.map(|(stream, flags)| PollFd::new(stream, flags)));
        if pause_until.is_none() {
            fds.push(PollFd::new(&self.listener, PollFlags::IN));
        }
        let polled = rustix::event::poll(&mut fds, timeout.as_ref());
        let is_ready: Vec<bool> = fds.iter().map(|fd| polled.is_ok() && !fd.revents().is_empty()).collect();
        let listener = 1 + self.clients.len();
        (!is_ready[0]).then(|| ReadySockets {
            clients: is_ready[1..listener].to_vec(),
            listener: is_ready.get(listener).copied().unwrap_or(false),
        })
    }

    /// Accepts waiting clients, at most the limit of clients. Returns false if the host has no descriptor for one.
    fn accept(&mut self) -> bool {
        for _ in 0..self.limits.clients {
            match self.listener.accept() {
                Ok(stream) => self.add(stream),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
                // The client has gone again.
                Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted) => {
                }
                Err(error) => {
                    tracing::warn!("metrics: accept: {error}");
                    return false;
                }
            }
        }
        true
    }

    fn add(&mut self, stream: ScraperStream) {
        let now = Instant::now();
        let most = self.limits.clients;
        if self.clients.len() >= most {
            match self.makes_room(stream.peer(), now) {
                Some(at) => {
                    tracing::debug!("metrics: a client that was idle was dropped for a new one: there are {most}");
                    self.clients.remove(at);
                }
                None => {
                    // Fits in the socket's empty buffer.
                    let mut refused = Connection::refuse(stream, request::too_many(most), now, &self.limits);
                    let _ = refused.advance(&self.limits, &mut |_, _| Err(String::new()));
                    return;
                }
            }
        }
        self.clients.push(Connection::new(stream, now, &self.limits));
    }

    /// Returns the client that makes room for one of `peer`: the longest idle client of the peer with most clients. If
    /// that peer is `peer` itself, or would have no more clients than `peer`, only after a time.
    fn makes_room(&self, peer: Peer, now: Instant) -> Option<usize> {
        let count = |peer: Peer| self.clients.iter().filter(|client| client.peer == peer).count();
        let (greedy, clients) =
            self.clients.iter().map(|client| (client.peer, count(client.peer))).max_by_key(|of| of.1)?;
        let is_fair = greedy != peer && clients > count(peer) + 1;
        let of_greedy = (0..self.clients.len()).filter(|at| !is_fair || self.clients[*at].peer == greedy);
        let oldest = of_greedy.min_by_key(|at| self.clients[*at].idle_since)?;
        let is_settled = now.duration_since(self.clients[oldest].idle_since) >= self.limits.settled;
        (is_fair || is_settled).then_some(oldest)
    }
}

/// The sockets with events.
struct ReadySockets {
    clients: Vec<bool>,
    listener: bool,
}

/// Converts a time, rounded up to milliseconds: a poll that returns a moment before a deadline would be repeated at
/// once.
fn timespec(time: Duration) -> Timespec {
    let time = time + Duration::from_millis(1);
    Timespec { tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX), tv_nsec: time.subsec_nanos().into() }
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
