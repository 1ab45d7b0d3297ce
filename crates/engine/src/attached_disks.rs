//! The disks of a queue's requests.

use std::sync::mpsc::SyncSender;

use mqblk_core::{DiskSlot, Geometry};
use mqblk_uring::UringContext;

use crate::attach_error::AttachError;
use crate::channels::Channels;
use crate::queue_options::QueueDisk;

/// A disk of a queue, open on the queue's worker.
pub(crate) struct AttachedDisk {
    pub(crate) geometry: Geometry,
    /// Index of its channel.
    pub(crate) channel: usize,
    /// Set while the disk is being closed: it takes no new requests. It closes, and signals this, when none is in
    /// flight.
    closing: Option<SyncSender<()>>,
}

/// A queue's disks, by slot.
#[derive(Default)]
pub(crate) struct AttachedDisks {
    disks: Vec<Option<AttachedDisk>>,
}

impl AttachedDisks {
    /// Returns the disk in a slot; `None` without one, or while it is being closed.
    #[inline]
    pub(crate) fn get(&self, slot: DiskSlot) -> Option<&AttachedDisk> {
        self.disks.get(usize::from(slot.0))?.as_ref().filter(|disk| disk.closing.is_none())
    }

    /// Returns the disk of a queue that has only the first; `None` when it has others, or while the first is being
    /// closed.
    #[inline]
    pub(crate) fn only(&self) -> Option<&AttachedDisk> {
        match self.disks.as_slice() {
            [Some(disk)] if disk.closing.is_none() => Some(disk),
            _ => None,
        }
    }

    /// Returns the index of the channel of the disk in a slot, also while the disk is being closed.
    pub(crate) fn channel(&self, slot: DiskSlot) -> Option<usize> {
        Some(self.disks.get(usize::from(slot.0))?.as_ref()?.channel)
    }

    /// Opens a disk on the worker that owns these channels. Fails while its slot is taken.
    pub(crate) fn open(
        &mut self,
        context: &mut UringContext,
        channels: &mut Channels,
        new: &QueueDisk,
    ) -> Result<(), AttachError> {
        let QueueDisk { slot, disk, .. } = new;
        let at = usize::from(slot.0);
        if matches!(self.disks.get(at), Some(Some(_))) {
            return Err(AttachError::Queue(format!("the queue has a disk in slot {at} already")));
        }
        let channel = channels.open(context, new)?;
        if self.disks.len() <= at {
            self.disks.resize_with(at + 1, || None);
        }
        self.disks[at] = Some(AttachedDisk { geometry: disk.geometry(), channel, closing: None });
        Ok(())
    }

    /// Takes no more requests for the disk in a slot. Signals `left` when the disk is closed; without a disk, drops it
    /// at once.
    pub(crate) fn begin_close(&mut self, slot: DiskSlot, left: SyncSender<()>) {
        if let Some(Some(disk)) = self.disks.get_mut(usize::from(slot.0)) {
            disk.closing = Some(left);
        }
    }

    /// Returns true if disks are being closed.
    pub(crate) fn is_closing(&self) -> bool {
        self.disks.iter().flatten().any(|disk| disk.closing.is_some())
    }

    /// Closes the disks whose close was begun and that have nothing in flight.
    pub(crate) fn end_close(
        &mut self,
        context: &mut UringContext,
        channels: &mut Channels,
        in_use: impl Fn(DiskSlot) -> bool,
    ) {
        for (at, open) in (0..).zip(&mut self.disks) {
            if let Some(disk) = open.take_if(|disk| disk.closing.is_some() && !in_use(DiskSlot(at))) {
                channels.close(context, disk.channel);
                // The receiver may be gone.
                let _ = disk.closing.map(|left| left.send(()));
            }
        }
    }

    /// Reads the geometry of the disk in a slot again.
    pub(crate) fn refresh(&mut self, channels: &mut Channels, slot: DiskSlot) {
        if let Some(Some(disk)) = self.disks.get_mut(usize::from(slot.0)) {
            disk.geometry = channels.get(disk.channel).disk.geometry();
        }
    }

    /// Returns the open disks, for another worker to open.
    pub(crate) fn queue_disks(&self, channels: &Channels) -> Vec<QueueDisk> {
        let slots = (0..).map(DiskSlot).zip(&self.disks);
        slots.filter_map(|(slot, disk)| Some(channels.find(disk.as_ref()?.channel)?.queue_disk(slot))).collect()
    }

    /// Closes all disks. None is in use.
    pub(crate) fn close_all(&mut self, context: &mut UringContext, channels: &mut Channels) {
        for disk in self.disks.drain(..).flatten() {
            channels.close(context, disk.channel);
            let _ = disk.closing.map(|left| left.send(()));
        }
    }
}
