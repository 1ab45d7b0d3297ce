//! The virtual machine monitors and guest kernels that `tests/guest/prepare.sh` provides.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::cache::GuestCache;

/// A QEMU version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vmm {
    /// The installed one: 7.2 in Debian 12.
    System,
    /// That of Debian trixie, unpacked in the cache directory: 10.0.
    Trixie,
    /// That of Debian sid, which `prepare.sh sid` unpacks: 11.1. Only for `MQBLK_GUEST_VMM=sid`.
    Sid,
}

impl Vmm {
    /// Returns those of Debian's releases, or the one named by `MQBLK_GUEST_VMM`.
    ///
    /// # Errors
    /// A bad value of the variable.
    pub fn all() -> Result<Vec<Self>> {
        Ok(Self::named()?.map_or(vec![Self::System, Self::Trixie], |one| vec![one]))
    }

    /// Returns the one named by `MQBLK_GUEST_VMM` (`system`, `trixie` or `sid`), else the system's.
    ///
    /// # Errors
    /// A bad value of the variable.
    pub fn from_environment() -> Result<Self> {
        Ok(Self::named()?.unwrap_or(Self::System))
    }

    /// Returns the one named by `MQBLK_GUEST_VMM`, else the newest.
    ///
    /// # Errors
    /// A bad value of the variable.
    pub fn newest() -> Result<Self> {
        Ok(Self::named()?.unwrap_or(Self::Trixie))
    }

    fn named() -> Result<Option<Self>> {
        match std::env::var("MQBLK_GUEST_VMM").ok().as_deref() {
            None => Ok(None),
            Some("system") => Ok(Some(Self::System)),
            Some("trixie") => Ok(Some(Self::Trixie)),
            Some("sid") => Ok(Some(Self::Sid)),
            Some(other) => bail!("MQBLK_GUEST_VMM is '{other}', expected system, trixie or sid"),
        }
    }

    /// Returns the kernel that belongs to it.
    #[must_use]
    pub fn kernel(self) -> GuestKernel {
        match self {
            Self::System => GuestKernel::System,
            Self::Trixie | Self::Sid => GuestKernel::Trixie,
        }
    }

    /// Returns the path of `qemu-system-x86_64`.
    pub(crate) fn program(self, cache: &GuestCache) -> PathBuf {
        match self {
            Self::System => "qemu-system-x86_64".into(),
            Self::Trixie => cache.folder().join("trixie/qemu/qemu-system-x86_64"),
            Self::Sid => cache.folder().join("sid/qemu/qemu-system-x86_64"),
        }
    }

    /// Returns the option of a socket chardev for the reconnect delay: milliseconds since QEMU 9.2, whole seconds
    /// before. QMP uses the same name.
    pub(crate) fn reconnect(self, after: Duration) -> (&'static str, u64) {
        match self {
            Self::System => ("reconnect", after.as_millis().div_ceil(1000).max(1).try_into().unwrap_or(u64::MAX)),
            Self::Trixie | Self::Sid => ("reconnect-ms", after.as_millis().max(1).try_into().unwrap_or(u64::MAX)),
        }
    }
}

/// Runs a test's body with each VMM, and names the VMM in an error.
///
/// # Errors
/// The body's.
pub fn with_each_vmm(mut body: impl FnMut(Vmm) -> Result<()>) -> Result<()> {
    for vmm in Vmm::all()? {
        body(vmm).with_context(|| format!("with the VMM {vmm:?}"))?;
    }
    Ok(())
}

/// A guest kernel, with an initramfs of the same programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GuestKernel {
    /// The kernel of the installed Debian: Linux 6.1 in Debian 12.
    System,
    /// That of Debian trixie: Linux 6.12.
    Trixie,
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::Vmm;

    #[test]
    fn reconnect_is_never_at_once_and_never_off() {
        let option = |vmm: Vmm, ms| vmm.reconnect(Duration::from_millis(ms));
        assert_eq!(option(Vmm::System, 1), ("reconnect", 1));
        assert_eq!(option(Vmm::System, 1500), ("reconnect", 2));
        assert_eq!(option(Vmm::Trixie, 0), ("reconnect-ms", 1)); // 0 is "never" to QEMU
        assert_eq!(option(Vmm::Trixie, 1500), ("reconnect-ms", 1500));
    }
}
