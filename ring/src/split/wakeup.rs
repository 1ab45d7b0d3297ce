//! How neither end of a ring sleeps while the other waits for it.
//!
//! Both directions are the same: one end (the *producer*) moves an index and must wake the other end (the *consumer*) if
//! that wants to be woken. The driver produces available entries, the device used elements.
//!
//! ```text
//! producer: write the entries, store the index, FENCE, read the wish:   wanted -> wake
//! consumer: store the wish,                     FENCE, read the index:  still the same -> sleep
//! ```
//!
//! With the two fences at least one of them sees the other's store, so a consumer that sleeps is woken. Without either
//! fence, or without the second look at the index, both can miss: `tests/loom_wakeup.rs` shows it on this very code.
//!
//! Source: virtio 1.3 sections 2.7.7.2, 2.7.10 and 2.7.13.4.1.

use std::sync::atomic::Ordering;

use mqblk_memory::{SharedU16, full_fence};

use super::layout::passed;

/// A 16-bit field that both ends use; little-endian, as it lies in memory.
pub trait Cell {
    /// An atomic load.
    fn load(&self, order: Ordering) -> u16;
    /// An atomic store.
    fn store(&self, value: u16, order: Ordering);
    /// A full barrier between all accesses to cells before it and after it.
    fn full_fence();
}

impl Cell for SharedU16 {
    #[inline]
    fn load(&self, order: Ordering) -> u16 {
        SharedU16::load(self, order)
    }

    #[inline]
    fn store(&self, value: u16, order: Ordering) {
        SharedU16::store(self, value, order);
    }

    #[inline]
    fn full_fence() {
        full_fence();
    }
}

/// Where the consumer says when it wants to be woken.
#[derive(Debug)]
pub enum Wish<'a, C> {
    /// With EVENT_IDX: when the index passes this.
    Event(&'a C),
    /// Without: always, unless `cell` holds `quiet`.
    Flag {
        /// The consumer's flags.
        cell: &'a C,
        /// Their value when it does not want to be woken; else they are 0.
        quiet: u16,
    },
}

/// One direction of a ring, as far as waking goes. Made where it is used: it borrows the ring's cells.
#[derive(Debug)]
pub struct Direction<'a, C> {
    /// Written by the producer.
    pub index: &'a C,
    /// Written by the consumer.
    pub wish: Wish<'a, C>,
}

impl<C: Cell> Direction<'_, C> {
    /// The producer's part: moves the index from `old` to `new`, which makes the entries between visible. Whether the
    /// consumer is to be woken.
    #[inline]
    #[must_use = "a consumer that wants to be woken sleeps until it is"]
    pub fn publish(&self, old: u16, new: u16) -> bool {
        // Release: the entries are visible before the index.
        self.index.store(new.to_le(), Ordering::Release);
        C::full_fence();
        match self.wish {
            Wish::Event(event) => passed(u16::from_le(event.load(Ordering::Relaxed)), new, old),
            Wish::Flag { cell, quiet } => u16::from_le(cell.load(Ordering::Relaxed)) & quiet == 0,
        }
    }

    /// The index as it is now; the entries before it are visible.
    #[inline]
    pub fn look(&self) -> u16 {
        u16::from_le(self.index.load(Ordering::Acquire))
    }

    /// The consumer's part: asks to be woken when the index passes `event` (without EVENT_IDX: at its next move), then
    /// looks again. The consumer may sleep only if the index it gets back has not passed `event`.
    #[inline]
    #[must_use = "entries that came before the wish was seen are not told of"]
    pub fn arm(&self, event: u16) -> u16 {
        match self.wish {
            Wish::Event(cell) => cell.store(event.to_le(), Ordering::Relaxed),
            Wish::Flag { cell, .. } => cell.store(0, Ordering::Relaxed),
        }
        C::full_fence();
        self.look()
    }

    /// Asks not to be woken: a hint, without a barrier. With EVENT_IDX the event is moved to `behind`, which the index has
    /// passed, so that at most one wake-up in 65536 entries comes (virtio 1.3 section 2.7.7.1); `None` leaves it as it is.
    #[inline]
    pub fn disarm(&self, behind: Option<u16>) {
        match (&self.wish, behind) {
            (Wish::Event(cell), Some(behind)) => cell.store(behind.to_le(), Ordering::Relaxed),
            (Wish::Event(_), None) => {}
            (Wish::Flag { cell, quiet }, _) => cell.store(quiet.to_le(), Ordering::Relaxed),
        }
    }
}
