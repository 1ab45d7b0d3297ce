//! The storage backends, for the configuration.

use std::sync::Arc;

use mqblk_core::ImageOpener;
use mqblk_core::disk::DiskError;
use mqblk_core::settings::Settings;
use mqblk_engine::AnyDisk;
use mqblk_storage::host_images::HostImages;

use crate::change::ChangeSource;
use crate::contract::RawImages;
use crate::limits::LimitGroups;
use crate::out::open_all;
use crate::test_keys;

/// An open disk, and the settings of its storage with all defaults filled in.
pub type OpenedDisk = (Arc<AnyDisk>, Vec<(&'static str, String)>);

/// The storage backends, as the configuration needs them.
pub trait StorageBackends: Send + Sync {
    /// Returns the names of the backends.
    fn kinds(&self) -> Vec<&'static str>;

    /// Opens a disk. Takes the backend's own keys from `settings`.
    ///
    /// # Errors
    /// If a value is invalid or the host refuses.
    fn open(&self, kind: &str, settings: &mut Settings) -> Result<OpenedDisk, DiskError>;

    /// As [`open`](Self::open), for a disk that was added at run time: only with the rights of a serving daemon. The
    /// file that names the disk is the daemon's own.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    fn open_added(&self, kind: &str, settings: &mut Settings) -> Result<OpenedDisk, DiskError> {
        self.open(kind, settings)
    }

    /// Returns the groups of limits that disks may be in.
    fn limit_groups(&self) -> LimitGroups {
        LimitGroups::default()
    }

    /// Returns the images that guests used as raw bytes.
    fn raw_images(&self) -> RawImages {
        RawImages::default()
    }
}

/// Storage for disks that were added at run time.
struct AddedStorages<'a>(&'a dyn StorageBackends);

impl StorageBackends for AddedStorages<'_> {
    fn kinds(&self) -> Vec<&'static str> {
        self.0.kinds()
    }

    fn open(&self, kind: &str, settings: &mut Settings) -> Result<OpenedDisk, DiskError> {
        self.0.open_added(kind, settings)
    }

    fn limit_groups(&self) -> LimitGroups {
        self.0.limit_groups()
    }

    fn raw_images(&self) -> RawImages {
        self.0.raw_images()
    }
}

/// Opens each item with the rights of its origin. Items of the configuration come first, because the others may open
/// these too. The results are in the order of opening.
pub fn open_by_origin<T: Send, R: Send>(
    items: Vec<T>,
    origin: impl Fn(&T) -> ChangeSource,
    storages: &dyn StorageBackends,
    open: impl Fn(T, &dyn StorageBackends) -> R + Sync,
) -> Vec<R> {
    let (configured, added): (Vec<_>, Vec<_>) =
        items.into_iter().partition(|item| origin(item) == ChangeSource::Configuration);
    let mut opened = open_all(configured, |item| open(item, storages));
    opened.extend(open_all(added, |item| open(item, &AddedStorages(storages))));
    opened
}

/// Storage backends, with the groups of limits of a configuration and the record of raw images.
pub struct ConfiguredStorages {
    inner: Arc<dyn StorageBackends>,
    groups: LimitGroups,
    raw_images: RawImages,
}

impl ConfiguredStorages {
    /// Combines them.
    pub fn new(inner: Arc<dyn StorageBackends>, groups: LimitGroups, raw_images: RawImages) -> ConfiguredStorages {
        ConfiguredStorages { inner, groups, raw_images }
    }
}

impl StorageBackends for ConfiguredStorages {
    fn kinds(&self) -> Vec<&'static str> {
        self.inner.kinds()
    }

    fn open(&self, kind: &str, settings: &mut Settings) -> Result<OpenedDisk, DiskError> {
        self.raw_images.apply(kind, settings);
        self.inner.open(kind, settings)
    }

    fn open_added(&self, kind: &str, settings: &mut Settings) -> Result<OpenedDisk, DiskError> {
        self.raw_images.apply(kind, settings);
        self.inner.open_added(kind, settings)
    }

    fn limit_groups(&self) -> LimitGroups {
        self.groups.clone()
    }

    fn raw_images(&self) -> RawImages {
        self.raw_images.clone()
    }
}

/// Returns the names of the backends of `mqblk-storage`.
pub fn kinds() -> Vec<&'static str> {
    let test = mqblk_storage::TEST_KINDS.iter().copied().filter(|_| test_keys::are_enabled());
    mqblk_storage::backend_names().chain(test).collect()
}

/// The registry of `mqblk-storage`.
#[derive(Clone, Debug)]
pub struct Registry {
    opener: Arc<dyn ImageOpener>,
    /// The opener for disks that were added at run time.
    added: Arc<dyn ImageOpener>,
}

impl Registry {
    /// Creates a registry whose backends open images with `opener`, and those of disks added at run time with `added`.
    pub fn new(opener: Arc<dyn ImageOpener>, added: Arc<dyn ImageOpener>) -> Registry {
        Registry { opener, added }
    }

    /// Creates a registry whose backends open images with the rights of this process.
    pub fn of_this_process() -> Registry {
        Registry::new(Arc::new(HostImages), Arc::new(HostImages))
    }
}

impl StorageBackends for Registry {
    fn kinds(&self) -> Vec<&'static str> {
        kinds()
    }

    fn open(&self, kind: &str, settings: &mut Settings) -> Result<OpenedDisk, DiskError> {
        open_by(&self.opener, kind, settings)
    }

    fn open_added(&self, kind: &str, settings: &mut Settings) -> Result<OpenedDisk, DiskError> {
        open_by(&self.added, kind, settings)
    }
}

fn open_by(opener: &Arc<dyn ImageOpener>, kind: &str, settings: &mut Settings) -> Result<OpenedDisk, DiskError> {
    let disk = mqblk_storage::open_with(kind, settings, opener)?;
    let resolved = disk.resolved();
    Ok((disk, resolved))
}
