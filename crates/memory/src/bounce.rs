//! Aligned private memory for data that direct I/O cannot transfer from guest memory directly.

use std::io;
use std::sync::Arc;

use mqblk_core::ByteLen;

use crate::guest::GuestMemory;
use crate::pool::{Buffer, BufferPool, LeaseId};
use crate::region::{GuestAddress, Region};

/// A fixed number of bounce slots of one size, allocated at start. Page aligned.
#[derive(Debug)]
pub struct BouncePool {
    lease: LeaseId,
    slot_len: u32,
    free: Vec<u32>,
}

impl BouncePool {
    /// Creates `slots` slots of `slot_len` bytes (rounded up to a page). Pages are allocated on first use.
    ///
    /// # Errors
    /// When the system refuses the memory.
    pub fn new(pool: &mut BufferPool, slots: u32, slot_len: ByteLen) -> io::Result<BouncePool> {
        let slot_len = slot_len.0.next_multiple_of(rustix::param::page_size() as u64);
        let slot_len = u32::try_from(slot_len).map_err(|_| io::ErrorKind::InvalidInput)?;
        let region = Region::anonymous(slots as usize * slot_len as usize)?;
        let memory = GuestMemory::new(vec![Arc::new(region)]).map_err(io::Error::other)?;
        let lease = pool.acquire_lease(Arc::new(memory), vec![]);
        pool.reserve(slots as usize);
        Ok(BouncePool { lease, slot_len, free: (0..slots).rev().collect() })
    }

    /// Returns the length of the largest buffer that [`take`](Self::take) returns.
    pub fn slot_len(&self) -> ByteLen {
        ByteLen(u64::from(self.slot_len))
    }

    /// Takes a buffer of `len` bytes in one aligned segment, and the slot to release with it. `None` when all slots are
    /// taken or `len` is larger than a slot.
    pub fn take(&mut self, pool: &mut BufferPool, len: ByteLen) -> Option<(Buffer, u32)> {
        if len.0 > u64::from(self.slot_len) {
            return None;
        }
        let slot = self.free.pop()?;
        let buffer = pool.take(self.lease);
        let address = GuestAddress(u64::from(slot) * u64::from(self.slot_len));
        pool.push(&buffer, address, len.0 as u32, 1).expect("slots lie inside the region");
        Some((buffer, slot))
    }

    /// Releases a slot.
    pub fn release(&mut self, pool: &mut BufferPool, buffer: Buffer, slot: u32) {
        pool.release(buffer);
        self.free.push(slot);
    }

    /// Releases the memory. All slots must have been released.
    pub fn close(self, pool: &mut BufferPool) {
        pool.unreserve(self.free.len());
        pool.retire_lease(self.lease);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_aligned_and_bounded() {
        let mut pool = BufferPool::new();
        let page = rustix::param::page_size() as u64;
        let mut bounce = BouncePool::new(&mut pool, 2, ByteLen(page + 904)).unwrap();
        assert_eq!(bounce.slot_len(), ByteLen(2 * page));
        let (a, slot_a) = bounce.take(&mut pool, ByteLen(2 * page)).unwrap();
        let (b, slot_b) = bounce.take(&mut pool, ByteLen(512)).unwrap();
        assert!(bounce.take(&mut pool, ByteLen(512)).is_none());
        assert!(pool.is_aligned(&a, 4096) && !pool.is_aligned(&b, 4096) && pool.is_aligned(&b, 512));
        bounce.release(&mut pool, a, slot_a);
        assert!(bounce.take(&mut pool, ByteLen(2 * page + 1)).is_none());
        bounce.release(&mut pool, b, slot_b);
        bounce.close(&mut pool);
    }
}
