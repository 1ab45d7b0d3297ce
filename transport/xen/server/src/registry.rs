//! Registry of the devices with open disks.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::figures::Figures;
use crate::storage::VbdSettings;

/// The devices with open disks, and the round-robin assignment of rings to workers.
#[derive(Default)]
pub(crate) struct Registry {
    devices: Mutex<Vec<Arc<Figures>>>,
    next_worker: AtomicUsize,
}

impl Registry {
    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Figures>>> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, stats: &Arc<Figures>) {
        self.lock().push(Arc::clone(stats));
    }

    pub(crate) fn remove(&self, stats: &Arc<Figures>) {
        self.lock().retain(|other| !Arc::ptr_eq(other, stats));
    }

    /// Returns all devices, sorted by name.
    pub(crate) fn list(&self) -> Vec<Arc<Figures>> {
        let mut list = self.lock().clone();
        list.sort_by(|one, other| one.name.cmp(&other.name));
        list
    }

    /// Returns the worker of each ring that a disk may have.
    pub(crate) fn queue_map(&self, settings: &VbdSettings, workers: usize) -> Vec<u16> {
        let rings = usize::from(settings.bounds.queues);
        let mut map: Vec<u16> = settings.queue_map.iter().take(rings).map(|worker| *worker as u16).collect();
        map.resize_with(rings, || (self.next_worker.fetch_add(1, Ordering::Relaxed) % workers.max(1)) as u16);
        map
    }
}
