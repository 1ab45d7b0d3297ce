//! Registry of the devices with open disks.

use std::sync::Arc;

use mqblk_core::lock::{LockRank, RankedGuard, RankedMutex};
use mqblk_engine::{QueuePlacement, SharedQueueSettings};

use crate::device_stats::DeviceStats;

/// The devices with open disks, and the workers of their rings.
pub(crate) struct DeviceRegistry {
    devices: RankedMutex<Vec<Arc<DeviceStats>>>,
    placement: RankedMutex<Option<QueuePlacement>>,
}

impl Default for DeviceRegistry {
    fn default() -> DeviceRegistry {
        let placement = RankedMutex::new(LockRank::Placement, None);
        DeviceRegistry { devices: RankedMutex::leaf(Vec::new()), placement }
    }
}

impl DeviceRegistry {
    fn lock(&self) -> RankedGuard<'_, Vec<Arc<DeviceStats>>> {
        self.devices.lock()
    }

    pub(crate) fn add(&self, stats: &Arc<DeviceStats>) {
        self.lock().push(Arc::clone(stats));
    }

    pub(crate) fn remove(&self, stats: &Arc<DeviceStats>) {
        self.lock().retain(|other| !Arc::ptr_eq(other, stats));
    }

    /// Returns all devices, sorted by name.
    pub(crate) fn list(&self) -> Vec<Arc<DeviceStats>> {
        let mut list = self.lock().clone();
        list.sort_by(|one, other| one.name.cmp(&other.name));
        list
    }

    /// Assigns each ring that a disk may have to a worker.
    pub(crate) fn assign_rings(&self, queues: &SharedQueueSettings, rings: usize, workers: usize) {
        let mut map: Vec<u16> = queues.get().map.iter().take(rings).map(|worker| *worker as u16).collect();
        let mut placement = self.placement.lock();
        let placement =
            placement.get_or_insert_with(|| QueuePlacement::new(u16::try_from(workers).unwrap_or(u16::MAX)));
        // They come and go.
        placement.set_workers(u16::try_from(workers).unwrap_or(u16::MAX));
        let given = map.len();
        map.extend(placement.round_robin((rings - given) as u16));
        placement.place(&map);
        queues.set_map(map.into_iter().map(usize::from).collect());
    }
}
