//! State of a device that its control thread shares with the rest of the process.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Instant;

use mqblk_core::lock::RankedMutex;
use mqblk_engine::StatsRegistry;

use crate::backend_channel::BackendChannel;
use crate::disks::{DeviceDisks, SharedSession};
use crate::gate::StartGate;
use crate::hand_over::HoldRequest;

/// State shared by the control thread and the rest of the process.
pub(crate) struct Shared {
    pub(crate) gate: Arc<StartGate>,
    /// The current connection.
    pub(crate) connection: RankedMutex<Option<SharedConnection>>,
    /// Disconnected sessions with requests in flight.
    pub(crate) draining: RankedMutex<Vec<SharedSession>>,
    /// True if the server has stopped: the control thread ends.
    pub(crate) stopped: AtomicBool,
    /// Time at which a stop ends its wait for storage.
    pub(crate) stop_deadline: RankedMutex<Option<Instant>>,
    pub(crate) stats: Arc<StatsRegistry>,
    pub(crate) disks: Arc<DeviceDisks>,
    pub(crate) backend_channel: BackendChannel,
    /// True if another process still serves the device.
    pub(crate) stands_by: AtomicBool,
    /// Request of another process that takes the device.
    pub(crate) hold: RankedMutex<Option<HoldRequest>>,
}

/// A connection and its session.
#[derive(Clone)]
pub(crate) struct SharedConnection {
    pub(crate) stream: Arc<UnixStream>,
    pub(crate) session: SharedSession,
    /// The process id of the frontend, 0 if unknown.
    pub(crate) frontend: i32,
    pub(crate) since: Instant,
    /// The features that the driver has accepted; 0 before.
    pub(crate) features: Arc<AtomicU64>,
}

impl Shared {
    /// Returns when a stop ends its wait for storage; `None` before a stop.
    pub(crate) fn stop_deadline(&self) -> Option<Instant> {
        *self.stop_deadline.lock()
    }
}
