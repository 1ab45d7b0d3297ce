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

use mqblk_memory::{SharedU16, SharedU32, full_fence};

/// An index that runs freely: a virtqueue's has 16 bits, a blkif ring's 32.
pub trait Index: Copy + PartialEq + std::fmt::Debug {
    /// Whether moving an index from `old` to `new` passed `event`: the test both sides use to decide on a notification.
    /// Source: virtio 1.3 section 2.7.10.1, `vring_need_event`.
    fn passed(event: Self, new: Self, old: Self) -> bool;
    /// No bit set.
    const ZERO: Self;
    /// Whether it has any of these bits.
    fn has(self, bits: Self) -> bool;
    /// The index after it.
    fn next(self) -> Self;
    /// The index before it.
    fn previous(self) -> Self;
    /// As it lies in memory.
    fn to_le(self) -> Self;
    /// From how it lies in memory.
    fn from_le(stored: Self) -> Self;
}

macro_rules! index {
    ($type:ty) => {
        impl Index for $type {
            #[inline]
            fn passed(event: $type, new: $type, old: $type) -> bool {
                new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
            }
            const ZERO: $type = 0;
            #[inline]
            fn has(self, bits: $type) -> bool {
                self & bits != 0
            }
            #[inline]
            fn next(self) -> $type {
                self.wrapping_add(1)
            }
            #[inline]
            fn previous(self) -> $type {
                self.wrapping_sub(1)
            }
            #[inline]
            fn to_le(self) -> $type {
                <$type>::to_le(self)
            }
            #[inline]
            fn from_le(stored: $type) -> $type {
                <$type>::from_le(stored)
            }
        }
    };
}
index!(u16);
index!(u32);

/// A field that both ends use; little-endian, as it lies in memory.
pub trait Cell {
    /// What it holds.
    type Value: Index;
    /// An atomic load.
    fn load(&self, order: Ordering) -> Self::Value;
    /// An atomic store.
    fn store(&self, value: Self::Value, order: Ordering);
    /// A full barrier between all accesses to cells before it and after it.
    fn full_fence();
}

macro_rules! shared_cell {
    ($cell:ty, $value:ty) => {
        impl Cell for $cell {
            type Value = $value;

            #[inline]
            fn load(&self, order: Ordering) -> $value {
                <$cell>::load(self, order)
            }

            #[inline]
            fn store(&self, value: $value, order: Ordering) {
                <$cell>::store(self, value, order);
            }

            #[inline]
            fn full_fence() {
                full_fence();
            }
        }
    };
}
shared_cell!(SharedU16, u16);
shared_cell!(SharedU32, u32);

/// Where the consumer says when it wants to be woken.
#[derive(Debug)]
pub enum Wish<'a, C: Cell> {
    /// With EVENT_IDX: when the index passes this.
    Event(&'a C),
    /// In a Xen ring: when the index reaches this, which is one more. Source: Xen's `public/io/ring.h`.
    Reached(&'a C),
    /// Without: always, unless `cell` holds `quiet`.
    Flag {
        /// The consumer's flags.
        cell: &'a C,
        /// Their value when it does not want to be woken; else they are 0.
        quiet: C::Value,
    },
}

/// One direction of a ring, as far as waking goes. Made where it is used: it borrows the ring's cells.
#[derive(Debug)]
pub struct Direction<'a, C: Cell> {
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
    pub fn publish(&self, old: C::Value, new: C::Value) -> bool {
        // Release: the entries are visible before the index.
        self.index.store(new.to_le(), Ordering::Release);
        C::full_fence();
        let read = |cell: &C| C::Value::from_le(cell.load(Ordering::Relaxed));
        match self.wish {
            Wish::Event(event) => C::Value::passed(read(event), new, old),
            Wish::Reached(event) => C::Value::passed(read(event).previous(), new, old),
            Wish::Flag { cell, quiet } => !read(cell).has(quiet),
        }
    }

    /// The index as it is now; the entries before it are visible.
    #[inline]
    pub fn look(&self) -> C::Value {
        C::Value::from_le(self.index.load(Ordering::Acquire))
    }

    /// The consumer's part: asks to be woken when the index passes `event` (without EVENT_IDX: at its next move), then
    /// looks again. The consumer may sleep only if the index it gets back has not passed `event`.
    #[inline]
    #[must_use = "entries that came before the wish was seen are not told of"]
    pub fn arm(&self, event: C::Value) -> C::Value {
        match self.wish {
            Wish::Event(cell) => cell.store(event.to_le(), Ordering::Relaxed),
            Wish::Reached(cell) => cell.store(event.next().to_le(), Ordering::Relaxed),
            Wish::Flag { cell, .. } => cell.store(C::Value::ZERO, Ordering::Relaxed),
        }
        C::full_fence();
        self.look()
    }

    /// Asks not to be woken: a hint, without a barrier. With an event it is moved to `behind`, which the index has
    /// passed, so that at most one wake-up in 65536 entries comes (virtio 1.3 section 2.7.7.1); `None` leaves it as it is.
    #[inline]
    pub fn disarm(&self, behind: Option<C::Value>) {
        match (&self.wish, behind) {
            (Wish::Event(cell), Some(behind)) => cell.store(behind.to_le(), Ordering::Relaxed),
            (Wish::Reached(cell), Some(behind)) => cell.store(behind.next().to_le(), Ordering::Relaxed),
            (Wish::Event(_) | Wish::Reached(_), None) => {}
            (Wish::Flag { cell, quiet }, _) => cell.store(quiet.to_le(), Ordering::Relaxed),
        }
    }
}
