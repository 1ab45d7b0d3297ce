//! Images of the host: valid file types, and the flags of opening.

use std::fs::{File, FileType, OpenOptions};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;

use mqblk_core::{ImageAccess, ImageOpenError, ImageOpener};
use nix::libc;

/// Opens images by their paths, with the rights of this process.
#[derive(Clone, Copy, Debug)]
pub struct HostImages;

impl ImageOpener for HostImages {
    fn open(&self, path: &Path, access: ImageAccess) -> Result<File, ImageOpenError> {
        // Checked before it is opened: opening a pipe or a tape has side effects.
        let flags = image_flags(std::fs::metadata(path)?.file_type(), access)?;
        Ok(OpenOptions::new().read(true).write(access.write).custom_flags(flags).open(path)?)
    }
}

/// Returns the flags of open(2) for an image of this type, besides those of reading and writing.
///
/// # Errors
/// If a file of this type cannot be an image.
pub fn image_flags(what: FileType, access: ImageAccess) -> Result<i32, ImageOpenError> {
    if !what.is_file() && !what.is_block_device() {
        return Err(ImageOpenError::NotAnImage(file_type_name(what).to_owned()));
    }
    let direct = if access.direct { libc::O_DIRECT } else { 0 };
    // Without O_CREAT it is defined for block devices only (open(2)).
    let exclusive = if access.exclusive && what.is_block_device() { libc::O_EXCL } else { 0 };
    Ok(direct | exclusive)
}

/// Returns a file type in words.
pub fn file_type_name(what: FileType) -> &'static str {
    match what {
        _ if what.is_file() => "a regular file",
        _ if what.is_block_device() => "a block device",
        _ if what.is_dir() => "a directory",
        _ if what.is_char_device() => "a character device",
        _ if what.is_fifo() => "a pipe",
        _ if what.is_socket() => "a socket",
        _ => "something else",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_and_block_devices_are_images() {
        let access = ImageAccess { write: false, direct: true, exclusive: true };
        let file = tempfile::NamedTempFile::new().unwrap();
        let regular = file.as_file().metadata().unwrap().file_type();
        assert_eq!(image_flags(regular, access).unwrap(), libc::O_DIRECT, "O_EXCL is for devices");
        assert_eq!(image_flags(regular, ImageAccess::default()).unwrap(), 0);
        for (path, want) in [("/", "a directory"), ("/dev/null", "a character device")] {
            let error = HostImages.open(Path::new(path), ImageAccess::default()).unwrap_err();
            assert!(matches!(&error, ImageOpenError::NotAnImage(found) if found == want), "{path}: {error}");
        }
        let error = HostImages.open(file.path(), ImageAccess { write: true, ..ImageAccess::default() });
        drop(error.unwrap());
        assert!(matches!(HostImages.open(Path::new(""), access), Err(ImageOpenError::Os(_))));
    }
}
