//! The notification protocol of rings: neither end sleeps while the other waits for it.
//!
//! Both directions are equal: one end (the *producer*) moves an index and must notify the other end (the *consumer*) on
//! its request. The driver produces available entries, the device used elements.
//!
//! ```text
//! producer: write the entries, store the index, FENCE, read the suppression:  wanted -> notify
//! consumer: store the suppression,              FENCE, read the index:        unchanged -> sleep
//! ```
//!
//! With the two fences at least one end sees the other's store, so a consumer that sleeps is notified. Without either
//! fence, or without re-checking the index, both can miss it: `tests/loom_wakeup.rs` shows this on the same code.
//!
//! Source: virtio 1.3 sections 2.7.7.2, 2.7.10 and 2.7.13.4.1.

use std::sync::atomic::Ordering;

use mqblk_memory::{SharedU16, SharedU32, full_fence};

/// A free-running index: a virtqueue's has 16 bits, a blkif ring's 32.
pub trait RingIndex: Copy + PartialEq + std::fmt::Debug {
    /// Returns true if moving an index from `old` to `new` passes `event`: both sides decide on a notification by it.
    /// Source: virtio 1.3 section 2.7.10.1, `vring_need_event`.
    fn need_event(event: Self, new: Self, old: Self) -> bool;
    /// Zero: no bit set.
    const ZERO: Self;
    /// Returns true if any of these bits is set.
    fn has_bits(self, bits: Self) -> bool;
    /// Returns the next index.
    fn next(self) -> Self;
    /// Returns the previous index.
    fn previous(self) -> Self;
    /// Converts to the little-endian form in memory.
    fn to_le(self) -> Self;
    /// Converts from the little-endian form in memory.
    fn from_le(stored: Self) -> Self;
}

macro_rules! index {
    ($type:ty) => {
        impl RingIndex for $type {
            #[inline]
            fn need_event(event: $type, new: $type, old: $type) -> bool {
                new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
            }
            const ZERO: $type = 0;
            #[inline]
            fn has_bits(self, bits: $type) -> bool {
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

/// A ring field that both ends access; little-endian in memory.
pub trait RingCell {
    /// Type of the value.
    type Value: RingIndex;
    /// Loads the value atomically.
    fn load(&self, order: Ordering) -> Self::Value;
    /// Stores the value atomically.
    fn store(&self, value: Self::Value, order: Ordering);
    /// A full barrier between all cell accesses before it and after it.
    fn full_fence();
}

macro_rules! shared_cell {
    ($cell:ty, $value:ty) => {
        impl RingCell for $cell {
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

/// Event suppression: the consumer's request for notifications by the producer. Source: virtio 1.3 section 2.7.7.
#[derive(Debug)]
pub enum EventSuppression<'a, C: RingCell> {
    /// With EVENT_IDX: notify when the index passes this.
    EventIdx(&'a C),
    /// In a Xen ring: notify when the index reaches this: one more than with EVENT_IDX. Source: Xen's
    /// `public/io/ring.h`.
    XenEvent(&'a C),
    /// Without EVENT_IDX: always notify, unless `cell` holds `suppressed`.
    Flag {
        /// The consumer's flags.
        cell: &'a C,
        /// Their value when notifications are suppressed; else they are 0.
        suppressed: C::Value,
    },
}

/// One direction of a ring: the index and the event suppression. Created at its use: it borrows the ring's cells.
#[derive(Debug)]
pub struct Direction<'a, C: RingCell> {
    /// Written by the producer.
    pub index: &'a C,
    /// Written by the consumer.
    pub suppression: EventSuppression<'a, C>,
}

impl<C: RingCell> Direction<'_, C> {
    /// The producer's part: moves the index from `old` to `new`, which makes the entries in between visible. Returns
    /// true if the consumer must be notified.
    #[inline]
    #[must_use = "a consumer that requested a notification sleeps until it comes"]
    pub fn publish(&self, old: C::Value, new: C::Value) -> bool {
        // Release: the entries are visible before the index.
        self.index.store(new.to_le(), Ordering::Release);
        C::full_fence();
        let read = |cell: &C| C::Value::from_le(cell.load(Ordering::Relaxed));
        match self.suppression {
            EventSuppression::EventIdx(event) => C::Value::need_event(read(event), new, old),
            EventSuppression::XenEvent(event) => C::Value::need_event(read(event).previous(), new, old),
            EventSuppression::Flag { cell, suppressed: quiet } => !read(cell).has_bits(quiet),
        }
    }

    /// Loads the current index; the entries before it are visible.
    #[inline]
    pub fn load_index(&self) -> C::Value {
        C::Value::from_le(self.index.load(Ordering::Acquire))
    }

    /// The consumer's part: requests a notification when the index passes `event` (without EVENT_IDX: at its next
    /// move), then re-checks the index. The consumer may sleep only if the returned index has not passed `event`.
    #[inline]
    #[must_use = "entries that came before the suppression was seen are not notified"]
    pub fn arm(&self, event: C::Value) -> C::Value {
        match self.suppression {
            EventSuppression::EventIdx(cell) => cell.store(event.to_le(), Ordering::Relaxed),
            EventSuppression::XenEvent(cell) => cell.store(event.next().to_le(), Ordering::Relaxed),
            EventSuppression::Flag { cell, .. } => cell.store(C::Value::ZERO, Ordering::Relaxed),
        }
        C::full_fence();
        self.load_index()
    }

    /// Suppresses notifications: a hint, without a barrier. An event index is moved to `behind`, which the index has
    /// passed, so that at most one notification in 65536 entries comes (virtio 1.3 section 2.7.7.1); `None` leaves
    /// it unchanged.
    #[inline]
    pub fn disarm(&self, behind: Option<C::Value>) {
        match (&self.suppression, behind) {
            (EventSuppression::EventIdx(cell), Some(behind)) => cell.store(behind.to_le(), Ordering::Relaxed),
            (EventSuppression::XenEvent(cell), Some(behind)) => cell.store(behind.next().to_le(), Ordering::Relaxed),
            (EventSuppression::EventIdx(_) | EventSuppression::XenEvent(_), None) => {}
            (EventSuppression::Flag { cell, suppressed: quiet }, _) => cell.store(quiet.to_le(), Ordering::Relaxed),
        }
    }
}
