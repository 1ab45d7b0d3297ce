use super::*;
use crate::region::Region;
use proptest::prelude::*;

/// Two guests, each with two regions.
fn pool() -> (BufferPool, Vec<Arc<GuestMemory>>, Vec<LeaseId>) {
    let mut pool = BufferPool::new();
    let table = || {
        let region = |at| Arc::new(Region::shared("t", 0x4000, GuestAddress(at)).unwrap().0);
        Arc::new(GuestMemory::new(vec![region(0), region(0x4000)]).unwrap())
    };
    let memories = vec![table(), table()];
    let leases = memories.iter().map(|memory| pool.acquire_lease(Arc::clone(memory), vec![])).collect();
    (pool, memories, leases)
}

fn filled(pool: &mut BufferPool, lease: LeaseId, segments: &[(u64, u32)]) -> Buffer {
    let buffer = pool.take(lease);
    for (at, len) in segments {
        pool.push(&buffer, GuestAddress(*at), *len, 64).unwrap();
    }
    buffer
}

#[test]
fn members_keep_their_tables_mapped_until_the_merged_buffer_ends() {
    let (mut pool, memories, leases) = pool();
    let weak: Vec<_> = memories.iter().map(Arc::downgrade).collect();
    drop(memories);
    let members: Vec<Buffer> = leases.iter().map(|lease| filled(&mut pool, *lease, &[(0, 512)])).collect();
    let merged = pool.merge(members);
    for lease in &leases {
        assert!(!pool.retire_lease(*lease));
    }
    assert!(weak.iter().all(|memory| memory.upgrade().is_some()));
    let mut given = vec![];
    pool.split(merged, |member| given.push(member));
    assert!(weak.iter().all(|memory| memory.upgrade().is_some()), "the members live");
    pool.release(given.remove(0));
    assert!(weak[0].upgrade().is_none() && weak[1].upgrade().is_some());
    pool.release(given.remove(0));
    assert!(weak[1].upgrade().is_none());
}

#[test]
fn releasing_a_merged_buffer_releases_its_members() {
    let (mut pool, memories, leases) = pool();
    let members = [
        filled(&mut pool, leases[0], &[(0, 512)]),
        filled(&mut pool, leases[1], &[(0, 8), (16, 8), (32, 8)]),
        filled(&mut pool, leases[0], &[(4096, 512)]),
    ];
    let merged = pool.merge(members);
    assert_eq!((pool.buffers_in_use(leases[0]), pool.buffers_in_use(leases[1])), (2, 1));
    pool.retire_lease(leases[1]);
    pool.release(merged);
    assert_eq!(pool.buffers_in_use(leases[0]), 0);
    assert!(pool.is_lease_released(leases[1]));
    assert_eq!(Arc::strong_count(&memories[1]), 1);
    // Every entry and every list is free again.
    assert_eq!(pool.free_entries(), pool.entries.len());
    assert_eq!(pool.free_spills.len(), pool.spills.len());
    assert!(pool.entries.iter().all(|entry| entry.next == 0 && entry.lease == FREE));
}

#[test]
fn adjacent_segments_merge_and_are_fixed_only_within_one_registered_buffer() {
    let mut pool = BufferPool::new();
    let region = Arc::new(Region::shared("t", 2 * FixedBuffers::CHUNK, GuestAddress(0)).unwrap().0);
    let memory = Arc::new(GuestMemory::new(vec![region]).unwrap());
    let lease = pool.acquire_lease(memory, vec![Some(FixedBuffers { first: 3 })]);
    let chunk = FixedBuffers::CHUNK;
    let at = |pool: &mut BufferPool, at, len| filled(pool, lease, &[(at, len)]);
    let members = [
        at(&mut pool, 0, 4096),
        at(&mut pool, 4096, 4096),
        // A gap, then two adjacent ones at a registered buffer's end.
        at(&mut pool, chunk - 4096, 4096),
        at(&mut pool, chunk, 4096),
        at(&mut pool, 16384, 512),
    ];
    let merged = pool.merge(members);
    let found: Vec<_> = pool.segments(&merged).iter().map(|segment| (segment.len(), segment.fixed())).collect();
    assert_eq!(found, [(8192, Some(3)), (8192, None), (512, Some(3))]);
    assert_eq!(pool.len(&merged), ByteLen(4 * 4096 + 512));
    let mut lens = vec![];
    let mut back = vec![];
    pool.split(merged, |member| back.push(member));
    for member in back {
        lens.push((pool.len(&member).0, pool.segments(&member)[0].fixed()));
        pool.release(member);
    }
    assert_eq!(lens, [(4096, Some(3)), (4096, Some(3)), (4096, Some(3)), (4096, Some(4)), (512, Some(3))]);
}

#[test]
#[should_panic(expected = "a member is a live buffer that is not joined")]
fn a_merged_buffer_cannot_be_a_member() {
    let (mut pool, _memories, leases) = pool();
    let member = filled(&mut pool, leases[0], &[(0, 512)]);
    let merged = pool.merge([member]);
    let other = filled(&mut pool, leases[0], &[(512, 512)]);
    let _ = pool.merge([other, merged]);
}

#[test]
#[should_panic(expected = "only a joined buffer has members")]
fn a_plain_buffer_is_not_split() {
    let (mut pool, _memories, leases) = pool();
    let plain = filled(&mut pool, leases[0], &[(0, 512)]);
    pool.split(plain, |_| {});
}

#[test]
fn a_status_is_never_written_through_a_merged_buffer() {
    let (mut pool, memories, leases) = pool();
    let member = filled(&mut pool, leases[0], &[(0, 512)]);
    pool.set_status(&member, GuestAddress(0x800)).unwrap();
    let merged = pool.merge([member]);
    pool.write_status(&merged, 7_u8);
    let mut found = [9];
    memories[0].read(GuestAddress(0x800), &mut found).unwrap();
    assert_eq!(found, [0]);
    pool.release(merged);
}

proptest! {
    /// A merged buffer is the concatenation of its members for all segment lists, and splitting returns them unchanged.
    /// The pool does not grow with repetition.
    #[test]
    fn a_merged_buffer_is_the_concatenation_of_its_members(
        members in proptest::collection::vec(
            (0_usize..2, proptest::collection::vec((0_u64..0x3c, 1_u32..5), 1..6)), 1..10),
        release in any::<bool>(),
    ) {
        let (mut pool, memories, leases) = pool();
        pool.reserve(11);
        let mut grown = None;
        for round in 0..3_u8 {
            let mut model = vec![];
            let mut made = vec![];
            let mut segments = vec![];
            for (guest, list) in &members {
                // Multiples of 256, so that some are adjacent.
                let list: Vec<_> = list.iter().map(|(at, len)| (at * 0x100, len * 0x100)).collect();
                let buffer = filled(&mut pool, leases[*guest], &list);
                segments.push((pool.segments(&buffer).len(), pool.len(&buffer)));
                made.push(buffer);
                for (at, len) in list {
                    let bytes: Vec<u8> = (0..len).map(|byte| (at as u32 + byte) as u8 ^ (at >> 8) as u8 ^ round).collect();
                    memories[*guest].write(GuestAddress(at), &bytes).unwrap();
                }
            }
            for (guest, list) in &members {
                for (at, len) in list {
                    let mut bytes = vec![0; *len as usize * 0x100];
                    memories[*guest].read(GuestAddress(at * 0x100), &mut bytes).unwrap();
                    model.extend(bytes);
                }
            }
            let merged = pool.merge(made);
            prop_assert_eq!(pool.len(&merged).0, model.len() as u64);
            prop_assert!(pool.segments(&merged).len() <= segments.iter().map(|(count, _)| count).sum());
            let mut found = vec![0; model.len()];
            prop_assert!(pool.copy_out(&merged, 0, &mut found));
            prop_assert_eq!(found, model);
            if release {
                pool.release(merged);
            } else {
                let mut back = vec![];
                pool.split(merged, |member| back.push(member));
                prop_assert_eq!(back.len(), members.len());
                for (member, (count, len)) in back.into_iter().zip(segments) {
                    prop_assert_eq!((pool.segments(&member).len(), pool.len(&member)), (count, len));
                    pool.release(member);
                }
            }
            prop_assert_eq!(pool.buffers_in_use(leases[0]) + pool.buffers_in_use(leases[1]), 0);
            prop_assert_eq!(pool.free_entries(), pool.entries.len());
            let size = (pool.entries.len(), pool.spills.len());
            prop_assert_eq!(*grown.get_or_insert(size), size);
        }
    }
}
