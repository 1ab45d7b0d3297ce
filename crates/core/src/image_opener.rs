//! Opening of images by storage backends. They use an opener that the program passes to them, because the process that
//! serves guests may not have the right to open files itself. The opener also knows which connections the process may
//! make.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// Access to an image. It is always opened for reading, and never created, truncated or waited for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ImageAccess {
    /// Also for writing.
    pub write: bool,
    /// Bypass the host's page cache (`O_DIRECT`).
    pub direct: bool,
    /// Claim a block device, so that nobody else can (`O_EXCL`). Nothing for a regular file.
    pub exclusive: bool,
}

/// An open image, for another process of the host that opens the same disk. Locks belong to the open file and stay
/// held.
#[derive(Debug)]
pub struct OpenImage {
    /// Its path, as it was opened.
    pub path: PathBuf,
    /// The mode of the open.
    pub access: ImageAccess,
    /// A descriptor of the same open file.
    pub file: OwnedFd,
    /// A part of its content is in the memory of the process that has it open, until [`leave`](crate::Disk::leave).
    pub in_memory: bool,
}

/// Error of opening an image.
#[derive(Debug, thiserror::Error)]
pub enum ImageOpenError {
    /// The host's operating system refused.
    #[error(transparent)]
    Os(#[from] io::Error),
    /// It is neither a regular file nor a block device, but this, in words.
    #[error("{0}")]
    NotAnImage(String),
    /// The opener's rules do not allow it, for this reason.
    #[error("{0}")]
    Refused(String),
}

impl From<ImageOpenError> for io::Error {
    fn from(error: ImageOpenError) -> io::Error {
        match error {
            ImageOpenError::Os(error) => error,
            ImageOpenError::NotAnImage(_) => io::Error::new(io::ErrorKind::InvalidInput, error),
            ImageOpenError::Refused(_) => io::Error::new(io::ErrorKind::PermissionDenied, error),
        }
    }
}

/// Opens images for storage backends. A backend opens files by this only.
pub trait ImageOpener: fmt::Debug + Send + Sync {
    /// Opens a regular file or a block device that exists. Blocks: only for control threads.
    ///
    /// # Errors
    /// If it is neither, the opener's rules do not allow it, or the host refuses.
    fn open(&self, path: &Path, access: ImageAccess) -> Result<File, ImageOpenError>;

    /// Requests to connect to TCP ports of other hosts while the disk is served, not only now.
    ///
    /// # Errors
    /// If the opener's rules do not allow this port.
    fn use_tcp(&self, _port: u16) -> Result<(), ImageOpenError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_the_host_keeps_its_number() {
        let host = ImageOpenError::from(io::Error::from_raw_os_error(16));
        assert_eq!(io::Error::from(host).raw_os_error(), Some(16));
        let refused = io::Error::from(ImageOpenError::Refused("not beneath /images".to_owned()));
        assert_eq!((refused.raw_os_error(), refused.to_string().as_str()), (None, "not beneath /images"));
    }
}
