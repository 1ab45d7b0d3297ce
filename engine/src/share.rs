//! What a channel may have of its worker, so that a slow disk does not hold up fast ones: operations in the lane, and time in a
//! turn. Pure, but for [`Offer`], which carries it out.

use mqblk_core::DiskChannel;
use mqblk_uring::Lane;

use crate::runner::{AnyFinished, AnyRequest};

/// While several channels are busy each is offered at most so many requests a turn, and so many bytes (but one request at
/// least): storage that copies inside `submit`, at some 10 GB/s, then holds up a turn for 0.1 ms.
const TURN_REQUESTS: usize = 64;
const TURN_BYTES: u64 = 1 << 20;

/// With several open disks none may have more than this part of the lane's operations in flight.
const MOST_OF_LANE: usize = 4;
/// The last part of the lane is for disks that have few in flight.
const RESERVE: usize = 8;
/// How many are few: such a part of the lane, so that 32 disks fit in the reserve, but not more than what keeps storage busy.
const FEW: usize = 256;
const MOST_FEW: usize = 16;

/// What bounds a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    /// Most requests outstanding, as the user chose; 0: any number.
    pub(crate) depth: u32,
    /// Other disks are open on the worker.
    pub(crate) shared: bool,
    /// Other channels are busy.
    pub(crate) crowded: bool,
}

impl Share {
    /// How many of `waiting` requests may be offered to a channel that has so many outstanding, when the lane has room for
    /// `room` more operations of `capacity`.
    ///
    /// A channel at its limit is offered nothing until an eighth of it is free, or all that waits fits: planning, stamping and
    /// moving a long plug for one request at a time would cost the other disks what the limit saves them.
    pub(crate) fn allowance(self, waiting: usize, outstanding: usize, room: usize, capacity: usize) -> usize {
        let own = if self.depth == 0 { usize::MAX } else { self.depth as usize };
        let limit = if self.shared { own.min((capacity / MOST_OF_LANE).max(1)) } else { own };
        let free = limit.saturating_sub(outstanding);
        if free < waiting.min(limit / 8) {
            return 0;
        }
        let mut most = free;
        if self.shared {
            let few = (capacity / FEW).clamp(1, MOST_FEW);
            let common = room.saturating_sub(capacity / RESERVE);
            most = most.min(common.max(few.saturating_sub(outstanding)));
        }
        if self.crowded { most.min(TURN_REQUESTS) } else { most }
    }
}

/// An offer of a part of a list to a channel.
pub(crate) struct Offer<'a> {
    /// Requests that may be offered.
    pub(crate) most: usize,
    /// Other channels are busy.
    pub(crate) crowded: bool,
    /// For the part that is offered.
    pub(crate) part: &'a mut Vec<AnyRequest>,
}

impl Offer<'_> {
    /// Offers the head of `batch`. Returns how many were taken; as many less may be offered from now on.
    #[inline]
    pub(crate) fn submit(
        &mut self,
        lane: &mut Lane,
        channel: &mut dyn DiskChannel<Lane>,
        batch: &mut Vec<AnyRequest>,
        finished: &mut Vec<AnyFinished>,
    ) -> usize {
        if self.most >= batch.len() && !self.crowded {
            let taken = channel.submit(lane, batch, finished);
            self.most -= taken;
            return taken;
        }
        self.submit_part(lane, channel, batch, finished)
    }

    #[inline(never)]
    fn submit_part(
        &mut self,
        lane: &mut Lane,
        channel: &mut dyn DiskChannel<Lane>,
        batch: &mut Vec<AnyRequest>,
        finished: &mut Vec<AnyFinished>,
    ) -> usize {
        let count = self.worth(batch);
        if count == batch.len() {
            let taken = channel.submit(lane, batch, finished);
            self.most -= taken;
            return taken;
        }
        if count == 0 {
            return 0;
        }
        self.part.extend(batch.drain(..count));
        let taken = channel.submit(lane, self.part, finished);
        // What was not taken goes back to the head.
        batch.splice(..0, self.part.drain(..));
        self.most = if taken == count { 0 } else { self.most - taken };
        taken
    }

    /// How many requests of the head of `batch` are allowed.
    fn worth(&self, batch: &[AnyRequest]) -> usize {
        let most = self.most.min(batch.len());
        if !self.crowded {
            return most;
        }
        let mut bytes = 0_u64;
        let full = batch[..most].iter().position(|request| {
            let before = bytes;
            // What is discarded or zeroed is not copied.
            bytes = bytes.saturating_add(if request.op.has_data() { request.len.0 } else { 0 });
            before >= TURN_BYTES
        });
        full.unwrap_or(most)
    }
}
