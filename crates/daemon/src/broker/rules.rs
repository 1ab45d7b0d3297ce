//! The rules of a broker, and opening images by them.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use mqblk_core::{ImageAccess, ImageOpenError};
use mqblk_storage::host_images::image_flags;
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;

use super::walk::find_beneath;

/// Only names a file: nothing with side effects is opened (open(2)).
const PATH_ONLY: OFlags = OFlags::PATH.union(OFlags::CLOEXEC);

/// The images that may be opened.
#[derive(Debug, Default)]
pub(super) struct Rules {
    folders: Vec<AllowedFolder>,
    /// Files that were named before the seal, by their paths and their real paths.
    files: BTreeMap<PathBuf, FileIdentity>,
    awaited: Vec<AwaitedFile>,
    config: Option<ConfigFile>,
    sealed: bool,
}

/// The configuration file, for reading it again: the same file, or one that has replaced it, unless that is a link.
#[derive(Debug)]
struct ConfigFile {
    identity: Option<FileIdentity>,
    place: AwaitedFile,
}

/// A folder; images beneath it may be opened.
#[derive(Debug)]
struct AllowedFolder {
    /// Its path as given, and without symbolic links.
    paths: [PathBuf; 2],
    folder: OwnedFd,
}

/// A file that was named before the seal and did not exist. It is opened once it exists, unless it is a link.
#[derive(Debug)]
struct AwaitedFile {
    path: PathBuf,
    folder: OwnedFd,
}

impl AwaitedFile {
    /// Returns the file at `path`; `None` without a folder.
    fn of(path: &Path) -> Option<AwaitedFile> {
        let folder = find(path.parent()?).ok()?;
        path.file_name()?;
        Some(AwaitedFile { path: path.to_owned(), folder })
    }

    fn find(&self) -> Result<OwnedFd, ImageOpenError> {
        let name = Path::new(self.path.file_name().unwrap_or_default());
        find_beneath(&self.folder, name, false).map_err(|error| match error {
            Errno::XDEV | Errno::LOOP => ImageOpenError::Refused(
                "a link, which was not there at the start of the daemon: the sandbox opens it only if sandbox-allow has the folder that \
                 it leads to"
                    .to_owned(),
            ),
            error => io::Error::from(error).into(),
        })
    }
}

/// The file that a path led to. The path is refused if it leads to another file later: anybody who may write to a
/// folder of it could redirect it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileIdentity {
    file_system: u64,
    inode: u64,
    /// Of a block device.
    device: u64,
}

impl FileIdentity {
    fn of(file: &Metadata) -> FileIdentity {
        FileIdentity { file_system: file.dev(), inode: file.ino(), device: file.rdev() }
    }
}

impl Rules {
    /// Allows a file, or all images beneath a folder.
    ///
    /// # Errors
    /// If it cannot be found, or the rules are sealed.
    pub(super) fn allow(&mut self, path: PathBuf) -> Result<(), ImageOpenError> {
        self.check_unsealed()?;
        let found = find(&path)?;
        let (found, file) = metadata(found)?;
        if file.is_dir() {
            let real = path.canonicalize()?;
            self.folders.push(AllowedFolder { paths: [path, real], folder: found });
        } else {
            self.name(path, &file);
        }
        Ok(())
    }

    /// Remembers the configuration file's path.
    ///
    /// # Errors
    /// If it has no folder, or the rules are sealed.
    pub(super) fn allow_config(&mut self, path: PathBuf) -> Result<(), ImageOpenError> {
        self.check_unsealed()?;
        let place = AwaitedFile::of(&path).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
        // The file may appear before it is read again.
        let identity = path.metadata().ok().map(|file| FileIdentity::of(&file));
        self.config = Some(ConfigFile { identity, place });
        Ok(())
    }

    fn check_unsealed(&self) -> Result<(), ImageOpenError> {
        match self.sealed {
            true => Err(ImageOpenError::Refused("the broker is sealed: it takes no more rules".to_owned())),
            false => Ok(()),
        }
    }

    /// Adds a file by its path.
    fn name(&mut self, path: PathBuf, file: &Metadata) {
        let identity = FileIdentity::of(file);
        if let Ok(real) = path.canonicalize() {
            self.files.insert(real, identity);
        }
        self.files.insert(path, identity);
    }

    /// Accepts no more rules.
    ///
    /// # Errors
    /// If it is sealed already.
    pub(super) fn seal(&mut self) -> Result<(), ImageOpenError> {
        match std::mem::replace(&mut self.sealed, true) {
            false => Ok(()),
            true => Err(ImageOpenError::Refused("the broker is sealed already".to_owned())),
        }
    }

    /// Returns the folder of the configuration file, and the file.
    pub(super) fn config(&self) -> Option<(BorrowedFd<'_>, &Path)> {
        self.config.as_ref().map(|config| (config.place.folder.as_fd(), config.place.path.as_path()))
    }

    /// Returns all folders and files, for the broker's own restrictions.
    pub(super) fn paths(&self) -> impl Iterator<Item = Result<BorrowedFd<'_>, &Path>> {
        let folders = self.folders.iter().map(|folder| Ok(folder.folder.as_fd()));
        let awaited = self.awaited.iter().map(|file| Ok(file.folder.as_fd()));
        folders.chain(awaited).chain(self.files.keys().map(|path| Err(path.as_path())))
    }

    /// Opens an image. Before the seal any image may be opened, which also adds it to the rules: the configuration is
    /// being read.
    ///
    /// # Errors
    /// If the rules do not allow it, it is no image, or the host refuses.
    pub(super) fn open(&mut self, path: &Path, access: ImageAccess) -> Result<File, ImageOpenError> {
        if self.sealed {
            return self.open_allowed(path, access);
        }
        let found = match find(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.awaited.extend(AwaitedFile::of(path));
                return Err(error.into());
            }
            found => found?,
        };
        let file = open_found(&found, access)?;
        self.name(path.to_owned(), &file.metadata()?);
        Ok(file)
    }

    /// As [`open`](Self::open) after the seal: adds no rule.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub(super) fn open_allowed(&self, path: &Path, access: ImageAccess) -> Result<File, ImageOpenError> {
        open_found(&self.find(path)?, access)
    }

    /// Opens the configuration file for reading.
    ///
    /// # Errors
    /// If there is none, or a link has replaced it.
    pub(super) fn open_config(&self) -> Result<File, ImageOpenError> {
        let none = || ImageOpenError::Refused("the daemon was started without a configuration file".to_owned());
        let ConfigFile { identity, place } = self.config.as_ref().ok_or_else(none)?;
        if let Ok(found) = find(&place.path) {
            let (found, file) = metadata(found)?;
            if Some(FileIdentity::of(&file)) == *identity {
                return open_found(&found, ImageAccess::default());
            }
        }
        let found = place.find().map_err(|error| match error {
            ImageOpenError::Refused(_) => {
                ImageOpenError::Refused("a link, which was not there at the start of the daemon".to_owned())
            }
            error => error,
        })?;
        open_found(&found, ImageAccess::default())
    }

    /// Finds an allowed file without opening it.
    fn find(&self, path: &Path) -> Result<OwnedFd, ImageOpenError> {
        let replaced = match self.files.get(path) {
            Some(identity) => {
                let found = find(path)?;
                let (found, file) = metadata(found)?;
                if FileIdentity::of(&file) == *identity {
                    return Ok(found);
                }
                true
            }
            None => false,
        };
        for folder in &self.folders {
            let beneath = folder.paths.iter().find_map(|allowed| path.strip_prefix(allowed).ok());
            if let Some(beneath) = beneath {
                return match folder.find(beneath, true) {
                    Err(ImageOpenError::Refused(why)) => self.find_real(path).ok_or(ImageOpenError::Refused(why)),
                    found => found,
                };
            }
        }
        if let Some(awaited) = self.awaited.iter().find(|file| file.path == path) {
            return awaited.find();
        }
        Err(ImageOpenError::Refused(if replaced {
            "another file than at the start of the daemon: the sandbox opens it only if sandbox-allow has its folder"
                .to_owned()
        } else {
            self.not_allowed()
        }))
    }

    /// Finds a file by its real path if that is beneath a folder: an absolute link may lead from one allowed folder to
    /// another.
    fn find_real(&self, path: &Path) -> Option<OwnedFd> {
        let found = find(path).ok()?;
        let real = rustix::fs::readlinkat(CWD, proc_path(&found), Vec::new()).ok()?;
        let real = PathBuf::from(OsString::from_vec(real.into_bytes()));
        self.folders.iter().find_map(|folder| folder.find(real.strip_prefix(&folder.paths[1]).ok()?, false).ok())
    }

    fn not_allowed(&self) -> String {
        let folders: Vec<_> = self.folders.iter().map(|folder| folder.paths[0].display().to_string()).collect();
        let (shown, more) = folders.split_at(folders.len().min(4));
        let folders = match (shown, more.len()) {
            ([], _) => "none".to_owned(),
            (shown, 0) => shown.join(", "),
            (shown, more) => format!("{} and {more} more", shown.join(", ")),
        };
        format!(
            "the sandbox opens only images that the configuration named at the start, and those beneath the folders of \
             sandbox-allow and incoming-luns: {folders}"
        )
    }
}

impl AllowedFolder {
    /// Finds a file beneath the folder. Neither `..` nor a symbolic link leads out of it.
    fn find(&self, beneath: &Path, follow_links: bool) -> Result<OwnedFd, ImageOpenError> {
        match find_beneath(&self.folder, beneath, follow_links) {
            Ok(found) => Ok(found),
            Err(Errno::XDEV | Errno::LOOP) => Err(ImageOpenError::Refused(format!(
                "it leads out of {}, the folder that sandbox-allow has: name the folder that it leads to there too, and give \
                 the path in that",
                self.paths[0].display()
            ))),
            Err(error) => Err(io::Error::from(error).into()),
        }
    }
}

/// Finds a file by its path alone.
fn find(path: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::io::retry_on_intr(|| rustix::fs::openat(CWD, path, PATH_ONLY, Mode::empty()))?)
}

fn metadata(found: OwnedFd) -> io::Result<(OwnedFd, Metadata)> {
    let found = File::from(found);
    let metadata = found.metadata()?;
    Ok((found.into(), metadata))
}

/// Returns the link that leads to a file of this process.
fn proc_path(file: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Opens exactly the file that was found (`O_PATH`), even if its path leads elsewhere by now.
fn open_found(found: &OwnedFd, access: ImageAccess) -> Result<File, ImageOpenError> {
    let what = File::from(found.try_clone()?).metadata()?.file_type();
    let mode = if access.write { OFlags::RDWR } else { OFlags::RDONLY };
    let flags = mode | OFlags::CLOEXEC | OFlags::from_bits_retain(image_flags(what, access)?.cast_unsigned());
    let path = proc_path(found);
    let opened = rustix::io::retry_on_intr(|| rustix::fs::openat(CWD, path.as_str(), flags, Mode::empty()));
    Ok(opened.map_err(io::Error::from)?.into())
}
