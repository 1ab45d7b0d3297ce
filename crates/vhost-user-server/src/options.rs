//! Options of a served device, and its interfaces to the host.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use mqblk_core::GuestObserver;
use mqblk_engine::{Engine, FixedBufferUse, QueueDisk, QueuePolicy};

use crate::listen::SocketAccess;
use crate::memory::SharePolicy;

/// Options of a served device.
pub struct ServerOptions {
    /// Name of the disk or controller, for log messages.
    pub name: String,
    /// Path of the socket.
    pub socket: PathBuf,
    /// Permissions of the socket.
    pub socket_access: SocketAccess,
    /// Initial worker of each queue; further queues are assigned round-robin.
    pub queue_map: Vec<usize>,
    /// Initial polling of the request queues, and coalescing of their calls.
    pub policy: QueuePolicy,
    /// Rules for files that a frontend shares.
    pub sharing: SharePolicy,
    /// Registration of guest memory with the workers' io_urings.
    pub fixed_buffers: FixedBufferUse,
    /// Longest wait of a stop for storage. Requests still in flight then never complete; the next backend replays them
    /// if the frontend keeps an in-flight region.
    pub drain_timeout: Duration,
    /// The initial disks.
    pub disks: Vec<QueueDisk>,
    /// Runs the workers.
    pub engine: Arc<Engine>,
    /// The host's part of the migration state, beside the device's own.
    pub host_state: Option<Arc<dyn HostState>>,
    /// True if nothing is accepted before [`Server::serve`](crate::Server::serve): another process still serves the
    /// device.
    pub standby: bool,
    /// Notified of the device's guests.
    pub guests: Option<Arc<dyn GuestObserver>>,
}

/// The host's part of a device's migration state, unknown to the device itself (a controller's LUNs). Methods run on
/// the device's control thread while none of its queues runs.
pub trait HostState: Send + Sync {
    /// Returns the state as JSON.
    ///
    /// # Errors
    /// When it cannot be saved now.
    fn save(&self) -> Result<String, String>;

    /// Validates a state that [`save`](Self::save) returned on the source, and applies the part that the device's own
    /// state depends on.
    ///
    /// # Errors
    /// When the state is invalid or does not fit this host; then nothing has changed.
    fn load(&self, state: &str) -> Result<Box<dyn PendingHostState + '_>, String>;
}

/// A host state that is being loaded. Dropping it undoes the changes.
pub trait PendingHostState {
    /// Completes the changes and keeps them: the device's own state is valid too.
    ///
    /// # Errors
    /// When a change fails.
    fn commit(self: Box<Self>) -> Result<(), String>;
}
