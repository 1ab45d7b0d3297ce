//! The right of this process to act on a device: it holds the [lock](crate::device_lock).

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::device_lock::DeviceLock;
use crate::journal_dir::JournalDir;
use crate::name::DeviceName;

/// Time after which a device's wait for another process or device is reported.
const REPORT_AFTER: Duration = Duration::from_secs(1);

/// A device's wait for another process or device, which is reported once if it takes long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Wait {
    /// There is none.
    #[default]
    None,
    /// Since this time.
    Since(Instant),
    /// Reported.
    Reported,
}

impl Wait {
    /// Records that the wait goes on. Returns true if it is to be reported now.
    pub(crate) fn goes_on(&mut self) -> bool {
        match *self {
            Wait::None => *self = Wait::Since(Instant::now()),
            Wait::Since(since) if since.elapsed() >= REPORT_AFTER => {
                *self = Wait::Reported;
                return true;
            }
            Wait::Since(_) | Wait::Reported => {}
        }
        false
    }

    /// Ends the wait. Returns true if it was reported.
    pub(crate) fn end(&mut self) -> bool {
        std::mem::take(self) == Wait::Reported
    }
}

/// This process's right to act on a device.
#[derive(Debug, Default)]
pub(crate) struct DeviceOwnership {
    lock: Option<DeviceLock>,
    wait: Wait,
    /// True if requests of the device are in flight that this process never completes: its workers keep the lock.
    is_frozen: bool,
}

impl DeviceOwnership {
    /// Acquires the device's lock, if there is a directory for it. Returns false while another process has it; this is
    /// logged after a while.
    pub(crate) fn acquire(&mut self, dir: Option<&JournalDir>, name: &DeviceName) -> bool {
        let Some(dir) = dir.filter(|_| self.lock.is_none()) else { return true };
        let why = match dir.lock_device(name) {
            Ok(Some(lock)) => {
                if self.wait.end() {
                    tracing::info!(device = %name, "no other process has requests of it any more");
                }
                self.lock = Some(lock);
                return true;
            }
            Ok(None) => {
                "it waits for another daemon, which serves it or has left requests that storage has not answered"
                    .to_owned()
            }
            Err(error) => format!("its lock: {error}"),
        };
        if self.wait.goes_on() {
            tracing::warn!(device = %name, "{why}");
        }
        false
    }

    /// Returns the file that workers keep, if the device has a lock.
    pub(crate) fn file(&self) -> Option<&Arc<OwnedFd>> {
        self.lock.as_ref().map(|lock| &lock.file)
    }

    /// Records that rings were detached. `is_frozen`: with requests in flight.
    pub(crate) fn note_detached(&mut self, is_frozen: bool) {
        self.is_frozen |= is_frozen;
    }

    /// Releases the lock, which stays with workers that have requests in flight. The next process finds its file.
    pub(crate) fn pass_on(&mut self) {
        self.lock = None;
    }

    /// Releases the lock of a device that has neither rings nor open storage, and removes its file.
    pub(crate) fn end(&mut self) {
        match self.lock.take() {
            // The next holder needs the same file.
            Some(lock) if self.is_frozen => drop(lock),
            Some(lock) => lock.remove(),
            None => {}
        }
    }
}
