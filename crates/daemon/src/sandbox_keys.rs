//! The keys of the sandbox.

use std::path::PathBuf;

use mqblk_core::settings::{Key, SettingError, Settings};

/// The handling of system calls that the sandbox does not allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum SandboxMode {
    /// There is no sandbox.
    #[default]
    Off,
    /// The call fails (EPERM), and so does opening other files.
    On,
    /// The kernel logs the call (`dmesg`, auditd) and executes it. Files are not restricted.
    Log,
}

impl SandboxMode {
    const WORDS: &'static [&'static str] = &["off", "on", "log"];

    /// Returns the configuration's word.
    pub const fn word(self) -> &'static str {
        match self {
            SandboxMode::Off => "off",
            SandboxMode::On => "on",
            SandboxMode::Log => "log",
        }
    }
}

/// The key of the sandbox.
pub static SANDBOX: Key = Key::words("sandbox", SandboxMode::WORDS).default("off").about(
    "give up unneeded rights before serving: system calls, capabilities, files that the configuration does not name; log: only log the system calls",
    "[security.md](security.md#the-sandbox).",
);
/// The key of paths that are allowed in addition.
pub static SANDBOX_ALLOW: Key =
    Key::text("sandbox-allow", "PATH", "an absolute path; in a file several with colons between")
        .repeated()
        .about("with sandbox: allow images at and beneath PATH, for disks that are added while the daemon runs", "");
/// The key of images of Ceph that are added while the daemon runs.
pub static SANDBOX_RBD: Key = Key::switch("sandbox-rbd").default("off").about(
    "with sandbox: allow disks of storage=rbd that are added while the daemon runs",
    "A disk of it in the configuration allows others, too. [security.md](security.md#disks-of-ceph).",
);

/// The sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SandboxConfig {
    /// The handling of calls that it does not allow.
    pub mode: SandboxMode,
    /// Absolute paths of images, and of folders with images, that the broker opens while the daemon runs: for disks
    /// that are added.
    pub allow: Vec<PathBuf>,
    /// Images of Ceph may be opened while the daemon runs, even if the configuration has none.
    pub rbd: bool,
}

impl SandboxConfig {
    /// Takes `sandbox`, `sandbox-allow` and `sandbox-rbd`.
    ///
    /// # Errors
    /// If a value is invalid.
    pub fn take(settings: &mut Settings) -> Result<SandboxConfig, SettingError> {
        let mode = match settings.word(&SANDBOX)? {
            Some("on") => SandboxMode::On,
            Some("log") => SandboxMode::Log,
            _ => SandboxMode::Off,
        };
        let text = settings.text(&SANDBOX_ALLOW);
        let allow: Vec<PathBuf> = text.iter().flat_map(|text| text.split(':')).map(PathBuf::from).collect();
        if let Some(path) = allow.iter().find(|path| !path.is_absolute()) {
            return Err(settings.error(&SANDBOX_ALLOW, format!("{path:?}"), "absolute paths, separated by colons"));
        }
        if mode == SandboxMode::Off && !allow.is_empty() {
            return Err(settings.error(&SANDBOX_ALLOW, "paths, but no sandbox", "sandbox=on with it"));
        }
        let rbd = settings.switch_or_default(&SANDBOX_RBD)?;
        if mode == SandboxMode::Off && rbd {
            return Err(settings.error(&SANDBOX_RBD, "on, but no sandbox", "sandbox=on with it"));
        }
        Ok(SandboxConfig { mode, allow, rbd })
    }

    /// Returns the value of `sandbox-allow`; `None` if there are no paths.
    pub fn allow_text(&self) -> Option<String> {
        let paths: Vec<_> = self.allow.iter().map(|path| path.to_string_lossy().into_owned()).collect();
        (!paths.is_empty()).then(|| paths.join(":"))
    }
}
