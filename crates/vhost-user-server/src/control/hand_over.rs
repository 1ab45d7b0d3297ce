//! The control thread's part in the hand-over of its device: see `hand_over`.

use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use mqblk_engine::{UringContext, redirect};
use mqblk_virtio::VirtioDevice;

use super::idle::{LOG_AFTER, WaitingFrontend};
use super::{ControlThread, peer};
use crate::backend_channel::{
    GET_FEATURES, GET_PROTOCOL_FEATURES, SET_FEATURES, SET_PROTOCOL_FEATURES, message_of_frontend,
};
use crate::disks::lock_session;
use crate::hand_over::state::{ConnectionState, ReceivedDescriptors};
use crate::hand_over::{
    AdoptError, HandedConnection, HoldEnd, HoldRequest, POSITIONS_ALONE, StandbyMessage, StandbyMessages,
};
use crate::session::KickEvents;

/// Interval at which a thread that waits for the other process checks for the server's stop.
const STOP_CHECK: Duration = Duration::from_millis(20);

/// A connection whose queues start with the next message.
struct PreparedConnection {
    state: ConnectionState,
    kicks: KickEvents,
}

impl<D: VirtioDevice<UringContext>> ControlThread<D> {
    /// Waits while another process takes the device, until it is decided which of both serves it.
    pub(super) fn hold(&mut self, request: HoldRequest) {
        let held = self.held_connection();
        let is_held = held.is_ok();
        // The other side may have given up waiting; then `end` is disconnected.
        let is_awaited = request.reply.send(held).is_ok();
        while is_held && is_awaited && !self.is_stopped() {
            match request.end.recv_timeout(STOP_CHECK) {
                Ok(HoldEnd::Release) => return self.release(),
                Ok(HoldEnd::Disconnect) => return self.disconnect(None),
                Ok(HoldEnd::Resume) | Err(RecvTimeoutError::Disconnected) => return self.update_waiting(),
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    fn held_connection(&self) -> Result<HandedConnection, String> {
        if self.shared.disks.is_draining() {
            return Err(
                "requests of an earlier connection are in flight: try again when storage has answered".to_owned()
            );
        }
        let waiting = self.idle.waiting_frontend.as_ref().map(|second| second.stream.try_clone()).transpose();
        let waiting = waiting.map_err(|error| error.to_string())?.map(Into::into);
        let Some(current) = &self.current else { return Ok(HandedConnection { waiting, ..Default::default() }) };
        let saved = lock_session(&current.session).save_connection(&current.stream, &self.shared.backend_channel);
        let (state, descriptors) = saved?;
        Ok(HandedConnection { state: Some(state), descriptors, waiting })
    }

    /// Releases the device: another process has the connections and the socket's file.
    fn release(&mut self) {
        self.is_released = true;
        self.idle.socket.file().leave();
        if let Some(current) = &self.current {
            lock_session(&current.session).set_end_logged();
        }
    }

    /// Handles messages of the hand-over, until this process must serve or the server stops.
    pub(super) fn stand_by(&mut self, messages: &StandbyMessages) {
        let mut prepared = None;
        while !self.is_stopped() {
            match messages.recv_timeout(STOP_CHECK) {
                Ok(StandbyMessage::Adopt(connection, reply)) => {
                    let adopted = self.adopt(connection).map(|connection| prepared = connection);
                    if adopted.is_err() {
                        self.disconnect(None);
                    }
                    let _ = reply.send(adopted);
                }
                Ok(StandbyMessage::Serve(positions, reply)) => {
                    self.shared.stands_by.store(false, Ordering::SeqCst);
                    let started = self.start_adopted(prepared.take(), positions);
                    let _ = reply.send(started);
                    return;
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn adopt(&mut self, connection: HandedConnection) -> Result<Option<PreparedConnection>, AdoptError> {
        let HandedConnection { state, descriptors, waiting } = connection;
        if let Some(waiting) = waiting {
            let log_at = Some(Instant::now() + LOG_AFTER);
            self.idle.waiting_frontend = Some(WaitingFrontend { stream: UnixStream::from(waiting), log_at });
        }
        let Some(state) = state else { return Ok(None) };
        let state = serde_json::from_str(&state).map_err(|error| format!("connection: {error}"));
        let state: ConnectionState = state.map_err(AdoptError::Configuration)?;
        let expected = self.idle.device.device_type();
        if state.device != expected {
            let why = format!("device: found {:?}, expected {expected:?}", state.device);
            return Err(AdoptError::Configuration(why));
        }
        let mut descriptors = ReceivedDescriptors::new(descriptors);
        self.adopt_session(&state, &mut descriptors)?;
        let channel = state.backend_channel.map(|index| descriptors.take(index)).transpose();
        let channel = channel.map_err(AdoptError::Frontend)?;
        self.shared.backend_channel.restore(state.protocol_features, channel, state.config_stale);
        let Some(current) = &self.current else { return Ok(None) };
        lock_session(&current.session).check_connection(&state).map_err(AdoptError::Configuration)?;
        let kicks = lock_session(&current.session).load_connection(&state, &mut descriptors);
        let kicks = kicks.map_err(AdoptError::Frontend)?;
        Ok(Some(PreparedConnection { state, kicks }))
    }

    /// Makes the session, with a handler that knows the features. The library's handler learns features only by
    /// messages, so it receives these over another socket first.
    fn adopt_session(
        &mut self,
        state: &ConnectionState,
        descriptors: &mut ReceivedDescriptors,
    ) -> Result<(), AdoptError> {
        let failed = |what: &str, error: &dyn std::fmt::Display| AdoptError::Frontend(format!("{what}: {error}"));
        let stream = descriptors.take(state.socket).map_err(AdoptError::Frontend)?;
        let stream = Arc::new(UnixStream::from(stream));
        let (ours, mut frontends) = UnixStream::pair().map_err(|error| failed("socket", &error))?;
        let since = Instant::now().checked_sub(Duration::from_millis(state.connected_ms)).unwrap_or_else(Instant::now);
        self.set_session(Arc::clone(&stream), ours, since);
        let Some(current) = &mut self.current else { return Ok(()) };
        let set = |request, value: u64| (value != 0).then(|| message_of_frontend(request, Some(value)));
        let messages = [
            Some(message_of_frontend(GET_FEATURES, None)),
            set(SET_FEATURES, state.features),
            Some(message_of_frontend(GET_PROTOCOL_FEATURES, None)),
            set(SET_PROTOCOL_FEATURES, state.protocol_features),
        ];
        for message in messages.into_iter().flatten() {
            frontends.write_all(&message).map_err(|error| failed("socket", &error))?;
            let handled = current.handler.handle_request();
            handled.map_err(|error| {
                let why = lock_session(&current.session).take_rejection();
                AdoptError::Configuration(why.unwrap_or_else(|| error.to_string()))
            })?;
        }
        redirect(&mut current.handler, stream.as_fd()).map_err(|error| failed("socket", &error))
    }

    fn start_adopted(&mut self, prepared: Option<PreparedConnection>, positions: Option<String>) -> Result<(), String> {
        let Some(current) = &self.current else {
            return positions.map_or(Ok(()), |_| Err(POSITIONS_ALONE.to_owned()));
        };
        let started = match (prepared, positions) {
            (Some(PreparedConnection { state, kicks }), Some(positions)) => {
                lock_session(&current.session).load_positions(&state, kicks, &positions)
            }
            _ => Err("positions: found none, expected those of the connection".to_owned()),
        };
        let frontend = peer(&current.stream);
        match &started {
            Ok(()) => {
                tracing::info!(disk = self.name(), frontend, "frontend taken over");
                self.update_waiting();
            }
            Err(why) => {
                tracing::error!(disk = self.name(), frontend, "the frontend has to connect again: {why}");
                self.disconnect(None);
            }
        }
        started
    }
}
