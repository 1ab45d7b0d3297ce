//! The boot files made by `tests/guest/prepare.sh`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use super::vmm::{GuestKernel, Vmm};

/// The manifest's first line, as `prepare.sh` writes it.
const FORMAT: &str = "mqblk-guest 6";

/// The directory with the guests' kernels and initramfs, and trixie's QEMU.
#[derive(Debug, Clone)]
pub struct GuestCache {
    folder: PathBuf,
}

impl GuestCache {
    /// Opens the directory named by `MQBLK_GUEST_CACHE`, else `.cache/guest` in the repository.
    ///
    /// # Errors
    /// When the directory is missing, or another version of the script prepared it.
    pub fn open() -> Result<Self> {
        let folder = match std::env::var_os("MQBLK_GUEST_CACHE") {
            Some(folder) => PathBuf::from(folder),
            None => repository().join(".cache/guest"),
        };
        let manifest = folder.join("manifest");
        let Ok(text) = std::fs::read_to_string(&manifest) else {
            bail!("no guest is prepared: {} is missing; run tests/guest/prepare.sh as root first", manifest.display());
        };
        let found = text.lines().next().unwrap_or_default();
        ensure!(
            found == FORMAT,
            "{}: the first line is '{found}', expected '{FORMAT}'; run tests/guest/prepare.sh again",
            manifest.display()
        );
        let cache = Self { folder };
        let of = |kernel| [cache.kernel(kernel), cache.initramfs(kernel)];
        let files = [GuestKernel::System, GuestKernel::Trixie].into_iter().flat_map(of);
        for file in files.chain([Vmm::Trixie.program(&cache)]) {
            file.metadata().with_context(|| format!("{}; run tests/guest/prepare.sh again", file.display()))?;
        }
        Ok(cache)
    }

    /// Returns the uncompressed kernel, an ELF file that QEMU enters by PVH.
    #[must_use]
    pub fn kernel(&self, kernel: GuestKernel) -> PathBuf {
        self.folder_of(kernel).join("vmlinux")
    }

    /// Returns the uncompressed cpio archive with busybox, fio, the SCSI tools, the agent and this kernel's modules.
    #[must_use]
    pub fn initramfs(&self, kernel: GuestKernel) -> PathBuf {
        self.folder_of(kernel).join("initramfs.cpio")
    }

    fn folder_of(&self, kernel: GuestKernel) -> PathBuf {
        match kernel {
            GuestKernel::System => self.folder.clone(),
            GuestKernel::Trixie => self.folder.join("trixie"),
        }
    }

    /// Returns the directory.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }
}

/// Returns the repository that this crate was built from.
pub(crate) fn repository() -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().unwrap_or(tests).to_path_buf()
}
