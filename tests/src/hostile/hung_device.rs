//! A block device that can hang, with a file system on it: a loop device on a [`HangingFile`].

use std::fs::File;
use std::path::PathBuf;

use rustix::fs::{FallocateFlags, fallocate};

use super::fuse::{Hanging, HangingFile};
use super::loop_file_system::{BLOCK, LoopFileSystem};

/// Bytes of the device.
const LEN: usize = 96 << 20;

/// A mounted ext4 file system whose device can hang.
pub struct HungFileSystem {
    // Unmounted before the file of its device.
    system: LoopFileSystem,
    file: HangingFile,
}

impl HungFileSystem {
    /// Makes and mounts it, with one image of `len` bytes. Every second block of the image is a hole, so that its
    /// extents take blocks of the device (340 extents each). None of these blocks is in the host's memory.
    ///
    /// # Panics
    /// When it cannot be mounted: that needs root, `/dev/fuse` and loop devices.
    pub fn mount(len: u64) -> HungFileSystem {
        let file = HangingFile::mount(LEN);
        let system = HungFileSystem { system: LoopFileSystem::mount(&file.path()), file };
        let image = File::create(system.image()).expect("an image");
        // Without data: the host slows down a writer while it has much to write back.
        fallocate(&image, FallocateFlags::empty(), 0, len).expect("an image");
        for block in (0..len / BLOCK).step_by(2) {
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(&image, hole, block * BLOCK, BLOCK).expect("a hole");
        }
        image.sync_all().expect("the image");
        drop(image);
        system.system.mount_again();
        system
    }

    /// Returns the path of the image.
    pub fn image(&self) -> PathBuf {
        self.system.path("image")
    }

    /// Makes the device answer nothing, at most until the result is dropped.
    pub fn hang(&self) -> Hanging<'_> {
        self.file.hang()
    }

    /// Returns the number of unanswered requests to the device.
    pub fn waiting(&self) -> usize {
        self.file.waiting()
    }
}
