use super::*;
use crate::region::Region;
use proptest::prelude::*;

fn table(regions: &[(u64, u64)]) -> Arc<GuestMemory> {
    let regions = regions.iter().map(|&(at, len)| Arc::new(Region::shared("t", len, GuestAddress(at)).unwrap().0));
    Arc::new(GuestMemory::new(regions.collect()).unwrap())
}

#[test]
fn a_buffer_keeps_a_retired_table_mapped() {
    let mut pool = BufferPool::new();
    let memory = table(&[(0x1000, 0x1000)]);
    let weak = Arc::downgrade(&memory);
    let lease = pool.acquire_lease(memory, vec![]);
    let buffer = pool.take(lease);
    pool.push(&buffer, GuestAddress(0x1800), 16, 8).unwrap();
    assert!(!pool.retire_lease(lease));
    assert!(weak.upgrade().is_some());
    assert!(pool.copy_in(&buffer, 0, &[5; 16]));
    pool.release(buffer);
    assert!(weak.upgrade().is_none());
}

#[test]
#[should_panic(expected = "a buffer is used with the pool that made it")]
fn a_buffer_of_another_pool_is_refused() {
    let (mut one, mut other) = (BufferPool::new(), BufferPool::new());
    let lease = one.acquire_lease(table(&[(0x1000, 0x1000)]), vec![]);
    let foreign_lease = other.acquire_lease(table(&[(0x1000, 0x1000)]), vec![]);
    // Both have the first entry of their pool.
    let (_own, foreign) = (one.take(lease), other.take(foreign_lease));
    one.segments(&foreign);
}

#[test]
#[should_panic(expected = "a buffer is taken in a lease that has not ended")]
fn a_lease_that_has_ended_gives_no_buffers_of_its_successor() {
    let mut pool = BufferPool::new();
    let memory = table(&[(0x1000, 0x1000)]);
    let ended = pool.acquire_lease(Arc::clone(&memory), vec![]);
    assert!(pool.retire_lease(ended));
    let successor = pool.acquire_lease(memory, vec![]);
    assert_eq!(ended.index, successor.index);
    let _ = pool.take(ended);
}

#[test]
#[should_panic(expected = "a buffer is taken in a lease that has not ended")]
fn a_lease_of_another_pool_gives_no_buffers() {
    let (mut one, mut other) = (BufferPool::new(), BufferPool::new());
    let memory = table(&[(0x1000, 0x1000)]);
    let (own, foreign) = (one.acquire_lease(Arc::clone(&memory), vec![]), other.acquire_lease(memory, vec![]));
    assert_eq!(own.index, foreign.index);
    let _ = one.take(foreign);
}

#[test]
fn segments_across_neighbouring_regions_and_holes() {
    let mut pool = BufferPool::new();
    let lease = pool.acquire_lease(table(&[(0x1000, 0x1000), (0x2000, 0x1000), (0x4000, 0x1000)]), vec![]);
    let buffer = pool.take(lease);
    pool.push(&buffer, GuestAddress(0x1ff0), 0x20, 8).unwrap();
    assert_eq!(pool.segments(&buffer).len(), 2);
    assert_eq!(pool.push(&buffer, GuestAddress(0x2ff0), 0x20, 8), Err(BufferFault::Unmapped), "a hole follows");
    assert_eq!(pool.push(&buffer, GuestAddress(u64::MAX), 2, 8), Err(BufferFault::Unmapped));
    pool.release(buffer);
    let buffer = pool.take(lease);
    assert_eq!(
        pool.push(&buffer, GuestAddress(0x1ff0), 0x20, 1),
        Err(BufferFault::TooManySegments),
        "one segment allowed"
    );
    pool.release(buffer);
    assert_eq!(pool.buffers_in_use(lease), 0);
}

#[test]
fn fixed_buffers_are_found_per_gibibyte() {
    let mut pool = BufferPool::new();
    let len = 2 * FixedBuffers::CHUNK + 4096;
    let lease = pool.acquire_lease(table(&[(0, len)]), vec![Some(FixedBuffers { first: 7 })]);
    let buffer = pool.take(lease);
    pool.push(&buffer, GuestAddress(0), 4096, 8).unwrap();
    pool.push(&buffer, GuestAddress(FixedBuffers::CHUNK), 4096, 8).unwrap();
    pool.push(&buffer, GuestAddress(2 * FixedBuffers::CHUNK), 4096, 8).unwrap();
    pool.push(&buffer, GuestAddress(FixedBuffers::CHUNK - 512), 4096, 8).unwrap();
    let found: Vec<_> = pool.segments(&buffer).iter().map(Segment::fixed).collect();
    assert_eq!(found, [Some(7), Some(8), Some(9), None]);
    pool.release(buffer);
}

#[test]
fn values_are_read_at_any_alignment() {
    let mut pool = BufferPool::new();
    let memory = table(&[(0, 64)]);
    memory.write(GuestAddress(3), &0x1122_3344_5566_7788_u64.to_ne_bytes()).unwrap();
    let lease = pool.acquire_lease(memory, vec![]);
    assert_eq!(pool.read::<u64>(lease, GuestAddress(3)), Some(0x1122_3344_5566_7788));
    assert_eq!(pool.read::<u64>(lease, GuestAddress(57)), None);
    assert_eq!(pool.read::<[u64; 2]>(lease, GuestAddress(48)), Some([0, 0]));
}

proptest! {
    /// A buffer behaves like the concatenation of its guest bytes for all segment lists.
    #[test]
    fn a_buffer_is_the_concatenation_of_its_segments(
        segments in proptest::collection::vec((0_u64..0x2f00, 1_u32..0x100), 1..12),
        at in 0_u64..600, len in 0_usize..600,
    ) {
        let mut pool = BufferPool::new();
        let memory = table(&[(0, 0x1000), (0x1000, 0x1000), (0x2000, 0x1000)]);
        let content: Vec<u8> = (0..0x3000_u32).map(|i| (i * 31 % 251) as u8).collect();
        for part in 0..3 {
            memory.write(GuestAddress(part * 0x1000), &content[part as usize * 0x1000..][..0x1000]).unwrap();
        }
        let lease = pool.acquire_lease(Arc::clone(&memory), vec![]);
        let buffer = pool.take(lease);
        let mut model = Vec::new();
        for (address, size) in segments {
            pool.push(&buffer, GuestAddress(address), size, 64).unwrap();
            model.extend_from_slice(&content[address as usize..address as usize + size as usize]);
        }
        prop_assert_eq!(pool.len(&buffer).0, model.len() as u64);
        let mut found = vec![0; len];
        let fits = at as usize + len <= model.len();
        prop_assert_eq!(pool.copy_out(&buffer, at, &mut found), fits);
        if fits {
            prop_assert_eq!(&found[..], &model[at as usize..at as usize + len]);
        }
        let host = Mapping::anonymous(model.len()).unwrap();
        prop_assert!(pool.store_to(&buffer, &host, ByteOffset(0)));
        let mut stored = vec![0; model.len()];
        prop_assert!(host.read(ByteOffset(0), &mut stored));
        prop_assert_eq!(stored, model);
        pool.release(buffer);
    }
}

#[test]
fn ranges_are_copied_between_segments_that_do_not_match() {
    let mut pool = BufferPool::new();
    let lease = pool.acquire_lease(table(&[(0x1000, 0x1000)]), vec![]);
    let from = pool.take(lease);
    let to = pool.take(lease);
    for (at, len) in [(0x1000, 3), (0x1010, 5), (0x1020, 4)] {
        pool.push(&from, GuestAddress(at), len, 8).unwrap();
    }
    for (at, len) in [(0x1100, 7), (0x1200, 1), (0x1300, 4)] {
        pool.push(&to, GuestAddress(at), len, 8).unwrap();
    }
    assert!(pool.copy_in(&from, 0, b"0123456789ab"));
    for (from_at, to_at, len) in [(0, 0, 12), (2, 5, 7), (11, 0, 1), (12, 12, 0)] {
        assert!(pool.copy_in(&to, 0, b"............"));
        assert!(pool.copy_range(&from, from_at, &to, to_at, ByteLen(len)));
        let mut found = [0; 12];
        assert!(pool.copy_out(&to, 0, &mut found));
        let mut want = *b"............";
        let (source, target) = (from_at as usize, to_at as usize);
        want[target..target + len as usize].copy_from_slice(&b"0123456789ab"[source..source + len as usize]);
        assert_eq!(found, want, "{from_at} {to_at} {len}");
    }
    for (from_at, to_at, len) in [(1, 0, 12), (0, 1, 12), (13, 0, 0), (u64::MAX, 0, 2), (0, u64::MAX, 2)] {
        assert!(!pool.copy_range(&from, from_at, &to, to_at, ByteLen(len)), "{from_at} {to_at} {len}");
    }
    pool.release(from);
    pool.release(to);
}

#[test]
fn a_truncated_buffer_has_its_first_bytes_only() {
    let mut pool = BufferPool::new();
    let lease = pool.acquire_lease(table(&[(0, 4096)]), vec![]);
    for segments in 1..=5_u64 {
        for len in 0..=segments * 100 + 1 {
            let buffer = pool.take(lease);
            for segment in 0..segments {
                pool.push(&buffer, GuestAddress(segment * 200), 100, 8).unwrap();
            }
            let whole: Vec<_> =
                pool.segments(&buffer).iter().map(|segment| (segment.address(), segment.len())).collect();
            pool.truncate(&buffer, ByteLen(len));
            let kept = len.min(segments * 100);
            assert_eq!(pool.len(&buffer), ByteLen(kept));
            let cut: Vec<_> = pool.segments(&buffer).iter().map(|segment| (segment.address(), segment.len())).collect();
            assert_eq!(cut.len() as u64, kept.div_ceil(100));
            for (at, (cut, whole)) in (0..).zip(cut.iter().zip(&whole)) {
                assert_eq!(*cut, (whole.0, (kept - at * 100).min(100) as u32));
            }
            pool.release(buffer);
        }
    }
}

#[test]
fn bytes_are_written_across_regions_but_not_into_holes() {
    let mut pool = BufferPool::new();
    let memory = table(&[(0x1000, 0x1000), (0x2000, 0x1000)]);
    let lease = pool.acquire_lease(Arc::clone(&memory), vec![]);
    for (at, whole) in
        [(0x1000, true), (0x1ffe, true), (0x2ffc, true), (0x2ffd, false), (0xffe, false), (u64::MAX, false)]
    {
        assert_eq!(pool.write_bytes(lease, GuestAddress(at), &[1, 2, 3, 4]), whole, "{at:#x}");
        let mut back = [0; 4];
        assert_eq!(pool.read_bytes(lease, GuestAddress(at), &mut back), whole);
        assert!(!whole || back == [1, 2, 3, 4]);
    }
    assert_eq!(pool.buffers_in_use(lease), 0);
}
