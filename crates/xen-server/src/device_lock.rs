//! The lock of a device: its holder is the process that acts on it.
//!
//! A process holds it from its first action on a device until the device has no rings and no open storage. Each worker
//! that serves a ring has the file in its io_uring's table of registered files, which the kernel frees only after all
//! requests of that io_uring have ended. So the next holder of the lock knows that no other process acts on the device,
//! and that the kernel has no request of an earlier holder, killed or not, in flight.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{FlockOperation, OFlags};
use rustix::io::Errno;

/// A device's lock, held until no reference to the file is left.
#[derive(Debug)]
pub(crate) struct DeviceLock {
    path: PathBuf,
    pub(crate) file: Arc<OwnedFd>,
}

impl DeviceLock {
    /// Acquires the lock with the file at `path`, which is created if missing. `None`: another holder has it, or had it
    /// until now.
    ///
    /// # Errors
    /// When a system call fails.
    pub(crate) fn acquire(path: &Path) -> io::Result<Option<DeviceLock>> {
        let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
        let mut options = File::options();
        let file = options.create(true).truncate(false).write(true).mode(0o600).custom_flags(flags).open(path)?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
        // Its last holder has removed it: the next one has another file.
        if rustix::fs::fstat(&file)?.st_nlink == 0 {
            return Ok(None);
        }
        Ok(Some(DeviceLock { path: path.to_owned(), file: Arc::new(file.into()) }))
    }

    /// Removes the file, and releases the lock. Called where no worker has the file.
    pub(crate) fn remove(self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove a device's lock");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_has_one_holder_until_its_last_reference_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mqblk-1-51712.lock");
        let lock = DeviceLock::acquire(&path).unwrap().unwrap();
        assert!(DeviceLock::acquire(&path).unwrap().is_none());
        // Like a worker's reference.
        let file = Arc::clone(&lock.file);
        drop(lock);
        assert!(DeviceLock::acquire(&path).unwrap().is_none());
        drop(file);
        DeviceLock::acquire(&path).unwrap().unwrap().remove();
        assert!(!path.exists());
    }

    #[test]
    fn a_removed_file_is_nobodys_lock() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mqblk-1-51712.lock");
        let lock = DeviceLock::acquire(&path).unwrap().unwrap();
        let early = File::options().write(true).open(&path).unwrap();
        lock.remove();
        rustix::fs::flock(&early, FlockOperation::NonBlockingLockExclusive).unwrap();
        let next = DeviceLock::acquire(&path).unwrap().expect("another file");
        assert!(DeviceLock::acquire(&path).unwrap().is_none());
        drop((next, early));
        std::os::unix::fs::symlink("/dev/null", dir.path().join("link")).unwrap();
        assert!(DeviceLock::acquire(&dir.path().join("link")).is_err());
    }
}
