//! The disks that a queue's requests may go to.

use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use mqblk_core::{DiskSlot, Geometry};
use mqblk_uring::UringContext;

use crate::AnyDisk;
use crate::channels::Channels;
use crate::engine::AttachError;
use crate::errors::DiskHealth;
use crate::options::PlugOptions;

/// A disk for a queue: which of its disks it is, and how its requests are plugged.
#[derive(Clone)]
pub struct QueueDisk {
    /// Which.
    pub slot: DiskSlot,
    /// The disk.
    pub disk: Arc<AnyDisk>,
    /// How its requests are plugged. Of a disk's queues on one worker the first one's counts.
    pub plug: PlugOptions,
    /// What becomes of its failed requests, and whether it is stopped: the same for all of a disk's queues, and for it alone.
    pub health: Arc<DiskHealth>,
}

/// One of them, open on the queue's worker.
pub(crate) struct AttachedDisk {
    pub(crate) geometry: Geometry,
    /// Place of its channel.
    pub(crate) channel: usize,
    /// It takes no new requests and leaves when it has none; who is to be told.
    closing: Option<SyncSender<()>>,
}

/// A queue's disks, by slot.
#[derive(Default)]
pub(crate) struct AttachedDisks {
    disks: Vec<Option<AttachedDisk>>,
}

impl AttachedDisks {
    /// The disk in a slot, unless there is none or it is about to leave.
    #[inline]
    pub(crate) fn get(&self, slot: DiskSlot) -> Option<&AttachedDisk> {
        self.disks.get(usize::from(slot.0))?.as_ref().filter(|disk| disk.closing.is_none())
    }

    /// The disk of a queue that has only the first; `None` when it has others, or that one is about to leave.
    #[inline]
    pub(crate) fn only(&self) -> Option<&AttachedDisk> {
        match self.disks.as_slice() {
            [Some(disk)] if disk.closing.is_none() => Some(disk),
            _ => None,
        }
    }

    /// The place of the channel of the disk in a slot, also while it is about to leave.
    pub(crate) fn channel(&self, slot: DiskSlot) -> Option<usize> {
        Some(self.disks.get(usize::from(slot.0))?.as_ref()?.channel)
    }

    /// Opens `disk` on the worker that owns these channels, if the disk that was in its slot before has left.
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

    /// Takes no more requests for the disk in a slot. `left` is told when it has left; at once, by being dropped, when there is none.
    pub(crate) fn begin_close(&mut self, slot: DiskSlot, left: SyncSender<()>) {
        if let Some(Some(disk)) = self.disks.get_mut(usize::from(slot.0)) {
            disk.closing = Some(left);
        }
    }

    /// Whether disks are about to leave.
    pub(crate) fn is_closing(&self) -> bool {
        self.disks.iter().flatten().any(|disk| disk.closing.is_some())
    }

    /// Closes the disks that are about to leave and are not in use any more.
    pub(crate) fn end_close(
        &mut self,
        context: &mut UringContext,
        channels: &mut Channels,
        in_use: impl Fn(DiskSlot) -> bool,
    ) {
        for (at, place) in (0..).zip(&mut self.disks) {
            if let Some(disk) = place.take_if(|disk| disk.closing.is_some() && !in_use(DiskSlot(at))) {
                channels.close(context, disk.channel);
                // Whoever asked may have gone.
                let _ = disk.closing.map(|left| left.send(()));
            }
        }
    }

    /// Looks again what the disk in a slot looks like.
    pub(crate) fn refresh(&mut self, channels: &mut Channels, slot: DiskSlot) {
        if let Some(Some(disk)) = self.disks.get_mut(usize::from(slot.0)) {
            disk.geometry = channels.get(disk.channel).disk.geometry();
        }
    }

    /// Closes all of them. None is in use.
    pub(crate) fn close_all(&mut self, context: &mut UringContext, channels: &mut Channels) {
        for disk in self.disks.drain(..).flatten() {
            channels.close(context, disk.channel);
            let _ = disk.closing.map(|left| left.send(()));
        }
    }
}
