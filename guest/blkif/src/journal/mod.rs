//! A ring's journal: which requests were taken off it and have no response that the frontend sees, in a file that outlives the
//! process. Responses go out in any order and into the entries of requests, so the ring alone does not tell.
//!
//! It stands a kill of the process at any store, not a loss of power: what was stored is seen by whoever opens the file next. Writing
//! it costs copies and stores, no system call.

mod book;

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{Ordering, compiler_fence};

use mqblk_memory::{GuestAddress, GuestMemory, Region, SharedArray, UserAddress, zero_file};
use mqblk_ring::blkif::{RawRequest, RingPosition};

use book::{Book, ENTRIES, ENTRY_WORDS, HEADER_WORDS, IDENTITY, MAGIC, Words};

/// `mqblkjr` and the version of what lies in the file.
const MAGIC_VALUE: u64 = u64::from_le_bytes(*b"mqblkjr\x01");
/// Most entries of a ring: order 4.
const MAX_ENTRIES: u32 = 512;
const WORD_BYTES: u64 = 8;
const HEADER_BYTES: u64 = HEADER_WORDS as u64 * WORD_BYTES;

/// Why a journal is not taken up. The ring alone tells what to do then.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// It cannot be read.
    #[error("journal: {0}")]
    Io(#[from] io::Error),
    /// It is not of this ring, or not a journal.
    #[error("journal: {field}: found {found:#x}, expected {expected:#x}")]
    Field {
        /// What of it.
        field: &'static str,
        /// What it holds.
        found: u64,
        /// What it has to be.
        expected: u64,
    },
    /// Its counts contradict each other.
    #[error(
        "journal: counts: found {consumed} requests consumed, {published} published and {publishing} being published, \
         expected each no higher than the one before"
    )]
    Counts {
        /// Requests consumed.
        consumed: u64,
        /// Responses that are, or are just being, published.
        publishing: u64,
        /// Responses published.
        published: u64,
    },
    /// The ring's response index is none that a ring with this journal has.
    #[error("journal: the ring's response index: found {found}, expected {published} or {publishing}")]
    Ring {
        /// The index.
        found: u32,
        /// Before the last publish.
        published: u32,
        /// After it.
        publishing: u32,
    },
    /// Its entries contradict its counts.
    #[error("journal: requests without a response: found {found} or one of them twice, expected {expected}")]
    Entries {
        /// Entries that say so.
        found: usize,
        /// What the counts say.
        expected: u64,
    },
}

/// Where a request is in the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JournalSlot(u16);

/// What a journal tells.
#[derive(Debug)]
pub struct Recovery {
    /// Where the ring is to be taken up.
    pub position: RingPosition,
    /// Requests that were consumed and have no response that the frontend sees, in the order in which they were consumed. They are judged
    /// again, and come before whatever the ring holds.
    pub replay: Vec<(JournalSlot, RawRequest)>,
}

/// A mapped file.
#[derive(Debug)]
struct MappedWords {
    header: SharedArray<u64>,
    /// The entries, by word and as wholes.
    words: SharedArray<u64>,
    entries: SharedArray<[u64; ENTRY_WORDS]>,
}

impl Words for MappedWords {
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
    fn fill(&mut self, slot: u16, words: &[u64; ENTRY_WORDS]) {
        self.entries.set(slot.into(), *words);
    }
}

impl MappedWords {
    fn of_file(file: &File, slots: u16) -> io::Result<MappedWords> {
        let len = Journal::bytes(slots.into());
        let region = Region::from_file(file, 0, len, GuestAddress(0), UserAddress(0)).map_err(io::Error::other)?;
        let memory = GuestMemory::new(vec![Arc::new(region)]).map_err(io::Error::other)?;
        let (first, count) = (GuestAddress(HEADER_BYTES), slots.into());
        let parts = || {
            let header = memory.shared_array(GuestAddress(0), HEADER_WORDS)?;
            let words = memory.shared_array(first, ENTRY_WORDS * count)?;
            Some(MappedWords { header, words, entries: memory.shared_array(first, count)? })
        };
        parts().ok_or(io::ErrorKind::InvalidInput.into())
    }
}

/// The journal of one ring.
///
/// For each batch of requests: [`take`](Self::take) them, say [`consumed`](Self::consumed), then act on them. For each batch of
/// responses: put them on the ring and say [`answered`](Self::answered), then [`publish`](Self::publish). Every request and every
/// response of the ring passes through it.
#[derive(Debug)]
pub struct Journal(Book<MappedWords>);

impl Journal {
    /// Length of the file for a ring of so many entries (a power of two, at most 512).
    pub fn bytes(entries: u32) -> u64 {
        HEADER_BYTES + u64::from(entries) * ENTRY_WORDS as u64 * WORD_BYTES
    }

    /// A journal for a ring that nobody has taken a request off without answering it. Whatever the file held is gone. `identity`
    /// tells rings apart: [`resume`](Self::resume) wants the same.
    ///
    /// # Errors
    /// When the position is not that of such a ring, no ring has so many entries, or the system refuses.
    pub fn create(file: &File, entries: u32, identity: u64, position: RingPosition) -> io::Result<Journal> {
        let invalid = |text: String| io::Error::new(io::ErrorKind::InvalidInput, text);
        let slots = slots(entries).ok_or_else(|| invalid(format!("journal: a ring of {entries} entries")))?;
        if position.req_cons != position.rsp_prod {
            return Err(invalid(format!("journal: requests are in flight at {position:?}")));
        }
        zero_file(file, Journal::bytes(entries))?;
        let mut words = MappedWords::of_file(file, slots)?;
        words.set_header(ENTRIES, entries.into());
        words.set_header(IDENTITY, identity);
        let mut book = Book::begin(words, slots, position);
        compiler_fence(Ordering::Release);
        book.words().set_header(MAGIC, MAGIC_VALUE);
        Ok(Journal(book))
    }

    /// Takes up the journal of a ring whose owner is gone. `published` is the ring's response index now. Requests that are replayed
    /// are in the journal already: they keep their slots.
    ///
    /// # Errors
    /// When the file is not a journal of this ring that says which requests have no response. It is as it was then.
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
        let Some(slots) = slots(entries) else {
            return Err(JournalError::Field {
                field: "ring entries",
                found: entries.into(),
                expected: MAX_ENTRIES.into(),
            });
        };
        field("bytes", file.metadata()?.len(), Journal::bytes(entries))?;
        let words = MappedWords::of_file(file, slots)?;
        field("magic", words.header(MAGIC), MAGIC_VALUE)?;
        field("ring entries", words.header(ENTRIES), entries.into())?;
        field("identity", words.header(IDENTITY), identity)?;
        let (book, replay) = Book::take_up(words, slots, published)?;
        let position = book.position();
        Ok((Journal(book), Recovery { position, replay }))
    }

    /// Notes a request that was copied off the ring. `None` when so many have no visible response that the ring cannot hold them: only
    /// a frontend that breaks the protocol gets there.
    #[inline]
    #[must_use]
    pub fn take(&mut self, raw: &RawRequest) -> Option<JournalSlot> {
        self.0.take(raw)
    }

    /// The ring's next request is now `req_cons`. Once a batch, before any of it is acted on: until then the ring itself has them.
    #[inline]
    pub fn consumed(&mut self, req_cons: u32) {
        self.0.consumed(req_cons);
    }

    /// The request's response was put on the ring, where the frontend does not see it yet.
    #[inline]
    pub fn answered(&mut self, slot: JournalSlot) {
        self.0.answered(slot);
    }

    /// Has `show` store the ring's response index, `rsp_prod` from then on, which shows all that was [`answered`](Self::answered).
    #[inline]
    pub fn publish<R>(&mut self, rsp_prod: u32, show: impl FnOnce() -> R) -> R {
        self.0.publish(rsp_prod, show)
    }
}

/// Slots of a journal for a ring of so many entries.
fn slots(entries: u32) -> Option<u16> {
    (entries.is_power_of_two() && entries <= MAX_ENTRIES).then_some(entries as u16)
}

#[cfg(test)]
mod tests;
