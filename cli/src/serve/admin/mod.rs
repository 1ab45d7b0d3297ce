//! The verbs of the admin socket. Each has its own file, and is registered in [`verbs`].

mod disks;
mod lun;
mod resize;
mod resume;
mod stat;
mod version;
mod wire;

use std::sync::Arc;
use std::time::Duration;

use mqblk_admin::{VerbError, Verbs};
use mqblk_blkif::GrantCounters;
use mqblk_core::Resize;
use mqblk_core::settings::Settings;
use mqblk_engine::{AnyDisk, DiskHealth, Engine, PlugOptions, QueueStats, WorkerStats};
use mqblk_xen_server::DeviceStats;
use rustix::time::{ClockId, clock_gettime};

use super::config::DiskConfig;
use super::interfaces::{AnyExport, Interface};
use super::luns::{ChangeError, LunEntry, LunSelector, Luns};
use super::print;
use super::resize::ResizeOutcome;
use super::watch::WatchedDisk;
use super::xen::XenDevices;

/// Returns all verbs.
pub fn verbs(source: &Arc<DaemonState>) -> Verbs {
    let mut verbs = vec![stat::verb(source), disks::verb(source), version::verb(), resize::verb(source)];
    verbs.push(resume::verb(source));
    verbs.extend(lun::verbs(source));
    Verbs::new(verbs)
}

/// The state of the daemon that the verbs use.
pub struct DaemonState {
    engine: Arc<Engine>,
    disks: Vec<ServedDisk>,
    /// The devices of the Xen backend, attached and detached at run time.
    xen: Option<XenDevices>,
    luns: Arc<Luns>,
    started_ns: u64,
}

/// A served disk.
pub struct ServedDisk {
    /// Its configuration, for reports.
    pub info: DiskInfo,
    /// Its guest side.
    pub export: AnyExport,
    /// The disk, if the size of its storage is watched.
    pub watched: Option<Arc<AnyDisk>>,
}

/// A disk's configuration, as the verbs report it.
pub struct DiskInfo {
    id: String,
    interface: Interface,
    storage: String,
    plug: PlugOptions,
    health: Arc<DiskHealth>,
    queue_map: Vec<u16>,
    settings: serde_json::Map<String, serde_json::Value>,
}

impl DiskInfo {
    /// Returns that of a configured disk.
    pub fn of(disk: &DiskConfig<Arc<AnyDisk>>, health: &Arc<DiskHealth>) -> DiskInfo {
        let pairs =
            print::disk_pairs(disk).into_iter().filter(|(key, _)| !["id", "storage", "interface"].contains(key));
        DiskInfo {
            id: disk.id.clone(),
            interface: Interface::of(&disk.endpoint),
            storage: disk.storage.kind.clone(),
            plug: disk.storage.plug,
            health: Arc::clone(health),
            queue_map: disk.endpoint.queue_map().to_vec(),
            settings: settings(pairs),
        }
    }

    /// Returns that of a Xen device that is not configured.
    fn of_device(device: &DeviceStats) -> DiskInfo {
        DiskInfo {
            id: device.id.clone(),
            interface: Interface::Xen,
            storage: device.storage.clone(),
            plug: device.plug,
            health: Arc::clone(&device.health),
            queue_map: device.queue_map.clone(),
            settings: serde_json::Map::new(),
        }
    }
}

/// Converts settings to a JSON object.
fn settings(pairs: impl IntoIterator<Item = print::Pair>) -> serde_json::Map<String, serde_json::Value> {
    pairs.into_iter().map(|(key, value)| (key.to_owned(), to_json(value))).collect()
}

/// Converts a setting's value. Settings are texts and numbers.
fn to_json(value: toml::Value) -> serde_json::Value {
    match value {
        toml::Value::Integer(number) => number.into(),
        toml::Value::String(text) => text.into(),
        other => other.to_string().into(),
    }
}

impl DaemonState {
    /// Creates the state of a daemon that starts now.
    pub fn new(engine: Arc<Engine>, disks: Vec<ServedDisk>, xen: Option<XenDevices>, luns: Arc<Luns>) -> DaemonState {
        DaemonState { engine, disks, xen, luns, started_ns: monotonic_ns() }
    }

    /// Returns the controllers and their LUNs.
    pub fn luns(&self) -> &Arc<Luns> {
        &self.luns
    }

    /// Starts to drain the queues of all disks and controllers, as the first step of a stop.
    pub fn begin_stop(&self) {
        self.disks.iter().for_each(|disk| disk.export.begin_stop());
        self.luns.controllers().iter().for_each(|controller| controller.begin_stop());
    }

    /// Returns the Xen devices whose disks are not configured.
    fn unconfigured_devices(&self) -> Vec<Arc<DeviceStats>> {
        let devices = self.xen.as_ref().map(|xen| xen.list()).unwrap_or_default();
        let named = |device: &Arc<DeviceStats>| self.disks.iter().any(|disk| disk.info.id == device.id);
        devices.into_iter().filter(|device| !named(device)).collect()
    }

    /// Resizes the disk, LUN or Xen device of this id.
    ///
    /// # Errors
    /// If nothing has this id, or it cannot have that size.
    pub fn resize(&self, id: &str, request: Resize) -> Result<ResizeOutcome, ChangeError> {
        if let Some(disk) = self.disks.iter().find(|disk| disk.info.id == id) {
            return disk.export.resize(request);
        }
        if let Some(xen) = &self.xen
            && let Some(device) = self.unconfigured_devices().into_iter().find(|device| device.id == id)
        {
            return xen.resize(&device, request);
        }
        let luns = self.luns.list();
        if luns.iter().any(|lun| lun.id == id) {
            return self.luns.resize(&LunSelector::Id(id.to_owned()), request).map(|(_, changed)| changed);
        }
        let mut ids: Vec<_> = self.disks.iter().map(|disk| disk.info.id.clone()).collect();
        ids.extend(self.unconfigured_devices().iter().map(|device| device.id.clone()));
        ids.extend(luns.into_iter().map(|lun| lun.id));
        let expected = match ids.len() {
            0 => "the id of a disk or LUN, of which there is none".to_owned(),
            1..=LISTED => format!("one of {}", ids.join(", ")),
            many => format!("the id of one of the {many} disks and LUNs that disks and lun.list tell"),
        };
        Err(ChangeError::Setting(Settings::new("resize").error("id", format!("{id:?}"), expected)))
    }

    /// Returns the disks whose storage size is watched, each with an id that [`resize`](Self::resize) accepts.
    pub fn watched_disks(&self) -> Vec<WatchedDisk> {
        let own = self.disks.iter();
        let own = own.filter_map(|disk| Some((disk.info.id.clone(), Arc::clone(disk.watched.as_ref()?))));
        let unconfigured =
            self.unconfigured_devices().into_iter().filter_map(|device| Some((device.id.clone(), device.disk()?)));
        own.chain(unconfigured).chain(self.luns.watched_disks()).collect()
    }

    /// Describes how many requests the removal of a LUN waits for, as far as that can be determined.
    fn pending_requests(&self, lun: &LunEntry) -> String {
        match self.snapshot().ok().map(|counted| wire::in_flight(lun, &counted.controllers[lun.controller])) {
            Some(1) => "a request".to_owned(),
            Some(count @ 2..) => format!("{count} requests"),
            Some(0) | None => "all requests".to_owned(),
        }
    }

    /// Returns the statistics of the workers and of each device's queues, including queues detached since.
    fn snapshot(&self) -> Result<StatsSnapshot, VerbError> {
        let gone = |gone: mqblk_engine::WorkerGone| VerbError::Failed(gone.to_string());
        for _ in 0..ATTEMPTS {
            let workers = self.engine.stats().map_err(gone)?;
            let mut disks: Vec<Option<DiskSnapshot>> = Vec::new();
            disks.extend(self.disks.iter().map(|disk| {
                Some(DiskSnapshot {
                    queues: disk.export.stats(&workers)?,
                    in_flight_region: disk.export.in_flight_region(),
                    grants: disk.export.grants(),
                })
            }));
            let unconfigured = self.unconfigured_devices();
            let of_unconfigured = unconfigured.iter().map(|device| {
                let (queues, grants) = (device.queue_stats(&workers)?, Some(device.grant_counters()));
                let counted = DiskSnapshot { queues, in_flight_region: None, grants };
                Some((DiskInfo::of_device(device), counted))
            });
            let (disks, unconfigured): (Option<Vec<_>>, Option<Vec<_>>) =
                (disks.into_iter().collect(), of_unconfigured.collect());
            let controllers: Option<Vec<_>> =
                self.luns.controllers().iter().map(|controller| controller.stats(&workers)).collect();
            if let (Some(disks), Some(unconfigured), Some(controllers)) = (disks, unconfigured, controllers) {
                return Ok(StatsSnapshot { workers, disks, unconfigured, controllers });
            }
            std::thread::sleep(PAUSE);
        }
        Err(VerbError::Failed("queues are attached and detached all the time; try again".to_owned()))
    }
}

/// All statistics at one moment.
struct StatsSnapshot {
    workers: Vec<WorkerStats>,
    /// Each disk, in the order of the configuration.
    disks: Vec<DiskSnapshot>,
    /// Xen devices whose disks are not configured.
    unconfigured: Vec<(DiskInfo, DiskSnapshot)>,
    /// The queues of each controller.
    controllers: Vec<Vec<QueueStats>>,
}

/// The statistics of a disk.
struct DiskSnapshot {
    queues: Vec<QueueStats>,
    in_flight_region: Option<bool>,
    grants: Option<GrantCounters>,
}

/// Maximum number of ids that a message lists.
const LISTED: usize = 16;
/// Number of attempts, and the pause between them, when a queue is attached or detached while statistics are read.
const ATTEMPTS: u32 = 100;
const PAUSE: Duration = Duration::from_millis(2);

/// Returns the host's monotonic clock in nanoseconds.
fn monotonic_ns() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    // Neither part is negative, and 64 bits hold 584 years.
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}
