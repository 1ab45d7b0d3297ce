//! The records of a journal, the order in which they are stored, and their recovery after any of these stores was the
//! last.
//!
//! Requests and responses are numbered from the ring's first; the low 32 bits of a count are the ring's index. An entry
//! holds a request, the number of the request and the number of its response, from 1. Three counts determine which
//! entries are valid:
//!
//! * CONSUMED: an entry whose request has a higher number is invalid: the ring still holds that request;
//! * PUBLISHED: an entry whose response has this number or a lower one is invalid: that response is visible to the
//!   frontend;
//! * PUBLISHING: equal to PUBLISHED, or the value that PUBLISHED gets in the publish in progress. The ring's index
//!   shows if that publish has taken effect: its one store publishes all responses of a batch.
//!
//! All other entries are requests without a response. Each step is one store; an entry is filled only while it is
//! invalid.
//!
//! ```text
//! record_request:   number, response = 0, request    the request's number is above CONSUMED
//! record_consumed:  CONSUMED                         all requests of the batch are recorded: they may be executed
//! record_response:  response                         above PUBLISHED
//! publish:          PUBLISHING                       the ring's index is unchanged
//!                   (rsp_prod, in the ring)          the responses of the batch are visible
//!                   PUBLISHED = PUBLISHING           entries of the batch may be reused
//! ```

use std::sync::atomic::{Ordering, compiler_fence};

use mqblk_ring::blkif::{RawRequest, RingPosition};

use super::error::JournalError;

/// Words of a request.
const REQUEST_WORDS: usize = size_of::<RawRequest>() / 8;
/// Words of an entry.
pub(super) const ENTRY_WORDS: usize = 2 + REQUEST_WORDS;
pub(super) const REQUEST_NUMBER: usize = 0;
pub(super) const RESPONSE_NUMBER: usize = 1;

/// Words of the header, before the entries.
pub(super) const HEADER_WORDS: usize = 16;
pub(super) const MAGIC: usize = 0;
pub(super) const ENTRIES: usize = 1;
pub(super) const IDENTITY: usize = 2;
pub(super) const CONSUMED: usize = 8;
pub(super) const PUBLISHING: usize = 9;
pub(super) const PUBLISHED: usize = 10;

/// No ring reaches this count: at ten million requests a second it takes 14,000 years.
const MAX_COUNT: u64 = 1 << 62;

/// Slot of a request in the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JournalSlot(u16);

/// Requests without a response, and their slots.
pub(super) type OpenRequests = Vec<(JournalSlot, RawRequest)>;

/// The memory of a journal. Words are read and stored one at a time; stores keep their order.
pub(super) trait JournalMemory {
    /// Reads a word of the header.
    fn header(&self, word: usize) -> u64;

    /// Stores a word of the header.
    fn set_header(&mut self, word: usize, value: u64);

    /// Reads a word of an entry.
    fn entry(&self, slot: u16, word: usize) -> u64;

    /// Stores a word of an entry.
    fn set_entry(&mut self, slot: u16, word: usize, value: u64);

    /// Stores all words of an entry, in any order among themselves.
    fn write_entry(&mut self, slot: u16, words: &[u64; ENTRY_WORDS]);
}

/// The records of one ring, in memory `W`.
#[derive(Debug)]
pub(super) struct JournalRecords<W> {
    words: W,
    /// Number of requests recorded.
    requests_recorded: u64,
    /// Number of responses recorded.
    responses_recorded: u64,
    /// Slots with invalid entries.
    free_slots: Vec<u16>,
    /// Slots whose responses are recorded and not published.
    unpublished: Vec<u16>,
}

/// Returns the count with these low bits: `from` or at most 2^32 - 1 more.
fn extend_index(index: u32, from: u64) -> u64 {
    from + u64::from(index.wrapping_sub(from as u32))
}

impl<W: JournalMemory> JournalRecords<W> {
    /// Creates the records of a ring without requests in flight. All words are 0.
    pub(super) fn create(mut words: W, entries: u16, position: RingPosition) -> JournalRecords<W> {
        let count = u64::from(position.rsp_prod);
        for word in [CONSUMED, PUBLISHING, PUBLISHED] {
            words.set_header(word, count);
        }
        JournalRecords::with_counts(words, entries, count, count)
    }

    fn with_counts(words: W, entries: u16, requests_recorded: u64, responses_recorded: u64) -> JournalRecords<W> {
        let unpublished = Vec::with_capacity(entries.into());
        JournalRecords {
            words,
            requests_recorded,
            responses_recorded,
            free_slots: (0..entries).rev().collect(),
            unpublished,
        }
    }

    /// Recovers the records, and the requests without a response in the order of their numbers. `index`: the ring's
    /// `rsp_prod`.
    pub(super) fn recover(
        mut words: W,
        entries: u16,
        index: u32,
    ) -> Result<(JournalRecords<W>, OpenRequests), JournalError> {
        let [consumed, publishing, published] = [CONSUMED, PUBLISHING, PUBLISHED].map(|word| words.header(word));
        let ordered = published <= publishing && publishing <= consumed && consumed < MAX_COUNT;
        if !ordered || consumed - published > entries.into() {
            return Err(JournalError::Counts { consumed, publishing, published });
        }
        let put = extend_index(index, published);
        if put != published && put != publishing {
            return Err(JournalError::RingIndex {
                found: index,
                published: published as u32,
                publishing: publishing as u32,
            });
        }
        let number = |slot: u16| words.entry(slot, REQUEST_NUMBER);
        let is_open = |slot: &u16| {
            (1..=consumed).contains(&number(*slot)) && !(1..=put).contains(&words.entry(*slot, RESPONSE_NUMBER))
        };
        let mut open: Vec<u16> = (0..entries).filter(is_open).collect();
        open.sort_unstable_by_key(|slot| number(*slot));
        let duplicate = open.windows(2).any(|pair| number(pair[0]) == number(pair[1]));
        if duplicate || open.len() as u64 != consumed - put {
            return Err(JournalError::Entries { found: open.len(), expected: consumed - put });
        }
        // From here on the journal is changed; each store leaves it recoverable.
        words.set_header(PUBLISHED, put);
        let mut records = JournalRecords::with_counts(words, entries, consumed, put);
        records.free_slots.retain(|slot| !open.contains(slot));
        for slot in &records.free_slots {
            // Numbers above CONSUMED are reused.
            records.words.set_entry(*slot, REQUEST_NUMBER, 0);
        }
        for slot in &open {
            // So are the numbers of responses that were not published.
            records.words.set_entry(*slot, RESPONSE_NUMBER, 0);
        }
        let replay = open.into_iter().map(|slot| (JournalSlot(slot), records.request(slot))).collect();
        Ok((records, replay))
    }

    fn request(&self, slot: u16) -> RawRequest {
        let mut bytes = [0; size_of::<RawRequest>()];
        for (word, bytes) in bytes.chunks_exact_mut(8).enumerate() {
            bytes.copy_from_slice(&self.words.entry(slot, 2 + word).to_ne_bytes());
        }
        RawRequest::from_bytes(bytes)
    }

    pub(super) fn position(&self) -> RingPosition {
        RingPosition { req_cons: self.requests_recorded as u32, rsp_prod: self.responses_recorded as u32 }
    }

    #[inline]
    pub(super) fn record_request(&mut self, raw: &RawRequest) -> Option<JournalSlot> {
        let slot = self.free_slots.pop()?;
        self.requests_recorded += 1;
        let mut words = [0; ENTRY_WORDS];
        words[REQUEST_NUMBER] = self.requests_recorded;
        for (word, bytes) in words[2..].iter_mut().zip(raw.bytes().as_chunks::<8>().0) {
            *word = u64::from_ne_bytes(*bytes);
        }
        // The number comes first: it makes the entry invalid with any other content.
        self.words.set_entry(slot, REQUEST_NUMBER, self.requests_recorded);
        compiler_fence(Ordering::Release);
        self.words.write_entry(slot, &words);
        Some(JournalSlot(slot))
    }

    #[inline]
    pub(super) fn record_consumed(&mut self, req_cons: u32) {
        debug_assert_eq!(self.requests_recorded as u32, req_cons, "every consumed request is recorded");
        compiler_fence(Ordering::Release);
        self.words.set_header(CONSUMED, self.requests_recorded);
        compiler_fence(Ordering::SeqCst);
    }

    #[inline]
    pub(super) fn record_response(&mut self, slot: JournalSlot) {
        self.responses_recorded += 1;
        self.words.set_entry(slot.0, RESPONSE_NUMBER, self.responses_recorded);
        self.unpublished.push(slot.0);
    }

    #[inline]
    pub(super) fn publish<R>(&mut self, rsp_prod: u32, store_index: impl FnOnce() -> R) -> R {
        debug_assert_eq!(self.responses_recorded as u32, rsp_prod, "every response on the ring is recorded");
        compiler_fence(Ordering::Release);
        self.words.set_header(PUBLISHING, self.responses_recorded);
        compiler_fence(Ordering::SeqCst);
        let result = store_index();
        compiler_fence(Ordering::SeqCst);
        self.words.set_header(PUBLISHED, self.responses_recorded);
        compiler_fence(Ordering::SeqCst);
        self.free_slots.append(&mut self.unpublished);
        result
    }

    pub(super) fn words(&mut self) -> &mut W {
        &mut self.words
    }
}
