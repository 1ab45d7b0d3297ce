//! The journal of a Xen ring: a backend that records, is killed between any two calls, and is resumed; and an
//! overwritten header. The oracle knows the requests without a visible response, their order, and the field that an
//! error must name.

use std::fs::File;
use std::os::unix::fs::FileExt;

use arbitrary::{Result, Unstructured};
use mqblk_blkif::journal::{Journal, JournalSlot};
use mqblk_memory::create_memfd;
use mqblk_ring::blkif::{RawRequest, RingPosition};

const IDENTITY: u64 = 0x6d71;

/// A recorded request.
struct Recorded {
    raw: RawRequest,
    slot: JournalSlot,
}

/// The expected state of the ring and its journal.
struct State {
    journal: Journal,
    position: RingPosition,
    /// Requests without a response, in order.
    open: Vec<Recorded>,
    /// Requests with a response that is not visible yet.
    unpublished: Vec<(u32, Recorded)>,
}

fn content(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.metadata().expect("a file").len() as usize];
    file.read_exact_at(&mut bytes, 0).expect("its bytes");
    bytes
}

fn raw(number: u64) -> RawRequest {
    let mut bytes = [0; 112];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = (number as u8).wrapping_mul(31).wrapping_add(at as u8);
    }
    bytes[8..16].copy_from_slice(&number.to_le_bytes());
    RawRequest::from_bytes(bytes)
}

/// Damages one field of the header, expects the error that names it and an unchanged file, and repairs it.
fn damage(u: &mut Unstructured<'_>, file: &File, entries: u32, published: u32) -> Result<()> {
    let (word, name) = [(0, "magic"), (1, "ring entries"), (2, "identity")][u.choose_index(3)?];
    let before = content(file);
    let bit = u.int_in_range(0..=63)?;
    let mut value = before[word * 8..word * 8 + 8].to_vec();
    value[bit / 8] ^= 1 << (bit % 8);
    file.write_all_at(&value, word as u64 * 8).expect("a memfd");
    let damaged = content(file);
    let error = Journal::resume(file, entries, IDENTITY, published).expect_err("a damaged header is refused");
    let error = error.to_string();
    assert!(error.starts_with(&format!("journal: {name}: found ")), "{error}, expected one that names {name}");
    assert_eq!(content(file), damaged, "a journal that is refused is unchanged");
    file.write_all_at(&before, 0).expect("a memfd");
    Ok(())
}

/// Resumes the journal and checks the requests to replay.
fn resume(file: &File, entries: u32, state: State) -> State {
    let State { journal, position, open, unpublished } = state;
    drop(journal);
    // A request with an invisible response is replayed, in its place.
    let mut expected: Vec<u64> = open.iter().map(|recorded| id(&recorded.raw)).collect();
    expected.extend(unpublished.iter().map(|(_, recorded)| id(&recorded.raw)));
    expected.sort_unstable();
    let published = position.rsp_prod.wrapping_sub(unpublished.len() as u32);
    let (journal, recovery) = Journal::resume(file, entries, IDENTITY, published).expect("a journal that was killed");
    let found: Vec<u64> = recovery.replay.iter().map(|(_, raw)| id(raw)).collect();
    assert_eq!(found, expected, "requests without a visible response, in their order");
    for (_, found) in &recovery.replay {
        assert_eq!(*found, raw(id(found)), "a replayed request is as it was");
    }
    assert_eq!(recovery.position, RingPosition { rsp_prod: published, ..position });
    let open = recovery.replay.into_iter().map(|(slot, raw)| Recorded { raw, slot }).collect();
    State { journal, position: recovery.position, open, unpublished: vec![] }
}

fn id(raw: &RawRequest) -> u64 {
    let bytes = raw.bytes();
    u64::from_le_bytes(std::array::from_fn(|at| bytes[8 + at]))
}

fn run(u: &mut Unstructured<'_>) -> Result<()> {
    let entries = 1 << u.int_in_range(0..=5)?;
    let start: u32 = if u.ratio(1, 4)? { u32::MAX - u.int_in_range(0..=40)? } else { u.int_in_range(0..=40)? };
    let position = RingPosition { req_cons: start, rsp_prod: start };
    let file = create_memfd("journal", 0).expect("a memfd");
    let journal = Journal::create(&file, entries, IDENTITY, position).expect("a journal");
    let mut state = State { journal, position, open: vec![], unpublished: vec![] };
    let mut number = 0;
    for _ in 0..200 {
        if u.is_empty() {
            break;
        }
        match u.int_in_range(0..=9)? {
            0..=3 => {
                let count = u.int_in_range(1..=4)?;
                for _ in 0..count {
                    let request = raw(number);
                    let full = state.open.len() + state.unpublished.len() == entries as usize;
                    let slot = state.journal.record_request(&request);
                    assert_eq!(slot.is_none(), full, "a slot for each entry of the ring");
                    let Some(slot) = slot else { break };
                    state.open.push(Recorded { raw: request, slot });
                    state.position.req_cons = state.position.req_cons.wrapping_add(1);
                    number += 1;
                }
                state.journal.record_consumed(state.position.req_cons);
            }
            4..=6 if !state.open.is_empty() => {
                let recorded = state.open.remove(u.choose_index(state.open.len())?);
                state.journal.record_response(recorded.slot);
                state.position.rsp_prod = state.position.rsp_prod.wrapping_add(1);
                state.unpublished.push((state.position.rsp_prod, recorded));
            }
            7 => {
                state.journal.publish(state.position.rsp_prod, || ());
                state.unpublished.clear();
            }
            8 => {
                let published = state.position.rsp_prod.wrapping_sub(state.unpublished.len() as u32);
                damage(u, &file, entries, published)?;
            }
            _ => state = resume(&file, entries, state),
        }
    }
    resume(&file, entries, state);
    Ok(())
}

/// Runs the target.
///
/// # Panics
/// When the journal violates its contract.
pub fn target(data: &[u8]) {
    // Input that ends early ends the run.
    let _ = run(&mut Unstructured::new(data));
}
