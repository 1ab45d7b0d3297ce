//! File systems on devices of their own: loop devices.

use std::path::{Path, PathBuf};
use std::process::Command;

fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap_or_else(|error| panic!("{program}: {error}"));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {error}(this test needs root and loop devices)");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// Bytes of a block of the file system.
pub const BLOCK: u64 = 4096;

/// A mounted ext4 file system without a journal. Unmounted and detached when dropped.
pub struct LoopFileSystem {
    device: String,
    folder: tempfile::TempDir,
}

impl LoopFileSystem {
    /// Makes a file system in the file `backing`, and mounts it.
    ///
    /// # Panics
    /// When it cannot be mounted: that needs root and loop devices.
    pub fn mount(backing: &Path) -> LoopFileSystem {
        // Direct I/O: what is in the file must not be in the host's page cache a second time.
        let device = run("losetup", &["--find", "--show", "--direct-io=on", &backing.display().to_string()]);
        run("mkfs.ext4", &["-q", "-b", &BLOCK.to_string(), "-O", "^has_journal", &device]);
        let system = LoopFileSystem { device, folder: tempfile::tempdir().expect("a folder") };
        system.mount_device();
        system
    }

    fn mount_device(&self) {
        run("mount", &[&self.device, &self.folder.path().display().to_string()]);
    }

    /// Mounts it again, so that nothing of it is in the host's memory.
    ///
    /// # Panics
    /// When a file of it is open.
    pub fn mount_again(&self) {
        run("umount", &[&self.folder.path().display().to_string()]);
        self.mount_device();
    }

    /// Returns the path of a file in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

impl Drop for LoopFileSystem {
    fn drop(&mut self) {
        let folder = self.folder.path().display().to_string();
        // Lazily: a daemon that failed may still have a file open.
        let _ = Command::new("umount").args(["--lazy", &folder]).status();
        let _ = Command::new("losetup").args(["--detach", &self.device]).status();
    }
}
