//! A change at run time: by what it is made, and why it is not.

use mqblk_core::settings::SettingError;

use crate::config_error::ConfigError;

/// By what a disk is added or removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeSource {
    /// The configuration: the next daemon reads it there.
    Configuration,
    /// A verb of the admin socket, to this daemon or a previous one: the state file keeps it.
    RunTime,
}

/// Why a disk or LUN was not changed at run time.
#[derive(Debug, thiserror::Error)]
pub enum ChangeError {
    /// A value is invalid.
    #[error(transparent)]
    Setting(#[from] SettingError),
    /// The change failed.
    #[error("{0}")]
    Failed(String),
}

impl From<ConfigError> for ChangeError {
    fn from(error: ConfigError) -> ChangeError {
        match error {
            ConfigError::Setting(error) => ChangeError::Setting(error),
            other => ChangeError::Failed(other.to_string()),
        }
    }
}
