//! Buffers of one segment, taken in one step.

use super::{Buffer, BufferPool, GuestAddress, LeaseId, MAX_SEGMENT_LEN, NO_SPILL, Segment};

impl BufferPool {
    /// Takes a buffer of one segment, with a status byte or without: what most requests have. `writable`: the device writes to the segment. `None`
    /// unless both lie in the region that was used last, and the segment is not empty: [`take`](Self::take) and [`push`](Self::push) take any.
    ///
    /// # Panics
    /// As [`take`](Self::take).
    #[inline(always)] // a device type calls it in one place
    pub fn take_transfer(
        &mut self,
        lease: LeaseId,
        (address, len): (GuestAddress, u32),
        writable: bool,
        status: Option<GuestAddress>,
    ) -> Option<Buffer> {
        let own = self.lease(lease.index);
        assert!(own.generation == lease.generation, "a buffer is taken in a lease that has not ended");
        let region = &own.cached_region;
        let (at, run) = (address.0.wrapping_sub(region.guest_start), u64::from(len));
        // A region that is not set has no bytes.
        if at >= region.len || run > region.len - at || run == 0 || run > MAX_SEGMENT_LEN {
            return None;
        }
        let status = match status {
            None => 0,
            Some(status) => {
                let at = status.0.wrapping_sub(region.guest_start);
                (at < region.len).then(|| region.host_start + at)?
            }
        };
        let segment = Segment { address: region.host_start + at, len, fixed: region.fixed(at, run) };
        own.buffers += 1;
        let index = self.free_index();
        let entry = &mut self.entries[index as usize];
        (entry.total, entry.status, entry.segments) = (run, status, 1);
        let place = &mut entry.inline[0];
        (place.address, place.len, place.fixed) = (segment.address, segment.len, segment.fixed);
        (entry.lease, entry.allocated, entry.writable, entry.spill) = (lease.index, true, writable, NO_SPILL);
        Some(self.handle(index))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use mqblk_core::ByteLen;

    use super::*;
    use crate::guest::{GuestMemory, Region};

    const START: u64 = 0x1_0000;
    const LEN: u64 = 0x4000;

    #[test]
    fn a_transfer_is_the_buffer_that_is_taken_in_steps_or_none() {
        let region = |at| Arc::new(Region::shared("transfer", LEN, GuestAddress(at)).unwrap().0);
        let memory = Arc::new(GuestMemory::new(vec![region(START), region(START + LEN)]).unwrap());
        let mut pool = BufferPool::new();
        let lease = pool.acquire_lease(memory, Vec::new());
        let at = |offset: u64| GuestAddress(START.wrapping_add(offset));
        assert!(pool.take_transfer(lease, (at(0), 512), true, None).is_none(), "no region was used yet");
        assert!(pool.read::<u64>(lease, at(0)).is_some());
        for (data, len, status) in [(0, 512, Some(600)), (LEN - 512, 512, Some(LEN - 1)), (8, 4096, None)] {
            let one = pool.take_transfer(lease, (at(data), len), true, status.map(at)).expect("it lies in the region");
            let other = pool.take(lease);
            pool.push(&other, at(data), len, 8).unwrap();
            let [one_segment, other_segment] =
                [&one, &other].map(|of| pool.segments(of)[0]).map(|it| (it.address(), it.len(), it.fixed()));
            assert_eq!(one_segment, other_segment);
            assert_eq!((pool.len(&one), pool.segments(&one).len()), (ByteLen(len.into()), 1));
            assert!(pool.will_be_logged(&one));
            pool.write_status(&one, 7);
            if let Some(status) = status {
                assert_eq!(pool.read::<u8>(lease, at(status)), Some(7));
            }
            pool.release(one);
            pool.release(other);
        }
        for (data, len, status) in [
            (0, 0, None),
            (LEN - 511, 512, None),
            (LEN, 512, None),
            (u64::MAX, 512, None),
            (0, 512, Some(LEN)),
            (0, 512, Some(u64::MAX)),
            (0, u32::MAX, None),
        ] {
            assert!(pool.take_transfer(lease, (at(data), len), false, status.map(at)).is_none(), "{data} {len}");
        }
        assert_eq!(pool.buffers_in_use(lease), 0);
    }
}
