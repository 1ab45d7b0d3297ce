//! Layout of the memory shared with the server.

use mqblk_core::ByteLen;
use mqblk_memory::GuestAddress;

use super::wire::{HEADER_BYTES, MAX_RANGES, RANGE_BYTES};
use crate::setup::{AddressPlanner, DataArea, RingLayout};

/// Guest addresses of a queue's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlkQueueLayout {
    pub(crate) ring: RingLayout,
    /// Headers, four in a cache line, in the order in which slots are used. A batch of requests moves a quarter of the cache
    /// lines that a line for each header would need.
    pub(crate) headers: GuestAddress,
    /// Status bytes, 64 in a cache line for the same reason.
    pub(crate) statuses: GuestAddress,
    /// Ranges of discard and write-zeroes requests, [`MAX_RANGES`] for each slot.
    pub(crate) ranges: GuestAddress,
    pub(crate) data: DataArea,
}

impl BlkQueueLayout {
    /// Allocates the memory of a queue of `size` entries.
    pub(crate) fn new(planner: &mut AddressPlanner, size: u16, data_len: ByteLen) -> BlkQueueLayout {
        let n = u64::from(size);
        let ring = planner.allocate_ring(size);
        let headers = planner.allocate(u64::from(HEADER_BYTES) * n);
        let statuses = planner.allocate(n);
        let ranges = planner.allocate(u64::from(RANGE_BYTES) * MAX_RANGES as u64 * n);
        let data = DataArea { start: planner.allocate(data_len.0), len: data_len };
        BlkQueueLayout { ring, headers, statuses, ranges, data }
    }
}
