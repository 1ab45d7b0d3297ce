//! Dirty logging of a device's writes to a packed virtqueue, for live migration.

use mqblk_memory::GuestAddress;

use super::layout::{DESC_BYTES, PackedRing};
use super::position::Position;
use crate::format::SUPPRESSION_BYTES;
use crate::split::RingLog;

impl RingLog {
    /// Marks `count` descriptors from `from` on.
    #[cold]
    #[inline(never)]
    pub(super) fn mark_descriptors(&self, ring: &PackedRing, from: Position, count: u16) {
        let (start, size) = (u64::from(from.slot), u64::from(ring.size()));
        let first = u64::from(count).min(size - start);
        self.mark_at(ring.desc, DESC_BYTES * start, DESC_BYTES * first);
        // The rest wraps to the ring's start.
        self.mark_at(ring.desc, 0, DESC_BYTES * (u64::from(count) - first).min(size));
    }

    /// Marks the device's event suppression, at the frontend's log address and at its own.
    #[cold]
    #[inline(never)]
    pub(super) fn mark_device_area(&self, ring: &PackedRing) {
        self.mark_at(self.used, 0, SUPPRESSION_BYTES);
        self.mark_at(ring.device_area, 0, SUPPRESSION_BYTES);
    }

    fn mark_at(&self, start: GuestAddress, at: u64, len: u64) {
        // Beyond 2^64 there is no page to mark.
        if let Some(address) = start.0.checked_add(at) {
            self.log.mark(GuestAddress(address), len);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;

    use mqblk_memory::{DirtyLog, GuestMemory, Region, SharedFileRules, create_memfd};

    use super::*;
    use crate::format::RingAddresses;

    #[test]
    fn descriptors_and_suppression_are_marked() {
        let region = Region::shared("t", 0x10000, GuestAddress(0)).unwrap().0;
        let memory = GuestMemory::new(vec![Arc::new(region)]).unwrap();
        let at = RingAddresses { desc: GuestAddress(0x1000), avail: GuestAddress(0x8000), used: GuestAddress(0x9000) };
        let ring = PackedRing::resolve(&memory, &at, 512).unwrap();
        let marked = |mark: &dyn Fn(&RingLog)| -> BTreeSet<u64> {
            let file = create_memfd("log", 4096).unwrap();
            let log = Arc::new(DirtyLog::from_file(&file, SharedFileRules::default(), 0, 4096).unwrap());
            mark(&RingLog { log: Arc::clone(&log), used: GuestAddress(0xa000) });
            (0..16).filter(|page| log.is_marked(GuestAddress(page * 4096))).collect()
        };
        for (slot, count, want) in
            [(0, 1, &[1][..]), (255, 1, &[1]), (255, 2, &[1, 2]), (511, 2, &[1, 2]), (511, 1, &[2]), (8, 0, &[])]
        {
            let from = Position { slot, wrap: true };
            let found = marked(&|log| log.mark_descriptors(&ring, from, count));
            assert_eq!(found, want.iter().copied().collect(), "{slot} {count}");
        }
        assert_eq!(marked(&|log| log.mark_device_area(&ring)), BTreeSet::from([9, 10]));
    }
}
