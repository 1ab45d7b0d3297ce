//! The configuration of `mqblk serve` as plain data: all defaults filled in, all values checked.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use mqblk_core::settings::SettingError;
use mqblk_engine::{AnyDisk, DiskHealth, DiskLimits, ErrorPolicy, IoLimits, LimitGroup, PlugOptions, QueuePlacement};

use crate::broker::Broker;
use crate::contract::{DiskContract, SavedContracts};
use crate::file::RawConfig;
use crate::interface::{ConfiguredInterface, Interfaces};
use crate::live::saved::SavedChanges;
use crate::out::OutDisk;
use crate::reload::ConfigSource;
use crate::sandbox::SandboxConfig;
use crate::sockets::SocketPermissions;
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
    /// How long a stop waits for storage.
    pub drain_timeout: Duration,
    /// What the process gives up before it serves.
    pub sandbox: SandboxConfig,
    /// The user that the process becomes; `None`: it stays the one that started it.
    pub user: Option<UserConfig>,
    /// What was changed at run time before, and the file that it is kept in.
    pub state: Option<SavedState>,
    /// What was changed of settings at run time before.
    pub saved: SavedChanges,
    /// What guests were given before.
    pub contracts: SavedContracts,
    /// The workers of the queues, for disks that are added at run time.
    pub placement: QueuePlacement,
    /// The storage backends, for disks that are added at run time.
    pub storages: Arc<dyn StorageBackends>,
    /// The process that opens images for this one, in the sandbox.
    pub broker: Option<Arc<Broker>>,
    /// The level of the log; `None`: it cannot be changed.
    pub log: Option<Arc<dyn LogLevel>>,
    /// The configuration as it was given.
    pub given: RawConfig,
    /// Where it is read again; `None`: nowhere.
    pub source: Option<Arc<dyn ConfigSource>>,
    /// The daemon that hands over to this one.
    pub predecessor: Option<Predecessor>,
    /// Ends the wait of the program for a signal: another process has taken over.
    pub end: Option<Arc<dyn Fn() + Send + Sync>>,
    /// Set when a signal asks for the end of the program.
    pub stop: Arc<AtomicBool>,
    /// All guest interfaces, in the order of `interfaces`.
    pub table: Interfaces,
    /// The guest interfaces with their disks. Ids are unique among all disks, controllers and LUNs.
    pub interfaces: Vec<Box<dyn ConfiguredInterface>>,
    /// Each disk that cannot be served keeps the daemon from starting.
    pub strict: bool,
    /// The disks that cannot be served now.
    pub out: Vec<OutDisk>,
}

/// The level of the log of the program.
pub trait LogLevel: Send + Sync {
    /// Returns the level, or the levels of targets.
    fn get(&self) -> String;

    /// Changes it from now on.
    ///
    /// # Errors
    /// If it is not a level.
    fn set(&self, level: &str) -> Result<(), SettingError>;
}

/// The admin socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminConfig {
    /// Its path. Differs from all disks' sockets.
    pub socket: PathBuf,
    /// Its permissions.
    pub permissions: SocketPermissions,
    /// True if its folder is made if there is none.
    pub makes_folder: bool,
}

/// The metrics endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetricsConfig {
    /// Where scrapers connect to.
    pub address: MetricsAddress,
    /// The permission bits of a Unix socket.
    pub mode: SocketMode,
}

/// Where scrapers connect to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetricsAddress {
    /// An address and port of TCP.
    Tcp(SocketAddr),
    /// A Unix socket. Differs from all disks' sockets and the admin socket.
    Unix(PathBuf),
}

impl fmt::Display for MetricsAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MetricsAddress::Tcp(address) => write!(f, "{address}"),
            MetricsAddress::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// The storage of a disk or a logical unit, independent of the guest interface.
#[derive(Clone)]
pub struct StorageConfig {
    /// The serial number that guests read: printable ASCII, no longer than the interface allows.
    pub serial: String,
    /// When a write is durable.
    pub cache: CacheMode,
    /// How adjacent requests are merged before submission to the storage.
    pub plug: PlugOptions,
    /// True if the daemon detects by itself that the storage has grown.
    pub watch_size: bool,
    /// How requests that the storage failed are handled.
    pub errors: ErrorPolicy,
    /// The limits of its requests.
    pub limits: StorageLimits,
    /// The storage backend: a name in the registry.
    pub kind: String,
    /// The backend's own settings with all defaults filled in, for printing.
    pub resolved_settings: Vec<(&'static str, String)>,
    /// The open disk.
    pub disk: Arc<AnyDisk>,
}

/// The limits of a storage's requests.
#[derive(Clone, Debug, Default)]
pub struct StorageLimits {
    /// Its own.
    pub own: IoLimits,
    /// The group that it is in, if any.
    pub group: Option<Arc<LimitGroup>>,
}

impl StorageConfig {
    /// Returns what guests are given of it, with these texts besides its serial number.
    pub fn contract(&self, texts: &[(&str, &str)]) -> DiskContract {
        let serial = [("serial", self.serial.as_str())];
        DiskContract::new(&self.kind, &self.resolved_settings, &*self.disk, &[&serial, texts].concat())
    }

    /// Creates the state that all workers share of the disk or logical unit `name`: its error policy and its limits.
    pub fn new_health(&self, name: &str) -> Arc<DiskHealth> {
        let limits = DiskLimits::new(self.limits.own, self.limits.group.as_ref());
        Arc::new(DiskHealth::with_limits(name, self.errors, limits))
    }
}

/// Permission bits of a socket, `0000` to `0777`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketMode(u32);

impl SocketMode {
    /// Read and write by the owner only.
    pub const OWNER_ONLY: SocketMode = SocketMode(0o600);

    /// Parses three or four octal digits, with no bits above `0777`.
    pub fn parse(text: &str) -> Option<SocketMode> {
        let octal = (3..=4).contains(&text.len()) && text.bytes().all(|byte| (b'0'..=b'7').contains(&byte));
        let bits = u32::from_str_radix(text, 8).ok()?;
        (octal && bits <= 0o777).then_some(SocketMode(bits))
    }

    /// Returns the bits, as for `chmod`.
    pub const fn bits(self) -> u32 {
        self.0
    }
}

impl fmt::Display for SocketMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04o}", self.0)
    }
}

/// When a write is durable. The guest may switch: virtio-blk's CONFIG_WCE, WCE of the SCSI caching mode page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheMode {
    /// After the next flush.
    Writeback,
    /// Before it is completed.
    Writethrough,
}

impl CacheMode {
    /// The words of the configuration.
    pub const WORDS: &'static [&'static str] = &["writeback", "writethrough"];

    /// Returns the mode of one of [`CacheMode::WORDS`].
    pub fn from_word(word: &str) -> CacheMode {
        if word == "writethrough" { CacheMode::Writethrough } else { CacheMode::Writeback }
    }

    /// Returns the configuration's word for this mode.
    pub const fn word(self) -> &'static str {
        match self {
            CacheMode::Writeback => "writeback",
            CacheMode::Writethrough => "writethrough",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_modes() {
        for (text, want) in [("0600", Some(0o600)), ("660", Some(0o660)), ("0777", Some(0o777)), ("000", Some(0))] {
            assert_eq!(SocketMode::parse(text).map(SocketMode::bits), want, "{text}");
        }
        for text in ["", "6", "66", "0o600", "+600", "-600", "0800", "1777", "00600", "rw-------"] {
            assert_eq!(SocketMode::parse(text), None, "{text}");
        }
    }

    #[test]
    fn words_round_trip() {
        for word in CacheMode::WORDS {
            assert_eq!(CacheMode::from_word(word).word(), *word);
        }
    }
}
