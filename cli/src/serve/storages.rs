//! The seam to the storage backends.

use std::sync::Arc;

use mqblk_core::disk::DiskError;
use mqblk_core::settings::Settings;
use mqblk_engine::AnyDisk;

use super::resolve::{Opened, Storages};

/// The program's storage backends.
#[derive(Debug)]
pub struct Registry;

impl Storages for Registry {
    type Disk = Arc<AnyDisk>;

    fn kinds(&self) -> Vec<&'static str> {
        mqblk_storage::kinds().collect()
    }

    fn open(&mut self, kind: &str, settings: &mut Settings) -> Result<Opened<Self::Disk>, DiskError> {
        let disk = mqblk_storage::open(kind, settings)?;
        let resolved = disk.resolved();
        Ok((disk, resolved))
    }
}
