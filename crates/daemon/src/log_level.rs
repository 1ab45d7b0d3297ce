//! The level of the log.

use mqblk_core::settings::SettingError;

/// The level of the log of the program.
pub trait LogLevel: Send + Sync {
    /// Returns the level, or the levels of targets.
    fn get(&self) -> String;

    /// Changes it from now on.
    ///
    /// # Errors
    /// If it is not a level.
    fn set(&self, level: &str) -> Result<(), SettingError>;
}
