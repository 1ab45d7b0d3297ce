//! The right of this process to act on a device: it holds the [lock](crate::device_lock).

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::device_lock::DeviceLock;
use crate::journal_dir::JournalDir;
use crate::name::DeviceName;

/// Time after which a device's wait for its lock is logged.
const LOG_AFTER: Duration = Duration::from_secs(1);

/// A wait for a device's lock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum LockWait {
    /// There is none.
    #[default]
    None,
    /// Since this time.
    Since(Instant),
    /// Logged.
    Logged,
}

/// This process's right to act on a device.
#[derive(Debug, Default)]
pub(crate) struct DeviceOwnership {
    lock: Option<DeviceLock>,
    wait: LockWait,
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
                if self.wait == LockWait::Logged {
                    tracing::info!(device = %name, "no other process has requests of it any more");
                }
                (self.lock, self.wait) = (Some(lock), LockWait::None);
                return true;
            }
            Ok(None) => {
                "it waits for another daemon, which serves it or has left requests that storage has not answered"
                    .to_owned()
            }
            Err(error) => format!("its lock: {error}"),
        };
        match self.wait {
            LockWait::None => self.wait = LockWait::Since(Instant::now()),
            LockWait::Since(since) if since.elapsed() >= LOG_AFTER => {
                tracing::warn!(device = %name, "{why}");
                self.wait = LockWait::Logged;
            }
            _ => {}
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
