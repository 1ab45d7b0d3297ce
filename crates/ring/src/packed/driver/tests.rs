//! The driver's end against a model device that is written from the specification alone: it shares only the addresses
//! with the driver.

use std::sync::Arc;

use mqblk_memory::{GuestAddress, GuestMemory, Region};
use proptest::prelude::*;

use super::*;
use crate::split::driver::ChainRefused;

const DESC: u64 = 0x1000;
const DRIVER: u64 = 0x3000;
const DEVICE: u64 = 0x4000;
const TABLES: u64 = 0x8000;
const PER_TABLE: u16 = 8;

fn memory() -> Arc<GuestMemory> {
    let region = Region::shared("ring", 0x2_0000, GuestAddress(0)).unwrap().0;
    Arc::new(GuestMemory::new(vec![Arc::new(region)]).unwrap())
}

fn addresses() -> RingAddresses {
    RingAddresses { desc: GuestAddress(DESC), avail: GuestAddress(DRIVER), used: GuestAddress(DEVICE) }
}

fn driver(memory: &GuestMemory, size: u16, event_idx: bool) -> PackedDriver {
    let indirect = IndirectArea { start: GuestAddress(TABLES), per_table: PER_TABLE };
    PackedDriver::new(memory, &addresses(), size, event_idx, Some(indirect)).unwrap()
}

/// (address, length, device may write)
type TestSegment = (u64, u32, bool);

/// A model device. It reads and writes the ring byte by byte.
struct Model {
    memory: Arc<GuestMemory>,
    size: u16,
    next_avail: u16,
    avail_wrap: bool,
    next_used: u16,
    used_wrap: bool,
}

impl Model {
    fn new(memory: &Arc<GuestMemory>, size: u16) -> Model {
        let memory = Arc::clone(memory);
        Model { memory, size, next_avail: 0, avail_wrap: true, next_used: 0, used_wrap: true }
    }
    fn bytes<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.memory.read(GuestAddress(at), &mut bytes).unwrap();
        bytes
    }
    fn u16(&self, at: u64) -> u16 {
        u16::from_le_bytes(self.bytes(at))
    }
    fn put(&self, at: u64, bytes: &[u8]) {
        self.memory.write(GuestAddress(at), bytes).unwrap();
    }

    /// Returns a descriptor's segment, its id and its flags.
    fn descriptor(&self, at: u64) -> (TestSegment, u16, u16) {
        let (address, len) = (u64::from_le_bytes(self.bytes(at)), u32::from_le_bytes(self.bytes(at + 8)));
        let (id, flags) = (self.u16(at + 12), self.u16(at + 14));
        ((address, len, flags & 2 != 0), id, flags)
    }

    /// Takes every available request: its id, its number of descriptors in the ring, its segments.
    fn pull(&mut self) -> Vec<(u16, u16, Vec<TestSegment>)> {
        let mut found = vec![];
        loop {
            let (mut segments, mut count) = (vec![], 0);
            loop {
                let (segment, id, flags) = self.descriptor(DESC + 16 * u64::from(self.next_avail));
                let (avail, used) = (flags & 1 << 7 != 0, flags & 1 << 15 != 0);
                if avail != self.avail_wrap || used == self.avail_wrap {
                    assert!(segments.is_empty(), "a chain that ends in the middle");
                    return found;
                }
                count += 1;
                self.next_avail += 1;
                if self.next_avail == self.size {
                    (self.next_avail, self.avail_wrap) = (0, !self.avail_wrap);
                }
                if flags & 4 != 0 {
                    assert!(flags & 3 == 0 && segments.is_empty());
                    for entry in 0..u64::from(segment.1 / 16) {
                        let (segment, _, flags) = self.descriptor(segment.0 + 16 * entry);
                        assert_eq!(flags & !2, 0, "only WRITE is allowed in a table");
                        segments.push(segment);
                    }
                } else {
                    segments.push(segment);
                }
                if flags & 1 == 0 {
                    found.push((id, count, segments));
                    break;
                }
            }
        }
    }

    fn answer(&mut self, id: u16, count: u16, written: u32) {
        let at = DESC + 16 * u64::from(self.next_used);
        self.put(at + 8, &written.to_le_bytes());
        self.put(at + 12, &id.to_le_bytes());
        self.put(at + 14, &(if self.used_wrap { 0x8080_u16 } else { 0 }).to_le_bytes());
        self.next_used += count;
        if self.next_used >= self.size {
            (self.next_used, self.used_wrap) = (self.next_used - self.size, !self.used_wrap);
        }
    }

    /// Requests a kick: flags 0 always, 1 never, 2 at this slot and wrap counter.
    fn request_kick(&self, slot: u16, wrap: bool, flags: u16) {
        self.put(DEVICE, &(slot | u16::from(wrap) << 15).to_le_bytes());
        self.put(DEVICE + 2, &flags.to_le_bytes());
    }
    /// Returns the driver's request for calls: slot, wrap counter, flags.
    fn call_request(&self) -> (u16, bool, u16) {
        let event = self.u16(DRIVER);
        (event & 0x7fff, event >> 15 != 0, self.u16(DRIVER + 2))
    }
}

fn compose(
    driver: &mut PackedDriver,
    layout: ChainLayout,
    segments: &[TestSegment],
    token: u32,
) -> Result<(), ChainRefused> {
    let mut chain = driver.begin(layout);
    for &(address, len, write) in segments {
        let address = GuestAddress(address);
        chain = if write { chain.writable(address, len)? } else { chain.readable(address, len)? };
    }
    chain.commit(token)
}

#[derive(Clone, Debug)]
enum Step {
    Add { indirect: bool, readable: usize, writable: usize, seed: u64 },
    Abort { indirect: bool, segments: usize },
    Publish { flags: u16 },
    Answer { which: usize },
    Take,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        5 => (any::<bool>(), 0_usize..5, 0_usize..4, any::<u64>())
            .prop_map(|(indirect, readable, writable, seed)| Step::Add { indirect, readable, writable, seed }),
        1 => (any::<bool>(), 1_usize..6).prop_map(|(indirect, segments)| Step::Abort { indirect, segments }),
        3 => (0_u16..3).prop_map(|flags| Step::Publish { flags }),
        4 => (0_usize..64).prop_map(|which| Step::Answer { which }),
        2 => Just(Step::Take),
    ];
    proptest::collection::vec(step, 1..200)
}

proptest! {
    /// Every request reaches the device as built, every completion returns its token once, kicks are requested by
    /// exactly the rule, descriptors never leak.
    #[test]
    fn requests_and_completions_match_a_model(steps in steps(), log_size in 0_u32..6, event_idx: bool, far in 0_u16..6) {
        let size = 1_u16 << log_size;
        let memory = memory();
        let mut driver = driver(&memory, size, event_idx);
        let mut model = Model::new(&memory, size);
        let mut token = 0;
        let mut expected = std::collections::VecDeque::new();   // committed, not yet pulled
        let mut at_device: Vec<(u16, u16, u32)> = vec![];
        let mut completed = std::collections::VecDeque::new();
        let mut free = size;
        let mut cost = std::collections::HashMap::new();
        let mut fresh = 0_u16; // descriptors since the last publish
        for step in steps {
            match step {
                Step::Add { indirect, readable, writable, seed } => {
                    let layout = if indirect { ChainLayout::Indirect } else { ChainLayout::Direct };
                    let segments: Vec<TestSegment> = (0..readable + writable)
                        .map(|i| (seed.rotate_left(i as u32), (seed >> i) as u32 | 1, i >= readable))
                        .collect();
                    let need = if indirect { 1 } else { segments.len() as u16 };
                    let got = compose(&mut driver, layout, &segments, token);
                    if segments.is_empty() {
                        prop_assert_eq!(got, Err(ChainRefused::Empty));
                    } else if need > free {
                        prop_assert_eq!(got, Err(ChainRefused::Full));
                    } else {
                        prop_assert_eq!(got, Ok(()));
                        expected.push_back((token, segments));
                        cost.insert(token, need);
                        free -= need;
                        fresh += need;
                        token += 1;
                    }
                }
                Step::Abort { indirect, segments } => {
                    let mut chain = driver.begin(if indirect { ChainLayout::Indirect } else { ChainLayout::Direct });
                    for _ in 0..segments {
                        match chain.readable(GuestAddress(0xdead), 7) {
                            Ok(longer) => chain = longer,
                            Err(_) => break,
                        }
                    }
                }
                Step::Publish { flags } => {
                    // No committed request is visible before.
                    prop_assert!(model.pull().is_empty());
                    // The device requests a kick `far` descriptors ahead of its position.
                    let (mut slot, mut wrap) = (model.next_avail + far % size, model.avail_wrap);
                    if slot >= size {
                        (slot, wrap) = (slot - size, !wrap);
                    }
                    model.request_kick(slot, wrap, flags);
                    let kick = driver.publish();
                    let want = fresh > 0 && match flags {
                        1 => false,
                        2 if event_idx => far % size < fresh,
                        _ => true,
                    };
                    prop_assert_eq!(kick, want);
                    fresh = 0;
                    for (id, count, segments) in model.pull() {
                        let (token, composed) = expected.pop_front().unwrap();
                        prop_assert_eq!(segments, composed);
                        prop_assert_eq!(count, cost[&token]);
                        prop_assert!(at_device.iter().all(|(other, ..)| *other != id));
                        at_device.push((id, count, token));
                    }
                    prop_assert!(expected.is_empty());
                }
                Step::Answer { which } => {
                    if !at_device.is_empty() {
                        let (id, count, token) = at_device.swap_remove(which % at_device.len());
                        model.answer(id, count, token ^ 0x55);
                        completed.push_back(token);
                    }
                }
                Step::Take => {
                    prop_assert_eq!(usize::from(driver.poll_used().unwrap()), completed.len());
                    let upcoming: Vec<Option<u32>> = (0..=completed.len() as u16).map(|ahead| driver.upcoming(ahead)).collect();
                    let expected: Vec<Option<u32>> = completed.iter().copied().map(Some).chain([None]).collect();
                    prop_assert_eq!(upcoming, expected);
                    while let Some(used) = driver.take() {
                        prop_assert_eq!(Some(used.token), completed.pop_front());
                        prop_assert_eq!(used.written, used.token ^ 0x55);
                        free += cost[&used.token];
                    }
                    prop_assert!(completed.is_empty());
                }
            }
            prop_assert_eq!(driver.free_descriptors(), free);
        }
    }

    /// With any content of the ring, taking completions ends in an error or a request that was in flight.
    #[test]
    fn a_hostile_ring_is_an_error(
        descriptors in proptest::collection::vec((any::<u32>(), any::<u16>(), any::<u16>()), 16), small: bool,
    ) {
        let memory = memory();
        let mut driver = driver(&memory, 16, true);
        for token in 0..5 {
            compose(&mut driver, ChainLayout::Direct, &[(8, 8, false), (16, 1, true)], token).unwrap();
        }
        let _ = driver.publish();
        let model = Model::new(&memory, 16);
        for (at, (len, id, flags)) in descriptors.iter().enumerate() {
            let (id, flags) = if small { (id % 7, 0x8080 | flags & 2) } else { (*id, *flags) };
            model.put(DESC + 16 * at as u64 + 8, &len.to_le_bytes());
            model.put(DESC + 16 * at as u64 + 12, &id.to_le_bytes());
            model.put(DESC + 16 * at as u64 + 14, &flags.to_le_bytes());
        }
        let mut seen = std::collections::HashSet::new();
        let _ = driver.poll_used();
        while let Some(used) = driver.take() {
            prop_assert!(used.token < 5 && seen.insert(used.token));
        }
        prop_assert_eq!(usize::from(driver.in_flight()), 5 - seen.len());
    }
}

#[test]
fn unpublished_requests_cannot_be_completed() {
    let memory = memory();
    let mut driver = driver(&memory, 16, true);
    compose(&mut driver, ChainLayout::Direct, &[(8, 8, false)], 0).unwrap();
    let mut model = Model::new(&memory, 16);
    model.answer(0, 1, 0);
    assert_eq!(driver.poll_used(), Err(DeviceError::UsedId(0)));
}

#[test]
fn arming_requests_a_call_at_the_awaited_completion_and_looks_again() {
    for event_idx in [true, false] {
        let memory = memory();
        let mut driver = driver(&memory, 16, event_idx);
        for token in 0..5 {
            compose(&mut driver, ChainLayout::Direct, &[(8, 8, false), (16, 1, true)], token).unwrap();
        }
        let _ = driver.publish();
        let mut model = Model::new(&memory, 16);
        let chains = model.pull();
        assert_eq!(model.call_request().2, 1, "no calls while it polls");
        assert_eq!(driver.arm(3), Ok(0));
        // All requests have two descriptors: the third completion starts at slot 4.
        assert_eq!(model.call_request(), if event_idx { (4, true, 2) } else { (0, false, 0) });
        model.answer(chains[0].0, 2, 0);
        assert_eq!(driver.arm(1), Ok(1));
        driver.disarm();
        assert_eq!(model.call_request().2, 1);
        assert_eq!(driver.take().map(|used| used.token), Some(0));
        // One with a single descriptor: the third completion is at slot 4 or later, slot 2 is passed by the third at
        // the latest.
        compose(&mut driver, ChainLayout::Indirect, &[(8, 8, false)], 9).unwrap();
        let _ = driver.publish();
        assert_eq!(driver.arm(3), Ok(0));
        assert_eq!(model.call_request(), if event_idx { (4, true, 2) } else { (0, false, 0) });
    }
}

#[test]
fn invalid_segments_are_refused() {
    let memory = memory();
    let mut driver = driver(&memory, 4, true);
    let at = GuestAddress(64);
    assert_eq!(
        driver.begin(ChainLayout::Direct).writable(at, 1).unwrap().readable(at, 1).unwrap_err(),
        ChainRefused::ReadableAfterWritable
    );
    assert_eq!(driver.begin(ChainLayout::Direct).writable(at, 0).unwrap_err(), ChainRefused::Empty);
    let nine = vec![(64, 1, false); 9];
    assert_eq!(compose(&mut driver, ChainLayout::Indirect, &nine, 0), Err(ChainRefused::TooManySegments(8)));
    assert_eq!(compose(&mut driver, ChainLayout::Direct, &nine, 0), Err(ChainRefused::Full));
    assert_eq!(driver.free_descriptors(), 4);
    let mut plain = PackedDriver::new(&self::memory(), &addresses(), 4, false, None).unwrap();
    assert_eq!(compose(&mut plain, ChainLayout::Indirect, &nine, 0), Err(ChainRefused::TooManySegments(0)));
}
