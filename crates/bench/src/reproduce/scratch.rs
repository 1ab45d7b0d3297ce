//! The file on a real disk that the `block-sizes` experiment works on.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use mqblk_core::ByteLen;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rustix::fs::OFlags;

use crate::BenchError;

/// Size and alignment of a write, in bytes.
const CHUNK: usize = 1 << 20;
/// Space left free beside the file, in bytes.
const RESERVE: u64 = 256 << 20;

/// A file of random data, removed when it is dropped.
#[derive(Debug)]
pub(super) struct ScratchFile {
    path: PathBuf,
}

/// Returns the path of the file in `folder`.
pub(super) fn path(folder: &Path) -> PathBuf {
    folder.join(format!("mqblk-reproduce.{}.img", std::process::id()))
}

/// Checks that a file of `size` can be made in `folder`, and that it can be read and written past the page cache.
///
/// # Errors
/// [`BenchError::Usage`], naming the option.
pub(super) fn check(folder: &Path, size: ByteLen) -> Result<(), BenchError> {
    let option = |found: String, expected: &str| BenchError::option("folder", found, expected);
    let failed =
        |error: std::io::Error| option(format!("{}: {error}", folder.display()), "a folder that can be written");
    std::fs::create_dir_all(folder).map_err(failed)?;
    let space = rustix::fs::statvfs(folder).map_err(|error| failed(error.into()))?;
    let free = ByteLen(space.f_bavail.saturating_mul(space.f_frsize));
    if free.0 < size.0 + RESERVE {
        let found = format!("{} with {} MiB free", folder.display(), free.0 >> 20);
        return Err(option(found, &format!("{} MiB: another folder, or --quick", (size.0 + RESERVE) >> 20)));
    }
    let opened = tempfile::NamedTempFile::new_in(folder).and_then(|file| open_direct(file.path()));
    opened.map(drop).map_err(|error| {
        let found = format!("{}, where O_DIRECT fails: {error}", folder.display());
        option(found, "a folder on a disk: in memory, block sizes measure the page cache")
    })
}

fn open_direct(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().read(true).write(true).custom_flags(OFlags::DIRECT.bits() as i32).open(path)
}

impl ScratchFile {
    /// Creates the file in `folder` and fills it. Calls `go_on` after each part with the share written; `false` stops.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(super) fn create(
        folder: &Path,
        size: ByteLen,
        mut go_on: impl FnMut(f64) -> bool,
    ) -> Result<ScratchFile, BenchError> {
        let path = path(folder);
        let failed = |error: std::io::Error| BenchError::failed(path.display(), error);
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).open(&path).map_err(failed)?;
        let scratch = ScratchFile { path: path.clone() };
        // Random, so that no layer below compresses it or finds its blocks equal.
        let mut random = SmallRng::from_rng(&mut rand::rng());
        let mut chunk = vec![0; CHUNK];
        let count = size.0 / CHUNK as u64;
        for at in 0..count {
            random.fill_bytes(&mut chunk);
            file.write_all(&chunk).map_err(failed)?;
            if !go_on((at + 1) as f64 / count as f64) {
                break;
            }
        }
        file.sync_all().map_err(failed)?;
        Ok(scratch)
    }
}

impl Drop for ScratchFile {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(%error, path = %self.path.display(), "the scratch file is left");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_filled_and_removed() {
        let folder = tempfile::tempdir().unwrap();
        let mut shares = vec![];
        let file = ScratchFile::create(folder.path(), ByteLen(2 << 20), |share| {
            shares.push(share);
            true
        });
        let file = file.unwrap();
        let data = std::fs::read(path(folder.path())).unwrap();
        assert_eq!((data.len(), shares), (2 << 20, vec![0.5, 1.0]));
        assert!(data.chunks(4096).all(|block| block.iter().any(|byte| *byte != 0)));
        drop(file);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_folder_without_space_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let error = check(folder.path(), ByteLen(1 << 60)).unwrap_err().to_string();
        assert!(error.starts_with("--folder: found ") && error.contains("MiB free, expected"), "{error}");
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert!(check(&file, ByteLen(1)).unwrap_err().to_string().contains("a folder that can be written"));
    }
}
