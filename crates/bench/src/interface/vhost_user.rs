//! The common part of the interfaces of vhost-user servers: a socket.

use std::path::{Path, PathBuf};

use mqblk_driver::DriverError;
use mqblk_vhost_user_client::HangupMonitor;

use crate::connector::PreparedServer;
use crate::device::ServerMonitor;
use crate::plan::TargetSource;

/// The option that names a running server.
pub(super) const RUNNING: &str = "--socket PATH";
/// Keys of a disk's address.
pub(super) const ADDRESS_KEYS: &[&str] = &["socket", "queues", "num_queues", "interface"];

/// Returns the socket of a running server.
pub(super) fn socket(source: &TargetSource) -> PathBuf {
    match source {
        TargetSource::Socket(path) => path.clone(),
        _ => unreachable!("a plan has targets of its own interface"),
    }
}

/// Prepares a server at a socket in `folder`. `arguments` makes its arguments from the socket.
pub(super) fn prepare_server(folder: &Path, arguments: impl FnOnce(&Path) -> Vec<String>) -> PreparedServer<PathBuf> {
    let socket = folder.join("disk.sock");
    let arguments = arguments(&socket);
    PreparedServer { endpoint: socket, arguments, environment: vec![], is_simulated: false, resources: Box::new(()) }
}

/// Returns a socket's path for the key-value form, in which a comma of a value is written twice.
pub(super) fn socket_value(socket: &Path) -> String {
    socket.display().to_string().replace(',', ",,")
}

/// Returns the monitor of a server at a socket.
pub(super) fn server_monitor(opened: std::io::Result<HangupMonitor>) -> Result<ServerMonitor, DriverError> {
    let monitor = opened.map_err(|source| DriverError::System { what: "lifeline of the server", source })?;
    Ok(Box::new(move |limit| monitor.wait_hangup(limit)))
}
