//! Opening the files of an image, its backing files and data files: by the opener, by the rule `backing=`, and with
//! locks.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mqblk_core::settings::{SettingError, Settings};
use mqblk_core::{ImageAccess, ImageOpener};

use super::access::{NamedFiles, named_path};
use super::header::{self, Header};
use super::layers::{ChainFiles, Layer, check, read_header, refused};
use crate::file::lock::{self, LockError};

/// Most images of a chain, the disk's own among them. Each costs descriptors, and a lookup of data that is not in the
/// earlier ones.
pub(super) const MAX_CHAIN: usize = 64;

/// Options of opening a chain.
pub(super) struct ChainOpener<'a> {
    pub(super) settings: &'a Settings,
    pub(super) opener: &'a Arc<dyn ImageOpener>,
    pub(super) named: &'a NamedFiles,
    /// True to take locks.
    pub(super) lock: bool,
}

impl ChainOpener<'_> {
    /// Opens the files of the image at `path`, its own also for writing unless `read_only`. Reads the headers, and
    /// checks the images beneath.
    ///
    /// # Errors
    /// If a file cannot be opened, is not allowed, in use or damaged. The error names the file.
    pub(super) fn open(&self, path: &Path, read_only: bool) -> Result<ChainFiles, SettingError> {
        let file = self.open_file("path", path, !read_only)?;
        let mut seen = HashSet::from([identity(&file).map_err(|error| self.refused("path", path, error))?]);
        let header = self.header("path", path, &file)?;
        let own = self.layer(path.to_owned(), file, Some(header.clone()), read_only, &mut seen)?;
        let mut below: Vec<Layer> = Vec::new();
        while let Some((path, format)) = self.backing_of(below.last().unwrap_or(&own))? {
            if below.len() + 1 == MAX_CHAIN {
                let found = format!("more than {MAX_CHAIN} images, {path:?} the next");
                return Err(self.settings.refused("backing", found, "a shorter chain (`qemu-img rebase` or `commit`)"));
            }
            let file = self.open_named(&path, false)?;
            if !seen.insert(identity(&file).map_err(|error| self.refused("backing", &path, error))?) {
                let found = format!("{path:?} (it is in the chain before)");
                return Err(self.settings.refused("backing", found, "a chain that ends"));
            }
            let is_qcow2 = match format.as_deref() {
                Some("raw" | "file" | "host_device") => false,
                Some("qcow2") => true,
                None => header::has_magic(&file).map_err(|error| self.refused("backing", &path, error))?,
                Some(other) => {
                    let found = format!("{path:?} (format {other:?})");
                    return Err(self.settings.refused("backing", found, "a raw or qcow2 image"));
                }
            };
            let header = is_qcow2.then(|| self.header("backing", &path, &file)).transpose()?;
            if let Some(header) = &header {
                check(self.settings, "backing", (&path, &file), header, true)?;
            }
            below.push(self.layer(path, file, header, true, &mut seen)?);
        }
        Ok(ChainFiles { settings: self.settings.clone(), own, header, below, read_only })
    }

    fn refused(&self, key: &str, path: &Path, why: impl std::fmt::Display) -> SettingError {
        refused(self.settings, key, path, why)
    }

    /// Opens and locks a file.
    fn open_file(&self, key: &str, path: &Path, write: bool) -> Result<File, SettingError> {
        let expected = if write {
            "an existing image that this user may write; readonly=on serves it without writing"
        } else {
            "an existing image that this user may read"
        };
        let opened = self.opener.open(path, ImageAccess { write, ..ImageAccess::default() });
        let file = opened.map_err(|error| self.settings.refused(key, format!("{path:?} ({error})"), expected))?;
        if self.lock {
            match lock::lock(path, &file, !write) {
                Ok(()) => {}
                Err(LockError::InUse) => {
                    let expected = if write { "an image that nobody else uses" } else { "an image that nobody writes" };
                    return Err(self.settings.refused(key, format!("{path:?} (in use by another process)"), expected));
                }
                Err(LockError::Unsupported(error)) => tracing::warn!(
                    "{}: {}: the file system has no locks ({error}); nothing keeps a second writer out",
                    self.settings.subject(),
                    path.display()
                ),
            }
        }
        Ok(file)
    }

    /// Opens a file named in an image, if the rule allows it.
    fn open_named(&self, path: &Path, write: bool) -> Result<File, SettingError> {
        let forbidden = || {
            let found = format!("{path:?} (named by the image, with backing={})", self.named.text());
            let expected = format!("leave for it: backing={}, or backing=allow for all files", path.display());
            self.settings.refused("backing", found, expected)
        };
        // Before opening, which may have effects, and after it, since the path may lead elsewhere then.
        if !self.named.allow(path) {
            return Err(forbidden());
        }
        let file = self.open_file("backing", path, write)?;
        if self.named.allow_opened(&file) { Ok(file) } else { Err(forbidden()) }
    }

    /// Reads the header of an image.
    fn header(&self, key: &'static str, path: &Path, file: &File) -> Result<Header, SettingError> {
        let kind = file.metadata().map_err(|error| self.refused(key, path, error))?;
        if kind.file_type().is_block_device() {
            let found = format!("{path:?} (a block device)");
            return Err(self.settings.refused(key, found, "a qcow2 image in a regular file"));
        }
        read_header(self.settings, key, path, file)
    }

    /// Opens the data file of an image, if it has one.
    fn layer(
        &self,
        path: PathBuf,
        file: File,
        header: Option<Header>,
        read_only: bool,
        seen: &mut HashSet<(u64, u64)>,
    ) -> Result<Layer, SettingError> {
        let data = match &header {
            Some(header) if header.external_data => Some(self.open_data(&path, header, read_only, seen)?),
            _ => None,
        };
        Ok(Layer { path, file, header, data })
    }

    fn open_data(
        &self,
        image: &Path,
        header: &Header,
        read_only: bool,
        seen: &mut HashSet<(u64, u64)>,
    ) -> Result<(PathBuf, File), SettingError> {
        if header.raw_data_file && !read_only {
            let found = format!("{image:?} (data_file_raw=on: the data file must stay a raw image)");
            return Err(self.settings.refused("path", found, "readonly=on, or `qemu-img amend -o data_file_raw=off`"));
        }
        let Some(name) = &header.data_file else {
            let found = format!("{image:?} (its external data file has no name in it)");
            return Err(self.settings.refused("path", found, "an image that names its data file"));
        };
        let path = self.named_path(image, name)?;
        let file = self.open_named(&path, !read_only)?;
        let regular = file.metadata().is_ok_and(|what| what.is_file());
        let again = identity(&file).is_ok_and(|identity| !seen.insert(identity));
        if !regular || again {
            let found = format!("{path:?} (the data file of {image:?})");
            return Err(self.settings.refused("backing", found, "a regular file that nothing else of the disk is"));
        }
        Ok((path, file))
    }

    fn named_path(&self, image: &Path, name: &str) -> Result<PathBuf, SettingError> {
        named_path(image, name).ok_or_else(|| {
            self.settings.refused("backing", format!("{name:?} (named by {image:?})"), "the path of a file")
        })
    }

    /// Returns the path and the format of an image's backing file.
    fn backing_of(&self, layer: &Layer) -> Result<Option<(PathBuf, Option<String>)>, SettingError> {
        let Layer { path, header: Some(header), .. } = layer else { return Ok(None) };
        let Some(name) = &header.backing else { return Ok(None) };
        Ok(Some((self.named_path(path, name)?, header.backing_format.clone())))
    }
}

/// Returns the identity of a file.
fn identity(file: &File) -> io::Result<(u64, u64)> {
    let data = file.metadata()?;
    Ok(if data.file_type().is_block_device() { (u64::MAX, data.rdev()) } else { (data.dev(), data.ino()) })
}
