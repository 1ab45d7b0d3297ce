//! Mode of the thread that watches xenstore while devices leave, and their progress.

use std::time::Duration;

use mqblk_core::lock::RankedMutex;

use crate::name::DeviceName;

/// Interval at which the watcher retries to start a thread for a device that leaves.
pub(crate) const LEAVE_RETRY: Duration = Duration::from_millis(100);

/// The watcher's mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum WatchMode {
    /// It checks devices.
    #[default]
    Serves,
    /// It checks no device.
    Paused,
    /// Devices without a journal leave.
    LeavesUnjournaled,
    /// All devices leave.
    Leaves,
}

#[derive(Debug, Default)]
pub(crate) struct Progress {
    pub(crate) mode: WatchMode,
    /// True if the watcher has acted upon the mode since it was set.
    pub(crate) is_current: bool,
    /// The devices that have not left.
    pub(crate) remaining: Vec<DeviceName>,
}

/// The watcher's requested mode, and its progress.
pub(crate) struct LeaveState(pub(crate) RankedMutex<Progress>);

impl Default for LeaveState {
    fn default() -> LeaveState {
        LeaveState(RankedMutex::leaf(Progress::default()))
    }
}

impl LeaveState {
    pub(crate) fn mode(&self) -> WatchMode {
        self.0.lock().mode
    }

    pub(crate) fn report(&self, mode: WatchMode, remaining: Vec<DeviceName>) {
        let mut progress = self.0.lock();
        progress.is_current = progress.mode == mode;
        progress.remaining = remaining;
    }
}
