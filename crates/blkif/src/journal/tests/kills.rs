//! Crash consistency: every store that a process makes to its journal and ring is recorded, and after each of them a
//! new process resumes from the state at that moment.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use mqblk_ring::blkif::RingPosition;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

use super::{id_of, raw};
use crate::journal::records::{ENTRY_WORDS, HEADER_WORDS, JournalMemory, JournalRecords};
use crate::journal::{JournalError, JournalSlot};

/// A store that outlives the process that made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Store {
    Header(usize, u64),
    Entry(u16, usize, u64),
    /// The frontend puts the next request and its index.
    Request(u64),
    /// A response to a request is put at an index, over the old content.
    Response(u64, u64),
    /// The ring's response index.
    Index(u64),
}

/// The journal's memory.
#[derive(Clone)]
struct MemoryImage {
    header: [u64; HEADER_WORDS],
    entries: Vec<[u64; ENTRY_WORDS]>,
}

/// Journal memory that records every store.
struct RecordingMemory {
    image: MemoryImage,
    log: Rc<RefCell<Vec<Store>>>,
    random: SmallRng,
}

impl JournalMemory for RecordingMemory {
    fn header(&self, word: usize) -> u64 {
        self.image.header[word]
    }

    fn set_header(&mut self, word: usize, value: u64) {
        self.image.header[word] = value;
        self.log.borrow_mut().push(Store::Header(word, value));
    }

    fn entry(&self, slot: u16, word: usize) -> u64 {
        self.image.entries[usize::from(slot)][word]
    }

    fn set_entry(&mut self, slot: u16, word: usize, value: u64) {
        self.image.entries[usize::from(slot)][word] = value;
        self.log.borrow_mut().push(Store::Entry(slot, word, value));
    }

    fn write_entry(&mut self, slot: u16, words: &[u64; ENTRY_WORDS]) {
        let mut order: [usize; ENTRY_WORDS] = std::array::from_fn(|word| word);
        order.shuffle(&mut self.random);
        for word in order {
            self.set_entry(slot, word, words[word]);
        }
    }
}

/// State that outlives a process: the journal, the ring, and the frontend's knowledge. Indices are counts here.
#[derive(Clone)]
struct CrashState {
    image: MemoryImage,
    /// The ring's entries: a request, or other content.
    slots: Vec<Option<u64>>,
    produced: u64,
    visible: u64,
    /// Responses on the ring.
    responses: BTreeMap<u64, u64>,
    /// Requests on the ring without a published response.
    waiting: BTreeSet<u64>,
    next_id: u64,
}

impl CrashState {
    fn new(entries: u16, start: u64) -> CrashState {
        let entries: usize = entries.into();
        CrashState {
            image: MemoryImage { header: [0; HEADER_WORDS], entries: vec![[0; ENTRY_WORDS]; entries] },
            slots: vec![None; entries],
            produced: start,
            visible: start,
            responses: BTreeMap::new(),
            waiting: BTreeSet::new(),
            next_id: 1,
        }
    }

    fn slot(&mut self, count: u64) -> &mut Option<u64> {
        let at = count as usize % self.slots.len();
        &mut self.slots[at]
    }

    fn apply(&mut self, store: Store) {
        match store {
            Store::Header(word, value) => self.image.header[word] = value,
            Store::Entry(slot, word, value) => self.image.entries[usize::from(slot)][word] = value,
            Store::Request(id) => {
                *self.slot(self.produced) = Some(id);
                self.produced += 1;
                self.next_id = id + 1;
                assert!(self.waiting.insert(id));
            }
            Store::Response(count, id) => {
                *self.slot(count) = None;
                self.responses.insert(count, id);
            }
            Store::Index(count) => {
                for answered in self.visible..count {
                    let id = self.responses[&answered];
                    assert!(self.waiting.remove(&id), "request {id} gets one response");
                }
                self.visible = count;
            }
        }
    }

    fn resume(&self, seed: u64) -> Result<(Process, Vec<Store>), JournalError> {
        let log = Rc::default();
        let recorder =
            RecordingMemory { image: self.image.clone(), log: Rc::clone(&log), random: SmallRng::seed_from_u64(seed) };
        let (book, replay) = JournalRecords::recover(recorder, self.slots.len() as u16, self.visible as u32)?;
        let at = book.position();
        let mut world = self.clone();
        let stores = std::mem::take(&mut *log.borrow_mut());
        stores.iter().for_each(|store| world.apply(*store));
        let count = |index: u32| self.visible + u64::from(index.wrapping_sub(self.visible as u32));
        let process = Process {
            consumed: count(at.req_cons),
            put: count(at.rsp_prod),
            in_flight: replay.into_iter().map(|(slot, raw)| (slot, id_of(&raw))).collect(),
            random: SmallRng::seed_from_u64(seed),
            world,
            book,
            log,
        };
        Ok((process, stores))
    }

    /// Checks that a process that resumes from this state executes each waiting request exactly once. Returns the
    /// stores of the resume.
    fn check(&self) -> Result<Vec<Store>, String> {
        let (process, stores) = self.resume(0).map_err(|why| why.to_string())?;
        if process.put != self.visible {
            return Err(format!("responses go on at {}, {} are visible", process.put, self.visible));
        }
        let replayed: Vec<u64> = process.in_flight.iter().map(|(_, id)| *id).collect();
        if !replayed.is_sorted() {
            return Err(format!("{replayed:?} are not in the order in which they were put on the ring"));
        }
        let size = self.slots.len();
        if process.consumed > self.produced || self.produced - process.consumed > size as u64 {
            return Err(format!("requests go on at {}, there are {}", process.consumed, self.produced));
        }
        let mut done = replayed;
        for count in process.consumed..self.produced {
            done.push(self.slots[count as usize % size].ok_or("a request that waits in the ring was overwritten")?);
        }
        let wanted: Vec<u64> = self.waiting.iter().copied().collect();
        if done == wanted { Ok(stores) } else { Err(format!("{done:?} are done, {wanted:?} wait")) }
    }
}

/// A process that serves the ring.
struct Process {
    book: JournalRecords<RecordingMemory>,
    log: Rc<RefCell<Vec<Store>>>,
    world: CrashState,
    consumed: u64,
    put: u64,
    in_flight: Vec<(JournalSlot, u64)>,
    random: SmallRng,
}

impl Process {
    /// Creates the first process. The stores of its creation are not recorded.
    fn new(entries: u16, start: u32, seed: u64) -> Process {
        let mut world = CrashState::new(entries, start.into());
        let log = Rc::default();
        let recorder =
            RecordingMemory { image: world.image.clone(), log: Rc::clone(&log), random: SmallRng::seed_from_u64(seed) };
        let book = JournalRecords::create(recorder, entries, RingPosition { req_cons: start, rsp_prod: start });
        log.borrow_mut().drain(..).for_each(|store| world.apply(store));
        let (consumed, put) = (start.into(), start.into());
        Process { book, log, world, consumed, put, in_flight: vec![], random: SmallRng::seed_from_u64(seed) }
    }

    /// Records a store.
    fn store(&mut self, store: Store) {
        self.log.borrow_mut().push(store);
    }

    fn random_up_to(&mut self, most: u64) -> u64 {
        self.random.random_range(0..=most)
    }

    fn produce(&mut self) {
        let free = self.world.slots.len() as u64 - (self.world.produced - self.world.visible);
        for _ in 0..self.random_up_to(free) {
            let store = Store::Request(self.world.next_id);
            self.world.apply(store);
            self.store(store);
        }
    }

    fn pull(&mut self) {
        let batch = self.random_up_to((self.world.produced - self.consumed).min(20));
        let mut taken = vec![];
        for _ in 0..batch {
            let id = self.world.slot(self.consumed).expect("a request that was not consumed");
            self.consumed += 1;
            let slot = self.book.record_request(&raw(id)).expect("the frontend keeps to the ring's size");
            taken.push((slot, id));
        }
        self.book.record_consumed(self.consumed as u32);
        self.in_flight.append(&mut taken);
    }

    fn complete(&mut self) {
        for _ in 0..self.random_up_to(self.in_flight.len() as u64) {
            let at = self.random.random_range(0..self.in_flight.len());
            let (slot, id) = self.in_flight.swap_remove(at);
            let store = Store::Response(self.put, id);
            self.world.apply(store);
            // The order of these two does not matter.
            let before = self.random.random();
            if before {
                self.store(store);
            }
            self.book.record_response(slot);
            if !before {
                self.store(store);
            }
            self.put += 1;
        }
    }

    fn publish(&mut self) {
        if self.put == self.world.visible {
            return;
        }
        let store = Store::Index(self.put);
        self.world.apply(store);
        let log = Rc::clone(&self.log);
        self.book.publish(self.put as u32, || log.borrow_mut().push(store));
    }

    /// Runs for `steps` steps. Returns the stores made meanwhile.
    fn run(&mut self, steps: u32) -> Vec<Store> {
        for _ in 0..steps {
            match self.random.random_range(0..5) {
                0 => self.produce(),
                1 | 2 => self.pull(),
                3 => self.complete(),
                _ => self.publish(),
            }
        }
        std::mem::take(&mut *self.log.borrow_mut())
    }
}

/// Checks the state after each store. Returns the states in which one of `keep` was the last store.
fn check_each(world: &CrashState, stores: &[Store], keep: &[usize]) -> Vec<CrashState> {
    let mut now = world.clone();
    let mut kept = vec![];
    for (at, store) in stores.iter().enumerate() {
        now.apply(*store);
        now.check().unwrap_or_else(|why| panic!("after store {at}, {store:?}: {why}"));
        if keep.contains(&at) {
            kept.push(now.clone());
        }
    }
    kept
}

/// Runs a process that is killed after each of its stores; then others from some of these states, whose resume is
/// killed too.
fn run_with_kills(entries: u16, start: u32, seed: u64, steps: u32, depth: u32) {
    let mut random = SmallRng::seed_from_u64(seed);
    let mut process = Process::new(entries, start, seed);
    let mut before = process.world.clone();
    for generation in 0..depth {
        let stores = process.run(steps);
        // Any moment, but more often than others the rare one at which a batch is published and not recorded as
        // published.
        let publishes: Vec<_> = (0..stores.len()).filter(|at| matches!(stores[*at], Store::Index(_))).collect();
        let any = publishes.is_empty() || random.random_ratio(2, 3);
        let moment =
            if any { random.random_range(0..stores.len()) } else { publishes[random.random_range(0..publishes.len())] };
        let kept = check_each(&before, &stores, &[moment]);
        let (next, stores) = kept[0].resume(seed + u64::from(generation)).expect("as it was just checked");
        check_each(&kept[0], &stores, &[]);
        before = next.world.clone();
        process = next;
    }
}

#[test]
fn a_kill_after_any_store_loses_no_request_and_repeats_no_response() {
    for seed in 0..60 {
        let start = [0, 0_u32.wrapping_sub(20), 0_u32.wrapping_sub(100), 1 << 31][seed as usize % 4];
        run_with_kills(32, start, seed, 60, 4);
    }
}

#[test]
fn a_kill_after_any_store_of_a_large_ring_is_survived_too() {
    for (seed, start) in [(1, 0_u32.wrapping_sub(300)), (2, 0)] {
        run_with_kills(512, start, seed, 50, 3);
    }
}

/// After each store of a process, kills the resume after each of its stores, and the next resume too.
#[test]
fn a_resume_may_be_killed_repeatedly() {
    let mut process = Process::new(4, u32::MAX, 7);
    let mut now = process.world.clone();
    let mut kills = 0;
    for store in process.run(120) {
        now.apply(store);
        let mut inner = now.clone();
        for store in now.check().unwrap() {
            inner.apply(store);
            for store in inner.check().unwrap() {
                let mut innermost = inner.clone();
                innermost.apply(store);
                innermost.check().unwrap();
                kills += 1;
            }
        }
    }
    assert!(kills > 1000, "{kills}");
}

/// Swaps each pair of adjacent stores that `pick` selects. Returns the number of pairs, and of unrecoverable
/// intermediate states.
fn swap_stores(entries: u16, steps: u32, pick: impl Fn(&Store, &Store) -> bool) -> (usize, usize) {
    let (mut pairs, mut losses) = (0, 0);
    for seed in 0..10 {
        let mut process = Process::new(entries, 0, seed);
        let mut now = process.world.clone();
        let stores = process.run(steps);
        for pair in stores.windows(2) {
            if pick(&pair[0], &pair[1]) {
                let mut wrong = now.clone();
                wrong.apply(pair[1]);
                pairs += 1;
                losses += usize::from(wrong.check().is_err());
            }
            now.apply(pair[0]);
        }
    }
    (pairs, losses)
}

/// The check can fail: each order that the journal keeps is necessary.
#[test]
fn no_two_stores_may_be_reordered() {
    use crate::journal::records::{CONSUMED, PUBLISHED, PUBLISHING, REQUEST_NUMBER, RESPONSE_NUMBER};
    let number_and_response = |one: &Store, next: &Store| {
        matches!((one, next), (Store::Entry(_, REQUEST_NUMBER, _), Store::Entry(_, RESPONSE_NUMBER, 0)))
    };
    let fill_and_consumed =
        |one: &Store, next: &Store| matches!((one, next), (Store::Entry(..), Store::Header(CONSUMED, _)));
    let publishing_and_index =
        |one: &Store, next: &Store| matches!((one, next), (Store::Header(PUBLISHING, _), Store::Index(_)));
    let index_and_published =
        |one: &Store, next: &Store| matches!((one, next), (Store::Index(_), Store::Header(PUBLISHED, _)));
    let consumed_and_response =
        |one: &Store, next: &Store| matches!((one, next), (Store::Header(CONSUMED, _), Store::Response(..)));
    for (name, (pairs, losses)) in [
        ("number, response", swap_stores(8, 300, number_and_response)),
        ("entry, consumed", swap_stores(8, 300, fill_and_consumed)),
        ("publishing, index", swap_stores(8, 300, publishing_and_index)),
        ("index, published", swap_stores(8, 300, index_and_published)),
        ("consumed, response", swap_stores(8, 300, consumed_and_response)),
    ] {
        assert!(pairs > 0 && losses > 0, "{name}: of {pairs} swaps {losses} are noticed");
    }
}
