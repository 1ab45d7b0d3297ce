//! What a journal writes, in which order, and what can be read out of it after any of these stores was the last.
//!
//! Requests and responses are counted from the ring's first; the low 32 bits of a count are the ring's index. An entry holds a request
//! with its number and that of its response, from 1. Three counts tell what the entries mean:
//!
//! * CONSUMED: an entry whose request has a higher number means nothing: the ring still has that request;
//! * PUBLISHED: an entry whose response has this number or a lower one means nothing: the frontend sees that response;
//! * PUBLISHING: equal to PUBLISHED, or what it becomes with the store of the ring's index that comes next or was the last. The
//!   index itself tells which, and so that one store is what answers all requests of a batch at once.
//!
//! All others are requests without a response. Each step is one store; those that fill an entry come while it means nothing.
//!
//! ```text
//! take:       number, response = 0, request      the request's number is above CONSUMED
//! consumed:   CONSUMED                           all requests of the batch have their entries: they may be acted on
//! answered:   response                           above PUBLISHED
//! publish:    PUBLISHING                         the ring's index is as it was
//!             (rsp_prod, in the ring)            the batch is answered
//!             PUBLISHED = PUBLISHING             entries of the batch may be filled again
//! ```

use std::sync::atomic::{Ordering, compiler_fence};

use mqblk_ring::blkif::{RawRequest, RingPosition};

use super::{JournalError, JournalSlot};

/// Words of a request.
const REQUEST_WORDS: usize = size_of::<RawRequest>() / 8;
/// Words of an entry.
pub(super) const ENTRY_WORDS: usize = 2 + REQUEST_WORDS;
pub(super) const NUMBER: usize = 0;
pub(super) const RESPONSE: usize = 1;

/// Words of the header, before the entries.
pub(super) const HEADER_WORDS: usize = 16;
pub(super) const MAGIC: usize = 0;
pub(super) const ENTRIES: usize = 1;
pub(super) const IDENTITY: usize = 2;
pub(super) const CONSUMED: usize = 8;
pub(super) const PUBLISHING: usize = 9;
pub(super) const PUBLISHED: usize = 10;

/// Counts beyond this are not from a ring: at ten million requests a second they are 14,000 years away.
const MOST: u64 = 1 << 62;

/// Requests without a response, and where they are.
pub(super) type Unanswered = Vec<(JournalSlot, RawRequest)>;

/// The journal's memory. Words are read and stored one at a time; stores stay in the order in which they are made.
pub(super) trait Words {
    /// A word of the header.
    fn header(&self, word: usize) -> u64;

    /// Stores a word of the header.
    fn set_header(&mut self, word: usize, value: u64);

    /// A word of an entry.
    fn entry(&self, slot: u16, word: usize) -> u64;

    /// Stores a word of an entry.
    fn set_entry(&mut self, slot: u16, word: usize, value: u64);

    /// Stores all words of an entry, in any order among themselves.
    fn fill(&mut self, slot: u16, words: &[u64; ENTRY_WORDS]);
}

#[derive(Debug)]
pub(super) struct Book<W> {
    words: W,
    /// Requests taken.
    taken: u64,
    /// Responses put.
    put: u64,
    /// Slots whose entries mean nothing.
    free: Vec<u16>,
    /// Slots whose responses were put and not published.
    answered: Vec<u16>,
}

/// The count with these low bits, `from` or at most 2^32 - 1 more.
fn count_of(index: u32, from: u64) -> u64 {
    from + u64::from(index.wrapping_sub(from as u32))
}

impl<W: Words> Book<W> {
    /// A book of a ring without a request in flight. The words are all 0.
    pub(super) fn begin(mut words: W, entries: u16, position: RingPosition) -> Book<W> {
        let count = u64::from(position.rsp_prod);
        for word in [CONSUMED, PUBLISHING, PUBLISHED] {
            words.set_header(word, count);
        }
        Book::at_rest(words, entries, count, count)
    }

    fn at_rest(words: W, entries: u16, taken: u64, put: u64) -> Book<W> {
        let answered = Vec::with_capacity(entries.into());
        Book { words, taken, put, free: (0..entries).rev().collect(), answered }
    }

    /// The book as it was left, and the requests without a response, by their number. `index` is the ring's `rsp_prod`.
    pub(super) fn take_up(mut words: W, entries: u16, index: u32) -> Result<(Book<W>, Unanswered), JournalError> {
        let [consumed, publishing, published] = [CONSUMED, PUBLISHING, PUBLISHED].map(|word| words.header(word));
        let ordered = published <= publishing && publishing <= consumed && consumed < MOST;
        if !ordered || consumed - published > entries.into() {
            return Err(JournalError::Counts { consumed, publishing, published });
        }
        let put = count_of(index, published);
        if put != published && put != publishing {
            return Err(JournalError::Ring {
                found: index,
                published: published as u32,
                publishing: publishing as u32,
            });
        }
        let number = |slot: u16| words.entry(slot, NUMBER);
        let waits =
            |slot: &u16| (1..=consumed).contains(&number(*slot)) && !(1..=put).contains(&words.entry(*slot, RESPONSE));
        let mut open: Vec<u16> = (0..entries).filter(waits).collect();
        open.sort_unstable_by_key(|slot| number(*slot));
        let twice = open.windows(2).any(|pair| number(pair[0]) == number(pair[1]));
        if twice || open.len() as u64 != consumed - put {
            return Err(JournalError::Entries { found: open.len(), expected: consumed - put });
        }
        // From here on the journal is changed, each store of which leaves it as good as it was.
        words.set_header(PUBLISHED, put);
        let mut book = Book::at_rest(words, entries, consumed, put);
        book.free.retain(|slot| !open.contains(slot));
        for slot in &book.free {
            // Numbers above CONSUMED are given again.
            book.words.set_entry(*slot, NUMBER, 0);
        }
        for slot in &open {
            // So are those of responses that were put and not published.
            book.words.set_entry(*slot, RESPONSE, 0);
        }
        let replay = open.into_iter().map(|slot| (JournalSlot(slot), book.request(slot))).collect();
        Ok((book, replay))
    }

    fn request(&self, slot: u16) -> RawRequest {
        let mut bytes = [0; size_of::<RawRequest>()];
        for (word, place) in bytes.chunks_exact_mut(8).enumerate() {
            place.copy_from_slice(&self.words.entry(slot, 2 + word).to_ne_bytes());
        }
        RawRequest::from_bytes(bytes)
    }

    pub(super) fn position(&self) -> RingPosition {
        RingPosition { req_cons: self.taken as u32, rsp_prod: self.put as u32 }
    }

    #[inline]
    pub(super) fn take(&mut self, raw: &RawRequest) -> Option<JournalSlot> {
        let slot = self.free.pop()?;
        self.taken += 1;
        let mut words = [0; ENTRY_WORDS];
        words[NUMBER] = self.taken;
        for (word, bytes) in words[2..].iter_mut().zip(raw.bytes().as_chunks::<8>().0) {
            *word = u64::from_ne_bytes(*bytes);
        }
        // The number comes first: with it the entry means nothing, whatever else is in it.
        self.words.set_entry(slot, NUMBER, self.taken);
        compiler_fence(Ordering::Release);
        self.words.fill(slot, &words);
        Some(JournalSlot(slot))
    }

    #[inline]
    pub(super) fn consumed(&mut self, req_cons: u32) {
        debug_assert_eq!(self.taken as u32, req_cons, "every request that is consumed is taken");
        compiler_fence(Ordering::Release);
        self.words.set_header(CONSUMED, self.taken);
        compiler_fence(Ordering::SeqCst);
    }

    #[inline]
    pub(super) fn answered(&mut self, slot: JournalSlot) {
        self.put += 1;
        self.words.set_entry(slot.0, RESPONSE, self.put);
        self.answered.push(slot.0);
    }

    #[inline]
    pub(super) fn publish<R>(&mut self, rsp_prod: u32, show: impl FnOnce() -> R) -> R {
        debug_assert_eq!(self.put as u32, rsp_prod, "every response that is put is noted");
        compiler_fence(Ordering::Release);
        self.words.set_header(PUBLISHING, self.put);
        compiler_fence(Ordering::SeqCst);
        let shown = show();
        compiler_fence(Ordering::SeqCst);
        self.words.set_header(PUBLISHED, self.put);
        compiler_fence(Ordering::SeqCst);
        self.free.append(&mut self.answered);
        shown
    }

    pub(super) fn words(&mut self) -> &mut W {
        &mut self.words
    }
}
