//! The listening socket: created with its final mode, replacing a stale one but never a live one.

use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::Mode;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Why a socket cannot be listened on.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Somebody answers on it.
    #[error("socket: {0}: found a live socket (another process listens on it), expected a path that is free")]
    Live(PathBuf),
    /// Something else is in the way.
    #[error("socket: {0}: found a file that is no socket, expected a path that is free")]
    NotASocket(PathBuf),
    /// The system said no.
    #[error("socket: {path}: {source}")]
    Os {
        /// The socket's path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Looks whether `path` could be listened on, changing nothing.
///
/// # Errors
/// When it is in use, or its folder does not exist.
pub(crate) fn check(path: &Path) -> Result<(), SocketError> {
    let refused = |source| SocketError::Os { path: path.to_owned(), source };
    match fs::symlink_metadata(path) {
        Ok(meta) if meta.file_type().is_socket() => match UnixStream::connect(path) {
            Ok(_) => Err(SocketError::Live(path.to_owned())),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(()),
            Err(error) => Err(refused(error)),
        },
        Ok(_) => Err(SocketError::NotASocket(path.to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
            SocketAddrUnix::new(path).map_err(|error| refused(error.into()))?;
            fs::metadata(folder).map(|_| ()).map_err(|source| SocketError::Os { path: folder.to_owned(), source })
        }
        Err(error) => Err(refused(error)),
    }
}

/// Listens on `path` with permission bits `mode`.
///
/// # Errors
/// As [`check`], or when the system refuses.
pub(crate) fn listen(path: &Path, mode: u32) -> Result<UnixListener, SocketError> {
    check(path)?;
    let bind = || -> io::Result<UnixListener> {
        if path.exists() {
            fs::remove_file(path)?;
        }
        let flags = SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        // On Linux the file takes the socket's own mode (less the umask) when it is bound: it is never more open than asked.
        rustix::fs::fchmod(&socket, Mode::from_raw_mode(mode))?;
        rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
        rustix::fs::chmod(path, Mode::from_raw_mode(mode))?;
        rustix::net::listen(&socket, 16)?;
        Ok(UnixListener::from(socket))
    };
    bind().map_err(|source| SocketError::Os { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn stale_is_replaced_live_is_not_and_files_are_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let first = listen(&path, 0o600).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(matches!(listen(&path, 0o600), Err(SocketError::Live(_))));
        drop(first);
        let second = listen(&path, 0o660).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o660);
        drop(second);
        fs::remove_file(&path).unwrap();
        fs::write(&path, "precious").unwrap();
        assert!(matches!(listen(&path, 0o600), Err(SocketError::NotASocket(_))));
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
        assert!(matches!(listen(&folder.path().join("no/s"), 0o600), Err(SocketError::Os { .. })));
        let long = folder.path().join("x".repeat(120));
        assert!(matches!(listen(&long, 0o600), Err(SocketError::Os { .. })));
    }
}
