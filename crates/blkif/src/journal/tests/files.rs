//! Journal files: of this ring, of another ring, damaged, and random.

use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use mqblk_memory::create_memfd;
use mqblk_ring::blkif::RingPosition;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::{id_of, raw};
use crate::journal::{HEADER_BYTES, Journal, JournalError, Recovery};

const ENTRIES_OF_FILE: u32 = 32;
const IDENTITY: u64 = 0x1234_5678_9abc_def0;

fn empty_file() -> File {
    create_memfd("journal", 0).unwrap()
}

/// Creates a journal file with requests in flight and a batch whose publish is interrupted. Returns it and the ring's
/// index.
fn busy_file() -> (File, u32) {
    let file = empty_file();
    let start = 0_u32.wrapping_sub(7);
    let mut journal =
        Journal::create(&file, ENTRIES_OF_FILE, IDENTITY, RingPosition { req_cons: start, rsp_prod: start }).unwrap();
    let slots: Vec<_> = (1..=20).map(|id| journal.record_request(&raw(id)).unwrap()).collect();
    journal.record_consumed(start.wrapping_add(20));
    for at in [4, 9, 17, 0] {
        journal.record_response(slots[at]);
    }
    // The process is killed during the publish.
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
fn a_file_gives_the_next_process_the_open_requests() {
    for published in [false, true] {
        let (file, start) = busy_file();
        let visible = start.wrapping_add(if published { 4 } else { 0 });
        let (mut journal, recovery) = Journal::resume(&file, ENTRIES_OF_FILE, IDENTITY, visible).unwrap();
        assert_eq!(recovery.position, RingPosition { req_cons: start.wrapping_add(20), rsp_prod: visible });
        let answered = |id: &u64| published && [5, 10, 18, 1].contains(id);
        let expected: Vec<u64> = (1..=20).filter(|id| !answered(id)).collect();
        assert_eq!(ids(&recovery), expected);
        for (slot, _) in &recovery.replay {
            journal.record_response(*slot);
        }
        journal.publish(recovery.position.req_cons, || ());
        drop(journal);
        let (_, recovery) = Journal::resume(&file, ENTRIES_OF_FILE, IDENTITY, start.wrapping_add(20)).unwrap();
        assert!(recovery.replay.is_empty());
    }
}

#[test]
fn a_journal_of_another_ring_is_refused() {
    let resume =
        |file: &File, entries, name, index| Journal::resume(file, entries, name, index).map(|_| ()).unwrap_err();
    let (file, start) = busy_file();
    let text = |error: JournalError| error.to_string();
    assert!(text(resume(&file, ENTRIES_OF_FILE, IDENTITY ^ 1, start)).contains("identity: found 0x123456789abcdef0"));
    assert!(text(resume(&file, 64, IDENTITY, start)).contains("bytes"));
    assert!(text(resume(&file, 33, IDENTITY, start)).contains("ring entries"));
    // Neither the index before nor after the batch.
    for index in [start.wrapping_sub(1), start.wrapping_add(1), start.wrapping_add(5), start ^ 1 << 31] {
        assert!(matches!(resume(&file, ENTRIES_OF_FILE, IDENTITY, index), JournalError::RingIndex { .. }), "{index}");
    }
    assert!(matches!(resume(&empty_file(), ENTRIES_OF_FILE, IDENTITY, 0), JournalError::Field { field: "bytes", .. }));
}

#[test]
fn a_ring_with_unrecorded_requests_gets_no_journal() {
    let create = |entries, req_cons| {
        Journal::create(&empty_file(), entries, IDENTITY, RingPosition { req_cons, rsp_prod: 5 })
            .map(|_| ())
            .map_err(|e| e.to_string())
    };
    assert_eq!(create(32, 5), Ok(()));
    assert!(create(32, 6).unwrap_err().contains("in flight"));
    assert!(create(0, 5).is_err() && create(48, 5).is_err() && create(1024, 5).is_err());
}

#[test]
fn more_requests_than_the_ring_holds_are_refused() {
    let mut journal = Journal::create(&empty_file(), 4, IDENTITY, RingPosition::default()).unwrap();
    let slots: Vec<_> = (0..4).map(|id| journal.record_request(&raw(id)).unwrap()).collect();
    journal.record_consumed(4);
    assert_eq!(journal.record_request(&raw(9)), None);
    journal.record_response(slots[2]);
    assert_eq!(journal.record_request(&raw(9)), None, "the response is not published");
    journal.publish(1, || ());
    assert_eq!(journal.record_request(&raw(9)), Some(slots[2]));
}

/// Resumes the journal in `file`. If this succeeds, uses the journal as a queue does.
fn resume_and_use(file: &File, index: u32) -> bool {
    let Ok((mut journal, recovery)) = Journal::resume(file, ENTRIES_OF_FILE, IDENTITY, index) else { return false };
    let (mut slots, mut at) =
        (recovery.replay.into_iter().map(|(slot, _)| slot).collect::<Vec<_>>(), recovery.position);
    assert!(slots.len() <= ENTRIES_OF_FILE as usize);
    while let Some(slot) = journal.record_request(&raw(77)) {
        slots.push(slot);
        at.req_cons = at.req_cons.wrapping_add(1);
    }
    assert_eq!(slots.len(), ENTRIES_OF_FILE as usize, "no slot is lost and none is given twice");
    journal.record_consumed(at.req_cons);
    for slot in slots {
        journal.record_response(slot);
    }
    at.rsp_prod = at.rsp_prod.wrapping_add(ENTRIES_OF_FILE);
    journal.publish(at.rsp_prod, || ());
    drop(journal);
    let (_, recovery) = Journal::resume(file, ENTRIES_OF_FILE, IDENTITY, at.rsp_prod).expect("it was repaired");
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
    assert_eq!(good.len() as u64, Journal::file_len(ENTRIES_OF_FILE));
    let (mut resumed, mut refused) = (0, 0);
    for at in 0..good.len() {
        for mask in [0x01, 0x80, 0xff] {
            let mut bytes = good.clone();
            bytes[at] ^= mask;
            put(&file, &bytes);
            if resume_and_use(&file, start) { resumed += 1 } else { refused += 1 }
        }
    }
    // The journal checks the numbers of requests, not their content.
    assert!(resumed > 1000 && refused > 300, "{resumed} {refused}");
    for len in 0..good.len() {
        put(&file, &good[..len]);
        assert!(!resume_and_use(&file, start), "{len} bytes");
    }
    put(&file, &[&good[..], &[0]].concat());
    assert!(!resume_and_use(&file, start), "a byte too many");
}

#[test]
fn no_random_file_does_harm() {
    let (file, start) = busy_file();
    let good = bytes_of(&file);
    let mut random = SmallRng::seed_from_u64(5);
    let mut resumed = 0;
    for round in 0..20_000_u32 {
        let mut bytes = good.clone();
        // Past the fields that would be refused at once: counts, then entries, with few or all bits set.
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
        resumed += u32::from(resume_and_use(&file, start));
    }
    // Random numbers are rarely consistent.
    assert!(resumed < 20_000);
    let mut noise = vec![0; good.len()];
    for _ in 0..100 {
        noise.fill_with(|| random.random());
        put(&file, &noise);
        assert!(!resume_and_use(&file, start));
    }
}
