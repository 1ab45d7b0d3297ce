//! Where a queue's requests go.

use mqblk_core::units::in_range;
use mqblk_core::{ByteLen, ByteOffset, DiskSlot, Op, Outcome, Tag};

use crate::attached_disks::{AttachedDisk, AttachedDisks};
use crate::channels::Channels;
use crate::clock::Ticks;
use crate::request::{AnyCompletion, AnyRequest};

/// Where a queue's requests go: into the plugs of its disks, or straight back when they are refused.
pub(crate) struct SubmitContext<'a> {
    /// The queue's slot.
    pub(crate) slot: u16,
    pub(crate) now: Ticks,
    pub(crate) route: Route<'a>,
}

/// The route to a queue's disks.
pub(crate) enum Route<'a> {
    /// To a queue's only disk, in a pull: its plug is looked up once per batch.
    One {
        disk: &'a AttachedDisk,
        plug: &'a mut Vec<AnyRequest>,
        finished: &'a mut Vec<AnyCompletion>,
        cancelled: &'a mut Vec<(usize, Tag)>,
    },
    /// To any of a queue's disks.
    Any { disks: &'a AttachedDisks, channels: &'a mut Channels },
}

impl<'a> Route<'a> {
    /// Returns the route to the only disk of a queue. The caller marks its channel [plugged](Channels::mark_plugged) afterwards.
    #[inline]
    pub(crate) fn to_only(disk: &'a AttachedDisk, channels: &'a mut Channels) -> Route<'a> {
        let (plug, finished, cancelled) = channels.lists(disk.channel);
        Route::One { disk, plug, finished, cancelled }
    }

    /// Checks a request. Returns the index of the disk's channel, or the outcome with which the request is refused.
    #[inline]
    pub(crate) fn check(&self, disk: DiskSlot, op: Op, start: ByteOffset, len: ByteLen) -> Result<usize, Outcome> {
        match self {
            Route::One { disk: only, .. } if disk == DiskSlot::FIRST => check(only, op, start, len),
            Route::One { .. } => Err(Outcome::Aborted),
            Route::Any { disks, .. } => check_any(disks, disk, op, start, len),
        }
    }

    #[inline]
    pub(crate) fn plug(&mut self, at: usize, request: AnyRequest) {
        match self {
            Route::One { plug, .. } => plug.push(request),
            Route::Any { channels, .. } => channels.plug(at, request),
        }
    }

    /// Cancels requests, given by their disk and tag.
    pub(crate) fn cancel(&mut self, picked: impl Iterator<Item = (DiskSlot, Tag)>) {
        match self {
            Route::One { disk, cancelled, .. } => cancelled.extend(picked.map(|(_, tag)| (disk.channel, tag))),
            Route::Any { disks, channels } => {
                channels.cancelled.extend(picked.filter_map(|(disk, tag)| Some((disks.channel(disk)?, tag))));
            }
        }
    }

    /// Counts and logs a request that is completed with an error. One that was cancelled is none.
    #[cold]
    pub(crate) fn failed(&self, disk: DiskSlot, op: Op, start: ByteOffset, outcome: Outcome) {
        // A pull, whose route this may be, completes nothing.
        let Route::Any { disks, channels } = self else { return };
        if outcome != Outcome::Aborted
            && let Some(open) = disks.channel(disk).and_then(|at| channels.find(at))
        {
            open.health.failed(outcome, op, start);
        }
    }

    #[inline]
    pub(crate) fn refuse(&mut self, ended: AnyCompletion) {
        match self {
            Route::One { finished, .. } => finished.push(ended),
            Route::Any { channels, .. } => channels.completions.push(ended),
        }
    }
}

#[inline(never)]
fn check_any(disks: &AttachedDisks, disk: DiskSlot, op: Op, start: ByteOffset, len: ByteLen) -> Result<usize, Outcome> {
    match disks.get(disk) {
        Some(disk) => check(disk, op, start, len),
        // It was closed.
        None => Err(Outcome::Aborted),
    }
}

#[inline]
fn check(disk: &AttachedDisk, op: Op, start: ByteOffset, len: ByteLen) -> Result<usize, Outcome> {
    if op.modifies() && disk.geometry.read_only {
        return Err(Outcome::ReadOnly);
    }
    if in_range(start, len, disk.geometry.size) { Ok(disk.channel) } else { Err(Outcome::OutOfRange) }
}
