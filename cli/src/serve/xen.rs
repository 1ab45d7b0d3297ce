//! The back-end of a Xen host: which disks it has, and what they are asked.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use mqblk_blkif::{GrantBudget, GrantCounters};
use mqblk_core::settings::Settings;
use mqblk_core::{ByteLen, Resize, Resized, SizeUsers};
use mqblk_engine::{AnyDisk, DiskHealth, Engine, ErrorPolicy, PlugOptions, QueueReport, WorkerReport};
use mqblk_memory::DomainId;
use mqblk_xen::{Xen, XenError};
use mqblk_xen_server::toolstack::{self, Made, NewDevice, ToolError};
use mqblk_xen_server::{
    Backend, BackendError, BackendOptions, Backing, Bounds, DeviceName, Figures, Opener, Pace, Params, VbdSettings,
};

use super::config::{CacheMode, DiskConfig, DiskFront, XenConfig, XenFront, XenPlace};
use super::luns::ChangeError;
use super::resize::{self, Changed, GuestNotice};

/// Mappings that Xen tracks for a domain unless it was told otherwise: `gnttab_max_maptrack_frames` of 1024, each with 256 entries.
const MAPTRACK: u64 = 1024 * 256;
/// `vm.max_map_count` unless it was changed.
const MAX_MAP_COUNT: u64 = 65_530;

/// Why the back-end could not start.
#[derive(Debug, thiserror::Error)]
pub enum XenStartError {
    /// There is no Xen.
    #[error("serve: xen: {0}")]
    Xen(#[from] XenError),
    /// The back-end refuses.
    #[error("serve: xen: {0}")]
    Backend(#[from] BackendError),
    /// A disk could not be attached.
    #[error("disk {id:?}: {source}")]
    Attach {
        /// Which disk.
        id: String,
        /// Why.
        source: ToolError,
    },
}

/// A running back-end.
pub struct XenHost {
    xen: Arc<dyn Xen>,
    backend: Arc<Backend>,
    type_name: String,
}

/// A Xen disk of the configuration.
pub struct XenDiskConfig {
    /// Its id.
    pub id: String,
    front: XenFront,
    disk: Arc<AnyDisk>,
    plug: PlugOptions,
    health: Arc<DiskHealth>,
    storage: String,
    settings: VbdSettings,
}

impl XenDiskConfig {
    /// Of a disk that Xen guests reach; of others nothing.
    pub fn of(disk: &DiskConfig<Arc<AnyDisk>>, health: &Arc<DiskHealth>) -> Option<XenDiskConfig> {
        let DiskFront::Xen(front) = &disk.front else { return None };
        let backing = &disk.backing;
        Some(XenDiskConfig {
            id: disk.id.clone(),
            front: front.clone(),
            disk: Arc::clone(&backing.disk),
            plug: backing.plug,
            health: Arc::clone(health),
            storage: backing.storage.clone(),
            settings: settings_of(front, backing.cache == CacheMode::Writethrough),
        })
    }
}

fn settings_of(front: &XenFront, write_through: bool) -> VbdSettings {
    VbdSettings {
        bounds: Bounds { queues: front.queues, ring_order: front.ring_order },
        indirect_segments: front.indirect_segments,
        mode: front.grants,
        pool: front.grants_pool,
        persistent_max: front.persistent_grants,
        persistent_idle: front.persistent_idle,
        journal: front.journal,
        write_through,
        queue_map: front.queue_map.iter().map(|worker| usize::from(*worker)).collect(),
        poll: front.poll,
        coalesce: front.coalesce,
    }
}

impl XenHost {
    /// Starts to serve `disks`, and whatever else is asked for.
    ///
    /// # Errors
    /// When there is no Xen or it refuses. Then nothing is left behind.
    pub fn start(
        config: &XenConfig,
        disks: &[XenDiskConfig],
        (engine, drain_timeout): (&Arc<Engine>, Duration),
    ) -> Result<XenHost, XenStartError> {
        let xen = config.which.connect()?;
        let max_map_count = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
        let max_map_count = max_map_count.and_then(|text| text.trim().parse().ok()).unwrap_or(MAX_MAP_COUNT);
        let budget = match config.mapped_pages {
            Some(pages) => GrantBudget::new(pages),
            None => GrantBudget::of_host(MAPTRACK, max_map_count),
        };
        let default = settings_of(&config.default, false);
        let opener = Disks { watch: config.watch, default, own: offered(disks) };
        let options = BackendOptions {
            type_name: config.type_name.clone(),
            engine: Arc::clone(engine),
            opener: Arc::new(opener),
            budget,
            journals: config.state.clone(),
            alone: config.watch,
            pace: Pace::default(),
            drain_timeout,
        };
        let backend = Arc::new(Backend::start(Arc::clone(&xen), options)?);
        tracing::info!(xen = %config.which, r#type = config.type_name, watch = config.watch, "xen back-end");
        Ok(XenHost { xen, backend, type_name: config.type_name.clone() })
    }

    /// Makes the devices of the disks that have a place.
    ///
    /// # Errors
    /// When one of them cannot be made; then those that were made here are removed again.
    pub fn attach(&self, disks: &[XenDiskConfig]) -> Result<(), XenStartError> {
        let mut made = Vec::new();
        for disk in disks {
            let Some(XenPlace { domid, devid }) = disk.front.place else { continue };
            let name = DeviceName { type_name: self.type_name.clone(), front: DomainId(domid), devid };
            match self.attach_one(disk, &name) {
                Ok(Made::New) => made.push(name),
                Ok(Made::Already) => tracing::debug!(device = %name, "was attached already"),
                Err(source) => {
                    for name in made {
                        self.detach(&name);
                    }
                    return Err(XenStartError::Attach { id: disk.id.clone(), source });
                }
            }
        }
        Ok(())
    }

    fn attach_one(&self, disk: &XenDiskConfig, name: &DeviceName) -> Result<Made, ToolError> {
        let params = Params::Disk(disk.id.clone()).to_string();
        let device = NewDevice { name: name.clone(), params, read_only: disk.disk.geometry().read_only };
        let mut store = self.xen.store()?;
        toolstack::attach(&mut store, self.xen.domain(), &device)
    }

    fn detach(&self, name: &DeviceName) {
        let removed = self.xen.store().map_err(ToolError::from).and_then(|mut store| {
            toolstack::detach(&mut store, self.xen.domain(), name, std::time::Duration::ZERO, true)
        });
        if let Err(error) = removed {
            tracing::warn!(device = %name, %error, "cannot remove what was attached");
        }
    }

    /// Its devices, to be asked and changed.
    pub fn devices(&self) -> XenDevices {
        XenDevices { xen: Arc::clone(&self.xen), backend: Arc::clone(&self.backend) }
    }

    /// The back-end.
    pub fn backend(&self) -> &Arc<Backend> {
        &self.backend
    }
}

/// How long a device may take to do what a key asks for. Admin clients wait longer.
const RESIZE_WITHIN: std::time::Duration = std::time::Duration::from_secs(30);

/// The devices that are served, whoever made them.
pub struct XenDevices {
    xen: Arc<dyn Xen>,
    backend: Arc<Backend>,
}

impl XenDevices {
    /// Those whose disks are open.
    pub fn list(&self) -> Vec<Arc<Figures>> {
        self.backend.devices()
    }

    /// Gives a device's disk another size, as a toolstack does: by its key, on its own thread.
    ///
    /// # Errors
    /// When it cannot have that size, or does not answer.
    pub fn resize(&self, device: &Figures, asked: Resize) -> Result<Changed, ChangeError> {
        let subject = format!("disk {:?}", device.id);
        let failed = |error: ToolError| ChangeError::Failed(format!("{subject}: {error}"));
        let Some(disk) = device.disk() else {
            return Err(ChangeError::Failed(format!("{subject}: its storage is being closed")));
        };
        let before = disk.geometry().size;
        // Judged here too: whoever asked is told in the words of what was asked.
        asked.judge(disk.as_ref()).map_err(|error| resize::refused(&subject, asked, error))?;
        let mut store = self.xen.store().map_err(ToolError::from).map_err(failed)?;
        toolstack::resize(&mut store, self.xen.domain(), &device.name, asked, RESIZE_WITHIN).map_err(failed)?;
        let resized = Resized { before, size: disk.geometry().size };
        let guest = match (resized.is_change(), device.rings()) {
            (false, _) => GuestNotice::Unchanged,
            (true, 0) => GuestNotice::NoGuest,
            (true, _) => GuestNotice::Notified,
        };
        Ok(Changed { resized, guest })
    }
}

/// Nobody goes by the size of a disk that is attached to nobody.
struct Nobody;

impl SizeUsers for Nobody {
    fn set_size(&mut self, _: ByteLen) {}

    fn refresh(&mut self) {}
}

/// A disk of the configuration as it is served.
pub struct XenDisk {
    devices: XenDevices,
    id: String,
    queues: usize,
    disk: Arc<AnyDisk>,
}

impl XenDisk {
    /// The disk of this id, which offers so many rings.
    pub fn new(host: &XenHost, id: &str, queues: usize, disk: Arc<AnyDisk>) -> XenDisk {
        XenDisk { devices: host.devices(), id: id.to_owned(), queues, disk }
    }

    /// Gives it another size, also while it is attached to nobody.
    ///
    /// # Errors
    /// As [`XenDevices::resize`].
    pub fn resize(&self, asked: Resize) -> Result<Changed, ChangeError> {
        if let Some(device) = self.device().filter(|device| device.disk().is_some()) {
            return self.devices.resize(&device, asked);
        }
        let done = asked.carry_out(self.disk.as_ref(), &mut Nobody);
        let resized = done.map_err(|error| resize::refused(&format!("disk {:?}", self.id), asked, error))?;
        Ok(Changed { resized, guest: if resized.is_change() { GuestNotice::NoGuest } else { GuestNotice::Unchanged } })
    }

    /// The device that has it. One that had it before may still be about to be removed.
    fn device(&self) -> Option<Arc<Figures>> {
        let devices = self.devices.list().into_iter().filter(|device| device.id == self.id);
        devices.max_by_key(|device| device.rings() > 0)
    }

    /// What its rings counted. While it is attached to nobody: nothing.
    pub fn report(&self, workers: &[WorkerReport]) -> Option<Vec<QueueReport>> {
        match self.device() {
            Some(device) => device.report(workers),
            None => Some(vec![QueueReport::default(); self.queues]),
        }
    }

    /// What its rings counted of grants.
    pub fn grants(&self) -> Option<GrantCounters> {
        Some(self.device().map(|device| device.grants()).unwrap_or_default())
    }
}

/// The disk of the configuration that a device has, until this is dropped. It is active for so long.
struct Lease(Arc<Mutex<Option<DeviceName>>>, Arc<AnyDisk>);

impl Drop for Lease {
    fn drop(&mut self) {
        self.1.deactivate();
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// A disk on offer.
struct Offered {
    disk: Arc<AnyDisk>,
    plug: PlugOptions,
    health: Arc<DiskHealth>,
    storage: String,
    settings: VbdSettings,
    place: Option<XenPlace>,
    taken: Arc<Mutex<Option<DeviceName>>>,
}

fn offered(disks: &[XenDiskConfig]) -> BTreeMap<String, Offered> {
    let offer = |disk: &XenDiskConfig| Offered {
        disk: Arc::clone(&disk.disk),
        plug: disk.plug,
        health: Arc::clone(&disk.health),
        storage: disk.storage.clone(),
        settings: disk.settings.clone(),
        place: disk.front.place,
        taken: Arc::default(),
    };
    disks.iter().map(|disk| (disk.id.clone(), offer(disk))).collect()
}

/// Where devices get their disks from.
struct Disks {
    /// Every device of the type is ours.
    watch: bool,
    default: VbdSettings,
    own: BTreeMap<String, Offered>,
}

impl Opener for Disks {
    fn serves(&self, params: &Params) -> bool {
        self.watch || matches!(params, Params::Disk(id) if self.own.contains_key(id))
    }

    fn open(&self, params: &Params, name: &DeviceName, read_only: bool) -> Result<Backing, String> {
        let (kind, key, value) = match params {
            Params::Disk(id) => return self.own(id, name),
            Params::File(path) => ("file", "path", path.display().to_string()),
            Params::Null(size) => ("null", "size", size.0.to_string()),
        };
        let mut settings = Settings::new("params");
        settings.insert(key, &value).map_err(|error| error.to_string())?;
        if read_only && kind == "file" {
            settings.insert("readonly", "on").map_err(|error| error.to_string())?;
        }
        let disk = mqblk_storage::open(kind, &mut settings).map_err(|error| error.to_string())?;
        Ok(Backing {
            id: name.to_string(),
            storage: kind.to_owned(),
            disk,
            plug: PlugOptions::default(),
            health: Arc::new(DiskHealth::new(name.to_string(), ErrorPolicy::default())),
            settings: self.default.clone(),
            keep: Box::new(()),
        })
    }
}

impl Disks {
    fn own(&self, id: &str, name: &DeviceName) -> Result<Backing, String> {
        let Some(disk) = self.own.get(id) else {
            let known: Vec<_> = self.own.keys().map(String::as_str).collect();
            let known = if known.is_empty() { "none" } else { &known.join(", ") };
            return Err(format!(
                "params: found disk {id:?}, expected one that the daemon offers to Xen guests: {known}"
            ));
        };
        if let Some(XenPlace { domid, devid }) = disk.place
            && (domid, devid) != (name.front.0, name.devid)
        {
            return Err(format!(
                "params: found disk {id:?}, which is attached to domain {domid} by the daemon's configuration"
            ));
        }
        let mut taken = disk.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(other) = &*taken {
            return Err(format!("params: found disk {id:?}, which is attached as {other}, expected one that is not"));
        }
        disk.disk.activate().map_err(|error| error.to_string())?;
        *taken = Some(name.clone());
        Ok(Backing {
            id: id.to_owned(),
            storage: disk.storage.clone(),
            disk: Arc::clone(&disk.disk),
            plug: disk.plug,
            health: Arc::clone(&disk.health),
            settings: disk.settings.clone(),
            keep: Box::new(Lease(Arc::clone(&disk.taken), Arc::clone(&disk.disk))),
        })
    }
}
