//! A device that is handed over to another process.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel, sync_channel};
use std::time::{Duration, Instant};

use mqblk_core::thread::spawn_with;
use mqblk_engine::AnyDisk;

use crate::control::{DeviceControl, HoldStart};
use crate::disks::{SharedSession, lock_session};
use crate::hand_over::{HandedConnection, HoldEnd, HoldRequest};
use crate::server::Server;
use crate::shared::Shared;

/// Interval at which a wait for requests in flight checks for the server's stop, and releases the session.
const DRAIN_CHECK: Duration = Duration::from_millis(50);

/// A device whose control thread waits while its queues still run, or one without a frontend, kept from frontends. When
/// dropped it is served further, after the end of a begun drain, which a thread waits for.
pub struct HeldDevice {
    end: EndHold,
    shared: Arc<Shared>,
    drain_timeout: Duration,
    session: Option<SharedSession>,
    connection: Option<HandedConnection>,
    /// Time at which a begun drain is given up.
    drain_end: Option<Instant>,
    has_ended: bool,
}

/// Target of the end of a hold.
#[derive(Clone)]
enum EndHold {
    Thread(Sender<HoldEnd>),
    /// The device has no control thread.
    Idle(Arc<dyn DeviceControl>),
}

impl EndHold {
    fn tell(&self, end: HoldEnd) {
        match self {
            // It may have ended with the server.
            EndHold::Thread(thread) => _ = thread.send(end),
            EndHold::Idle(control) => control.end_hold(end == HoldEnd::Release),
        }
    }
}

/// A begun hold.
#[must_use = "the device is held until the hold is waited for"]
pub struct BegunHold<'a> {
    server: &'a Server,
    state: BegunState,
}

enum BegunState {
    /// The device has no control thread, and is held.
    Held(HeldDevice),
    /// The control thread has received the request.
    Asked(Receiver<Result<HandedConnection, String>>, Sender<HoldEnd>),
    Refused(String),
}

impl BegunHold<'_> {
    /// Waits until the device is held, until `end` at most.
    ///
    /// # Errors
    /// When the device cannot be handed over now; the reason. It is then served further.
    pub fn wait(self, end: Instant) -> Result<HeldDevice, String> {
        let (replied, end_hold) = match self.state {
            BegunState::Held(held) => return Ok(held),
            BegunState::Refused(why) => return Err(why),
            BegunState::Asked(replied, end_hold) => (replied, end_hold),
        };
        let shared = &self.server.shared;
        let connection = match replied.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(held) => held?,
            Err(RecvTimeoutError::Disconnected) => return Err("it stops".to_owned()),
            Err(RecvTimeoutError::Timeout) => {
                shared.hold.lock().take();
                return Err(
                    "its control thread is busy: a VMM's message is not complete, or waits for storage".to_owned()
                );
            }
        };
        let session = shared.connection.lock().as_ref().map(|connection| Arc::clone(&connection.session));
        Ok(self.server.held(EndHold::Thread(end_hold), connection, session))
    }
}

impl Server {
    /// Begins to hold the device for another process: no message of its frontend is read from now on. Its queues
    /// continue.
    pub fn begin_hold(&self) -> BegunHold<'_> {
        let ((reply, replied), (end, ended)) = (sync_channel(1), channel());
        *self.shared.hold.lock() = Some(HoldRequest { reply, end: ended });
        let state = match self.control.hold() {
            Ok(HoldStart::Asked) => BegunState::Asked(replied, end),
            Ok(HoldStart::Kept) => {
                self.shared.hold.lock().take();
                let (end, connection) = (EndHold::Idle(Arc::clone(&self.control)), HandedConnection::default());
                BegunState::Held(self.held(end, connection, None))
            }
            Err(why) => {
                self.shared.hold.lock().take();
                BegunState::Refused(why)
            }
        };
        BegunHold { server: self, state }
    }

    /// Returns the disks of the device.
    pub fn disks(&self) -> Vec<Arc<AnyDisk>> {
        self.shared.disks.list().into_iter().map(|disk| disk.disk).collect()
    }

    /// Ends the connection of the frontend, which must connect again.
    pub fn end_connection(&self) {
        let connection = self.shared.connection.lock().clone();
        if let Some(connection) = connection {
            // It may have been closed already.
            let _ = connection.stream.shutdown(std::net::Shutdown::Both);
        }
    }

    fn held(&self, end: EndHold, connection: HandedConnection, session: Option<SharedSession>) -> HeldDevice {
        let (shared, drain_timeout) = (Arc::clone(&self.shared), self.drain_timeout);
        let connection = Some(connection);
        HeldDevice { end, shared, drain_timeout, session, connection, drain_end: None, has_ended: false }
    }
}

impl HeldDevice {
    /// Takes the other process's data to prepare; `None` if already taken.
    pub fn take_connection(&mut self) -> Option<HandedConnection> {
        self.connection.take()
    }

    /// Returns true if a frontend is connected.
    pub fn is_connected(&self) -> bool {
        self.session.is_some()
    }

    /// Starts to drain the queues: no more requests are taken off them here.
    pub fn begin_drain(&mut self) {
        if let Some(session) = &self.session {
            self.drain_end = Some(Instant::now() + self.drain_timeout);
            lock_session(session).begin_end();
        }
    }

    /// Waits for the requests in flight, until `end` at most. Returns true if none is left.
    pub fn wait_drained(&self, end: Instant) -> bool {
        self.session.as_ref().is_none_or(|session| lock_session(session).wait_drained(Some(end)))
    }

    /// Leaves the requests that are still in flight to the other process.
    ///
    /// # Errors
    /// When there are some, and the VMM keeps no in-flight region for them.
    pub fn freeze(&self) -> Result<(), String> {
        match &self.session {
            Some(session) => lock_session(session).freeze_recorded(),
            None => Ok(()),
        }
    }

    /// Returns the positions of the drained queues, for the other process. `None` without a connection.
    ///
    /// # Errors
    /// When the device's state cannot be saved.
    pub fn positions(&self) -> Result<Option<String>, String> {
        self.session.as_ref().map(|session| lock_session(session).save_drained()).transpose()
    }

    /// Releases the device: another process serves it. The files of its socket and its storage are left to that
    /// process.
    pub fn release(self) {
        self.end(HoldEnd::Release);
    }

    /// Continues to serve the device, and ends the frontend's connection: another process has served its queues, and
    /// has ended.
    pub fn disconnect(self) {
        self.end(HoldEnd::Disconnect);
    }

    fn end(mut self, end: HoldEnd) {
        self.has_ended = true;
        self.end.tell(end);
    }
}

impl Drop for HeldDevice {
    fn drop(&mut self) {
        if self.has_ended {
            return;
        }
        let (Some(drain_end), Some(session)) = (self.drain_end, self.session.take()) else {
            return self.end.tell(HoldEnd::Resume);
        };
        let resume = ResumedDevice { end: self.end.clone(), shared: Arc::clone(&self.shared), session, drain_end };
        // A queue must not start here beside its own earlier requests. The dropping thread serves other devices.
        if let Err((error, resume)) = spawn_with("hold-end", resume, ResumedDevice::run) {
            tracing::warn!("a device is waited for, and others with it: {error}");
            resume.into_iter().for_each(ResumedDevice::run);
        }
    }
}

/// A device with a begun drain that no other process takes.
struct ResumedDevice {
    end: EndHold,
    shared: Arc<Shared>,
    session: SharedSession,
    drain_end: Instant,
}

impl ResumedDevice {
    /// Waits for its requests in flight, then serves it further. A drain that takes too long continues behind a
    /// frontend that connects again.
    fn run(self) {
        loop {
            let next = self.drain_end.min(Instant::now() + DRAIN_CHECK);
            let is_drained = lock_session(&self.session).wait_drained(Some(next));
            if self.shared.stopped.load(Ordering::SeqCst) {
                return;
            }
            if is_drained {
                let is_served_on = lock_session(&self.session).resume();
                return self.end.tell(if is_served_on { HoldEnd::Resume } else { HoldEnd::Disconnect });
            }
            if next == self.drain_end {
                return self.end.tell(HoldEnd::Disconnect);
            }
        }
    }
}
