//! The storage backends, for the configuration.

use std::sync::Arc;

use mqblk_core::disk::DiskError;
use mqblk_core::settings::Settings;
use mqblk_engine::AnyDisk;

use crate::test_keys;

/// An open disk, and the settings of its storage with all defaults filled in.
pub type OpenedDisk = (Arc<AnyDisk>, Vec<(&'static str, String)>);

/// The storage backends, as the configuration needs them.
pub trait StorageBackends {
    /// Returns the names of the backends.
    fn kinds(&self) -> Vec<&'static str>;

    /// Opens a disk. Takes the backend's own keys from `settings`.
    ///
    /// # Errors
    /// If a value is invalid or the host refuses.
    fn open(&self, kind: &str, settings: &mut Settings) -> Result<OpenedDisk, DiskError>;
}

/// The registry of `mqblk-storage`.
#[derive(Debug)]
pub struct Registry;

impl StorageBackends for Registry {
    fn kinds(&self) -> Vec<&'static str> {
        let test = mqblk_storage::TEST_KINDS.iter().copied().filter(|_| test_keys::are_enabled());
        mqblk_storage::backend_names().chain(test).collect()
    }

    fn open(&self, kind: &str, settings: &mut Settings) -> Result<OpenedDisk, DiskError> {
        let disk = mqblk_storage::open(kind, settings)?;
        let resolved = disk.resolved();
        Ok((disk, resolved))
    }
}
