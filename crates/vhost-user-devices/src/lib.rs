//! The virtio devices that vhost-user serves. The server and the engine are generic over the device. The code of the
//! request path is compiled in this crate, once for each device, so it can be optimised without its callers
//! (`profile.checked` in the workspace's `Cargo.toml`).

#![forbid(unsafe_code)]

use std::sync::Arc;

use mqblk_vhost_user_server::{Server, ServerOptions, SocketError};
use mqblk_virtio_blk::VirtioBlk;
use mqblk_virtio_scsi::VirtioScsi;

/// Serves a virtio-blk device: [`Server::start`].
///
/// # Errors
/// As [`Server::start`].
pub fn serve_blk(device: Arc<VirtioBlk>, options: ServerOptions) -> Result<Server, SocketError> {
    Server::start(device, options)
}

/// Serves a virtio-scsi controller: [`Server::start`].
///
/// # Errors
/// As [`Server::start`].
pub fn serve_scsi(device: Arc<VirtioScsi>, options: ServerOptions) -> Result<Server, SocketError> {
    Server::start(device, options)
}
