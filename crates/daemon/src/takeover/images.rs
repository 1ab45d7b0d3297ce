//! Open images of the predecessor. Locks belong to the open files, so the images are locked all the time.
//!
//! A predecessor that a guest has taken over could pass another guest's image, or a file of its own, under any path. An
//! image is used only if it is the file that this process itself finds at the path, opened in the same way.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use mqblk_core::lock::RankedMutex;
use mqblk_core::{ImageAccess, ImageOpenError, ImageOpener, OpenImage};
use rustix::fs::{FileType, OFlags, Stat, fcntl_getfl, fstat};

use super::OfferedImage;

/// The open images of a predecessor, until the takeover has ended: an open descriptor keeps its claim even after it was
/// given up.
#[derive(Debug)]
pub(crate) struct HandedFiles {
    images: RankedMutex<Vec<HandedFile>>,
    /// The reason of the first refusal.
    refused: RankedMutex<Option<String>>,
}

#[derive(Debug)]
struct HandedFile {
    image: OpenImage,
    /// True if a disk has it.
    is_taken: bool,
}

impl Default for HandedFiles {
    fn default() -> HandedFiles {
        HandedFiles::new(Vec::new())
    }
}

impl HandedFiles {
    /// Creates the set of received images.
    pub(super) fn new(images: Vec<OpenImage>) -> HandedFiles {
        let images = images.into_iter().map(|image| HandedFile { image, is_taken: false }).collect();
        HandedFiles { images: RankedMutex::leaf(images), refused: RankedMutex::leaf(None) }
    }

    /// Returns the reason of the first refusal, if there was one.
    pub(super) fn refused(&self) -> Option<String> {
        self.refused.lock().clone()
    }

    /// Closes the images.
    pub(super) fn clear(&self) {
        self.images.lock().clear();
    }

    /// Returns a duplicate of an image that was opened by this path and in this way. Each disk that reads the image
    /// gets another open file, as long as there are more: closing a disk releases the locks of its open file. A second
    /// disk that writes the image gets none, as its lock would be the first one's.
    fn find(&self, path: &Path, access: ImageAccess) -> std::io::Result<Option<OwnedFd>> {
        let mut images = self.images.lock();
        let fits = |one: &HandedFile| one.image.access == access && is_same_path(&one.image, path);
        let next = images.iter().position(|one| !one.is_taken && fits(one));
        let next = next.or_else(|| images.iter().position(|one| !access.write && !access.exclusive && fits(one)));
        let Some(found) = next.and_then(|index| images.get_mut(index)) else { return Ok(None) };
        found.is_taken = true;
        found.image.file.try_clone().map(Some)
    }
}

/// Opens images of the predecessor through its descriptors, and others with another opener.
#[derive(Debug)]
pub(crate) struct HandedImages {
    handed: Arc<HandedFiles>,
    others: Arc<dyn ImageOpener>,
}

impl HandedImages {
    pub(crate) fn new(handed: Arc<HandedFiles>, others: Arc<dyn ImageOpener>) -> HandedImages {
        HandedImages { handed, others }
    }

    /// Checks that a descriptor belongs to the image at this path, opened in this way.
    fn check(&self, file: &OwnedFd, path: &Path, access: ImageAccess) -> Result<(), String> {
        // Opening for reading has no side effect: it claims no device, and notifies no watcher of a device.
        let here = self.others.open(path, ImageAccess { write: false, direct: false, exclusive: false });
        let here = here.map_err(|error| format!("it cannot be compared with the file there: {error}"))?;
        let stat = |file: &dyn AsFd| fstat(file.as_fd()).map(|stat| identity(&stat)).map_err(|error| error.to_string());
        let (found, expected) = (stat(file)?, stat(&here)?);
        if found != expected {
            return Err(format!("found a descriptor of {found}, expected the file that is there now, {expected}"));
        }
        let flags = fcntl_getfl(file).map_err(|error| error.to_string())?;
        let mut expected = if access.write { OFlags::RDWR } else { OFlags::RDONLY };
        expected.set(OFlags::DIRECT, access.direct);
        let found = flags & (OFlags::RWMODE | OFlags::DIRECT | OFlags::APPEND | OFlags::PATH);
        if found != expected {
            return Err(format!("found a descriptor with flags {found:?}, expected {expected:?}"));
        }
        Ok(())
    }
}

impl ImageOpener for HandedImages {
    fn open(&self, path: &Path, access: ImageAccess) -> Result<File, ImageOpenError> {
        let Some(file) = self.handed.find(path, access)? else { return self.others.open(path, access) };
        match self.check(&file, path, access) {
            Ok(()) => Ok(File::from(file)),
            Err(why) => {
                let why = format!("the image {path:?} of the daemon before this one: {why}");
                self.handed.refused.lock().get_or_insert_with(|| why.clone());
                Err(ImageOpenError::Refused(why))
            }
        }
    }

    fn use_tcp(&self, port: u16) -> Result<(), ImageOpenError> {
        self.others.use_tcp(port)
    }
}

/// Returns true if the image was opened by this path, or is the file at this path.
fn is_same_path(image: &OpenImage, path: &Path) -> bool {
    let (open, there) = (fstat(&image.file), rustix::fs::stat(path));
    image.path == path || matches!((open, there), (Ok(open), Ok(there)) if identity(&open) == identity(&there))
}

/// Returns the identity of a file: the number of a device, regardless of its node, and the inode of any other file.
fn identity(stat: &Stat) -> String {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::BlockDevice => {
            format!("block device {}:{}", rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev))
        }
        kind => {
            let (major, minor) = (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
            format!("{kind:?} {} of file system {major}:{minor}", stat.st_ino)
        }
    }
}

/// Returns the offer of an image, and its descriptor.
pub(super) fn offered(image: OpenImage) -> (OfferedImage, OwnedFd) {
    let OpenImage { path, access: ImageAccess { write, direct, exclusive }, file, in_memory } = image;
    (OfferedImage { path, write, direct, exclusive, in_memory }, file)
}

/// Returns an offered image.
pub(super) fn received(image: OfferedImage, file: OwnedFd) -> OpenImage {
    let OfferedImage { path, write, direct, exclusive, in_memory } = image;
    OpenImage { path, access: ImageAccess { write, direct, exclusive }, file, in_memory }
}

#[cfg(test)]
mod tests {
    use mqblk_storage::host_images::HostImages;

    use super::*;

    const WRITE: ImageAccess = ImageAccess { write: true, direct: false, exclusive: false };

    fn opened(
        path: &Path,
        offered: (ImageAccess, OwnedFd),
        asked: ImageAccess,
    ) -> (Result<File, String>, Option<String>) {
        let (access, file) = offered;
        let handed =
            Arc::new(HandedFiles::new(vec![OpenImage { path: path.to_owned(), access, file, in_memory: false }]));
        let opener = HandedImages::new(Arc::clone(&handed), Arc::new(HostImages));
        (opener.open(path, asked).map_err(|error| error.to_string()), handed.refused())
    }

    #[test]
    fn only_the_file_at_the_path_opened_as_here_is_taken() {
        let folder = tempfile::tempdir().unwrap();
        let (a, b) = (folder.path().join("a"), folder.path().join("b"));
        for path in [&a, &b] {
            std::fs::write(path, [1; 4096]).unwrap();
        }
        let of = |path: &Path| OwnedFd::from(File::options().read(true).write(true).open(path).unwrap());
        let (file, refused) = opened(&a, (WRITE, of(&a)), WRITE);
        assert!(file.is_ok() && refused.is_none(), "{refused:?}");
        let memory = rustix::fs::memfd_create("a", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let appends = OwnedFd::from(File::options().read(true).append(true).open(&a).unwrap());
        let folder_of_all = OwnedFd::from(File::open(folder.path()).unwrap());
        let (pipe, _other) = std::io::pipe().unwrap();
        let pipe = OwnedFd::from(pipe);
        for (name, file, expected) in [
            ("another image", of(&b), "expected the file that is there now"),
            ("memory", memory, "expected the file that is there now"),
            ("a folder", folder_of_all, "found a descriptor of Directory"),
            ("a pipe", pipe, "found a descriptor of Fifo"),
            ("for reading only", OwnedFd::from(File::open(&a).unwrap()), "expected OFlags(RDWR"),
            ("for appending", appends, "APPEND"),
        ] {
            let (found, refused) = opened(&a, (WRITE, file), WRITE);
            let why = found.unwrap_err();
            assert!(why.contains(expected) && refused.as_ref() == Some(&why), "{name}: {why}");
        }
        // An offer for another access is ignored.
        assert!(opened(&a, (WRITE, of(&b)), ImageAccess::default()).0.is_ok());
    }

    /// Otherwise the first disk that is closed releases the lock of the other.
    #[test]
    fn each_disk_has_an_open_file_of_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let base = folder.path().join("base");
        std::fs::write(&base, [1; 4096]).unwrap();
        let images = (0..2).map(|_| {
            let file = File::open(&base).unwrap().into();
            OpenImage { path: base.clone(), access: ImageAccess::default(), file, in_memory: false }
        });
        let handed = Arc::new(HandedFiles::new(images.collect()));
        let opener = HandedImages::new(handed, Arc::new(HostImages));
        let mut files = [0; 3].map(|_| opener.open(&base, ImageAccess::default()).unwrap());
        let mut position = |index: usize| std::io::Seek::stream_position(&mut files[index]).unwrap();
        assert_eq!((position(0), position(1), position(2)), (0, 0, 0));
        std::io::Read::read_exact(&mut files[0], &mut [0; 8]).unwrap();
        let mut position = |index: usize| std::io::Seek::stream_position(&mut files[index]).unwrap();
        assert_eq!((position(0), position(1), position(2)), (8, 0, 8), "the third shares that of the first");
    }

    /// Otherwise two disks of a new configuration would write one image, which the old one did not allow.
    #[test]
    fn a_second_writer_opens_the_image_itself() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, [1; 4096]).unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap().into();
        let image = OpenImage { path: path.clone(), access: WRITE, file, in_memory: false };
        let opener = HandedImages::new(Arc::new(HandedFiles::new(vec![image])), Arc::new(HostImages));
        let [mut first, mut second] = [(); 2].map(|()| opener.open(&path, WRITE).unwrap());
        std::io::Seek::seek(&mut first, std::io::SeekFrom::Start(8)).unwrap();
        assert_eq!(
            std::io::Seek::stream_position(&mut second).unwrap(),
            0,
            "an open file of its own, whose lock excludes the other"
        );
    }
}
