//! The in-flight table of a split ring: a backend that takes, steps, links and publishes chains, is killed between any
//! two calls, and is resumed; and tables of other programs. The oracle knows the chains in flight, their order and
//! their steps.

use std::fs::File;
use std::os::unix::fs::FileExt;

use arbitrary::{Result, Unstructured};
use mqblk_memory::{GuestAddress, GuestMemory, Region, SharedWords};
use mqblk_ring::split::{InflightError, InflightTable, Replay};

/// Bytes before the table: as in a region with several queues.
const OFFSET: u64 = 64;

struct Memory {
    memory: GuestMemory,
    words: usize,
    file: File,
}

impl Memory {
    fn new(size: u16) -> Memory {
        let bytes = InflightTable::bytes(size);
        let (region, file) = Region::shared("inflight", OFFSET + bytes, GuestAddress(0)).expect("a memfd");
        let memory = GuestMemory::default().with_region(region).expect("one region");
        Memory { memory, words: bytes as usize / 8, file }
    }

    fn words(&self) -> SharedWords {
        self.memory.shared_words(GuestAddress(OFFSET), self.words).expect("inside the region")
    }

    fn content(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.words * 8];
        self.file.read_exact_at(&mut bytes, OFFSET).expect("the table");
        bytes
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        self.file.write_all_at(bytes, OFFSET + at).expect("a memfd");
    }
}

/// A backend and its expected state.
struct State {
    table: InflightTable,
    /// Chains in flight, in the order in which they were taken.
    taken: Vec<Replay>,
    /// Completed, but not visible to the guest yet.
    linked: Vec<u16>,
    /// The ring's used index.
    used: u16,
}

impl State {
    fn open(memory: &Memory, size: u16, used: u16) -> State {
        let (table, recovered) = InflightTable::open(memory.words(), size, used).expect("an unused table");
        assert_eq!(recovered, Default::default());
        State { table, taken: vec![], linked: vec![], used }
    }

    /// Drops the backend, resumes, and checks the chains to replay.
    fn resume(self, memory: &Memory, size: u16) -> State {
        let State { table, taken, used, .. } = self;
        drop(table);
        let (table, recovered) = InflightTable::open(memory.words(), size, used).expect("a table of ours");
        assert_eq!(recovered.replays, taken, "chains in flight, in the order in which they were taken");
        assert_eq!(recovered.next_avail, Some(used.wrapping_add(taken.len() as u16)));
        assert_eq!(recovered.discarded, 0);
        State { table, taken, linked: vec![], used }
    }

    /// Publishes the linked chains. `killed` is the one of the three steps before which the backend ends.
    fn publish(mut self, memory: &Memory, size: u16, killed: usize) -> State {
        if killed == 0 {
            return self.resume(memory, size);
        }
        self.table.before_publish();
        if killed == 1 {
            return self.resume(memory, size);
        }
        self.used = self.used.wrapping_add(self.linked.len() as u16);
        let linked = std::mem::take(&mut self.linked);
        self.taken.retain(|chain| !linked.contains(&chain.head));
        if killed == 2 {
            return self.resume(memory, size);
        }
        self.table.after_publish(self.used);
        self
    }
}

/// Writes another value to a field of the header, expects the error that names it and an unchanged table, and repairs
/// it.
fn damage(u: &mut Unstructured<'_>, memory: &Memory, size: u16, used: u16) -> Result<()> {
    let before = memory.content();
    let (at, len, name, own) = if u.arbitrary()? { (0, 8, "features", 0) } else { (8, 2, "version", 1) };
    let mut value = vec![0; len];
    value[u.choose_index(len)?] = u.int_in_range(2..=255)?;
    memory.put(at, &value);
    let damaged = memory.content();
    let error = InflightTable::open(memory.words(), size, used).expect_err("another program's table");
    value.resize(8, 0);
    let found = u64::from_le_bytes(value.try_into().expect("8 bytes"));
    assert_eq!(error, InflightError::Header { field: name, found, expected: own });
    assert_eq!(memory.content(), damaged, "a table that is refused is unchanged");
    memory.put(0, &before);
    Ok(())
}

/// Opens the table for a guest that has reset its ring: it is unused again.
fn reset(u: &mut Unstructured<'_>, state: State, memory: &Memory, size: u16) -> Result<State> {
    let in_flight = state.taken.len();
    let away = u.int_in_range(size + 1..=u16::MAX)?;
    let used = state.used.wrapping_add(away);
    drop(state);
    let (table, recovered) = InflightTable::open(memory.words(), size, used).expect("a table of before");
    assert_eq!((recovered.next_avail, recovered.replays.len()), (None, 0), "nothing of before the reset is replayed");
    assert_eq!(recovered.discarded, in_flight);
    Ok(State { table, taken: vec![], linked: vec![], used })
}

/// Opens a table of any content, as a hostile VMM may set it.
fn any_content(u: &mut Unstructured<'_>, size: u16) -> Result<()> {
    let memory = Memory::new(size);
    let mut bytes = memory.content();
    u.fill_buffer(&mut bytes)?;
    if u.ratio(7, 8)? {
        bytes[..8].fill(0);
        bytes[8..12].copy_from_slice(&[1, 0, size as u8, 0]);
    }
    memory.put(0, &bytes);
    let used = u.arbitrary()?;
    let Ok((mut table, recovered)) = InflightTable::open(memory.words(), size, used) else { return Ok(()) };
    let mut heads: Vec<u16> = recovered.replays.iter().map(|replay| replay.head).collect();
    heads.sort_unstable();
    heads.dedup();
    assert_eq!(heads.len(), recovered.replays.len(), "each chain once");
    assert!(heads.iter().all(|head| *head < size), "heads of the ring");
    // It is served with any links.
    heads.iter().for_each(|head| table.link_used(*head));
    table.before_publish();
    table.after_publish(used.wrapping_add(heads.len() as u16));
    Ok(())
}

fn run(u: &mut Unstructured<'_>) -> Result<()> {
    let size: u16 = 1 << u.int_in_range(1..=6)?;
    let start: u16 = if u.ratio(1, 4)? { u16::MAX - u.int_in_range(0..=40)? } else { u.int_in_range(0..=40)? };
    let memory = Memory::new(size);
    let mut state = State::open(&memory, size, start);
    for _ in 0..300 {
        if u.is_empty() {
            break;
        }
        match u.int_in_range(0..=12)? {
            0..=4 => {
                let head = u.int_in_range(0..=size - 1)?;
                if state.taken.iter().all(|chain| chain.head != head) {
                    state.table.mark_in_flight(head);
                    state.taken.push(Replay { head, step: 0 });
                }
            }
            5 => {
                let State { table, taken, linked, .. } = &mut state;
                if let Some(chain) = taken.iter_mut().find(|chain| !linked.contains(&chain.head)) {
                    chain.step = u.arbitrary()?;
                    table.record_step(chain.head, chain.step);
                }
            }
            6..=8 => {
                let State { table, taken, linked, .. } = &mut state;
                let open: Vec<u16> =
                    taken.iter().map(|chain| chain.head).filter(|head| !linked.contains(head)).collect();
                if !open.is_empty() {
                    let head = *u.choose(&open)?;
                    table.link_used(head);
                    linked.push(head);
                }
            }
            9 => state = state.publish(&memory, size, 3),
            10 => state = state.publish(&memory, size, u.int_in_range(0..=3)?),
            11 => damage(u, &memory, size, state.used)?,
            _ if u.ratio(1, 8)? => state = reset(u, state, &memory, size)?,
            _ => state = state.resume(&memory, size),
        }
    }
    state.resume(&memory, size);
    any_content(u, size)
}

/// Runs the target.
///
/// # Panics
/// When the table violates its contract.
pub fn target(data: &[u8]) {
    // Input that ends early ends the run.
    let _ = run(&mut Unstructured::new(data));
}
