//! Decides when queues may start.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use crate::disks::DeviceDisks;

/// Closed while requests of an earlier connection are in flight, and once the server stops.
pub(crate) struct StartGate {
    stopping: AtomicBool,
    /// See [`tracked`](Self::tracked).
    tracked: AtomicU8,
    disks: Arc<DeviceDisks>,
}

impl StartGate {
    pub(crate) fn new(disks: Arc<DeviceDisks>) -> StartGate {
        StartGate { stopping: AtomicBool::new(false), tracked: AtomicU8::new(0), disks }
    }

    pub(crate) fn is_open(&self) -> bool {
        !self.is_stopping() && !self.disks.is_draining()
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    /// Returns true if an in-flight region tracks the started queues; `None` if none has started since the frontend
    /// connected.
    pub(crate) fn tracked(&self) -> Option<bool> {
        match self.tracked.load(Ordering::Relaxed) {
            0 => None,
            value => Some(value == 2),
        }
    }

    /// Sets [`tracked`](Self::tracked).
    pub(crate) fn set_tracked(&self, tracked: Option<bool>) {
        self.tracked.store(tracked.map_or(0, |tracked| 1 + u8::from(tracked)), Ordering::Relaxed);
    }

    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
    }
}
