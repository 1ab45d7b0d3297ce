//! A guest's memory table: the snapshot of regions that a queue translates addresses with.

use std::ptr::NonNull;
use std::sync::Arc;

use mqblk_core::ByteOffset;

use crate::region::{GuestAddress, MemoryError, Region, UserAddress};
use crate::shared::{Pod, SharedArray, SharedU16, SharedU32, SharedWords};
use crate::sigbus::MemoryLoss;

/// An immutable memory table. A change makes a new snapshot that shares the unchanged regions.
#[derive(Debug, Default)]
pub struct GuestMemory {
    /// Sorted by guest address, not overlapping.
    regions: Vec<Arc<Region>>,
}

impl GuestMemory {
    /// Creates a table of these regions.
    ///
    /// # Errors
    /// When two of them overlap in guest addresses.
    pub fn new(mut regions: Vec<Arc<Region>>) -> Result<GuestMemory, MemoryError> {
        regions.sort_by_key(|region| region.guest);
        for pair in regions.windows(2) {
            if pair[0].guest.0 + pair[0].len > pair[1].guest.0 {
                return Err(MemoryError::Overlap { first: pair[0].guest.0, second: pair[1].guest.0 });
            }
        }
        Ok(GuestMemory { regions })
    }

    /// Returns this table with one more region.
    ///
    /// # Errors
    /// When it overlaps another.
    pub fn with_region(&self, region: Region) -> Result<GuestMemory, MemoryError> {
        let mut regions = self.regions.clone();
        regions.push(Arc::new(region));
        GuestMemory::new(regions)
    }

    /// Returns this table without the region that matches all three values.
    ///
    /// # Errors
    /// When none matches.
    pub fn without_region(&self, guest: GuestAddress, user: UserAddress, len: u64) -> Result<GuestMemory, MemoryError> {
        let found = self.regions.iter().position(|r| r.guest == guest && r.user == user && r.len == len);
        let Some(found) = found else {
            return Err(MemoryError::NoSuchRegion { guest: guest.0, user: user.0, len });
        };
        let mut regions = self.regions.clone();
        regions.remove(found);
        Ok(GuestMemory { regions })
    }

    /// Returns the regions, sorted by guest address.
    pub fn regions(&self) -> &[Arc<Region>] {
        &self.regions
    }

    /// Returns the sum of the regions' lengths in bytes.
    pub fn bytes(&self) -> u64 {
        self.regions.iter().fold(0, |sum: u64, region| sum.saturating_add(region.len))
    }

    /// Returns the guest address of the first region that was lost, and the reason.
    pub fn loss(&self) -> Option<(GuestAddress, MemoryLoss)> {
        self.regions.iter().find_map(|region| Some((region.guest, region.loss()?)))
    }

    /// Returns the index of the region that contains `address`.
    #[inline]
    pub(crate) fn region_index(&self, address: GuestAddress) -> Option<usize> {
        let after = self.regions.partition_point(|region| region.guest <= address);
        let index = after.checked_sub(1)?;
        (address.0 - self.regions[index].guest.0 < self.regions[index].len).then_some(index)
    }

    /// Translates an address in the VMM to a guest address.
    pub fn user_to_guest(&self, user: UserAddress) -> Option<GuestAddress> {
        let region = self.regions.iter().find(|r| user.0.checked_sub(r.user.0).is_some_and(|at| at < r.len))?;
        Some(GuestAddress(region.guest.0 + (user.0 - region.user.0)))
    }

    /// Returns the region that contains all of `len` bytes at `address`, and a pointer to them.
    fn contiguous(&self, address: GuestAddress, len: u64) -> Option<(NonNull<u8>, &Arc<Region>)> {
        let region = &self.regions[self.region_index(address)?];
        let at = address.0 - region.guest.0;
        if len > region.len - at {
            return None;
        }
        Some((region.mapping.address(region.delta + at as usize), region))
    }

    /// Returns `count` shared values at `address`. `None` unless they lie in one region, aligned, and `count` is a
    /// power of two.
    pub fn shared_array<T: Pod>(&self, address: GuestAddress, count: usize) -> Option<SharedArray<T>> {
        let bytes = count.checked_mul(size_of::<T>())?;
        let (base, region) = self.contiguous(address, bytes as u64)?;
        (count.is_power_of_two() && base.cast::<T>().is_aligned())
            .then(|| SharedArray::new(base, count, Arc::clone(region)))
    }

    /// Returns a shared 16-bit cell at `address`. `None` unless it lies in a region, aligned.
    pub fn shared_u16(&self, address: GuestAddress) -> Option<SharedU16> {
        let (base, region) = self.contiguous(address, 2)?;
        base.cast::<u16>().is_aligned().then(|| SharedU16::new(base, Arc::clone(region)))
    }

    /// Returns a shared 32-bit cell at `address`. `None` unless it lies in a region, aligned.
    pub fn shared_u32(&self, address: GuestAddress) -> Option<SharedU32> {
        let (base, region) = self.contiguous(address, 4)?;
        base.cast::<u32>().is_aligned().then(|| SharedU32::new(base, Arc::clone(region)))
    }

    /// Returns `count` shared 64-bit words at `address`. `None` unless they lie in one region, aligned.
    pub fn shared_words(&self, address: GuestAddress, count: usize) -> Option<SharedWords> {
        let (base, region) = self.contiguous(address, (count as u64).checked_mul(8)?)?;
        base.cast::<u64>().is_aligned().then(|| SharedWords::new(base, count, Arc::clone(region)))
    }

    /// Copies `len` bytes at `from` to `to` in another table, or in this one. `None` (and nothing copied) unless each
    /// of the two ranges lies in one region. Concurrent writes to either may or may not be in the copy.
    #[inline]
    pub fn copy_to(&self, from: GuestAddress, other: &GuestMemory, to: GuestAddress, len: u64) -> Option<()> {
        let (source, _) = self.contiguous(from, len)?;
        let (target, _) = other.contiguous(to, len)?;
        // SAFETY: both ranges are inside mappings that the two tables keep, as just checked. They may overlap. No
        // reference to either is ever made.
        unsafe { source.copy_to(target, len as usize) };
        Some(())
    }

    /// Copies `bytes` into guest memory. `None` (and nothing copied) unless all of it lies in one region.
    pub fn write(&self, address: GuestAddress, bytes: &[u8]) -> Option<()> {
        let region = &self.regions[self.region_index(address)?];
        let at = address.0 - region.guest.0;
        if bytes.len() as u64 > region.len - at {
            return None;
        }
        region.mapping.write(ByteOffset(region.delta as u64 + at), bytes).then_some(())
    }

    /// Copies guest memory into `bytes`. `None` (and nothing copied) unless all of it lies in one region.
    pub fn read(&self, address: GuestAddress, bytes: &mut [u8]) -> Option<()> {
        let region = &self.regions[self.region_index(address)?];
        let at = address.0 - region.guest.0;
        if bytes.len() as u64 > region.len - at {
            return None;
        }
        region.mapping.read(ByteOffset(region.delta as u64 + at), bytes).then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::create_memfd;

    fn region(guest: u64, len: u64) -> Region {
        Region::shared("t", len, GuestAddress(guest)).unwrap().0
    }

    #[test]
    fn overlaps_are_refused_and_neighbours_are_not() {
        let memory = GuestMemory::default().with_region(region(0x1000, 0x1000)).unwrap();
        assert!(memory.with_region(region(0x1fff, 0x10)).is_err());
        assert!(memory.with_region(region(0x0, 0x1001)).is_err());
        let memory = memory.with_region(region(0x2000, 0x10)).unwrap().with_region(region(0, 0x1000)).unwrap();
        assert_eq!(memory.regions().iter().map(|r| r.guest.0).collect::<Vec<_>>(), [0, 0x1000, 0x2000]);
    }

    #[test]
    fn impossible_ranges_are_refused() {
        let file = create_memfd("t", 4096).unwrap();
        for (guest, user, len) in [(u64::MAX, 0, 2), (0, u64::MAX - 1, 4096), (0, 0, 0)] {
            assert!(Region::from_file(&file, 0, len, GuestAddress(guest), UserAddress(user)).is_err());
        }
    }

    #[test]
    fn removal_matches_address_user_and_length() {
        let memory = GuestMemory::default().with_region(region(0x1000, 0x1000)).unwrap();
        let user = memory.regions()[0].user();
        assert!(memory.without_region(GuestAddress(0x1000), user, 0x999).is_err());
        assert!(memory.without_region(GuestAddress(0x1000), UserAddress(1), 0x1000).is_err());
        assert!(memory.without_region(GuestAddress(0x1000), user, 0x1000).unwrap().regions().is_empty());
    }

    #[test]
    fn copies_between_tables_stay_inside_both() {
        let one = GuestMemory::default().with_region(region(0x1000, 0x1000)).unwrap();
        let two = GuestMemory::default().with_region(region(0, 0x800)).unwrap();
        one.write(GuestAddress(0x1ffc), b"last").unwrap();
        one.copy_to(GuestAddress(0x1ffc), &two, GuestAddress(0x7fc), 4).unwrap();
        let mut found = [0; 4];
        two.read(GuestAddress(0x7fc), &mut found).unwrap();
        assert_eq!(&found, b"last");
        for (from, to, len) in [(0x1ffc, 0, 5), (0x1000, 0x7fd, 4), (0xfff, 0, 1), (0x1000, 0, u64::MAX)] {
            assert!(one.copy_to(GuestAddress(from), &two, GuestAddress(to), len).is_none(), "{from:#x} {to:#x} {len}");
        }
        two.write(GuestAddress(0), b"abcdef").unwrap();
        two.copy_to(GuestAddress(0), &two, GuestAddress(2), 4).unwrap();
        let mut found = [0; 6];
        two.read(GuestAddress(0), &mut found).unwrap();
        assert_eq!(&found, b"ababcd", "an overlap");
    }

    #[test]
    fn shared_words_are_bounded_and_shared() {
        use std::sync::atomic::Ordering::Relaxed;
        let (region, file) = Region::shared("t", 0x1000, GuestAddress(0)).unwrap();
        let memory = GuestMemory::default().with_region(region).unwrap();
        for (at, count) in [(4, 1), (0x1000, 1), (0xff8, 2), (0, usize::MAX)] {
            assert!(memory.shared_words(GuestAddress(at), count).is_none(), "{at} {count}");
        }
        let words = memory.shared_words(GuestAddress(8), 3).unwrap();
        assert_eq!((words.count(), words.get(3).is_none()), (3, true));
        words.get(2).unwrap().store(0x0102_0304, Relaxed);
        let again = Region::from_file(&file, 0, 0x1000, GuestAddress(0), UserAddress(0)).unwrap();
        let again = GuestMemory::default().with_region(again).unwrap().shared_words(GuestAddress(0), 512).unwrap();
        assert_eq!(again.get(3).unwrap().load(Relaxed), 0x0102_0304);
    }

    #[test]
    fn shared_cells_need_alignment_and_space() {
        let memory = GuestMemory::default().with_region(region(0x1000, 0x1000)).unwrap();
        assert!(memory.shared_u16(GuestAddress(0x1001)).is_none());
        assert!(memory.shared_u16(GuestAddress(0x1ffe)).is_some());
        assert!(memory.shared_u16(GuestAddress(0x2000)).is_none());
        assert!(memory.shared_array::<u64>(GuestAddress(0x1000), 512).is_some());
        assert!(memory.shared_array::<u64>(GuestAddress(0x1000), 1024).is_none());
        assert!(memory.shared_array::<u64>(GuestAddress(0x1000), 3).is_none());
        assert!(memory.shared_array::<u64>(GuestAddress(0x1004), 1).is_none());
    }
}
