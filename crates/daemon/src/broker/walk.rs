//! Finds a file beneath a folder, component by component. openat2(2) with RESOLVE_BENEATH would do this in one call,
//! but some service managers block it: systemd answers it with ENOSYS for RestrictSUIDSGID=yes.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Component, Path};

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::{Errno, retry_on_intr};

/// Only names a file or a symbolic link: nothing with side effects is opened (open(2)).
const NAMED: OFlags = OFlags::PATH.union(OFlags::CLOEXEC).union(OFlags::NOFOLLOW);

/// Maximum number of followed symbolic links (path_resolution(7)), and of nested folders: each stays open meanwhile.
const LINKS: usize = 40;
const DEPTH: usize = 256;

/// Finds the file at `path` in `folder` without opening it. `follow`: follows symbolic links.
///
/// # Errors
/// XDEV if the path, or a link on it, leads out of the folder; LOOP for too many links, or for any link without
/// `follow`; NAMETOOLONG for too many folders; otherwise the host's.
pub(super) fn find_beneath(folder: &OwnedFd, path: &Path, follow: bool) -> Result<OwnedFd, Errno> {
    let mut open: Vec<OwnedFd> = Vec::new();
    let mut rest = components(path)?;
    let mut links = 0;
    while let Some(name) = rest.pop() {
        if name == ".." {
            // Not by the name `..`: the folder may be moved meanwhile.
            open.pop().ok_or(Errno::XDEV)?;
            continue;
        }
        let found = named(at(folder, &open), &name)?;
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&found)?.st_mode);
        if kind == FileType::Symlink {
            links += 1;
            if !follow || links > LINKS {
                return Err(Errno::LOOP);
            }
            let target = rustix::fs::readlinkat(&found, "", Vec::new())?;
            rest.extend(components(Path::new(&OsString::from_vec(target.into_bytes())))?);
        } else if open.len() == DEPTH {
            return Err(Errno::NAMETOOLONG);
        } else if !rest.is_empty() && kind != FileType::Directory {
            return Err(Errno::NOTDIR);
        } else {
            open.push(found);
        }
    }
    match open.pop() {
        Some(found) => Ok(found),
        None => named(folder.as_fd(), OsStr::new(".")),
    }
}

/// The folder that the walk has reached.
fn at<'a>(folder: &'a OwnedFd, open: &'a [OwnedFd]) -> BorrowedFd<'a> {
    open.last().unwrap_or(folder).as_fd()
}

fn named(folder: BorrowedFd<'_>, name: &OsStr) -> Result<OwnedFd, Errno> {
    retry_on_intr(|| rustix::fs::openat(folder, name, NAMED, Mode::empty()))
}

/// Returns the components of a relative path, the first one last.
fn components(path: &Path) -> Result<Vec<OsString>, Errno> {
    let mut names = Vec::new();
    for component in path.components().rev() {
        match component {
            Component::Normal(name) => names.push(name.to_owned()),
            Component::ParentDir => names.push("..".into()),
            Component::CurDir => {}
            Component::RootDir | Component::Prefix(_) => return Err(Errno::XDEV),
        }
    }
    Ok(names)
}
