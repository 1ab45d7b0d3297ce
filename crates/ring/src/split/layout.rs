//! Layout of a split virtqueue: the addresses of its parts, and the parts resolved to shared memory once, at set-up.

use mqblk_memory::{GuestAddress, GuestMemory, SharedArray, SharedU16};

pub use crate::format::{
    DESC_INDIRECT, DESC_NEXT, DESC_WRITE, Descriptor, MAX_QUEUE_SIZE, RingAddresses, RingSetupError,
};
use crate::wakeup::{Direction, EventSuppression};

/// Bytes of one descriptor.
pub const DESC_BYTES: u64 = 16;

/// The driver suppresses calls (only without EVENT_IDX).
pub const AVAIL_NO_INTERRUPT: u16 = 1;
/// The device suppresses kicks (only without EVENT_IDX).
pub const USED_NO_NOTIFY: u16 = 1;

impl Descriptor {
    /// Decodes its 16 bytes, as two little-endian words.
    #[inline]
    pub const fn from_words(words: [u64; 2]) -> Descriptor {
        let (address, rest) = (u64::from_le(words[0]), u64::from_le(words[1]));
        Descriptor { address, len: rest as u32, flags: (rest >> 32) as u16, next: (rest >> 48) as u16 }
    }

    /// Encodes its 16 bytes, as two little-endian words.
    #[inline]
    pub const fn to_words(self) -> [u64; 2] {
        let rest = self.len as u64 | (self.flags as u64) << 32 | (self.next as u64) << 48;
        [self.address.to_le(), rest.to_le()]
    }
}

/// A ring's fields in shared memory. All are little-endian (virtio 1.x).
#[derive(Debug)]
pub struct SplitRing {
    /// The descriptor table.
    pub desc: SharedArray<[u64; 2]>,
    /// The driver's flags.
    pub avail_flags: SharedU16,
    /// Index of the next available entry, modulo 65536.
    pub avail_idx: SharedU16,
    /// Heads of available chains.
    pub avail_ring: SharedArray<u16>,
    /// With EVENT_IDX: the driver requests a call when the used index passes this.
    pub used_event: SharedU16,
    /// The device's flags.
    pub used_flags: SharedU16,
    /// Index of the next used element, modulo 65536.
    pub used_idx: SharedU16,
    /// Used elements: head, then bytes written.
    pub used_ring: SharedArray<[u32; 2]>,
    /// With EVENT_IDX: the device requests a kick when the available index passes this.
    pub avail_event: SharedU16,
}

impl SplitRing {
    /// Resolves all parts of a ring of `size` entries.
    ///
    /// # Errors
    /// [`RingSetupError`] with the invalid part.
    pub fn resolve(memory: &GuestMemory, at: &RingAddresses, size: u16) -> Result<SplitRing, RingSetupError> {
        if !size.is_power_of_two() || size > MAX_QUEUE_SIZE {
            return Err(RingSetupError::Size(size));
        }
        let n = u64::from(size);
        let bad =
            |part, address: GuestAddress, len, align| RingSetupError::Part { part, address: address.0, len, align };
        let no_desc = bad("descriptor table", at.desc, DESC_BYTES * n, 16);
        let no_avail = bad("available ring", at.avail, 6 + 2 * n, 2);
        let no_used = bad("used ring", at.used, 6 + 8 * n, 4);
        if !at.desc.0.is_multiple_of(16) {
            return Err(no_desc);
        }
        if !at.used.0.is_multiple_of(4) {
            return Err(no_used);
        }
        let cell = |base: GuestAddress, offset: u64| memory.shared_u16(GuestAddress(base.0.checked_add(offset)?));
        let after = |base: GuestAddress| Some(GuestAddress(base.0.checked_add(4)?));
        Ok(SplitRing {
            desc: memory.shared_array(at.desc, size.into()).ok_or(no_desc)?,
            avail_flags: cell(at.avail, 0).ok_or(no_avail)?,
            avail_idx: cell(at.avail, 2).ok_or(no_avail)?,
            avail_ring: after(at.avail).and_then(|a| memory.shared_array(a, size.into())).ok_or(no_avail)?,
            used_event: cell(at.avail, 4 + 2 * n).ok_or(no_avail)?,
            used_flags: cell(at.used, 0).ok_or(no_used)?,
            used_idx: cell(at.used, 2).ok_or(no_used)?,
            used_ring: after(at.used).and_then(|a| memory.shared_array(a, size.into())).ok_or(no_used)?,
            avail_event: cell(at.used, 4 + 8 * n).ok_or(no_used)?,
        })
    }

    /// Returns the number of entries.
    #[inline]
    pub fn size(&self) -> u16 {
        // A ring has at most 32768 entries.
        self.desc.count() as u16
    }

    /// Returns the direction from the driver to the device: available entries and kicks.
    #[inline]
    pub fn avail(&self, event_idx: bool) -> Direction<'_, SharedU16> {
        let suppression = match event_idx {
            true => EventSuppression::EventIdx(&self.avail_event),
            false => EventSuppression::Flag { cell: &self.used_flags, suppressed: USED_NO_NOTIFY },
        };
        Direction { index: &self.avail_idx, suppression }
    }

    /// Returns the direction from the device to the driver: used elements and calls.
    #[inline]
    pub fn used(&self, event_idx: bool) -> Direction<'_, SharedU16> {
        let suppression = match event_idx {
            true => EventSuppression::EventIdx(&self.used_event),
            false => EventSuppression::Flag { cell: &self.avail_flags, suppressed: AVAIL_NO_INTERRUPT },
        };
        Direction { index: &self.used_idx, suppression }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wakeup::RingIndex;
    use mqblk_memory::Region;
    use std::sync::Arc;

    #[test]
    fn descriptors_keep_their_fields() {
        let d = Descriptor { address: 0x1122_3344_5566_7788, len: 0x99aa_bbcc, flags: DESC_WRITE, next: 0xfffe };
        assert_eq!(Descriptor::from_words(d.to_words()), d);
    }

    #[test]
    fn need_event_is_modulo_65536() {
        for (event, new, old, want) in [
            (5, 6, 5, true),
            (5, 5, 5, false),
            (5, 5, 4, false),
            (6, 6, 5, false),
            (0xffff, 0, 0xffff, true),
            (0xfffe, 2, 0xfffe, true),
            (3, 2, 0xfffe, false),
        ] {
            assert_eq!(u16::need_event(event, new, old), want, "event {event} new {new} old {old}");
        }
    }

    #[test]
    fn parts_that_do_not_fit_are_named() {
        let region = Region::shared("t", 0x10000, GuestAddress(0)).unwrap().0;
        let memory = GuestMemory::new(vec![Arc::new(region)]).unwrap();
        let good = RingAddresses { desc: GuestAddress(0), avail: GuestAddress(0x1000), used: GuestAddress(0x2000) };
        assert_eq!(SplitRing::resolve(&memory, &good, 256).unwrap().size(), 256);
        for (change, part) in [
            (RingAddresses { desc: GuestAddress(8), ..good }, "descriptor table"),
            (RingAddresses { desc: GuestAddress(0xfff0), ..good }, "descriptor table"),
            (RingAddresses { avail: GuestAddress(0x1001), ..good }, "available ring"),
            (RingAddresses { avail: GuestAddress(0xfffe), ..good }, "available ring"),
            (RingAddresses { used: GuestAddress(0x2002), ..good }, "used ring"),
            (RingAddresses { used: GuestAddress(u64::MAX - 3), ..good }, "used ring"),
        ] {
            match SplitRing::resolve(&memory, &change, 256) {
                Err(RingSetupError::Part { part: found, .. }) => assert_eq!(found, part),
                other => panic!("{change:?}: {other:?}"),
            }
        }
        for size in [0, 3, 257, 0xffff] {
            assert_eq!(SplitRing::resolve(&memory, &good, size).unwrap_err(), RingSetupError::Size(size));
        }
    }
}
