//! The configuration of the Xen host and of Xen devices.

use std::path::PathBuf;
use std::time::Duration;

use mqblk_blkif::{GrantMode, PoolScope};
use mqblk_engine::QueuePolicy;

use super::selector::XenSelector;
use crate::contract::DiskContract;
use crate::queues::QueueMap;

/// The Xen backend of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct XenConfig {
    /// The Xen host.
    pub host: XenSelector,
    /// The device type: the xenstore directory that is watched.
    pub type_name: String,
    /// True if every device of the type is served. False: only those that name a disk of the configuration.
    pub watch: bool,
    /// The directory of the rings' journals; `None`: no journals.
    pub state: Option<PathBuf>,
    /// Maximum number of granted pages that all disks together keep mapped; `None`: as many as the host allows.
    pub mapped_pages: Option<u64>,
    /// The endpoint settings of devices that name no disk of the configuration.
    pub default_endpoint: XenEndpoint,
}

/// The Xen device of an attached disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct XenAttachment {
    /// The frontend domain.
    pub domid: u16,
    /// The device number.
    pub devid: u32,
}

/// A Xen guest's way to a disk: the rings and grants of its device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct XenEndpoint {
    /// The device created at start; `None`: a toolstack attaches the disk by naming it in `params`.
    pub attachment: Option<XenAttachment>,
    /// Number of rings offered, at least 1.
    pub queues: u16,
    /// Maximum ring size offered, as the binary logarithm of its pages, up to 4.
    pub ring_order: u8,
    /// Maximum number of segments of an indirect request; 0: indirect requests are not offered.
    pub indirect_segments: u16,
    /// Access to the guest's pages.
    pub grants: GrantMode,
    /// The owner of mapped pages and buffer pages: each ring, or all rings together.
    pub grants_pool: PoolScope,
    /// Maximum number of pages that a ring keeps mapped.
    pub persistent_grants: u32,
    /// Idle time after which a mapped page is unmapped; zero: never.
    pub persistent_idle: Duration,
    /// True if requests in flight are recorded in a journal, for replay by the next daemon.
    pub journal: bool,
    /// The worker of each ring.
    pub queue_map: QueueMap,
    /// The rings' polling, and the coalescing of their events.
    pub policy: QueuePolicy,
    /// The disk as an earlier daemon gave it to a guest.
    pub given: Option<DiskContract>,
}
