//! The verbs of the admin socket: a file each, and a line in [`verbs`].

mod disks;
mod lun;
mod stat;
mod version;
mod wire;

use std::sync::Arc;
use std::time::Duration;

use mqblk_admin::{VerbError, Verbs};
use mqblk_engine::{AnyDisk, Engine, PlugOptions, QueueReport, WorkerReport};
use mqblk_vhost_user_server::Server;
use rustix::time::{ClockId, clock_gettime};

use super::config::DiskConfig;
use super::luns::{Lun, Luns};
use super::print;

/// All that a client may ask for.
pub fn verbs(source: &Arc<Source>) -> Verbs {
    let mut verbs = vec![stat::verb(source), disks::verb(source), version::verb()];
    verbs.extend(lun::verbs(source));
    Verbs::new(verbs)
}

/// What the verbs look at.
pub struct Source {
    engine: Arc<Engine>,
    disks: Vec<Served>,
    luns: Arc<Luns>,
    started_ns: u64,
}

/// A disk that is served.
pub struct Served {
    /// How it was configured.
    pub about: DiskAbout,
    /// Its server.
    pub server: Server,
}

/// What the verbs tell of a disk's configuration.
pub struct DiskAbout {
    id: String,
    storage: String,
    plug: PlugOptions,
    queue_map: Vec<u16>,
    settings: serde_json::Map<String, serde_json::Value>,
}

impl DiskAbout {
    /// What is told of `disk`.
    pub fn of(disk: &DiskConfig<Arc<AnyDisk>>) -> DiskAbout {
        let pairs = print::disk_pairs(disk).into_iter().filter(|(key, _)| !["id", "storage"].contains(key));
        DiskAbout {
            id: disk.id.clone(),
            storage: disk.backing.storage.clone(),
            plug: disk.backing.plug,
            queue_map: disk.front.queue_map.clone(),
            settings: settings(pairs),
        }
    }
}

/// Settings as they are said.
fn settings(pairs: impl IntoIterator<Item = print::Pair>) -> serde_json::Map<String, serde_json::Value> {
    pairs.into_iter().map(|(key, value)| (key.to_owned(), to_json(value))).collect()
}

/// Settings are texts and numbers.
fn to_json(value: toml::Value) -> serde_json::Value {
    match value {
        toml::Value::Integer(number) => number.into(),
        toml::Value::String(text) => text.into(),
        other => other.to_string().into(),
    }
}

impl Source {
    /// Of a daemon that starts now.
    pub fn new(engine: Arc<Engine>, disks: Vec<Served>, luns: Arc<Luns>) -> Source {
        Source { engine, disks, luns, started_ns: monotonic_ns() }
    }

    /// The controllers and their LUNs.
    pub fn luns(&self) -> &Arc<Luns> {
        &self.luns
    }

    /// How many requests a LUN that is going still waits for, as far as that can be found.
    fn waits_for(&self, lun: &Lun) -> String {
        match self.counted().ok().map(|counted| wire::in_flight(lun, &counted.controllers[lun.controller])) {
            Some(1) => "a request".to_owned(),
            Some(count @ 2..) => format!("{count} requests"),
            Some(0) | None => "all requests".to_owned(),
        }
    }

    /// What the workers count at this moment, and the queues of each disk over all their lives.
    fn counted(&self) -> Result<Counted, VerbError> {
        let gone = |gone: mqblk_engine::WorkerGone| VerbError::Failed(gone.to_string());
        for _ in 0..TRIES {
            let workers = self.engine.reports().map_err(gone)?;
            let disks: Option<Vec<_>> = self.disks.iter().map(|disk| disk.server.report(&workers)).collect();
            let controllers: Option<Vec<_>> =
                self.luns.controllers().iter().map(|controller| controller.report(&workers)).collect();
            if let (Some(disks), Some(controllers)) = (disks, controllers) {
                return Ok(Counted { workers, disks, controllers });
            }
            std::thread::sleep(PAUSE);
        }
        Err(VerbError::Failed("queues come and go all the time; ask again".to_owned()))
    }
}

/// What was counted at one moment.
struct Counted {
    workers: Vec<WorkerReport>,
    /// The queues of each disk, in the order of the configuration.
    disks: Vec<Vec<QueueReport>>,
    /// Those of each controller.
    controllers: Vec<Vec<QueueReport>>,
}

/// How often workers are asked again when a queue came or went meanwhile, and how soon.
const TRIES: u32 = 100;
const PAUSE: Duration = Duration::from_millis(2);

/// The host's monotonic clock, in nanoseconds.
fn monotonic_ns() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    // Seconds since boot and nanoseconds below a second: never negative, and 584 years fit.
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}
