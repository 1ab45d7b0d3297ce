//! The device's end of a packed virtqueue: takes chains off, writes used descriptors.

#[cfg(test)]
mod tests;

use mqblk_core::{ArmResult, PublishResult};
use mqblk_memory::SharedWords;

use super::inflight::{PackedInflight, PackedReplay};
use super::layout::{PackedRing, state_word};
use super::position::{Base, Position};
use super::suppression::Move;
use crate::format::{DESC_INDIRECT, DESC_NEXT, DESC_WRITE, Descriptor, RingState, VirtqueueError};
use crate::split::{InflightError, RingLog};

const BAD_ID: VirtqueueError = VirtqueueError("a buffer id is not below the ring's size");
const DUPLICATE_ID: VirtqueueError = VirtqueueError("a buffer id was made available again before it was used");
const TOO_MANY: VirtqueueError =
    VirtqueueError("a descriptor chain continues in descriptors that are in flight: more than the ring is long");
const CHAIN_TOO_LONG: VirtqueueError = VirtqueueError("a descriptor chain of the ring has more than 1026 descriptors");
const INDIRECT_IN_CHAIN: VirtqueueError =
    VirtqueueError("a descriptor with INDIRECT is part of a chain of several descriptors");

/// Most descriptors of a chain in the ring: 1024 of data, a header and a status, as in a split ring.
const MAX_CHAIN_LEN: u16 = 1026;

/// The state of a buffer id in flight.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ChainState {
    /// Slot of its head descriptor.
    pub(super) slot: u16,
    /// Its descriptors; 0: the id is not in flight.
    pub(super) count: u16,
    /// Its first entry in the in-flight table.
    pub(super) entry: u16,
    /// True if an earlier process took it: its descriptors are in the in-flight table, used ones may have overwritten
    /// those in the ring.
    pub(super) in_table: bool,
}

/// Used descriptors that the driver does not see yet. It sees all of them when the first one is stored.
#[derive(Clone, Copy, Debug)]
struct Unpublished {
    at: Position,
    /// The first descriptor's second word.
    word: u64,
    /// Slots of all.
    slots: u16,
}

/// The device's end of a ring.
#[derive(Debug)]
pub struct PackedDevice {
    pub(super) ring: PackedRing,
    /// The next descriptor to read.
    avail: Position,
    /// The next used descriptor to write.
    used: Position,
    unpublished: Option<Unpublished>,
    /// Descriptors in flight.
    taken: u16,
    event_idx: bool,
    /// By buffer id.
    pub(super) chains: Box<[ChainState]>,
    pub(super) inflight: Option<PackedInflight>,
    /// Chains that an earlier process took and did not complete, the last one first.
    replays: Vec<PackedReplay>,
    /// The `replays` with a recorded step.
    recorded_steps: Vec<PackedReplay>,
    /// True if the ring was served before.
    is_resumed: bool,
    /// Dirty log of this ring, while the guest is being migrated.
    log: Option<RingLog>,
    /// True if descriptors were written that are not logged yet, because the log came later.
    unlogged: bool,
}

/// Returns true if a ring that is at its first slot has been served: it is there in every lap, and a new ring's driver
/// has cleared the last slot.
fn is_written(ring: &PackedRing) -> bool {
    ring.load_address(ring.size() - 1) != 0
}

/// Returns the position of a ring that is to start at `base`. User-Mode Linux starts a new one at 0, as a split ring;
/// after an odd number of laps a ring is at 0, too.
fn start_of(ring: &PackedRing, base: Base) -> Base {
    if base == Base::from_bits(0) && !is_written(ring) { Base::FIRST } else { base }
}

impl PackedDevice {
    /// Creates a ring that resumes at `base`.
    pub fn new(ring: PackedRing, base: Base, event_idx: bool) -> PackedDevice {
        let base = start_of(&ring, base);
        PackedDevice::at(ring, base, event_idx)
    }

    fn at(ring: PackedRing, base: Base, event_idx: bool) -> PackedDevice {
        let chains = vec![ChainState::default(); usize::from(ring.size())].into_boxed_slice();
        PackedDevice {
            ring,
            avail: base.avail,
            used: base.used,
            unpublished: None,
            taken: 0,
            event_idx,
            chains,
            inflight: None,
            replays: Vec::new(),
            recorded_steps: Vec::new(),
            is_resumed: base != Base::FIRST,
            log: None,
            unlogged: false,
        }
    }

    /// Creates a ring whose chains in flight are tracked in `words`. It resumes from the table there, with its chains
    /// in flight; if the table is unused, at `base`. Also returns the number of discarded chains, from before a
    /// reset of the ring.
    ///
    /// # Errors
    /// When `words` are not a valid table for this ring.
    pub fn tracked(
        ring: PackedRing,
        base: Base,
        event_idx: bool,
        words: SharedWords,
    ) -> Result<(PackedDevice, usize), InflightError> {
        let base = start_of(&ring, base);
        let (table, found) = PackedInflight::open(words, &ring, base)?;
        let mut ring = PackedDevice::at(ring, found.base.unwrap_or(base), event_idx);
        for replay in &found.replays {
            let PackedReplay { id, entry, count, .. } = *replay;
            ring.chains[usize::from(id)] = ChainState { slot: 0, count, entry, in_table: true };
            ring.taken += count;
        }
        ring.unlogged = found.repaired;
        ring.is_resumed |= !found.replays.is_empty() || found.base.is_some() && is_written(&ring.ring);
        ring.recorded_steps = found.replays.iter().copied().filter(|replay| replay.step != 0).collect();
        ring.replays = found.replays;
        ring.replays.reverse();
        ring.inflight = Some(table);
        Ok((ring, found.discarded))
    }

    /// Returns true if the ring was served before: the driver may have missed a call for earlier completions, and its
    /// own kick may have been lost with the earlier process.
    pub fn is_resumed(&self) -> bool {
        self.is_resumed
    }

    /// Returns true if chains in flight are tracked in memory that outlives the process.
    pub fn is_tracked(&self) -> bool {
        self.inflight.is_some()
    }

    /// Returns the number of chains to replay that an earlier process left. They come before those that are available.
    #[inline]
    pub fn replays(&self) -> usize {
        self.replays.len()
    }

    /// Takes the next of the [`replays`](Self::replays). Returns its buffer id, which is already in flight.
    pub(super) fn take_replay(&mut self) -> Option<u16> {
        self.replays.pop().map(|replay| replay.id)
    }

    /// Returns the progress that an earlier process recorded for the request of this buffer id; 0 if unknown. Returned
    /// once.
    pub fn take_recorded_step(&mut self, id: u16) -> u8 {
        let found = self.recorded_steps.iter().position(|replay| replay.id == id);
        found.map_or(0, |at| self.recorded_steps.swap_remove(at).step)
    }

    /// Returns the number of chains to replay that have a recorded step.
    pub fn recorded_steps(&self) -> usize {
        self.recorded_steps.len()
    }

    /// Records the progress of a request in flight, for a process that replays it.
    pub fn record_step(&mut self, id: u16, step: u8) {
        if let Some(inflight) = &mut self.inflight
            && let Some(chain) = self.chains.get(usize::from(id)).filter(|chain| chain.count != 0)
        {
            inflight.record_step(chain.entry, step);
        }
    }

    /// Returns the number of entries.
    #[inline]
    pub fn size(&self) -> u16 {
        self.ring.size()
    }

    /// Returns the state from which the ring can be resumed.
    pub fn state(&self) -> RingState {
        let in_flight = (0..).zip(&self.chains).filter_map(|(id, chain)| (chain.count != 0).then_some(id)).collect();
        RingState { base: Base { avail: self.avail, used: self.used }.to_bits(), in_flight }
    }

    /// Replaces the mapping of the ring, after a change of the memory table.
    pub fn relocate(&mut self, ring: PackedRing) {
        debug_assert_eq!(ring.size(), self.ring.size());
        self.ring = ring;
    }

    /// Starts, changes or ends dirty logging of writes to the ring.
    pub fn set_log(&mut self, log: Option<RingLog>) {
        self.log = log;
        if let Some(log) = self.log.as_ref().filter(|_| self.unlogged) {
            self.unlogged = false;
            log.mark_descriptors(&self.ring, Position::FIRST, self.ring.size());
        }
        // Used descriptors of an unfinished batch: they are logged with the publish.
    }

    /// Returns true if a chain is available.
    #[inline]
    pub(super) fn is_waiting(&self) -> bool {
        self.avail.is_available(self.ring.load_state(self.avail.slot).2)
    }

    /// Takes the next chain, if one is available. Returns its buffer id and its head descriptor.
    ///
    /// # Errors
    /// When the ring violates the protocol.
    #[inline(always)] // of a batch
    pub(super) fn take(&mut self) -> Result<Option<(u16, Descriptor)>, VirtqueueError> {
        let slot = self.avail.slot;
        let (first, mut id) = self.ring.load(slot);
        if !self.avail.is_available(first.flags) {
            return Ok(None);
        }
        let room = self.ring.size() - self.taken;
        if room == 0 {
            return Err(TOO_MANY);
        }
        if let Some(inflight) = &mut self.inflight {
            inflight.begin_chain();
            inflight.add_descriptor(&first, id);
        }
        let mut count = 1;
        if first.flags & DESC_NEXT != 0 {
            let is_usual = first.flags & DESC_INDIRECT == 0 && room >= 3 && self.inflight.is_none();
            (count, id) = match is_usual.then(|| self.id_of_three(slot)).flatten() {
                Some(id) => (3, id),
                None => self.follow(&first, room)?,
            };
        }
        let chain = self.chains.get_mut(usize::from(id)).ok_or(BAD_ID)?;
        if chain.count != 0 {
            return Err(DUPLICATE_ID);
        }
        let entry = self.inflight.as_mut().map_or(0, |inflight| inflight.end_chain(count));
        *chain = ChainState { slot, count, entry, in_table: false };
        self.taken += count;
        self.avail = self.avail.after(count, self.ring.size());
        Ok(Some((id, first)))
    }

    /// Returns the buffer id of a chain that goes on from this slot and has three descriptors; `None` for all others.
    #[inline]
    fn id_of_three(&self, slot: u16) -> Option<u16> {
        let mask = self.ring.size() - 1;
        let [(_, _, second), (_, id, third)] = [1, 2].map(|at| self.ring.load_state((slot + at) & mask));
        let kind = DESC_NEXT | DESC_INDIRECT;
        (second & kind == DESC_NEXT && third & kind == 0).then_some(id)
    }

    /// Follows a chain of several descriptors in the ring to its end. Returns their number and the chain's buffer id,
    /// which the last one has.
    fn follow(&mut self, first: &Descriptor, room: u16) -> Result<(u16, u16), VirtqueueError> {
        if first.flags & DESC_INDIRECT != 0 {
            return Err(INDIRECT_IN_CHAIN);
        }
        // Each descriptor is in the ring, and none is in flight.
        let most = room.min(MAX_CHAIN_LEN);
        let mask = self.ring.size() - 1;
        let mut slot = self.avail.slot;
        for count in 1..most {
            slot = (slot + 1) & mask;
            let (id, flags) = match &mut self.inflight {
                None => {
                    let (_, id, flags) = self.ring.load_state(slot);
                    (id, flags)
                }
                Some(inflight) => {
                    let (desc, id) = self.ring.load(slot);
                    inflight.add_descriptor(&desc, id);
                    (id, desc.flags)
                }
            };
            if flags & DESC_INDIRECT != 0 {
                return Err(INDIRECT_IN_CHAIN);
            }
            if flags & DESC_NEXT == 0 {
                return Ok((count + 1, id));
            }
        }
        Err(if most == room { TOO_MANY } else { CHAIN_TOO_LONG })
    }

    /// Records the chains taken by the last calls of [`take`](Self::take) in the in-flight table. They may be executed
    /// after this.
    #[inline]
    pub(super) fn record_taken(&mut self) {
        if let Some(inflight) = &mut self.inflight {
            inflight.store_taken();
        }
    }

    /// Returns a chain to the driver, with the number of bytes written to it. Visible after [`publish`](Self::publish).
    #[inline(never)] // a queue of split rings has its own inlined
    pub fn put_used(&mut self, id: u16, written: u32) {
        let Some(chain) = self.chains.get_mut(usize::from(id)).filter(|chain| chain.count != 0) else { return };
        let ChainState { count, entry, .. } = std::mem::take(chain);
        if let Some(inflight) = &mut self.inflight {
            inflight.complete(entry);
        }
        let wrote = if written == 0 { 0 } else { DESC_WRITE };
        let word = state_word(written, id, self.used.used_flags() | wrote);
        match &mut self.unpublished {
            None => self.unpublished = Some(Unpublished { at: self.used, word, slots: count }),
            Some(batch) => {
                batch.slots += count;
                self.ring.store_state(self.used.slot, word);
            }
        }
        self.used = self.used.after(count, self.ring.size());
        self.taken -= count;
    }

    /// Makes all used descriptors since the last publish visible at once. Returns [`PublishResult::Wanted`] if the
    /// driver requested a call.
    #[inline(never)]
    pub fn publish(&mut self) -> PublishResult {
        let Some(Unpublished { at, word, slots }) = self.unpublished.take() else { return PublishResult::Nothing };
        let moved = Move { end: self.used, slots, size: self.ring.size() };
        let (ring, event_idx) = (&self.ring, self.event_idx);
        let requested = match &mut self.inflight {
            None => ring.calls().publish(&moved, event_idx, || ring.store_state(at.slot, word)),
            Some(inflight) => {
                inflight.before_publish(self.used);
                #[cfg(test)]
                crate::crash_points::crash_point();
                let requested = ring.calls().publish(&moved, event_idx, || ring.store_state(at.slot, word));
                inflight.after_publish();
                requested
            }
        };
        if let Some(log) = &self.log {
            log.mark_descriptors(&self.ring, at, slots);
        }
        if requested { PublishResult::Wanted } else { PublishResult::Suppressed }
    }

    /// Requests a kick, then checks the ring again.
    #[inline]
    pub fn arm(&mut self) -> ArmResult {
        let event = self.event_idx.then_some(self.avail);
        let waiting = self.ring.kicks().arm(event, || self.is_waiting());
        self.log_suppression();
        if waiting { ArmResult::WorkWaiting } else { ArmResult::Sleepable }
    }

    /// Suppresses kicks.
    #[inline]
    pub fn disarm(&mut self) {
        self.ring.kicks().disarm();
        self.log_suppression();
    }

    #[inline]
    fn log_suppression(&self) {
        if let Some(log) = &self.log {
            log.mark_device_area(&self.ring);
        }
    }
}
