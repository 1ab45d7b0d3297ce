//! Which of a session's disks are active: all that it has, while any of its queues runs.
//!
//! This is what hands an image over in a live migration: the destination's queues start when the source's have stopped.

use std::sync::Arc;

use mqblk_core::{DiskError, DiskSlot};
use mqblk_engine::{AnyDisk, QueueDisk};

/// The disks that were activated for a session.
#[derive(Default)]
pub(crate) struct ActiveDisks {
    disks: Option<Vec<(DiskSlot, Arc<AnyDisk>)>>,
}

impl ActiveDisks {
    /// A queue is about to run.
    ///
    /// # Errors
    /// When somebody else uses one of the disks; then none is active.
    pub(crate) fn begin(&mut self, disks: impl FnOnce() -> Vec<QueueDisk>) -> Result<(), DiskError> {
        if self.disks.is_some() {
            return Ok(());
        }
        let mut active = ActiveDisks { disks: Some(Vec::new()) };
        for disk in disks() {
            if let Err(error) = active.add(&disk) {
                active.end();
                return Err(error);
            }
        }
        *self = active;
        Ok(())
    }

    /// One disk more, which is activated if others are.
    ///
    /// # Errors
    /// When somebody else uses it.
    pub(crate) fn add(&mut self, disk: &QueueDisk) -> Result<(), DiskError> {
        if let Some(disks) = &mut self.disks {
            disk.disk.activate()?;
            disks.push((disk.slot, Arc::clone(&disk.disk)));
        }
        Ok(())
    }

    /// One disk less. Nothing of it is in flight.
    pub(crate) fn remove(&mut self, slot: DiskSlot) {
        for (_, disk) in self.disks.iter_mut().flat_map(|disks| disks.extract_if(.., |(other, _)| *other == slot)) {
            disk.deactivate();
        }
    }

    /// Requests in flight were left to themselves: the disks stay in use until the process ends.
    pub(crate) fn keep(&mut self) {
        self.disks = None;
    }

    /// The last queue has stopped. Nothing is in flight.
    pub(crate) fn end(&mut self) {
        for (_, disk) in self.disks.take().into_iter().flatten() {
            disk.deactivate();
        }
    }
}

impl Drop for ActiveDisks {
    fn drop(&mut self) {
        self.end();
    }
}
