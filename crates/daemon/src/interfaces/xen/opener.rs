//! Opens the disks that Xen devices name.

use std::collections::BTreeMap;
use std::sync::Arc;

use mqblk_core::lock::RankedMutex;
use mqblk_core::settings::Settings;
use mqblk_engine::{AnyDisk, DiskHealth, ErrorPolicy, PlugOptions, QueueSettings, SharedQueueSettings};
use mqblk_xen_server::{DeviceName, DiskBacking, Opener, Params, VbdSettings};

use super::config::{WORD, XenAttachment, XenDiskConfig, vbd_settings};
use super::disk_use::{DiskUsers, UsedDisk};
use super::keys::{device_key, disk_key};
use crate::contract::{ContractRecorder, DeviceContract, DiskContract, KeptContracts, ONLY_DISK};
use crate::interface::HostContext;
use crate::out::OutDisks;
use crate::storage::CacheMode;
use crate::storage_backends::StorageBackends;

/// A disk of the configuration that devices can attach.
struct OfferedDisk {
    disk: Arc<AnyDisk>,
    plug: PlugOptions,
    health: Arc<DiskHealth>,
    storage: String,
    settings: VbdSettings,
    queues: Arc<SharedQueueSettings>,
    attachment: Option<XenAttachment>,
    guests: Arc<ContractRecorder>,
}

impl OfferedDisk {
    fn new(
        XenDiskConfig { config: disk, health, queues }: &XenDiskConfig,
        contracts: &Arc<KeptContracts>,
    ) -> OfferedDisk {
        let contract = device_contract(disk.endpoint.queues, disk.storage.contract(&[]));
        OfferedDisk {
            guests: contracts.serve(disk_key(&disk.id), contract),
            disk: Arc::clone(&disk.storage.disk),
            plug: disk.storage.plug,
            health: Arc::clone(health),
            storage: disk.storage.kind.clone(),
            settings: vbd_settings(&disk.endpoint, disk.storage.cache == CacheMode::Writethrough),
            queues: Arc::clone(queues),
            attachment: disk.endpoint.attachment,
        }
    }
}

/// Opens the disks of devices.
pub(super) struct DiskOpener {
    /// True if every device of the type is served.
    watch: bool,
    /// The settings of devices that name no disk.
    default: (VbdSettings, QueueSettings),
    offered: RankedMutex<BTreeMap<String, Arc<OfferedDisk>>>,
    /// Devices that name one of these wait until it is offered.
    out: Arc<OutDisks>,
    users: DiskUsers,
    contracts: Arc<KeptContracts>,
    storages: Arc<dyn StorageBackends>,
}

/// Returns the properties of a device as given to a guest. Its number and size of rings is in xenstore, with the
/// features.
fn device_contract(queues: u16, disk: DiskContract) -> DeviceContract {
    let disks = BTreeMap::from([(ONLY_DISK.to_owned(), disk)]);
    DeviceContract { interface: WORD.to_owned(), queues, queue_size: 0, disks }
}

impl Opener for DiskOpener {
    fn serves(&self, params: &Params) -> bool {
        match params {
            Params::Disk(id) if self.offered.lock().contains_key(id) => true,
            Params::Disk(id) => self.watch && self.out.find(id).is_none(),
            Params::File(_) | Params::Null(_) => self.watch,
        }
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
        if kind == "file" {
            // The device of a guest that migrates is made while its source still has the image.
            settings.insert("lock", "shared-migration").map_err(|error| error.to_string())?;
        }
        let (key, saved) = (device_key(name), self.contracts.saved());
        let given = saved.devices().get(&key).and_then(|device| device.disks.get(ONLY_DISK));
        given.iter().for_each(|given| given.apply_settings(&mut settings, kind));
        let (disk, resolved) = self.storages.open(kind, &mut settings).map_err(|error| error.to_string())?;
        let disk = match given {
            Some(given) => given.keep(&name.to_string(), disk),
            None => disk,
        };
        let contract =
            device_contract(self.default.0.ring_limits.queues, DiskContract::new(kind, &resolved, &*disk, &[]));
        let guests = self.contracts.serve(key, contract);
        // Any number of guests may read an image, or have their own null storage.
        let is_exclusive = kind == "file" && !disk.geometry().read_only;
        let disk_use = UsedDisk::open(&self.users, is_exclusive.then_some(params), name, &disk);
        Ok(DiskBacking {
            id: name.to_string(),
            storage: kind.to_owned(),
            disk,
            plug: PlugOptions::default(),
            health: Arc::new(DiskHealth::new(name.to_string(), ErrorPolicy::default())),
            settings: self.default.0.clone(),
            queues: Arc::new(SharedQueueSettings::new(self.default.1.clone())),
            guests: Some(Arc::clone(&guests) as _),
            disk_use: Box::new(disk_use.of_device(guests)),
        })
    }
}

impl DiskOpener {
    /// Creates the opener of these disks. `watch`: every device of the type is served, with the settings `default` if
    /// it names no disk.
    pub(super) fn new(
        watch: bool,
        default: (VbdSettings, QueueSettings),
        disks: &[Arc<XenDiskConfig>],
        context: &HostContext,
    ) -> DiskOpener {
        let offered = RankedMutex::leaf(BTreeMap::new());
        let (out, storages) = (Arc::clone(&context.out), Arc::clone(&context.storages));
        let contracts = Arc::clone(&context.contracts);
        let users = DiskUsers::default();
        let opener = DiskOpener { watch, default, offered, out, users, contracts, storages };
        disks.iter().for_each(|disk| opener.offer(disk));
        opener
    }

    /// Offers a disk to devices.
    pub(super) fn offer(&self, disk: &XenDiskConfig) {
        let offered = Arc::new(OfferedDisk::new(disk, &self.contracts));
        self.offered.lock().insert(disk.config.id.clone(), offered);
    }

    /// Withdraws a disk that no device has.
    pub(super) fn withdraw(&self, id: &str) {
        self.offered.lock().remove(id);
    }

    fn open_offered(&self, id: &str, name: &DeviceName) -> Result<DiskBacking, String> {
        let offered = self.offered.lock().get(id).cloned();
        let Some(disk) = offered else {
            let ids: Vec<_> = self.offered.lock().keys().cloned().collect();
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
        let params = Params::Disk(id.to_owned());
        let disk_use = UsedDisk::open(&self.users, Some(&params), name, &disk.disk);
        Ok(DiskBacking {
            id: id.to_owned(),
            storage: disk.storage.clone(),
            disk: Arc::clone(&disk.disk),
            plug: disk.plug,
            health: Arc::clone(&disk.health),
            settings: disk.settings.clone(),
            queues: Arc::clone(&disk.queues),
            guests: Some(Arc::clone(&disk.guests) as _),
            disk_use: Box::new(disk_use),
        })
    }
}
