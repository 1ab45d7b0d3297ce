//! The listening sockets of the process.

use std::os::fd::OwnedFd;
use std::path::PathBuf;

/// The listening sockets of the process, besides those of devices.
#[derive(Default)]
pub(crate) struct ProcessListeners {
    /// The admin socket, and whether its file is the process' own.
    pub(crate) admin: Option<(PathBuf, OwnedFd, bool)>,
    /// That for metrics, by its address.
    pub(crate) metrics: Option<(String, OwnedFd, bool)>,
}
