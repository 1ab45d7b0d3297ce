//! The configuration of a virtio-blk disk.

use mqblk_core::settings::{SettingError, Settings};

use crate::change::ChangeSource;
use crate::contract::{DiskContract, ONLY_DISK};
use crate::disk_list::{DiskConfig, DiskKeys, Endpoint};
use crate::interface::ResolveContext;
use crate::names::Claim;
use crate::pair::Pair;
use crate::queues::{DEFAULT_QUEUES, MAX_QUEUES, QUEUES, QueueMap};
use crate::vhost_user::VhostUserEndpoint;

/// The word of the interface.
pub(super) const WORD: &str = "virtio-blk";
/// Maximum length of virtio-blk's identification string (virtio 1.3 section 5.2.6, VIRTIO_BLK_T_GET_ID).
const SERIAL_BYTES: usize = 20;

/// The endpoint of a disk.
#[derive(Clone)]
pub(super) struct BlkEndpoint(pub VhostUserEndpoint);

impl Endpoint for BlkEndpoint {
    const SERIAL_BYTES: usize = SERIAL_BYTES;

    fn take(settings: &mut Settings, _id: &str, context: &mut ResolveContext<'_>) -> Result<Self, SettingError> {
        let queues = context.cpus.count.clamp(DEFAULT_QUEUES, MAX_QUEUES);
        VhostUserEndpoint::take(settings, WORD, (&QUEUES, queues), context).map(BlkEndpoint)
    }

    fn queues(&self) -> u16 {
        self.0.queues
    }

    fn queue_map(&self) -> &QueueMap {
        &self.0.queue_map
    }

    fn queue_map_mut(&mut self) -> &mut QueueMap {
        &mut self.0.queue_map
    }

    fn pairs(&self) -> Vec<Pair> {
        self.0.pairs()
    }

    fn claims(&self) -> Vec<Claim> {
        self.0.claims()
    }

    fn given(&self) -> Option<&DiskContract> {
        self.0.given.as_ref()?.disks.get(ONLY_DISK)
    }
}

/// The keys of a disk, with its origin.
pub(super) struct DiskToOpen {
    pub keys: DiskKeys<BlkEndpoint>,
    pub origin: ChangeSource,
}

/// A disk with its origin.
pub(super) struct ConfiguredDisk {
    pub config: DiskConfig<BlkEndpoint>,
    pub origin: ChangeSource,
}
