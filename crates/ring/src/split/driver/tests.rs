//! The driver's end against a model device that is written from the specification alone: it shares only the addresses
//! with the driver.

use std::sync::Arc;

use mqblk_memory::{GuestAddress, GuestMemory, Region};
use proptest::prelude::*;

use super::*;
use crate::wakeup::RingIndex;

const DESC: u64 = 0x1000;
const AVAIL: u64 = 0x3000;
const USED: u64 = 0x4000;
const TABLES: u64 = 0x8000;
const PER_TABLE: u16 = 8;

fn memory() -> Arc<GuestMemory> {
    let region = Region::shared("ring", 0x2_0000, GuestAddress(0)).unwrap().0;
    Arc::new(GuestMemory::new(vec![Arc::new(region)]).unwrap())
}

fn addresses() -> RingAddresses {
    RingAddresses { desc: GuestAddress(DESC), avail: GuestAddress(AVAIL), used: GuestAddress(USED) }
}

fn driver(memory: &GuestMemory, size: u16, event_idx: bool) -> SplitDriver {
    let indirect = IndirectArea { start: GuestAddress(TABLES), per_table: PER_TABLE };
    SplitDriver::new(memory, &addresses(), size, event_idx, Some(indirect)).unwrap()
}

/// (address, length, device may write)
type TestSegment = (u64, u32, bool);

/// A model device. It reads and writes the ring byte by byte.
struct Model {
    memory: Arc<GuestMemory>,
    size: u16,
    next_avail: u16,
    used_idx: u16,
}

impl Model {
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

    fn walk(&self, table: u64, entries: u16, first: u16) -> Vec<TestSegment> {
        let mut segments = vec![];
        let mut index = first;
        loop {
            assert!(index < entries && segments.len() < usize::from(entries), "descriptor {index} of {entries}");
            let at = table + u64::from(index) * 16;
            let (address, len) = (u64::from_le_bytes(self.bytes(at)), u32::from_le_bytes(self.bytes(at + 8)));
            let (flags, next) = (self.u16(at + 12), self.u16(at + 14));
            if flags & 4 != 0 {
                assert!(table == DESC && flags & 3 == 0 && segments.is_empty());
                return self.walk(address, (len / 16) as u16, 0);
            }
            segments.push((address, len, flags & 2 != 0));
            if flags & 1 == 0 {
                return segments;
            }
            index = next;
        }
    }

    /// Takes every available request.
    fn pull(&mut self) -> Vec<(u16, Vec<TestSegment>)> {
        let mut found = vec![];
        while self.next_avail != self.u16(AVAIL + 2) {
            let head = self.u16(AVAIL + 4 + 2 * u64::from(self.next_avail % self.size));
            found.push((head, self.walk(DESC, self.size, head)));
            self.next_avail = self.next_avail.wrapping_add(1);
        }
        found
    }

    fn answer(&mut self, id: u32, written: u32) {
        let at = USED + 4 + 8 * u64::from(self.used_idx % self.size);
        self.put(at, &id.to_le_bytes());
        self.put(at + 4, &written.to_le_bytes());
        self.used_idx = self.used_idx.wrapping_add(1);
        self.put(USED + 2, &self.used_idx.to_le_bytes());
    }

    fn used_event(&self) -> u16 {
        self.u16(AVAIL + 4 + 2 * u64::from(self.size))
    }
    fn set_avail_event(&self, event: u16) {
        self.put(USED + 4 + 8 * u64::from(self.size), &event.to_le_bytes());
    }
}

fn compose(
    driver: &mut SplitDriver,
    shape: ChainLayout,
    segments: &[TestSegment],
    token: u32,
) -> Result<(), ChainRefused> {
    let mut chain = driver.begin(shape);
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
    Publish { asks: bool },
    Answer { which: usize },
    Take,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        5 => (any::<bool>(), 0_usize..5, 0_usize..4, any::<u64>())
            .prop_map(|(indirect, readable, writable, seed)| Step::Add { indirect, readable, writable, seed }),
        1 => (any::<bool>(), 1_usize..6).prop_map(|(indirect, segments)| Step::Abort { indirect, segments }),
        3 => any::<bool>().prop_map(|asks| Step::Publish { asks }),
        4 => (0_usize..64).prop_map(|which| Step::Answer { which }),
        2 => Just(Step::Take),
    ];
    proptest::collection::vec(step, 1..200)
}

proptest! {
    /// Every request reaches the device as built, every completion returns its token once, kicks are requested by
    /// exactly the rule, descriptors never leak.
    #[test]
    fn requests_and_completions_match_a_model(steps in steps(), log_size in 0_u32..6, event_idx: bool, far in 0_u16..3) {
        let size = 1_u16 << log_size;
        let memory = memory();
        let mut driver = driver(&memory, size, event_idx);
        let mut model = Model { memory, size, next_avail: 0, used_idx: 0 };
        let mut token = 0;
        let mut expected = std::collections::VecDeque::new();   // committed, not yet pulled
        let mut at_device: Vec<(u16, u32)> = vec![];
        let mut completed = std::collections::VecDeque::new();
        let mut free = size;
        let mut cost = std::collections::HashMap::new();
        let mut published = 0_u16;
        let mut committed = 0_u16;
        for step in steps {
            match step {
                Step::Add { indirect, readable, writable, seed } => {
                    let shape = if indirect { ChainLayout::Indirect } else { ChainLayout::Direct };
                    let segments: Vec<TestSegment> = (0..readable + writable)
                        .map(|i| (seed.rotate_left(i as u32), (seed >> i) as u32 | 1, i >= readable))
                        .collect();
                    let need = if indirect { 1 } else { segments.len() as u16 };
                    let got = compose(&mut driver, shape, &segments, token);
                    if segments.is_empty() {
                        prop_assert_eq!(got, Err(ChainRefused::Empty));
                    } else if need > free {
                        prop_assert_eq!(got, Err(ChainRefused::Full));
                    } else {
                        prop_assert_eq!(got, Ok(()));
                        expected.push_back((token, segments));
                        cost.insert(token, need);
                        free -= need;
                        token += 1;
                        committed = committed.wrapping_add(1);
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
                Step::Publish { asks } => {
                    // The device requests a kick at the next request, or `far` requests earlier or later.
                    let event = published.wrapping_add(far).wrapping_sub(1);
                    model.set_avail_event(event);
                    model.put(USED, &u16::from(!asks).to_le_bytes());
                    let kick = driver.publish();
                    let fresh = committed.wrapping_sub(published);
                    let want = if event_idx { far >= 1 && far <= fresh } else { asks && fresh > 0 };
                    prop_assert_eq!(kick, want);
                    published = committed;
                    for (head, segments) in model.pull() {
                        let (token, composed) = expected.pop_front().unwrap();
                        prop_assert_eq!(segments, composed);
                        prop_assert!(at_device.iter().all(|(other, _)| *other != head));
                        at_device.push((head, token));
                    }
                    prop_assert!(expected.is_empty());
                }
                Step::Answer { which } => {
                    if !at_device.is_empty() {
                        let (head, token) = at_device.swap_remove(which % at_device.len());
                        model.answer(head.into(), token ^ 0x55);
                        completed.push_back(token);
                    }
                }
                Step::Take => {
                    prop_assert_eq!(usize::from(driver.poll_used().unwrap()), completed.len());
                    let upcoming: Vec<Option<u32>> = (0..=completed.len() as u16).map(|ahead| driver.upcoming(ahead)).collect();
                    let expected: Vec<Option<u32>> = completed.iter().copied().map(Some).chain([None]).collect();
                    prop_assert_eq!(upcoming, expected);
                    while let Some(used) = driver.take().unwrap() {
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

    /// With any content of the used ring, taking completions ends in an error or a request that was in flight.
    #[test]
    fn a_hostile_used_ring_is_an_error(
        idx: u16, flags: u16, elements in proptest::collection::vec((any::<u32>(), any::<u32>()), 16), small: bool,
    ) {
        let memory = memory();
        let mut driver = driver(&memory, 16, true);
        for token in 0..5 {
            compose(&mut driver, ChainLayout::Direct, &[(8, 8, false), (16, 1, true)], token).unwrap();
        }
        let _ = driver.publish();
        let model = Model { memory, size: 16, next_avail: 0, used_idx: 0 };
        for (at, (id, written)) in elements.iter().enumerate() {
            let id = if small { id % 20 } else { *id };
            model.put(USED + 4 + 8 * at as u64, &id.to_le_bytes());
            model.put(USED + 8 + 8 * at as u64, &written.to_le_bytes());
        }
        model.put(USED, &flags.to_le_bytes());
        model.put(USED + 2, &(if small { idx % 7 } else { idx }).to_le_bytes());
        let mut seen = std::collections::HashSet::new();
        if driver.poll_used().is_ok() {
            while let Ok(Some(used)) = driver.take() {
                prop_assert!(used.token < 5 && seen.insert(used.token));
            }
        }
        prop_assert_eq!(usize::from(driver.in_flight()), 5 - seen.len());
    }
}

#[test]
fn an_index_that_moves_backwards_is_an_error() {
    let memory = memory();
    let mut driver = driver(&memory, 16, true);
    for token in 0..3 {
        compose(&mut driver, ChainLayout::Direct, &[(8, 8, false)], token).unwrap();
    }
    let _ = driver.publish();
    let mut model = Model { memory, size: 16, next_avail: 0, used_idx: 0 };
    model.answer(0, 0);
    model.answer(1, 0);
    assert_eq!(driver.poll_used(), Ok(2));
    model.put(USED + 2, &1_u16.to_le_bytes());
    assert_eq!(driver.poll_used(), Err(DeviceError::UsedIndex { found: 1, in_flight: 3 }));
}

#[test]
fn unpublished_requests_cannot_be_completed() {
    let memory = memory();
    let mut driver = driver(&memory, 16, true);
    compose(&mut driver, ChainLayout::Direct, &[(8, 8, false)], 0).unwrap();
    let mut model = Model { memory, size: 16, next_avail: 0, used_idx: 0 };
    model.answer(0, 0);
    assert_eq!(driver.poll_used(), Err(DeviceError::UsedIndex { found: 1, in_flight: 0 }));
}

#[test]
fn arming_requests_a_call_at_the_awaited_completion_and_rechecks() {
    for event_idx in [true, false] {
        let memory = memory();
        let mut driver = driver(&memory, 16, event_idx);
        for token in 0..4 {
            compose(&mut driver, ChainLayout::Direct, &[(8, 8, false)], token).unwrap();
        }
        let _ = driver.publish();
        let mut model = Model { memory, size: 16, next_avail: 0, used_idx: 0 };
        let heads: Vec<u16> = model.pull().into_iter().map(|(head, _)| head).collect();
        // While polling, a completion does not pass the event.
        let no_call = |model: &Model| {
            if event_idx { !u16::need_event(model.used_event(), 4, 0) } else { model.u16(AVAIL) & 1 == 1 }
        };
        assert!(no_call(&model));
        assert_eq!(driver.arm(3), Ok(0));
        if event_idx {
            assert!(!u16::need_event(model.used_event(), 2, 0) && u16::need_event(model.used_event(), 3, 2));
        } else {
            assert_eq!(model.u16(AVAIL), 0);
        }
        model.answer(heads[0].into(), 0);
        assert_eq!(driver.arm(1), Ok(1));
        driver.disarm();
        assert!(no_call(&model));
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
    let mut plain = SplitDriver::new(&self::memory(), &addresses(), 4, false, None).unwrap();
    assert_eq!(compose(&mut plain, ChainLayout::Indirect, &nine, 0), Err(ChainRefused::TooManySegments(0)));
}
