//! Files that are opened by path while the daemon serves.

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, OFlags};

/// A file that the configuration names and the daemon opens while it serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileUse {
    /// A socket that is created, and removed at the end.
    Socket(PathBuf),
    /// A file that is replaced by a new one next to it.
    Replaced(PathBuf),
    /// A folder in which files are created, read, written and removed.
    Folder(PathBuf),
    /// A device that is opened.
    Device(PathBuf),
    /// A folder with images, which the broker opens.
    Images(PathBuf),
    /// A configuration file, for reading it again, also if another file has replaced it.
    Config(PathBuf),
}

impl FileUse {
    /// Returns the path that must be accessible, with the kind of access.
    pub(crate) fn needed_access(&self) -> (&Path, Access) {
        match self {
            FileUse::Socket(path) | FileUse::Replaced(path) => (folder_of(path), Access::WRITE_OK | Access::EXEC_OK),
            FileUse::Folder(path) => (path, Access::WRITE_OK | Access::EXEC_OK),
            FileUse::Device(path) => (path, Access::READ_OK | Access::WRITE_OK),
            FileUse::Images(path) => (path, Access::EXISTS),
            // The next read shows if the file itself is readable.
            FileUse::Config(path) => (folder_of(path), Access::EXISTS),
        }
    }

    /// Returns its description for messages.
    pub(crate) fn noun(&self) -> &'static str {
        match self {
            FileUse::Socket(_) => "the folder of a socket",
            FileUse::Replaced(_) => "the folder of the state file or of reservations",
            FileUse::Folder(_) => "the folder of journals",
            FileUse::Device(_) => "a device",
            FileUse::Images(_) => "a folder of images",
            FileUse::Config(_) => "the folder of the configuration",
        }
    }
}

/// Returns the folder of a file.
pub(crate) fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Opens a file for reading with the rights of this process. Does not wait for the writer of a FIFO.
///
/// # Errors
/// If the host refuses.
pub fn open_for_reading(path: &Path) -> io::Result<File> {
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32;
    File::options().read(true).custom_flags(flags).open(path)
}
