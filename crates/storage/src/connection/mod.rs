//! A channel that connects first, and again after each loss of its connection, while the worker continues.
//!
//! [`ConnectingChannel`] wraps the channel of a backend. A thread of its own calls [`Connector::connect`], which may
//! block; with a session it wakes the worker, and [`Connector::open`] makes the inner channel from it.
//!
//! | state | requests that are submitted |
//! |---|---|
//! | a first attempt to connect is running | wait |
//! | an attempt has failed, more follow | wait or fail: [`WhileDisconnected`] |
//! | connected | go to the inner channel |
//! | lost, the inner channel has requests outstanding | wait until it has returned them |
//!
//! Requests that a lost connection leaves unfinished wait here, and are the first on the next connection. Others wait
//! in front of the channel, in the worker's plug, as for a full ring: nothing is taken. So they are cancelled there,
//! and a daemon that takes the queue over also takes them. With [`WhileDisconnected::FailAfter`] they wait here too,
//! because the channel must fail them in time.

mod attempts;
mod connector;

use std::sync::Arc;
use std::time::{Duration, Instant};

use mqblk_core::{Completion, DiskChannel, DiskError, Errno, Outcome, Request, Tag};
use mqblk_memory::Buffer;
use mqblk_uring::{ClientId, UringContext};

use crate::observers::{LostConnection, Observers};
use attempts::{AttemptResult, Attempts};

pub use connector::{ConnectionHandle, ConnectionOptions, Connector, SessionChannel, WhileDisconnected};

/// ENOTCONN: the outcome of requests that fail because there is no connection.
const NOT_CONNECTED: Outcome = Outcome::Failed(Errno(107));

/// Most requests that wait for a connection in the channel.
const MAX_WAITING: usize = 256;

/// The inner channel, or the progress to the next one.
enum State<S> {
    /// A thread tries to connect. `failed`: an attempt has failed.
    Connecting {
        attempts: Attempts<S>,
        failed: bool,
    },
    Connected {
        inner: Box<dyn SessionChannel>,
        connection: ConnectionHandle,
        /// True if a request was completed. Otherwise the connection does not count: the next attempt waits, and
        /// requests have waited since the previous one.
        counts: bool,
    },
    /// The connection is lost; the inner channel has requests outstanding.
    Ending {
        inner: Box<dyn SessionChannel>,
    },
    Closed,
}

/// A channel that connects by a [`Connector`].
pub struct ConnectingChannel<C: Connector> {
    connector: Arc<C>,
    options: ConnectionOptions,
    observers: Arc<Observers>,
    /// Receives the wakeups.
    client: ClientId,
    state: State<C::Session>,
    /// While the connection is lost.
    lost: Option<LostConnection>,
    /// Time since which there is no connection that counts.
    disconnected: Option<Instant>,
    /// Pause before the next attempt.
    pause: Duration,
    /// Requests that wait here for a connection.
    waiting: Vec<Request<Buffer>>,
}

impl<C: Connector> ConnectingChannel<C> {
    /// Begins to connect. Does not wait.
    ///
    /// # Errors
    /// When the host refuses a thread.
    pub fn new(
        connector: Arc<C>,
        options: ConnectionOptions,
        observers: Arc<Observers>,
        context: &mut UringContext,
    ) -> Result<ConnectingChannel<C>, DiskError> {
        let client = context.add_client();
        let started = Attempts::start(&connector, options, Duration::ZERO, context.remote_waker(client, 0));
        let attempts = started.map_err(|source| {
            context.remove_client(client);
            DiskError::Os { what: "thread that connects".to_owned(), source }
        })?;
        let state = State::Connecting { attempts, failed: false };
        Ok(ConnectingChannel {
            connector,
            options,
            observers,
            client,
            state,
            lost: None,
            disconnected: Some(Instant::now()),
            pause: Duration::ZERO,
            waiting: Vec::with_capacity(MAX_WAITING),
        })
    }

    /// Handles changes of the connection. Called after each possible change.
    fn advance(&mut self, context: &mut UringContext) {
        match &mut self.state {
            State::Connecting { attempts, failed } => match attempts.result() {
                AttemptResult::Pending => {}
                AttemptResult::Failed(why) => {
                    *failed = true;
                    self.observers.failure(&why, |counters| counters.failed_attempts += 1);
                    self.lost.get_or_insert_with(|| self.observers.connection_lost(&why));
                }
                AttemptResult::Connected(session) => self.open(context, session),
            },
            State::Connected { connection, counts, .. } => {
                if let Some(why) = connection.lost_because() {
                    self.observers.failure(&why, |counters| {
                        counters.connected -= 1;
                        counters.lost += 1;
                    });
                    self.lost.get_or_insert_with(|| self.observers.connection_lost(&why));
                    if *counts {
                        (self.disconnected, self.pause) = (None, Duration::ZERO);
                    } else {
                        self.pause = self.options.pause_after(self.pause);
                    }
                    self.disconnected.get_or_insert_with(Instant::now);
                    if let State::Connected { inner, .. } = std::mem::replace(&mut self.state, State::Closed) {
                        self.state = State::Ending { inner };
                    }
                    self.end(context);
                }
            }
            State::Ending { .. } => self.end(context),
            State::Closed => {}
        }
    }

    fn open(&mut self, context: &mut UringContext, session: C::Session) {
        let connection = ConnectionHandle::new(context.remote_waker(self.client, 0));
        match Arc::clone(&self.connector).open(session, connection.clone(), context) {
            Ok(inner) => {
                self.state = State::Connected { inner, connection, counts: false };
                self.lost = None;
                self.observers.count(|counters| {
                    counters.connected += 1;
                    counters.made += 1;
                });
                self.observers.connection_made();
            }
            Err(error) => {
                let why = error.to_string();
                self.observers.failure(&why, |counters| counters.failed_attempts += 1);
                self.lost.get_or_insert_with(|| self.observers.connection_lost(&why));
                self.pause = self.options.pause_after(self.pause);
                self.reconnect(context, true);
            }
        }
    }

    /// Closes the inner channel of a lost connection when it has returned its requests, and connects again.
    fn end(&mut self, context: &mut UringContext) {
        if let State::Ending { inner } = &mut self.state {
            let waited = self.waiting.len();
            inner.take_unfinished(&mut self.waiting);
            let unfinished = (self.waiting.len() - waited) as u64;
            self.observers.count(|counters| counters.repeated += unfinished);
            if inner.outstanding() == 0 {
                inner.close(context);
                self.reconnect(context, false);
            }
        }
    }

    /// Submits the requests that wait here, if there is a connection.
    fn submit_waiting(&mut self, context: &mut UringContext, completions: &mut Vec<Completion<Buffer>>) {
        if let State::Connected { inner, .. } = &mut self.state
            && !self.waiting.is_empty()
        {
            inner.submit(context, &mut self.waiting, completions);
        }
    }

    /// Takes requests of a batch to wait here if they must fail in time. Returns their number.
    fn keep(&mut self, batch: &mut Vec<Request<Buffer>>) -> usize {
        let keeps = matches!(self.options.while_disconnected, WhileDisconnected::FailAfter(_));
        let room = if keeps { MAX_WAITING.saturating_sub(self.waiting.len()) } else { 0 };
        let taken = batch.len().min(room);
        self.waiting.extend(batch.drain(..taken));
        taken
    }

    /// Returns when requests that wait for a connection fail; `None`: never.
    fn fails_at(&self) -> Option<Instant> {
        let since = self.disconnected.filter(|_| !matches!(self.state, State::Connected { .. }))?;
        match self.options.while_disconnected {
            WhileDisconnected::Wait => None,
            WhileDisconnected::Fail => {
                matches!(self.state, State::Connecting { failed: true, .. } | State::Closed).then_some(since)
            }
            WhileDisconnected::FailAfter(time) => since.checked_add(time),
        }
    }

    /// Fails requests of a batch, and those that wait here, if their time is over. Returns the number of the batch's.
    fn fail_late(&mut self, batch: &mut Vec<Request<Buffer>>, completions: &mut Vec<Completion<Buffer>>) -> usize {
        if self.fails_at().is_none_or(|at| Instant::now() < at) {
            return 0;
        }
        let taken = batch.len();
        let failed =
            |request: Request<Buffer>| Completion { outcome: NOT_CONNECTED, tag: request.tag, buffer: request.buffer };
        completions.extend(self.waiting.drain(..).chain(batch.drain(..)).map(failed));
        taken
    }

    fn reconnect(&mut self, context: &mut UringContext, failed: bool) {
        let waker = context.remote_waker(self.client, 0);
        self.state = match Attempts::start(&self.connector, self.options, self.pause, waker) {
            Ok(attempts) => State::Connecting { attempts, failed },
            Err(error) => {
                tracing::error!("no thread to connect with: the disk stays disconnected: {error}");
                State::Closed
            }
        };
    }

    fn inner(&self) -> Option<&dyn SessionChannel> {
        match &self.state {
            State::Connected { inner, .. } | State::Ending { inner } => Some(inner.as_ref()),
            State::Connecting { .. } | State::Closed => None,
        }
    }

    fn inner_mut(&mut self) -> Option<&mut Box<dyn SessionChannel>> {
        match &mut self.state {
            State::Connected { inner, .. } | State::Ending { inner } => Some(inner),
            State::Connecting { .. } | State::Closed => None,
        }
    }
}

impl<C: Connector> DiskChannel<UringContext> for ConnectingChannel<C> {
    fn submit(
        &mut self,
        context: &mut UringContext,
        batch: &mut Vec<Request<Buffer>>,
        completions: &mut Vec<Completion<Buffer>>,
    ) -> usize {
        self.submit_waiting(context, completions);
        let taken = match &mut self.state {
            State::Connected { inner, counts, .. } if self.waiting.is_empty() => {
                let before = completions.len();
                let taken = inner.submit(context, batch, completions);
                *counts |= completions.len() > before;
                taken
            }
            _ => match self.fail_late(batch, completions) {
                0 => self.keep(batch),
                failed => failed,
            },
        };
        self.advance(context);
        taken
    }

    fn reap(&mut self, context: &mut UringContext, completions: &mut Vec<Completion<Buffer>>) -> usize {
        // The reason for the wakeup does not matter: everything is checked.
        while context.next(self.client).is_some() {}
        let before = completions.len();
        let reaped = self.inner_mut().map_or(0, |inner| inner.reap(context, completions));
        if let State::Connected { counts, .. } = &mut self.state {
            *counts |= reaped > 0;
        }
        self.advance(context);
        self.submit_waiting(context, completions);
        self.fail_late(&mut Vec::new(), completions);
        completions.len() - before
    }

    fn cancel(&mut self, context: &mut UringContext, tags: &[Tag], completions: &mut Vec<Completion<Buffer>>) {
        if let Some(inner) = self.inner_mut() {
            inner.cancel(context, tags, completions);
        }
        let cancelled = self.waiting.extract_if(.., |request| tags.binary_search(&request.tag).is_ok());
        completions.extend(cancelled.map(|Request { tag, buffer, .. }| Completion {
            outcome: Outcome::Aborted,
            tag,
            buffer,
        }));
        self.advance(context);
    }

    fn outstanding(&self) -> u32 {
        self.inner().map_or(0, |inner| inner.outstanding()) + self.waiting.len() as u32
    }

    fn deadline(&self) -> Option<Instant> {
        let fails = self.fails_at().filter(|_| !self.waiting.is_empty());
        self.inner().and_then(|inner| inner.deadline()).into_iter().chain(fails).min()
    }

    fn close(&mut self, context: &mut UringContext) {
        if let Some(inner) = self.inner_mut() {
            inner.close(context);
        }
        if matches!(self.state, State::Connected { .. }) {
            self.observers.count(|counters| counters.connected -= 1);
        }
        // A thread that connects is notified to stop, and not waited for.
        self.state = State::Closed;
        self.lost = None;
        context.remove_client(self.client);
    }
}

#[cfg(test)]
pub(crate) mod remote_disk;
#[cfg(test)]
mod tests;
