//! The running daemon.

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
    pub fn start<D>(config: ServeConfig<D>) -> Result<Daemon, StartError> {
        let mut sockets = Vec::new();
        for disk in &config.disks {
            let socket = ListenSocket::bind(&disk.socket, disk.socket_mode)
                .map_err(|source| StartError::Socket { id: disk.id.clone(), source })?;
            tracing::info!(disk = %disk.id, socket = %disk.socket.display(), queues = disk.queues, "listening");
            sockets.push(socket);
        }
        Ok(Daemon { sockets })
    }

    /// Drains what is in flight, flushes, closes the disks and removes the sockets.
    pub fn stop(self) {
        drop(self.sockets);
    }
}
