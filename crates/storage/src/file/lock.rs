//! Image locking: `lock=exclusive`, `shared-migration` or `off`.
//!
//! The lock is an open-file-description lock: a writer's on the whole file, a reader's on the bytes that QEMU's readers
//! lock. So both read the same file, and nobody writes it. For a block device it is also the kernel's claim (`O_EXCL`),
//! which excludes file systems and other users of that claim. It ends with the open file at the latest.
//!
//! `exclusive` holds it from the opening. `shared-migration` holds it while the disk is
//! [active](mqblk_core::Disk::activate): the destination of a migration may open the file that the source serves, and
//! the one that runs queues has the lock.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use mqblk_core::{ACTIVATION_TIMEOUT, DiskError, ImageAccess, ImageOpenError, ImageOpener};
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use rustix::io::Errno;

use super::lock_users::{LockUsers, Sharing};
use super::retry::{errno, retry_for};
use crate::lock_mode::LockMode;

/// Claim of a block device.
const CLAIM: ImageAccess = ImageAccess { write: false, direct: false, exclusive: true };

/// Error of locking a file.
#[derive(Debug)]
pub(crate) enum LockError {
    /// Another process has it.
    InUse,
    /// The file system does not support locks.
    Unsupported(io::Error),
}

/// Locks a file: all of it for a writer, as readers do (QEMU's among them) for a reader. Waits briefly for a holder
/// that is about to end.
pub(crate) fn lock(path: &Path, file: &impl AsFd, read_only: bool) -> Result<(), LockError> {
    lock_within(ACTIVATION_TIMEOUT, path, file, read_only)
}

/// As [`lock`], and waits for this time for a holder that is about to end.
fn lock_within(time: Duration, path: &Path, file: &impl AsFd, read_only: bool) -> Result<(), LockError> {
    if read_only {
        return lock_shared(time, path, file);
    }
    take(time, path, || fcntl(file, FcntlArg::F_OFD_SETLK(&whole_file(libc::F_WRLCK))).map(drop))
}

/// Takes a lock by `attempt`.
fn take(time: Duration, path: &Path, attempt: impl FnMut() -> nix::Result<()>) -> Result<(), LockError> {
    let in_use = |error: &nix::Error| matches!(error, nix::Error::EAGAIN | nix::Error::EACCES);
    match retry_for(time, path, attempt, in_use) {
        Ok(()) => Ok(()),
        Err(error) if in_use(&error) => Err(LockError::InUse),
        Err(error) => Err(LockError::Unsupported(error.into())),
    }
}

fn whole_file(kind: libc::c_int) -> libc::flock {
    bytes(kind, 0, 0)
}

fn bytes(kind: libc::c_int, start: i64, len: i64) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: start,
        l_len: len,
        l_pid: 0,
    }
}

/// Bytes that QEMU locks (`block/file-posix.c`: `RAW_LOCK_PERM_BASE`, `RAW_LOCK_SHARED_BASE`; permissions:
/// `include/block/block-common.h`). A consistent reader locks 100; a user that excludes writes or resizes locks 201 and
/// 203. A writer locks 101. A user that resizes locks 103, and one that excludes readers locks 200.
const OF_READER: [i64; 3] = [100, 201, 203];
const EXCLUDES_READER: [i64; 3] = [101, 103, 200];

/// Locks a file for reading together with other readers, and against writers.
fn lock_shared(time: Duration, path: &Path, file: &impl AsFd) -> Result<(), LockError> {
    take(time, path, || {
        for byte in OF_READER {
            fcntl(file, FcntlArg::F_OFD_SETLK(&bytes(libc::F_RDLCK, byte, 1)))?;
        }
        for byte in EXCLUDES_READER {
            let mut other = bytes(libc::F_WRLCK, byte, 1);
            fcntl(file, FcntlArg::F_OFD_GETLK(&mut other))?;
            // Readers of earlier daemons lock the whole file.
            let whole = other.l_start == 0 && other.l_len == 0;
            match i32::from(other.l_type) {
                libc::F_UNLCK => {}
                libc::F_RDLCK if whole => {}
                _ => return Err(nix::Error::EAGAIN),
            }
        }
        Ok(())
    })
}

/// Sharing of this process's open files with another one. Changed under the locks of all images; each image reads it
/// under its own.
static SHARING: Mutex<Sharing> = Mutex::new(Sharing::Alone);
/// Locks with `shared-migration`.
static LOCKS: Mutex<Vec<Weak<ImageLock>>> = Mutex::new(Vec::new());

/// Returns the sharing of this process's open files with another one.
pub(crate) fn sharing() -> Sharing {
    *SHARING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sets the sharing of this process's open files with another one, handed over in either direction. The locks belong to
/// both: none is released meanwhile. A process that is alone again releases the unused ones.
pub fn set_sharing(sharing: Sharing) {
    *SHARING.lock().unwrap_or_else(PoisonError::into_inner) = sharing;
    if sharing == Sharing::Alone {
        let locks = LOCKS.lock().unwrap_or_else(PoisonError::into_inner).clone();
        locks.iter().filter_map(Weak::upgrade).for_each(|lock| lock.release_unused());
    }
}

/// Releases all locks of an open file that is closed.
pub(crate) fn unlock_closed(file: &impl AsFd) {
    if sharing() == Sharing::Alone {
        unlock(file);
    }
}

/// Releases all locks of an open file.
fn unlock(file: &impl AsFd) {
    // Without lock support there is nothing to release.
    let _ = fcntl(file, FcntlArg::F_OFD_SETLK(&whole_file(libc::F_UNLCK)));
}

/// The lock of an open file. With `shared-migration` it is held while the file has users.
#[derive(Debug)]
pub(super) struct ImageLock {
    pub(super) mode: LockMode,
    path: PathBuf,
    file: Arc<OwnedFd>,
    read_only: bool,
    device: bool,
    opener: Arc<dyn ImageOpener>,
    state: Mutex<LockState>,
}

#[derive(Debug, Default)]
struct LockState {
    users: LockUsers,
    /// Keeps others from claiming the block device.
    claim: Option<File>,
    /// True if missing lock support was logged.
    warned: bool,
}

impl ImageLock {
    pub(super) fn new(
        mode: LockMode,
        (path, file): (&Path, &Arc<OwnedFd>),
        read_only: bool,
        device: bool,
        opener: &Arc<dyn ImageOpener>,
    ) -> Arc<ImageLock> {
        let (path, file, opener) = (path.to_owned(), Arc::clone(file), Arc::clone(opener));
        let lock = Arc::new(ImageLock { mode, path, file, read_only, device, opener, state: Mutex::default() });
        if mode == LockMode::SharedMigration {
            let mut locks = LOCKS.lock().unwrap_or_else(PoisonError::into_inner);
            locks.retain(|lock| lock.strong_count() > 0);
            locks.push(Arc::downgrade(&lock));
        }
        lock
    }

    /// Returns true if it is held only while the file has users.
    pub(super) fn is_passed_on(&self) -> bool {
        self.mode == LockMode::SharedMigration
    }

    fn state(&self) -> MutexGuard<'_, LockState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a user. Calls `first` after the lock was acquired, before any user may rely on it.
    pub(super) fn acquire(&self, timeout: Duration, first: impl FnOnce()) -> Result<(), DiskError> {
        if self.mode != LockMode::SharedMigration {
            return Ok(());
        }
        let mut state = self.state();
        if state.users.is_unused() {
            self.acquire_first(&mut state, timeout)?;
            first();
        }
        state.users.add();
        Ok(())
    }

    fn acquire_first(&self, state: &mut LockState, timeout: Duration) -> Result<(), DiskError> {
        let in_use = |errno: Errno| DiskError::Os {
            what: format!(
                "{}: another process serves it or has it mounted; with lock=shared-migration it is taken over when that one has \
                 stopped its queues",
                self.path.display()
            ),
            source: errno.into(),
        };
        if self.device && !self.read_only && state.claim.is_none() {
            let open = || self.opener.open(&self.path, CLAIM);
            let busy = |error: &ImageOpenError| errno(error) == Some(Errno::BUSY);
            state.claim = Some(retry_for(timeout, &self.path, open, busy).map_err(|error| match busy(&error) {
                true => in_use(Errno::BUSY),
                false => DiskError::Os { what: format!("claiming {}", self.path.display()), source: error.into() },
            })?);
        }
        match lock_within(timeout, &self.path, &self.file, self.read_only) {
            Ok(()) => {}
            Err(LockError::InUse) => {
                state.claim = None;
                return Err(in_use(Errno::AGAIN));
            }
            Err(LockError::Unsupported(error)) => {
                if !std::mem::replace(&mut state.warned, true) {
                    tracing::warn!(
                        "{}: the file system has no locks ({error}); nothing keeps a second writer out",
                        self.path.display()
                    );
                }
            }
        }
        tracing::info!(image = %self.path.display(), "lock taken");
        Ok(())
    }

    /// Removes a user. Calls `flush` after the last one, before the lock is released. If that fails the lock stays: the
    /// image may lack writes, and no other process may use it.
    ///
    /// # Errors
    /// As `flush`.
    pub(super) fn release(&self, flush: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        if self.mode != LockMode::SharedMigration {
            return Ok(());
        }
        let mut state = self.state();
        if !state.users.remove() {
            return Ok(());
        }
        let flushed = flush();
        if state.users.flushed(flushed.is_ok(), sharing()) {
            self.give_back(&mut state);
        }
        flushed
    }

    /// Releases the lock if it has no users: another process may have left it.
    fn release_unused(&self) {
        let mut state = self.state();
        if state.users.gives_back(sharing()) {
            self.give_back(&mut state);
        }
    }

    fn give_back(&self, state: &mut LockState) {
        unlock(&self.file);
        state.claim = None;
        tracing::info!(image = %self.path.display(), "lock released");
    }

    /// Returns a descriptor of the block device's claim, if any, for another process.
    pub(super) fn claim(&self) -> io::Result<Option<(ImageAccess, OwnedFd)>> {
        let claim = self.state().claim.as_ref().map(File::try_clone).transpose()?;
        Ok(claim.map(|claim| (CLAIM, claim.into())))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use mqblk_core::{ByteLen, Disk};
    use mqblk_uring::UringContext;

    use super::super::tests::{image, on_disk};
    use crate::conformance::TestTarget;

    fn open(path: &Path, settings: &[(&'static str, &'static str)]) -> Result<Arc<dyn Disk<UringContext>>, String> {
        let mut all = vec![("path", path.to_str().unwrap())];
        all.extend(settings);
        TestTarget { kind: "file", settings: &all, keeps_data: true, seed: 0 }
            .open(&[])
            .map_err(|error| error.to_string())
    }

    use super::*;
    const SHARED: (&str, &str) = ("lock", "shared-migration");

    #[test]
    fn only_one_of_several_openers_is_active() {
        let (_dir, path) = image(&on_disk(), 1 << 20);
        let [source, destination] = [0, 1].map(|_| open(&path, &[SHARED]).unwrap());
        assert!(source.resolved().contains(&("lock", "shared-migration".to_owned())));
        // Two controllers may export it.
        source.activate(ACTIVATION_TIMEOUT).unwrap();
        source.activate(ACTIVATION_TIMEOUT).unwrap();
        let error = destination.activate(ACTIVATION_TIMEOUT).unwrap_err().to_string();
        assert!(error.contains("another process serves it"), "{error}");
        source.deactivate().unwrap();
        assert!(destination.activate(ACTIVATION_TIMEOUT).is_err(), "the source still uses it");
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| destination.activate(ACTIVATION_TIMEOUT));
            std::thread::sleep(Duration::from_millis(50));
            source.deactivate().unwrap();
            waiting.join().unwrap().unwrap();
        });
        assert!(source.activate(ACTIVATION_TIMEOUT).is_err());
        let error = open(&path, &[]).map(|_| ()).unwrap_err();
        assert!(error.contains("in use by another process"), "{error}");
        destination.deactivate().unwrap();
        source.activate(ACTIVATION_TIMEOUT).unwrap();
        drop(source);
        destination.activate(ACTIVATION_TIMEOUT).unwrap();
    }

    #[test]
    fn an_exclusive_lock_is_never_shared() {
        let (_dir, path) = image(&on_disk(), 1 << 20);
        let exclusive = open(&path, &[]).unwrap();
        exclusive.activate(ACTIVATION_TIMEOUT).unwrap();
        let shared = open(&path, &[SHARED]).unwrap();
        exclusive.deactivate().unwrap();
        assert!(shared.activate(ACTIVATION_TIMEOUT).is_err(), "it holds the lock while it is open");
        let off = open(&path, &[("lock", "off")]).unwrap();
        off.activate(ACTIVATION_TIMEOUT).unwrap();
        off.deactivate().unwrap();
    }

    #[test]
    fn readers_share_the_lock_and_a_new_size_is_left_to_resize() {
        let (_dir, path) = image(&on_disk(), 1 << 20);
        let readers = [0, 1].map(|_| open(&path, &[SHARED, ("readonly", "on")]).unwrap());
        readers.iter().for_each(|reader| reader.activate(ACTIVATION_TIMEOUT).unwrap());
        let writer = open(&path, &[SHARED]).unwrap();
        assert!(writer.activate(ACTIVATION_TIMEOUT).is_err());
        readers.iter().for_each(|reader| reader.deactivate().unwrap());
        File::options().write(true).open(&path).unwrap().set_len(2 << 20).unwrap();
        writer.activate(ACTIVATION_TIMEOUT).unwrap();
        assert_eq!(writer.geometry().size, ByteLen(1 << 20));
        assert_eq!(writer.found_size().unwrap(), ByteLen(2 << 20));
        assert_eq!(writer.resize(None).unwrap(), ByteLen(2 << 20));
    }
}
