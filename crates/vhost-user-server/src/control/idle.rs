//! A device without a frontend: the initial and final state of its control thread.

use std::io::ErrorKind;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mqblk_core::{RateLimit, TokenBucket};
use mqblk_engine::UringContext;
use mqblk_virtio::VirtioDevice;

use crate::event_loop::Registration;
use crate::listen::ListenSocket;
use crate::options::ServerOptions;
use crate::shared::Shared;

/// Time after which a wait is logged: for an earlier connection's drain, or of a second frontend.
pub(super) const LOG_AFTER: Duration = Duration::from_secs(1);

/// Connections of a device. A VMM that reconnects tries once a second.
const CONNECTIONS: RateLimit = RateLimit { burst: 1000, per_second: 50 };

/// Messages of a device's frontend. A VMM sends some ten for each queue when it starts, and one for each memory slot.
const MESSAGES: RateLimit = RateLimit { burst: 10_000, per_second: 1000 };

/// The pause after a connection could not be accepted.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// The rate limit of connections or of messages.
pub(super) struct Pace {
    limit: RateLimit,
    bucket: TokenBucket,
    /// Time at which the next one is handled, if it must wait.
    pub(super) resume_at: Option<Instant>,
}

impl Pace {
    pub(super) fn new(limit: RateLimit) -> Pace {
        Pace { limit, bucket: TokenBucket::new(limit, Instant::now()), resume_at: None }
    }

    /// Returns true if the next one may be handled now. Else [`resume_at`](Self::resume_at) is the time.
    pub(super) fn take(&mut self) -> bool {
        let now = Instant::now();
        let taken = self.bucket.take(self.limit, now);
        self.resume_at = taken.err().map(|wait| now + wait);
        self.resume_at.is_none()
    }

    /// Returns the time until the next one may be handled; `None`: it may be now.
    pub(super) fn delay(&self) -> Option<Duration> {
        let delay = self.resume_at?.saturating_duration_since(Instant::now());
        (!delay.is_zero()).then_some(delay)
    }
}

/// A frontend that is accepted and not served yet.
pub(super) struct WaitingFrontend {
    pub(super) stream: UnixStream,
    /// Time at which the wait is logged; `None` if it has been.
    pub(super) log_at: Option<Instant>,
}

/// The result of accepting a frontend.
pub(super) enum Accepted {
    /// It waits to be served.
    Frontend,
    /// There was none.
    Nothing,
    /// One may wait, and is accepted later: from [`Pace::resume_at`] of the connections.
    Later,
}

/// A device without a frontend, or with one that waits.
pub(crate) struct IdleDevice<D: VirtioDevice<UringContext>> {
    /// Dropped before the socket.
    pub(super) registration: Registration,
    pub(super) socket: ListenSocket,
    pub(super) device: Arc<D>,
    pub(super) options: Arc<ServerOptions>,
    pub(super) shared: Arc<Shared>,
    pub(super) waiting_frontend: Option<WaitingFrontend>,
    /// True if the last accept failed.
    accept_failed: bool,
    pub(super) connections: Pace,
    pub(super) messages: Pace,
}

impl<D: VirtioDevice<UringContext>> IdleDevice<D> {
    pub(crate) fn new(
        socket: ListenSocket,
        registration: Registration,
        device: Arc<D>,
        options: Arc<ServerOptions>,
        shared: Arc<Shared>,
    ) -> Self {
        IdleDevice {
            registration,
            socket,
            device,
            options,
            shared,
            waiting_frontend: None,
            accept_failed: false,
            connections: Pace::new(CONNECTIONS),
            messages: Pace::new(MESSAGES),
        }
    }

    /// Accepts a frontend, if there is one and the rate limit allows it. Never blocks.
    pub(super) fn accept(&mut self) -> Accepted {
        if !self.connections.take() {
            self.options.sharing.budget.count_delayed_connection();
            return Accepted::Later;
        }
        match self.socket.listener().accept() {
            Ok((stream, _)) => {
                self.accept_failed = false;
                self.waiting_frontend = Some(WaitingFrontend { stream, log_at: Some(Instant::now() + LOG_AFTER) });
                Accepted::Frontend
            }
            // Another process that has the socket was faster.
            Err(error) if error.kind() == ErrorKind::WouldBlock => Accepted::Nothing,
            Err(error) => {
                self.postpone(&error);
                Accepted::Later
            }
        }
    }

    /// Postpones the next frontend. Most likely the process is out of descriptors or threads: the connection stays in
    /// the backlog, and no thread spins on it.
    pub(super) fn postpone(&mut self, error: &std::io::Error) {
        if !std::mem::replace(&mut self.accept_failed, true) {
            let disk = &self.options.name;
            tracing::warn!(disk, "connections cannot be accepted for now: {error}");
        }
        self.connections.resume_at = Some(Instant::now() + ACCEPT_RETRY);
    }

    /// Returns when the next frontend may be accepted.
    pub(super) fn retry_at(&self) -> Instant {
        self.connections.resume_at.unwrap_or_else(|| Instant::now() + ACCEPT_RETRY)
    }
}
