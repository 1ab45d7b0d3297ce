//! Event suppression of a packed virtqueue: the protocol of `crate::wakeup` over descriptors instead of an index.
//!
//! ```text
//! producer: write the descriptors, store the flags of the first one, FENCE, read the suppression:          wanted -> notify
//! consumer: store the suppression,                                   FENCE, check the next descriptor:    none -> sleep
//! ```
//!
//! `tests/loom_packed.rs` checks this code in all interleavings. Source: virtio 1.3 sections 2.8.10 and 2.8.23.4.

use std::sync::atomic::Ordering;

use super::position::Position;
use crate::wakeup::{RingCell, RingIndex};

/// Notify at every descriptor.
const ENABLE: u32 = 0;
/// Do not notify.
const DISABLE: u32 = 1 << FLAGS_SHIFT;
/// Notify when the descriptor at the given position is reached (with EVENT_IDX only).
const AT_POSITION: u32 = 2 << FLAGS_SHIFT;
const FLAGS_SHIFT: u32 = 16;
const FLAGS_MASK: u32 = 3 << FLAGS_SHIFT;

/// A producer's move through the ring.
#[derive(Clone, Copy, Debug)]
pub struct Move {
    /// The position now.
    pub end: Position,
    /// Slots since its last publish, at most a lap.
    pub slots: u16,
    /// The ring's entries.
    pub size: u16,
}

impl Move {
    /// Returns true if the move has passed the slot at `event`.
    #[inline]
    fn passes(&self, event: Position) -> bool {
        let (new, old) = (self.end.slot, self.end.slot.wrapping_sub(self.slots));
        // In the lap before, the slot lies a ring's length behind.
        let behind = if event.wrap == self.end.wrap { 0 } else { self.size };
        u16::need_event(event.slot.wrapping_sub(behind), new, old)
    }
}

/// An event suppression structure, in one cell: position in the low half, flags in the high half. The consumer writes
/// it.
#[derive(Debug)]
pub struct Suppression<'a, C: RingCell<Value = u32>> {
    /// The structure.
    pub cell: &'a C,
}

impl<C: RingCell<Value = u32>> Suppression<'_, C> {
    /// The producer's part: calls `store`, which makes descriptors visible. Returns true if the consumer must be
    /// notified.
    #[inline]
    #[must_use = "a consumer that requested a notification sleeps until it comes"]
    pub fn publish(&self, moved: &Move, event_idx: bool, store: impl FnOnce()) -> bool {
        store();
        C::full_fence();
        let wish = u32::from_le(self.cell.load(Ordering::Relaxed));
        match wish & FLAGS_MASK {
            DISABLE => false,
            AT_POSITION if event_idx => moved.passes(Position::from_bits(wish as u16)),
            // The fourth value is reserved. A spurious notification does no harm.
            _ => true,
        }
    }

    /// The consumer's part: requests a notification when the producer passes `event` (`None`: at its next move), then
    /// calls `look`, which checks the ring again. The consumer may sleep only if `look` finds nothing.
    #[inline]
    pub fn arm<T>(&self, event: Option<Position>, look: impl FnOnce() -> T) -> T {
        let wish = event.map_or(ENABLE, |event| AT_POSITION | u32::from(event.to_bits()));
        self.cell.store(wish.to_le(), Ordering::Relaxed);
        C::full_fence();
        look()
    }

    /// Suppresses notifications: a hint, without a barrier.
    #[inline]
    pub fn disarm(&self) {
        self.cell.store(DISABLE.to_le(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every position of an event, seen from every position of a producer, over moves of every length.
    #[test]
    fn a_move_passes_the_slots_in_it() {
        const SIZE: u16 = 8;
        let from_count = |count: u16| Position { slot: count % SIZE, wrap: (count / SIZE).is_multiple_of(2) };
        for old in 0..2 * SIZE {
            for slots in 0..=SIZE {
                let moved = Move { end: from_count(old + slots), slots, size: SIZE };
                for ahead in 0..2 * SIZE {
                    let event = from_count(old + ahead);
                    assert_eq!(moved.passes(event), ahead < slots, "{old} {slots} {event:?}");
                }
            }
        }
    }
}
