//! Layout of the memory shared with the server.

use mqblk_core::ByteLen;
use mqblk_memory::GuestAddress;

use super::wire::{HEADER_BYTES, MAX_RANGES, RANGE_BYTES};
use crate::line::LINE;
use crate::setup::{AddressPlanner, DataArea, RingLayout};

/// Bytes from the header and status of one request to those of the next: [one cache line](crate::line).
pub(crate) const REQUEST_STRIDE: u32 = LINE;
/// Offset of the status byte behind the header.
pub(crate) const STATUS_OFFSET: u32 = HEADER_BYTES;

/// Guest addresses of a queue's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlkQueueLayout {
    pub(crate) ring: RingLayout,
    /// Headers and status bytes, [`REQUEST_STRIDE`] bytes for each request.
    pub(crate) requests: GuestAddress,
    /// Ranges of discard and write-zeroes requests, [`MAX_RANGES`] for each slot.
    pub(crate) ranges: GuestAddress,
    pub(crate) data: DataArea,
}

impl BlkQueueLayout {
    /// Returns the address of the header and of the status byte of the request in this slot.
    #[inline]
    pub(crate) fn request(&self, slot: u16) -> (GuestAddress, GuestAddress) {
        let header = self.requests.0 + u64::from(slot) * u64::from(REQUEST_STRIDE);
        (GuestAddress(header), GuestAddress(header + u64::from(STATUS_OFFSET)))
    }

    /// Allocates the memory of a queue of `size` entries.
    pub(crate) fn new(planner: &mut AddressPlanner, size: u16, data_len: ByteLen) -> BlkQueueLayout {
        let n = u64::from(size);
        let ring = planner.allocate_ring(size);
        let requests = planner.allocate(u64::from(REQUEST_STRIDE) * n);
        let ranges = planner.allocate(u64::from(RANGE_BYTES) * MAX_RANGES as u64 * n);
        let data = DataArea { start: planner.allocate(data_len.0), len: data_len };
        BlkQueueLayout { ring, requests, ranges, data }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_has_a_cache_line_of_its_own() {
        let layout = BlkQueueLayout::new(&mut AddressPlanner::new(), 128, ByteLen(4096));
        for slot in 0..128 {
            let (header, status) = layout.request(slot);
            let line = layout.requests.0 / 64 + u64::from(slot);
            assert_eq!([header.0, header.0 + 15, status.0].map(|byte| byte / 64), [line; 3]);
            assert!(status.0 >= header.0 + 16);
        }
        assert!(layout.request(127).1.0 < layout.ranges.0);
    }
}
