//! The state of a running daemon: its workers and its served interfaces.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use mqblk_admin::VerbError;
use mqblk_core::Resize;
use mqblk_core::settings::Settings;
use mqblk_engine::{AnyDisk, Engine, WorkerStats};
use rustix::time::{ClockId, clock_gettime};

use crate::interface::{DeviceStat, Export, ServedDevice, ServedInterface, StatDetail};
use crate::resize::{ChangeError, ResizeOutcome};
use crate::watch::WatchedDisk;

/// Maximum number of ids that a message lists.
const LISTED: usize = 16;
/// Number of attempts, and the pause between them, when a queue is attached or detached while statistics are read.
const ATTEMPTS: u32 = 100;
const PAUSE: Duration = Duration::from_millis(2);

/// The state of the daemon that the verbs use.
pub struct DaemonState {
    engine: Arc<Engine>,
    interfaces: Vec<Arc<dyn ServedInterface>>,
    started_ns: u64,
}

impl DaemonState {
    /// Creates the state of a daemon that starts now.
    pub fn new(engine: Arc<Engine>, interfaces: Vec<Arc<dyn ServedInterface>>) -> DaemonState {
        DaemonState { engine, interfaces, started_ns: monotonic_ns() }
    }

    /// Returns the workers.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Returns the served interfaces.
    pub fn interfaces(&self) -> &[Arc<dyn ServedInterface>] {
        &self.interfaces
    }

    /// Returns when the daemon started, in nanoseconds of the monotonic clock.
    pub fn started_ns(&self) -> u64 {
        self.started_ns
    }

    /// Returns the devices of all interfaces, sorted by position.
    pub fn devices(&self) -> Vec<Arc<dyn ServedDevice>> {
        let mut devices: Vec<_> = self.interfaces.iter().flat_map(|interface| interface.devices()).collect();
        devices.sort_by_key(|(position, _)| *position);
        devices.into_iter().map(|(_, device)| device).collect()
    }

    /// Returns all disks and LUNs, sorted by their devices' positions.
    pub fn exports(&self) -> Vec<Arc<dyn Export>> {
        self.devices().iter().flat_map(|device| device.exports()).collect()
    }

    /// Resizes the disk or LUN of this id.
    ///
    /// # Errors
    /// If nothing has this id, or it cannot have that size.
    pub fn resize(&self, id: &str, request: Resize) -> Result<ResizeOutcome, ChangeError> {
        let exports = self.exports();
        if let Some(export) = exports.iter().find(|export| export.id() == id) {
            return export.resize(request);
        }
        let ids: Vec<_> = exports.iter().map(|export| export.id()).collect();
        let expected = match ids.len() {
            0 => "the id of a disk or LUN, of which there is none".to_owned(),
            1..=LISTED => format!("one of {}", ids.join(", ")),
            many => format!("the id of one of the {many} disks and LUNs that disks and lun.list tell"),
        };
        Err(ChangeError::Setting(Settings::new("resize").error("id", format!("{id:?}"), expected)))
    }

    /// Returns the disks whose storage size is watched, without duplicates, each with an id that [`resize`](Self::resize) accepts.
    pub fn watched_disks(&self) -> Vec<WatchedDisk> {
        let mut seen = HashSet::new();
        let watched = self.exports().into_iter().filter_map(|export| Some((export.id().to_owned(), export.watched()?)));
        watched.filter(|(_, disk)| seen.insert(Arc::as_ptr(disk).cast::<()>())).collect()
    }

    /// Returns the disks to flush when the daemon stops, each with its name for messages.
    pub fn flush_targets(&self) -> Vec<(String, Arc<AnyDisk>)> {
        self.interfaces.iter().flat_map(|interface| interface.flush_targets()).collect()
    }

    /// Returns the statistics of the workers and of each device at one moment.
    ///
    /// # Errors
    /// If a worker is gone, or queues are attached and detached all the time.
    pub fn snapshot(&self, detail: StatDetail) -> Result<(Vec<WorkerStats>, Vec<DeviceStat>), VerbError> {
        for _ in 0..ATTEMPTS {
            let workers = self.engine.stats().map_err(|gone| VerbError::Failed(gone.to_string()))?;
            let stats: Option<Vec<_>> = self.devices().iter().map(|device| device.stat(&workers, detail)).collect();
            if let Some(stats) = stats {
                return Ok((workers, stats));
            }
            std::thread::sleep(PAUSE);
        }
        Err(VerbError::Failed("queues are attached and detached all the time; try again".to_owned()))
    }
}

/// Returns the host's monotonic clock in nanoseconds.
pub(crate) fn monotonic_ns() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    // Neither part is negative, and 64 bits hold 584 years.
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}
