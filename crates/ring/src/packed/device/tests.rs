//! The device's end against the driver's end, and against rings of any content.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use mqblk_memory::{BufferPool, GuestAddress, GuestMemory, LeaseId, Region};
use proptest::prelude::*;

use super::super::PackedDriver;
use super::*;
use crate::format::{ChainError, ChainHead, ChainSegment, RingAddresses};
use crate::packed::position::DESC_USED;
use crate::split::driver::{ChainLayout, IndirectArea};

const AT: RingAddresses =
    RingAddresses { desc: GuestAddress(0x1000), avail: GuestAddress(0x8000), used: GuestAddress(0x9000) };
const TABLES: GuestAddress = GuestAddress(0x1_0000);
const BATCH: usize = 4;

/// A ring's memory and a worker's means to read it.
struct Guest {
    memory: Arc<GuestMemory>,
    pool: BufferPool,
    lease: LeaseId,
    size: u16,
}

/// A chain's id and its segments.
type Chain = (u16, Vec<(u64, u32, bool)>);

impl Guest {
    fn new(size: u16) -> Guest {
        let region = Region::shared("ring", 1 << 20, GuestAddress(0)).unwrap().0;
        let memory = Arc::new(GuestMemory::new(vec![Arc::new(region)]).unwrap());
        let mut pool = BufferPool::new();
        let lease = pool.acquire_lease(Arc::clone(&memory), vec![]);
        Guest { memory, pool, lease, size }
    }

    fn driver(&self, event_idx: bool) -> PackedDriver {
        let tables = IndirectArea { start: TABLES, per_table: 8 };
        PackedDriver::new(&self.memory, &AT, self.size, event_idx, Some(tables)).unwrap()
    }

    fn device(&self, event_idx: bool) -> PackedDevice {
        let ring = PackedRing::resolve(&self.memory, &AT, self.size).unwrap();
        PackedDevice::new(ring, Base::FIRST, event_idx)
    }

    /// Writes a descriptor: address, length, buffer id, flags.
    fn put(&self, at: u64, (address, len, id, flags): (u64, u32, u16, u16)) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&address.to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        bytes[12..14].copy_from_slice(&id.to_le_bytes());
        bytes[14..].copy_from_slice(&flags.to_le_bytes());
        self.memory.write(GuestAddress(at), &bytes).unwrap();
    }

    fn slot(&self, slot: u16, descriptor: (u64, u32, u16, u16)) {
        self.put(AT.desc.0 + 16 * u64::from(slot), descriptor);
    }

    fn fetch(&mut self, device: &mut PackedDevice, max: usize) -> Result<(Vec<ChainHead>, bool), VirtqueueError> {
        let mut heads = [ChainHead::default(); BATCH];
        let (count, more) = device.fetch(&mut self.pool, self.lease, &mut heads, max)?;
        Ok((heads[..count].to_vec(), more))
    }

    fn walk(&mut self, device: &PackedDevice, head: &ChainHead) -> Result<Chain, ChainError> {
        let mut segments = vec![];
        device.walk(&mut self.pool, self.lease, head, |_, ChainSegment { address, len, writable }| {
            segments.push((address.0, len, writable));
            Ok(())
        })?;
        Ok((head.index, segments))
    }

    /// Takes all available chains.
    fn take_all(&mut self, device: &mut PackedDevice) -> Result<Vec<Chain>, ChainError> {
        let mut found = vec![];
        loop {
            let (heads, more) = self.fetch(device, BATCH)?;
            for head in &heads {
                found.push(self.walk(device, head)?);
            }
            if !more {
                return Ok(found);
            }
        }
    }

    /// Takes the only chain. Returns the error.
    fn refused(&mut self) -> ChainError {
        let mut device = self.device(false);
        self.take_all(&mut device).expect_err("a chain that must be refused")
    }
}

const AVAIL: u16 = 1 << 7;

#[derive(Clone, Debug)]
enum Step {
    Add { indirect: bool, readable: usize, writable: usize },
    Publish,
    Take { max: usize },
    Use { which: usize },
    UsePublish,
    Reap,
    ArmDevice,
    DisarmDevice,
    ArmDriver { count: u16 },
    DisarmDriver,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        5 => (any::<bool>(), 1_usize..4, 0_usize..4)
            .prop_map(|(indirect, readable, writable)| Step::Add { indirect, readable, writable }),
        3 => Just(Step::Publish),
        4 => (0_usize..5).prop_map(|max| Step::Take { max }),
        6 => (0_usize..64).prop_map(|which| Step::Use { which }),
        3 => Just(Step::UsePublish),
        3 => Just(Step::Reap),
        1 => Just(Step::ArmDevice),
        1 => Just(Step::DisarmDevice),
        1 => (1_u16..4).prop_map(|count| Step::ArmDriver { count }),
        1 => Just(Step::DisarmDriver),
    ];
    proptest::collection::vec(step, 1..300)
}

proptest! {
    /// Every request reaches the device once, as built and in order. Every completion reaches the driver once, in the
    /// device's order and not before its publish. An end that armed and found nothing is notified of the next entry.
    #[test]
    fn both_ends_agree(steps in steps(), log_size in 1_u32..6, event_idx: bool) {
        let mut guest = Guest::new(1 << log_size);
        let (mut driver, mut device) = (guest.driver(event_idx), guest.device(event_idx));
        let mut token = 0_u32;
        let mut committed = VecDeque::new();
        let mut published = VecDeque::new();
        let mut at_device: Vec<(u16, u32)> = vec![];
        let mut used = VecDeque::new();
        let mut visible = VecDeque::new();
        let (mut device_sleeps, mut driver_sleeps) = (false, None::<u16>);
        for step in steps {
            match step {
                Step::Add { indirect, readable, writable } => {
                    let layout = if indirect { ChainLayout::Indirect } else { ChainLayout::Direct };
                    let need = if indirect { 1 } else { readable + writable };
                    if need > usize::from(driver.free_descriptors()) {
                        continue;
                    }
                    let segments: Vec<(u64, u32, bool)> = (0..readable + writable)
                        .map(|at| (0x4000_0000 + u64::from(token) * 64 + at as u64, 1 + at as u32, at >= readable))
                        .collect();
                    let mut chain = driver.begin(layout);
                    for (address, len, writable) in &segments {
                        let at = GuestAddress(*address);
                        chain = if *writable { chain.writable(at, *len) } else { chain.readable(at, *len) }.unwrap();
                    }
                    chain.commit(token).unwrap();
                    committed.push_back((token, segments));
                    token += 1;
                }
                Step::Publish => {
                    let kick = driver.publish();
                    prop_assert!(kick || !device_sleeps || committed.is_empty(), "a kick is lost");
                    device_sleeps &= committed.is_empty();
                    published.append(&mut committed);
                }
                Step::Take { max } => {
                    let (heads, more) = guest.fetch(&mut device, max).unwrap();
                    let expected = published.len().min(max).min(BATCH);
                    prop_assert_eq!(heads.len(), expected);
                    for head in &heads {
                        let (token, segments) = published.pop_front().unwrap();
                        prop_assert_eq!(guest.walk(&device, head).unwrap(), (head.index, segments));
                        at_device.push((head.index, token));
                    }
                    prop_assert_eq!(more, !published.is_empty());
                }
                Step::Use { which } => {
                    if !at_device.is_empty() {
                        let (id, token) = at_device.swap_remove(which % at_device.len());
                        device.put_used(id, token * 3);
                        used.push_back(token);
                    }
                }
                Step::UsePublish => {
                    let wanted = device.publish();
                    prop_assert_eq!(wanted == PublishResult::Nothing, used.is_empty());
                    visible.append(&mut used);
                    if driver_sleeps.is_some_and(|count| visible.len() >= usize::from(count)) {
                        prop_assert_eq!(wanted, PublishResult::Wanted, "a call is lost");
                        driver_sleeps = None;
                    } else if wanted == PublishResult::Wanted {
                        // It may be early. The driver arms again.
                        driver_sleeps = None;
                    }
                }
                Step::Reap => {
                    prop_assert_eq!(usize::from(driver.poll_used().unwrap()), visible.len());
                    while let Some(found) = driver.take() {
                        prop_assert_eq!(Some(found.token), visible.pop_front());
                        prop_assert_eq!(found.written, found.token * 3);
                    }
                    prop_assert!(visible.is_empty());
                    driver_sleeps = None;
                }
                Step::ArmDevice => {
                    let waiting = device.arm() == ArmResult::WorkWaiting;
                    prop_assert_eq!(waiting, !published.is_empty());
                    device_sleeps = !waiting;
                }
                Step::DisarmDevice => {
                    device.disarm();
                    device_sleeps = false;
                }
                Step::ArmDriver { count } => {
                    let ready = driver.arm(count).unwrap();
                    prop_assert_eq!(usize::from(ready), visible.len());
                    let sleeps = ready < count && usize::from(count) <= usize::from(driver.in_flight());
                    driver_sleeps = sleeps.then_some(count);
                }
                Step::DisarmDriver => {
                    driver.disarm();
                    driver_sleeps = None;
                }
            }
        }
        prop_assert_eq!(device.state().in_flight.len(), at_device.len());
    }

    /// With any content of the ring and tables, chains are taken or refused: never the same id twice, never more
    /// descriptors than the ring has, and each one can be returned.
    #[test]
    fn any_content(
        descriptors in proptest::collection::vec((any::<u64>(), any::<u32>(), any::<u16>(), any::<u16>()), 32),
        small: bool, rounds in 1_usize..6,
    ) {
        let mut guest = Guest::new(16);
        let mut device = guest.device(true);
        for round in 0..rounds {
            for (at, (address, len, id, flags)) in descriptors.iter().cycle().skip(round).take(32).enumerate() {
                let (mut id, mut flags) = (*id, *flags);
                if small {
                    let wrap = if round % 2 == 0 { AVAIL } else { DESC_USED };
                    (id, flags) = (id % 17, flags & 7 | wrap);
                }
                // The other half is a table.
                let place = if at < 16 { AT.desc.0 } else { TABLES.0 };
                let address = if small && flags & DESC_INDIRECT != 0 { TABLES.0 } else { *address };
                let len = if small { len % 20 * 16 } else { *len };
                guest.put(place + 16 * (at as u64 % 16), (address, len, id, flags));
            }
            let mut ids = BTreeMap::new();
            loop {
                // A refused ring is not served any more.
                let Ok((heads, more)) = guest.fetch(&mut device, BATCH) else { return Ok(()) };
                for head in &heads {
                    prop_assert!(ids.insert(head.index, ()).is_none());
                    if let Ok((_, segments)) = guest.walk(&device, head) {
                        prop_assert!(segments.len() <= 1024);
                    }
                }
                if heads.is_empty() || !more {
                    break;
                }
            }
            prop_assert!(device.taken <= 16);
            for id in ids.into_keys() {
                device.put_used(id, 7);
            }
            prop_assert_eq!(device.taken, 0);
            let _ = device.publish();
        }
    }
}

#[test]
fn invalid_chains_are_refused() {
    let mut guest = Guest::new(4);
    let broken = ChainError::BrokenRing;
    // A chain that never ends, and one that meets descriptors in flight.
    for slot in 0..4 {
        guest.slot(slot, (0, 1, 0, AVAIL | DESC_NEXT));
    }
    assert_eq!(guest.refused(), broken(TOO_MANY));
    guest.slot(0, (0, 1, 0, AVAIL));
    assert_eq!(guest.refused(), broken(TOO_MANY));
    // A buffer id outside, also as the last one of a chain.
    guest.slot(0, (0, 1, 4, AVAIL));
    assert_eq!(guest.refused(), broken(BAD_ID));
    guest.slot(0, (0, 1, 0, AVAIL | DESC_NEXT));
    guest.slot(1, (0, 1, 9, AVAIL));
    assert_eq!(guest.refused(), broken(BAD_ID));
    // One that is in flight.
    guest.slot(0, (0, 1, 2, AVAIL));
    guest.slot(1, (0, 1, 2, AVAIL));
    assert_eq!(guest.refused(), broken(DUPLICATE_ID));
    // A table in a chain.
    guest.slot(0, (TABLES.0, 16, 2, AVAIL | DESC_NEXT | DESC_INDIRECT));
    assert_eq!(guest.refused(), broken(INDIRECT_IN_CHAIN));
    guest.slot(0, (0, 1, 2, AVAIL | DESC_NEXT));
    guest.slot(1, (TABLES.0, 16, 2, AVAIL | DESC_INDIRECT));
    assert_eq!(guest.refused(), broken(INDIRECT_IN_CHAIN));
    guest.slot(1, (0, 0, 0, 0));
    (2..4).for_each(|slot| guest.slot(slot, (0, 0, 0, 0)));
    // Segments in the wrong order.
    guest.slot(0, (0, 1, 2, AVAIL | DESC_NEXT | DESC_WRITE));
    guest.slot(1, (0, 1, 2, AVAIL));
    assert_eq!(guest.refused(), broken(crate::format::READABLE_AFTER_WRITABLE));
    guest.slot(1, (0, 0, 0, 0));
    // Tables.
    let text = |error: ChainError| match error {
        ChainError::BrokenRing(broken) => broken.0,
        ChainError::BadRequest => "bad request",
    };
    let long = 16 * u32::from(crate::format::MAX_INDIRECT_ENTRIES);
    for (address, len, why) in [
        (TABLES.0, 0, "an indirect table's length is not a multiple of 16 above 0"),
        (TABLES.0, 17, "an indirect table's length is not a multiple of 16 above 0"),
        (TABLES.0, 16 * 32769, "an indirect table is too long"),
        (TABLES.0, long + 16, "bad request"),
        (u64::MAX - 15, 32, "bad request"),
        (1 << 40, 32, "bad request"),
    ] {
        guest.slot(0, (address, len, 2, AVAIL | DESC_INDIRECT));
        assert_eq!(text(guest.refused()), why, "{address:#x} {len}");
    }
    guest.slot(0, (TABLES.0, 32, 2, AVAIL | DESC_INDIRECT));
    guest.put(TABLES.0 + 16, (TABLES.0, 16, 0, DESC_INDIRECT));
    assert_eq!(text(guest.refused()), "an indirect table names another one");
    // In a table the order counts, not NEXT.
    guest.put(TABLES.0, (0x100, 8, 0, 0));
    guest.put(TABLES.0 + 16, (0x200, 9, 0, DESC_WRITE));
    let mut device = guest.device(false);
    let chains = guest.take_all(&mut device).unwrap();
    assert_eq!(chains, [(2, vec![(0x100, 8, false), (0x200, 9, true)])]);
}

#[test]
fn a_chain_of_a_large_ring_is_no_longer_than_a_request_can_be() {
    let mut guest = Guest::new(2048);
    for slot in 0..2048 {
        guest.slot(slot, (0, 1, 0, AVAIL | DESC_NEXT));
    }
    // The ring is longer than its distance to the other parts here.
    let at = RingAddresses { avail: GuestAddress(0x4_0000), used: GuestAddress(0x5_0000), ..AT };
    let ring = PackedRing::resolve(&guest.memory, &at, 2048).unwrap();
    let mut device = PackedDevice::new(ring, Base::FIRST, false);
    assert_eq!(guest.fetch(&mut device, BATCH).unwrap_err(), CHAIN_TOO_LONG);
}

/// A guest that changes a chain after it was taken changes neither its length nor its identity.
#[test]
fn a_chain_is_as_long_as_it_was_when_it_was_taken() {
    let mut guest = Guest::new(8);
    guest.slot(0, (0x100, 8, 0, AVAIL | DESC_NEXT));
    guest.slot(1, (0x200, 8, 5, AVAIL));
    let mut device = guest.device(false);
    let (heads, _) = guest.fetch(&mut device, BATCH).unwrap();
    guest.slot(0, (0, 0, 0, 0));
    guest.slot(1, (0x300, 9, 6, AVAIL | DESC_NEXT | DESC_INDIRECT));
    assert_eq!(guest.walk(&device, &heads[0]).unwrap(), (5, vec![(0x100, 8, false), (0x300, 9, false)]));
    device.put_used(5, 1);
    let _ = device.publish();
    // Id, length, then AVAIL, USED and WRITE, in the first slot of the chain.
    assert_eq!(device.ring.load_state(0), (1, 5, AVAIL | DESC_USED | DESC_WRITE));
    assert_eq!(
        device.state().base,
        Base { avail: Position { slot: 2, wrap: true }, used: Position { slot: 2, wrap: true } }.to_bits()
    );
}

#[test]
fn a_ring_resumes_where_it_was() {
    let mut guest = Guest::new(4);
    let (mut driver, mut device) = (guest.driver(true), guest.device(true));
    assert!(!device.is_resumed());
    for round in 0..9 {
        let chain = driver.begin(ChainLayout::Direct).readable(GuestAddress(8), 8).unwrap();
        chain.writable(GuestAddress(16), 1).unwrap().commit(round).unwrap();
        let _ = driver.publish();
        let (id, segments) = guest.take_all(&mut device).unwrap().remove(0);
        assert_eq!(segments.len(), 2);
        device.put_used(id, 1);
        let _ = device.publish();
        assert_eq!((driver.poll_used(), driver.take().map(|used| used.token)), (Ok(1), Some(round)));
        // Another process goes on.
        let state = device.state();
        assert_eq!(state.in_flight, []);
        let ring = PackedRing::resolve(&guest.memory, &AT, 4).unwrap();
        device = PackedDevice::new(ring, Base::from_bits(state.base), true);
        assert_eq!(device.state(), state);
    }
}

/// As User-Mode Linux starts it.
#[test]
fn a_new_ring_may_start_at_0() {
    let mut guest = Guest::new(4);
    let ring = PackedRing::resolve(&guest.memory, &AT, 4).unwrap();
    let mut device = PackedDevice::new(ring, Base::from_bits(0), false);
    assert!(!device.is_resumed());
    guest.slot(0, (0x100, 8, 3, AVAIL));
    assert_eq!(guest.take_all(&mut device).unwrap(), [(3, vec![(0x100, 8, false)])]);
}

#[test]
fn a_base_without_a_used_position_is_both() {
    let both = |slot, wrap| Base { avail: Position { slot, wrap }, used: Position { slot, wrap } };
    assert_eq!(Base::from_bits(0x8000), Base::FIRST);
    assert_eq!(Base::from_bits(0x8000_8000), Base::FIRST);
    assert_eq!(Base::FIRST.to_bits(), 0x8000_8000);
    assert_eq!(Base::from_bits(0x0005), both(5, false));
    assert_eq!(Base::from_bits(0), both(0, false));
    let apart = Base { avail: Position { slot: 7, wrap: true }, used: Position { slot: 3, wrap: false } };
    assert_eq!((apart.to_bits(), Base::from_bits(apart.to_bits())), (0x0003_8007, apart));
}
