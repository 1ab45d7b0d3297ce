//! `base=BASE,overlay=IMAGE`: creates an image with a backing file, if it does not exist.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use imago::FormatCreateBuilder as _;
use imago::file::File as ImageFile;
use imago::qcow2::Qcow2;
use mqblk_core::settings::{SettingError, Settings};
use mqblk_core::{ImageAccess, ImageOpenError, ImageOpener};

use super::access::real_path;
use super::header::{self, Header};

/// Creates the image at `path` with the size of the image at `base`, its backing file. Does nothing if there is a file
/// at `path`. The image is complete and durable before it has its name, and no file is replaced.
///
/// # Errors If the base cannot be read, or the image cannot be created.
pub(super) fn create_overlay(
    settings: &Settings,
    opener: &Arc<dyn ImageOpener>,
    base: &Path,
    path: &Path,
) -> Result<(), SettingError> {
    match opener.open(path, ImageAccess::default()) {
        // All other errors are reported when it is opened to be served.
        Err(ImageOpenError::Os(error)) if error.kind() == io::ErrorKind::NotFound => {}
        _ => return Ok(()),
    }
    let real = real_path(base);
    let (size, format) = size_and_format(settings, opener, base)?;
    let Some(name) = real.to_str() else {
        return Err(settings.error("base", format!("{base:?}"), "a path in UTF-8, as images name it"));
    };
    create(path, size, name, format).map_err(|error| {
        let expected = format!(
            "a folder in which images can be made (in the sandbox none is, once the daemon serves: \
             `qemu-img create -f qcow2 -F {format} -b {name} {}` makes it)",
            path.display()
        );
        settings.error("path", format!("{path:?} ({error})"), expected)
    })?;
    tracing::info!("{}: made, {size} bytes, with {name} ({format}) beneath", path.display());
    Ok(())
}

fn size_and_format(
    settings: &Settings,
    opener: &Arc<dyn ImageOpener>,
    base: &Path,
) -> Result<(u64, &'static str), SettingError> {
    let refused = |why: String| settings.error("base", format!("{base:?} ({why})"), "a raw or qcow2 image");
    let mut file = opener.open(base, ImageAccess::default()).map_err(|error| refused(error.to_string()))?;
    let qcow2 = header::has_magic(&file).map_err(|error| refused(error.to_string()))?;
    let len = io::Seek::seek(&mut file, io::SeekFrom::End(0)).map_err(|error| refused(error.to_string()))?;
    if !qcow2 {
        return Ok((len.next_multiple_of(512), "raw"));
    }
    let header = Header::read(&file, len).map_err(|error| refused(error.found))?;
    Ok((header.size, "qcow2"))
}

fn create(path: &Path, size: u64, base: &str, format: &str) -> io::Result<()> {
    let folder = path.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."));
    let temporary = Temporary::create(folder, path)?;
    let file = ImageFile::try_from(temporary.file.try_clone()?)?;
    Qcow2::<ImageFile>::create_builder(file).size(size).backing(base.to_owned(), format.to_owned()).create()?;
    temporary.file.sync_all()?;
    // Never replaces a file, unlike a rename.
    match std::fs::hard_link(&temporary.path, path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
        linked => linked?,
    }
    File::open(folder)?.sync_all()
}

/// A file that is removed by its name on drop.
struct Temporary {
    path: PathBuf,
    file: File,
}

impl Temporary {
    fn create(folder: &Path, path: &Path) -> io::Result<Temporary> {
        let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_string_lossy().into_owned();
        let mut error = io::ErrorKind::AlreadyExists.into();
        for attempt in 0..100 {
            let path = folder.join(format!(".{name}.{}-{attempt}.tmp", std::process::id()));
            match OpenOptions::new().read(true).write(true).create_new(true).open(&path) {
                Ok(file) => return Ok(Temporary { path, file }),
                Err(found) if found.kind() == io::ErrorKind::AlreadyExists => error = found,
                Err(found) => return Err(found),
            }
        }
        Err(error)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}
