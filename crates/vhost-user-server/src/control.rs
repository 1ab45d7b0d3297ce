//! The control thread of a device that has a frontend: passes messages to the session, detects disconnects and a second
//! frontend.
//!
//! `idle` is a device without a frontend, `place` is a device's place: idle, or on its control thread.

mod hand_over;
mod idle;
mod own_message;
mod place;

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mqblk_core::lock::LockRank;
use mqblk_core::thread::spawn;
use mqblk_engine::{EventFd, UringContext};
use mqblk_virtio::VirtioDevice;
use rustix::event::{PollFd, PollFlags, Timespec};
use vhost::vhost_user::{BackendReqHandler, Error, VhostUserBackendReqHandlerMut as _};

use crate::backend_channel::{CHECK_DEVICE_STATE, OwnRequest};
use crate::disks::{SharedSession, lock_session};
use crate::session::{RETRY, Session, finish_transfer};
use crate::shared::{Shared, SharedConnection};
pub(crate) use idle::IdleDevice;
use idle::{Accepted, LOG_AFTER};
use own_message::OwnMessage;
pub(crate) use place::{DeviceControl, DevicePlace, HoldStart};

/// The pause after a panic.
const PANIC_PAUSE: Duration = Duration::from_millis(100);

/// Longest time for which a drain holds its session's lock.
const LOCK_SLICE: Duration = Duration::from_millis(100);

/// State of the control thread.
pub(crate) struct ControlThread<D: VirtioDevice<UringContext>> {
    /// The device's state without the thread. Its frontend waits until the current one has disconnected.
    idle: IdleDevice<D>,
    shared: Arc<Shared>,
    /// Signalled by requests to the thread.
    wakeup: EventFd,
    current: Option<Connection<D>>,
    drains: Vec<JoinHandle<()>>,
    /// True if another process serves the device now.
    is_released: bool,
}

struct Connection<D: VirtioDevice<UringContext>> {
    stream: Arc<UnixStream>,
    session: Arc<Mutex<Session<D>>>,
    handler: BackendReqHandler<Mutex<Session<D>>>,
    /// Set while queues wait for requests of an earlier connection or daemon: the start, and true if it has been
    /// logged.
    waiting: Option<(Instant, bool)>,
}

/// Events that the poll returned.
#[derive(Default)]
struct ReadyEvents {
    accept: bool,
    message: bool,
    waiting_left: bool,
}

impl<D: VirtioDevice<UringContext>> ControlThread<D> {
    fn new(idle: IdleDevice<D>, wakeup: EventFd) -> Self {
        let shared = Arc::clone(&idle.shared);
        ControlThread { idle, shared, wakeup, current: None, drains: Vec::new(), is_released: false }
    }

    /// Serves one frontend after the other until none is left. Returns the device then; `None` once the server has
    /// stopped.
    fn run(mut self) -> Option<IdleDevice<D>> {
        while !self.is_stopped() && !self.is_released {
            if self.is_idle() {
                return Some(self.idle);
            }
            let turn = catch_unwind(AssertUnwindSafe(|| self.turn()));
            if turn.is_err() && !self.recover() {
                break;
            }
        }
        self.finish();
        None
    }

    /// Returns true if there is no frontend, and no drain of an earlier one.
    fn is_idle(&mut self) -> bool {
        let has_frontend = self.current.is_some() || self.idle.waiting_frontend.is_some();
        if has_frontend || self.shared.disks.is_draining() || self.shared.hold.lock().is_some() {
            return false;
        }
        // They have ended except for their last steps.
        self.drains.drain(..).for_each(|drain| _ = drain.join());
        true
    }

    /// Waits for events and handles them.
    fn turn(&mut self) {
        if self.current.is_none()
            && let Some(second) = self.idle.waiting_frontend.take()
        {
            self.begin_session(second.stream);
        }
        let ready = self.wait();
        if self.is_stopped() {
            return;
        }
        let hold = self.shared.hold.lock().take();
        if let Some(hold) = hold {
            // The next turn finds the ready events again.
            return self.hold(hold);
        }
        if ready.message {
            match self.idle.messages.take() {
                true => self.handle_message(),
                false => self.idle.options.sharing.budget.count_delayed_message(),
            }
        }
        self.start_waiting_queues();
        self.end_suspended();
        self.log_waiting_frontend();
        if let Some(current) = &self.current {
            lock_session(&current.session).end_resume_if_due();
        }
        if ready.waiting_left {
            self.idle.waiting_frontend = None;
        }
        if ready.accept {
            match self.idle.connections.take() {
                true => self.accept(),
                false => self.idle.options.sharing.budget.count_delayed_connection(),
            }
        }
    }

    /// Continues after a panic, which is a bug: it ends only this disk's connection. Returns false if the disk can no
    /// longer be served.
    fn recover(&mut self) -> bool {
        tracing::error!(disk = self.name(), "the control thread panicked, which is a bug: the disk's connection ends");
        // A bug in every turn must not occupy a CPU.
        std::thread::sleep(PANIC_PAUSE);
        let end = AssertUnwindSafe(|| match self.current {
            Some(_) => self.disconnect(None),
            None => self.forget_connection(),
        });
        if catch_unwind(end).is_ok() {
            return true;
        }
        // Its queues may still be attached: a next connection could wait for them without a limit.
        tracing::error!(
            disk = self.name(),
            "the control thread panicked again: the disk is not served until a restart"
        );
        false
    }

    fn is_stopped(&self) -> bool {
        self.shared.stopped.load(Ordering::SeqCst)
    }

    fn name(&self) -> &str {
        &self.idle.options.name
    }

    fn wait(&self) -> ReadyEvents {
        // Read once: the end of a delay must end the poll.
        let (connection_delay, message_delay) = (self.idle.connections.delay(), self.idle.messages.delay());
        // One frontend is served and one waits; others stay in the socket's backlog.
        let listening = self.idle.waiting_frontend.is_none() && connection_delay.is_none();
        let reading = message_delay.is_none();
        let listener = self.idle.socket.listener().as_fd();
        let nothing = PollFlags::empty();
        let mut fds = vec![
            PollFd::from_borrowed_fd(self.wakeup.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(listener, if listening { PollFlags::IN } else { nothing }),
        ];
        let connected = self.current.as_ref().map(|connection| connection.stream.as_fd());
        fds.extend(connected.map(|fd| PollFd::from_borrowed_fd(fd, if reading { PollFlags::IN } else { nothing })));
        fds.extend(self.idle.waiting_frontend.as_ref().map(|second| PollFd::new(&second.stream, PollFlags::RDHUP)));
        let is_due = |connection: &Connection<D>| {
            connection.waiting.is_some() || lock_session(&connection.session).is_suspended()
        };
        let waiting = self.current.as_ref().is_some_and(is_due);
        let report = self.idle.waiting_frontend.as_ref().and_then(|second| second.log_at);
        let resume = self.current.as_ref().and_then(|current| lock_session(&current.session).resume_deadline());
        let delays = report.into_iter().chain(resume).map(|at| at.saturating_duration_since(Instant::now()));
        let delays = delays.chain(connection_delay).chain(message_delay);
        let limit = waiting.then_some(RETRY).into_iter().chain(delays).min();
        let limit = limit.map(|time| Timespec { tv_sec: 0, tv_nsec: time.min(LOG_AFTER / 2).subsec_nanos().into() });
        if rustix::event::poll(&mut fds, limit.as_ref()).is_err() {
            return ReadyEvents::default();
        }
        // The caller checks everything that the eventfd can signal after each wait.
        self.wakeup.take();
        let is_ready = |at: usize| fds.get(at).is_some_and(|fd| !fd.revents().is_empty());
        let message = reading && self.current.is_some() && is_ready(2);
        let second_left = self.idle.waiting_frontend.is_some() && is_ready(if self.current.is_some() { 3 } else { 2 });
        ReadyEvents { accept: listening && is_ready(1), message, waiting_left: second_left }
    }

    fn accept(&mut self) {
        let accepted = self.idle.accept();
        if self.current.is_none()
            && let Accepted::Frontend = accepted
            && let Some(first) = self.idle.waiting_frontend.take()
        {
            self.begin_session(first.stream);
        }
    }

    /// Logs that a second frontend has waited for [`LOG_AFTER`]. Sooner the first may just be disconnecting.
    fn log_waiting_frontend(&mut self) {
        let (Some(second), Some(current)) = (&mut self.idle.waiting_frontend, &self.current) else { return };
        if second.log_at.take_if(|at| Instant::now() >= *at).is_some() {
            tracing::warn!(
                disk = self.idle.options.name,
                waits = peer(&second.stream),
                served = peer(&current.stream),
                "a second frontend waits until the first one leaves: one at a time is served on a socket"
            );
        }
    }

    /// Starts to serve a connection.
    fn begin_session(&mut self, stream: UnixStream) {
        let connection = match stream.try_clone() {
            Ok(clone) => Arc::new(clone),
            Err(error) => {
                tracing::warn!(disk = self.name(), "connection refused: {error}");
                return;
            }
        };
        tracing::info!(disk = self.name(), frontend = peer(&connection), "frontend connected");
        self.set_session(connection, stream, Instant::now());
    }

    /// Makes the session of `connection`, which began at `since`. Its messages come from `stream`.
    fn set_session(&mut self, connection: Arc<UnixStream>, stream: UnixStream, since: Instant) {
        let frontend = peer(&connection);
        let features = Arc::new(AtomicU64::new(0));
        let Shared { stats, disks, gate, .. } = &*self.shared;
        let session = Session::new(
            Arc::clone(&self.idle.device),
            Arc::clone(&self.idle.options),
            Arc::clone(stats),
            Arc::clone(disks),
            Arc::clone(gate),
            frontend,
            Arc::clone(&features),
        );
        let session = Arc::new(Mutex::new(session));
        let shared: SharedSession = Arc::clone(&session) as SharedSession;
        self.shared.disks.set_session(Some(Arc::clone(&shared)));
        self.shared.backend_channel.on_connect();
        *self.shared.connection.lock() =
            Some(SharedConnection { stream: Arc::clone(&connection), session: shared, frontend, since, features });
        let handler = BackendReqHandler::from_stream(stream, Arc::clone(&session));
        self.current = Some(Connection { stream: connection, session, handler, waiting: None });
    }

    /// Ends a connection that no session serves: its start panicked.
    fn forget_connection(&self) {
        *self.shared.connection.lock() = None;
        self.shared.backend_channel.on_disconnect();
        self.shared.disks.set_session(None);
    }

    /// Handles one message.
    fn handle_message(&mut self) {
        let Some(connection) = &mut self.current else { return };
        let peeked = self.shared.backend_channel.peek_message(&*connection.stream);
        if peeked.has_too_many_descriptors {
            return self.disconnect(Some(&Error::IncorrectFds));
        }
        if let Some(request) = peeked.own {
            return self.handle_own(request);
        }
        let (handler, session) = (&mut connection.handler, &connection.session);
        if peeked.request == Some(CHECK_DEVICE_STATE) {
            // Done first because `handle_request` locks the session.
            finish_transfer(session);
        }
        // Its methods lock the session.
        let held = LockRank::Session.enter();
        let handled = handler.handle_request();
        drop(held);
        self.handled(handled);
    }

    /// Handles a message that the `vhost` crate does not read.
    fn handle_own(&mut self, request: OwnRequest) {
        let Some(Connection { stream, session, .. }) = &self.current else { return };
        let handled = OwnMessage::receive(stream).and_then(|mut message| match request {
            OwnRequest::LongTable => {
                let taken = message.take();
                let set = taken.and_then(|(regions, files)| lock_session(session).set_mem_table(&regions, files, None));
                if self.shared.backend_channel.has_reply_ack() {
                    message.acknowledge(stream, set.is_ok())?;
                }
                set.map(drop)
            }
            OwnRequest::SkipDrain => {
                let state = lock_session(session).get_vring_base_skip_drain(message.queue())?;
                message.reply_state(stream, state)
            }
        });
        self.handled(handled);
    }

    /// Follows a message.
    fn handled(&mut self, handled: Result<(), Error>) {
        let Some(connection) = &self.current else { return };
        match handled {
            Ok(()) => {
                // Some messages get an error reply and the connection continues.
                let complaint = lock_session(&connection.session).take_rejection();
                if let Some(why) = complaint {
                    tracing::warn!(disk = self.name(), "frontend's message declined: {why}");
                }
                self.update_waiting();
            }
            Err(error) => self.disconnect(Some(&error)),
        }
    }

    /// Updates `waiting`: true if queues wait for requests of an earlier connection or daemon.
    fn update_waiting(&mut self) {
        if let Some(connection) = &mut self.current {
            let is_waiting = lock_session(&connection.session).is_waiting();
            connection.waiting = is_waiting.then(|| connection.waiting.unwrap_or((Instant::now(), false)));
        }
    }

    /// Starts waiting queues once the requests that they wait for have completed.
    fn start_waiting_queues(&mut self) {
        let Some(connection) = &mut self.current else { return };
        let Some((since, logged)) = &mut connection.waiting else { return };
        if !*logged && since.elapsed() >= LOG_AFTER {
            *logged = true;
            tracing::warn!(
                disk = self.idle.options.name,
                "queues wait for the storage to end requests of an earlier connection, or of a daemon before this one"
            );
        }
        let started = lock_session(&connection.session).start_waiting_queues();
        match started {
            Ok(()) => self.update_waiting(),
            Err(error) => self.disconnect(Some(&error)),
        }
    }

    /// Releases the disks once the storage has answered what suspended queues have left in flight.
    fn end_suspended(&self) {
        if let Some(connection) = &self.current {
            lock_session(&connection.session).end_suspended();
        }
    }

    /// Ends the connection, because of this error or a panic, and drains its queues. A new connection may arrive during
    /// the drain.
    fn disconnect(&mut self, error: Option<&Error>) {
        let Some(Connection { session, handler, .. }) = self.current.take() else { return };
        *self.shared.connection.lock() = None;
        self.shared.backend_channel.on_disconnect();
        self.shared.gate.set_tracked(None);
        self.shared.disks.begin_drain();
        drop(handler);
        {
            let mut session = lock_session(&session);
            let why = match (error, session.take_rejection()) {
                (_, Some(why)) => Some(why),
                (Some(error), None) => (!is_hang_up(error)).then(|| error.to_string()),
                // `recover` has logged the reason.
                (None, None) => None,
            };
            if let Some(why) = why {
                tracing::warn!(disk = self.name(), "frontend disconnected for its message: {why}");
                session.set_end_logged();
            }
            if let Some(loss) = session.memory_loss() {
                tracing::warn!(disk = self.name(), "shared memory was lost: {loss}");
            }
        }
        // A stop ends connections too: those guests stay.
        if error.is_some_and(is_hang_up) && !self.shared.gate.is_stopping() {
            self.idle.options.guests.iter().for_each(|guests| guests.left());
        }
        self.drain(session);
    }

    /// Drains a session: for [`LOCK_SLICE`] here, so that the next frontend usually need not wait, then on its own
    /// thread.
    fn drain(&mut self, session: SharedSession) {
        lock_session(&session).begin_drain();
        if lock_session(&session).wait_drained(Some(Instant::now() + LOCK_SLICE)) {
            return self.shared.disks.end_drain();
        }
        self.drains.retain(|drain| !drain.is_finished());
        self.shared.draining.lock().push(Arc::clone(&session));
        let (shared, inner, name) = (Arc::clone(&self.shared), Arc::clone(&session), self.name().to_owned());
        let wakeup = self.wakeup.clone();
        let work = move || {
            if catch_unwind(AssertUnwindSafe(|| drain_session(&shared, &inner))).is_err() {
                // Its queues may still be attached, so those of the next frontend must not start.
                tracing::error!(
                    disk = name,
                    "a drain panicked, which is a bug: the disk is not served until a restart"
                );
            }
            wakeup.signal();
        };
        match spawn(format!("drain-{}", self.name()), work) {
            Ok(thread) => self.drains.push(thread),
            Err(error) => {
                tracing::warn!(disk = self.name(), "no thread for a drain, so the next frontend waits: {error}");
                drain_session(&self.shared, &session);
            }
        }
    }

    /// Ends the thread. [`Server::stop`](crate::Server::stop) has drained the session.
    fn finish(mut self) {
        if let Some(Connection { session, .. }) = self.current.take() {
            *self.shared.connection.lock() = None;
            self.shared.backend_channel.on_disconnect();
            self.shared.disks.set_session(None);
            drop(session);
        }
        for drain in self.drains {
            // It has logged a panic itself.
            let _ = drain.join();
        }
    }
}

/// Waits until a draining session has no request in flight, or the server stops.
fn drain_session(shared: &Shared, session: &SharedSession) {
    // Releases the lock between the waits: `Server::stop` needs it too.
    while !lock_session(session).wait_drained(Some(Instant::now() + LOCK_SLICE)) && shared.stop_deadline().is_none() {}
    shared.draining.lock().retain(|other| !Arc::ptr_eq(other, session));
    shared.disks.end_drain();
}

/// Returns the process id of the other end; 0 if unknown.
fn peer(stream: &UnixStream) -> i32 {
    rustix::net::sockopt::socket_peercred(stream).map_or(0, |peer| peer.pid.as_raw_nonzero().get())
}

/// Returns true if the other side has closed the connection.
fn is_hang_up(error: &Error) -> bool {
    match error {
        Error::Disconnected => true,
        Error::SocketBroken(source) | Error::SocketError(source) => {
            matches!(source.kind(), std::io::ErrorKind::ConnectionReset | std::io::ErrorKind::BrokenPipe)
        }
        _ => false,
    }
}
