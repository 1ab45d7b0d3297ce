//! The configuration of `mqblk serve` as plain data: all defaults filled in, all values checked.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use mqblk_engine::QueuePlacement;

use crate::broker::Broker;
use crate::contract::SavedContracts;
use crate::file::ConfigSource;
use crate::file::RawConfig;
use crate::interface::{ConfiguredInterface, Interfaces};
use crate::log_level::LogLevel;
use crate::out::OutDisk;
use crate::process::{AdminConfig, MetricsConfig};
use crate::sandbox_keys::SandboxConfig;
use crate::saved_changes::SavedChanges;
use crate::state_file::SavedState;
use crate::storage_backends::StorageBackends;
use crate::takeover::Predecessor;
use crate::user::UserConfig;

/// The whole configuration.
pub struct ServeConfig {
    /// Worker threads, 1 to 256.
    pub workers: u16,
    /// The CPU of each worker, in order. `None`: the kernel places them.
    pub pin: Option<Vec<u16>>,
    /// Age at which the log warns of a request that does not complete; `None`: never.
    pub hang_warning: Option<Duration>,
    /// The admin socket, if any.
    pub admin: Option<AdminConfig>,
    /// The metrics endpoint, if any.
    pub metrics: Option<MetricsConfig>,
    /// Longest wait of a stop for storage.
    pub drain_timeout: Duration,
    /// The sandbox of the process.
    pub sandbox: SandboxConfig,
    /// The user that the process becomes; `None`: it keeps the user that started it.
    pub user: Option<UserConfig>,
    /// The saved changes at run time, and their file.
    pub state: Option<SavedState>,
    /// The saved changes of settings.
    pub saved: SavedChanges,
    /// The devices as guests were given them.
    pub contracts: SavedContracts,
    /// The workers of the queues, for disks that are added at run time.
    pub placement: QueuePlacement,
    /// The storage backends, for disks that are added at run time.
    pub storages: Arc<dyn StorageBackends>,
    /// The process that opens images for this one, in the sandbox.
    pub broker: Option<Arc<Broker>>,
    /// The level of the log; `None`: it cannot be changed.
    pub log: Option<Arc<dyn LogLevel>>,
    /// The configuration as given.
    pub given: RawConfig,
    /// The source to read it from again; `None`: there is none.
    pub source: Option<Arc<dyn ConfigSource>>,
    /// The daemon that hands over to this one.
    pub predecessor: Option<Predecessor>,
    /// Ends the program's wait for a signal, once another process has taken over.
    pub end: Option<Arc<dyn Fn() + Send + Sync>>,
    /// Set when a signal ends the program.
    pub stop: Arc<AtomicBool>,
    /// All guest interfaces, in the order of `interfaces`.
    pub table: Interfaces,
    /// The guest interfaces with their disks. Ids are unique among all disks, controllers and LUNs.
    pub interfaces: Vec<ConfiguredInterface>,
    /// True if a disk that cannot be served keeps the daemon from starting.
    pub strict: bool,
    /// The disks that cannot be served now.
    pub out: Vec<OutDisk>,
}
