//! Tests of the in-flight table against a driver, with a process that dies at any store.

use std::collections::BTreeMap;
use std::sync::Arc;

use mqblk_memory::{GuestAddress, GuestMemory, Region};
use proptest::prelude::*;

use super::super::{PackedDevice, PackedDriver};
use super::*;
use crate::crash_points::run_until_crash;
use crate::format::RingAddresses;
use crate::split::driver::ChainLayout;

const AT: RingAddresses =
    RingAddresses { desc: GuestAddress(0), avail: GuestAddress(0x1000), used: GuestAddress(0x2000) };
const TABLE: GuestAddress = GuestAddress(0x4000);

struct Rig {
    memory: Arc<GuestMemory>,
    driver: PackedDriver,
    size: u16,
    /// The next request's number. Its segments are at this address times their number.
    next: u32,
    /// Completions, by request.
    completions: BTreeMap<u32, u32>,
}

impl Rig {
    fn new(size: u16) -> Rig {
        let region = Region::shared("ring", 0x8000, GuestAddress(0)).unwrap().0;
        let memory = Arc::new(GuestMemory::new(vec![Arc::new(region)]).unwrap());
        let driver = PackedDriver::new(&memory, &AT, size, true, None).unwrap();
        Rig { memory, driver, size, next: 0, completions: BTreeMap::new() }
    }

    fn words(&self) -> SharedWords {
        self.memory.shared_words(TABLE, (PackedInflight::bytes(self.size) / 8) as usize).unwrap()
    }

    fn ring(&self) -> PackedRing {
        PackedRing::resolve(&self.memory, &AT, self.size).unwrap()
    }

    /// Starts a process that serves the ring from here on. The frontend never learns the ring's position.
    fn serve(&self) -> PackedDevice {
        let (ring, discarded) = PackedDevice::tracked(self.ring(), Base::FIRST, true, self.words()).unwrap();
        assert_eq!(discarded, 0);
        ring
    }

    /// Sends as many requests of `segments` segments as possible, at most `count`.
    fn send(&mut self, count: u16, segments: u16) {
        for _ in 0..count {
            if self.driver.free_descriptors() < segments {
                break;
            }
            let mut chain = self.driver.begin(ChainLayout::Direct);
            for number in 1..=segments {
                chain = chain.readable(address(self.next, number), 16).unwrap();
            }
            chain.commit(self.next).unwrap();
            self.next += 1;
        }
        let _ = self.driver.publish();
    }

    /// Takes the visible completions.
    fn take_used(&mut self) {
        self.driver.poll_used().unwrap();
        while let Some(used) = self.driver.take() {
            assert_eq!(used.written, used.token, "it is the completion of another request");
            *self.completions.entry(used.token).or_default() += 1;
        }
    }
}

/// Address of segment `number` of a request: identifies the request.
fn address(request: u32, number: u16) -> GuestAddress {
    GuestAddress(u64::from(request) << 16 | u64::from(number))
}

/// Takes the next chain: one to replay, or else an available one. Checks its descriptors. Returns its id and its
/// request.
fn take_next(ring: &mut PackedDevice) -> Option<(u16, u32)> {
    let (id, first) = match ring.take_replay() {
        Some(id) => {
            let state = ring.chains[usize::from(id)];
            (id, ring.inflight.as_ref().unwrap().descriptor(state.entry, 0).unwrap())
        }
        None => {
            let taken = ring.take().unwrap();
            ring.record_taken();
            taken?
        }
    };
    let request = (first.address >> 16) as u32;
    let state = ring.chains[usize::from(id)];
    for at in 0..state.count {
        let found = ring.inflight.as_ref().unwrap().descriptor(state.entry, at).unwrap();
        assert_eq!(GuestAddress(found.address), address(request, at + 1), "descriptor {at} of {id}");
    }
    Some((id, request))
}

/// The chains that a process has in flight, and their requests.
#[derive(Default)]
struct Process {
    in_flight: Vec<(u16, u32)>,
}

/// One step of a process: takes chains, completes some of them in any order, or publishes.
#[derive(Clone, Copy, Debug)]
enum Step {
    Send(u16, u16),
    Take(u16),
    Complete(u16),
    Publish,
}

fn step(rig: &mut Rig, ring: &mut PackedDevice, process: &mut Process, step: Step) {
    match step {
        Step::Send(count, segments) => rig.send(count, segments),
        Step::Take(count) => {
            for _ in 0..count {
                match take_next(ring) {
                    Some(chain) => process.in_flight.push(chain),
                    None => return,
                }
            }
        }
        Step::Complete(which) => {
            if !process.in_flight.is_empty() {
                let (id, request) = process.in_flight.swap_remove(usize::from(which) % process.in_flight.len());
                ring.put_used(id, request);
            }
        }
        Step::Publish => {
            let _ = ring.publish();
            rig.take_used();
        }
    }
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (1_u16..9, 1_u16..4).prop_map(|(count, segments)| Step::Send(count, segments)),
        (1_u16..9).prop_map(Step::Take),
        any::<u16>().prop_map(Step::Complete),
        any::<u16>().prop_map(Step::Complete),
        Just(Step::Publish),
    ]
}

/// Serves until nothing is left, one completion after the other, in a new order: every request is completed exactly
/// once, by any process.
fn finish(rig: &mut Rig) {
    let mut ring = rig.serve();
    rig.take_used();
    let mut chains: Vec<(u16, u32)> = Vec::new();
    while let Some(chain) = take_next(&mut ring) {
        assert!(chains.iter().all(|(id, _)| *id != chain.0), "id {} was replayed twice", chain.0);
        assert!(!rig.completions.contains_key(&chain.1), "request {} was completed before", chain.1);
        chains.push(chain);
    }
    for (id, request) in chains.into_iter().rev() {
        ring.put_used(id, request);
        let _ = ring.publish();
        rig.take_used();
        assert!(rig.completions.contains_key(&request));
    }
    assert_eq!(rig.completions.len() as u32, rig.next, "requests without a completion");
    assert!(rig.completions.values().all(|count| *count == 1), "{:?}", rig.completions);
    assert_eq!(rig.serve().replays(), 0);
}

/// A batch of everything, killed at each of its stores, the first and the last included.
#[test]
fn killed_at_each_store() {
    let steps = [
        Step::Send(2, 3),
        Step::Send(2, 1),
        Step::Take(3),
        Step::Complete(2),
        Step::Complete(0),
        Step::Publish,
        Step::Take(2),
        Step::Complete(1),
        Step::Send(2, 2),
        Step::Take(1),
        Step::Complete(0),
        Step::Complete(0),
        Step::Publish,
        Step::Send(1, 3),
        Step::Take(2),
        Step::Complete(1),
        Step::Publish,
    ];
    let mut stores = 0;
    loop {
        let mut rig = Rig::new(8);
        let mut ring = rig.serve();
        let mut process = Process::default();
        let ended =
            run_until_crash(stores, || steps.iter().for_each(|one| step(&mut rig, &mut ring, &mut process, *one)));
        drop(ring);
        finish(&mut rig);
        if ended {
            break;
        }
        stores += 1;
    }
    assert!(stores >= 60, "the table was written in {stores} stores only");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// Processes of any lifetime, one after the other, over one ring that wraps. They die while they recover, too.
    #[test]
    fn killed_again_and_again(
        lives in proptest::collection::vec((0_u64..120, proptest::collection::vec(any_step(), 1..40)), 1..12)
    ) {
        let mut rig = Rig::new(8);
        for (stores, steps) in lives {
            run_until_crash(stores, || {
                let mut ring = rig.serve();
                let mut process = Process::default();
                for one in steps {
                    step(&mut rig, &mut ring, &mut process, one);
                }
            });
        }
        finish(&mut rig);
    }

    /// Any content of the memory: an error, or a ring that can be served, and never more replays than entries.
    #[test]
    fn any_content(
        header in any::<[u16; 4]>(), position: u64, entries in proptest::collection::vec(any::<[u64; 4]>(), 8),
        small: bool, ring in proptest::collection::vec(any::<u64>(), 16),
    ) {
        let rig = Rig::new(8);
        let words = rig.words();
        let set = |at: usize, value| words.get(at).unwrap().store(value, Ordering::Relaxed);
        // Half of the headers are almost valid.
        let header = if small { [VERSION, 8, header[2] % 10, header[3] % 10] } else { header };
        set(1, pack_quarters(header));
        set(2, if small { position & 0x0101_0007_0007 } else { position });
        set(3, MAGIC);
        for (at, entry) in entries.iter().enumerate() {
            let [low, next, last, count] = unpack_quarters(entry[0]);
            let first = if small { [low, next % 9, last % 9, count % 4] } else { [low, next, last, count] };
            set(4 + 4 * at, pack_quarters(first));
            set(5 + 4 * at, entry[1]);
            set(6 + 4 * at, if small { entry[2] & !(0xfff8 << 32) } else { entry[2] });
            set(7 + 4 * at, entry[3]);
        }
        for (at, word) in ring.iter().enumerate() {
            rig.memory.write(GuestAddress(8 * at as u64), &word.to_le_bytes()).unwrap();
        }
        if let Ok((mut device, _)) = PackedDevice::tracked(rig.ring(), Base::FIRST, true, rig.words()) {
            let mut chains = 0;
            while let Some(id) = device.take_replay() {
                device.put_used(id, 0);
                chains += 1;
            }
            prop_assert!(chains <= 8);
            let _ = device.publish();
            let ended = device.inflight.unwrap();
            prop_assert_eq!(ended.completed.1, 0);
        }
    }
}

#[test]
fn chains_are_replayed_in_the_order_of_their_arrival() {
    let mut rig = Rig::new(8);
    rig.send(4, 2);
    let mut ring = rig.serve();
    let chains: Vec<(u16, u32)> = std::iter::from_fn(|| take_next(&mut ring)).collect();
    for (id, request) in [chains[3], chains[0]] {
        ring.put_used(id, request);
    }
    let _ = ring.publish();
    // Of the four, two are free again and are sent last.
    rig.take_used();
    rig.send(2, 2);
    let more: Vec<(u16, u32)> = std::iter::from_fn(|| take_next(&mut ring)).collect();
    assert_eq!(more.len(), 2);
    ring.record_step(chains[1].0, 7);
    let state = ring.state();
    assert_eq!(state.in_flight.len(), 4);
    drop(ring);

    let mut ring = rig.serve();
    assert_eq!((ring.replays(), ring.is_resumed(), ring.state()), (4, true, state));
    let replayed: Vec<(u16, u32)> = std::iter::from_fn(|| take_next(&mut ring)).collect();
    assert_eq!(replayed, [chains[1], chains[2], more[0], more[1]]);
    let steps = [chains[2], chains[1], chains[1]].map(|(id, _)| ring.take_recorded_step(id));
    assert_eq!(steps, [0, 7, 0]);
    // A step survives a completion that is not published.
    ring.record_step(chains[2].0, 3);
    ring.put_used(chains[2].0, chains[2].1);
    drop(ring);
    assert_eq!(rig.serve().take_recorded_step(chains[2].0), 3);
    // And ends with the request.
    let mut ring = rig.serve();
    let all: Vec<(u16, u32)> = std::iter::from_fn(|| take_next(&mut ring)).collect();
    for (id, request) in all {
        ring.put_used(id, request);
    }
    let _ = ring.publish();
    rig.take_used();
    rig.send(4, 2);
    while take_next(&mut ring).is_some() {}
    assert_eq!(rig.serve().recorded_steps(), 0);
}

/// The driver must not see the rest of a batch whose first used descriptor was never stored.
#[test]
fn used_descriptors_of_an_unfinished_batch_are_taken_back() {
    let mut rig = Rig::new(8);
    rig.send(3, 2);
    let mut ring = rig.serve();
    let chains: Vec<(u16, u32)> = std::iter::from_fn(|| take_next(&mut ring)).collect();
    for (id, request) in [chains[0], chains[1]] {
        ring.put_used(id, request);
    }
    drop(ring);
    let mut ring = rig.serve();
    let (id, request) = *chains.last().unwrap();
    let replayed: Vec<(u16, u32)> = std::iter::from_fn(|| take_next(&mut ring)).collect();
    assert_eq!(replayed, chains);
    ring.put_used(id, request);
    let _ = ring.publish();
    rig.take_used();
    assert_eq!(rig.completions, BTreeMap::from([(request, 1)]));
}

/// Every other lap ends where a new ring starts.
#[test]
fn a_ring_at_its_first_position_was_served_before() {
    let mut rig = Rig::new(8);
    assert!(!rig.serve().is_resumed());
    for lap in 0..4 {
        assert_eq!(rig.serve().is_resumed(), lap > 0, "lap {lap}");
        rig.send(8, 1);
        let mut ring = rig.serve();
        while let Some((id, request)) = take_next(&mut ring) {
            ring.put_used(id, request);
        }
        let _ = ring.publish();
        rig.take_used();
    }
    assert_eq!(rig.serve().state().base, Base::FIRST.to_bits());
}

#[test]
fn a_ring_that_was_reset_discards_its_table() {
    let mut rig = Rig::new(8);
    rig.send(4, 1);
    let mut ring = rig.serve();
    for _ in 0..3 {
        let (id, request) = take_next(&mut ring).unwrap();
        ring.put_used(id, request);
        let _ = ring.publish();
    }
    take_next(&mut ring).unwrap();
    drop(ring);
    // The guest's driver starts again.
    let reset = |rig: &mut Rig, requests| {
        rig.driver = PackedDriver::new(&rig.memory, &AT, 8, true, None).unwrap();
        rig.send(requests, 1);
        PackedDevice::tracked(rig.ring(), Base::FIRST, true, rig.words()).unwrap()
    };
    let (mut ring, discarded) = reset(&mut rig, 2);
    assert_eq!((discarded, ring.replays(), ring.is_resumed()), (1, 0, false));
    // And once more when nothing is in flight, so that only the position shows the reset.
    while let Some((id, request)) = take_next(&mut ring) {
        ring.put_used(id, request);
    }
    let _ = ring.publish();
    drop(ring);
    let (ring, discarded) = reset(&mut rig, 1);
    assert_eq!((discarded, ring.state().base), (0, Base::FIRST.to_bits()));
    drop(ring);
    // Also with a ring of another size, or of the other format.
    let ring = PackedRing::resolve(&rig.memory, &AT, 4).unwrap();
    let (_, found) = PackedInflight::open(rig.words(), &ring, Base::FIRST).unwrap();
    assert_eq!(found, RecoveredPacked::default());
    let (_, found) = crate::split::InflightTable::open(rig.words(), 4, 0).unwrap();
    assert_eq!(found.next_avail, None);
    let (_, found) = PackedInflight::open(rig.words(), &ring, Base::FIRST).unwrap();
    assert_eq!(found, RecoveredPacked::default());
}

#[test]
fn invalid_tables_are_refused() {
    let rig = Rig::new(8);
    let open = || PackedInflight::open(rig.words(), &rig.ring(), Base::FIRST).map(|_| ());
    let few = rig.memory.shared_words(TABLE, 8).unwrap();
    let short = PackedInflight::open(few, &rig.ring(), Base::FIRST).unwrap_err();
    assert_eq!(short, InflightError::TooSmall { found: 64, expected: 288, size: 8 });
    open().unwrap();
    let words = rig.words();
    let set = |at: usize, value| words.get(at).unwrap().store(value, Ordering::Relaxed);
    set(1, pack_quarters([2, 8, 0, 0]));
    assert_eq!(open().unwrap_err(), InflightError::Header { field: "version", found: 2, expected: 1 });
    // Entry 0 is neither free nor in a chain.
    set(1, pack_quarters([1, 8, 1, 1]));
    assert_eq!(open().unwrap_err(), InflightError::Entry { found: 0, size: 8 });
    set(1, pack_quarters([1, 8, 0, 0]));
    set(2, 9);
    assert_eq!(open().unwrap_err(), InflightError::Header { field: "used position", found: 9, expected: 7 });
    set(0, 4);
    assert_eq!(open().unwrap_err(), InflightError::Header { field: "features", found: 4, expected: 0 });
}
