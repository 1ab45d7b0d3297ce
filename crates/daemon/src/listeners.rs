//! The listening sockets of the process.

use std::os::fd::OwnedFd;
use std::path::PathBuf;

/// The listening sockets of the process, besides those of devices.
#[derive(Default)]
pub(crate) struct ProcessListeners {
    /// The admin socket; true if its file belongs to the process.
    pub(crate) admin: Option<(PathBuf, OwnedFd, bool)>,
    /// The socket for metrics, by its address; true if its file belongs to the process.
    pub(crate) metrics: Option<(String, OwnedFd, bool)>,
}
