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

/// Gives a disk another size: not yet.
pub fn resize(_disk: &Arc<AnyDisk>, _size: Option<mqblk_core::ByteLen>) -> Result<mqblk_core::ByteLen, String> {
    Err("storage cannot change its size in this build".to_owned())
}
