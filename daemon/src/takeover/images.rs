//! Open images of the predecessor. Their locks are those of the open files, so no moment is without them.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mqblk_core::{ImageAccess, ImageOpenError, ImageOpener, OpenImage};

use super::OfferedImage;

/// Opens images of the predecessor as it has them open, and others by another opener.
#[derive(Debug)]
pub(crate) struct HandedImages {
    images: Vec<OpenImage>,
    others: Arc<dyn ImageOpener>,
}

impl HandedImages {
    pub(crate) fn new(images: Vec<OpenImage>, others: Arc<dyn ImageOpener>) -> HandedImages {
        HandedImages { images, others }
    }
}

impl ImageOpener for HandedImages {
    fn open(&self, path: &Path, access: ImageAccess) -> Result<File, ImageOpenError> {
        let absolute = absolute(path);
        match self.images.iter().find(|image| image.path == absolute && image.access == access) {
            Some(image) => Ok(File::from(image.file.try_clone()?)),
            None => self.others.open(path, access),
        }
    }

    fn use_tcp(&self, port: u16) -> Result<(), ImageOpenError> {
        self.others.use_tcp(port)
    }
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// Returns what is offered of an image, and its descriptor.
pub(super) fn offered(image: OpenImage) -> (OfferedImage, OwnedFd) {
    let OpenImage { path, access: ImageAccess { write, direct, exclusive }, file } = image;
    (OfferedImage { path: absolute(&path), write, direct, exclusive }, file)
}

/// Returns an image that was offered.
pub(super) fn received(image: OfferedImage, file: OwnedFd) -> OpenImage {
    let OfferedImage { path, write, direct, exclusive } = image;
    OpenImage { path, access: ImageAccess { write, direct, exclusive }, file }
}
