use super::*;
use crate::mapping::create_memfd;
use crate::region::Region;
use std::collections::BTreeSet;

const PAGE: u64 = 4096;

fn table(regions: &[(u64, u64)]) -> Arc<GuestMemory> {
    let regions = regions.iter().map(|&(at, len)| Arc::new(Region::shared("t", len, GuestAddress(at)).unwrap().0));
    Arc::new(GuestMemory::new(regions.collect()).unwrap())
}

fn log() -> Arc<DirtyLog> {
    let file = create_memfd("log", 8).unwrap();
    Arc::new(DirtyLog::from_file(&file, crate::SharedFileRules::default(), 0, 8).unwrap())
}

fn marked(log: &DirtyLog) -> BTreeSet<u64> {
    (0..64).filter(|page| log.test_and_clear(GuestAddress(page * PAGE))).collect()
}

/// A buffer of these segments with a status byte.
fn buffer(pool: &mut BufferPool, lease: LeaseId, segments: &[(u64, u32)], status: u64) -> Buffer {
    let buffer = pool.take(lease);
    for (at, len) in segments {
        pool.push(&buffer, GuestAddress(*at), *len, 64).unwrap();
    }
    pool.set_status(&buffer, GuestAddress(status)).unwrap();
    buffer
}

#[test]
fn written_pages_are_marked_when_the_buffer_is_released_and_not_before() {
    let mut pool = BufferPool::new();
    let lease = pool.acquire_lease(table(&[(0, 16 * PAGE), (32 * PAGE, 16 * PAGE)]), vec![]);
    let log = log();
    pool.set_log(lease, Some(&log));
    let segments = [(PAGE - 1, 2), (4 * PAGE, 4096), (33 * PAGE, 8192), (40 * PAGE, 1)];
    let read = buffer(&mut pool, lease, &segments, 15 * PAGE);
    pool.set_writable(&read);
    assert!(pool.copy_in(&read, 0, &[1; 20]));
    pool.write_status(&read, 0_u8);
    assert_eq!(marked(&log), BTreeSet::new(), "pages are copied before they are marked if it is marked too early");
    pool.release(read);
    assert_eq!(marked(&log), BTreeSet::from([0, 1, 4, 15, 33, 34, 40]));
    let write = buffer(&mut pool, lease, &segments, 47 * PAGE);
    pool.release(write);
    assert_eq!(marked(&log), BTreeSet::from([47]), "what the disk only read was not written");
    for len in [1, 2, 3] {
        let cut = buffer(&mut pool, lease, &segments[..len], 0);
        pool.set_writable(&cut);
        pool.truncate(&cut, ByteLen(1));
        pool.release(cut);
        assert_eq!(marked(&log), BTreeSet::from([0]));
    }
    assert!(pool.write_bytes(lease, GuestAddress(3 * PAGE - 1), &[1, 2]));
    assert_eq!(marked(&log), BTreeSet::from([2, 3]));
    pool.set_log(lease, None);
    let read = buffer(&mut pool, lease, &segments, 0);
    pool.set_writable(&read);
    pool.release(read);
    assert_eq!(marked(&log), BTreeSet::new());
}

#[test]
fn all_pages_of_a_status_are_marked() {
    let mut pool = BufferPool::new();
    let lease = pool.acquire_lease(table(&[(0, 16 * PAGE)]), vec![]);
    let first = pool.take(lease);
    pool.release(first);
    assert!(pool.read::<u8>(lease, GuestAddress(0)).is_some(), "a region is used");
    let log = log();
    pool.set_log(lease, Some(&log));
    let place = (GuestAddress(4 * PAGE - 100), 108);
    let write =
        pool.access(lease).take_transfer((GuestAddress(PAGE), 512), false, place).expect("it lies in the region");
    pool.release_with_status(write, [0_u32; 3]);
    assert_eq!(marked(&log), BTreeSet::from([3, 4]));
}

#[test]
fn bytes_across_regions_are_marked() {
    let mut pool = BufferPool::new();
    let lease = pool.acquire_lease(table(&[(0, PAGE), (PAGE, PAGE)]), vec![]);
    let log = log();
    pool.set_log(lease, Some(&log));
    assert!(pool.write_bytes(lease, GuestAddress(PAGE - 1), &[1, 2]));
    assert_eq!(marked(&log), BTreeSet::from([0, 1]));
}

#[test]
fn members_of_a_merged_buffer_are_marked_in_their_own_logs() {
    let mut pool = BufferPool::new();
    let leases = [0, 1].map(|_| pool.acquire_lease(table(&[(0, 16 * PAGE)]), vec![]));
    let logs = [log(), log()];
    for (lease, log) in leases.iter().zip(&logs) {
        pool.set_log(*lease, Some(log));
    }
    for split in [false, true] {
        let members = [(0, PAGE), (1, 5 * PAGE), (0, 2 * PAGE)].map(|(which, at)| {
            let member = buffer(&mut pool, leases[which], &[(at, 512)], 9 * PAGE);
            pool.set_writable(&member);
            member
        });
        let merged = pool.merge(members);
        let mut split_off = Vec::new();
        match split {
            false => pool.release(merged),
            true => pool.split(merged, |member| split_off.push(member)),
        }
        split_off.into_iter().for_each(|member| pool.release(member));
        assert_eq!(marked(&logs[0]), BTreeSet::from([1, 2, 9]));
        assert_eq!(marked(&logs[1]), BTreeSet::from([5, 9]));
    }
}

#[test]
fn requests_in_flight_before_logging_began_or_memory_changed_are_marked() {
    let mut pool = BufferPool::new();
    let old = pool.acquire_lease(table(&[(0, 16 * PAGE)]), vec![]);
    let other = pool.acquire_lease(table(&[(0, 16 * PAGE)]), vec![]);
    let take = |pool: &mut BufferPool, lease, at| {
        let read = buffer(pool, lease, &[(at, 1)], at);
        pool.set_writable(&read);
        read
    };
    let early = take(&mut pool, old, PAGE);
    let log = log();
    let new = pool.acquire_lease(table(&[(0, 16 * PAGE), (20 * PAGE, PAGE)]), vec![]);
    pool.inherit_log(old, new);
    assert!(!pool.retire_lease(old));
    let later = take(&mut pool, new, 20 * PAGE);
    let stranger = take(&mut pool, other, 7 * PAGE);
    pool.set_log(new, Some(&log));
    // Memory hot-plug while logging: the newest table is logged too.
    let newest = pool.acquire_lease(table(&[(0, 16 * PAGE), (30 * PAGE, PAGE)]), vec![]);
    pool.inherit_log(new, newest);
    assert!(!pool.retire_lease(new));
    let last = take(&mut pool, newest, 30 * PAGE);
    for buffer in [early, later, stranger, last] {
        pool.release(buffer);
    }
    assert_eq!(marked(&log), BTreeSet::from([1, 20, 30]));
    pool.retire_lease(newest);
    pool.set_log(newest, Some(&log));
    assert_eq!(Arc::strong_count(&log), 1, "a lease that is gone holds no log");
}
