//! Activation of a session's disks: all are active while any of its queues runs.
//!
//! This passes an image's lock on in a live migration: the destination's queues start after the source's have stopped.

use std::sync::Arc;
use std::time::Duration;

use mqblk_core::{DiskError, DiskSlot};
use mqblk_engine::{AnyDisk, QueueDisk};

/// The disks that a session has activated; `None` while no queue runs.
#[derive(Default)]
pub(crate) struct ActiveDisks {
    disks: Option<Vec<(DiskSlot, Arc<AnyDisk>)>>,
}

impl ActiveDisks {
    /// Activates the disks before the first queue starts. Does nothing if they are active. Waits as
    /// [`Disk::activate`](mqblk_core::Disk::activate) does.
    ///
    /// # Errors
    /// When another user holds one of the disks; then none is active.
    pub(crate) fn activate(
        &mut self,
        timeout: Duration,
        disks: impl FnOnce() -> Vec<QueueDisk>,
    ) -> Result<(), DiskError> {
        if self.disks.is_some() {
            return Ok(());
        }
        let mut active = ActiveDisks { disks: Some(Vec::new()) };
        for disk in disks() {
            if let Err(error) = active.add(&disk, timeout) {
                // The first error counts.
                let _ = active.deactivate();
                return Err(error);
            }
        }
        *self = active;
        Ok(())
    }

    /// Adds a disk, and activates it if the others are active.
    ///
    /// # Errors
    /// When another user holds it.
    pub(crate) fn add(&mut self, disk: &QueueDisk, timeout: Duration) -> Result<(), DiskError> {
        if let Some(disks) = &mut self.disks {
            disk.disk.activate(timeout)?;
            disks.push((disk.slot, Arc::clone(&disk.disk)));
        }
        Ok(())
    }

    /// Removes a disk and deactivates it. It has no request in flight.
    pub(crate) fn remove(&mut self, slot: DiskSlot) {
        for (_, disk) in self.disks.iter_mut().flat_map(|disks| disks.extract_if(.., |(other, _)| *other == slot)) {
            let _ = log_failed(disk.deactivate());
        }
    }

    /// Leaves the disks active until the process ends: requests were frozen in flight.
    pub(crate) fn leave_active(&mut self) {
        self.disks = None;
    }

    /// Deactivates the disks after the last queue has stopped. No request is in flight.
    ///
    /// # Errors
    /// The last disk whose writes may be missing. Each is logged.
    pub(crate) fn deactivate(&mut self) -> Result<(), DiskError> {
        let mut all = Ok(());
        for (_, disk) in self.disks.take().into_iter().flatten() {
            all = log_failed(disk.deactivate()).and(all);
        }
        all
    }
}

impl Drop for ActiveDisks {
    fn drop(&mut self) {
        // Logged.
        let _ = self.deactivate();
    }
}

fn log_failed(deactivated: Result<(), DiskError>) -> Result<(), DiskError> {
    deactivated.inspect_err(|error| tracing::error!("{error}"))
}
