//! Opens the disks that Xen devices name.

use std::collections::BTreeMap;
use std::sync::Arc;

use mqblk_core::lock::{RankedMutex, assert_may_wait};
use mqblk_core::settings::Settings;
use mqblk_engine::{AnyDisk, DiskHealth, ErrorPolicy, PlugOptions, QueueSettings, SharedQueueSettings};
use mqblk_xen_server::{DeviceName, DiskBacking, Opener, Params, VbdSettings};

use super::config::XenAttachment;
use super::host::{XenDiskConfig, vbd_settings};
use crate::config::CacheMode;
use crate::storage_backends::StorageBackends;

/// A device's exclusive use of a disk of the configuration. Dropping it deactivates the disk and makes it available again.
struct DiskUse(Arc<RankedMutex<Option<DeviceName>>>, Arc<AnyDisk>);

impl Drop for DiskUse {
    fn drop(&mut self) {
        if let Err(error) = self.1.deactivate() {
            tracing::error!("{error}");
        }
        *self.0.lock() = None;
    }
}

/// A disk of the configuration that devices can attach.
struct OfferedDisk {
    disk: Arc<AnyDisk>,
    plug: PlugOptions,
    health: Arc<DiskHealth>,
    storage: String,
    settings: VbdSettings,
    queues: Arc<SharedQueueSettings>,
    attachment: Option<XenAttachment>,
    used_by: Arc<RankedMutex<Option<DeviceName>>>,
}

impl OfferedDisk {
    fn new(XenDiskConfig { config: disk, health, queues }: &XenDiskConfig) -> OfferedDisk {
        OfferedDisk {
            disk: Arc::clone(&disk.storage.disk),
            plug: disk.storage.plug,
            health: Arc::clone(health),
            storage: disk.storage.kind.clone(),
            settings: vbd_settings(&disk.endpoint, disk.storage.cache == CacheMode::Writethrough),
            queues: Arc::clone(queues),
            attachment: disk.endpoint.attachment,
            used_by: Arc::new(RankedMutex::leaf(None)),
        }
    }
}

/// Opens the disks of devices.
pub(super) struct DiskOpener {
    /// True if every device of the type is served.
    watch: bool,
    /// Of devices that name no disk.
    default: (VbdSettings, QueueSettings),
    offered: BTreeMap<String, OfferedDisk>,
    storages: Arc<dyn StorageBackends>,
}

impl Opener for DiskOpener {
    fn serves(&self, params: &Params) -> bool {
        self.watch || matches!(params, Params::Disk(id) if self.offered.contains_key(id))
    }

    fn open(&self, params: &Params, name: &DeviceName, read_only: bool) -> Result<DiskBacking, String> {
        let (kind, key, value) = match params {
            Params::Disk(id) => return self.open_offered(id, name),
            Params::File(path) => ("file", "path", path.display().to_string()),
            Params::Null(size) => ("null", "size", size.0.to_string()),
        };
        let mut settings = Settings::new("params");
        settings.insert(key, &value).map_err(|error| error.to_string())?;
        if read_only && kind == "file" {
            settings.insert("readonly", "on").map_err(|error| error.to_string())?;
        }
        let (disk, _) = self.storages.open(kind, &mut settings).map_err(|error| error.to_string())?;
        Ok(DiskBacking {
            id: name.to_string(),
            storage: kind.to_owned(),
            disk,
            plug: PlugOptions::default(),
            health: Arc::new(DiskHealth::new(name.to_string(), ErrorPolicy::default())),
            settings: self.default.0.clone(),
            queues: Arc::new(SharedQueueSettings::new(self.default.1.clone())),
            guard: Box::new(()),
        })
    }
}

impl DiskOpener {
    /// Creates the opener of these disks. `watch`: every device of the type is served, with the settings `default` if it names no disk.
    pub(super) fn new(
        watch: bool,
        default: (VbdSettings, QueueSettings),
        disks: &[XenDiskConfig],
        storages: Arc<dyn StorageBackends>,
    ) -> DiskOpener {
        let offered = disks.iter().map(|disk| (disk.config.id.clone(), OfferedDisk::new(disk))).collect();
        DiskOpener { watch, default, offered, storages }
    }

    fn open_offered(&self, id: &str, name: &DeviceName) -> Result<DiskBacking, String> {
        let Some(disk) = self.offered.get(id) else {
            let ids: Vec<_> = self.offered.keys().map(String::as_str).collect();
            let ids = if ids.is_empty() { "none" } else { &ids.join(", ") };
            return Err(format!("params: found disk {id:?}, expected one that the daemon offers to Xen guests: {ids}"));
        };
        if let Some(XenAttachment { domid, devid }) = disk.attachment
            && (domid, devid) != (name.frontend_id.0, name.devid)
        {
            return Err(format!(
                "params: found disk {id:?}, which is attached to domain {domid} by the daemon's configuration"
            ));
        }
        let mut taken = disk.used_by.lock();
        if let Some(other) = &*taken {
            return Err(format!("params: found disk {id:?}, which is attached as {other}, expected one that is not"));
        }
        *taken = Some(name.clone());
        drop(taken);
        assert_may_wait("storage");
        if let Err(error) = disk.disk.activate() {
            *disk.used_by.lock() = None;
            return Err(error.to_string());
        }
        Ok(DiskBacking {
            id: id.to_owned(),
            storage: disk.storage.clone(),
            disk: Arc::clone(&disk.disk),
            plug: disk.plug,
            health: Arc::clone(&disk.health),
            settings: disk.settings.clone(),
            queues: Arc::clone(&disk.queues),
            guard: Box::new(DiskUse(Arc::clone(&disk.used_by), Arc::clone(&disk.disk))),
        })
    }
}
