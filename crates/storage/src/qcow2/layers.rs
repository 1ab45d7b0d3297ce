//! The open files of an image, and their loading by the library.
//!
//! The files are open and locked while the disk is open. The library's memory is loaded from them, dropped and loaded
//! again as the disk passes from one process to another ([`super::passing`]).

use std::fs::File;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use imago::file::File as ImageFile;
use imago::qcow2::Qcow2;
use imago::raw::Raw;
use imago::{DenyImplicitOpenGate, FormatAccess, FormatDriverBuilder as _, StorageOpenOptions};
use mqblk_core::settings::{SettingError, Settings};
use mqblk_core::{ImageAccess, OpenImage};

use super::check::{CheckedTables, TableError, check_tables};
use super::direct::Direct;
use super::header::Header;
use super::order::DataOrder;
use super::repair::repair_refcounts;
use super::tables::TableWriter;

/// One image of a chain.
pub(super) struct Layer {
    pub(super) path: PathBuf,
    pub(super) file: File,
    /// `None`: raw.
    pub(super) header: Option<Header>,
    /// The external data file.
    pub(super) data: Option<(PathBuf, File)>,
}

/// An image with all its files.
pub(super) struct ChainFiles {
    /// For messages.
    pub(super) settings: Settings,
    pub(super) own: Layer,
    /// The disk's own header from the opening of the file. Only its constant fields are used.
    pub(super) header: Header,
    pub(super) below: Vec<Layer>,
    pub(super) read_only: bool,
}

/// The library's image in memory, and its state.
pub(super) struct Loaded {
    pub(super) format: FormatAccess<ImageFile>,
    /// True if a write can free a cluster.
    pub(super) writes_free: bool,
    pub(super) tables: TableWriter,
    pub(super) order: DataOrder,
    /// True if a write has failed: its cluster may have been freed again.
    pub(super) has_failed: AtomicBool,
    /// True if the file has the dirty bit.
    pub(super) is_marked: AtomicBool,
}

impl ChainFiles {
    fn layers(&self) -> impl Iterator<Item = &Layer> {
        std::iter::once(&self.own).chain(&self.below)
    }

    /// Loads the files with the library, the last one first. Repairs an image that was not closed, and checks its
    /// tables. `is_passed`: another process has left it with its dirty bit.
    ///
    /// # Errors
    /// If the image is damaged, has been replaced, or cannot be read. The error names the file.
    pub(super) fn load(&self, is_passed: bool) -> Result<Loaded, SettingError> {
        let Layer { path, file, .. } = &self.own;
        let header = read_header(&self.settings, "path", path, file)?;
        if !header.is_same_disk(&self.header) {
            let found = format!("{path:?} (its header has changed while it was open)");
            return Err(self.settings.refused("path", found, "an image that only one process serves at a time"));
        }
        let checked = check(&self.settings, "path", (path, file), &header, self.read_only)?;
        let is_marked = header.is_dirty() && is_passed;
        let failed = |error| refused(&self.settings, "path", path, error);
        if header.is_dirty() && !is_passed {
            tracing::warn!("{}: was not closed", path.display());
            header.write_dirty(file, false).map_err(failed)?;
        }
        // The library refuses an image with the bit. The disk keeps it unless a sync happens right now.
        if is_marked {
            header.set_dirty(file, false).map_err(failed)?;
        }
        let format = self.build_all();
        if is_marked {
            header.set_dirty(file, true).map_err(failed)?;
        }
        let format = format?;
        let order = DataOrder::new(&header, checked.free);
        let (tables, has_failed) = (TableWriter::default(), AtomicBool::new(false));
        let is_marked = AtomicBool::new(is_marked);
        Ok(Loaded { format, writes_free: checked.writes_free, tables, order, has_failed, is_marked })
    }

    fn build_all(&self) -> Result<FormatAccess<ImageFile>, SettingError> {
        let mut below: Option<FormatAccess<ImageFile>> = None;
        for layer in self.below.iter().rev() {
            below = Some(self.build("backing", layer, below.take())?);
        }
        self.build("path", &self.own, below)
    }

    fn build(
        &self,
        key: &str,
        layer: &Layer,
        backing: Option<FormatAccess<ImageFile>>,
    ) -> Result<FormatAccess<ImageFile>, SettingError> {
        let write = key == "path" && !self.read_only;
        let built = catch_unwind(AssertUnwindSafe(|| build(layer, write, backing)));
        let built = built.unwrap_or_else(|_| Err(io::Error::other("the library panicked")));
        built.map_err(|error| refused(&self.settings, key, &layer.path, error))
    }

    /// Returns the data for requests that bypass the library. `None`: not possible.
    ///
    /// # Errors
    /// If the types of the files cannot be read.
    pub(super) fn direct(&self) -> Result<Option<Direct>, SettingError> {
        // The data's file of each. An image with a data file contains only tables itself.
        let with_data = self.layers().map(|Layer { path, file, data, .. }| match data {
            Some((path, file)) => (path.clone(), file),
            None => (path.clone(), file),
        });
        let shape = (self.header.size, self.header.cluster_bits);
        let direct = Direct::new(&with_data.collect::<Vec<_>>(), shape, self.read_only);
        direct.map_err(|error| refused(&self.settings, "path", &self.own.path, error))
    }

    /// Returns the files for another process.
    pub(super) fn for_another(&self) -> io::Result<Vec<OpenImage>> {
        let mut images = Vec::new();
        for (number, layer) in self.layers().enumerate() {
            let write = number == 0 && !self.read_only;
            let data = layer.data.as_ref().map(|(path, file)| (path, file));
            for (path, file) in std::iter::once((&layer.path, &layer.file)).chain(data) {
                let access = ImageAccess { write, ..ImageAccess::default() };
                let file = file.try_clone()?.into();
                images.push(OpenImage { path: path.clone(), access, file, in_memory: write });
            }
        }
        Ok(images)
    }
}

/// Repairs the refcounts of an image that was not closed, and checks its tables.
///
/// # Errors
/// If it is damaged. The error names the file.
pub(super) fn check(
    settings: &Settings,
    key: &'static str,
    (path, file): (&Path, &File),
    header: &Header,
    read_only: bool,
) -> Result<CheckedTables, SettingError> {
    let len = || file.metadata().map(|file| file.len()).map_err(|error| refused(settings, key, path, error));
    let damaged = |error| match error {
        TableError::Io(error) => refused(settings, key, path, error),
        TableError::Damaged(what) => {
            let found = format!("{path:?} (damaged: {what})");
            settings.refused(key, found, "an intact image; `qemu-img check -r all` repairs one")
        }
    };
    if header.is_dirty() && read_only {
        let found = format!("{path:?} (the dirty bit: it was not closed, its refcounts may be missing)");
        let expected =
            "an image that was closed; serving it without readonly=on repairs it, and `qemu-img check -r all`";
        return Err(settings.refused(key, found, expected));
    }
    // Version 2 has no dirty bit.
    if !read_only && (header.is_dirty() || header.version == 2) {
        let repaired = repair_refcounts(file, header, len()?).map_err(damaged)?;
        if repaired > 0 {
            tracing::warn!("{}: {repaired} refcounts were missing, and are repaired", path.display());
        }
    }
    let checked = check_tables(file, header, len()?, !read_only).map_err(damaged)?;
    if header.bitmaps && !read_only {
        tracing::warn!("{}: its dirty bitmaps end here: a write makes them invalid", path.display());
    }
    Ok(checked)
}

/// Reads the header of an image.
pub(super) fn read_header(
    settings: &Settings,
    key: &'static str,
    path: &Path,
    file: &File,
) -> Result<Header, SettingError> {
    let len = file.metadata().map_err(|error| refused(settings, key, path, error))?.len();
    let header = Header::read(file, len);
    header.map_err(|error| settings.refused(key, format!("{path:?} ({})", error.found), error.expected))
}

/// Returns the error of a file that cannot be read.
pub(super) fn refused(settings: &Settings, key: &str, path: &Path, why: impl std::fmt::Display) -> SettingError {
    settings.refused(key, format!("{path:?} ({why})"), "a file that can be read")
}

/// Opens an image with the library, which gets its own descriptors with the same locks, and the paths for its errors.
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
