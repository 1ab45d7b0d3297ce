//! A block device that can hang, with a file system on it: a loop device on a file of [`HangingFile`].

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{FallocateFlags, fallocate};

use super::fuse::{Hanging, HangingFile};

/// Bytes of the device.
const LEN: usize = 96 << 20;
/// Bytes of a block of the file system.
const BLOCK: u64 = 4096;

fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap_or_else(|error| panic!("{program}: {error}"));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {error}(this test needs root and loop devices)");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// A mounted ext4 file system whose device can hang. Unmounted and detached when dropped.
pub struct HungFileSystem {
    device: String,
    folder: tempfile::TempDir,
    // Unmounted last.
    file: HangingFile,
}

impl HungFileSystem {
    /// Makes and mounts it, with one image of `len` bytes in it. Every second block of the image is a hole, so that its extents take blocks of the
    /// device (340 extents each). None of these is in the host's memory.
    ///
    /// # Panics
    /// When it cannot be mounted: that needs root, `/dev/fuse` and loop devices.
    pub fn mount(len: u64) -> HungFileSystem {
        let file = HangingFile::mount(LEN);
        let path = file.path().display().to_string();
        // Direct I/O: the file itself must not be in the host's page cache.
        let device = run("losetup", &["--find", "--show", "--direct-io=on", &path]);
        run("mkfs.ext4", &["-q", "-b", &BLOCK.to_string(), "-O", "^has_journal", &device]);
        let system = HungFileSystem { device, folder: tempfile::tempdir().expect("a folder"), file };
        system.mount_device();
        let image = File::create(system.image()).expect("an image");
        // Without data: a writer is slowed down while the host has much to write back.
        let none = FallocateFlags::empty();
        fallocate(&image, none, 0, len).expect("an image");
        for block in (0..len / BLOCK).step_by(2) {
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(&image, hole, block * BLOCK, BLOCK).expect("a hole");
        }
        image.sync_all().expect("the image");
        drop(image);
        system.unmount_device();
        system.mount_device();
        system
    }

    fn mount_device(&self) {
        run("mount", &[&self.device, &self.folder.path().display().to_string()]);
    }

    fn unmount_device(&self) {
        run("umount", &[&self.folder.path().display().to_string()]);
    }

    /// Returns the path of the image.
    pub fn image(&self) -> PathBuf {
        self.folder.path().join("image")
    }

    /// Returns the path of the device.
    pub fn device(&self) -> &Path {
        Path::new(&self.device)
    }

    /// From now on the device answers nothing, until the result is dropped at the latest.
    pub fn hang(&self) -> Hanging<'_> {
        self.file.hang()
    }

    /// Returns the number of requests to the device that wait for their answer.
    pub fn waiting(&self) -> usize {
        self.file.waiting()
    }
}

impl Drop for HungFileSystem {
    fn drop(&mut self) {
        let folder = self.folder.path().display().to_string();
        // Lazily: a daemon that failed may still have the image open.
        let _ = Command::new("umount").args(["--lazy", &folder]).status();
        let _ = Command::new("losetup").args(["--detach", &self.device]).status();
    }
}
