//! The traits of a backend that connects, and the options of its connection.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mqblk_core::lock::lock;
use mqblk_core::{DiskChannel, DiskError, Request};
use mqblk_memory::Buffer;
use mqblk_uring::{RemoteWaker, UringContext};

/// The channel of a connection.
pub trait SessionChannel: DiskChannel<UringContext> {
    /// Returns requests, as submitted, that the lost connection left unfinished and the kernel has released. A later
    /// call, after a completion, returns the others. A request's effects may be repeated. A channel that ends all its
    /// requests with an error instead need not do anything.
    fn take_unfinished(&mut self, _requests: &mut Vec<Request<Buffer>>) {}
}

/// A backend's way to connect.
pub trait Connector: Send + Sync + 'static {
    /// A connection, between [`connect`](Self::connect) and [`open`](Self::open).
    type Session: Send + 'static;

    /// Connects. Called on its own thread and may block; it should give up at some time, so that the reason is
    /// reported.
    ///
    /// # Errors
    /// When it cannot connect now. It is called again after a pause.
    fn connect(&self) -> io::Result<Self::Session>;

    /// Makes the channel of a session. Called on the worker's thread: must not block. The channel reports the loss of
    /// its connection by `connection`, and then returns or ends all its outstanding requests.
    ///
    /// # Errors When the host refuses a resource. Counts as a failed attempt.
    fn open(
        self: Arc<Self>,
        session: Self::Session,
        connection: ConnectionHandle,
        context: &mut UringContext,
    ) -> Result<Box<dyn SessionChannel>, DiskError>;
}

/// Handling of requests submitted without a connection after a failed attempt to connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhileDisconnected {
    /// They wait. The age of the oldest one is shown by `stat` and logged (`--hang-warning-s`).
    Wait,
    /// They fail; the disk's error policy (`on-error`) applies.
    Fail,
    /// They wait until this long after the loss of the connection, then they fail until there is one.
    FailAfter(Duration),
}

/// Options of a channel's connection.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionOptions {
    /// Handling of requests meanwhile.
    pub while_disconnected: WhileDisconnected,
    /// Pause after a failed attempt. It doubles each time, up to `longest_pause`.
    pub first_pause: Duration,
    /// Longest pause.
    pub longest_pause: Duration,
}

impl ConnectionOptions {
    /// Returns the pause after one without a connection; the first one after none.
    pub(super) fn pause_after(&self, pause: Duration) -> Duration {
        (pause * 2).clamp(self.first_pause, self.longest_pause)
    }
}

impl Default for ConnectionOptions {
    fn default() -> Self {
        ConnectionOptions {
            while_disconnected: WhileDisconnected::Wait,
            first_pause: Duration::from_millis(100),
            longest_pause: Duration::from_secs(10),
        }
    }
}

/// The handle with which a channel, or its thread, reports the loss of its connection.
#[derive(Clone, Debug)]
pub struct ConnectionHandle(Arc<Connection>);

#[derive(Debug)]
struct Connection {
    /// Set after `why`.
    lost: AtomicBool,
    why: Mutex<String>,
    waker: RemoteWaker,
}

impl ConnectionHandle {
    pub(super) fn new(waker: RemoteWaker) -> ConnectionHandle {
        ConnectionHandle(Arc::new(Connection { lost: AtomicBool::new(false), why: Mutex::default(), waker }))
    }

    /// Reports the loss: nothing more is submitted to the channel, and it is closed when its outstanding requests have
    /// ended.
    pub fn lost(&self, why: &str) {
        let mut first = lock(&self.0.why);
        if !self.0.lost.load(Ordering::Relaxed) {
            why.clone_into(&mut first);
            self.0.lost.store(true, Ordering::Release);
        }
        drop(first);
        self.0.waker.wake();
    }

    /// Returns the reason if it is lost.
    #[inline]
    pub(super) fn lost_because(&self) -> Option<String> {
        let lost = self.0.lost.load(Ordering::Acquire);
        lost.then(|| lock(&self.0.why).clone())
    }
}
