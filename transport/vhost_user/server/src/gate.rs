//! When queues may start.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::disks::Disks;

/// Shut while requests of an earlier connection are in flight, and from the moment that the server stops.
#[derive(Default)]
pub(crate) struct StartGate {
    stopping: AtomicBool,
    disks: Arc<Disks>,
}

impl StartGate {
    pub(crate) fn new(disks: Arc<Disks>) -> StartGate {
        StartGate { stopping: AtomicBool::new(false), disks }
    }

    pub(crate) fn is_open(&self) -> bool {
        !self.is_stopping() && !self.disks.is_draining()
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
    }
}
