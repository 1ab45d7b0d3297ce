//! The session's part in the transfer of the device state: see `device_state`.

use std::fs::File;
use std::sync::Arc;

use mqblk_engine::UringContext;
use mqblk_virtio::VirtioDevice;
use vhost::vhost_user::message::VhostTransferStateDirection as Direction;

use super::Session;
use crate::device_state::StateTransfer;
use crate::server::ServerOptions;

impl<D: VirtioDevice<UringContext>> Session<D> {
    /// Returns the device.
    pub(crate) fn device(&self) -> &Arc<D> {
        &self.device
    }

    /// Returns the server's options.
    pub(crate) fn options(&self) -> &Arc<ServerOptions> {
        &self.options
    }

    /// Returns true if the server is stopping.
    pub(crate) fn is_stopping(&self) -> bool {
        self.gate.is_stopping()
    }

    /// Starts a transfer of the device's state.
    ///
    /// # Errors
    /// When a queue runs, DEVICE_STATE was not negotiated, or the descriptor is unsuitable.
    pub(super) fn begin_transfer(&mut self, direction: Direction, file: File) -> Result<(), String> {
        if !self.state_transfer.negotiated {
            return Err("its feature was not agreed".to_owned());
        }
        self.check_stopped()?;
        self.state_transfer.begin(direction, file, (&*self.device, &*self.options))
    }

    pub(crate) fn state_transfer(&mut self) -> &mut StateTransfer {
        &mut self.state_transfer
    }

    /// Checks that no queue runs or is about to start.
    ///
    /// # Errors
    /// Names the queue that does.
    pub(crate) fn check_stopped(&self) -> Result<(), String> {
        match self.vrings.iter().find(|vring| !vring.is_stopped() || vring.is_startable()) {
            Some(vring) => Err(format!("found queue {} started, expected all queues stopped", vring.index)),
            None => Ok(()),
        }
    }

    /// Marks the device's state as loaded: the driver continues from the source.
    pub(crate) fn mark_resumed(&mut self) {
        self.state_transfer.loaded = true;
        self.sharing = None;
        self.record_driver_config();
    }
}
