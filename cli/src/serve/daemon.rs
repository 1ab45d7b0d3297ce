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
pub struct Daemon {
    sockets: Vec<ListenSocket>,
    disks: Vec<Arc<AnyDisk>>,
}

impl Daemon {
    /// Starts to serve. When it fails, nothing is left behind.
    ///
    /// # Errors
    /// When the host refuses a resource.
    pub fn start(config: ServeConfig<Arc<AnyDisk>>) -> Result<Daemon, StartError> {
        let mut sockets = Vec::new();
        let mut disks = Vec::new();
        for disk in config.disks {
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
            disks.push(disk.disk);
        }
        Ok(Daemon { sockets, disks })
    }

    /// Drains what is in flight, flushes, closes the disks and removes the sockets.
    pub fn stop(self) {
        drop(self.sockets);
        drop(self.disks);
    }
}
