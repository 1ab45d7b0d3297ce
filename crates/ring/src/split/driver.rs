//! The driver's end of a split virtqueue: puts requests on, takes completions off.
//!
//! A request is built segment by segment, directly in the ring: [`begin`](SplitDriver::begin), then readable segments,
//! then writable segments, then [`commit`](ChainBuilder::commit). No arrays are built; nothing is visible to the device
//! before [`publish`](SplitDriver::publish); a chain that is dropped before its commit has no effect.
//!
//! The cost of a request is cache lines that move between cores. So this end keeps private copies of everything it has
//! written, and does not rewrite a descriptor or an available entry that already holds the value. A driver that reuses
//! its buffers in the order of their completion leaves the descriptor table in both sides' caches.
//!
//! The device is not trusted: a used element without a request in flight is a [`DeviceError`], and the device can
//! corrupt only memory that it can access anyway.

mod chain;
#[cfg(test)]
mod tests;

use std::sync::atomic::Ordering;

use mqblk_memory::{GuestAddress, GuestMemory, SharedArray, SharedU16};

use super::layout::{RingAddresses, RingSetupError, SplitRing};
use crate::wakeup::Direction;
pub use chain::{ChainBuilder, ChainRefused};

/// Used elements in a cache line.
const USED_ENTRIES_PER_LINE: u16 = 8;
/// Used elements prefetched at once; the hardware's prefetcher has detected the stream by then.
const PREFETCH_ENTRIES: u16 = 4 * USED_ENTRIES_PER_LINE;

/// Memory for indirect tables: one table for each descriptor of the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndirectArea {
    /// Address of the first table; aligned to 16.
    pub start: GuestAddress,
    /// Descriptors of one table, a power of two.
    pub per_table: u16,
}

impl IndirectArea {
    /// Returns the bytes of the tables of a ring of `size` entries.
    pub const fn bytes(size: u16, per_table: u16) -> u64 {
        size as u64 * per_table as u64 * super::layout::DESC_BYTES
    }
}

/// Layout of a request's descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainLayout {
    /// One ring descriptor for each segment.
    Direct,
    /// One ring descriptor for an indirect table of the segments.
    Indirect,
}

/// The device violated the protocol. The queue is unusable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// More used elements than requests.
    #[error("used index: found {found} new elements, expected at most {in_flight}, the requests in flight")]
    UsedIndex {
        /// New elements by the device's index.
        found: u16,
        /// Requests in flight.
        in_flight: u16,
    },
    /// A used element without a request.
    #[error("used element: found id {0}, expected the head of a request in flight")]
    UsedId(u32),
}

/// A completed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UsedRequest {
    /// The token passed to [`ChainBuilder::commit`].
    pub token: u32,
    /// Bytes written, as the device reports.
    pub written: u32,
}

/// State of each descriptor that can be the head of a request.
#[derive(Clone, Copy, Debug, Default)]
struct HeadState {
    token: u32,
    /// Ring descriptors of the chain; 0 when no request with this head is in flight.
    descriptors: u16,
    /// The chain's last descriptor.
    last: u16,
}

#[derive(Debug)]
struct IndirectTables {
    area: IndirectArea,
    slots: SharedArray<[u64; 2]>,
    shadow: Box<[[u64; 2]]>,
}

/// The driver's end of one split virtqueue, owned by one thread.
#[derive(Debug)]
pub struct SplitDriver {
    ring: SplitRing,
    tables: Option<IndirectTables>,
    event_idx: bool,
    /// Private copy of the descriptor table.
    desc_shadow: Box<[[u64; 2]]>,
    /// Private copy of the available ring.
    avail_shadow: Box<[u16]>,
    /// Free descriptors are linked in a stack; so are those of a chain, so that freeing a chain is one step.
    next: Box<[u16]>,
    free_head: u16,
    free: u16,
    heads: Box<[HeadState]>,
    /// Requests in flight: wider than `free`, because the compiler loads two neighbours of one width as one value,
    /// which waits for the stores of both.
    in_flight: u32,
    /// Index of the next available entry; committed but unpublished requests lie between `published` and this.
    avail: u16,
    published: u16,
    /// The next used element to take.
    used: u16,
    /// The device's used index when last read.
    seen: u16,
}

impl SplitDriver {
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
    ) -> Result<SplitDriver, RingSetupError> {
        let ring = SplitRing::resolve(memory, at, size)?;
        let n = usize::from(size);
        let tables = indirect.map(|area| IndirectTables::new(memory, area, size)).transpose()?;
        for index in 0..n {
            ring.desc.set(index, [0; 2]);
            ring.avail_ring.set(index, 0);
            ring.used_ring.set(index, [0; 2]);
        }
        for cell in [&ring.avail_flags, &ring.avail_idx, &ring.used_event] {
            cell.store(0, Ordering::Relaxed);
        }
        for cell in [&ring.used_flags, &ring.used_idx, &ring.avail_event] {
            cell.store(0, Ordering::Relaxed);
        }
        let driver = SplitDriver {
            ring,
            tables,
            event_idx,
            desc_shadow: vec![[0; 2]; n].into(),
            avail_shadow: vec![0; n].into(),
            next: (0..size).map(|index| (index + 1) & (size - 1)).collect(),
            free_head: 0,
            free: size,
            heads: vec![HeadState::default(); n].into(),
            in_flight: 0,
            avail: 0,
            published: 0,
            used: 0,
            seen: 0,
        };
        driver.disarm();
        Ok(driver)
    }

    /// Returns the number of entries.
    pub fn size(&self) -> u16 {
        self.ring.size()
    }

    /// Returns the number of requests committed and not yet completed.
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

    /// Makes all committed requests visible: the index is stored once. Returns true if the device requested a kick for
    /// any of them (virtio 1.3 sections 2.7.10 and 2.7.13.4).
    #[inline]
    #[must_use = "a device that requested a kick sleeps until it gets one"]
    pub fn publish(&mut self) -> bool {
        let (old, new) = (self.published, self.avail);
        if old == new {
            return false;
        }
        self.published = new;
        self.ring.avail(self.event_idx).publish(old, new)
    }

    /// Returns the number of requests committed and not yet published.
    #[inline]
    pub fn unpublished(&self) -> u16 {
        self.avail.wrapping_sub(self.published)
    }

    /// Reads the device's used index. Returns how many completions [`take`](Self::take) can take.
    ///
    /// # Errors
    /// When the device reports more completions than requests in flight.
    #[inline]
    pub fn poll_used(&mut self) -> Result<u16, DeviceError> {
        self.check_used_index(self.used_direction().load_index())
    }

    /// Checks the device's used index.
    #[inline]
    fn check_used_index(&mut self, seen: u16) -> Result<u16, DeviceError> {
        if seen == self.seen {
            return Ok(self.ready());
        }
        let found = seen.wrapping_sub(self.used);
        let in_flight = self.in_flight() - self.unpublished();
        if found > in_flight || found < self.ready() {
            return Err(DeviceError::UsedIndex { found, in_flight });
        }
        self.seen = seen;
        for ahead in (0..found.min(PREFETCH_ENTRIES)).step_by(USED_ENTRIES_PER_LINE.into()) {
            self.ring.used_ring.prefetch(self.used.wrapping_add(ahead).into());
        }
        Ok(found)
    }

    /// Returns the number of completions that the last [`poll_used`](Self::poll_used) found and that are not yet taken.
    #[inline]
    pub fn ready(&self) -> u16 {
        self.seen.wrapping_sub(self.used)
    }

    /// Returns the token of the completion `ahead` past the next one, if [`poll_used`](Self::poll_used) has found that
    /// many: a hint for prefetches.
    #[inline]
    pub fn upcoming(&self, ahead: u16) -> Option<u32> {
        if ahead >= self.ready() {
            return None;
        }
        let [id, _] = self.ring.used_ring.get(self.used.wrapping_add(ahead).into()).map(u32::from_le);
        self.heads.get(id as usize).map(|head| head.token)
    }

    /// Takes one of the completions that the last [`poll_used`](Self::poll_used) found, in the device's order, and
    /// frees the request's descriptors.
    ///
    /// # Errors
    /// When the used element has no request in flight.
    #[inline]
    pub fn take(&mut self) -> Result<Option<UsedRequest>, DeviceError> {
        if self.used == self.seen {
            return Ok(None);
        }
        let [id, written] = self.ring.used_ring.get(self.used.into()).map(u32::from_le);
        let Some(head) = self.heads.get_mut(id as usize).filter(|head| head.descriptors != 0) else {
            return Err(DeviceError::UsedId(id));
        };
        let HeadState { token, descriptors, last } = std::mem::take(head);
        self.used = self.used.wrapping_add(1);
        self.next[usize::from(last)] = self.free_head;
        self.free_head = id as u16;
        self.free += descriptors;
        self.in_flight -= 1;
        Ok(Some(UsedRequest { token, written }))
    }

    /// Requests a call once `count` more completions (at least 1) are available, then re-checks. Returns how many are
    /// available already; the caller may sleep until the call only if they are fewer than `count`.
    ///
    /// Without EVENT_IDX the device calls at the first completion.
    ///
    /// # Errors
    /// As [`poll_used`](Self::poll_used).
    pub fn arm(&mut self, count: u16) -> Result<u16, DeviceError> {
        // The device calls when its index moves past the event: `used + count` lies just past it.
        let event = self.used.wrapping_add(count.max(1)).wrapping_sub(1);
        let seen = self.used_direction().arm(event);
        self.check_used_index(seen)
    }

    /// Suppresses calls while the ring is polled.
    #[inline]
    pub fn disarm(&self) {
        self.used_direction().disarm(Some(self.used.wrapping_sub(1)));
    }

    /// The direction from the device: used elements.
    #[inline]
    fn used_direction(&self) -> Direction<'_, SharedU16> {
        self.ring.used(self.event_idx)
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
}
