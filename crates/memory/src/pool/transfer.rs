//! Buffers of one segment, taken in one step.

use std::num::NonZeroU32;
use std::ptr::NonNull;

use super::guest_access::read_once;
use super::{Buffer, BufferEntry, BufferPool, GuestAddress, Lease, LeaseId, MAX_SEGMENT_LEN, NO_SPILL};
use crate::shared::{Pod, prefetch, prefetch_for_write};
use crate::sigbus;

/// A lease that was looked up once, for the usual requests of a batch: those of one segment in one region of guest
/// memory. The pool's own methods take or refuse all others.
#[derive(Debug)]
pub struct LeaseAccess<'p> {
    // References: a request reads the pool's fields where it needs them; they are not kept for a whole batch.
    lease: &'p mut Lease,
    entries: &'p mut Vec<BufferEntry>,
    first_free: &'p mut u32,
    /// The pool's tag.
    tag: &'p NonZeroU32,
    /// The lease's index.
    index: u32,
}

impl BufferPool {
    /// Looks a lease up.
    ///
    /// # Panics
    /// When the lease has ended: a queue keeps its lease while it pulls.
    #[inline(always)] // a device type has a few places that call it
    pub fn access(&mut self, id: LeaseId) -> LeaseAccess<'_> {
        let BufferPool { leases, entries, first_free, tag, .. } = self;
        let lease = leases[id.index as usize].as_mut().expect("a queue holds its lease");
        assert!(lease.generation == id.generation, "a buffer is taken in a lease that has not ended");
        LeaseAccess { lease, entries, first_free, tag, index: id.index }
    }
}

impl LeaseAccess<'_> {
    /// Returns true if memory of any lease may be lost: check with [`BufferPool::is_lease_lost`].
    #[inline]
    pub fn may_be_lost(&self) -> bool {
        sigbus::losses() != 0
    }

    /// Reads a value from guest memory, once. `None` unless it lies in one region.
    #[inline(always)] // else the value would travel through memory
    pub fn read<T: Pod>(&mut self, address: GuestAddress) -> Option<T> {
        let (region, at) = self.lease.locate(address.0)?;
        if size_of::<T>() as u64 > region.len - at {
            return None;
        }
        // SAFETY: mapped for its whole size by the lease.
        Some(unsafe { read_once(region.host_start + at) })
    }

    /// Prefetches the line at `address` into this core's cache, if it is mapped.
    #[inline]
    pub fn prefetch(&mut self, address: GuestAddress) {
        let Some((region, at)) = self.lease.locate(address.0) else { return };
        let place = std::ptr::with_exposed_provenance_mut::<u8>((region.host_start + at) as usize);
        if let Some(place) = NonNull::new(place) {
            prefetch(place);
        }
    }

    /// Takes a buffer of one segment with a status, the form of most requests. `writable`: the device writes to the
    /// segment. `None` unless each lies in one region, neither is empty, and the pool has a free buffer:
    /// [`BufferPool::take`] and [`BufferPool::push`] take any.
    #[inline(always)] // a device type calls it in one place
    pub fn take_transfer(
        &mut self,
        data: (GuestAddress, u32),
        writable: bool,
        (status, status_len): (GuestAddress, u8),
    ) -> Option<Buffer> {
        let segment = self.translate(data)?;
        let (region, at) = self.lease.locate(status.0)?;
        if u64::from(status_len) > region.len - at || status_len == 0 {
            return None;
        }
        let status = region.host_start + at;
        // The driver has read the last status here, and a write waits until its core has released the line.
        prefetch_for_write(status);
        self.take_entry(segment, data.1, writable, (status, status_len))
    }

    /// As [`take_transfer`](Self::take_transfer), without a status.
    #[inline(always)] // as above
    pub fn take_segment(&mut self, data: (GuestAddress, u32), writable: bool) -> Option<Buffer> {
        let segment = self.translate(data)?;
        self.take_entry(segment, data.1, writable, (0, 0))
    }

    /// Returns the host address of a segment, and its registered buffer. `None` if it is empty, or does not lie in one
    /// region.
    #[inline(always)] // else they would travel through memory
    fn translate(&mut self, (address, len): (GuestAddress, u32)) -> Option<(u64, u32)> {
        let run = u64::from(len);
        let (region, at) = self.lease.locate(address.0)?;
        if run > region.len - at || run == 0 || run > MAX_SEGMENT_LEN {
            return None;
        }
        Some((region.host_start + at, region.fixed(at, run)))
    }

    #[inline(always)] // as above
    fn take_entry(
        &mut self,
        (start, fixed): (u64, u32),
        len: u32,
        writable: bool,
        (status, status_len): (u64, u8),
    ) -> Option<Buffer> {
        let index = *self.first_free;
        // Without a free entry the index is past the end.
        let entry = self.entries.get_mut(index as usize)?;
        *self.first_free = entry.total as u32;
        self.lease.buffers += 1;
        (entry.total, entry.status, entry.segments, entry.status_len) = (len.into(), status, 1, status_len);
        let place = &mut entry.inline[0];
        (place.address, place.len, place.fixed) = (start, len, fixed);
        (entry.lease, entry.writable, entry.spill) = (self.index, writable, NO_SPILL);
        Some(Buffer::new(*self.tag, index))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use mqblk_core::ByteLen;

    use super::*;
    use crate::guest::GuestMemory;
    use crate::region::Region;

    const START: u64 = 0x1_0000;
    const LEN: u64 = 0x4000;

    #[test]
    fn a_transfer_is_the_buffer_that_is_taken_in_steps_or_none() {
        let region = |at| Arc::new(Region::shared("transfer", LEN, GuestAddress(at)).unwrap().0);
        let memory =
            Arc::new(GuestMemory::new(vec![region(START), region(START + LEN), region(START + 3 * LEN)]).unwrap());
        let mut pool = BufferPool::new();
        let lease = pool.acquire_lease(memory, Vec::new());
        let first = pool.take(lease);
        pool.release(first);
        let at = |offset: u64| GuestAddress(START.wrapping_add(offset));
        for (data, len, status, status_len) in [
            (0, 512, 600, 1),
            (LEN - 512, 512, LEN - 1, 1),
            (8, 4096, LEN - 14, 14),
            (LEN, 512, 600, 1),
            (0, 512, LEN, 1),
            (3 * LEN, 512, LEN + 8, 14),
            (2 * LEN - 512, 512, 4 * LEN - 1, 1),
        ] {
            let place = (at(status), status_len);
            let one = pool.access(lease).take_transfer((at(data), len), true, place).expect("it lies in the region");
            let other = pool.take(lease);
            pool.push(&other, at(data), len, 8).unwrap();
            let plain = pool.access(lease).take_segment((at(data), len), true).expect("it lies in the region");
            let [one_segment, plain_segment, other_segment] =
                [&one, &plain, &other].map(|of| pool.segments(of)[0]).map(|it| (it.address(), it.len(), it.fixed()));
            assert_eq!((one_segment, plain_segment), (other_segment, other_segment));
            assert_eq!((pool.len(&plain), pool.segments(&plain).len()), (ByteLen(len.into()), 1));
            assert_eq!(pool.status_len(&plain), 0);
            pool.release(plain);
            assert_eq!((pool.len(&one), pool.segments(&one).len()), (ByteLen(len.into()), 1));
            assert!(pool.will_be_logged(&one));
            assert_eq!(pool.status_len(&one), u32::from(status_len));
            pool.write_status(&one, 7_u8);
            assert_eq!(pool.read::<u8>(lease, at(status)), Some(7));
            let words = [1_u32, 2, 3];
            pool.write_status(&one, words);
            let read = pool.read::<[u32; 3]>(lease, at(status));
            assert_eq!(read.is_some_and(|read| read == words), status_len > 1, "it is written where it has place");
            pool.write_status_bytes(&one, &[9; 300]);
            assert!((0..status_len).all(|byte| pool.read::<u8>(lease, at(status + u64::from(byte))) == Some(9)));
            assert_ne!(pool.read::<u8>(lease, at(status + u64::from(status_len))), Some(9));
            pool.release_with_status(one, 8_u8);
            assert_eq!(pool.read::<u8>(lease, at(status)), Some(8));
            pool.release(other);
        }
        for (data, len) in
            [(0, 0), (LEN - 511, 512), (2 * LEN - 511, 512), (2 * LEN, 512), (u64::MAX, 512), (0, u32::MAX)]
        {
            assert!(pool.access(lease).take_segment((at(data), len), false).is_none(), "{data} {len}");
        }
        for (data, len, status, status_len) in [
            (0, 0, 600, 1),
            (LEN - 511, 512, 600, 1),
            (2 * LEN - 511, 512, 600, 1),
            (2 * LEN, 512, 600, 1),
            (u64::MAX, 512, 600, 1),
            (0, 512, 2 * LEN, 1),
            (0, 512, 4 * LEN, 1),
            (0, 512, u64::MAX, 1),
            (0, 512, LEN - 12, 13),
            (0, 512, 600, 0),
            (0, u32::MAX, 600, 1),
        ] {
            let place = (at(status), status_len);
            assert!(pool.access(lease).take_transfer((at(data), len), false, place).is_none(), "{data} {len} {status}");
        }
        assert_eq!(pool.buffers_in_use(lease), 0);
    }
}
