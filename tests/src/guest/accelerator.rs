//! KVM where a guest boots with it, emulation elsewhere.

use std::path::Path;
use std::sync::OnceLock;

use anyhow::{Result, bail};
use mqblk_test_bounds::Bound;

use super::cache::GuestCache;
use super::machine::Guest;

/// A KVM guest boots in a second or two; after this time it never will.
const PROBE_TIMEOUT: Bound = Bound::seconds(20);

/// The way in which the guest's instructions run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accelerator {
    /// Hardware virtualisation.
    Kvm,
    /// QEMU's emulation, a host thread per vCPU.
    Tcg,
}

/// The emulated CPU. The omitted features cost emulated page walks and checks, longer registers to save, and copies
/// byte by byte.
pub(crate) const TCG_CPU: &str =
    "max,-smap,-smep,-pku,-la57,-avx,-avx2,-fma,-f16c,-xsave,-xsaveopt,-xsavec,-xgetbv1,-xsaves,-erms,-fsrm";

impl Accelerator {
    /// Returns the accelerator: `MQBLK_GUEST_ACCEL` when set, else KVM when a guest boots with it, else TCG.
    ///
    /// An openable /dev/kvm proves nothing (nested virtualisation may hang or assert), so a guest is booted. The result
    /// is kept in the cache directory for this host kernel.
    ///
    /// # Errors
    /// A bad value of the variable.
    pub fn detect(cache: &GuestCache) -> Result<Self> {
        static PROBED: OnceLock<Accelerator> = OnceLock::new();
        match std::env::var("MQBLK_GUEST_ACCEL").ok().as_deref() {
            Some("kvm") => Ok(Self::Kvm),
            Some("tcg") => Ok(Self::Tcg),
            Some(other) => bail!("MQBLK_GUEST_ACCEL is '{other}', expected kvm or tcg"),
            None if !Path::new("/dev/kvm").exists() => Ok(Self::Tcg),
            None => Ok(*PROBED.get_or_init(|| Self::remembered_or_probed(cache))),
        }
    }

    fn remembered_or_probed(cache: &GuestCache) -> Self {
        let file = cache.folder().join("accelerator");
        let host = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        if let Ok(text) = std::fs::read_to_string(&file)
            && let Some((name, on)) = text.split_once(' ')
            && on.trim() == host.trim()
        {
            match name {
                "kvm" => return Self::Kvm,
                "tcg" => return Self::Tcg,
                _ => {}
            }
        }
        let probe = Guest::builder().accelerator(Self::Kvm).boot_within(PROBE_TIMEOUT).boot();
        let found = if probe.is_ok() { Self::Kvm } else { Self::Tcg };
        // Without the file the next run probes again.
        let _ = std::fs::write(&file, format!("{} {}", found.name(), host));
        found
    }

    fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        }
    }

    /// QEMU's `-accel`.
    pub(crate) fn argument(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg,thread=multi",
        }
    }

    /// QEMU's `-cpu`: the model with the most features, without those that no test needs.
    pub(crate) fn cpu(self) -> &'static str {
        match self {
            Self::Kvm => "host",
            Self::Tcg => TCG_CPU,
        }
    }
}
