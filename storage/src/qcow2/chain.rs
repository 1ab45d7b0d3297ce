//! Opening an image with its backing files and data files: by the opener, by the rule `backing=`, with locks, and checked.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use imago::file::File as ImageFile;
use imago::qcow2::Qcow2;
use imago::raw::Raw;
use imago::{DenyImplicitOpenGate, FormatAccess, FormatDriverBuilder as _, StorageOpenOptions};
use mqblk_core::settings::{SettingError, Settings};
use mqblk_core::{ImageAccess, ImageOpener};

use super::access::{NamedFiles, named_path};
use super::check::{TableError, check_tables};
use super::direct::Direct;
use super::header::{self, Header};
use super::repair::repair_refcounts;
use crate::file::lock::{self, LockError};

/// Most images of a chain, the disk's own among them. Each costs descriptors and a look-up for what is not in those before.
pub(super) const MAX_CHAIN: usize = 64;

/// An open image with all that it is made of.
pub(super) struct Chain {
    pub(super) format: FormatAccess<ImageFile>,
    pub(super) header: Header,
    /// The disk's own image, and its external data file.
    pub(super) file: File,
    pub(super) data: Option<File>,
    /// Requests may go past the library.
    pub(super) direct: Option<Arc<Direct>>,
}

/// One image of a chain.
struct Layer {
    path: PathBuf,
    file: File,
    /// `None`: raw.
    header: Option<Header>,
    data: Option<(PathBuf, File)>,
}

/// What opening needs all the way.
pub(super) struct ChainOpener<'a> {
    pub(super) settings: &'a Settings,
    pub(super) opener: &'a Arc<dyn ImageOpener>,
    pub(super) named: &'a NamedFiles,
    /// Take locks.
    pub(super) lock: bool,
    /// Let requests go past the library.
    pub(super) direct: bool,
}

impl ChainOpener<'_> {
    /// Opens the image at `path`, for writing too unless `read_only`.
    ///
    /// # Errors
    /// If a file cannot be opened, is not allowed, in use or damaged. The error names the file.
    pub(super) fn open(&self, path: &Path, read_only: bool) -> Result<Chain, SettingError> {
        let file = self.open_file("path", path, !read_only)?;
        let mut seen = HashSet::from([identity(&file).map_err(|error| self.refused("path", path, error))?]);
        let first = self.layer("path", path.to_owned(), file, true, read_only, &mut seen)?;
        let mut layers = vec![first];
        while let Some((path, format)) = self.backing_of(layers.last())? {
            if layers.len() == MAX_CHAIN {
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
            layers.push(self.layer("backing", path, file, is_qcow2, true, &mut seen)?);
        }
        self.build(layers, read_only)
    }

    fn refused(&self, key: &str, path: &Path, why: impl std::fmt::Display) -> SettingError {
        self.settings.refused(key, format!("{path:?} ({why})"), "a file that can be read")
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

    /// Opens a file that an image names, if the rule allows it.
    fn open_named(&self, path: &Path, write: bool) -> Result<File, SettingError> {
        let forbidden = || {
            let found = format!("{path:?} (named by the image, with backing={})", self.named.text());
            let expected = format!("leave for it: backing={}, or backing=allow for all files", path.display());
            self.settings.refused("backing", found, expected)
        };
        // Before it is opened, as that alone may have effects; and after, as the path may lead elsewhere by then.
        if !self.named.allow(path) {
            return Err(forbidden());
        }
        let file = self.open_file("backing", path, write)?;
        if self.named.allow_opened(&file) { Ok(file) } else { Err(forbidden()) }
    }

    /// Reads the header of an image, and opens its data file.
    fn layer(
        &self,
        key: &'static str,
        path: PathBuf,
        file: File,
        is_qcow2: bool,
        read_only: bool,
        seen: &mut HashSet<(u64, u64)>,
    ) -> Result<Layer, SettingError> {
        if !is_qcow2 {
            return Ok(Layer { path, file, header: None, data: None });
        }
        let kind = file.metadata().map_err(|error| self.refused(key, &path, error))?;
        if kind.file_type().is_block_device() {
            let found = format!("{path:?} (a block device)");
            return Err(self.settings.refused(key, found, "a qcow2 image in a regular file"));
        }
        let header = Header::read(&file, kind.len());
        let mut header = header
            .map_err(|error| self.settings.refused(key, format!("{path:?} ({})", error.found), error.expected))?;
        self.check(key, &path, &file, &mut header, read_only)?;
        let data = if header.external_data { Some(self.open_data(&path, &header, read_only, seen)?) } else { None };
        Ok(Layer { path, file, header: Some(header), data })
    }

    /// Repairs an image that was not closed, and checks its tables.
    fn check(
        &self,
        key: &str,
        path: &Path,
        file: &File,
        header: &mut Header,
        read_only: bool,
    ) -> Result<(), SettingError> {
        let len = || file.metadata().map(|file| file.len()).map_err(|error| self.refused(key, path, error));
        let damaged = |error| match error {
            TableError::Io(error) => self.refused(key, path, error),
            TableError::Damaged(what) => {
                let found = format!("{path:?} (damaged: {what})");
                self.settings.refused(key, found, "an intact image; `qemu-img check -r all` repairs one")
            }
        };
        if header.is_dirty() && read_only {
            let found = format!("{path:?} (the dirty bit: it was not closed, its refcounts may be missing)");
            let expected =
                "an image that was closed; serving it without readonly=on repairs it, and `qemu-img check -r all`";
            return Err(self.settings.refused(key, found, expected));
        }
        // Version 2 has no dirty bit.
        if !read_only && (header.is_dirty() || header.version == 2) {
            let repaired = repair_refcounts(file, header, len()?).map_err(damaged)?;
            if repaired > 0 || header.is_dirty() {
                tracing::warn!("{}: was not closed; {repaired} refcounts repaired", path.display());
            }
        }
        let checked = check_tables(file, header, len()?, !read_only).map_err(damaged)?;
        (header.writes_free, header.free) = (checked.writes_free, checked.free);
        if header.is_dirty() {
            header.write_dirty(file, false).map_err(|error| self.refused(key, path, error))?;
            header.incompatible &= !1;
        }
        if header.bitmaps && !read_only {
            tracing::warn!("{}: its dirty bitmaps end here: a write makes them invalid", path.display());
        }
        Ok(())
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
    fn backing_of(&self, layer: Option<&Layer>) -> Result<Option<(PathBuf, Option<String>)>, SettingError> {
        let Some(Layer { path, header: Some(header), .. }) = layer else { return Ok(None) };
        let Some(name) = &header.backing else { return Ok(None) };
        Ok(Some((self.named_path(path, name)?, header.backing_format.clone())))
    }

    /// Gives the files to the library, the last one first.
    fn build(&self, layers: Vec<Layer>, read_only: bool) -> Result<Chain, SettingError> {
        let direct = self.direct(&layers, read_only)?;
        let mut below: Option<FormatAccess<ImageFile>> = None;
        for (index, layer) in layers.into_iter().enumerate().rev() {
            let write = index == 0 && !read_only;
            let backing = below.take();
            let built = catch_unwind(AssertUnwindSafe(|| build(&layer, write, backing)));
            let key = if index == 0 { "path" } else { "backing" };
            let built = built.unwrap_or_else(|_| Err(io::Error::other("the library panicked")));
            let Layer { path, file, header, data } = layer;
            let format = built.map_err(|error| self.refused(key, &path, error))?;
            match header {
                Some(header) if index == 0 => {
                    let data = data.map(|(_, file)| file);
                    return Ok(Chain { format, header, file, data, direct });
                }
                _ => below = Some(format),
            }
        }
        Err(self.settings.refused("path", "no image", "a qcow2 image"))
    }

    /// Returns what requests need that go past the library.
    fn direct(&self, layers: &[Layer], read_only: bool) -> Result<Option<Arc<Direct>>, SettingError> {
        let Some(Layer { path, header: Some(header), .. }) = layers.first().filter(|_| self.direct) else {
            return Ok(None);
        };
        // The one with the data of each. Of an image with a data file the image itself has tables only.
        let with_data = layers.iter().map(|Layer { path, file, data, .. }| match data {
            Some((path, file)) => (path.clone(), file),
            None => (path.clone(), file),
        });
        let (files, shape) = (with_data.collect::<Vec<_>>(), (header.size, header.cluster_bits));
        let direct = Direct::new(&files, shape, read_only);
        Ok(direct.map_err(|error| self.refused("path", path, error))?.map(Arc::new))
    }
}

/// Opens an image with the library, which gets descriptors of its own with the same locks, and the paths for its errors.
fn build(
    Layer { path, file, header, data }: &Layer,
    write: bool,
    backing: Option<FormatAccess<ImageFile>>,
) -> io::Result<FormatAccess<ImageFile>> {
    let open = |path: &Path, file: &File| {
        ImageFile::from_open_file(file.try_clone()?, StorageOpenOptions::new().filename(path).write(write))
    };
    let file = open(path, file)?;
    let deny = DenyImplicitOpenGate::default();
    if header.is_some() {
        let data = data.as_ref().map(|(path, file)| open(path, file)).transpose()?;
        let image = Qcow2::<ImageFile>::builder(file).write(write).backing(backing).data_file(data);
        return Ok(FormatAccess::new(image.open(deny)?));
    }
    Ok(FormatAccess::new(Raw::builder(file).write(false).open(deny)?))
}

/// Which file it is.
fn identity(file: &File) -> io::Result<(u64, u64)> {
    let data = file.metadata()?;
    Ok(if data.file_type().is_block_device() { (u64::MAX, data.rdev()) } else { (data.dev(), data.ino()) })
}
