//! Listening Unix sockets: the vhost-user sockets and the program's others.

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use mqblk_core::lock::RankedMutex;
use rustix::fd::OwnedFd;
use rustix::fs::{AtFlags, FlockOperation, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Backlog of the socket. One frontend is served at a time; the others wait for their first reply.
const BACKLOG: i32 = 8;

/// Access to a socket: the permissions of its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketAccess {
    /// Permission bits, as for `chmod`.
    pub mode: u32,
    /// The UID of the owner; `None`: the process's.
    pub owner: Option<u32>,
    /// The GID of the group; `None`: the process's.
    pub group: Option<u32>,
}

impl SocketAccess {
    /// Returns the access of a socket of the process' own user and group.
    pub const fn with_mode(mode: u32) -> SocketAccess {
        SocketAccess { mode, owner: None, group: None }
    }

    /// Returns true if the file gets another owner or group than the process' own.
    pub const fn changes_owner(&self) -> bool {
        self.owner.is_some() || self.group.is_some()
    }
}

/// Error of creating a socket at a path.
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
    /// The file cannot get its owner or group.
    #[error(
        "found {path:?}, whose owner or group cannot be changed: {source}, expected a start as root, or a group that this process is in"
    )]
    Owner {
        /// The path.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The process has reached its limit of open files.
    #[error(
        "found {path:?}, and a limit of {limit} open files that is reached, expected a higher one (ulimit -n, LimitNOFILE=): each disk has a socket, each file of a disk one more, each connected VMM about ten and four for each queue"
    )]
    OpenFiles {
        /// The path.
        path: PathBuf,
        /// The limit.
        limit: u64,
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

impl SocketError {
    /// Returns the error of a system call about the socket at a path.
    pub fn of_system(path: &Path, source: io::Error) -> SocketError {
        let path = path.to_owned();
        if Errno::from_io_error(&source) != Some(Errno::MFILE) {
            return SocketError::Os { path, source };
        }
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        SocketError::OpenFiles { path, limit: limit.unwrap_or(u64::MAX) }
    }
}

/// State of a path at which a socket can be created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketPathState {
    /// No file exists.
    Free,
    /// A socket that no process listens on. It is replaced.
    Stale,
}

/// As [`probe_socket`](crate::probe_socket), of a path for which no socket was prepared.
///
/// # Errors
/// When no socket can be created there.
pub(crate) fn probe_file(path: &Path) -> Result<SocketPathState, SocketError> {
    let os = |source: io::Error| SocketError::of_system(path, source);
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

/// A listening socket and its file, which is removed on drop unless another process has made it.
#[derive(Debug)]
pub struct ListenSocket {
    listener: Arc<UnixListener>,
    file: Arc<SocketFile>,
}

/// The file of a listening socket.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    /// Device and inode: a later server's file at the same path is not removed. `None`: another process removes it.
    identity: RankedMutex<Option<(u64, u64)>>,
}

impl SocketFile {
    fn new(path: &Path, identity: Option<(u64, u64)>) -> Arc<SocketFile> {
        Arc::new(SocketFile { path: path.to_owned(), identity: RankedMutex::leaf(identity) })
    }

    /// Takes over the file at the path: it is removed with the socket.
    pub(crate) fn own(&self) {
        let file = std::fs::symlink_metadata(&self.path).ok().filter(|file| file.file_type().is_socket());
        *self.identity.lock() = file.map(|file| (file.dev(), file.ino()));
    }

    /// Leaves the file to another process.
    pub(crate) fn leave(&self) {
        *self.identity.lock() = None;
    }

    /// Returns true if this process removes it.
    pub(crate) fn is_own(&self) -> bool {
        self.identity.lock().is_some()
    }

    /// Returns true if the file of this process is at its path.
    fn is_at_its_path(&self) -> bool {
        let file = std::fs::symlink_metadata(&self.path).ok();
        file.is_some_and(|file| Some((file.dev(), file.ino())) == *self.identity.lock())
    }
}

impl ListenSocket {
    /// Makes the socket's file. Connections are refused until [`listen`](Self::listen). Returns the lock of its folder,
    /// to be held until then: otherwise two daemons that start together could both find a stale socket, and one remove
    /// the other's. A folder that cannot be locked is used without the lock.
    pub(crate) fn make(path: &Path, access: &SocketAccess) -> Result<(Option<OwnedFd>, ListenSocket), SocketError> {
        let os = |source: io::Error| SocketError::of_system(path, source);
        let folder = lock_folder(folder_of(path));
        if probe_file(path)? == SocketPathState::Stale {
            std::fs::remove_file(path).map_err(os)?;
        }
        let socket = stream_socket(SocketFlags::empty()).map_err(os)?;
        let bits = Mode::from_bits_truncate(access.mode);
        // bind gives the file the mode of the unbound socket, less the umask (Linux, net/unix/af_unix.c).
        rustix::fs::fchmod(&socket, bits).map_err(|error| os(error.into()))?;
        let address = SocketAddrUnix::new(path).map_err(|error| os(error.into()))?;
        rustix::net::bind(&socket, &address).map_err(|error| os(error.into()))?;
        let file = std::fs::symlink_metadata(path).map_err(os)?;
        let identity = (file.dev(), file.ino());
        let bound = ListenSocket { listener: Arc::new(socket.into()), file: SocketFile::new(path, Some(identity)) };
        let file = open_file(path, identity).map_err(os)?;
        // A descriptor of O_PATH has no fchmod; its entry in procfs refers to the same file (open(2)).
        let link = format!("/proc/self/fd/{}", file.as_raw_fd());
        // The mode first: a file of another owner needs CAP_FOWNER.
        rustix::fs::chmod(link, bits).map_err(|error| os(error.into()))?;
        if access.changes_owner() {
            let (owner, group) = (access.owner.map(Uid::from_raw), access.group.map(Gid::from_raw));
            rustix::fs::chownat(&file, "", owner, group, AtFlags::EMPTY_PATH)
                .map_err(|error| SocketError::Owner { path: path.to_owned(), source: error.into() })?;
        }
        Ok((folder, bound))
    }

    /// Lets clients connect.
    pub(crate) fn listen(&self) -> Result<(), SocketError> {
        let os = |source: io::Error| SocketError::of_system(&self.file.path, source);
        if !self.file.is_at_its_path() {
            return Err(os(io::Error::other("another file has taken the place of the socket")));
        }
        rustix::net::listen(&*self.listener, BACKLOG).map_err(|error| os(error.into()))
    }

    /// Returns a socket that another process has made, and that listens already. Its file stays when this is dropped.
    pub(crate) fn of_another_process(listener: UnixListener, path: PathBuf) -> ListenSocket {
        ListenSocket { listener: Arc::new(listener), file: SocketFile::new(&path, None) }
    }

    /// Takes over the file at the path: it is removed on drop.
    pub fn own_file(&self) {
        self.file.own();
    }

    /// Returns true if this process removes the file.
    pub fn owns_file(&self) -> bool {
        self.file.is_own()
    }

    /// Returns the file.
    pub(crate) fn file(&self) -> &Arc<SocketFile> {
        &self.file
    }

    /// Returns the listener, which stays open as long as the result.
    pub(crate) fn shared(&self) -> Arc<UnixListener> {
        Arc::clone(&self.listener)
    }

    /// Returns the listener without keeping it open.
    pub(crate) fn downgrade(&self) -> Weak<UnixListener> {
        Arc::downgrade(&self.listener)
    }

    /// Returns the listener to accept on.
    pub fn listener(&self) -> &UnixListener {
        &self.listener
    }
}

impl Drop for ListenSocket {
    fn drop(&mut self) {
        if self.file.is_at_its_path()
            && let Err(error) = std::fs::remove_file(&self.file.path)
        {
            tracing::warn!(path = %self.file.path.display(), %error, "cannot remove the socket");
        }
    }
}

fn stream_socket(flags: SocketFlags) -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags | SocketFlags::CLOEXEC, None)?)
}

pub(crate) fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Opens the newly bound socket file, to change its permissions. Fails if another file has taken its place, for example
/// a symbolic link by a user who may write to the folder.
fn open_file(path: &Path, identity: (u64, u64)) -> io::Result<OwnedFd> {
    let file = rustix::fs::open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    let stat = rustix::fs::fstat(&file)?;
    if (stat.st_dev, stat.st_ino) != identity {
        return Err(io::Error::other("another file has taken the place of the socket"));
    }
    Ok(file)
}

/// Longest wait for another process's lock of a folder. Any user who may read the folder can lock it permanently; a
/// starting daemon needs milliseconds.
const LOCK_TIMEOUT: Duration = Duration::from_secs(3);
const LOCK_RETRY: Duration = Duration::from_millis(10);

pub(crate) fn lock_folder(folder: &Path) -> Option<OwnedFd> {
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
    use crate::probe_socket;

    #[test]
    fn a_socket_has_its_mode_and_is_removed_on_drop() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        for mode in [0o600, 0o660, 0o777] {
            assert_eq!(probe_socket(&path).unwrap(), SocketPathState::Free);
            let socket = ListenSocket::bind(&path, &SocketAccess::with_mode(mode)).unwrap();
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
        let live = ListenSocket::bind(&path, &SocketAccess::with_mode(0o600)).unwrap();
        assert!(matches!(probe_socket(&path), Err(SocketError::InUse { .. })));
        assert!(matches!(ListenSocket::bind(&path, &SocketAccess::with_mode(0o600)), Err(SocketError::InUse { .. })));
        drop(live);
        assert!(!path.exists());
    }

    #[test]
    fn a_full_backlog_is_live() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let _live = ListenSocket::bind(&path, &SocketAccess::with_mode(0o600)).unwrap();
        for _ in 0..BACKLOG * 2 {
            assert!(matches!(probe_socket(&path), Err(SocketError::InUse { .. })));
        }
    }

    #[test]
    fn other_files_are_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "kept").unwrap();
        assert!(matches!(
            ListenSocket::bind(&file, &SocketAccess::with_mode(0o600)),
            Err(SocketError::NotASocket { .. })
        ));
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
        let socket = ListenSocket::bind(&path, &SocketAccess::with_mode(0o600)).unwrap();
        let _client = UnixStream::connect(&path).unwrap();
        drop(socket);
    }

    #[test]
    fn another_file_is_not_opened_in_its_place() {
        let folder = tempfile::tempdir().unwrap();
        let (target, link) = (folder.path().join("target"), folder.path().join("link"));
        std::fs::write(&target, "").unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        let before = std::fs::metadata(&target).unwrap();
        let identity = (before.dev(), before.ino());
        assert!(open_file(&link, identity).is_err(), "a link to it");
        open_file(&target, identity).unwrap();
    }

    /// Needs root for a group that the process is not in.
    #[test]
    fn a_socket_has_its_owner_and_group() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let access = SocketAccess { mode: 0o660, owner: Some(65_534), group: Some(12_345) };
        let made = ListenSocket::bind(&path, &access);
        if rustix::process::geteuid().is_root() {
            let socket = made.unwrap();
            let file = std::fs::metadata(&path).unwrap();
            assert_eq!((file.uid(), file.gid(), file.permissions().mode() & 0o7777), (65_534, 12_345, 0o660));
            let _client = UnixStream::connect(&path).unwrap();
            drop(socket);
        } else {
            assert!(matches!(made, Err(SocketError::Owner { .. })), "{made:?}");
        }
        assert!(!path.exists());
    }

    #[test]
    fn a_later_servers_socket_is_not_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let first = ListenSocket::bind(&path, &SocketAccess::with_mode(0o600)).unwrap();
        std::fs::rename(&path, folder.path().join("elsewhere")).unwrap();
        let second = ListenSocket::bind(&path, &SocketAccess::with_mode(0o600)).unwrap();
        drop(first);
        assert!(path.exists());
        drop(second);
        assert!(!path.exists());
    }
}
