//! The disk under test.

use std::sync::Arc;

use mqblk_core::settings::Settings;
use mqblk_core::{Disk, DiskError};
use mqblk_uring::UringContext;

/// The backend and settings under test.
#[derive(Clone, Copy, Debug)]
pub struct TestTarget<'a> {
    /// The backend's name in the registry.
    pub kind: &'a str,
    /// Its settings, without `readonly`. The disk must have between 2 and 64 MiB; its content is lost.
    pub settings: &'a [(&'a str, &'a str)],
    /// True if a read returns the written data.
    pub keeps_data: bool,
    /// Seed of the random requests.
    pub seed: u64,
}

impl TestTarget<'_> {
    /// Opens the disk, with additional settings.
    ///
    /// # Errors
    /// As the backend.
    ///
    /// # Panics
    /// When the backend does not take one of the settings.
    pub fn open(&self, more: &[(&str, &str)]) -> Result<Arc<dyn Disk<UringContext>>, DiskError> {
        let mut settings = Settings::new("disk \"trial\"");
        for (key, value) in self.settings.iter().chain(more) {
            settings.insert(key, value)?;
        }
        let disk = crate::open(self.kind, &mut settings)?;
        settings.finish().expect("the backend knows all its settings");
        Ok(disk)
    }

    pub(super) fn must_open(&self, more: &[(&str, &str)]) -> Arc<dyn Disk<UringContext>> {
        self.open(more).unwrap_or_else(|error| panic!("{self:?}: {error}"))
    }
}
