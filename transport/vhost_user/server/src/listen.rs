//! Listening Unix sockets: the vhost-user sockets and the program's others.

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fd::OwnedFd;
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Backlog of the socket. One frontend is served at a time; the others wait for their first reply.
const BACKLOG: i32 = 8;

/// Why a socket cannot be at a path.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Another process listens on it.
    #[error(
        "found {path:?} in use by another program, expected a free path (stop that program or choose another path)"
    )]
    InUse {
        /// The path.
        path: PathBuf,
    },
    /// The path is a file that is not a stream socket. It is not replaced.
    #[error("found {path:?}, which is no stream socket, expected a free path or a socket left behind")]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// A system call failed.
    #[error("found {path:?}: {source}, expected a path in an existing folder that can be written to")]
    Os {
        /// The path.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// State of a path at which a socket can be created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketPathState {
    /// No file exists.
    Free,
    /// A socket that no process listens on. It is replaced.
    Stale,
}

/// Checks that a socket can be created at `path` and changes nothing. A live server sees one connection that closes at once.
///
/// # Errors
/// When no socket can be created there.
pub fn probe_socket(path: &Path) -> Result<SocketPathState, SocketError> {
    let os = |source: io::Error| SocketError::Os { path: path.to_owned(), source };
    if !folder_of(path).metadata().map_err(os)?.is_dir() {
        return Err(os(io::ErrorKind::NotADirectory.into()));
    }
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(SocketPathState::Free),
        Err(error) => return Err(os(error)),
        Ok(file) if !file.file_type().is_socket() => return Err(SocketError::NotASocket { path: path.to_owned() }),
        Ok(_) => {}
    }
    let address = SocketAddrUnix::new(path).map_err(|error| os(error.into()))?;
    // Non-blocking: connecting to a live server whose backlog is full would wait.
    let client = stream_socket(SocketFlags::NONBLOCK).map_err(os)?;
    match rustix::net::connect(&client, &address) {
        Err(Errno::CONNREFUSED) => Ok(SocketPathState::Stale),
        Err(Errno::NOENT) => Ok(SocketPathState::Free),
        Err(Errno::PROTOTYPE) => Err(SocketError::NotASocket { path: path.to_owned() }),
        Ok(()) | Err(Errno::AGAIN) => Err(SocketError::InUse { path: path.to_owned() }),
        Err(error) => Err(os(error.into())),
    }
}

/// A listening socket and its file, which is removed on drop.
#[derive(Debug)]
pub struct ListenSocket {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode of the socket file: a later server's file at the same path is not removed.
    identity: (u64, u64),
}

impl ListenSocket {
    /// Listens at `path` and replaces a stale socket. The file never has wider permissions than `mode`.
    ///
    /// # Errors
    /// When another process listens there, another kind of file exists, or a system call fails.
    pub fn bind(path: &Path, mode: u32) -> Result<ListenSocket, SocketError> {
        let os = |source: io::Error| SocketError::Os { path: path.to_owned(), source };
        // Held until the socket listens: two daemons that start together could both find a stale socket, and one remove the
        // other's. A folder that cannot be locked is used without the lock.
        let _folder = lock_folder(folder_of(path));
        if probe_socket(path)? == SocketPathState::Stale {
            std::fs::remove_file(path).map_err(os)?;
        }
        let socket = stream_socket(SocketFlags::empty()).map_err(os)?;
        let bits = Mode::from_bits_truncate(mode);
        // bind gives the file the mode of the unbound socket, less the umask (Linux, net/unix/af_unix.c).
        rustix::fs::fchmod(&socket, bits).map_err(|error| os(error.into()))?;
        let address = SocketAddrUnix::new(path).map_err(|error| os(error.into()))?;
        rustix::net::bind(&socket, &address).map_err(|error| os(error.into()))?;
        let file = std::fs::symlink_metadata(path).map_err(os)?;
        let bound = ListenSocket { listener: socket.into(), path: path.to_owned(), identity: (file.dev(), file.ino()) };
        set_mode(path, bits, bound.identity).map_err(os)?;
        rustix::net::listen(&bound.listener, BACKLOG).map_err(|error| os(error.into()))?;
        Ok(bound)
    }

    /// Returns the listener to accept on.
    pub fn listener(&self) -> &UnixListener {
        &self.listener
    }
}

impl Drop for ListenSocket {
    fn drop(&mut self) {
        let ours = std::fs::symlink_metadata(&self.path).is_ok_and(|file| (file.dev(), file.ino()) == self.identity);
        if ours && let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove the socket");
        }
    }
}

fn stream_socket(flags: SocketFlags) -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags | SocketFlags::CLOEXEC, None)?)
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Sets the mode of the socket file that was just bound, which the umask has reduced. Nothing else is changed if another file has taken its
/// place, such as a symbolic link by somebody who may write to the folder.
fn set_mode(path: &Path, mode: Mode, identity: (u64, u64)) -> io::Result<()> {
    let file = rustix::fs::open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    let stat = rustix::fs::fstat(&file)?;
    if (stat.st_dev, stat.st_ino) != identity {
        return Err(io::Error::other("another file has taken the place of the socket"));
    }
    // A descriptor of O_PATH has no fchmod; its entry in procfs names the same file (open(2)).
    Ok(rustix::fs::chmod(format!("/proc/self/fd/{}", file.as_raw_fd()), mode)?)
}

/// How long another process may hold the lock of a folder. Whoever may read the folder can lock it for ever; a daemon that starts needs
/// milliseconds.
const LOCK_TIMEOUT: Duration = Duration::from_secs(3);
const LOCK_RETRY: Duration = Duration::from_millis(10);

fn lock_folder(folder: &Path) -> Option<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = rustix::fs::open(folder, flags, Mode::empty()).ok()?;
    let end = Instant::now() + LOCK_TIMEOUT;
    loop {
        match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Some(fd),
            Err(Errno::WOULDBLOCK) if Instant::now() < end => std::thread::sleep(LOCK_RETRY),
            Err(Errno::WOULDBLOCK) => {
                let (folder, seconds) = (folder.display(), LOCK_TIMEOUT.as_secs());
                tracing::warn!(
                    "{folder}: found it locked by another process for {seconds} s (`fuser -v {folder}` names it); going on without its lock"
                );
                return None;
            }
            Err(_) => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::{UnixDatagram, UnixStream};

    use super::*;

    #[test]
    fn a_socket_has_its_mode_and_is_removed_on_drop() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        for mode in [0o600, 0o660, 0o777] {
            assert_eq!(probe_socket(&path).unwrap(), SocketPathState::Free);
            let socket = ListenSocket::bind(&path, mode).unwrap();
            let bits = std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777;
            assert_eq!(bits, mode);
            let _client = UnixStream::connect(&path).unwrap();
            socket.listener().accept().unwrap();
            drop(socket);
            assert!(!path.exists());
        }
    }

    #[test]
    fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        drop(UnixListener::bind(&path).unwrap());
        assert_eq!(probe_socket(&path).unwrap(), SocketPathState::Stale);
        let live = ListenSocket::bind(&path, 0o600).unwrap();
        assert!(matches!(probe_socket(&path), Err(SocketError::InUse { .. })));
        assert!(matches!(ListenSocket::bind(&path, 0o600), Err(SocketError::InUse { .. })));
        drop(live);
        assert!(!path.exists());
    }

    #[test]
    fn a_full_backlog_is_live() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let _live = ListenSocket::bind(&path, 0o600).unwrap();
        for _ in 0..BACKLOG * 2 {
            assert!(matches!(probe_socket(&path), Err(SocketError::InUse { .. })));
        }
    }

    #[test]
    fn other_files_are_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "kept").unwrap();
        assert!(matches!(ListenSocket::bind(&file, 0o600), Err(SocketError::NotASocket { .. })));
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "kept");
        let datagram = folder.path().join("datagram");
        let _bound = UnixDatagram::bind(&datagram).unwrap();
        assert!(matches!(probe_socket(&datagram), Err(SocketError::NotASocket { .. })));
        let missing = folder.path().join("missing/s");
        assert!(matches!(probe_socket(&missing), Err(SocketError::Os { .. })));
    }

    #[test]
    fn a_folder_that_another_process_keeps_locked_is_used_without_the_lock() {
        let folder = tempfile::tempdir().unwrap();
        let other = std::fs::File::open(folder.path()).unwrap();
        rustix::fs::flock(&other, FlockOperation::LockExclusive).unwrap();
        let path = folder.path().join("s");
        let socket = ListenSocket::bind(&path, 0o600).unwrap();
        let _client = UnixStream::connect(&path).unwrap();
        drop(socket);
    }

    #[test]
    fn the_mode_of_another_file_is_not_changed() {
        let folder = tempfile::tempdir().unwrap();
        let (target, link) = (folder.path().join("target"), folder.path().join("link"));
        std::fs::write(&target, "").unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        let before = std::fs::metadata(&target).unwrap();
        let identity = (before.dev(), before.ino());
        assert!(set_mode(&link, Mode::RWXO, identity).is_err(), "a link to it");
        assert_eq!(std::fs::metadata(&target).unwrap().permissions(), before.permissions());
        set_mode(&target, Mode::RUSR, identity).unwrap();
        assert_eq!(std::fs::metadata(&target).unwrap().permissions().mode() & 0o777, 0o400);
    }

    #[test]
    fn a_later_servers_socket_is_not_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let first = ListenSocket::bind(&path, 0o600).unwrap();
        std::fs::rename(&path, folder.path().join("elsewhere")).unwrap();
        let second = ListenSocket::bind(&path, 0o600).unwrap();
        drop(first);
        assert!(path.exists());
        drop(second);
        assert!(!path.exists());
    }
}
