//! The driver's end of a packed virtqueue: puts requests on, takes completions off.
//!
//! It is used as the driver's end of a split one: [`begin`](PackedDriver::begin), segments,
//! [`commit`](PackedChain::commit), [`publish`](PackedDriver::publish). Nothing is visible to the device before the
//! publish: the flags of the first descriptor are stored last, and the device goes through the ring in order.
//!
//! The device is not trusted: a used descriptor without a request in flight is a [`DeviceError`].

mod chain;
#[cfg(test)]
mod tests;

use mqblk_memory::{GuestAddress, GuestMemory, SharedArray};

use super::layout::{DESC_BYTES, PackedRing, state_word};
use super::position::Position;
use super::suppression::Move;
use crate::format::{Descriptor, RingAddresses, RingSetupError};
use crate::split::driver::{ChainLayout, DeviceError, IndirectArea, UsedRequest};
pub use chain::PackedChain;

/// The state of a buffer id.
#[derive(Clone, Copy, Debug, Default)]
struct IdState {
    token: u32,
    /// Descriptors of the request; 0 when none with this id is in flight.
    descriptors: u16,
    /// Number of the request, modulo 65536.
    sequence: u16,
}

/// A completion found in the ring.
#[derive(Clone, Copy, Debug, Default)]
struct Ready {
    token: u32,
    written: u32,
    id: u16,
    descriptors: u16,
}

#[derive(Debug)]
struct IndirectTables {
    area: IndirectArea,
    slots: SharedArray<[u64; 2]>,
    shadow: Box<[[u64; 2]]>,
}

/// The driver's end of one packed virtqueue, owned by one thread.
#[derive(Debug)]
pub struct PackedDriver {
    ring: PackedRing,
    tables: Option<IndirectTables>,
    event_idx: bool,
    /// Segments of the request that is being built, if it is a chain in the ring.
    segments: Box<[Descriptor]>,
    /// Free buffer ids are linked in a stack.
    next_id: Box<[u16]>,
    free_id: u16,
    ids: Box<[IdState]>,
    /// Free descriptors.
    free: u16,
    /// Requests in flight: wider than `free`, because the compiler loads two neighbours of one width as one value,
    /// which waits for the stores of both.
    in_flight: u32,
    /// A lower bound of the number of descriptors of each request in flight.
    least: u16,
    /// Position of the next descriptor.
    avail: Position,
    /// The first descriptor that is not visible yet: its slot and its second word.
    held_back: Option<(u16, u64)>,
    /// Slots from `held_back` on.
    unpublished_slots: u16,
    /// Requests committed and published so far, modulo 65536.
    committed: u16,
    published: u16,
    /// The next used descriptor to find.
    used: Position,
    /// Completions that were found and not taken: `ready_count` from `ready_at` on, as a ring.
    ready: Box<[Ready]>,
    ready_at: u16,
    ready_count: u16,
}

impl PackedDriver {
    /// Creates a ring of `size` entries (and zeroes it) at `at` in `memory`, with indirect tables if the device accepts
    /// them. Calls are suppressed at first, as after [`disarm`](Self::disarm).
    ///
    /// # Errors
    /// When a part does not lie in one region or is not aligned.
    pub fn new(
        memory: &GuestMemory,
        at: &RingAddresses,
        size: u16,
        event_idx: bool,
        indirect: Option<IndirectArea>,
    ) -> Result<PackedDriver, RingSetupError> {
        let ring = PackedRing::resolve(memory, at, size)?;
        let n = usize::from(size);
        let tables = indirect.map(|area| IndirectTables::new(memory, area, size)).transpose()?;
        for slot in 0..size {
            ring.store_address(slot, 0);
            ring.store_state(slot, 0);
        }
        ring.clear_suppression();
        let driver = PackedDriver {
            ring,
            tables,
            event_idx,
            segments: vec![Descriptor::default(); n].into(),
            next_id: (0..size).map(|id| (id + 1) & (size - 1)).collect(),
            free_id: 0,
            ids: vec![IdState::default(); n].into(),
            free: size,
            in_flight: 0,
            least: 1,
            avail: Position::FIRST,
            held_back: None,
            unpublished_slots: 0,
            committed: 0,
            published: 0,
            used: Position::FIRST,
            ready: vec![Ready::default(); n].into(),
            ready_at: 0,
            ready_count: 0,
        };
        driver.disarm();
        Ok(driver)
    }

    /// Returns the number of entries.
    pub fn size(&self) -> u16 {
        self.ring.size()
    }

    /// Returns the number of requests committed and not yet taken as completed.
    #[inline]
    pub fn in_flight(&self) -> u16 {
        self.in_flight as u16
    }

    /// Returns the number of free ring descriptors.
    #[inline]
    pub fn free_descriptors(&self) -> u16 {
        self.free
    }

    /// Returns the most segments of a [`ChainLayout::Indirect`] request; 0 without indirect tables.
    pub fn max_indirect_segments(&self) -> u16 {
        self.tables.as_ref().map_or(0, |tables| tables.area.per_table)
    }

    /// Makes all committed requests visible. Returns true if the device requested a kick for any of them.
    #[inline]
    #[must_use = "a device that requested a kick sleeps until it gets one"]
    pub fn publish(&mut self) -> bool {
        let Some((slot, word)) = self.held_back.take() else { return false };
        let moved = Move { end: self.avail, slots: std::mem::take(&mut self.unpublished_slots), size: self.size() };
        self.published = self.committed;
        let ring = &self.ring;
        ring.kicks().publish(&moved, self.event_idx, || ring.store_state(slot, word))
    }

    /// Returns the number of requests committed and not yet published.
    #[inline]
    pub fn unpublished(&self) -> u16 {
        self.committed.wrapping_sub(self.published)
    }

    /// Finds used descriptors. Returns how many completions [`take`](Self::take) can take.
    ///
    /// # Errors
    /// When one has no request in flight.
    #[inline]
    pub fn poll_used(&mut self) -> Result<u16, DeviceError> {
        loop {
            let (written, id, flags) = self.ring.load_state(self.used.slot);
            if !self.used.is_used(flags) {
                return Ok(self.ready_count);
            }
            let published = self.published;
            // At most 32768 requests are in flight.
            let is_published = |state: &&mut IdState| published.wrapping_sub(state.sequence).wrapping_sub(1) < 0x8000;
            let state = self.ids.get_mut(usize::from(id)).filter(|state| state.descriptors != 0);
            let Some(state) = state.filter(is_published) else { return Err(DeviceError::UsedId(id.into())) };
            let IdState { token, descriptors, .. } = std::mem::take(state);
            let at = usize::from(self.ready_at.wrapping_add(self.ready_count)) & (self.ready.len() - 1);
            self.ready[at] = Ready { token, written, id, descriptors };
            self.ready_count += 1;
            self.used = self.used.after(descriptors, self.ring.size());
        }
    }

    /// Returns the number of completions that the last [`poll_used`](Self::poll_used) found and that are not yet taken.
    #[inline]
    pub fn ready(&self) -> u16 {
        self.ready_count
    }

    /// Returns the token of the completion `ahead` past the next one, if [`poll_used`](Self::poll_used) has found that
    /// many: a hint for prefetches.
    #[inline]
    pub fn upcoming(&self, ahead: u16) -> Option<u32> {
        let at = usize::from(self.ready_at.wrapping_add(ahead)) & (self.ready.len() - 1);
        (ahead < self.ready_count).then(|| self.ready[at].token)
    }

    /// Takes one of the completions that the last [`poll_used`](Self::poll_used) found, in the device's order, and
    /// frees the request's descriptors.
    #[inline]
    pub fn take(&mut self) -> Option<UsedRequest> {
        if self.ready_count == 0 {
            return None;
        }
        let at = usize::from(self.ready_at) & (self.ready.len() - 1);
        let Ready { token, written, id, descriptors } = self.ready[at];
        self.ready_at = self.ready_at.wrapping_add(1);
        self.ready_count -= 1;
        self.next_id[usize::from(id)] = self.free_id;
        self.free_id = id;
        self.free += descriptors;
        self.in_flight -= 1;
        Some(UsedRequest { token, written })
    }

    /// Requests a call once `count` more completions (at least 1) are available, then checks the ring again. Returns
    /// how many are available already; the caller may sleep until the call only if they are fewer than `count`.
    ///
    /// The call may come earlier: without EVENT_IDX, and when requests have different numbers of descriptors.
    ///
    /// # Errors
    /// As [`poll_used`](Self::poll_used).
    pub fn arm(&mut self, count: u16) -> Result<u16, DeviceError> {
        loop {
            let ready = self.ready_count;
            let others = u32::from(count.saturating_sub(ready).max(1) - 1);
            // `others` completions fill at least this many slots.
            let slots = (others * u32::from(self.least)).min(u32::from(self.size()) - 1) as u16;
            let event = self.event_idx.then_some(self.used.after(slots, self.size()));
            self.ring.calls().arm(event, || ());
            let found = self.poll_used()?;
            // Earlier completions may have passed the event already. Each round finds one, so the loop ends.
            if found == ready || found >= count {
                return Ok(found);
            }
        }
    }

    /// Suppresses calls while the ring is polled.
    #[inline]
    pub fn disarm(&self) {
        self.ring.calls().disarm();
    }

    /// Puts a descriptor in a slot: its address, then the rest.
    #[inline]
    fn write_descriptor(&mut self, at: Position, descriptor: &Descriptor, id: u16) {
        self.ring.store_address(at.slot, descriptor.address);
        let word = state_word(descriptor.len, id, descriptor.flags | at.available_flags());
        if self.held_back.is_none() {
            self.held_back = Some((at.slot, word));
        } else {
            self.ring.store_state(at.slot, word);
        }
    }
}

impl IndirectTables {
    fn new(memory: &GuestMemory, area: IndirectArea, size: u16) -> Result<IndirectTables, RingSetupError> {
        let len = IndirectArea::bytes(size, area.per_table);
        let bad = RingSetupError::Part { part: "indirect tables", address: area.start.0, len, align: 16 };
        if !area.start.0.is_multiple_of(16) {
            return Err(bad);
        }
        let count = usize::from(size) * usize::from(area.per_table);
        let slots = memory.shared_array::<[u64; 2]>(area.start, count).ok_or(bad)?;
        for index in 0..count {
            slots.set(index, [0; 2]);
        }
        Ok(IndirectTables { area, slots, shadow: vec![[0; 2]; count].into() })
    }

    /// Returns the address of the table of buffer id `id`.
    #[inline]
    fn address(&self, id: u16) -> GuestAddress {
        GuestAddress(self.area.start.0 + u64::from(id) * u64::from(self.area.per_table) * DESC_BYTES)
    }
}
