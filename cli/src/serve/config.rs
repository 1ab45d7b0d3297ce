//! What `mqblk serve` was asked to do, as plain data: every default filled in, every value checked.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use mqblk_blkif::{GrantMode, PoolOwner};
use mqblk_engine::{Coalesce, ErrorPolicy, FixedBufferUse, PlugOptions, PollPolicy};

use super::state::State;
use crate::xen::WhichXen;

/// The whole of it. `D` is what an open disk is: the program's own type, or a test's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServeConfig<D> {
    /// Worker threads, 1 to 256.
    pub workers: u16,
    /// The CPU of each worker, in order. `None`: the kernel places them.
    pub pin: Option<Vec<u16>>,
    /// From when on a request that does not end is told of in the log; `None`: never.
    pub hang_warning: Option<Duration>,
    /// The admin socket, if there is to be one.
    pub admin: Option<AdminConfig>,
    /// How long a stop waits for storage.
    pub drain_timeout: Duration,
    /// Where LUNs that come and go while the daemon runs are kept for the next one, if they are.
    pub state: Option<StateConfig>,
    /// What is done on a Xen host; `None`: nothing.
    pub xen: Option<XenConfig>,
    /// The disks that are no controllers, in the order given.
    pub disks: Vec<DiskConfig<D>>,
    /// The virtio-scsi controllers, in the order given. No id is used twice among disks, controllers and LUNs.
    pub controllers: Vec<ControllerConfig<D>>,
}

impl<D> ServeConfig<D> {
    /// What guests connect to by sockets: each one's name in messages, and its front.
    pub fn fronts(&self) -> impl Iterator<Item = (String, &Front)> {
        let disks = self.disks.iter().filter_map(|disk| match &disk.front {
            DiskFront::VhostUser(front) => Some((format!("disk {:?}", disk.id), front)),
            DiskFront::Xen(_) => None,
        });
        disks.chain(self.controllers.iter().map(|one| (format!("controller {:?}", one.id), &one.front)))
    }
}

/// The back-end of a Xen host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XenConfig {
    /// Which Xen.
    pub which: WhichXen,
    /// The type of its devices: the directory of xenstore that is watched.
    pub type_name: String,
    /// Every device of the type is served, not only those that name a disk of ours.
    pub watch: bool,
    /// Where the rings' journals are kept; `None`: there are none.
    pub state: Option<PathBuf>,
    /// Most pages of other domains that all disks together keep mapped; `None`: as many as the host allows.
    pub mapped_pages: Option<u64>,
    /// How devices are served that name no disk of ours.
    pub default: XenFront,
}

/// The state file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateConfig {
    /// Where it is, or is to be.
    pub path: PathBuf,
    /// What lies in it.
    pub kept: State,
}

/// The admin socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminConfig {
    /// Where it is to be. No disk's socket.
    pub socket: PathBuf,
    /// Its permission bits.
    pub mode: SocketMode,
}

/// How a guest reaches a device: its socket and its queues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Front {
    /// Where the vhost-user socket is to be. Unique.
    pub socket: PathBuf,
    /// The socket's permission bits.
    pub socket_mode: SocketMode,
    /// Queues for requests that are offered, at least 1.
    pub queues: u16,
    /// Largest ring accepted, in entries: a power of two from 2 to 32768.
    pub queue_size: u16,
    /// The worker of each queue for requests, by number. As many entries as `queues`, each below `workers`.
    pub queue_map: Vec<u16>,
    /// How a worker waits for requests.
    pub poll: PollPolicy,
    /// How calls to the guest are put off.
    pub coalesce: Coalesce,
    /// Whether guest memory is registered with the kernel once, in place of being mapped for each request.
    pub fixed_buffers: FixedBufferUse,
}

/// How a guest reaches a disk: by interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskFront {
    /// virtio-blk.
    VhostUser(Front),
    /// Xen blkif.
    Xen(XenFront),
}

impl DiskFront {
    /// The worker of each queue.
    pub fn queue_map(&self) -> &[u16] {
        match self {
            DiskFront::VhostUser(front) => &front.queue_map,
            DiskFront::Xen(front) => &front.queue_map,
        }
    }
}

/// Where a Xen disk is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XenPlace {
    /// The domain.
    pub domid: u16,
    /// The device's number.
    pub devid: u32,
}

/// How a Xen guest reaches a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XenFront {
    /// Where it is attached from the start; `None`: it is on offer for who names it as `params`.
    pub place: Option<XenPlace>,
    /// Rings that are offered, at least 1.
    pub queues: u16,
    /// Largest ring that is offered: pages, as a power of two's exponent, up to 4.
    pub ring_order: u8,
    /// Most segments of an indirect request; 0: there are none.
    pub indirect_segments: u16,
    /// How the guest's pages are reached.
    pub grants: GrantMode,
    /// Whose mapped pages and buffer pages are.
    pub grants_pool: PoolOwner,
    /// Most pages that a ring keeps mapped.
    pub persistent_grants: u32,
    /// When a mapped page that is not used is let go; zero: never.
    pub persistent_idle: Duration,
    /// Unanswered requests are noted for a daemon after this one.
    pub journal: bool,
    /// The worker of each ring, by number. As many entries as `queues`, each below `workers`.
    pub queue_map: Vec<u16>,
    /// How a worker waits for requests.
    pub poll: PollPolicy,
    /// How events for the guest are put off.
    pub coalesce: Coalesce,
}

/// What a disk or a unit is, whichever way guests reach it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backing<D> {
    /// The serial number that guests read: printable ASCII, as long as the interface carries.
    pub serial: String,
    /// When a write is durable.
    pub cache: CacheMode,
    /// How neighbouring requests are joined on their way to the storage.
    pub plug: PlugOptions,
    /// Whether the daemon sees by itself that the storage has grown.
    pub watch_size: bool,
    /// What becomes of requests that the storage failed.
    pub errors: ErrorPolicy,
    /// The kind of storage: a name in the registry of storage backends.
    pub storage: String,
    /// The storage's own settings as they came to be, for printing.
    pub storage_settings: Vec<(&'static str, String)>,
    /// The open disk.
    pub disk: D,
}

/// One disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskConfig<D> {
    /// Names the disk in logs and metrics.
    pub id: String,
    /// How a guest reaches it.
    pub front: DiskFront,
    /// What it is.
    pub backing: Backing<D>,
}

/// One virtio-scsi controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControllerConfig<D> {
    /// Names the controller in logs and metrics.
    pub id: String,
    /// How a guest reaches it.
    pub front: Front,
    /// Most commands that the guest shall have under way on one LUN: a hint to its driver.
    pub cmd_per_lun: u16,
    /// The folder whose files may be opened as LUNs of a guest that is migrated here; `None`: none may.
    pub incoming_luns: Option<PathBuf>,
    /// Its LUNs, in the order given. No place is taken twice.
    pub luns: Vec<LunConfig<D>>,
}

/// Where a LUN is in its controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LunPlace {
    /// The target.
    pub target: u8,
    /// The LUN of that target, below 16384.
    pub lun: u16,
}

impl fmt::Display for LunPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.target, self.lun)
    }
}

/// One LUN of a controller: a way to a unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LunConfig<D> {
    /// Names the LUN in logs and metrics.
    pub id: String,
    /// Where it is.
    pub place: LunPlace,
    /// What it leads to.
    pub unit: LunUnit<D>,
    /// Where it is from.
    pub origin: LunOrigin,
    /// Guests find it. One that was removed is here for the others that share its unit.
    pub mapped: bool,
}

/// Where a LUN is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LunOrigin {
    /// The configuration.
    Configuration,
    /// It was added while the daemon ran, this one or one before.
    RunTime,
}

impl LunOrigin {
    /// The word that the admin socket says.
    pub const fn word(self) -> &'static str {
        match self {
            LunOrigin::Configuration => "configuration",
            LunOrigin::RunTime => "run-time",
        }
    }
}

/// What a LUN leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LunUnit<D> {
    /// A unit of its own, which has the LUN's id as its name.
    Own(Box<UnitConfig<D>>),
    /// The unit of this name.
    Shared(String),
}

/// A SCSI logical unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitConfig<D> {
    /// What it is made of.
    pub backing: Backing<D>,
    /// What its world-wide identification is made of. No other unit has it.
    pub unit_name: String,
    /// T10 vendor identification: 1 to 8 bytes of printable ASCII.
    pub vendor: String,
    /// Product identification: 1 to 16 bytes of printable ASCII.
    pub product: String,
    /// Where persistent reservations are kept, if they are to outlive the daemon. No other unit's file.
    pub reservations: Option<PathBuf>,
}

/// Permission bits of a socket, `0000` to `0777`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketMode(u32);

impl SocketMode {
    /// Read and write for the owner only.
    pub const OWNER_ONLY: SocketMode = SocketMode(0o600);

    /// Parses three or four octal digits, with no bits above `0777`.
    pub fn parse(text: &str) -> Option<SocketMode> {
        let octal = (3..=4).contains(&text.len()) && text.bytes().all(|byte| (b'0'..=b'7').contains(&byte));
        let bits = u32::from_str_radix(text, 8).ok()?;
        (octal && bits <= 0o777).then_some(SocketMode(bits))
    }

    /// The bits, as `chmod` takes them.
    pub const fn bits(self) -> u32 {
        self.0
    }
}

impl fmt::Display for SocketMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04o}", self.0)
    }
}

/// When a write is durable. The guest may switch between the two: virtio-blk's CONFIG_WCE, WCE of the caching mode page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheMode {
    /// At the next flush.
    Writeback,
    /// Before it is answered.
    Writethrough,
}

impl CacheMode {
    /// The words that a user writes, in the order of [`CacheMode::from_word`].
    pub const WORDS: &'static [&'static str] = &["writeback", "writethrough"];

    /// The mode of one of [`CacheMode::WORDS`].
    pub fn from_word(word: &str) -> CacheMode {
        if word == "writethrough" { CacheMode::Writethrough } else { CacheMode::Writeback }
    }

    /// The word that a user writes for this mode.
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
    fn words_mean_themselves() {
        for word in CacheMode::WORDS {
            assert_eq!(CacheMode::from_word(word).word(), *word);
        }
        for word in FixedBufferUse::WORDS {
            assert_eq!(FixedBufferUse::from_word(word).word(), *word);
        }
    }
}
