//! The host's view of a disk: image files with their holes, and loop devices with their counters.

use std::fs::File;
use std::io::{Read, Seek};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use rustix::fs::SeekFrom;
use tempfile::TempDir;

use super::cache::repository;

const MIB: u64 = 1 << 20;

/// An image file in its own directory, removed when dropped.
#[derive(Debug)]
pub struct HostImage {
    path: PathBuf,
    len: u64,
    _folder: TempDir,
}

impl HostImage {
    /// Creates a sparse image of `mib` MiB.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn sparse(mib: u64) -> Result<Self> {
        let folder = Self::folder()?;
        let path = folder.path().join("disk.img");
        File::create_new(&path)?.set_len(mib * MIB)?;
        Ok(Self { path, len: mib * MIB, _folder: folder })
    }

    /// Creates an image of `mib` MiB that is allocated and full of the byte 0xa5.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn full(mib: u64) -> Result<Self> {
        let image = Self::sparse(mib)?;
        let file = File::options().write(true).open(&image.path)?;
        for at in 0..mib {
            file.write_all_at(&[0xa5; MIB as usize], at * MIB)?;
        }
        file.sync_all()?;
        Ok(image)
    }

    /// In the repository's build directory: /tmp may be a tmpfs, which has no O_DIRECT on older kernels.
    fn folder() -> Result<TempDir> {
        let base = repository().join("target");
        std::fs::create_dir_all(&base)?;
        Ok(tempfile::Builder::new().prefix("mqblk-image-").tempdir_in(base)?)
    }

    /// Returns the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the size in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns true if the size is 0, which never happens.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Reads `len` bytes at `offset`.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn read(&self, offset: u64, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        File::open(&self.path)?.read_exact_at(&mut bytes, offset)?;
        Ok(bytes)
    }

    /// Returns true if every byte of the range is zero.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn is_zero(&self, offset: u64, len: u64) -> Result<bool> {
        let mut file = File::open(&self.path)?;
        file.seek(std::io::SeekFrom::Start(offset))?;
        let mut rest = file.take(len);
        let mut chunk = vec![0; MIB as usize];
        loop {
            match rest.read(&mut chunk)? {
                0 => return Ok(true),
                count if chunk[..count].iter().all(|&byte| byte == 0) => {}
                _ => return Ok(false),
            }
        }
    }

    /// Returns true if the file system has no data for the whole range: SEEK_DATA finds none in it.
    ///
    /// # Errors
    /// Those of lseek.
    pub fn is_hole(&self, offset: u64, len: u64) -> Result<bool> {
        let file = File::open(&self.path)?;
        match rustix::fs::seek(&file, SeekFrom::Data(offset)) {
            Ok(data) => Ok(data >= offset + len),
            Err(rustix::io::Errno::NXIO) => Ok(true), // no data from here to the end
            Err(error) => Err(error).context("lseek SEEK_DATA"),
        }
    }

    /// Returns the bytes the file system has allocated (stat's `st_blocks`, which counts units of 512 bytes).
    ///
    /// # Errors
    /// Those of stat.
    pub fn allocated(&self) -> Result<u64> {
        const ST_BLOCKS_UNIT: u64 = 512;
        Ok(std::fs::metadata(&self.path)?.blocks() * ST_BLOCKS_UNIT)
    }
}

/// A loop device over an image: a block device whose write cache flushes the kernel counts. Needs root.
#[derive(Debug)]
pub struct LoopDevice {
    path: PathBuf,
}

impl LoopDevice {
    /// Attaches a free loop device with this logical block size in bytes.
    ///
    /// # Errors
    /// losetup's.
    pub fn attach(image: &HostImage, block_size: u32) -> Result<Self> {
        Self::attach_file(image.path(), &["--sector-size", &block_size.to_string()])
    }

    /// Attaches a free loop device to a file, with these options of losetup.
    ///
    /// # Errors
    /// losetup's.
    pub fn attach_file(file: &Path, options: &[&str]) -> Result<Self> {
        let output = Command::new("losetup")
            .args(["--find", "--show"])
            .args(options)
            .arg(file)
            .output()
            .context("cannot run losetup (package mount)")?;
        ensure!(
            output.status.success(),
            "losetup needs root and the loop driver: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(Self { path: PathBuf::from(String::from_utf8(output.stdout)?.trim()) })
    }

    /// Returns the device node.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns a value below /sys/block/loopN/queue.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn queue_attribute(&self, name: &str) -> Result<String> {
        let path = self.sysfs()?.join("queue").join(name);
        Ok(std::fs::read_to_string(&path).with_context(|| path.display().to_string())?.trim().to_owned())
    }

    /// Flush requests the device has completed: the 16th field of its `stat` (Documentation/block/stat.rst).
    ///
    /// # Errors
    /// When the kernel is older than 5.5 and has no such field.
    pub fn flushes(&self) -> Result<u64> {
        let text = std::fs::read_to_string(self.sysfs()?.join("stat"))?;
        let field = text.split_whitespace().nth(15).context("/sys/block/loopN/stat has no flush counter")?;
        Ok(field.parse()?)
    }

    fn sysfs(&self) -> Result<PathBuf> {
        Ok(Path::new("/sys/block").join(self.path.file_name().context("a loop device has a name")?))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        // The kernel detaches a device in use at its last close.
        let _ = Command::new("losetup").arg("--detach").arg(&self.path).status();
    }
}
