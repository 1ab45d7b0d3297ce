//! Retries disks that are out.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use mqblk_core::thread::spawn;

use crate::out::open_all;
use crate::state::DaemonState;

/// Interval of the checks for due tries.
const CHECK: Duration = Duration::from_millis(250);
/// The thread that retries disks that are out. Dropping this stops it, except while it opens storage.
#[derive(Debug)]
pub(crate) struct Retries {
    _stop: Sender<()>,
}

impl Retries {
    /// Starts the thread if a disk is out. It ends when no disk is out.
    ///
    /// # Errors
    /// If the thread cannot be created.
    pub(crate) fn start(state: &Arc<DaemonState>) -> std::io::Result<Option<Retries>> {
        if state.out().list().is_empty() {
            return Ok(None);
        }
        let (stop, stopped) = channel::<()>();
        let state = Arc::downgrade(state);
        spawn("disk-retry", move || {
            while stopped.recv_timeout(CHECK) == Err(RecvTimeoutError::Timeout) {
                let Some(state) = state.upgrade().filter(|state| !state.out().list().is_empty()) else { return };
                // Not held while storage is opened: a takeover would wait for that.
                if state.begin_passing_change().is_ok() {
                    // The disk keeps the reason of a failure.
                    open_all(state.out().due(Instant::now()), |id| drop(state.retry_disk(&id)));
                }
            }
        })?;
        Ok(Some(Retries { _stop: stop }))
    }
}
