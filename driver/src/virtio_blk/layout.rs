//! Where everything lies in the memory that the driver shares with the server.

use mqblk_core::ByteLen;
use mqblk_memory::GuestAddress;
use mqblk_ring::split::SplitAddresses;
use mqblk_ring::split::driver::IndirectArea;

use super::wire::{HEADER_BYTES, MAX_RANGES, RANGE_BYTES};

/// The first guest address in use: not 0, so that a zeroed descriptor names nothing.
pub(crate) const BASE: GuestAddress = GuestAddress(1 << 20);
/// Parts that different sides write start on different pages.
const PAGE: u64 = 4096;
/// Descriptors of an indirect table: header, status, and up to 14 pieces of data.
pub(crate) const PER_TABLE: u16 = 16;

/// One queue's memory, in guest addresses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueLayout {
    pub(crate) ring: SplitAddresses,
    pub(crate) tables: GuestAddress,
    /// Headers lie side by side, four in a cache line, in the order in which slots are used: a batch of requests moves a
    /// quarter of the lines that one line for each request would.
    pub(crate) headers: GuestAddress,
    /// Status bytes, 64 in a cache line, for the same reason.
    pub(crate) statuses: GuestAddress,
    /// Ranges of discard and write-zeroes requests, [`MAX_RANGES`] for each slot.
    pub(crate) ranges: GuestAddress,
    pub(crate) data: GuestAddress,
    pub(crate) data_len: ByteLen,
    /// One past the queue's last byte.
    pub(crate) end: GuestAddress,
}

impl QueueLayout {
    /// Lays a queue of `size` entries out from `start`, which is page aligned.
    pub(crate) fn new(start: GuestAddress, size: u16, data_len: ByteLen) -> QueueLayout {
        let mut next = start.0;
        let mut part = |bytes: u64| {
            let at = GuestAddress(next);
            next = (next + bytes).next_multiple_of(PAGE);
            at
        };
        let n = u64::from(size);
        let ring = SplitAddresses { desc: part(16 * n), avail: part(6 + 2 * n), used: part(6 + 8 * n) };
        let tables = part(IndirectArea::bytes(size, PER_TABLE));
        let headers = part(u64::from(HEADER_BYTES) * n);
        let statuses = part(n);
        let ranges = part(u64::from(RANGE_BYTES) * MAX_RANGES as u64 * n);
        let data = part(data_len.0);
        QueueLayout { ring, tables, headers, statuses, ranges, data, data_len, end: GuestAddress(next) }
    }
}
