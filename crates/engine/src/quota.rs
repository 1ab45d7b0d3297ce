//! Bounds of a channel's use of its worker (operations in the context, time in a turn), so that a slow disk does not
//! delay fast ones. Pure, but for [`SubmitQuota`], which submits.

use mqblk_core::DiskChannel;
use mqblk_uring::UringContext;

use crate::request::{AnyCompletion, AnyRequest};

/// While several channels are busy, each gets at most this many requests a turn.
const TURN_REQUESTS: usize = 64;
/// While several channels are open, each gets at most this many bytes a turn: storage that copies inside `submit`, at
/// some 10 GB/s, then holds up a turn for 0.1 ms.
const CHANNEL_BYTES: u64 = 1 << 20;
/// All of them together get this many bytes a turn; then each of the others gets only a few small requests.
const TURN_BYTES: u64 = 4 << 20;
const MINIMUM_BYTES: u64 = 16 << 10;

/// With several open disks none may have more than one in this many of the context's operations in flight.
const CONTEXT_SHARE: usize = 4;
/// One in this many of the context's operations are for disks that have few in flight.
const RESERVE: usize = 8;
/// Definition of few: one in this many of the context's operations, so that 32 disks fit in the reserve, but no more
/// than keep storage busy.
const MINIMUM_SHARE: usize = 256;
const LARGEST_MINIMUM: usize = 16;

/// The bounds of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Quota {
    /// Most requests outstanding, as configured; 0: any number.
    pub(crate) depth: u32,
    /// True if other disks are open on the worker.
    pub(crate) shared: bool,
    /// True if other channels are busy.
    pub(crate) contended: bool,
}

impl Quota {
    /// Returns the number of `waiting` requests that may be offered to a channel with `outstanding` ones, when `room`
    /// of the context's `capacity` operations are free.
    ///
    /// A channel at its limit gets nothing until an eighth of it is free, or a turn's worth, or enough for all waiting
    /// requests: planning, stamping and moving a long plug for one request at a time would cost the other disks what
    /// the limit saves them.
    pub(crate) fn budget(self, waiting: usize, outstanding: usize, room: usize, capacity: usize) -> usize {
        let own = if self.depth == 0 { usize::MAX } else { self.depth as usize };
        let limit = if self.shared { own.min((capacity / CONTEXT_SHARE).max(1)) } else { own };
        let free = limit.saturating_sub(outstanding);
        if free < waiting.min(limit / 8).min(TURN_REQUESTS) {
            return 0;
        }
        let mut most = free;
        if self.shared {
            let few = (capacity / MINIMUM_SHARE).clamp(1, LARGEST_MINIMUM);
            let common = room.saturating_sub(capacity / RESERVE);
            most = most.min(common.max(few.saturating_sub(outstanding)));
        }
        if self.contended { most.min(TURN_REQUESTS) } else { most }
    }
}

/// Bytes that a worker's channels may still submit in a turn.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TurnBytes(u64);

impl TurnBytes {
    /// Starts a turn.
    pub(crate) fn new() -> TurnBytes {
        TurnBytes(TURN_BYTES)
    }

    /// Returns the next channel's part.
    pub(crate) fn of_channel(self) -> ByteQuota {
        // The first request may have any length, unless other channels have spent the turn's bytes.
        ByteQuota { most: self.0.clamp(MINIMUM_BYTES, CHANNEL_BYTES), any_length: self.0 > 0 }
    }

    /// Subtracts the bytes that a channel has submitted: `left` of its `quota` is left.
    pub(crate) fn spend(&mut self, quota: ByteQuota, left: ByteQuota) {
        self.0 = self.0.saturating_sub(quota.most - left.most);
    }
}

/// Bytes that a channel may submit in a turn.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ByteQuota {
    most: u64,
    /// True if the next request may have any length.
    any_length: bool,
}

impl ByteQuota {
    /// The quota of a worker's only channel: more than requests have bytes.
    pub(crate) const UNLIMITED: ByteQuota = ByteQuota { most: u64::MAX, any_length: true };

    /// Takes all requests from the quota if they fit, for any operation.
    #[inline]
    fn take_all(&mut self, batch: &[AnyRequest]) -> bool {
        let sum = match batch {
            [only] => only.len.0,
            _ => batch.iter().fold(0_u64, |sum, request| sum.saturating_add(request.len.0)),
        };
        let fits = sum <= self.most;
        if fits {
            self.most -= sum;
            self.any_length &= sum == 0;
        }
        fits
    }

    /// Takes one request from the quota if it fits.
    #[inline]
    fn take(&mut self, request: &AnyRequest) -> bool {
        // Discards and write-zeroes copy nothing, or are cut into slices.
        let len = if request.op.has_data() { request.len.0 } else { 0 };
        if len > self.most && !self.any_length {
            return false;
        }
        *self = ByteQuota { most: self.most.saturating_sub(len), any_length: self.any_length && len == 0 };
        true
    }
}

/// The part of a list that may be submitted to a channel.
pub(crate) struct SubmitQuota<'a> {
    /// Requests that may be submitted.
    pub(crate) most: usize,
    /// Bytes that may be submitted.
    pub(crate) bytes: &'a mut ByteQuota,
    /// A list for the part that is submitted.
    pub(crate) part: &'a mut Vec<AnyRequest>,
}

impl SubmitQuota<'_> {
    /// Submits the head of `batch`. Returns the number of taken requests, and reduces the quota by it.
    #[inline]
    pub(crate) fn submit(
        &mut self,
        context: &mut UringContext,
        channel: &mut impl DiskChannel<UringContext>,
        batch: &mut Vec<AnyRequest>,
        finished: &mut Vec<AnyCompletion>,
    ) -> usize {
        if self.most >= batch.len() && (self.bytes.most == u64::MAX || self.bytes.take_all(batch)) {
            let taken = channel.submit(context, batch, finished);
            self.most -= taken;
            return taken;
        }
        self.submit_part(context, channel, batch, finished)
    }

    #[inline(never)]
    fn submit_part(
        &mut self,
        context: &mut UringContext,
        channel: &mut impl DiskChannel<UringContext>,
        batch: &mut Vec<AnyRequest>,
        finished: &mut Vec<AnyCompletion>,
    ) -> usize {
        let count = self.allowed(batch);
        if count == batch.len() {
            let taken = channel.submit(context, batch, finished);
            self.most -= taken;
            return taken;
        }
        if count == 0 {
            return 0;
        }
        self.part.extend(batch.drain(..count));
        let taken = channel.submit(context, self.part, finished);
        // Requests that were not taken return to the head.
        batch.splice(..0, self.part.drain(..));
        self.most = if taken == count { 0 } else { self.most - taken };
        taken
    }

    /// Returns the number of allowed requests at the head of `batch`, and takes their bytes from the quota.
    fn allowed(&mut self, batch: &[AnyRequest]) -> usize {
        let most = self.most.min(batch.len());
        let full = batch[..most].iter().position(|request| !self.bytes.take(request));
        full.unwrap_or(most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALONE: Quota = Quota { depth: 0, shared: false, contended: false };
    const SHARED: Quota = Quota { shared: true, ..ALONE };
    const ALL: usize = 4096;

    #[test]
    fn a_lone_disk_may_use_all() {
        assert_eq!(ALONE.budget(5000, 4000, 0, ALL), usize::MAX - 4000);
        assert_eq!(Quota { depth: 8, ..ALONE }.budget(100, 5, ALL, ALL), 3);
        assert_eq!(Quota { depth: 8, ..ALONE }.budget(100, 9, ALL, ALL), 0);
    }

    #[test]
    fn one_of_several_disks_may_use_a_quarter_of_the_context() {
        assert_eq!(SHARED.budget(5000, 0, ALL, ALL), 1024);
        assert_eq!(SHARED.budget(5000, 1000, ALL, ALL), 0, "until a turn's worth is free");
        assert_eq!(SHARED.budget(24, 1000, ALL, ALL), 24, "or all that waits fits");
        assert_eq!(SHARED.budget(5000, 960, ALL, ALL), 64);
        assert_eq!(Quota { depth: 80, ..SHARED }.budget(5000, 71, ALL, ALL), 0, "until an eighth of it is free");
        assert_eq!(Quota { depth: 80, ..SHARED }.budget(5000, 70, ALL, ALL), 10);
        assert_eq!(Quota { depth: 2000, ..SHARED }.budget(5000, 0, ALL, ALL), 1024);
        assert_eq!(Quota { depth: 10, ..SHARED }.budget(5000, 4, ALL, ALL), 6);
    }

    #[test]
    fn the_contexts_reserve_is_for_disks_with_few_in_flight() {
        assert_eq!(SHARED.budget(100, 100, 612, ALL), 100);
        assert_eq!(SHARED.budget(100, 100, 500, ALL), 0);
        assert_eq!(SHARED.budget(100, 0, 500, ALL), 16);
        assert_eq!(SHARED.budget(100, 15, 500, ALL), 1);
        assert_eq!(SHARED.budget(100, 16, 500, ALL), 0);
    }

    #[test]
    fn slow_disks_together_leave_space_for_as_many_fast_ones() {
        // Slow disks come one after the other and take what they may; their requests never complete.
        let mut room = ALL;
        for _ in 0..16 {
            let mut outstanding = 0;
            while let taken @ 1.. = SHARED.budget(5000, outstanding, room, ALL) {
                (outstanding, room) = (outstanding + taken, room - taken);
            }
        }
        assert!(SHARED.budget(4, 0, room, ALL) >= 4 && room >= 256, "{room} left");
    }

    #[test]
    fn a_turn_is_shared_among_busy_channels() {
        assert_eq!(Quota { contended: true, ..SHARED }.budget(5000, 0, ALL, ALL), 64);
    }

    fn read(len: u64) -> AnyRequest {
        let (start, tag) = (mqblk_core::ByteOffset(0), mqblk_core::Tag::new(0, 0));
        AnyRequest { op: mqblk_core::Op::Read, start, len: mqblk_core::ByteLen(len), tag, buffer: None }
    }

    /// Returns the number of requests of this many bytes that the quota allows, of 1000.
    fn allowed(quota: &mut ByteQuota, len: u64) -> usize {
        (0..1000).take_while(|_| quota.take(&read(len))).count()
    }

    #[test]
    fn a_channel_gets_its_part_of_a_turns_bytes() {
        let mut turn = TurnBytes::new();
        let mut counts = Vec::new();
        for len in [4096, 128 << 10, 1 << 20, 2 << 20, 4096, 64 << 10, 4096] {
            let quota = turn.of_channel();
            let mut left = quota;
            counts.push(allowed(&mut left, len));
            turn.spend(quota, left);
        }
        // Nothing of 4 MiB is left for the fifth, so it and the others get 16 KiB each, and no long request.
        assert_eq!(counts, [256, 8, 1, 1, 4, 0, 4]);
    }

    #[test]
    fn requests_are_taken_together_if_all_fit() {
        let quota = TurnBytes::new().of_channel();
        let mut all = quota;
        assert!(all.take_all(&[read(4096), read(512)]));
        assert_eq!((all.most, all.any_length), (CHANNEL_BYTES - 4608, false));
        assert!(!all.take_all(&[read(CHANNEL_BYTES)]), "a lone long request is taken one by one");
        let mut one = quota;
        assert!(one.take(&read(2 * CHANNEL_BYTES)) && !one.take(&read(512)));
        let mut rest = ByteQuota { most: 4096, any_length: false };
        assert!(!rest.take(&read(4097)) && rest.take(&read(4096)) && !rest.take(&read(1)));
    }

    #[test]
    fn small_contexts_have_quotas_too() {
        for capacity in 1..64 {
            assert!(SHARED.budget(3, 0, capacity, capacity) >= 1, "{capacity}");
        }
    }
}
