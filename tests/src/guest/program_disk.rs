//! A disk with our program on it, for guests that act as hosts: their kernels have device-mapper and both versions of
//! control groups.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::cache::repository;
use super::daemon::mqblk_binary;
use super::host_disk::HostImage;
use super::machine::Guest;
use super::shell::Shell;

/// Size of the disk in MiB.
const SIZE: u64 = 192;
/// Its mount point.
const FOLDER: &str = "/program";

/// An ext4 image with `mqblk`, `mqblk-bench` and their libraries.
#[derive(Debug)]
pub struct ProgramDisk {
    image: HostImage,
}

impl ProgramDisk {
    /// Makes the image of the program under test. The guest uses this system's loader, because all its programs do.
    ///
    /// # Errors
    /// When a library is missing, or mkfs.ext4 fails.
    pub fn new() -> Result<Self> {
        Self::with(&[])
    }

    /// As [`ProgramDisk::new`], with other programs that need the same libraries. The guest has them in `/program`.
    ///
    /// # Errors
    /// As [`ProgramDisk::new`].
    pub fn with(others: &[&Path]) -> Result<Self> {
        let program = mqblk_binary()?;
        let folder = tempfile::Builder::new().prefix("mqblk-program-").tempdir_in(repository().join("target"))?;
        let copy = |from: &Path, name: &str| {
            std::fs::copy(from, folder.path().join(name)).with_context(|| format!("{}", from.display()))
        };
        copy(&program, "mqblk.program")?;
        copy(&program.with_file_name("mqblk-bench"), "mqblk-bench")?;
        for other in others {
            copy(other, other.file_name().and_then(|name| name.to_str()).unwrap_or_default())?;
        }
        for library in libraries(&program)? {
            let path = Path::new(&library);
            copy(path, path.file_name().and_then(|name| name.to_str()).unwrap_or_default())?;
        }
        let image = HostImage::sparse(SIZE)?;
        let made = Command::new("mkfs.ext4").args(["-q", "-d"]).arg(folder.path()).arg(image.path()).output();
        let made = made.context("cannot run mkfs.ext4 (package e2fsprogs)")?;
        ensure!(made.status.success(), "mkfs.ext4: {}", String::from_utf8_lossy(&made.stderr));
        Ok(Self { image })
    }

    /// Returns the image.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.image.path()
    }

    /// Installs the program in a guest that has this disk as `device`.
    ///
    /// # Errors
    /// The guest's.
    pub fn install(&self, guest: &mut Guest, device: &str) -> Result<()> {
        // Libraries that the guest lacks go to the loader's default path, because the broker has its own environment.
        let script = format!(
            "set -e; mkdir -p {FOLDER} /lib/x86_64-linux-gnu; mount -t ext4 -o ro {device} {FOLDER}
             for library in {FOLDER}/*.so*; do
                 at=/lib/x86_64-linux-gnu/$(basename $library); [ -e $at ] || ln -s $library $at
             done
             ln -s {FOLDER}/mqblk.program /bin/mqblk; mqblk --version"
        );
        guest.must(&script).map(drop)
    }
}

/// Returns the files that the dynamic loader maps for `program`.
///
/// # Errors
/// When it lacks one, or ldd fails.
pub(crate) fn libraries(program: &Path) -> Result<Vec<String>> {
    let output = Command::new("ldd").arg(program).output().context("cannot run ldd")?;
    let text = String::from_utf8(output.stdout)?;
    ensure!(output.status.success(), "ldd {}: {}", program.display(), output.status);
    ensure!(!text.contains("not found"), "{} lacks libraries:\n{text}", program.display());
    Ok(text.split_whitespace().filter(|word| word.starts_with('/')).map(str::to_owned).collect())
}
