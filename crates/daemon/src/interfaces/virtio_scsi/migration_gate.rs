//! The times at which the LUNs of a controller migrate with its guest.

use mqblk_core::lock::{LockRank, RankedGuard, RankedMutex};

/// Open while they migrate: not while the daemon starts or stops, nor while the controller is removed.
pub(super) struct MigrationGate {
    open: RankedMutex<bool>,
    /// Locked while a state is loaded, so that [`set`](Self::set) waits for the load.
    loading: RankedMutex<()>,
}

impl MigrationGate {
    /// Returns a closed gate.
    pub(super) fn new() -> MigrationGate {
        MigrationGate { open: RankedMutex::leaf(false), loading: RankedMutex::new(LockRank::IncomingLuns, ()) }
    }

    /// Opens or closes it. Waits for a load that has passed it.
    pub(super) fn set(&self, open: bool) {
        let _none_loads = self.loading.lock();
        *self.open.lock() = open;
    }

    /// Begins a load, which lasts until the guard is dropped.
    pub(super) fn begin_load(&self) -> RankedGuard<'_, ()> {
        self.loading.lock()
    }

    pub(super) fn is_open(&self) -> bool {
        *self.open.lock()
    }
}
