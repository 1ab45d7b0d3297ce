//! The Xen backend: the disks that it serves, and the operations on them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use mqblk_blkif::{GrantBudget, GrantCounters};
use mqblk_core::settings::Settings;
use mqblk_core::{ByteLen, Resize, Resized, SizeUsers};
use mqblk_engine::{AnyDisk, DiskHealth, Engine, ErrorPolicy, PlugOptions, QueueStats, WorkerStats};
use mqblk_memory::DomainId;
use mqblk_xen::{Xen, XenError};
use mqblk_xen_server::toolstack::{self, AttachResult, NewDevice, ToolstackError};
use mqblk_xen_server::{
    Backend, BackendError, BackendOptions, DeviceName, DeviceStats, DiskBacking, Opener, Params, RateLimit, RingLimits,
    VbdSettings,
};

use super::config::{CacheMode, DiskConfig, DiskEndpoint, XenAttachment, XenConfig, XenEndpoint};
use super::luns::ChangeError;
use super::resize::{self, GuestNotice, ResizeOutcome};

/// Grant mappings that Xen tracks for a domain by default: `gnttab_max_maptrack_frames` of 1024, each with 256 entries.
const MAPTRACK: u64 = 1024 * 256;
/// The default of `vm.max_map_count`.
const MAX_MAP_COUNT: u64 = 65_530;

/// Why the backend could not start.
#[derive(Debug, thiserror::Error)]
pub enum XenStartError {
    /// There is no Xen.
    #[error("serve: xen: {0}")]
    Xen(#[from] XenError),
    /// The backend failed to start.
    #[error("serve: xen: {0}")]
    Backend(#[from] BackendError),
    /// A disk could not be attached.
    #[error("disk {id:?}: {source}")]
    Attach {
        /// The disk's id.
        id: String,
        /// The cause.
        source: ToolstackError,
    },
}

/// A running Xen backend.
pub struct XenHost {
    xen: Arc<dyn Xen>,
    backend: Arc<Backend>,
    type_name: String,
}

/// A Xen disk of the configuration.
pub struct XenDiskConfig {
    /// Its id.
    pub id: String,
    endpoint: XenEndpoint,
    disk: Arc<AnyDisk>,
    plug: PlugOptions,
    health: Arc<DiskHealth>,
    storage: String,
    settings: VbdSettings,
}

impl XenDiskConfig {
    /// Returns the Xen configuration of a disk; `None` if it has another interface.
    pub fn of(disk: &DiskConfig<Arc<AnyDisk>>, health: &Arc<DiskHealth>) -> Option<XenDiskConfig> {
        let DiskEndpoint::Xen(endpoint) = &disk.endpoint else { return None };
        let storage = &disk.storage;
        Some(XenDiskConfig {
            id: disk.id.clone(),
            endpoint: endpoint.clone(),
            disk: Arc::clone(&storage.disk),
            plug: storage.plug,
            health: Arc::clone(health),
            storage: storage.kind.clone(),
            settings: vbd_settings(endpoint, storage.cache == CacheMode::Writethrough),
        })
    }
}

fn vbd_settings(endpoint: &XenEndpoint, write_through: bool) -> VbdSettings {
    VbdSettings {
        ring_limits: RingLimits { queues: endpoint.queues, ring_page_order: endpoint.ring_order },
        indirect_segments: endpoint.indirect_segments,
        mode: endpoint.grants,
        pool: endpoint.grants_pool,
        persistent_max: endpoint.persistent_grants,
        persistent_idle: endpoint.persistent_idle,
        journal: endpoint.journal,
        write_through,
        queue_map: endpoint.queue_map.iter().map(|worker| usize::from(*worker)).collect(),
        poll: endpoint.poll,
        coalesce: endpoint.coalesce,
    }
}

impl XenHost {
    /// Starts to serve `disks`, and the devices that the configuration says.
    ///
    /// # Errors
    /// If there is no Xen, or it refuses. Everything is undone then.
    pub fn start(
        config: &XenConfig,
        disks: &[XenDiskConfig],
        (engine, drain_timeout): (&Arc<Engine>, Duration),
    ) -> Result<XenHost, XenStartError> {
        let xen = config.host.connect()?;
        let max_map_count = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
        let max_map_count = max_map_count.and_then(|text| text.trim().parse().ok()).unwrap_or(MAX_MAP_COUNT);
        let budget = match config.mapped_pages {
            Some(pages) => GrantBudget::new(pages),
            None => GrantBudget::for_host(MAPTRACK, max_map_count),
        };
        let default = vbd_settings(&config.default_endpoint, false);
        let opener = DiskOpener { watch: config.watch, default, offered: offered_disks(disks) };
        let options = BackendOptions {
            type_name: config.type_name.clone(),
            engine: Arc::clone(engine),
            opener: Arc::new(opener),
            budget,
            journal_dir: config.state.clone(),
            exclusive: config.watch,
            rate_limit: RateLimit::default(),
            drain_timeout,
        };
        let backend = Arc::new(Backend::start(Arc::clone(&xen), options)?);
        tracing::info!(xen = %config.host, r#type = config.type_name, watch = config.watch, "xen backend");
        Ok(XenHost { xen, backend, type_name: config.type_name.clone() })
    }

    /// Creates the devices of the disks that are attached at start.
    ///
    /// # Errors
    /// If a device cannot be created. Those created before are removed again.
    pub fn attach(&self, disks: &[XenDiskConfig]) -> Result<(), XenStartError> {
        let mut created = Vec::new();
        for disk in disks {
            let Some(XenAttachment { domid, devid }) = disk.endpoint.attachment else { continue };
            let name = DeviceName { type_name: self.type_name.clone(), frontend_id: DomainId(domid), devid };
            match self.attach_one(disk, &name) {
                Ok(AttachResult::Created) => created.push(name),
                Ok(AttachResult::Existing) => tracing::debug!(device = %name, "was attached already"),
                Err(source) => {
                    for name in created {
                        self.detach(&name);
                    }
                    return Err(XenStartError::Attach { id: disk.id.clone(), source });
                }
            }
        }
        Ok(())
    }

    fn attach_one(&self, disk: &XenDiskConfig, name: &DeviceName) -> Result<AttachResult, ToolstackError> {
        let params = Params::Disk(disk.id.clone()).to_string();
        let device = NewDevice { name: name.clone(), params, read_only: disk.disk.geometry().read_only };
        let mut store = self.xen.store()?;
        toolstack::attach(&mut store, self.xen.domain(), &device)
    }

    fn detach(&self, name: &DeviceName) {
        let removed = self.xen.store().map_err(ToolstackError::from).and_then(|mut store| {
            toolstack::detach(&mut store, self.xen.domain(), name, std::time::Duration::ZERO, true)
        });
        if let Err(error) = removed {
            tracing::warn!(device = %name, %error, "cannot remove what was attached");
        }
    }

    /// Returns a handle to its devices.
    pub fn devices(&self) -> XenDevices {
        XenDevices { xen: Arc::clone(&self.xen), backend: Arc::clone(&self.backend) }
    }

    /// Returns the backend.
    pub fn backend(&self) -> &Arc<Backend> {
        &self.backend
    }
}

/// How long a device may take to handle a resize key in xenstore. Admin clients wait longer.
const RESIZE_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(30);

/// The devices that are served, of the configuration and of toolstacks.
pub struct XenDevices {
    xen: Arc<dyn Xen>,
    backend: Arc<Backend>,
}

impl XenDevices {
    /// Returns the devices whose disks are open.
    pub fn list(&self) -> Vec<Arc<DeviceStats>> {
        self.backend.devices()
    }

    /// Resizes a device's disk as a toolstack does: writes a xenstore key, which the device's own thread handles.
    ///
    /// # Errors
    /// If the disk cannot have that size, or the device does not handle the key in time.
    pub fn resize(&self, device: &DeviceStats, request: Resize) -> Result<ResizeOutcome, ChangeError> {
        let subject = format!("disk {:?}", device.id);
        let failed = |error: ToolstackError| ChangeError::Failed(format!("{subject}: {error}"));
        let Some(disk) = device.disk() else {
            return Err(ChangeError::Failed(format!("{subject}: its storage is being closed")));
        };
        let before = disk.geometry().size;
        // Checked here too, for an error in terms of the request.
        request.check_size(disk.as_ref()).map_err(|error| resize::resize_error(&subject, request, error))?;
        let mut store = self.xen.store().map_err(ToolstackError::from).map_err(failed)?;
        toolstack::resize(&mut store, self.xen.domain(), &device.name, request, RESIZE_TIMEOUT).map_err(failed)?;
        let resized = Resized { before, size: disk.geometry().size };
        let guest = match (resized.is_change(), device.rings()) {
            (false, _) => GuestNotice::Unchanged,
            (true, 0) => GuestNotice::NoGuest,
            (true, _) => GuestNotice::Notified,
        };
        Ok(ResizeOutcome { resized, guest })
    }
}

/// The users of the size of a disk that is not attached: none.
struct NoUsers;

impl SizeUsers for NoUsers {
    fn set_size(&mut self, _: ByteLen) {}

    fn refresh(&mut self) {}
}

/// A served disk of the configuration.
pub struct XenDisk {
    devices: XenDevices,
    id: String,
    queues: usize,
    disk: Arc<AnyDisk>,
}

impl XenDisk {
    /// Creates the disk `id`, which offers `queues` rings.
    pub fn new(host: &XenHost, id: &str, queues: usize, disk: Arc<AnyDisk>) -> XenDisk {
        XenDisk { devices: host.devices(), id: id.to_owned(), queues, disk }
    }

    /// Resizes the disk, attached or not.
    ///
    /// # Errors
    /// As [`XenDevices::resize`].
    pub fn resize(&self, request: Resize) -> Result<ResizeOutcome, ChangeError> {
        if let Some(device) = self.device().filter(|device| device.disk().is_some()) {
            return self.devices.resize(&device, request);
        }
        let result = request.carry_out(self.disk.as_ref(), &mut NoUsers);
        let resized = result.map_err(|error| resize::resize_error(&format!("disk {:?}", self.id), request, error))?;
        Ok(ResizeOutcome {
            resized,
            guest: if resized.is_change() { GuestNotice::NoGuest } else { GuestNotice::Unchanged },
        })
    }

    /// Returns the device that the disk is attached as. A previous device may still be in removal: one with rings is preferred.
    fn device(&self) -> Option<Arc<DeviceStats>> {
        let devices = self.devices.list().into_iter().filter(|device| device.id == self.id);
        devices.max_by_key(|device| device.rings() > 0)
    }

    /// Returns the statistics of its rings: zero while it is not attached.
    pub fn stats(&self, workers: &[WorkerStats]) -> Option<Vec<QueueStats>> {
        match self.device() {
            Some(device) => device.queue_stats(workers),
            None => Some(vec![QueueStats::default(); self.queues]),
        }
    }

    /// Returns the grant counters of its rings.
    pub fn grants(&self) -> Option<GrantCounters> {
        Some(self.device().map(|device| device.grant_counters()).unwrap_or_default())
    }
}

/// A device's exclusive use of a disk of the configuration. Dropping it deactivates the disk and makes it available again.
struct DiskUse(Arc<Mutex<Option<DeviceName>>>, Arc<AnyDisk>);

impl Drop for DiskUse {
    fn drop(&mut self) {
        self.1.deactivate();
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// A disk of the configuration that devices can attach.
struct OfferedDisk {
    disk: Arc<AnyDisk>,
    plug: PlugOptions,
    health: Arc<DiskHealth>,
    storage: String,
    settings: VbdSettings,
    attachment: Option<XenAttachment>,
    used_by: Arc<Mutex<Option<DeviceName>>>,
}

fn offered_disks(disks: &[XenDiskConfig]) -> BTreeMap<String, OfferedDisk> {
    let offer = |disk: &XenDiskConfig| OfferedDisk {
        disk: Arc::clone(&disk.disk),
        plug: disk.plug,
        health: Arc::clone(&disk.health),
        storage: disk.storage.clone(),
        settings: disk.settings.clone(),
        attachment: disk.endpoint.attachment,
        used_by: Arc::default(),
    };
    disks.iter().map(|disk| (disk.id.clone(), offer(disk))).collect()
}

/// Opens the disks of devices.
struct DiskOpener {
    /// True if every device of the type is served.
    watch: bool,
    default: VbdSettings,
    offered: BTreeMap<String, OfferedDisk>,
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
        let disk = mqblk_storage::open(kind, &mut settings).map_err(|error| error.to_string())?;
        Ok(DiskBacking {
            id: name.to_string(),
            storage: kind.to_owned(),
            disk,
            plug: PlugOptions::default(),
            health: Arc::new(DiskHealth::new(name.to_string(), ErrorPolicy::default())),
            settings: self.default.clone(),
            guard: Box::new(()),
        })
    }
}

impl DiskOpener {
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
        let mut taken = disk.used_by.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(other) = &*taken {
            return Err(format!("params: found disk {id:?}, which is attached as {other}, expected one that is not"));
        }
        disk.disk.activate().map_err(|error| error.to_string())?;
        *taken = Some(name.clone());
        Ok(DiskBacking {
            id: id.to_owned(),
            storage: disk.storage.clone(),
            disk: Arc::clone(&disk.disk),
            plug: disk.plug,
            health: Arc::clone(&disk.health),
            settings: disk.settings.clone(),
            guard: Box::new(DiskUse(Arc::clone(&disk.used_by), Arc::clone(&disk.disk))),
        })
    }
}
