//! What a session has to do with the state that travels with a guest: see `device_state`.

use std::fs::File;
use std::sync::Arc;

use mqblk_engine::Lane;
use mqblk_virtio::VirtioDevice;
use vhost::vhost_user::message::VhostTransferStateDirection as Direction;

use super::Session;
use crate::device_state::DeviceStates;
use crate::server::ServerOptions;

impl<D: VirtioDevice<Lane>> Session<D> {
    pub(crate) fn device(&self) -> &Arc<D> {
        &self.device
    }

    pub(crate) fn options(&self) -> &Arc<ServerOptions> {
        &self.options
    }

    /// Whether the server stops.
    pub(crate) fn is_stopping(&self) -> bool {
        self.gate.is_stopping()
    }

    /// Begins a transfer of the device's state.
    ///
    /// # Errors
    /// When a queue runs, or the descriptor is not fit for it.
    pub(super) fn begin_transfer(&mut self, direction: Direction, file: File) -> Result<(), String> {
        if !self.states.agreed {
            return Err("its feature was not agreed".to_owned());
        }
        self.check_stopped()?;
        self.states.begin(direction, file, (&*self.device, &*self.options))
    }

    pub(crate) fn states(&mut self) -> &mut DeviceStates {
        &mut self.states
    }

    /// Whether no queue runs, nor is about to.
    ///
    /// # Errors
    /// Which one does.
    pub(crate) fn check_stopped(&self) -> Result<(), String> {
        match self.vrings.iter().find(|vring| !vring.is_stopped() || vring.is_startable()) {
            Some(vring) => Err(format!("found queue {} started, expected all queues stopped", vring.index)),
            None => Ok(()),
        }
    }

    /// A state was loaded: the driver goes on where it was served before.
    pub(crate) fn goes_on(&mut self) {
        self.states.loaded = true;
        self.sharing = None;
        self.note_configured();
    }
}
