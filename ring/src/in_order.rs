//! The device's end of a virtqueue whose driver has accepted VIRTIO_F_IN_ORDER: chains are used in the order in which they were made
//! available. A chain that completes before an earlier one is held back until all before it are complete.
//!
//! Held-back chains are in flight for the ring below: its in-flight table names them until they are published, so the next process
//! replays them, and its [`RingState`] has them.
//!
//! A run of chains may be used by one element, in the place of the first one and with the name of the last one. The driver takes it that the
//! others were written completely, so a chain that was not ends a run. Source: virtio 1.3 sections 2.7.9 and 2.8.9.

#[cfg(test)]
mod tests;

use std::cell::Cell;

use mqblk_core::{ArmResult, PublishResult};
use mqblk_memory::{BufferPool, LeaseAccess, LeaseId};

use crate::format::{
    Available, ChainError, ChainHead, ChainHeader, ChainSegment, LoneChains, RingState, UsesRuns, UsualChains,
    VirtqueueError,
};
use crate::packed::{PackedDevice, PackedRing};
use crate::split::{RingLog, SplitDevice, SplitRing};

/// A chain that is in flight or held back.
#[derive(Clone, Debug, Default)]
struct Place {
    chain: u16,
    /// Bytes written to it, once it is complete.
    written: Option<u32>,
    /// Bytes of its writable segments, if they were all seen.
    writable: Cell<Option<u32>>,
}

/// A complete chain whose turn has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Complete {
    chain: u16,
    written: u32,
    /// All that is writable was written.
    is_full: bool,
}

/// The chains that were taken and are not published, in the order in which they were taken.
///
/// Chains are counted, modulo 2^32. At most as many as the ring has entries are in flight: a driver cannot make one available again before
/// it was used.
#[derive(Debug)]
struct CompletionOrder {
    /// By count, modulo the ring's entries.
    places: Box<[Place]>,
    /// By chain: its count.
    counts: Box<[u32]>,
    /// Count of the first chain that is not published.
    first: u32,
    /// Count of the next chain that is taken.
    next: u32,
    /// Count behind the last of the chains that are complete.
    completed: u32,
}

impl CompletionOrder {
    fn new(size: u16) -> CompletionOrder {
        let size = usize::from(size);
        let (places, counts) = (vec![Place::default(); size].into(), vec![0; size].into());
        CompletionOrder { places, counts, first: 0, next: 0, completed: 0 }
    }

    fn index(&self, count: u32) -> usize {
        count as usize & (self.places.len() - 1)
    }

    /// Appends a chain.
    fn take(&mut self, chain: u16) {
        let at = self.index(self.next);
        self.places[at] = Place { chain, ..Place::default() };
        // The ring below has checked that it is below the ring's size.
        self.counts[usize::from(chain)] = self.next;
        self.next = self.next.wrapping_add(1);
    }

    /// Returns the count of a chain that is in flight or held back.
    fn count(&self, chain: u16) -> Option<u32> {
        let count = *self.counts.get(usize::from(chain))?;
        let is_present = count.wrapping_sub(self.first) < self.next.wrapping_sub(self.first);
        (is_present && self.places[self.index(count)].chain == chain).then_some(count)
    }

    /// Notes how many bytes of a chain are writable.
    fn set_writable(&self, chain: u16, bytes: Option<u32>) {
        if let Some(count) = self.count(chain) {
            self.places[self.index(count)].writable.set(bytes);
        }
    }

    /// Notes that a chain is complete.
    fn complete(&mut self, chain: u16, written: u32) {
        let Some(count) = self.count(chain) else { return };
        let at = self.index(count);
        self.places[at].written = Some(written);
        let end = count.wrapping_add(1);
        if end.wrapping_sub(self.first) > self.completed.wrapping_sub(self.first) || self.is_published(self.completed) {
            self.completed = end;
        }
    }

    /// Removes the first chain if it is complete.
    fn pop_complete(&mut self) -> Option<Complete> {
        if self.first == self.next {
            return None;
        }
        let Place { chain, written, writable } = &self.places[self.index(self.first)];
        let written = (*written)?;
        let complete = Complete { chain: *chain, written, is_full: writable.get() == Some(written) };
        self.first = self.first.wrapping_add(1);
        Some(complete)
    }

    /// Returns true if all chains before this count are published.
    fn is_published(&self, count: u32) -> bool {
        self.first.wrapping_sub(count) < 1 << 31
    }

    /// Uses all chains whose turn has come, in runs.
    fn release(&mut self, ring: &mut impl UsesRuns) {
        while let Some(mut last) = self.pop_complete() {
            let at = ring.used_at();
            while last.is_full
                && let Some(next) = self.pop_complete()
            {
                ring.skip_used(last.chain);
                last = next;
            }
            ring.end_run(at, last.chain, last.written);
        }
    }
}

/// Completions up to one of them, see [`DeviceRing::completions`](crate::virtqueue::DeviceRing::completions).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompletionMark(u32);

impl CompletionMark {
    /// Returns the later of two marks of a ring.
    #[must_use]
    pub fn max(self, other: CompletionMark) -> CompletionMark {
        if other.0.wrapping_sub(self.0) < 1 << 31 { other } else { self }
    }
}

#[derive(Debug)]
enum OrderedRing {
    Split(SplitDevice),
    Packed(PackedDevice),
}

/// The device's end of a ring.
#[derive(Debug)]
pub struct InOrderRing {
    ring: OrderedRing,
    order: CompletionOrder,
}

/// Calls a function of the ring's format with the same arguments.
macro_rules! each_format {
    ($self:ident, $ring:ident => $call:expr) => {
        match $self.ring {
            OrderedRing::Split(ref $ring) => $call,
            OrderedRing::Packed(ref $ring) => $call,
        }
    };
    (mut $self:ident, $ring:ident => $call:expr) => {
        match $self.ring {
            OrderedRing::Split(ref mut $ring) => $call,
            OrderedRing::Packed(ref mut $ring) => $call,
        }
    };
}

impl From<SplitDevice> for InOrderRing {
    fn from(ring: SplitDevice) -> InOrderRing {
        let order = CompletionOrder::new(ring.size());
        InOrderRing { ring: OrderedRing::Split(ring), order }
    }
}

impl From<PackedDevice> for InOrderRing {
    fn from(ring: PackedDevice) -> InOrderRing {
        let order = CompletionOrder::new(ring.size());
        InOrderRing { ring: OrderedRing::Packed(ring), order }
    }
}

// The calls are those of `DeviceRing`.
impl InOrderRing {
    pub(crate) fn size(&self) -> u16 {
        each_format!(self, ring => ring.size())
    }

    pub(crate) fn is_resumed(&self) -> bool {
        each_format!(self, ring => ring.is_resumed())
    }

    pub(crate) fn is_tracked(&self) -> bool {
        each_format!(self, ring => ring.is_tracked())
    }

    pub(crate) fn replays(&self) -> usize {
        each_format!(self, ring => ring.replays())
    }

    pub(crate) fn take_recorded_step(&mut self, chain: u16) -> u8 {
        each_format!(mut self, ring => ring.take_recorded_step(chain))
    }

    pub(crate) fn recorded_steps(&self) -> usize {
        each_format!(self, ring => ring.recorded_steps())
    }

    pub(crate) fn record_step(&mut self, chain: u16, step: u8) {
        each_format!(mut self, ring => ring.record_step(chain, step));
    }

    #[inline(never)] // rings without an order have their own inlined
    pub(crate) fn fetch<const N: usize>(
        &mut self,
        pool: &mut BufferPool,
        lease: LeaseId,
        heads: &mut [ChainHead; N],
        max: usize,
    ) -> Result<(usize, bool), VirtqueueError> {
        let fetched = each_format!(mut self, ring => ring.fetch(pool, lease, heads, max))?;
        // Those to replay come first, in the order in which the process before had taken them.
        heads[..fetched.0].iter().for_each(|head| self.order.take(head.index));
        Ok(fetched)
    }

    #[inline(never)]
    pub(crate) fn walk(
        &self,
        pool: &mut BufferPool,
        lease: LeaseId,
        head: &ChainHead,
        mut each: impl FnMut(&mut BufferPool, ChainSegment) -> Result<(), ChainError>,
    ) -> Result<(), ChainError> {
        let mut writable = Some(0_u32);
        let counting = |pool: &mut BufferPool, segment: ChainSegment| {
            if segment.writable {
                writable = writable.and_then(|bytes| bytes.checked_add(segment.len));
            }
            each(pool, segment)
        };
        let walked = each_format!(self, ring => ring.walk(pool, lease, head, counting));
        self.order.set_writable(head.index, writable.filter(|_| walked.is_ok()));
        walked
    }

    #[inline(never)]
    pub(crate) fn put_used(&mut self, chain: u16, written: u32) {
        self.order.complete(chain, written);
    }

    #[inline(never)]
    pub(crate) fn publish(&mut self) -> PublishResult {
        let order = &mut self.order;
        each_format!(mut self, ring => {
            order.release(ring);
            ring.publish()
        })
    }

    pub(crate) fn arm(&mut self) -> ArmResult {
        each_format!(mut self, ring => ring.arm())
    }

    pub(crate) fn disarm(&mut self) {
        each_format!(mut self, ring => ring.disarm());
    }

    pub(crate) fn state(&self) -> RingState {
        each_format!(self, ring => ring.state())
    }

    pub(crate) fn relocate_split(&mut self, ring: SplitRing) {
        match &mut self.ring {
            OrderedRing::Split(own) => own.relocate(ring),
            OrderedRing::Packed(_) => debug_assert!(false, "a ring keeps its format"),
        }
    }

    pub(crate) fn relocate_packed(&mut self, ring: PackedRing) {
        match &mut self.ring {
            OrderedRing::Packed(own) => own.relocate(ring),
            OrderedRing::Split(_) => debug_assert!(false, "a ring keeps its format"),
        }
    }

    pub(crate) fn set_log(&mut self, log: Option<RingLog>) {
        each_format!(mut self, ring => ring.set_log(log));
    }

    pub(crate) fn completions(&self) -> CompletionMark {
        CompletionMark(self.order.completed)
    }

    pub(crate) fn completion_of(&self, chain: u16) -> CompletionMark {
        CompletionMark(self.order.count(chain).map_or(self.order.first, |count| count.wrapping_add(1)))
    }

    pub(crate) fn is_visible(&self, completions: CompletionMark) -> bool {
        self.order.is_published(completions.0)
    }
}

impl LoneChains for InOrderRing {
    #[inline]
    fn take_lone(&mut self, pool: &BufferPool) -> Available {
        let found = each_format!(mut self, ring => ring.take_lone(pool));
        if let Available::Lone(head) = &found {
            self.order.take(head.index);
        }
        found
    }

    #[inline]
    fn read_table(&self, access: &mut LeaseAccess<'_>, head: &mut ChainHead) {
        each_format!(self, ring => ring.read_table(access, head));
    }

    #[cold]
    fn reread(&self, index: u16) -> ChainHead {
        each_format!(self, ring => ring.reread(index))
    }
}

impl UsualChains for InOrderRing {
    fn three_segments<H: ChainHeader>(
        &self,
        access: &mut LeaseAccess<'_>,
        head: &ChainHead,
    ) -> Option<(H, [ChainSegment; 2])> {
        let (header, others): (H, _) = each_format!(self, ring => ring.three_segments(access, head))?;
        let mut lengths = others.iter().filter(|segment| segment.writable).map(|segment| segment.len);
        let bytes = lengths.try_fold(0, u32::checked_add);
        self.order.set_writable(head.index, bytes);
        Some((header, others))
    }
}
