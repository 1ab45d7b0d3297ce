//! `lock=`: exclusion of a second writer.

use mqblk_core::settings::{SettingError, Settings};

use crate::keys::LOCK;

/// The values of `lock`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LockMode {
    /// Held while the disk is open.
    Exclusive,
    /// Held while queues run.
    SharedMigration,
    /// Not taken.
    Off,
}

impl LockMode {
    /// Takes `lock`.
    pub(crate) fn from_settings(settings: &mut Settings) -> Result<LockMode, SettingError> {
        Ok(match settings.word(&LOCK)? {
            None | Some("exclusive") => LockMode::Exclusive,
            Some("shared-migration") => LockMode::SharedMigration,
            Some(_) => LockMode::Off,
        })
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            LockMode::Exclusive => "exclusive",
            LockMode::SharedMigration => "shared-migration",
            LockMode::Off => "off",
        }
    }

    /// Returns true if a block device is claimed when it is opened.
    pub(crate) fn claims_on_open(self) -> bool {
        self == LockMode::Exclusive
    }
}
