//! The log of a connection's end.

use mqblk_core::counters::QueueCounters;
use mqblk_engine::UringContext;
use mqblk_virtio::VirtioDevice;

use super::Session;
use crate::vring::Vring;

impl<D: VirtioDevice<UringContext>> Session<D> {
    /// Suppresses the log line about the end of the connection: another one has the reason.
    pub(crate) fn set_end_logged(&mut self) {
        self.end_logged = true;
    }
}

/// Logs the end of the connection. The last reference is dropped when the queues have stopped.
impl<D: VirtioDevice<UringContext>> Drop for Session<D> {
    fn drop(&mut self) {
        if self.end_logged {
            return;
        }
        let (mut queues, mut c) = (0, QueueCounters::default());
        for served in self.vrings.iter().map(Vring::served).filter(|served| served.starts > 0) {
            queues += 1;
            c.add(&served.counters);
        }
        let (disk, frontend, seconds) = (&self.options.name, self.frontend, self.since.elapsed().as_secs());
        let QueueCounters { requests, errors, malformed, .. } = c;
        tracing::info!(disk, frontend, seconds, queues, requests, errors, malformed, "frontend disconnected");
    }
}
