//! Interface to the program that opens disks.

use std::sync::Arc;
use std::time::Duration;

use mqblk_blkif::{GrantMode, PoolScope};
use mqblk_core::GuestObserver;
use mqblk_engine::{AnyDisk, DiskHealth, PlugOptions, SharedQueueSettings};

use crate::frontend::RingLimits;
use crate::name::DeviceName;
use crate::params::Params;

/// Settings of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VbdSettings {
    /// Limits of the number and size of rings.
    pub ring_limits: RingLimits,
    /// Maximum of segments of an indirect request; 0: indirect requests are not offered.
    pub indirect_segments: u16,
    /// Grant mode.
    pub mode: GrantMode,
    /// The sharing of a pool of mapped pages and buffer pages.
    pub pool: PoolScope,
    /// Maximum of persistent grants of a ring.
    pub persistent_max: u32,
    /// A persistent grant that is unused for this time is unmapped; zero: never.
    pub persistent_idle: Duration,
    /// True if requests are recorded in a journal, where the backend has a journal directory.
    pub journal: bool,
    /// True if every write is durable before its response.
    pub write_through: bool,
}

/// An open disk and its settings.
pub struct DiskBacking {
    /// Id of the disk in statistics.
    pub id: String,
    /// Name of the storage backend.
    pub storage: String,
    /// The disk.
    pub disk: Arc<AnyDisk>,
    /// Plugging and merging of its requests.
    pub plug: PlugOptions,
    /// Error policy and stop of the disk.
    pub health: Arc<DiskHealth>,
    /// Settings of the device.
    pub settings: VbdSettings,
    /// Settings of its rings; those past the end of the map are assigned round-robin.
    pub queues: Arc<SharedQueueSettings>,
    /// Notified of the device's guest.
    pub guests: Option<Arc<dyn GuestObserver>>,
    /// The device's use of the disk, dropped when the disk is no longer served.
    pub disk_use: Box<dyn DiskUse>,
}

/// Error of [`DiskUse::activate`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ActivationError {
    /// Another device, or another process, serves the disk. The reason, for users.
    InUse(String),
    /// The storage has failed. The reason, for users.
    Failed(String),
}

/// A device's use of a disk that is open. Several devices may have a disk open; one at a time serves its requests. So a
/// guest that migrates is given its disk when its source has released it.
pub trait DiskUse: Send {
    /// Returns another device of this process that has the disk open, and that would share it with this one.
    fn other_device(&self) -> Option<DeviceName> {
        None
    }

    /// Activates the disk before rings of the device are served, until the drop. Does nothing if it is active. Does not
    /// wait for another user.
    ///
    /// # Errors
    /// When another user has it, or the storage fails. The disk is then not active.
    fn activate(&mut self) -> Result<(), ActivationError> {
        Ok(())
    }

    /// Leaves the disk active until the process ends: requests are left in flight, and no other user may overtake them.
    fn leave_active(&mut self) {}
}

/// The use of a disk that is never in use.
impl DiskUse for () {}

/// Opens disks.
pub trait Opener: Send + Sync {
    /// Returns true if this program serves the device; another program may serve devices of the same type.
    fn serves(&self, params: &Params) -> bool;

    /// Opens the disk of a device, which is not [active](DiskUse::activate) yet. Called on a thread of that device, so
    /// it may block.
    ///
    /// # Errors
    /// The reason, for users: the disk does not exist.
    fn open(&self, params: &Params, name: &DeviceName, read_only: bool) -> Result<DiskBacking, String>;
}
