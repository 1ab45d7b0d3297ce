//! The running daemon.

use std::sync::Arc;

use mqblk_engine::AnyDisk;

use super::config::ServeConfig;
use super::socket::{ListenSocket, SocketError};

/// Why the daemon could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A socket could not be made.
    #[error("disk {id:?}: socket: {source}")]
    Socket {
        /// Which disk.
        id: String,
        /// Why.
        source: SocketError,
    },
}

/// All disks being served, until [`Daemon::stop`].
#[derive(Debug)]
pub struct Daemon {
    sockets: Vec<ListenSocket>,
}

impl Daemon {
    /// Starts to serve. When it fails, nothing is left behind.
    ///
    /// # Errors
    /// When the host refuses a resource.
    pub fn start(config: ServeConfig<Arc<AnyDisk>>) -> Result<Daemon, StartError> {
        let mut sockets = Vec::new();
        for disk in &config.disks {
            let socket = ListenSocket::bind(&disk.socket, disk.socket_mode)
                .map_err(|source| StartError::Socket { id: disk.id.clone(), source })?;
            let geometry = disk.disk.geometry();
            tracing::info!(
                disk = %disk.id,
                socket = %disk.socket.display(),
                size = %geometry.size,
                block_size = geometry.logical_block.bytes(),
                read_only = geometry.read_only,
                queues = disk.queues,
                poll = %disk.poll,
                "serving"
            );
            sockets.push(socket);
        }
        Ok(Daemon { sockets })
    }

    /// Drains what is in flight, flushes, closes the disks and removes the sockets.
    pub fn stop(self) {
        drop(self.sockets);
    }
}
