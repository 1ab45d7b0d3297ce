//! The configuration of `mqblk serve` as plain data: all defaults filled in, all values checked.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use mqblk_blkif::{GrantMode, PoolScope};
use mqblk_engine::{Coalesce, ErrorPolicy, FixedBufferUse, PlugOptions, PollPolicy};

use super::state::SavedLuns;
use crate::xen::XenSelector;

/// The whole configuration. `D` is the type of an open disk: the program's own, or a test's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServeConfig<D> {
    /// Worker threads, 1 to 256.
    pub workers: u16,
    /// The CPU of each worker, in order. `None`: the kernel places them.
    pub pin: Option<Vec<u16>>,
    /// Age at which the log warns of a request that does not complete; `None`: never.
    pub hang_warning: Option<Duration>,
    /// The admin socket, if any.
    pub admin: Option<AdminConfig>,
    /// How long a stop waits for storage.
    pub drain_timeout: Duration,
    /// The file that keeps LUNs added and removed at run time over restarts, if any.
    pub state: Option<StateConfig>,
    /// The Xen backend, if any.
    pub xen: Option<XenConfig>,
    /// The disks that are not controllers, in the order given.
    pub disks: Vec<DiskConfig<D>>,
    /// The virtio-scsi controllers, in the order given. Ids are unique among disks, controllers and LUNs.
    pub controllers: Vec<ControllerConfig<D>>,
}

impl<D> ServeConfig<D> {
    /// Iterates over the vhost-user endpoints, each with its device's name for messages.
    pub fn vhost_user_endpoints(&self) -> impl Iterator<Item = (String, &VhostUserEndpoint)> {
        let disks = self.disks.iter().filter_map(|disk| match &disk.endpoint {
            DiskEndpoint::VhostUser(endpoint) => Some((format!("disk {:?}", disk.id), endpoint)),
            DiskEndpoint::Xen(_) => None,
        });
        disks.chain(
            self.controllers.iter().map(|controller| (format!("controller {:?}", controller.id), &controller.endpoint)),
        )
    }
}

/// The Xen backend of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XenConfig {
    /// The Xen host.
    pub host: XenSelector,
    /// The device type: the xenstore directory that is watched.
    pub type_name: String,
    /// True if every device of the type is served, not only those that name a disk of the configuration.
    pub watch: bool,
    /// The directory of the rings' journals; `None`: no journals.
    pub state: Option<PathBuf>,
    /// Maximum number of granted pages that all disks together keep mapped; `None`: as many as the host allows.
    pub mapped_pages: Option<u64>,
    /// The endpoint settings of devices that name no disk of the configuration.
    pub default_endpoint: XenEndpoint,
}

/// The state file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateConfig {
    /// Its path. The file may not exist yet.
    pub path: PathBuf,
    /// Its content.
    pub saved: SavedLuns,
}

/// The admin socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminConfig {
    /// Its path. Differs from all disks' sockets.
    pub socket: PathBuf,
    /// Its permission bits.
    pub mode: SocketMode,
}

/// The vhost-user endpoint of a device: its socket and its queues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VhostUserEndpoint {
    /// Path of the vhost-user socket. Unique.
    pub socket: PathBuf,
    /// The socket's permission bits.
    pub socket_mode: SocketMode,
    /// Number of request queues offered, at least 1.
    pub queues: u16,
    /// Maximum ring size accepted, in entries: a power of two from 2 to 32768.
    pub queue_size: u16,
    /// The worker of each request queue, by number. As many entries as `queues`, each below `workers`.
    pub queue_map: Vec<u16>,
    /// How a worker waits for requests.
    pub poll: PollPolicy,
    /// How calls to the guest are coalesced.
    pub coalesce: Coalesce,
    /// Use of registered buffers: guest memory is pinned once instead of for each request.
    pub fixed_buffers: FixedBufferUse,
}

/// How guests reach a disk, by interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskEndpoint {
    /// virtio-blk.
    VhostUser(VhostUserEndpoint),
    /// Xen blkif.
    Xen(XenEndpoint),
}

impl DiskEndpoint {
    /// Returns the worker of each queue.
    pub fn queue_map(&self) -> &[u16] {
        match self {
            DiskEndpoint::VhostUser(endpoint) => &endpoint.queue_map,
            DiskEndpoint::Xen(endpoint) => &endpoint.queue_map,
        }
    }
}

/// The Xen device that a disk is attached as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XenAttachment {
    /// The frontend domain.
    pub domid: u16,
    /// The device number.
    pub devid: u32,
}

/// How a Xen guest reaches a disk: the rings and grants of its device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XenEndpoint {
    /// The device created at start; `None`: a toolstack attaches the disk by naming it in `params`.
    pub attachment: Option<XenAttachment>,
    /// Number of rings offered, at least 1.
    pub queues: u16,
    /// Maximum ring size offered, as the binary logarithm of its pages, up to 4.
    pub ring_order: u8,
    /// Maximum number of segments of an indirect request; 0: indirect requests are not offered.
    pub indirect_segments: u16,
    /// How the guest's pages are accessed.
    pub grants: GrantMode,
    /// The owner of mapped pages and buffer pages: each ring, or all rings together.
    pub grants_pool: PoolScope,
    /// Maximum number of pages that a ring keeps mapped.
    pub persistent_grants: u32,
    /// Idle time after which a mapped page is unmapped; zero: never.
    pub persistent_idle: Duration,
    /// True if requests in flight are recorded in a journal, for replay by the next daemon.
    pub journal: bool,
    /// The worker of each ring, by number. As many entries as `queues`, each below `workers`.
    pub queue_map: Vec<u16>,
    /// How a worker waits for requests.
    pub poll: PollPolicy,
    /// How events to the guest are coalesced.
    pub coalesce: Coalesce,
}

/// The storage of a disk or a logical unit, independent of the guest interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StorageConfig<D> {
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
    /// The storage backend: a name in the registry.
    pub kind: String,
    /// The backend's own settings with all defaults filled in, for printing.
    pub resolved_settings: Vec<(&'static str, String)>,
    /// The open disk.
    pub disk: D,
}

/// One disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskConfig<D> {
    /// Names the disk in logs and metrics.
    pub id: String,
    /// Its guest interface.
    pub endpoint: DiskEndpoint,
    /// Its storage.
    pub storage: StorageConfig<D>,
}

/// One virtio-scsi controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControllerConfig<D> {
    /// Names the controller in logs and metrics.
    pub id: String,
    /// Its guest interface.
    pub endpoint: VhostUserEndpoint,
    /// Maximum number of commands in flight on a LUN: a hint to the guest's driver.
    pub cmd_per_lun: u16,
    /// The directory whose files may be opened as LUNs of a guest that is migrated here; `None`: no file may.
    pub incoming_luns: Option<PathBuf>,
    /// Its LUNs, in the order given. Their addresses are unique.
    pub luns: Vec<LunConfig<D>>,
}

/// The address of a LUN on its controller, shown as `TARGET:LUN`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TargetLun {
    /// The target.
    pub target: u8,
    /// The LUN of that target, below 16384.
    pub lun: u16,
}

impl fmt::Display for TargetLun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.target, self.lun)
    }
}

/// A LUN of a controller: a path to a logical unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LunConfig<D> {
    /// Names the LUN in logs and metrics.
    pub id: String,
    /// Its address.
    pub address: TargetLun,
    /// Its logical unit.
    pub unit: LunUnit<D>,
    /// Its origin.
    pub origin: LunOrigin,
    /// True if guests see it. A removed LUN stays in the configuration while other LUNs share its logical unit.
    pub mapped: bool,
}

/// The origin of a LUN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LunOrigin {
    /// The configuration.
    Configuration,
    /// Added at run time, to this daemon or a previous one.
    RunTime,
}

impl LunOrigin {
    /// Returns the word that the admin socket reports.
    pub const fn word(self) -> &'static str {
        match self {
            LunOrigin::Configuration => "configuration",
            LunOrigin::RunTime => "run-time",
        }
    }
}

/// The logical unit of a LUN.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LunUnit<D> {
    /// A logical unit of its own. Its name is the LUN's id.
    Own(Box<UnitConfig<D>>),
    /// The logical unit of this name.
    Shared(String),
}

/// The configuration of a SCSI logical unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitConfig<D> {
    /// Its storage.
    pub storage: StorageConfig<D>,
    /// The name that its world-wide identification is derived from. Unique.
    pub unit_name: String,
    /// T10 vendor identification: 1 to 8 bytes of printable ASCII.
    pub vendor: String,
    /// Product identification: 1 to 16 bytes of printable ASCII.
    pub product: String,
    /// The file of persistent reservations, if they outlive the daemon. Unique.
    pub reservations: Option<PathBuf>,
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
        for word in FixedBufferUse::WORDS {
            assert_eq!(FixedBufferUse::from_word(word).word(), *word);
        }
    }
}
