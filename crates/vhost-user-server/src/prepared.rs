//! Sockets that exist before they are served: those passed to the process at its start, and those made while it still
//! has the rights for their owner and group. They belong to the whole process, like file descriptors and rights.
//!
//! [`ListenSocket::bind`] takes the one of its path.

use std::collections::HashMap;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use mqblk_core::lock::{RankedGuard, RankedMutex};

use crate::listen::{ListenSocket, SocketAccess, SocketError};

/// Prefix of the path of a socket passed to the process at its start.
pub const PASSED_PREFIX: &str = "fd:";

static PREPARED: LazyLock<RankedMutex<Prepared>> = LazyLock::new(|| RankedMutex::leaf(Prepared::default()));

#[derive(Default)]
struct Prepared {
    /// Sockets made by this process or handed over by another one, by their paths.
    own: HashMap<PathBuf, ListenSocket>,
    /// Sockets passed at the start.
    passed: Vec<Passed>,
}

/// A socket passed at the start. It stays known: the configuration may be read again.
struct Passed {
    /// `None` once it is served.
    socket: Option<ListenSocket>,
    /// Its path for lookups, made from its name.
    path: PathBuf,
    name: String,
    /// The path to which it is bound, if any.
    bound: Option<PathBuf>,
    /// True if the configuration contains it.
    is_claimed: bool,
}

impl Passed {
    fn is_for(&self, path: &Path) -> bool {
        self.path == path || self.bound.as_deref().is_some_and(|bound| is_same_socket(bound, path))
    }
}

fn prepared() -> RankedGuard<'static, Prepared> {
    PREPARED.lock()
}

fn is_same_socket(one: &Path, other: &Path) -> bool {
    let identity = |path: &Path| {
        let file = std::fs::symlink_metadata(path).ok().filter(|file| file.file_type().is_socket())?;
        Some((file.dev(), file.ino()))
    };
    one == other || identity(one).is_some_and(|one| Some(one) == identity(other))
}

/// Makes a socket for the [`ListenSocket::bind`] of its path. Connections are refused until then.
///
/// # Errors
/// As [`ListenSocket::bind`].
pub fn make_early(path: &Path, access: &SocketAccess) -> Result<(), SocketError> {
    if has(path) {
        return Err(SocketError::InUse { path: path.to_owned() });
    }
    let (_folder, socket) = ListenSocket::make(path, access)?;
    let before = prepared().own.insert(path.to_owned(), socket);
    // Outside of the lock, because it takes system calls.
    drop(before);
    Ok(())
}

/// Takes over a listening socket passed at the start, as `fd:NAME` and as its bound path. Its file is never removed.
///
/// # Errors
/// If the socket does not listen, or another one has the name.
pub fn adopt(name: &str, listener: UnixListener) -> io::Result<()> {
    if !rustix::net::sockopt::socket_acceptconn(&listener)? {
        return Err(io::Error::other("it does not listen"));
    }
    let bound = listener.local_addr()?.as_pathname().map(Path::to_owned);
    let path = PathBuf::from(format!("{PASSED_PREFIX}{name}"));
    // The accepting threads poll the listener before an accept.
    listener.set_nonblocking(false)?;
    let mut all = prepared();
    if all.passed.iter().any(|other| other.path == path) {
        return Err(io::Error::other("another one has the same name"));
    }
    let socket = ListenSocket::of_another_process(listener, bound.clone().unwrap_or_else(|| path.clone()));
    all.passed.push(Passed { socket: Some(socket), path, name: name.to_owned(), bound, is_claimed: false });
    Ok(())
}

/// Takes over a listening socket from the process that hands over to this one, by its configured path. Its file is left
/// to that process, until [`ListenSocket::own_file`].
///
/// # Errors
/// If the socket does not listen, or is bound to another path: a client there would be served another disk.
pub fn adopt_handed(path: PathBuf, listener: UnixListener) -> io::Result<()> {
    if let Some(name) = path.to_str().and_then(|path| path.strip_prefix(PASSED_PREFIX)) {
        return adopt(name, listener);
    }
    if !rustix::net::sockopt::socket_acceptconn(&listener)? {
        return Err(io::Error::other("it does not listen"));
    }
    let bound = listener.local_addr()?.as_pathname().map(Path::to_owned);
    if !bound.as_ref().is_some_and(|bound| is_same_file(bound, &path)) {
        let found = bound.map_or("no path".to_owned(), |bound| format!("{bound:?}"));
        return Err(io::Error::other(format!("found one that is bound to {found}, expected this path")));
    }
    let socket = ListenSocket::of_another_process(listener, path.clone());
    let before = prepared().own.insert(path, socket);
    drop(before);
    Ok(())
}

/// Returns true if two paths are equal or refer to one file, also by links.
fn is_same_file(one: &Path, other: &Path) -> bool {
    let identity = |path: &Path| path.symlink_metadata().map(|file| (file.dev(), file.ino())).ok();
    one == other || identity(one).is_some_and(|file| identity(other) == Some(file))
}

/// Returns true if the socket of this configured path was passed at the start.
pub fn claim_passed(path: &Path) -> bool {
    let mut all = prepared();
    all.passed.iter_mut().find(|one| one.is_for(path)).is_some_and(|passed| {
        passed.is_claimed = true;
        true
    })
}

/// Returns true if the socket of this path was passed at the start.
pub fn is_passed(path: &Path) -> bool {
    prepared().passed.iter().any(|one| one.is_for(path))
}

/// Returns the names of the sockets passed at the start that are not taken; with `unclaimed`, only of those that the
/// configuration does not contain.
pub fn passed_names(unclaimed: bool) -> Vec<String> {
    let all = prepared();
    all.passed.iter().filter(|passed| !unclaimed || !passed.is_claimed).map(|passed| passed.name.clone()).collect()
}

/// Drops the sockets that are not taken, and removes the files of those that this process made.
pub fn discard() {
    let all = std::mem::take(&mut *prepared());
    drop(all);
}

/// Returns true if there is an untaken one for this path.
pub fn has(path: &Path) -> bool {
    let all = prepared();
    all.own.contains_key(path) || all.passed.iter().any(|one| one.socket.is_some() && one.is_for(path))
}

/// Takes the one of this path, if there is one.
///
/// # Errors
/// If it was passed, and has been taken before.
pub(crate) fn take(path: &Path) -> Result<Option<ListenSocket>, SocketError> {
    let mut all = prepared();
    if let Some(own) = all.own.remove(path) {
        return Ok(Some(own));
    }
    let Some(passed) = all.passed.iter_mut().find(|one| one.is_for(path)) else { return Ok(None) };
    let closed = || SocketError::Os {
        path: path.to_owned(),
        source: io::Error::other("the process was started with it, and has served it already"),
    };
    passed.socket.take().map(Some).ok_or_else(closed)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::probe_socket;

    const ACCESS: SocketAccess = SocketAccess::with_mode(0o600);

    /// Otherwise a guest that connects there would be served another disk.
    #[test]
    fn a_socket_that_is_handed_over_is_bound_to_its_path() {
        let folder = tempfile::tempdir().unwrap();
        let [a, b, link] = ["a", "b", "link"].map(|name| folder.path().join(name));
        let listeners = [&a, &b].map(|path| UnixListener::bind(path).unwrap());
        let why = adopt_handed(a.clone(), listeners[1].try_clone().unwrap()).unwrap_err().to_string();
        assert!(why.starts_with("found one that is bound to") && why.ends_with("expected this path"), "{why}");
        let nowhere =
            rustix::net::socket(rustix::net::AddressFamily::UNIX, rustix::net::SocketType::STREAM, None).unwrap();
        assert!(adopt_handed(a.clone(), nowhere.into()).is_err(), "it does not listen");
        std::fs::hard_link(&a, &link).unwrap();
        for path in [&a, &link] {
            adopt_handed(path.clone(), listeners[0].try_clone().unwrap()).unwrap();
            drop(take(path).unwrap());
        }
    }

    #[test]
    fn a_socket_that_was_passed_is_served_and_never_removed() {
        for number in 0..3 {
            let folder = tempfile::tempdir().unwrap();
            let (path, name) = (folder.path().join("passed.sock"), format!("passed-{number}"));
            let spellings = [path.clone(), folder.path().join("./passed.sock"), PathBuf::from(format!("fd:{name}"))];
            let by = &spellings[number];
            let listener = UnixListener::bind(&path).unwrap();
            adopt(&name, listener.try_clone().unwrap()).unwrap();
            assert!(adopt(&name, listener).is_err(), "a name twice");
            assert!(passed_names(true).contains(&name));
            assert!(is_passed(by) && probe_socket(by).is_ok());
            assert!(claim_passed(by) && !passed_names(true).contains(&name));
            let socket = ListenSocket::bind(by, &ACCESS).unwrap();
            assert!(is_passed(by) && claim_passed(by), "the configuration may be read again");
            assert!(matches!(ListenSocket::bind(by, &ACCESS), Err(SocketError::Os { .. })), "served once");
            let _client = UnixStream::connect(&path).unwrap();
            socket.listener().accept().unwrap();
            drop(socket);
            assert!(path.exists());
        }
    }

    #[test]
    fn a_socket_that_does_not_listen_is_refused() {
        let (one, _other) = UnixStream::pair().unwrap();
        let listener = UnixListener::from(rustix::fd::OwnedFd::from(one));
        assert_eq!(adopt("a-connected-one", listener).unwrap_err().to_string(), "it does not listen");
    }

    #[test]
    fn a_socket_that_is_made_early_refuses_connections_until_it_is_served() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("early.sock");
        make_early(&path, &ACCESS).unwrap();
        assert!(path.exists() && UnixStream::connect(&path).is_err());
        assert!(probe_socket(&path).is_ok() && !claim_passed(&path));
        let socket = ListenSocket::bind(&path, &ACCESS).unwrap();
        let _client = UnixStream::connect(&path).unwrap();
        drop(socket);
        assert!(!path.exists());
        // Another process has replaced it meanwhile.
        make_early(&path, &ACCESS).unwrap();
        std::fs::remove_file(&path).unwrap();
        let _other = UnixListener::bind(&path).unwrap();
        assert!(matches!(ListenSocket::bind(&path, &ACCESS), Err(SocketError::Os { .. })));
        assert!(path.exists(), "that of another process");
    }
}
