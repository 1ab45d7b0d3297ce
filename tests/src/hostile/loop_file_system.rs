//! File systems on devices of their own: loop devices.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::guest::LoopDevice;

fn run(program: &str, options: &[&str], paths: &[&Path]) {
    let output = Command::new(program).args(options).args(paths).output();
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}"));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {paths:?}: {error}(this test needs root)");
}

/// Bytes of a block of the file system.
pub const BLOCK: u64 = 4096;

/// A mounted ext4 file system without a journal. Unmounted and detached when dropped.
pub struct LoopFileSystem {
    folder: tempfile::TempDir,
    // Detached when the file system is unmounted.
    device: LoopDevice,
}

impl LoopFileSystem {
    /// Makes a file system in the file `backing`, and mounts it.
    ///
    /// # Panics
    /// When it cannot be mounted: that needs root and loop devices.
    pub fn mount(backing: &Path) -> LoopFileSystem {
        // Direct I/O: keeps the file's data from being in the host's page cache twice.
        let device = LoopDevice::attach_file(backing, &["--direct-io=on"]).expect("a loop device");
        run("mkfs.ext4", &["-q", "-b", &BLOCK.to_string(), "-O", "^has_journal"], &[device.path()]);
        let system = LoopFileSystem { folder: tempfile::tempdir().expect("a folder"), device };
        system.mount_device();
        system
    }

    fn mount_device(&self) {
        run("mount", &[], &[self.device.path(), self.folder.path()]);
    }

    /// Remounts it, so that nothing of it is in the host's memory.
    ///
    /// # Panics
    /// When one of its files is open.
    pub fn mount_again(&self) {
        run("umount", &[], &[self.folder.path()]);
        self.mount_device();
    }

    /// Returns the path of a file in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

impl Drop for LoopFileSystem {
    fn drop(&mut self) {
        // Lazily: a failed daemon may still have a file open.
        let _ = Command::new("umount").arg("--lazy").arg(self.folder.path()).status();
    }
}
