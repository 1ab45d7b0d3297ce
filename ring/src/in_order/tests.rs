//! Rings in order of both formats: the device's end against the driver's end and a plain model, the bytes in the ring, and a process that
//! dies at any store.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use mqblk_memory::{BufferPool, GuestAddress, GuestMemory, LeaseId, Region, SharedWords};
use proptest::prelude::*;

use super::*;
use crate::crash_points::run_until_crash;
use crate::driver_ring::{ChainLayout, DriverRing, IndirectArea, RingFeatures};
use crate::format::{RingAddresses, RingFormat};
use crate::virtqueue::{DeviceRing, MappedRing};

const AT: RingAddresses =
    RingAddresses { desc: GuestAddress(0x1000), avail: GuestAddress(0x8000), used: GuestAddress(0x9000) };
const TABLES: GuestAddress = GuestAddress(0x1_0000);
const INFLIGHT: GuestAddress = GuestAddress(0x3_0000);
/// The address of the first segment of request 0, and of the next one's.
const DATA: u64 = 0x4000_0000;
const STRIDE: u64 = 64;

/// The address of a chain's first segment, which has 1 byte.
struct FirstSegment(GuestAddress);

impl ChainHeader for FirstSegment {
    const LEN: u32 = 1;

    fn read(_: &mut LeaseAccess<'_>, address: GuestAddress) -> Option<FirstSegment> {
        Some(FirstSegment(address))
    }
}

struct Guest {
    memory: Arc<GuestMemory>,
    pool: BufferPool,
    lease: LeaseId,
    format: RingFormat,
    size: u16,
    driver: DriverRing,
    /// The next request's number.
    next: u32,
    /// The next take first tries to take a lone chain: every other one does.
    tries_lone: bool,
}

impl Guest {
    fn new(format: RingFormat, size: u16, event_idx: bool) -> Guest {
        let region = Region::shared("ring", 1 << 20, GuestAddress(0)).unwrap().0;
        let memory = Arc::new(GuestMemory::new(vec![Arc::new(region)]).unwrap());
        let mut pool = BufferPool::new();
        let lease = pool.acquire_lease(Arc::clone(&memory), vec![]);
        let tables = IndirectArea { start: TABLES, per_table: 8 };
        let features = RingFeatures { event_idx, in_order: true };
        let driver = DriverRing::new(&memory, &AT, size, format, features, Some(tables)).unwrap();
        Guest { memory, pool, lease, format, size, driver, next: 0, tries_lone: false }
    }

    fn ring(&self) -> MappedRing {
        MappedRing::resolve(&self.memory, &AT, self.size, self.format).unwrap()
    }

    fn device(&self, event_idx: bool) -> DeviceRing {
        DeviceRing::new(self.ring(), self.format.first_base(), event_idx).in_order()
    }

    /// Starts a process that serves the ring from here on.
    fn serve(&self) -> DeviceRing {
        let words = MappedRing::inflight_bytes(self.size, self.format) / 8;
        let words: SharedWords = self.memory.shared_words(INFLIGHT, words as usize).unwrap();
        let (ring, discarded) = DeviceRing::tracked(self.ring(), self.format.first_base(), true, words).unwrap();
        assert_eq!(discarded, 0);
        ring.in_order()
    }

    /// Adds a request with so many segments, each of 1 byte more than the one before. Returns its number and its writable bytes, or `None` if
    /// there is no space.
    fn add(&mut self, indirect: bool, readable: u64, writable: u64) -> Option<(u32, u32)> {
        let layout = if indirect { ChainLayout::Indirect } else { ChainLayout::Direct };
        let need = if indirect { 1 } else { readable + writable };
        if need > u64::from(self.driver.free_descriptors()) {
            return None;
        }
        let number = self.next;
        let segment = |at: u64| (GuestAddress(DATA + u64::from(number) * STRIDE + at), 1 + at as u32);
        let segments: Vec<_> = (0..readable + writable).map(segment).collect();
        let (read, written) = segments.split_at(readable as usize);
        self.driver.add(layout, read, written, number).unwrap();
        self.next += 1;
        Some((number, written.iter().map(|(_, len)| len).sum()))
    }

    /// Takes chains, at most `max`. Returns their names and their requests' numbers.
    fn take(&mut self, device: &mut DeviceRing, max: usize) -> Vec<(u16, u32)> {
        self.tries_lone = !self.tries_lone && max > 0;
        if let (true, DeviceRing::InOrder(ring)) = (self.tries_lone, &mut *device) {
            match ring.take_lone(&self.pool) {
                Available::Nothing => return vec![],
                Available::Lone(mut head) => {
                    ring.read_table(&mut self.pool.access(self.lease), &mut head);
                    assert_eq!(ring.reread(head.index).first, head.first);
                    return vec![(head.index, self.number(device, &head))];
                }
                Available::Batch => {}
            }
        }
        let mut heads = [ChainHead::default(); 4];
        let (count, _) = device.fetch(&mut self.pool, self.lease, &mut heads, max).unwrap();
        heads[..count].iter().map(|head| (head.index, self.number(device, head))).collect()
    }

    fn number(&mut self, device: &DeviceRing, head: &ChainHead) -> u32 {
        let DeviceRing::InOrder(ring) = device else { panic!("a ring in order") };
        if let Some((FirstSegment(first), _)) = ring.three_segments(&mut self.pool.access(self.lease), head) {
            return ((first.0 - DATA) / STRIDE) as u32;
        }
        let mut first = None;
        let walked = device.walk(&mut self.pool, self.lease, head, |_, segment| {
            first.get_or_insert(segment.address.0);
            Ok(())
        });
        walked.unwrap();
        ((first.unwrap() - DATA) / STRIDE) as u32
    }

    /// Takes the completions that are visible: numbers and lengths.
    fn reap(&mut self) -> Vec<(u32, u32)> {
        let found = self.driver.poll_used().unwrap();
        let mut taken = vec![];
        while let Some(used) = self.driver.take().unwrap() {
            taken.push((used.token, used.written));
        }
        assert_eq!(taken.len(), usize::from(found));
        taken
    }

    fn bytes<const N: usize>(&self, at: GuestAddress) -> [u8; N] {
        let mut bytes = [0; N];
        self.memory.read(at, &mut bytes).unwrap();
        bytes
    }
}

#[derive(Clone, Debug)]
enum Step {
    Add { indirect: bool, readable: u64, writable: u64 },
    Publish,
    Take { max: usize },
    Use { which: usize, short: bool },
    UsePublish,
    Reap,
    ArmDriver { count: u16 },
    DisarmDriver,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        5 => (any::<bool>(), 1_u64..4, 0_u64..4)
            .prop_map(|(indirect, readable, writable)| Step::Add { indirect, readable, writable }),
        3 => Just(Step::Publish),
        4 => (0_usize..5).prop_map(|max| Step::Take { max }),
        8 => (0_usize..64, prop::bool::weighted(0.2)).prop_map(|(which, short)| Step::Use { which, short }),
        3 => Just(Step::UsePublish),
        3 => Just(Step::Reap),
        1 => (1_u16..4).prop_map(|count| Step::ArmDriver { count }),
        1 => Just(Step::DisarmDriver),
    ];
    prop::collection::vec(step, 1..300)
}

fn formats() -> impl Strategy<Value = RingFormat> {
    prop_oneof![Just(RingFormat::Split), Just(RingFormat::Packed)]
}

proptest! {
    /// Whatever the order in which requests complete: the driver gets them in the order in which it made them available, each once and with
    /// its length, none before all before it are complete and published; a driver that waits for completions is called; descriptors never
    /// leak. A mark of a completion is visible when the driver sees it.
    #[test]
    fn both_ends_agree(steps in steps(), log_size in 1_u32..6, format in formats(), event_idx: bool) {
        let mut guest = Guest::new(format, 1 << log_size, event_idx);
        let mut device = guest.device(event_idx);
        let mut writable = BTreeMap::new();
        let mut at_device: Vec<(u16, u32)> = vec![];
        // Taken by the device and not seen by the driver, with the length once they are complete, and a mark of that.
        let mut order: VecDeque<(u32, Option<(u32, CompletionMark)>)> = VecDeque::new();
        let mut visible = VecDeque::new();
        let mut taken = 0;
        let mut driver_sleeps = None::<u16>;
        for step in steps {
            match step {
                Step::Add { indirect, readable, writable: count } => {
                    if let Some((number, bytes)) = guest.add(indirect, readable, count) {
                        writable.insert(number, bytes);
                    }
                }
                Step::Publish => _ = guest.driver.publish(),
                Step::Take { max } => {
                    for (chain, number) in guest.take(&mut device, max) {
                        prop_assert_eq!(number, taken);
                        taken += 1;
                        at_device.push((chain, number));
                        order.push_back((number, None));
                    }
                }
                Step::Use { which, short } => {
                    if !at_device.is_empty() {
                        let (chain, number) = at_device.swap_remove(which % at_device.len());
                        let written = if short { writable[&number] / 2 } else { writable[&number] };
                        device.put_used(chain, written);
                        let place = order.iter_mut().find(|(other, _)| *other == number).unwrap();
                        place.1 = Some((written, device.completion_of(chain)));
                    }
                }
                Step::UsePublish => {
                    let wanted = device.publish();
                    let before = visible.len();
                    while let Some((number, Some((written, mark)))) = order.front().copied() {
                        prop_assert!(device.is_visible(mark));
                        visible.push_back((number, written));
                        order.pop_front();
                    }
                    prop_assert_eq!(wanted == PublishResult::Nothing, before == visible.len());
                    let held_back: Vec<_> = order.iter().filter_map(|(_, complete)| *complete).collect();
                    prop_assert!(held_back.iter().all(|(_, mark)| !device.is_visible(*mark)));
                    prop_assert_eq!(device.is_visible(device.completions()), held_back.is_empty());
                    if driver_sleeps.is_some_and(|count| visible.len() >= usize::from(count)) {
                        prop_assert_eq!(wanted, PublishResult::Wanted, "a call is lost");
                        driver_sleeps = None;
                    } else if wanted == PublishResult::Wanted {
                        // It may be early. The driver arms again.
                        driver_sleeps = None;
                    }
                }
                Step::Reap => {
                    prop_assert_eq!(guest.reap(), visible.drain(..).collect::<Vec<_>>());
                    driver_sleeps = None;
                }
                Step::ArmDriver { count } => {
                    let ready = guest.driver.arm(count).unwrap();
                    prop_assert_eq!(usize::from(ready), visible.len());
                    let sleeps = ready < count && count <= guest.driver.in_flight();
                    driver_sleeps = sleeps.then_some(count);
                }
                Step::DisarmDriver => {
                    guest.driver.disarm();
                    driver_sleeps = None;
                }
            }
        }
        // What is held back is in flight.
        prop_assert_eq!(device.state().in_flight.len(), order.len());
        let _ = guest.driver.publish();
        loop {
            at_device.drain(..).for_each(|(chain, number)| device.put_used(chain, writable[&number]));
            let _ = device.publish();
            guest.reap();
            at_device = guest.take(&mut device, 4);
            if at_device.is_empty() {
                break;
            }
        }
        prop_assert_eq!((guest.driver.in_flight(), guest.driver.free_descriptors()), (0, guest.size));
        prop_assert!(device.state().in_flight.is_empty());
    }

    /// A process that dies at any store loses no request, and the next one takes those that the driver has not seen, in their order.
    #[test]
    fn killed_at_any_store(
        steps in prop::collection::vec((0_u8..4, any::<u16>()), 1..60), log_size in 2_u32..5, format in formats(),
        lives in prop::collection::vec(0_u64..80, 1..6),
    ) {
        let mut guest = Guest::new(format, 1 << log_size, true);
        let mut seen = 0;
        let mut steps = steps.into_iter().cycle();
        for stores in lives {
            let mut in_flight = vec![];
            run_until_crash(stores, || {
                let mut device = guest.serve();
                for (what, value) in steps.by_ref().take(40) {
                    match what {
                        0 => {
                            while guest.add(false, 1, 1).is_some() && !guest.next.is_multiple_of(5) {}
                            let _ = guest.driver.publish();
                        }
                        1 => in_flight.extend(guest.take(&mut device, usize::from(value % 5))),
                        2 if !in_flight.is_empty() => {
                            let at = usize::from(value) % in_flight.len();
                            let (chain, _) = in_flight.swap_remove(at);
                            device.put_used(chain, u32::from(value % 3));
                        }
                        3 => _ = device.publish(),
                        _ => {}
                    }
                }
            });
            for (number, _) in guest.reap() {
                assert_eq!(number, seen, "a request is lost, comes twice or too early");
                seen += 1;
            }
        }
        // The last one completes everything.
        let mut device = guest.serve();
        let mut taken = seen;
        loop {
            let chains = guest.take(&mut device, 3);
            for (chain, number) in chains.iter().rev() {
                device.put_used(*chain, 2);
                assert!((taken..taken + chains.len() as u32).contains(number), "replayed in another order");
            }
            taken += chains.len() as u32;
            let _ = device.publish();
            for (number, _) in guest.reap() {
                assert_eq!(number, seen);
                seen += 1;
            }
            if chains.is_empty() {
                break;
            }
        }
        let published = guest.next - u32::from(guest.driver.unpublished());
        prop_assert_eq!(seen, published);
    }

    /// Whatever a device writes into the used ring, taking completions ends in an error, or with requests that were in flight, in order.
    #[test]
    fn a_hostile_ring_is_an_error(
        format in formats(), elements in prop::collection::vec((any::<u32>(), any::<u32>(), any::<u16>()), 16), index: u16, small: bool,
    ) {
        let mut guest = Guest::new(format, 16, true);
        while guest.add(false, 1, 1).is_some() && guest.next < 5 {}
        let _ = guest.driver.publish();
        guest.add(false, 1, 1);
        for (at, (id, written, flags)) in (0_u64..).zip(elements) {
            let id = if small { id % 17 } else { id };
            match format {
                RingFormat::Split => {
                    guest.memory.write(GuestAddress(AT.used.0 + 4 + 8 * at), &id.to_le_bytes()).unwrap();
                    guest.memory.write(GuestAddress(AT.used.0 + 8 + 8 * at), &written.to_le_bytes()).unwrap();
                }
                RingFormat::Packed => {
                    let flags = if small { flags | 0x8080 } else { flags };
                    let state = [&written.to_le_bytes()[..], &(id as u16).to_le_bytes(), &flags.to_le_bytes()].concat();
                    guest.memory.write(GuestAddress(AT.desc.0 + 16 * at + 8), &state).unwrap();
                }
            }
        }
        if format == RingFormat::Split {
            let index = if small { index % 8 } else { index };
            guest.memory.write(GuestAddress(AT.used.0 + 2), &index.to_le_bytes()).unwrap();
        }
        let mut taken = 0;
        let _ = guest.driver.poll_used();
        while let Ok(Some(used)) = guest.driver.take() {
            prop_assert!(used.token == taken && used.token < 5);
            taken += 1;
        }
    }
}

/// What a ring has for a run: one element, in the place of the first, and nothing for the others.
#[test]
fn a_run_has_one_element() {
    for format in [RingFormat::Split, RingFormat::Packed] {
        let mut guest = Guest::new(format, 16, true);
        let mut device = guest.device(true);
        let bytes: Vec<u32> = (0..5).map(|_| guest.add(true, 1, 2).unwrap().1).collect();
        let _ = guest.driver.publish();
        let mut chains = guest.take(&mut device, 4);
        chains.extend(guest.take(&mut device, 4));
        // Where the device has not written, there is what was there before.
        for at in 0..16 {
            guest.memory.write(GuestAddress(AT.used.0 + 4 + 8 * at), &[0xee; 8]).unwrap();
        }
        let before: Vec<[u8; 8]> = (0..5).map(|at| guest.bytes(GuestAddress(AT.desc.0 + 16 * at + 8))).collect();
        // The third was not written completely.
        for at in [4, 1, 3, 2, 0] {
            assert_eq!(device.publish(), PublishResult::Nothing, "{at}");
            device.put_used(chains[at].0, if at == 2 { 1 } else { bytes[at] });
        }
        assert_ne!(device.publish(), PublishResult::Nothing);
        let element = |at: u64| -> (u32, u32) {
            match format {
                RingFormat::Split => {
                    let [a, b, c, d, e, f, g, h] = guest.bytes(GuestAddress(AT.used.0 + 4 + 8 * at));
                    (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]))
                }
                RingFormat::Packed => {
                    let [a, b, c, d, e, f, _, _] = guest.bytes(GuestAddress(AT.desc.0 + 16 * at + 8));
                    (u32::from(u16::from_le_bytes([e, f])), u32::from_le_bytes([a, b, c, d]))
                }
            }
        };
        assert_eq!(element(0), (chains[2].0.into(), 1), "{format:?}");
        assert_eq!(element(3), (chains[4].0.into(), bytes[4]), "{format:?}");
        for at in [1, 2, 4] {
            match format {
                RingFormat::Split => assert_eq!(element(at), (0xeeee_eeee, 0xeeee_eeee)),
                RingFormat::Packed => {
                    assert_eq!(guest.bytes(GuestAddress(AT.desc.0 + 16 * at + 8)), before[at as usize]);
                }
            }
        }
        if format == RingFormat::Split {
            assert_eq!(guest.bytes(GuestAddress(AT.used.0 + 2)), [5, 0]);
        }
        let want: Vec<_> = (0..).zip([bytes[0], bytes[1], 1, bytes[3], bytes[4]]).collect();
        assert_eq!(guest.reap(), want);
    }
}

/// A chain whose segments were not all seen does not pass as completely written.
#[test]
fn a_chain_that_was_not_counted_ends_a_run() {
    let mut order = CompletionOrder::new(4);
    for chain in [3, 1, 2] {
        order.take(chain);
    }
    order.set_writable(3, None);
    order.set_writable(1, Some(7));
    for (chain, written) in [(3, 0), (1, 7), (1, 9), (2, 5), (0, 1), (9, 1)] {
        order.complete(chain, written);
    }
    let complete = |chain, written, is_full| Some(Complete { chain, written, is_full });
    assert_eq!(order.pop_complete(), complete(3, 0, false));
    assert_eq!(order.pop_complete(), complete(1, 9, false), "the last one that was told");
    assert_eq!(order.pop_complete(), complete(2, 5, false));
    assert_eq!(order.pop_complete(), None);
}

/// The counts wrap.
#[test]
fn counts_are_modulo_2_to_the_32() {
    let mut order = CompletionOrder::new(2);
    (order.first, order.next, order.completed) = (u32::MAX, u32::MAX, u32::MAX);
    for round in 0..4 {
        order.take(0);
        order.take(1);
        order.complete(1, 5);
        let mark = CompletionMark(order.completed);
        assert!(!order.is_published(mark.0), "{round}");
        assert_eq!(order.pop_complete(), None);
        order.complete(0, 5);
        assert_eq!(CompletionMark(order.completed), mark);
        assert_eq!(mark.max(CompletionMark(order.first)), mark);
        assert!(order.pop_complete().is_some() && !order.is_published(mark.0));
        assert!(order.pop_complete().is_some() && order.is_published(mark.0));
    }
}
