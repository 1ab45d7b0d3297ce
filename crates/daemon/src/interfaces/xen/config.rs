//! The configuration of the Xen host and of Xen devices.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use mqblk_blkif::{GrantMode, PoolScope};
use mqblk_engine::{DiskHealth, QueuePolicy, QueueSettings, SharedQueueSettings};
use mqblk_xen_server::{RingLimits, VbdSettings};

use super::selector::XenSelector;
use crate::contract::DiskContract;
use crate::disk_list::DiskConfig;
use crate::queues::QueueMap;

/// The word of the interface.
pub(super) const WORD: &str = "xen";

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

/// A disk of the configuration, its health, and the settings of its rings.
pub(super) struct XenDiskConfig {
    pub config: DiskConfig<XenEndpoint>,
    pub health: Arc<DiskHealth>,
    pub queues: Arc<SharedQueueSettings>,
}

impl XenDiskConfig {
    /// Creates the state of a disk of the configuration.
    pub(super) fn new(config: DiskConfig<XenEndpoint>) -> XenDiskConfig {
        let health = config.storage.new_health(&config.id);
        let queues = Arc::new(SharedQueueSettings::new(queue_settings(&config.endpoint)));
        XenDiskConfig { config, health, queues }
    }
}

/// Returns the settings of a device. `write_through`: each write is durable before it is completed.
pub(super) fn vbd_settings(endpoint: &XenEndpoint, write_through: bool) -> VbdSettings {
    VbdSettings {
        ring_limits: RingLimits { queues: endpoint.queues, ring_page_order: endpoint.ring_order },
        indirect_segments: endpoint.indirect_segments,
        mode: endpoint.grants,
        pool: endpoint.grants_pool,
        persistent_max: endpoint.persistent_grants,
        persistent_idle: endpoint.persistent_idle,
        journal: endpoint.journal,
        write_through,
    }
}

/// Returns the initial settings of a device's rings.
pub(super) fn queue_settings(endpoint: &XenEndpoint) -> QueueSettings {
    QueueSettings { map: endpoint.queue_map.to_engine(), policy: endpoint.policy }
}
