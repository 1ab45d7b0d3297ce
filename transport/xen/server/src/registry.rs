//! The devices whose disks are open.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::figures::Figures;
use crate::storage::VbdSettings;

/// The devices whose disks are open, for whoever asks; and the worker whose turn it is to get a ring.
#[derive(Default)]
pub(crate) struct Registry {
    devices: Mutex<Vec<Arc<Figures>>>,
    next_worker: AtomicUsize,
}

impl Registry {
    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Figures>>> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, figures: &Arc<Figures>) {
        self.lock().push(Arc::clone(figures));
    }

    pub(crate) fn remove(&self, figures: &Arc<Figures>) {
        self.lock().retain(|other| !Arc::ptr_eq(other, figures));
    }

    /// All of them, by name.
    pub(crate) fn list(&self) -> Vec<Arc<Figures>> {
        let mut list = self.lock().clone();
        list.sort_by(|one, other| one.name.cmp(&other.name));
        list
    }

    /// The worker of each ring that a disk may get.
    pub(crate) fn queue_map(&self, settings: &VbdSettings, workers: usize) -> Vec<u16> {
        let rings = usize::from(settings.bounds.queues);
        let mut map: Vec<u16> = settings.queue_map.iter().take(rings).map(|worker| *worker as u16).collect();
        map.resize_with(rings, || (self.next_worker.fetch_add(1, Ordering::Relaxed) % workers.max(1)) as u16);
        map
    }
}
