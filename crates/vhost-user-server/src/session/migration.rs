//! The session's part in the transfer of the device state: see `device_state`.

use std::fs::File;
use std::sync::{Arc, Mutex};

use mqblk_engine::UringContext;
use mqblk_virtio::VirtioDevice;
use vhost::vhost_user::message::{VhostTransferStateDirection as Direction, VhostUserProtocolFeatures};

use super::Session;
use crate::device_state::StateDocument;
use crate::disks::lock_session;
use crate::options::ServerOptions;

impl<D: VirtioDevice<UringContext>> Session<D> {
    /// Starts a transfer of the device's state.
    ///
    /// # Errors
    /// When a queue runs, DEVICE_STATE was not negotiated, or the descriptor is unsuitable.
    pub(super) fn begin_transfer(&mut self, direction: Direction, file: File) -> Result<(), String> {
        if self.protocol_features & VhostUserProtocolFeatures::DEVICE_STATE.bits() == 0 {
            return Err("its feature was not agreed".to_owned());
        }
        self.check_stopped()?;
        self.state_transfer.begin(direction, file, (&*self.device, &*self.options))
    }

    /// Checks that no queue runs or is about to start.
    ///
    /// # Errors
    /// The queue that does.
    fn check_stopped(&self) -> Result<(), String> {
        match self.vrings.iter().find(|vring| !vring.is_stopped() || vring.is_startable()) {
            Some(vring) => Err(format!("found queue {} started, expected all queues stopped", vring.index)),
            None => Ok(()),
        }
    }

    /// Marks the device's state as loaded: the driver continues from the source.
    pub(super) fn mark_resumed(&mut self) {
        self.state_transfer.loaded = true;
        self.sharing = None;
        self.record_driver_config();
    }
}

/// Completes the transfer before CHECK_DEVICE_STATE is handled, and applies a loaded state. Waits for the transfer at
/// most the drain timeout.
pub(crate) fn finish_transfer<D: VirtioDevice<UringContext>>(session: &Mutex<Session<D>>) {
    let (transfer, device, options) = {
        let mut session = lock_session(session);
        let transfer = session.state_transfer.take_transfer();
        (transfer, Arc::clone(&session.device), Arc::clone(&session.options))
    };
    let result = match transfer {
        None => Err("found no transfer, expected SET_DEVICE_STATE_FD before".to_owned()),
        Some(transfer) => {
            let read = transfer.end(options.drain_timeout, || lock_session(session).gate.is_stopping());
            read.and_then(|read| read.map_or(Ok(()), |read| load_state(session, &device, &options, read)))
        }
    };
    lock_session(session).state_transfer.set_result(result);
}

fn load_state<D: VirtioDevice<UringContext>>(
    session: &Mutex<Session<D>>,
    device: &Arc<D>,
    options: &ServerOptions,
    read: Vec<u8>,
) -> Result<(), String> {
    lock_session(session).check_stopped()?;
    let len = read.len();
    let text =
        String::from_utf8(read).map_err(|error| format!("found bytes that are no text, expected JSON: {error}"))?;
    let StateDocument { state, host, .. } = StateDocument::read(&text, device.device_type())?;
    let change = match (&options.host_state, host) {
        (None, None) => None,
        (Some(loader), Some(host)) => Some(loader.load(host.get()).map_err(|why| format!("host.{why}"))?),
        (None, Some(_)) => return Err("host: found it, expected none for this device".to_owned()),
        (Some(_), None) => return Err("missing field `host`".to_owned()),
    };
    let apply = device.load_state(state.get()).map_err(|why| format!("state.{why}"))?;
    if let Some(change) = change {
        change.commit().map_err(|why| format!("host.{why}"))?;
    }
    apply()?;
    lock_session(session).mark_resumed();
    tracing::info!(disk = options.name, bytes = len, "the device's state has arrived");
    Ok(())
}
