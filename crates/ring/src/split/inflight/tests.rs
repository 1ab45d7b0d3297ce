//! Tests of the in-flight table against a driver, with a process that dies at any store.

use std::collections::BTreeMap;
use std::sync::Arc;

use mqblk_memory::{GuestAddress, GuestMemory, Region};
use proptest::prelude::*;

use super::super::driver::ChainLayout;
use super::super::{SplitDevice, SplitDriver, SplitRing};
use super::*;
use crate::crash_points::run_until_crash;
use crate::format::RingAddresses;

const AT: RingAddresses =
    RingAddresses { desc: GuestAddress(0), avail: GuestAddress(0x1000), used: GuestAddress(0x2000) };
const TABLE: GuestAddress = GuestAddress(0x4000);

struct Rig {
    memory: Arc<GuestMemory>,
    driver: SplitDriver,
    size: u16,
    /// The next request's number.
    next: u32,
    /// Completions, by request.
    completions: BTreeMap<u32, u32>,
}

impl Rig {
    fn new(size: u16) -> Rig {
        let region = Region::shared("ring", 0x8000, GuestAddress(0)).unwrap().0;
        let memory = Arc::new(GuestMemory::new(vec![Arc::new(region)]).unwrap());
        let driver = SplitDriver::new(&memory, &AT, size, true, None).unwrap();
        Rig { memory, driver, size, next: 0, completions: BTreeMap::new() }
    }

    fn words(&self) -> SharedWords {
        self.memory.shared_words(TABLE, (InflightTable::bytes(self.size) / 8) as usize).unwrap()
    }

    /// Starts a process that serves the ring from here on.
    fn serve(&self) -> SplitDevice {
        let ring = SplitRing::resolve(&self.memory, &AT, self.size).unwrap();
        let (ring, discarded) = SplitDevice::tracked(ring, 0, true, self.words()).unwrap();
        assert_eq!(discarded, 0);
        ring
    }

    /// Sends as many requests as possible, at most `count`.
    fn send(&mut self, count: u16) {
        for _ in 0..count.min(self.driver.free_descriptors()) {
            let chain = self.driver.begin(ChainLayout::Direct).readable(GuestAddress(0x3000), 16).unwrap();
            chain.commit(self.next).unwrap();
            self.next += 1;
        }
        let _ = self.driver.publish();
    }

    /// Takes the visible used elements.
    fn take_used(&mut self) {
        self.driver.poll_used().unwrap();
        while let Some(used) = self.driver.take().unwrap() {
            *self.completions.entry(used.token).or_default() += 1;
        }
    }
}

/// The chains that a process has in flight, by head: it does not know the driver's tokens.
#[derive(Default)]
struct Process {
    in_flight: Vec<u16>,
}

/// One step of a process: takes chains, completes some of them in any order, or publishes.
#[derive(Clone, Copy, Debug)]
enum Step {
    Send(u16),
    Take(u16),
    Complete(u16),
    Publish,
}

fn step(rig: &mut Rig, ring: &mut SplitDevice, process: &mut Process, step: Step) {
    match step {
        Step::Send(count) => rig.send(count),
        Step::Take(count) => {
            for _ in 0..count {
                match ring.take_next().unwrap() {
                    Some(head) => process.in_flight.push(head),
                    None => return,
                }
            }
        }
        Step::Complete(which) => {
            if !process.in_flight.is_empty() {
                let head = process.in_flight.swap_remove(usize::from(which) % process.in_flight.len());
                ring.put_used(head, 1);
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
        (1_u16..9).prop_map(Step::Send),
        (1_u16..9).prop_map(Step::Take),
        any::<u16>().prop_map(Step::Complete),
        any::<u16>().prop_map(Step::Complete),
        Just(Step::Publish),
    ]
}

/// Serves until nothing is left: every request is completed exactly once, by any process.
fn finish(rig: &mut Rig) {
    let mut ring = rig.serve();
    rig.take_used();
    let mut heads = Vec::new();
    while let Some(head) = ring.take_next().unwrap() {
        assert!(!heads.contains(&head), "head {head} was replayed twice");
        heads.push(head);
    }
    for head in heads {
        ring.put_used(head, 1);
    }
    let _ = ring.publish();
    rig.take_used();
    assert_eq!(rig.completions.len() as u32, rig.next, "requests without a completion");
    assert!(rig.completions.values().all(|count| *count == 1), "{:?}", rig.completions);
    assert_eq!(rig.serve().replays(), 0);
}

/// A batch of everything, killed at each of its stores, the first and the last included.
#[test]
fn killed_at_each_store() {
    let steps = [
        Step::Send(8),
        Step::Take(6),
        Step::Complete(5),
        Step::Complete(0),
        Step::Publish,
        Step::Take(2),
        Step::Complete(1),
        Step::Send(2),
        Step::Take(1),
        Step::Complete(3),
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
    assert!(stores >= 30, "the table was written in {stores} stores only");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// Processes of any lifetime, one after the other, over one ring whose indices wrap.
    #[test]
    fn killed_again_and_again(
        lives in proptest::collection::vec((0_u64..80, proptest::collection::vec(any_step(), 1..40)), 1..12)
    ) {
        let mut rig = Rig::new(8);
        for (stores, steps) in lives {
            let mut ring = rig.serve();
            let mut process = Process::default();
            run_until_crash(stores, || {
                for one in steps {
                    step(&mut rig, &mut ring, &mut process, one);
                }
            });
        }
        finish(&mut rig);
    }

    /// Any content of the memory: an error, or a ring that can be served, and never more replays than entries.
    #[test]
    fn any_content(header in any::<[u16; 4]>(), entries in proptest::collection::vec(any::<[u64; 2]>(), 8), used in any::<u16>()) {
        let rig = Rig::new(8);
        let words = rig.words();
        // Half of the headers are almost valid.
        let header = if header[0] & 1 == 0 { [VERSION, 8, header[2] % 10, used.wrapping_sub(header[3] % 10)] } else { header };
        words.get(1).unwrap().store(pack_quarters(header), Ordering::Relaxed);
        for (at, entry) in entries.iter().enumerate() {
            words.get(2 + 2 * at).unwrap().store(entry[0], Ordering::Relaxed);
            words.get(3 + 2 * at).unwrap().store(entry[1], Ordering::Relaxed);
        }
        if let Ok((_, found)) = InflightTable::open(words, 8, used) {
            prop_assert!(found.replays.len() <= 8);
            if let Some(next) = found.next_avail {
                prop_assert_eq!(usize::from(next.wrapping_sub(used)), found.replays.len());
            }
        }
    }
}

#[test]
fn chains_are_replayed_in_the_order_of_their_arrival() {
    let mut rig = Rig::new(8);
    rig.send(8);
    let mut ring = rig.serve();
    let heads: Vec<u16> = std::iter::from_fn(|| ring.take_next().unwrap()).collect();
    for head in [heads[3], heads[0]] {
        ring.put_used(head, 1);
    }
    let _ = ring.publish();
    // Of the eight, two are free again and are sent last.
    rig.take_used();
    rig.send(2);
    let more: Vec<u16> = std::iter::from_fn(|| ring.take_next().unwrap()).collect();
    assert_eq!(more.len(), 2);
    ring.record_step(heads[4], 7);
    assert_eq!(ring.state().in_flight.len(), 8);
    drop(ring);

    let mut ring = rig.serve();
    assert_eq!((ring.replays(), ring.is_resumed(), ring.state().base), (8, true, 10));
    let replayed: Vec<u16> = std::iter::from_fn(|| ring.take_next().unwrap()).collect();
    let rest = heads.iter().copied().filter(|head| *head != heads[3] && *head != heads[0]);
    assert_eq!(replayed, rest.chain(more).collect::<Vec<_>>());
    assert_eq!(
        (ring.take_recorded_step(heads[5]), ring.take_recorded_step(heads[4]), ring.take_recorded_step(heads[4])),
        (0, 7, 0)
    );
    assert!(ring.take(heads[1]).is_err(), "it is in flight, and the driver makes it available again");
    // A step survives a completion that is not published.
    ring.record_step(heads[5], 3);
    ring.put_used(heads[5], 1);
    drop(ring);
    assert_eq!(rig.serve().take_recorded_step(heads[5]), 3);
}

#[test]
fn a_ring_that_was_reset_discards_its_table() {
    let mut rig = Rig::new(8);
    rig.send(5);
    let mut ring = rig.serve();
    for _ in 0..3 {
        let head = ring.take_next().unwrap().unwrap();
        ring.put_used(head, 1);
        let _ = ring.publish();
    }
    ring.take_next().unwrap().unwrap();
    drop(ring);
    // The guest's driver starts again: all indices are 0, which is behind the table's.
    rig.memory.write(GuestAddress(AT.used.0), &[0; 4]).unwrap();
    rig.memory.write(GuestAddress(AT.avail.0), &[0; 4]).unwrap();
    let ring = SplitRing::resolve(&rig.memory, &AT, 8).unwrap();
    let (ring, discarded) = SplitDevice::tracked(ring, 0, true, rig.words()).unwrap();
    assert_eq!((discarded, ring.replays(), ring.is_resumed()), (1, 0, false));

    // Also with a ring of another size; the rest of the table is clear then.
    drop(ring);
    let (_, found) = InflightTable::open(rig.words(), 4, 9).unwrap();
    assert_eq!(found, RecoveredChains::default());
}

#[test]
fn invalid_tables_are_refused() {
    let rig = Rig::new(8);
    let open = |size| InflightTable::open(rig.words(), size, 0);
    assert_eq!(open(64).unwrap_err(), InflightError::TooSmall { found: 192, expected: 1040, size: 64 });
    let words = rig.words();
    words.get(1).unwrap().store(pack_quarters([2, 8, 0, 0]), Ordering::Relaxed);
    assert_eq!(open(8).unwrap_err(), InflightError::Header { field: "version", found: 2, expected: 1 });
    words.get(1).unwrap().store(pack_quarters([1, 8, 9, 0xfffe]), Ordering::Relaxed);
    assert_eq!(open(8).unwrap_err(), InflightError::List { found: 9, size: 8 });
    words.get(0).unwrap().store(4, Ordering::Relaxed);
    assert_eq!(open(8).unwrap_err(), InflightError::Header { field: "features", found: 4, expected: 0 });
}
