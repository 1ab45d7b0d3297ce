//! The source and the errors of a change at run time.

use mqblk_core::settings::SettingError;

use crate::config_error::ConfigError;

/// The source of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeSource {
    /// The configuration: the next daemon finds the change there.
    Configuration,
    /// A verb of the admin socket, to this daemon or a previous one: the state file keeps it.
    RunTime,
}

/// Errors of a change of a disk or LUN at run time.
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
