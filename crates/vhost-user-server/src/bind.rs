//! Binds the socket of a path: the one that was prepared for it, or a new one.

use std::path::Path;

use crate::listen::{ListenSocket, SocketAccess, SocketError, SocketPathState, folder_of, lock_folder, probe_file};
use crate::prepared;

/// Checks that a socket can be created at `path` and changes nothing. A live server sees one connection that closes at
/// once.
///
/// # Errors
/// When no socket can be created there.
pub fn probe_socket(path: &Path) -> Result<SocketPathState, SocketError> {
    if prepared::has(path) { Ok(SocketPathState::Free) } else { probe_file(path) }
}

impl ListenSocket {
    /// Listens at `path` and replaces a stale socket; or takes the socket that was [prepared](mod@crate::prepared) for
    /// the path. Nobody can connect before the file has its permissions.
    ///
    /// # Errors
    /// When another process listens there, another kind of file exists, or a system call fails.
    pub fn bind(path: &Path, access: &SocketAccess) -> Result<ListenSocket, SocketError> {
        let socket = match prepared::take(path)? {
            Some(prepared) => prepared,
            None => {
                let (_folder, socket) = ListenSocket::make(path, access)?;
                socket.listen()?;
                return Ok(socket);
            }
        };
        if socket.owns_file() {
            let _folder = lock_folder(folder_of(path));
            socket.listen()?;
        }
        Ok(socket)
    }
}
