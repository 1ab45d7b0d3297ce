//! Selects the Xen host: the machine's own, or a simulated one in a directory.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use mqblk_core::settings::{SettingError, Settings};
use mqblk_xen::{Xen, XenError};

/// The default type of devices.
pub const DEFAULT_TYPE: &str = "mqblk";

/// Connects to the simulated machine in a directory.
pub type ConnectSimulated = fn(&Path) -> Result<Arc<dyn Xen>, XenError>;

static SIMULATED: OnceLock<ConnectSimulated> = OnceLock::new();

/// Lets this process use simulated machines. For programs that include them, unlike the daemon.
pub fn provide_simulated(connect: ConnectSimulated) {
    // The first one stays.
    let _ = SIMULATED.set(connect);
}

/// The Xen host to use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum XenSelector {
    /// The machine's own, if the configuration needs one.
    #[default]
    Auto,
    /// The machine's own.
    Real,
    /// A simulated one, in this directory.
    Simulated(PathBuf),
}

impl XenSelector {
    /// Parses `auto`, `real` or a directory.
    pub fn parse(text: &str) -> XenSelector {
        match text {
            "auto" => XenSelector::Auto,
            "real" => XenSelector::Real,
            folder => XenSelector::Simulated(folder.into()),
        }
    }

    /// Connects to the host.
    ///
    /// # Errors
    /// If there is no such host.
    pub fn connect(&self) -> Result<Arc<dyn Xen>, XenError> {
        match self {
            XenSelector::Auto | XenSelector::Real => mqblk_xen::connect_real(),
            XenSelector::Simulated(folder) => match SIMULATED.get() {
                Some(connect) => connect(folder),
                None => Err(XenError {
                    what: format!(
                        "xen: found {}, expected auto or real: there are no simulated machines",
                        folder.display()
                    ),
                    source: std::io::ErrorKind::Unsupported.into(),
                }),
            },
        }
    }
}

impl fmt::Display for XenSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            XenSelector::Auto => f.write_str("auto"),
            XenSelector::Real => f.write_str("real"),
            XenSelector::Simulated(folder) => folder.display().fmt(f),
        }
    }
}

/// Checks a device type: it names a xenstore directory.
pub fn check_type(settings: &Settings, key: &str, name: &str) -> Result<(), SettingError> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    if (1..=32).contains(&name.len()) && name.bytes().all(plain) {
        return Ok(());
    }
    let expected = "1 to 32 letters, digits, dashes and underscores, such as mqblk";
    Err(settings.error(key, format!("{name:?}"), expected))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_a_keyword_or_a_directory() {
        for text in ["auto", "real", "/tmp/xen"] {
            assert_eq!(XenSelector::parse(text).to_string(), text);
        }
        assert_eq!(XenSelector::parse("/tmp/xen"), XenSelector::Simulated("/tmp/xen".into()));
    }

    #[test]
    fn device_types_are_checked() {
        let settings = Settings::new("serve");
        for good in ["mqblk", "qdisk", "vbd3", "a-b_c"] {
            assert!(check_type(&settings, "xen-watch", good).is_ok(), "{good}");
        }
        for bad in ["", "a/b", "..", "a b", &"x".repeat(33)] {
            let error = check_type(&settings, "xen-watch", bad).unwrap_err().to_string();
            assert!(error.starts_with("serve: xen-watch: found "), "{error}");
        }
    }
}
