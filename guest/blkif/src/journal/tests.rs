//! Every kill: the stores that a life of a journal makes, and those of the ring beside it, are recorded one by one, and after each of them
//! a new owner takes up what lies there then.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;

use mqblk_memory::create_memfd;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

use super::*;

/// A store that outlives whoever made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Store {
    Header(usize, u64),
    Entry(u16, usize, u64),
    /// The frontend's: the next request, and its index.
    Request(u64),
    /// A response to a request is put at an index, over what lay there.
    Response(u64, u64),
    /// The ring's response index.
    Index(u64),
}

/// The journal's memory.
#[derive(Clone)]
struct Image {
    header: [u64; HEADER_WORDS],
    entries: Vec<[u64; ENTRY_WORDS]>,
}

/// A journal's memory of which every store is recorded.
struct Recorder {
    image: Image,
    log: Rc<RefCell<Vec<Store>>>,
    random: SmallRng,
}

impl Words for Recorder {
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

    fn fill(&mut self, slot: u16, words: &[u64; ENTRY_WORDS]) {
        let mut order: [usize; ENTRY_WORDS] = std::array::from_fn(|word| word);
        order.shuffle(&mut self.random);
        for word in order {
            self.set_entry(slot, word, words[word]);
        }
    }
}

/// What outlives an owner: the journal, the ring, and what the frontend knows. Indices are counts here.
#[derive(Clone)]
struct World {
    image: Image,
    /// The ring's entries: a request, or something else.
    slots: Vec<Option<u64>>,
    produced: u64,
    visible: u64,
    /// Responses that were put.
    responses: BTreeMap<u64, u64>,
    /// Requests that were put on the ring and have no response that the frontend sees.
    waiting: BTreeSet<u64>,
    next_id: u64,
}

impl World {
    fn new(entries: u16, start: u64) -> World {
        let entries: usize = entries.into();
        World {
            image: Image { header: [0; HEADER_WORDS], entries: vec![[0; ENTRY_WORDS]; entries] },
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
                    assert!(self.waiting.remove(&id), "request {id} is answered once");
                }
                self.visible = count;
            }
        }
    }

    fn take_up(&self, seed: u64) -> Result<(Life, Vec<Store>), JournalError> {
        let log = Rc::default();
        let recorder =
            Recorder { image: self.image.clone(), log: Rc::clone(&log), random: SmallRng::seed_from_u64(seed) };
        let (book, replay) = Book::take_up(recorder, self.slots.len() as u16, self.visible as u32)?;
        let at = book.position();
        let mut world = self.clone();
        let stores = std::mem::take(&mut *log.borrow_mut());
        stores.iter().for_each(|store| world.apply(*store));
        let count = |index: u32| self.visible + u64::from(index.wrapping_sub(self.visible as u32));
        let life = Life {
            consumed: count(at.req_cons),
            put: count(at.rsp_prod),
            in_flight: replay.into_iter().map(|(slot, raw)| (slot, id_of(&raw))).collect(),
            random: SmallRng::seed_from_u64(seed),
            world,
            book,
            log,
        };
        Ok((life, stores))
    }

    /// Whether who takes up what lies here now does each request that waits exactly once. Returns what taking up stored.
    fn check(&self) -> Result<Vec<Store>, String> {
        let (life, stores) = self.take_up(0).map_err(|why| why.to_string())?;
        if life.put != self.visible {
            return Err(format!("responses go on at {}, {} are visible", life.put, self.visible));
        }
        let replayed: Vec<u64> = life.in_flight.iter().map(|(_, id)| *id).collect();
        if !replayed.is_sorted() {
            return Err(format!("{replayed:?} are not in the order in which they were put on the ring"));
        }
        let size = self.slots.len();
        if life.consumed > self.produced || self.produced - life.consumed > size as u64 {
            return Err(format!("requests go on at {}, there are {}", life.consumed, self.produced));
        }
        let mut done = replayed;
        for count in life.consumed..self.produced {
            done.push(self.slots[count as usize % size].ok_or("a request that waits in the ring was overwritten")?);
        }
        let wanted: Vec<u64> = self.waiting.iter().copied().collect();
        if done == wanted { Ok(stores) } else { Err(format!("{done:?} are done, {wanted:?} wait")) }
    }
}

/// A request that says its number in each word.
fn raw(id: u64) -> RawRequest {
    let mut bytes = [0; size_of::<RawRequest>()];
    for (at, word) in bytes.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&(id << 8 | at as u64).to_le_bytes());
    }
    RawRequest::from_bytes(bytes)
}

/// The number that a request says. One that is of parts of others has none that a request was given.
fn id_of(found: &RawRequest) -> u64 {
    let id = u64::from_le_bytes(found.bytes()[..8].try_into().unwrap()) >> 8;
    if *found == raw(id) { id } else { u64::MAX }
}

/// An owner.
struct Life {
    book: Book<Recorder>,
    log: Rc<RefCell<Vec<Store>>>,
    world: World,
    consumed: u64,
    put: u64,
    in_flight: Vec<(JournalSlot, u64)>,
    random: SmallRng,
}

impl Life {
    /// The first. Its stores are not recorded before it is there.
    fn first(entries: u16, start: u32, seed: u64) -> Life {
        let mut world = World::new(entries, start.into());
        let log = Rc::default();
        let recorder =
            Recorder { image: world.image.clone(), log: Rc::clone(&log), random: SmallRng::seed_from_u64(seed) };
        let book = Book::begin(recorder, entries, Position { req_cons: start, rsp_prod: start });
        log.borrow_mut().drain(..).for_each(|store| world.apply(store));
        let (consumed, put) = (start.into(), start.into());
        Life { book, log, world, consumed, put, in_flight: vec![], random: SmallRng::seed_from_u64(seed) }
    }

    /// Records a store, and lets the frontend of this life see all that were recorded.
    fn store(&mut self, store: Store) {
        self.log.borrow_mut().push(store);
    }

    fn up_to(&mut self, most: u64) -> u64 {
        self.random.random_range(0..=most)
    }

    fn produce(&mut self) {
        let room = self.world.slots.len() as u64 - (self.world.produced - self.world.visible);
        for _ in 0..self.up_to(room) {
            let store = Store::Request(self.world.next_id);
            self.world.apply(store);
            self.store(store);
        }
    }

    fn pull(&mut self) {
        let batch = self.up_to((self.world.produced - self.consumed).min(20));
        let mut taken = vec![];
        for _ in 0..batch {
            let id = self.world.slot(self.consumed).expect("a request that was not taken");
            self.consumed += 1;
            let slot = self.book.take(&raw(id)).expect("the frontend keeps to the ring's size");
            taken.push((slot, id));
        }
        self.book.consumed(self.consumed as u32);
        self.in_flight.append(&mut taken);
    }

    fn answer(&mut self) {
        for _ in 0..self.up_to(self.in_flight.len() as u64) {
            let at = self.random.random_range(0..self.in_flight.len());
            let (slot, id) = self.in_flight.swap_remove(at);
            let store = Store::Response(self.put, id);
            self.world.apply(store);
            // The order of these two does not matter.
            let before = self.random.random();
            if before {
                self.store(store);
            }
            self.book.answered(slot);
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

    /// Lives for so many steps; what it stored meanwhile.
    fn live(&mut self, steps: u32) -> Vec<Store> {
        for _ in 0..steps {
            match self.random.random_range(0..5) {
                0 => self.produce(),
                1 | 2 => self.pull(),
                3 => self.answer(),
                _ => self.publish(),
            }
        }
        std::mem::take(&mut *self.log.borrow_mut())
    }
}

/// Checks the world after each store. The worlds in which one of `keep` was the last.
fn check_each(world: &World, stores: &[Store], keep: &[usize]) -> Vec<World> {
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

/// One life, killed after each of its stores; then from some of these moments others, the taking up of which is killed too.
fn lives(entries: u16, start: u32, seed: u64, steps: u32, depth: u32) {
    let mut random = SmallRng::seed_from_u64(seed);
    let mut life = Life::first(entries, start, seed);
    let mut before = life.world.clone();
    for generation in 0..depth {
        let stores = life.live(steps);
        // Any moment, but more often than others the rare one at which a batch is published and not noted.
        let publishes: Vec<_> = (0..stores.len()).filter(|at| matches!(stores[*at], Store::Index(_))).collect();
        let any = publishes.is_empty() || random.random_ratio(2, 3);
        let moment =
            if any { random.random_range(0..stores.len()) } else { publishes[random.random_range(0..publishes.len())] };
        let kept = check_each(&before, &stores, &[moment]);
        let (next, stores) = kept[0].take_up(seed + u64::from(generation)).expect("as it was just checked");
        check_each(&kept[0], &stores, &[]);
        before = next.world.clone();
        life = next;
    }
}

#[test]
fn a_kill_after_any_store_loses_no_request_and_repeats_no_answer() {
    for seed in 0..60 {
        let start = [0, 0_u32.wrapping_sub(20), 0_u32.wrapping_sub(100), 1 << 31][seed as usize % 4];
        lives(32, start, seed, 60, 4);
    }
}

#[test]
fn a_kill_after_any_store_of_a_large_ring_is_survived_too() {
    for (seed, start) in [(1, 0_u32.wrapping_sub(300)), (2, 0)] {
        lives(512, start, seed, 50, 3);
    }
}

/// After each of the stores of a life, every store of taking up is the last of another life, and so on: nothing depends on how often.
#[test]
fn taking_up_may_be_killed_again_and_again() {
    let mut life = Life::first(4, u32::MAX, 7);
    let mut now = life.world.clone();
    let mut kills = 0;
    for store in life.live(120) {
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

/// Swaps each pair of neighbouring stores that `pick` names. How many of the moments in between are not survived.
fn swapped(entries: u16, steps: u32, pick: impl Fn(&Store, &Store) -> bool) -> (usize, usize) {
    let (mut pairs, mut losses) = (0, 0);
    for seed in 0..10 {
        let mut life = Life::first(entries, 0, seed);
        let mut now = life.world.clone();
        let stores = life.live(steps);
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

/// The check can fail: each order that the journal keeps is one that is needed.
#[test]
fn no_two_steps_may_change_places() {
    use book::{CONSUMED, NUMBER, PUBLISHED, PUBLISHING, RESPONSE};
    let number_and_response =
        |one: &Store, next: &Store| matches!((one, next), (Store::Entry(_, NUMBER, _), Store::Entry(_, RESPONSE, 0)));
    let fill_and_consumed =
        |one: &Store, next: &Store| matches!((one, next), (Store::Entry(..), Store::Header(CONSUMED, _)));
    let publishing_and_index =
        |one: &Store, next: &Store| matches!((one, next), (Store::Header(PUBLISHING, _), Store::Index(_)));
    let index_and_published =
        |one: &Store, next: &Store| matches!((one, next), (Store::Index(_), Store::Header(PUBLISHED, _)));
    let consumed_and_response =
        |one: &Store, next: &Store| matches!((one, next), (Store::Header(CONSUMED, _), Store::Response(..)));
    for (name, (pairs, losses)) in [
        ("number, response", swapped(8, 300, number_and_response)),
        ("entry, consumed", swapped(8, 300, fill_and_consumed)),
        ("publishing, index", swapped(8, 300, publishing_and_index)),
        ("index, published", swapped(8, 300, index_and_published)),
        ("consumed, response", swapped(8, 300, consumed_and_response)),
    ] {
        assert!(pairs > 0 && losses > 0, "{name}: of {pairs} swaps {losses} are noticed");
    }
}

const ENTRIES_OF_FILE: u32 = 32;
const NAME: u64 = 0x1234_5678_9abc_def0;

fn file() -> File {
    create_memfd("journal", 0).unwrap()
}

/// A journal in a file with requests in flight and a batch that is just being published; and the ring's index.
fn busy_file() -> (File, u32) {
    let file = file();
    let start = 0_u32.wrapping_sub(7);
    let mut journal =
        Journal::create(&file, ENTRIES_OF_FILE, NAME, Position { req_cons: start, rsp_prod: start }).unwrap();
    let slots: Vec<_> = (1..=20).map(|id| journal.take(&raw(id)).unwrap()).collect();
    journal.consumed(start.wrapping_add(20));
    for at in [4, 9, 17, 0] {
        journal.answered(slots[at]);
    }
    // The owner is killed within.
    let killed = catch_unwind(AssertUnwindSafe(|| {
        journal.publish(start.wrapping_add(4), || resume_unwind(Box::new("killed")));
    }));
    assert!(killed.is_err());
    (file, start)
}

fn ids(recovery: &Recovery) -> Vec<u64> {
    recovery.replay.iter().map(|(_, raw)| id_of(raw)).collect()
}

#[test]
fn a_file_tells_the_next_owner_what_to_do() {
    for published in [false, true] {
        let (file, start) = busy_file();
        let visible = start.wrapping_add(if published { 4 } else { 0 });
        let (mut journal, recovery) = Journal::resume(&file, ENTRIES_OF_FILE, NAME, visible).unwrap();
        assert_eq!(recovery.position, Position { req_cons: start.wrapping_add(20), rsp_prod: visible });
        let answered = |id: &u64| published && [5, 10, 18, 1].contains(id);
        let expected: Vec<u64> = (1..=20).filter(|id| !answered(id)).collect();
        assert_eq!(ids(&recovery), expected);
        for (slot, _) in &recovery.replay {
            journal.answered(*slot);
        }
        journal.publish(recovery.position.req_cons, || ());
        drop(journal);
        let (_, recovery) = Journal::resume(&file, ENTRIES_OF_FILE, NAME, start.wrapping_add(20)).unwrap();
        assert!(recovery.replay.is_empty());
    }
}

#[test]
fn a_journal_of_another_ring_is_refused() {
    let resume =
        |file: &File, entries, name, index| Journal::resume(file, entries, name, index).map(|_| ()).unwrap_err();
    let (file, start) = busy_file();
    let text = |error: JournalError| error.to_string();
    assert!(text(resume(&file, ENTRIES_OF_FILE, NAME ^ 1, start)).contains("identity: found 0x123456789abcdef0"));
    assert!(text(resume(&file, 64, NAME, start)).contains("bytes"));
    assert!(text(resume(&file, 33, NAME, start)).contains("ring entries"));
    // What was neither before nor after the batch.
    for index in [start.wrapping_sub(1), start.wrapping_add(1), start.wrapping_add(5), start ^ 1 << 31] {
        assert!(matches!(resume(&file, ENTRIES_OF_FILE, NAME, index), JournalError::Ring { .. }), "{index}");
    }
    assert!(matches!(resume(&self::file(), ENTRIES_OF_FILE, NAME, 0), JournalError::Field { field: "bytes", .. }));
}

#[test]
fn a_ring_with_requests_that_nobody_noted_gets_no_journal() {
    let create = |entries, req_cons| {
        Journal::create(&file(), entries, NAME, Position { req_cons, rsp_prod: 5 })
            .map(|_| ())
            .map_err(|e| e.to_string())
    };
    assert_eq!(create(32, 5), Ok(()));
    assert!(create(32, 6).unwrap_err().contains("in flight"));
    assert!(create(0, 5).is_err() && create(48, 5).is_err() && create(1024, 5).is_err());
}

#[test]
fn more_requests_than_the_ring_holds_are_refused() {
    let mut journal = Journal::create(&file(), 4, NAME, Position::default()).unwrap();
    let slots: Vec<_> = (0..4).map(|id| journal.take(&raw(id)).unwrap()).collect();
    journal.consumed(4);
    assert_eq!(journal.take(&raw(9)), None);
    journal.answered(slots[2]);
    assert_eq!(journal.take(&raw(9)), None, "the frontend cannot know");
    journal.publish(1, || ());
    assert_eq!(journal.take(&raw(9)), Some(slots[2]));
}

/// Takes up whatever is in `file`; if it can be, uses it as a queue does.
fn survive(file: &File, index: u32) -> bool {
    let Ok((mut journal, recovery)) = Journal::resume(file, ENTRIES_OF_FILE, NAME, index) else { return false };
    let (mut slots, mut at) =
        (recovery.replay.into_iter().map(|(slot, _)| slot).collect::<Vec<_>>(), recovery.position);
    assert!(slots.len() <= ENTRIES_OF_FILE as usize);
    while let Some(slot) = journal.take(&raw(77)) {
        slots.push(slot);
        at.req_cons = at.req_cons.wrapping_add(1);
    }
    assert_eq!(slots.len(), ENTRIES_OF_FILE as usize, "no slot is lost and none is given twice");
    journal.consumed(at.req_cons);
    for slot in slots {
        journal.answered(slot);
    }
    at.rsp_prod = at.rsp_prod.wrapping_add(ENTRIES_OF_FILE);
    journal.publish(at.rsp_prod, || ());
    drop(journal);
    let (_, recovery) = Journal::resume(file, ENTRIES_OF_FILE, NAME, at.rsp_prod).expect("it was put right");
    assert!(recovery.replay.is_empty());
    true
}

fn put(file: &File, bytes: &[u8]) {
    file.set_len(bytes.len() as u64).unwrap();
    std::os::unix::fs::FileExt::write_all_at(file, bytes, 0).unwrap();
}

fn bytes_of(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    std::os::unix::fs::FileExt::read_exact_at(file, &mut bytes, 0).unwrap();
    bytes
}

#[test]
fn no_damage_to_the_file_does_harm() {
    let (file, start) = busy_file();
    let good = bytes_of(&file);
    assert_eq!(good.len() as u64, Journal::bytes(ENTRIES_OF_FILE));
    let (mut taken_up, mut refused) = (0, 0);
    for at in 0..good.len() {
        for mask in [0x01, 0x80, 0xff] {
            let mut bytes = good.clone();
            bytes[at] ^= mask;
            put(&file, &bytes);
            if survive(&file, start) { taken_up += 1 } else { refused += 1 }
        }
    }
    // What requests say is not the journal's business; what their numbers are is.
    assert!(taken_up > 1000 && refused > 300, "{taken_up} {refused}");
    for len in 0..good.len() {
        put(&file, &good[..len]);
        assert!(!survive(&file, start), "{len} bytes");
    }
    put(&file, &[&good[..], &[0]].concat());
    assert!(!survive(&file, start), "a byte too many");
}

#[test]
fn no_random_file_does_harm() {
    let (file, start) = busy_file();
    let good = bytes_of(&file);
    let mut random = SmallRng::seed_from_u64(5);
    let mut taken_up = 0;
    for round in 0..20_000_u32 {
        let mut bytes = good.clone();
        // Behind what would be refused at once: counts, then entries, of which few bits are set or all.
        let from = if round % 2 == 0 { 24 } else { HEADER_BYTES as usize };
        for word in bytes[from..].chunks_exact_mut(8) {
            let value = match round % 8 {
                0 | 1 => random.random(),
                2 | 3 => random.random_range(0..40_u64) + u64::from(start) - 10,
                4 | 5 => random.random_range(0..3),
                _ => u64::MAX - random.random_range(0..40),
            };
            word.copy_from_slice(&value.to_le_bytes());
        }
        put(&file, &bytes);
        taken_up += u32::from(survive(&file, start));
    }
    // Random numbers hardly ever agree with each other.
    assert!(taken_up < 20_000);
    let mut noise = vec![0; good.len()];
    for _ in 0..100 {
        noise.fill_with(|| random.random());
        put(&file, &noise);
        assert!(!survive(&file, start));
    }
}
