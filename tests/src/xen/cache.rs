//! The boot files made by `tests/xen/prepare.sh`.

use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};

use crate::guest::cache::repository;

/// The manifest's first line, as `prepare.sh` writes it.
const FORMAT: &str = "mqblk-xen 1";

/// The directory with the hypervisor, dom0's kernel and dom0's initramfs.
#[derive(Debug, Clone)]
pub struct XenCache {
    folder: PathBuf,
}

impl XenCache {
    /// Opens the directory named by `MQBLK_XEN_CACHE`, else `.cache/xen` in the repository.
    ///
    /// # Errors
    /// When the directory is missing, or another version of the script prepared it.
    pub fn open() -> Result<Self> {
        let folder = match std::env::var_os("MQBLK_XEN_CACHE") {
            Some(folder) => PathBuf::from(folder),
            None => repository().join(".cache/xen"),
        };
        let manifest = folder.join("manifest");
        let Ok(text) = std::fs::read_to_string(&manifest) else {
            bail!("no Xen is prepared: {} is missing; run tests/xen/prepare.sh as root first", manifest.display());
        };
        let found = text.lines().next().unwrap_or_default();
        ensure!(
            found == FORMAT,
            "{}: the first line is '{found}', expected '{FORMAT}'; run tests/xen/prepare.sh again",
            manifest.display()
        );
        let cache = Self { folder };
        for file in [cache.hypervisor(), cache.kernel(), cache.initramfs()] {
            file.metadata().with_context(|| format!("{}; run tests/xen/prepare.sh again", file.display()))?;
        }
        Ok(cache)
    }

    /// Returns the hypervisor, a multiboot ELF file.
    #[must_use]
    pub fn hypervisor(&self) -> PathBuf {
        self.folder.join("xen")
    }

    /// Returns dom0's uncompressed kernel.
    #[must_use]
    pub fn kernel(&self) -> PathBuf {
        self.folder.join("vmlinux")
    }

    /// Returns dom0's uncompressed cpio archive: the toolstack, the agent, and the PV guest's kernel and initramfs.
    #[must_use]
    pub fn initramfs(&self) -> PathBuf {
        self.folder.join("dom0.cpio")
    }
}
