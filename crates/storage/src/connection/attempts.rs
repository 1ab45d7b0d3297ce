//! The thread that connects, and its state shared with the worker.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use mqblk_core::lock::lock;
use mqblk_core::thread_role::spawn_connector;
use mqblk_uring::RemoteWaker;

use super::connector::{ConnectionOptions, Connector};

/// Result of the attempts since the last query.
pub(super) enum AttemptResult<S> {
    /// Nothing new.
    Pending,
    /// The last one has failed, for this reason. More follow.
    Failed(String),
    Connected(S),
}

struct Shared<S> {
    state: Mutex<AttemptState<S>>,
    changed: Condvar,
}

struct AttemptState<S> {
    session: Option<S>,
    error: Option<String>,
    /// True if no session is wanted any more.
    abandoned: bool,
}

impl<S> Shared<S> {
    fn lock(&self) -> MutexGuard<'_, AttemptState<S>> {
        lock(&self.state)
    }
}

/// Attempts to connect, on a thread of their own. Dropping this ends them.
pub(super) struct Attempts<S>(Arc<Shared<S>>);

impl<S: Send + 'static> Attempts<S> {
    /// Starts the first one after a pause. Each one ends with a use of the waker.
    pub(super) fn start<C>(
        connector: &Arc<C>,
        options: ConnectionOptions,
        pause: Duration,
        waker: RemoteWaker,
    ) -> io::Result<Attempts<S>>
    where
        C: Connector<Session = S>,
    {
        let state = Mutex::new(AttemptState { session: None, error: None, abandoned: false });
        let shared = Arc::new(Shared { state, changed: Condvar::new() });
        let (connector, of_thread) = (Arc::clone(connector), Arc::clone(&shared));
        spawn_connector("connect", move || connect(connector.as_ref(), options, pause, &of_thread, &waker))?;
        Ok(Attempts(shared))
    }

    pub(super) fn result(&mut self) -> AttemptResult<S> {
        let mut state = self.0.lock();
        match (state.session.take(), state.error.take()) {
            (Some(session), _) => AttemptResult::Connected(session),
            (None, Some(why)) => AttemptResult::Failed(why),
            (None, None) => AttemptResult::Pending,
        }
    }
}

impl<S> Drop for Attempts<S> {
    fn drop(&mut self) {
        self.0.lock().abandoned = true;
        self.0.changed.notify_all();
    }
}

fn connect<C: Connector>(
    connector: &C,
    options: ConnectionOptions,
    mut pause: Duration,
    shared: &Shared<C::Session>,
    waker: &RemoteWaker,
) {
    loop {
        if !pause.is_zero() {
            let state = shared.lock();
            let waited = shared.changed.wait_timeout_while(state, pause, |state| !state.abandoned);
            if waited.unwrap_or_else(PoisonError::into_inner).0.abandoned {
                return;
            }
        }
        let attempt = catch_unwind(AssertUnwindSafe(|| connector.connect()));
        let attempt = attempt.unwrap_or_else(|_| Err(io::Error::other("the connector panicked")));
        let mut state = shared.lock();
        if state.abandoned {
            return;
        }
        match attempt {
            Ok(session) => {
                state.session = Some(session);
                drop(state);
                waker.wake();
                return;
            }
            Err(error) => {
                state.error = Some(error.to_string());
                drop(state);
                waker.wake();
            }
        }
        pause = options.pause_after(pause);
    }
}
