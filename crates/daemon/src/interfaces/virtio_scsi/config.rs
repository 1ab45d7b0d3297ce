//! The configuration of controllers, LUNs and logical units.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::change::ChangeSource;
use crate::contract::DiskContract;
use crate::storage::StorageConfig;
use crate::vhost_user::VhostUserEndpoint;

/// The word of the interface.
pub(super) const WORD: &str = "virtio-scsi";
/// The worker of the control and the event queue. Both are idle most of the time.
pub(super) const FIXED_WORKER: u16 = 0;

/// One virtio-scsi controller.
#[derive(Clone)]
pub(super) struct ControllerConfig {
    /// Names the controller in logs and metrics.
    pub id: String,
    /// Its guest interface.
    pub endpoint: VhostUserEndpoint,
    /// Maximum number of commands in flight on a LUN: a hint to the guest's driver.
    pub cmd_per_lun: u16,
    /// Limits of the LUNs of a guest that is migrated here; `None`: no LUN is opened for it.
    pub incoming_luns: Option<IncomingLimits>,
    /// Its LUNs, in the order given. Their addresses are unique.
    pub luns: Vec<LunConfig>,
    pub origin: ChangeSource,
}

/// The operator's limits of the LUNs that an incoming guest may bring to a controller.
#[derive(Clone, Debug)]
pub(super) struct IncomingLimits {
    /// The directory of files that may be opened.
    pub folder: PathBuf,
    /// Most LUNs of the controller, unless it has more already.
    pub luns: u16,
    /// The group whose limits the LUNs share.
    pub limit_group: Option<String>,
}

/// The address of a LUN on its controller, shown as `TARGET:LUN`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct TargetLun {
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
#[derive(Clone)]
pub(super) struct LunConfig {
    /// Names the LUN in logs and metrics.
    pub id: String,
    pub address: TargetLun,
    /// Its logical unit.
    pub unit: LunUnit,
    pub origin: LunOrigin,
    /// True if guests see it. A removed LUN stays in the configuration while other LUNs share its logical unit.
    pub mapped: bool,
}

impl LunConfig {
    /// Returns true if its storage has one channel: all queues must be on the worker of the fixed ones.
    pub(super) fn has_one_channel(&self) -> bool {
        matches!(&self.unit, LunUnit::Own(unit) if unit.storage.disk.max_channels() == Some(1))
    }

    /// Returns the file of persistent reservations of its own logical unit, if they outlive the daemon.
    pub(super) fn reservations(&self) -> Option<&Path> {
        match &self.unit {
            LunUnit::Own(unit) => unit.reservations.as_deref(),
            LunUnit::Shared(_) => None,
        }
    }
}

/// The origin of a LUN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LunOrigin {
    Configuration,
    /// Added at run time, to this daemon or a previous one.
    RunTime,
}

impl From<ChangeSource> for LunOrigin {
    fn from(source: ChangeSource) -> LunOrigin {
        match source {
            ChangeSource::Configuration => LunOrigin::Configuration,
            ChangeSource::RunTime => LunOrigin::RunTime,
        }
    }
}

impl LunOrigin {
    /// Returns the source of its addition and removal.
    pub(super) const fn source(self) -> ChangeSource {
        match self {
            LunOrigin::Configuration => ChangeSource::Configuration,
            LunOrigin::RunTime => ChangeSource::RunTime,
        }
    }

    /// Returns the word that the admin socket reports.
    pub(super) const fn word(self) -> &'static str {
        match self {
            LunOrigin::Configuration => "configuration",
            LunOrigin::RunTime => "run-time",
        }
    }
}

/// The logical unit of a LUN.
#[derive(Clone)]
pub(super) enum LunUnit {
    /// A logical unit of its own. Its name is the LUN's id.
    Own(Box<UnitConfig>),
    /// The logical unit of this name.
    Shared(String),
}

impl UnitConfig {
    /// Returns its properties as guests are given them.
    pub(super) fn contract(&self) -> DiskContract {
        let UnitConfig { storage, unit_name, vendor, product, reservations: _ } = self;
        storage.contract(&[("unit-name", unit_name), ("vendor", vendor), ("product", product)])
    }
}

/// The configuration of a SCSI logical unit.
#[derive(Clone)]
pub(super) struct UnitConfig {
    pub storage: StorageConfig,
    /// The name that its world-wide identification is derived from. Unique.
    pub unit_name: String,
    /// T10 vendor identification: 1 to 8 bytes of printable ASCII.
    pub vendor: String,
    /// Product identification: 1 to 16 bytes of printable ASCII.
    pub product: String,
    /// The file of persistent reservations, if they outlive the daemon. Unique.
    pub reservations: Option<PathBuf>,
}
