//! Dirty logging of a device's writes to a split virtqueue, for live migration. For packed ones: `packed::log`.

use std::sync::Arc;

use mqblk_memory::{DirtyLog, GuestAddress};

use crate::format::{RingFormat, SUPPRESSION_BYTES};

/// Bytes before the used elements: flags and index.
const USED_HEADER_BYTES: u64 = 4;
const FLAGS_AND_INDEX_BYTES: u64 = 4;
const ELEMENT_BYTES: u64 = 8;

/// The log in which a ring's writes are marked.
#[derive(Clone, Debug)]
pub struct RingLog {
    /// The log.
    pub log: Arc<DirtyLog>,
    /// The guest address at which the used ring is logged. Packed: the device's event suppression.
    pub used: GuestAddress,
}

impl RingLog {
    /// Marks the used elements from index `old` up to `new`, and the index.
    #[cold]
    #[inline(never)]
    pub(crate) fn mark_published(&self, old: u16, new: u16, size: u16) {
        let (start, count) = (u64::from(old & (size - 1)), u64::from(new.wrapping_sub(old)));
        let first = count.min(u64::from(size) - start);
        self.mark(USED_HEADER_BYTES + ELEMENT_BYTES * start, ELEMENT_BYTES * first);
        // The rest wraps to the ring's start.
        self.mark(USED_HEADER_BYTES, ELEMENT_BYTES * (count - first).min(u64::from(size)));
        self.mark(0, FLAGS_AND_INDEX_BYTES);
    }

    /// Marks the device's event suppression: its flags and its event index.
    #[cold]
    #[inline(never)]
    pub(crate) fn mark_suppression(&self, size: u16) {
        self.mark(0, 2);
        self.mark(USED_HEADER_BYTES + ELEMENT_BYTES * u64::from(size), 2);
    }

    fn mark(&self, at: u64, len: u64) {
        // Beyond 2^64 there is no page to mark.
        if let Some(address) = self.used.0.checked_add(at) {
            self.log.mark(GuestAddress(address), len);
        }
    }

    /// Returns the last byte that is logged from `used` on, for a ring of `size` entries. The descriptors of a packed
    /// ring are logged at their own address.
    pub fn last_logged(used: GuestAddress, size: u16, format: RingFormat) -> GuestAddress {
        let bytes = match format {
            RingFormat::Split => USED_HEADER_BYTES + ELEMENT_BYTES * u64::from(size) + 2,
            RingFormat::Packed => SUPPRESSION_BYTES,
        };
        GuestAddress(used.0.saturating_add(bytes - 1))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use mqblk_memory::create_memfd;

    use super::*;

    /// Returns the marked pages of a ring at `used`.
    fn marked(used: u64, mark: impl FnOnce(&RingLog)) -> BTreeSet<u64> {
        let file = create_memfd("log", 64).unwrap();
        let log = Arc::new(DirtyLog::from_file(&file, mqblk_memory::SharedFileRules::default(), 0, 64).unwrap());
        mark(&RingLog { log: Arc::clone(&log), used: GuestAddress(used) });
        (0..512).filter(|page| log.is_marked(GuestAddress(page * 4096))).collect()
    }

    #[test]
    fn used_elements_and_suppression_are_marked() {
        let used = 4096 * 100;
        for (old, new, want) in [
            (0, 1, &[100][..]),
            // Element 511 spans the first page's end.
            (511, 512, &[100, 101]),
            (512, 600, &[100, 101]),
            (1023, 1025, &[100, 101, 102]),
            (65535, 2, &[100, 101, 102]),
            (7, 7, &[100]),
            (7, 1031, &[100, 101, 102]),
        ] {
            assert_eq!(
                marked(used, |log| log.mark_published(old, new, 1024)),
                want.iter().copied().collect(),
                "{old} {new}"
            );
        }
        assert_eq!(marked(used, |log| log.mark_suppression(1024)), BTreeSet::from([100, 102]));
        assert_eq!(marked(u64::MAX - 3, |log| log.mark_published(0, 8, 8)), BTreeSet::new());
        let last = |format| RingLog::last_logged(GuestAddress(used), 1024, format);
        assert_eq!(last(RingFormat::Split), GuestAddress(used + 6 + 8192 - 1));
        assert_eq!(last(RingFormat::Packed), GuestAddress(used + 3));
    }
}
