//! Tries disks that are out again.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use mqblk_core::thread::spawn;

use crate::out::open_all;
use crate::state::DaemonState;

/// How often it is checked whether one is to be tried.
const CHECK: Duration = Duration::from_millis(250);
/// The thread that tries disks that are out. Dropping this stops it, but for storage that is being opened.
#[derive(Debug)]
pub(crate) struct Retries {
    _stop: Sender<()>,
}

impl Retries {
    /// Starts the thread, if a disk is out. It ends when none is.
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
                // Not for as long as storage takes: a takeover would wait for that.
                if state.begin_passing_change().is_ok() {
                    // What fails is kept in the disk.
                    open_all(state.out().due(Instant::now()), |id| drop(state.retry_disk(&id)));
                }
            }
        })?;
        Ok(Some(Retries { _stop: stop }))
    }
}
