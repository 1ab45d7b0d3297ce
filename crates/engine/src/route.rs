//! Routes of a queue's requests.

use mqblk_core::units::in_range;
use mqblk_core::{ByteLen, ByteOffset, DiskSlot, Op, Outcome, Tag};

use crate::attached_disks::{AttachedDisk, AttachedDisks};
use crate::channels::Channels;
use crate::clock::Ticks;
use crate::request::{AnyCompletion, AnyRequest};

/// The target of a queue's requests: the plugs of its disks, or a completion if they are refused.
pub(crate) struct SubmitContext<R> {
    /// The queue's slot.
    pub(crate) slot: u16,
    pub(crate) now: Ticks,
    pub(crate) route: R,
}

/// The route to a queue's disks.
pub(crate) trait Route {
    /// Checks a request. Returns the index of the disk's channel, or the outcome with which the request is refused.
    fn check(&self, disk: DiskSlot, op: Op, start: ByteOffset, len: ByteLen) -> Result<usize, Outcome>;

    /// Puts a request that was [checked](Self::check) in the plug of its disk.
    fn plug(&mut self, at: usize, request: AnyRequest);

    /// Completes a request that was refused.
    fn refuse(&mut self, ended: AnyCompletion);

    /// Cancels requests, by disk and tag.
    fn cancel(&mut self, picked: impl Iterator<Item = (DiskSlot, Tag)>);
}

/// The route to a queue's only disk, in a pull: its plug is looked up once per batch.
pub(crate) struct ToOnlyDisk<'a> {
    disk: &'a AttachedDisk,
    plug: &'a mut Vec<AnyRequest>,
    finished: &'a mut Vec<AnyCompletion>,
    cancelled: &'a mut Vec<(usize, Tag)>,
}

impl<'a> ToOnlyDisk<'a> {
    /// Returns the route to the only disk of a queue. The caller marks its channel [plugged](Channels::mark_plugged)
    /// afterwards.
    #[inline]
    pub(crate) fn new(
        disk: &'a AttachedDisk,
        channels: &'a mut Channels,
        finished: &'a mut Vec<AnyCompletion>,
    ) -> ToOnlyDisk<'a> {
        let (plug, cancelled) = channels.lists(disk.channel);
        ToOnlyDisk { disk, plug, finished, cancelled }
    }
}

impl Route for ToOnlyDisk<'_> {
    #[inline(always)]
    fn check(&self, disk: DiskSlot, op: Op, start: ByteOffset, len: ByteLen) -> Result<usize, Outcome> {
        match disk {
            DiskSlot::FIRST => check(self.disk, op, start, len).map(|()| self.disk.channel),
            _ => Err(Outcome::Aborted),
        }
    }

    #[inline(always)]
    fn plug(&mut self, _: usize, request: AnyRequest) {
        self.plug.push(request);
    }

    #[inline]
    fn refuse(&mut self, ended: AnyCompletion) {
        self.finished.push(ended);
    }

    fn cancel(&mut self, picked: impl Iterator<Item = (DiskSlot, Tag)>) {
        self.cancelled.extend(picked.map(|(_, tag)| (self.disk.channel, tag)));
    }
}

/// The route to any of a queue's disks.
pub(crate) struct ToDisks<'a> {
    pub(crate) disks: &'a AttachedDisks,
    pub(crate) channels: &'a mut Channels,
}

impl ToDisks<'_> {
    /// Counts and logs a request that is completed with an error. Ignores cancelled ones.
    pub(crate) fn failed(&self, disk: DiskSlot, op: Op, start: ByteOffset, outcome: Outcome) {
        if outcome != Outcome::Aborted
            && let Some(open) = self.disks.channel(disk).and_then(|at| self.channels.find(at))
        {
            open.health.failed(outcome, op, start);
        }
    }
}

impl Route for ToDisks<'_> {
    #[inline]
    fn check(&self, disk: DiskSlot, op: Op, start: ByteOffset, len: ByteLen) -> Result<usize, Outcome> {
        match self.disks.get(disk) {
            Some(disk) => check(disk, op, start, len).map(|()| disk.channel),
            // It was closed.
            None => Err(Outcome::Aborted),
        }
    }

    #[inline]
    fn plug(&mut self, at: usize, request: AnyRequest) {
        self.channels.plug(at, request);
    }

    #[inline]
    fn refuse(&mut self, ended: AnyCompletion) {
        self.channels.completions.push(ended);
    }

    fn cancel(&mut self, picked: impl Iterator<Item = (DiskSlot, Tag)>) {
        self.channels.cancelled.extend(picked.filter_map(|(disk, tag)| Some((self.disks.channel(disk)?, tag))));
    }
}

#[inline(always)]
fn check(disk: &AttachedDisk, op: Op, start: ByteOffset, len: ByteLen) -> Result<(), Outcome> {
    if disk.geometry.read_only && op.modifies() {
        return Err(Outcome::ReadOnly);
    }
    if in_range(start, len, disk.geometry.size) { Ok(()) } else { Err(Outcome::OutOfRange) }
}
