//! The program's storage backends, for the configuration.

use std::sync::Arc;

use mqblk_core::disk::DiskError;
use mqblk_core::settings::Settings;
use mqblk_engine::AnyDisk;

use super::resolve::{OpenedDisk, StorageBackends};
use super::test_keys;

/// The registry of `mqblk-storage`.
#[derive(Debug)]
pub struct Registry;

impl StorageBackends for Registry {
    type Disk = Arc<AnyDisk>;

    fn kinds(&self) -> Vec<&'static str> {
        let test = mqblk_storage::TEST_KINDS.iter().copied().filter(|_| test_keys::are_enabled());
        mqblk_storage::backend_names().chain(test).collect()
    }

    fn open(&mut self, backend: &str, settings: &mut Settings) -> Result<OpenedDisk<Self::Disk>, DiskError> {
        let disk = mqblk_storage::open(backend, settings)?;
        let resolved = disk.resolved();
        Ok((disk, resolved))
    }
}
