//! A backend without a watcher thread: its owner decides when it checks xenstore.

use std::sync::Arc;
use std::time::{Duration, Instant};

use mqblk_xen::Xen;
use mqblk_xen::store::Xenstore;
use mqblk_xen::vbd;

use crate::backend::{BackendError, BackendOptions, Watcher};
use crate::device_stats::DeviceStats;

/// A backend that handles changes of xenstore only in [`settle`](Self::settle): for simulations. Its turns and its
/// devices' threads are the same as a [`Backend`](crate::Backend)'s.
pub struct SteppedBackend {
    watcher: Watcher,
    store: Xenstore,
    drain_timeout: Duration,
}

impl SteppedBackend {
    /// Creates a backend that has not checked xenstore yet.
    ///
    /// # Errors
    /// [`BackendError`].
    pub fn new(xen: Arc<dyn Xen>, options: BackendOptions) -> Result<SteppedBackend, BackendError> {
        let drain_timeout = options.drain_timeout;
        let mut watcher = Watcher::new(xen, options)?;
        let store = watcher.connect()?;
        Ok(SteppedBackend { watcher, store, drain_timeout })
    }

    /// Handles all changes that precede the call, and those that the devices make meanwhile. Returns true if nothing is
    /// left to do; false if a turn is repeated later, because a device has used up its rate limit, or after `turns`
    /// turns.
    ///
    /// # Errors
    /// When xenstore refuses.
    pub fn settle(&mut self, turns: usize) -> Result<bool, BackendError> {
        for _ in 0..turns {
            // The events of all changes so far come before the reply.
            self.store.list(&vbd::domain_path(self.watcher.shared.xen.domain()))?;
            let pause = self.watcher.turn(&mut self.store)?;
            let ended = self.watcher.finish_tasks(Some(&mut self.store));
            if pause != Some(Duration::ZERO) && ended == 0 {
                return Ok(!self.watcher.has_work());
            }
        }
        Ok(false)
    }

    /// Returns the devices with open disks, sorted by name.
    pub fn devices(&self) -> Vec<Arc<DeviceStats>> {
        self.watcher.shared.registry.list()
    }
}

impl Drop for SteppedBackend {
    /// Like [`Backend::stop`](crate::Backend::stop).
    fn drop(&mut self) {
        self.watcher.shared.stop_deadline.get_or_init(|| Instant::now() + self.drain_timeout);
        self.watcher.stop_devices();
    }
}
