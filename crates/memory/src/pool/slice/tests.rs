use super::*;
use crate::region::Region;
use proptest::prelude::*;

fn pool() -> (BufferPool, LeaseId) {
    let mut pool = BufferPool::new();
    let region = Arc::new(Region::shared("t", 0x4000, GuestAddress(0)).unwrap().0);
    let memory = Arc::new(GuestMemory::new(vec![region]).unwrap());
    let lease = pool.acquire_lease(memory, vec![Some(FixedBuffers { first: 3 })]);
    (pool, lease)
}

proptest! {
    #[test]
    fn slices_cover_their_buffer(lens in prop::collection::vec(1_u32..5000, 1..9), slice_len in 1_u64..9000) {
        let (mut pool, lease) = pool();
        let buffer = pool.take(lease);
        for (at, len) in (0..).map(|at| at * 64).zip(&lens) {
            pool.push(&buffer, GuestAddress(at), *len, 64).unwrap();
        }
        let bytes = |segments: &[Segment]| -> Vec<(u64, Option<u16>)> {
            let of = |segment: &Segment| (0..u64::from(segment.len())).map(|at| segment.address() + at).collect::<Vec<_>>();
            segments.iter().flat_map(|one| of(one).into_iter().map(|at| (at, one.fixed()))).collect()
        };
        let whole = bytes(pool.segments(&buffer));
        let total = pool.len(&buffer).0;
        let mut found = Vec::new();
        for at in (0..total).step_by(slice_len as usize) {
            let slice = pool.slice(&buffer, at, ByteLen(slice_len.min(total - at)));
            prop_assert_eq!(pool.len(&slice).0, slice_len.min(total - at));
            prop_assert!(pool.segments(&slice).iter().all(|segment| !segment.is_empty()));
            found.extend(bytes(pool.segments(&slice)));
            pool.release(slice);
        }
        prop_assert_eq!(found, whole);
        prop_assert_eq!(pool.buffers_in_use(lease), 1);
        pool.release(buffer);
    }
}

#[test]
fn a_slice_holds_the_lease() {
    let (mut pool, lease) = pool();
    let buffer = pool.take(lease);
    pool.push(&buffer, GuestAddress(0), 4096, 1).unwrap();
    let slice = pool.slice(&buffer, 1024, ByteLen(512));
    assert!(!pool.retire_lease(lease));
    pool.release(buffer);
    assert!(!pool.is_lease_released(lease));
    pool.release(slice);
    assert!(pool.is_lease_released(lease));
}
