//! The device's end of a split virtqueue: takes chains off, puts used elements on.

#[cfg(test)]
mod tests;

use std::sync::atomic::Ordering;

use mqblk_core::{ArmResult, PublishResult};
use mqblk_memory::{SharedU16, SharedWords};

use super::inflight::{InflightError, InflightTable, Replay};
use super::layout::{DESC_INDIRECT, DESC_NEXT, Descriptor, SplitRing};
use super::log::RingLog;
use crate::format::{RingState, VirtqueueError};
use crate::wakeup::Direction;

const BAD_AVAIL_INDEX: VirtqueueError = VirtqueueError("the available index is further ahead than the ring is long");
const BAD_HEAD: VirtqueueError = VirtqueueError("an available entry names a descriptor outside the table");
const DUPLICATE_HEAD: VirtqueueError = VirtqueueError("a chain was made available again before it was used");
const BAD_NEXT: VirtqueueError = VirtqueueError("a descriptor's next field is outside the table");
const CHAIN_LOOP: VirtqueueError = VirtqueueError("a descriptor chain is longer than its table: it loops");
const CHAIN_TOO_LONG: VirtqueueError = VirtqueueError("a descriptor chain of the ring has more than 1026 descriptors");

/// Most descriptors of a chain in the ring's own table: 1024 of data, a header and a status. Without this bound, each
/// chain of a ring of 32768 entries could cost a worker as many descriptors, of no bytes.
const MAX_CHAIN_LEN: u16 = 1026;

#[inline]
fn publish_result(requested: bool) -> PublishResult {
    if requested { PublishResult::Wanted } else { PublishResult::Suppressed }
}

/// The device's end of a ring.
#[derive(Debug)]
pub struct SplitDevice {
    ring: SplitRing,
    /// The next available entry to read.
    next_avail: u16,
    /// Index of the next used element.
    next_used: u16,
    /// Used index as the driver sees it.
    published: u16,
    event_idx: bool,
    /// Heads that are in flight. A driver that makes one of them available again violates the protocol.
    in_flight: Box<[bool]>,
    /// The heads in flight, in memory that outlives the process.
    inflight_table: Option<InflightTable>,
    /// Chains that an earlier process took and did not complete, the last one first.
    replays: Vec<Replay>,
    /// The `replays` with a recorded step.
    recorded_steps: Vec<Replay>,
    /// Most descriptors of a chain.
    max_chain_len: u16,
    /// Dirty log of this ring, while the guest is being migrated.
    log: Option<RingLog>,
}

impl SplitDevice {
    /// Creates a ring that resumes at available entry `next_avail`. The index of the next used element is read from the
    /// ring itself.
    pub fn new(ring: SplitRing, next_avail: u16, event_idx: bool) -> SplitDevice {
        let next_used = u16::from_le(ring.used_idx.load(Ordering::Relaxed));
        let in_flight = vec![false; usize::from(ring.size())].into_boxed_slice();
        let (replays, recorded_steps) = (Vec::new(), Vec::new());
        let max_chain_len = ring.size().min(MAX_CHAIN_LEN);
        SplitDevice {
            ring,
            next_avail,
            next_used,
            published: next_used,
            event_idx,
            in_flight,
            inflight_table: None,
            replays,
            recorded_steps,
            max_chain_len,
            log: None,
        }
    }

    /// Creates a ring whose chains in flight are tracked in `words`. It resumes from the table there, with its chains
    /// in flight; if the table is unused, at `next_avail`. Also returns the number of discarded chains, from before
    /// a reset of the ring.
    ///
    /// # Errors
    /// When `words` are not a valid table for this ring.
    pub fn tracked(
        ring: SplitRing,
        next_avail: u16,
        event_idx: bool,
        words: SharedWords,
    ) -> Result<(SplitDevice, usize), InflightError> {
        let mut ring = SplitDevice::new(ring, next_avail, event_idx);
        let (table, found) = InflightTable::open(words, ring.size(), ring.next_used)?;
        ring.next_avail = found.next_avail.unwrap_or(next_avail);
        for replay in &found.replays {
            ring.in_flight[usize::from(replay.head)] = true;
        }
        ring.recorded_steps = found.replays.iter().copied().filter(|replay| replay.step != 0).collect();
        ring.replays = found.replays;
        ring.replays.reverse();
        ring.inflight_table = Some(table);
        Ok((ring, found.discarded))
    }

    /// Returns true if the ring was served before: the driver may have missed a call for earlier completions, and its
    /// own kick may have been lost with the earlier process.
    pub fn is_resumed(&self) -> bool {
        self.next_avail != 0 || self.next_used != 0 || !self.replays.is_empty()
    }

    /// Returns true if chains in flight are tracked in memory that outlives the process.
    pub fn is_tracked(&self) -> bool {
        self.inflight_table.is_some()
    }

    /// Returns the number of chains to replay that an earlier process left. They come before those of the available
    /// ring.
    #[inline]
    pub fn replays(&self) -> usize {
        self.replays.len()
    }

    /// Takes the next of the [`replays`](Self::replays). Returns the chain's head, which is already in flight.
    pub(super) fn take_replay(&mut self) -> Option<u16> {
        self.replays.pop().map(|replay| replay.head)
    }

    /// Returns the progress that an earlier process recorded for the request of this head; 0 if unknown. Returned once.
    pub fn take_recorded_step(&mut self, head: u16) -> u8 {
        let found = self.recorded_steps.iter().position(|replay| replay.head == head);
        found.map_or(0, |at| self.recorded_steps.swap_remove(at).step)
    }

    /// Returns the number of chains to replay that have a recorded step.
    pub fn recorded_steps(&self) -> usize {
        self.recorded_steps.len()
    }

    /// Records the progress of a request in flight, for a process that replays it.
    pub fn record_step(&mut self, head: u16, step: u8) {
        if let Some(inflight) = &mut self.inflight_table {
            inflight.record_step(head, step);
        }
    }

    /// Returns the number of entries.
    #[inline]
    pub fn size(&self) -> u16 {
        self.ring.size()
    }

    /// Returns the state from which the ring can be resumed.
    pub fn state(&self) -> RingState {
        let in_flight = (0..).zip(&self.in_flight).filter_map(|(head, taken)| taken.then_some(head)).collect();
        RingState { base: self.next_avail.into(), in_flight }
    }

    /// Replaces the mapping of the ring, after a change of the memory table.
    pub fn relocate(&mut self, ring: SplitRing) {
        debug_assert_eq!(ring.size(), self.ring.size());
        self.ring = ring;
    }

    /// Starts, changes or ends dirty logging of writes to the ring.
    pub fn set_log(&mut self, log: Option<RingLog>) {
        self.log = log;
    }

    /// Returns the number of available chains, at most the ring's size.
    ///
    /// # Errors
    /// When the driver claims more than the ring can hold.
    #[inline]
    pub(super) fn waiting(&self) -> Result<u16, VirtqueueError> {
        let count = self.ahead();
        if count > self.size() { Err(BAD_AVAIL_INDEX) } else { Ok(count) }
    }

    /// Returns the unchecked distance to the driver's available index.
    #[inline]
    pub(super) fn ahead(&self) -> u16 {
        self.avail().load_index().wrapping_sub(self.next_avail)
    }

    /// Returns the head `ahead` entries past the next one, read once.
    #[inline]
    pub(super) fn head(&self, ahead: u16) -> u16 {
        u16::from_le(self.ring.avail_ring.get(usize::from(self.next_avail.wrapping_add(ahead))))
    }

    /// Returns the head `ahead` entries past the next one, read once, and prefetches its descriptor.
    #[inline]
    pub(super) fn peek(&self, ahead: u16) -> u16 {
        let head = self.head(ahead);
        self.ring.desc.prefetch(head.into());
        head
    }

    /// Takes the next chain, whose head [`peek`](Self::peek) returned.
    ///
    /// # Errors
    /// When the head lies outside the table or is already in flight.
    #[inline(always)] // for a lone chain; for each of a batch
    pub(super) fn take(&mut self, head: u16) -> Result<(), VirtqueueError> {
        let taken = self.in_flight.get_mut(usize::from(head)).ok_or(BAD_HEAD)?;
        if *taken {
            return Err(DUPLICATE_HEAD);
        }
        *taken = true;
        if let Some(inflight) = &mut self.inflight_table {
            inflight.mark_in_flight(head);
        }
        self.next_avail = self.next_avail.wrapping_add(1);
        Ok(())
    }

    /// Takes the next chain: one to replay, or else the next available one. `None` when there is neither.
    ///
    /// # Errors
    /// When the ring violates the protocol.
    #[cfg(test)]
    pub(super) fn take_next(&mut self) -> Result<Option<u16>, VirtqueueError> {
        if let Some(head) = self.take_replay() {
            return Ok(Some(head));
        }
        if self.waiting()? == 0 {
            return Ok(None);
        }
        let head = self.peek(0);
        self.take(head)?;
        Ok(Some(head))
    }

    /// Reads a descriptor of the table once.
    #[inline]
    pub(super) fn descriptor(&self, index: u16) -> Descriptor {
        Descriptor::from_words(self.ring.desc.get(index.into()))
    }

    /// Reads a descriptor of the table once; `None` if it lies outside.
    #[inline]
    pub(super) fn descriptor_within(&self, index: u16) -> Option<Descriptor> {
        self.ring.desc.get_within(index.into()).map(Descriptor::from_words)
    }

    /// Returns the descriptor after `desc`, which has NEXT. `seen` descriptors of the chain came before; it bounds the
    /// walk.
    ///
    /// # Errors
    /// When the chain leaves the table, loops, or has more descriptors than any request can have.
    #[inline]
    pub(super) fn next_descriptor(&self, desc: &Descriptor, seen: u16) -> Result<Descriptor, VirtqueueError> {
        if seen >= self.max_chain_len {
            return Err(if self.max_chain_len < self.size() { CHAIN_TOO_LONG } else { CHAIN_LOOP });
        }
        if desc.next >= self.size() {
            return Err(BAD_NEXT);
        }
        Ok(self.descriptor(desc.next))
    }

    /// Returns the number of entries of the indirect table of `desc`.
    ///
    /// # Errors
    /// When it violates the rules for indirect descriptors (virtio 1.3 section 2.7.5.3): a length that is not a
    /// multiple of 16, or 0, or more than 32768 descriptors; NEXT together with INDIRECT.
    #[inline]
    pub(super) fn indirect_entries(desc: &Descriptor) -> Result<u16, VirtqueueError> {
        if desc.flags & DESC_NEXT != 0 {
            return Err(VirtqueueError("a descriptor has both INDIRECT and NEXT"));
        }
        if desc.len == 0 || !desc.len.is_multiple_of(16) {
            return Err(VirtqueueError("an indirect table's length is not a multiple of 16 above 0"));
        }
        u16::try_from(desc.len / 16).ok().filter(|n| *n <= 32768).ok_or(VirtqueueError("an indirect table is too long"))
    }

    /// Returns true if `desc` refers to an indirect table.
    #[inline]
    pub(super) fn is_indirect(desc: &Descriptor) -> bool {
        desc.flags & DESC_INDIRECT != 0
    }

    /// Returns a chain to the driver, with the number of bytes written to it. Visible after [`publish`](Self::publish).
    #[inline(always)] // a device type calls it in a few places
    pub fn put_used(&mut self, head: u16, written: u32) {
        if let Some(taken) = self.in_flight.get_mut(usize::from(head)) {
            *taken = false;
        }
        if let Some(inflight) = &mut self.inflight_table {
            inflight.link_used(head);
        }
        self.ring.used_ring.set_elements(self.next_used.into(), [u32::from(head).to_le(), written.to_le()]);
        self.next_used = self.next_used.wrapping_add(1);
    }

    /// Makes all used elements since the last publish visible at once. Returns [`PublishResult::Wanted`] if the driver
    /// requested a call.
    #[inline(always)] // callers are few
    pub fn publish(&mut self) -> PublishResult {
        let (old, new) = (self.published, self.next_used);
        if new == old {
            return PublishResult::Nothing;
        }
        self.published = new;
        let requested = match &self.inflight_table {
            // Two calls, so that each is compiled for its comparison.
            None if self.event_idx => self.ring.used(true).publish(old, new),
            None => self.ring.used(false).publish(old, new),
            Some(_) => self.publish_tracked(old, new),
        };
        if self.log.is_some() {
            self.log_published(old, new);
        }
        publish_result(requested)
    }

    /// Moves the used index of a ring whose chains in flight are tracked. Returns true if the driver requested a call.
    #[inline(never)] // so that other rings' publish is small
    fn publish_tracked(&mut self, old: u16, new: u16) -> bool {
        let Some(inflight) = &mut self.inflight_table else { return false };
        inflight.before_publish();
        #[cfg(test)]
        crate::crash_points::crash_point();
        let requested = self.ring.used(self.event_idx).publish(old, new);
        inflight.after_publish(new);
        requested
    }

    #[cold]
    fn log_published(&self, old: u16, new: u16) {
        if let Some(log) = &self.log {
            log.mark_published(old, new, self.size());
        }
    }

    /// Requests a kick, then re-checks the available index.
    #[inline]
    pub fn arm(&mut self) -> ArmResult {
        let waiting = self.avail().arm(self.next_avail) != self.next_avail;
        self.log_suppression();
        if waiting { ArmResult::WorkWaiting } else { ArmResult::Sleepable }
    }

    /// Suppresses kicks. With EVENT_IDX a stale event index is enough.
    #[inline]
    pub fn disarm(&mut self) {
        self.avail().disarm(None);
        self.log_suppression();
    }

    #[inline]
    fn log_suppression(&self) {
        if let Some(log) = &self.log {
            log.mark_suppression(self.size());
        }
    }

    /// The direction from the driver: available entries.
    #[inline]
    fn avail(&self) -> Direction<'_, SharedU16> {
        self.ring.avail(self.event_idx)
    }
}
