//! Where disks come from: the program's side.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use mqblk_blkif::{GrantMode, PoolOwner};
use mqblk_engine::{AnyDisk, Coalesce, DiskHealth, PlugOptions, PollPolicy};

use crate::frontend::Bounds;
use crate::name::DeviceName;
use crate::params::Params;

/// How a disk is served to a frontend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VbdSettings {
    /// Most rings and their largest size.
    pub bounds: Bounds,
    /// Most segments of an indirect request; 0: such requests are not offered.
    pub indirect_segments: u16,
    /// How the frontend's pages are reached.
    pub mode: GrantMode,
    /// Whose mapped pages and buffer pages are.
    pub pool: PoolOwner,
    /// Most pages that a ring keeps mapped.
    pub persistent_max: u32,
    /// A page that was not used for so long is let go; zero: never.
    pub persistent_idle: Duration,
    /// Unanswered requests are noted, where the backend keeps journals.
    pub journal: bool,
    /// Every write is durable before it is answered.
    pub write_through: bool,
    /// The worker of each ring; rings past its end are spread round-robin.
    pub queue_map: Vec<usize>,
    /// How long rings are polled.
    pub poll: PollPolicy,
    /// How notifications are put off.
    pub coalesce: Coalesce,
}

/// An open disk, to be served.
pub struct Backing {
    /// Names the disk in figures.
    pub id: String,
    /// The kind of storage.
    pub storage: String,
    /// The disk.
    pub disk: Arc<AnyDisk>,
    /// How its requests are joined.
    pub plug: PlugOptions,
    /// What becomes of its failed requests, and whether it is stopped.
    pub health: Arc<DiskHealth>,
    /// How it is served.
    pub settings: VbdSettings,
    /// Dropped when the disk is served no more.
    pub keep: Box<dyn Any + Send>,
}

/// Opens disks.
pub trait Opener: Send + Sync {
    /// Whether this is for us: a device of another program, of the same type, is left alone.
    fn serves(&self, params: &Params) -> bool;

    /// Opens the disk that a device names. On a thread of that device's own: it may take its time.
    ///
    /// # Errors
    /// What is wrong, for people: the disk is not there, or somebody has it.
    fn open(&self, params: &Params, name: &DeviceName, read_only: bool) -> Result<Backing, String>;
}
