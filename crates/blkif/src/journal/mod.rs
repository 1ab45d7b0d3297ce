//! A ring's journal: records the requests that are taken off the ring and have no published response, in a file that
//! outlives the process. Responses are out of order and overwrite the ring entries of requests, so the ring alone does
//! not hold this information.
//!
//! The journal survives a kill of the process at any store, not a loss of power: the next process that opens the file
//! sees all stores. Writing it costs copies and stores, no system call.

mod error;
mod records;

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{Ordering, compiler_fence};

use mqblk_memory::{GuestAddress, GuestMemory, Region, SharedArray, UserAddress, zero_file};
use mqblk_ring::blkif::{RawRequest, RingPosition};

use records::{ENTRIES, ENTRY_WORDS, HEADER_WORDS, IDENTITY, JournalMemory, JournalRecords, MAGIC};

pub use error::JournalError;
pub use records::JournalSlot;

/// `mqblkjr` and the version of the file format.
const MAGIC_VALUE: u64 = u64::from_le_bytes(*b"mqblkjr\x01");
/// Maximum of entries of a ring: page order 4.
const MAX_ENTRIES: u32 = 512;
const WORD_BYTES: u64 = 8;
const HEADER_BYTES: u64 = HEADER_WORDS as u64 * WORD_BYTES;

/// The result of a recovery.
#[derive(Debug)]
pub struct Recovery {
    /// Position at which the ring is resumed.
    pub position: RingPosition,
    /// Requests that were consumed and have no published response, in the order of consumption. They are validated
    /// again, and executed before those in the ring.
    pub replay: Vec<(JournalSlot, RawRequest)>,
}

/// A journal file, mapped to memory.
#[derive(Debug)]
struct MappedJournal {
    header: SharedArray<u64>,
    /// The words of all entries.
    words: SharedArray<u64>,
    entries: SharedArray<[u64; ENTRY_WORDS]>,
}

impl JournalMemory for MappedJournal {
    fn header(&self, word: usize) -> u64 {
        self.header.get(word)
    }

    #[inline]
    fn set_header(&mut self, word: usize, value: u64) {
        self.header.set(word, value);
    }

    fn entry(&self, slot: u16, word: usize) -> u64 {
        self.words.get(usize::from(slot) * ENTRY_WORDS + word)
    }

    #[inline]
    fn set_entry(&mut self, slot: u16, word: usize, value: u64) {
        self.words.set(usize::from(slot) * ENTRY_WORDS + word, value);
    }

    #[inline]
    fn write_entry(&mut self, slot: u16, words: &[u64; ENTRY_WORDS]) {
        self.entries.set(slot.into(), *words);
    }
}

impl MappedJournal {
    fn from_file(file: &File, slots: u16) -> io::Result<MappedJournal> {
        let len = Journal::file_len(slots.into());
        let region = Region::from_file(file, 0, len, GuestAddress(0), UserAddress(0)).map_err(io::Error::other)?;
        let memory = GuestMemory::new(vec![Arc::new(region)]).map_err(io::Error::other)?;
        let (first, count) = (GuestAddress(HEADER_BYTES), slots.into());
        let map_parts = || {
            let header = memory.shared_array(GuestAddress(0), HEADER_WORDS)?;
            let words = memory.shared_array(first, ENTRY_WORDS * count)?;
            Some(MappedJournal { header, words, entries: memory.shared_array(first, count)? })
        };
        map_parts().ok_or(io::ErrorKind::InvalidInput.into())
    }
}

/// The journal of one ring.
///
/// For each batch of requests: call [`record_request`](Self::record_request) for each and
/// [`record_consumed`](Self::record_consumed) once, then execute them. For each batch of responses: put each on the
/// ring and call [`record_response`](Self::record_response), then [`publish`](Self::publish). Every request and every
/// response of the ring is recorded.
#[derive(Debug)]
pub struct Journal(JournalRecords<MappedJournal>);

impl Journal {
    /// Returns the length of the file for a ring of `entries` entries (a power of two, at most 512).
    pub fn file_len(entries: u32) -> u64 {
        HEADER_BYTES + u64::from(entries) * ENTRY_WORDS as u64 * WORD_BYTES
    }

    /// Creates the journal of a ring without requests in flight, and overwrites the file. [`resume`](Self::resume)
    /// needs the same `identity`, which distinguishes rings.
    ///
    /// # Errors
    /// When the position has requests in flight, the number of entries is invalid, or a system call fails.
    pub fn create(file: &File, entries: u32, identity: u64, position: RingPosition) -> io::Result<Journal> {
        let invalid = |text: String| io::Error::new(io::ErrorKind::InvalidInput, text);
        let slots = slot_count(entries).ok_or_else(|| invalid(format!("journal: a ring of {entries} entries")))?;
        if position.req_cons != position.rsp_prod {
            return Err(invalid(format!("journal: requests are in flight at {position:?}")));
        }
        zero_file(file, Journal::file_len(entries))?;
        let mut words = MappedJournal::from_file(file, slots)?;
        words.set_header(ENTRIES, entries.into());
        words.set_header(IDENTITY, identity);
        let mut records = JournalRecords::create(words, slots, position);
        compiler_fence(Ordering::Release);
        records.words().set_header(MAGIC, MAGIC_VALUE);
        Ok(Journal(records))
    }

    /// Resumes the journal of a ring that an earlier process served. `published`: the ring's current response index.
    /// Replayed requests keep their journal slots.
    ///
    /// # Errors
    /// When the file is not a consistent journal of this ring. The file is unchanged then.
    pub fn resume(
        file: &File,
        entries: u32,
        identity: u64,
        published: u32,
    ) -> Result<(Journal, Recovery), JournalError> {
        let field = |field, found, expected| match found == expected {
            true => Ok(()),
            false => Err(JournalError::Field { field, found, expected }),
        };
        let Some(slots) = slot_count(entries) else {
            return Err(JournalError::Field {
                field: "ring entries",
                found: entries.into(),
                expected: MAX_ENTRIES.into(),
            });
        };
        field("bytes", file.metadata()?.len(), Journal::file_len(entries))?;
        let words = MappedJournal::from_file(file, slots)?;
        field("magic", words.header(MAGIC), MAGIC_VALUE)?;
        field("ring entries", words.header(ENTRIES), entries.into())?;
        field("identity", words.header(IDENTITY), identity)?;
        let (records, replay) = JournalRecords::recover(words, slots, published)?;
        let position = records.position();
        Ok((Journal(records), Recovery { position, replay }))
    }

    /// Records a request that was copied off the ring. `None` when more requests have no published response than the
    /// ring has entries, which only a frontend that violates the protocol can cause.
    #[inline]
    #[must_use]
    pub fn record_request(&mut self, raw: &RawRequest) -> Option<JournalSlot> {
        self.0.record_request(raw)
    }

    /// Records that the ring's requests up to `req_cons` are consumed. Called once per batch, before any of it is
    /// executed: until then the ring itself holds the requests.
    #[inline]
    pub fn record_consumed(&mut self, req_cons: u32) {
        self.0.record_consumed(req_cons);
    }

    /// Records that a request's response is on the ring, not published yet.
    #[inline]
    pub fn record_response(&mut self, slot: JournalSlot) {
        self.0.record_response(slot);
    }

    /// Calls `store_index`, which sets the ring's response index to `rsp_prod` and so publishes all recorded responses.
    #[inline]
    pub fn publish<R>(&mut self, rsp_prod: u32, store_index: impl FnOnce() -> R) -> R {
        self.0.publish(rsp_prod, store_index)
    }
}

/// Returns the number of slots of a journal for a ring of `entries` entries.
fn slot_count(entries: u32) -> Option<u16> {
    (entries.is_power_of_two() && entries <= MAX_ENTRIES).then_some(entries as u16)
}

#[cfg(test)]
mod tests;
