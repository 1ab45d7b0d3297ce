//! Leases: the memory table that contains a queue's buffers.

use std::sync::Arc;

use crate::dirty::DirtyLog;
use crate::guest::GuestMemory;
use crate::region::GuestAddress;

/// A worker's lease on a memory table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseId {
    pub(super) index: u32,
    /// Distinguishes a lease from a later one with the same index, and from those of other pools.
    pub(super) generation: u32,
}

impl LeaseId {
    /// No lease: no pool has one of this index.
    pub const NONE: LeaseId = LeaseId { index: u32::MAX, generation: u32::MAX };
}

/// No registered buffer.
pub(super) const NOT_FIXED: u32 = u32::MAX;

/// Registered buffers that cover a region: consecutive indices, each for [`CHUNK`](Self::CHUNK) bytes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FixedBuffers {
    /// Index of the buffer that contains the region's start.
    pub first: u16,
}

impl FixedBuffers {
    /// The kernel registers at most 1 GiB as one buffer (io_uring_register(2)).
    pub const CHUNK: u64 = 1 << 30;
}

/// A region that a recent translation hit.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RegionCache {
    pub(super) guest_start: u64,
    pub(super) len: u64,
    pub(super) host_start: u64,
    /// Index of the first registered buffer of the region; [`NOT_FIXED`] without one.
    pub(super) fixed_first: u32,
}

impl RegionCache {
    /// Returns the registered buffer that contains all of the `len` bytes (at least 1) from `at` in the region.
    #[inline]
    pub(super) fn fixed(&self, at: u64, len: u64) -> u32 {
        let chunk = at / FixedBuffers::CHUNK;
        match self.fixed_first {
            NOT_FIXED => NOT_FIXED,
            first if chunk == (at + len - 1) / FixedBuffers::CHUNK => first + chunk as u32,
            _ => NOT_FIXED,
        }
    }
}

#[derive(Debug)]
pub(super) struct Lease {
    pub(super) memory: Arc<GuestMemory>,
    /// The region that was found last.
    pub(super) cached_region: RegionCache,
    /// The one before: a driver may keep its headers in another region than its data.
    pub(super) other_region: RegionCache,
    /// Live buffers in it.
    pub(super) buffers: u32,
    /// Takes no new buffers; removed when `buffers` reaches 0.
    pub(super) retired: bool,
    /// True if an access found memory of the table lost: no address is translated any more.
    pub(super) lost: bool,
    pub(super) generation: u32,
    pub(super) fixed: Vec<Option<FixedBuffers>>,
    /// Dirty log in which written pages are marked.
    pub(super) log: Option<Arc<DirtyLog>>,
    /// Group of leases on the same guest's memory, which share a log: the generation of the first.
    pub(super) log_group: u32,
}

impl Lease {
    /// Returns the region that contains `address`, and the offset of `address` in it.
    #[inline(always)] // one comparison for most
    pub(super) fn locate(&mut self, address: u64) -> Option<(&RegionCache, u64)> {
        let at = address.wrapping_sub(self.cached_region.guest_start);
        // A region that is not set has no bytes.
        if at < self.cached_region.len { Some((&self.cached_region, at)) } else { self.locate_elsewhere(address) }
    }

    #[inline(always)]
    fn locate_elsewhere(&mut self, address: u64) -> Option<(&RegionCache, u64)> {
        let at = address.wrapping_sub(self.other_region.guest_start);
        if at < self.other_region.len { Some((&self.other_region, at)) } else { self.switch_region(address) }
    }

    /// Forgets the regions: the next translation is a lookup.
    pub(super) fn forget_regions(&mut self) {
        (self.cached_region, self.other_region) = Default::default();
    }

    /// Makes the region that contains `address` the cached one.
    #[cold]
    fn switch_region(&mut self, address: u64) -> Option<(&RegionCache, u64)> {
        if self.lost {
            return None;
        }
        let index = self.memory.region_index(GuestAddress(address))?;
        let region = &self.memory.regions()[index];
        let fixed = self.fixed.get(index).copied().flatten();
        self.other_region = self.cached_region;
        self.cached_region = RegionCache {
            guest_start: region.guest().0,
            len: region.len(),
            host_start: region.host().as_ptr() as u64,
            fixed_first: fixed.map_or(NOT_FIXED, |fixed| fixed.first.into()),
        };
        Some((&self.cached_region, address - self.cached_region.guest_start))
    }
}
