//! Open images of the predecessor. Their locks are those of the open files, so no moment is without them.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use mqblk_core::lock::RankedMutex;
use mqblk_core::{ImageAccess, ImageOpenError, ImageOpener, OpenImage};

use super::OfferedImage;

/// Open images of the predecessor, until the takeover has ended: a descriptor that stays open keeps a claim that was given up.
pub(crate) type OpenImages = Arc<RankedMutex<Vec<OpenImage>>>;

/// Returns the open images that were received.
pub(super) fn open_images(images: Vec<OpenImage>) -> OpenImages {
    Arc::new(RankedMutex::leaf(images))
}

/// Opens images of the predecessor as it has them open, and others by another opener.
#[derive(Debug)]
pub(crate) struct HandedImages {
    images: OpenImages,
    others: Arc<dyn ImageOpener>,
}

impl HandedImages {
    pub(crate) fn new(images: OpenImages, others: Arc<dyn ImageOpener>) -> HandedImages {
        HandedImages { images, others }
    }
}

impl ImageOpener for HandedImages {
    fn open(&self, path: &Path, access: ImageAccess) -> Result<File, ImageOpenError> {
        let images = self.images.lock();
        let found = images.iter().find(|image| image.access == access && is_same(image, path));
        if let Some(image) = found {
            return Ok(File::from(image.file.try_clone()?));
        }
        drop(images);
        self.others.open(path, access)
    }

    fn use_tcp(&self, port: u16) -> Result<(), ImageOpenError> {
        self.others.use_tcp(port)
    }
}

/// Returns true if the image was opened by this path, or is the file there. Another file may have taken the path meanwhile.
fn is_same(image: &OpenImage, path: &Path) -> bool {
    let identity = |stat: rustix::fs::Stat| (stat.st_dev, stat.st_ino);
    let (open, there) = (rustix::fs::fstat(&image.file), rustix::fs::stat(path));
    image.path == path || matches!((open, there), (Ok(open), Ok(there)) if identity(open) == identity(there))
}

/// Returns what is offered of an image, and its descriptor.
pub(super) fn offered(image: OpenImage) -> (OfferedImage, OwnedFd) {
    let OpenImage { path, access: ImageAccess { write, direct, exclusive }, file } = image;
    (OfferedImage { path, write, direct, exclusive }, file)
}

/// Returns an image that was offered.
pub(super) fn received(image: OfferedImage, file: OwnedFd) -> OpenImage {
    let OfferedImage { path, write, direct, exclusive } = image;
    OpenImage { path, access: ImageAccess { write, direct, exclusive }, file }
}
