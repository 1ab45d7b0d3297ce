//! Journal files: one per ring, kept while a later process may resume the ring; and the locks of devices.

use std::fs::File;
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::device_lock::DeviceLock;
use crate::name::DeviceName;

/// A directory of journal files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct JournalDir {
    path: PathBuf,
}

impl JournalDir {
    /// Opens `dir`, which is created if missing.
    ///
    /// # Errors
    /// When it cannot be created.
    pub(crate) fn open_or_create(dir: &Path) -> io::Result<JournalDir> {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        Ok(JournalDir { path: dir.to_owned() })
    }

    /// Locks the journals of a device type until the returned file is dropped.
    ///
    /// # Errors
    /// When another process has the lock ([`io::ErrorKind::WouldBlock`]), or a system call fails.
    pub(crate) fn lock(&self, type_name: &str) -> io::Result<File> {
        let path = self.path.join(format!("{type_name}.lock"));
        let file = File::options().create(true).truncate(false).write(true).mode(0o600).open(path)?;
        rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive)?;
        Ok(file)
    }

    /// Acquires the lock of a device. `None`: another holder has it.
    ///
    /// # Errors
    /// When a system call fails.
    pub(crate) fn lock_device(&self, name: &DeviceName) -> io::Result<Option<DeviceLock>> {
        DeviceLock::acquire(&self.path.join(format!("{name}.lock")))
    }

    fn file_path(&self, name: &DeviceName, ring: usize) -> PathBuf {
        self.path.join(format!("{name}-{ring}"))
    }

    /// Opens the file of a ring: an existing one, or a new empty one.
    ///
    /// # Errors
    /// When a system call fails, or the path is not a regular file.
    pub(crate) fn open(&self, name: &DeviceName, ring: usize) -> io::Result<File> {
        let path = self.file_path(name, ring);
        let open = || {
            // Only a regular file: follows no symbolic link, and does not block on a FIFO.
            let flags = (rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK).bits() as i32;
            let mut options = File::options();
            options.read(true).write(true).create(true).truncate(false).mode(0o600).custom_flags(flags);
            let file = options.open(&path)?;
            if !file.metadata()?.is_file() {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, "found no regular file"));
            }
            Ok(file)
        };
        open().map_err(|error: io::Error| io::Error::new(error.kind(), format!("journal {path:?}: {error}")))
    }

    /// Removes the files of the first `rings` rings of a device.
    pub(crate) fn remove(&self, name: &DeviceName, rings: usize) {
        for ring in 0..rings {
            let path = self.file_path(name, ring);
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!(path = %path.display(), %error, "cannot remove a journal");
                }
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::fs::PermissionsExt as _;

    use mqblk_memory::DomainId;

    use super::*;

    #[test]
    fn a_file_stays_until_it_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let journals = JournalDir::open_or_create(&dir.path().join("a/b")).unwrap();
        let name = DeviceName { type_name: "mqblk".into(), frontend_id: DomainId(1), devid: 51712 };
        journals.open(&name, 0).unwrap().write_all(b"x").unwrap();
        let mut file = journals.open(&name, 0).unwrap();
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "x");
        assert!(dir.path().join("a/b/mqblk-1-51712-0").exists());
        journals.remove(&name, 4);
        assert_eq!(journals.open(&name, 0).unwrap().metadata().unwrap().len(), 0);
    }

    #[test]
    fn a_type_is_locked_once() {
        let dir = tempfile::tempdir().unwrap();
        let journals = JournalDir::open_or_create(dir.path()).unwrap();
        let lock = journals.lock("mqblk").unwrap();
        assert_eq!(journals.lock("mqblk").unwrap_err().kind(), io::ErrorKind::WouldBlock);
        assert!(journals.lock("qdisk").is_ok());
        drop(lock);
        assert!(journals.lock("mqblk").is_ok());
    }

    #[test]
    fn only_regular_files_are_accepted() {
        let dir = tempfile::tempdir().unwrap();
        let journals = JournalDir::open_or_create(dir.path()).unwrap();
        let name = DeviceName { type_name: "mqblk".into(), frontend_id: DomainId(1), devid: 51712 };
        std::fs::create_dir(dir.path().join("mqblk-1-51712-0")).unwrap();
        std::os::unix::fs::symlink("/dev/null", dir.path().join("mqblk-1-51712-1")).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            dir.path().join("mqblk-1-51712-2"),
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
            0,
        )
        .unwrap();
        for ring in 0..3 {
            let error = journals.open(&name, ring).unwrap_err().to_string();
            assert!(error.contains(&format!("mqblk-1-51712-{ring}")), "{error}");
        }
    }
}
