//! The in-flight region of a split ring: its chains in flight, in memory that outlives the process. The frontend keeps
//! this table and sets it (SET_INFLIGHT_FD) for the next process that serves the ring. Requests complete in any order,
//! so the ring alone does not show them. Source: QEMU's `vhost-user.rst`, "Inflight I/O tracking", the split layout.
//!
//! It survives a kill of the process at any store, but not a power loss. The order of the stores, each visible before
//! the next:
//!
//! ```text
//! take:     counter of the chain, its in-flight mark
//! put_used: its link to the previously completed chain
//! publish:  head of the list of links, THE RING'S USED INDEX, clear in-flight marks, used index as published
//! ```
//!
//! If the ring's used index is ahead of the table's, the process died inside a publish. The difference is the number of
//! chains of the list that were completed.

use std::sync::atomic::Ordering;

use mqblk_memory::SharedWords;

use crate::format::{PACKED_TABLE_MAGIC, PACKED_TABLE_MAGIC_WORD};
use crate::inflight_words::{pack_quarters, store, unpack_quarters};

/// The layout's version, in the table's header; 0 means unused memory.
const VERSION: u16 = 1;

/// Words before the entries: features, then version, entries, last head and used index in 16 bits each.
const HEADER_WORDS: usize = 2;
/// Words of an entry: mark and link, then the counter.
const ENTRY_WORDS: usize = 2;

/// Mark of a chain in flight.
const IN_FLIGHT: u64 = 1;
/// Mask of the mark's byte.
const MARK_MASK: u64 = 0xff;
/// Position of the step's byte: padding in the specification's layout.
const STEP_SHIFT: u32 = 8;
/// Position of the link.
const LINK_SHIFT: u32 = 48;

/// Error of an invalid in-flight table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InflightError {
    /// It is too small for the ring.
    #[error(
        "in-flight region: found {found} bytes for a queue, expected at least {expected} for a ring of {size} entries"
    )]
    TooSmall {
        /// Bytes it has.
        found: u64,
        /// Required bytes.
        expected: u64,
        /// The ring's entries.
        size: u16,
    },
    /// Another program's layout, or a later one.
    #[error("in-flight region: {field}: found {found}, expected {expected}")]
    Header {
        /// The header field.
        field: &'static str,
        /// Its value.
        found: u64,
        /// The expected value.
        expected: u64,
    },
    /// An entry of a packed ring's table is neither free nor part of a chain, or it is both, or its chain's buffer id
    /// is not a new one.
    #[error("in-flight region: entry {found} of a ring of {size} entries: expected it free or part of one chain")]
    Entry {
        /// The entry.
        found: u16,
        /// The ring's entries.
        size: u16,
    },
    /// Its list of completed chains leaves the table.
    #[error("in-flight region: the list of completed chains names descriptor {found} of a ring of {size} entries")]
    List {
        /// The descriptor.
        found: u16,
        /// The ring's entries.
        size: u16,
    },
}

/// A chain to replay: taken off the ring by a process that died before it completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replay {
    /// Its head.
    pub head: u16,
    /// Progress of the request, as recorded by [`InflightTable::record_step`]; 0 if none was recorded.
    pub step: u8,
}

/// The state of a ring, recovered from its table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecoveredChains {
    /// The next available entry to read. `None` if the table is unused or from before a reset of the ring.
    pub next_avail: Option<u16>,
    /// Chains in flight, in the order in which they were taken.
    pub replays: Vec<Replay>,
    /// Number of discarded chains: marked in flight before a reset of the ring.
    pub discarded: usize,
}

/// A ring's table. While the ring is served, only links and steps are read back from it.
#[derive(Debug)]
pub struct InflightTable {
    words: SharedWords,
    size: u16,
    /// Counter value of the next chain.
    counter: u64,
    /// The chain completed last.
    last_head: u16,
    /// Used index of the last finished publish.
    published: u16,
    /// True if a step was recorded for a chain, by this or an earlier process.
    has_steps: bool,
}

impl InflightTable {
    /// Returns the bytes of the table of a ring with `size` entries: whole cache lines, so that two queues share none.
    pub const fn bytes(size: u16) -> u64 {
        let bytes = (HEADER_WORDS + ENTRY_WORDS * size as usize) as u64 * 8;
        bytes.next_multiple_of(64)
    }

    /// Resumes from the table in `words` for a ring of `size` entries whose used index is `used` now.
    ///
    /// A table of another size, or one whose index is further from the ring's than a batch can be, is from before a
    /// reset of the device by the guest. It is reset too.
    ///
    /// # Errors
    /// When it is too small, has another layout, or contradicts itself.
    pub fn open(words: SharedWords, size: u16, used: u16) -> Result<(InflightTable, RecoveredChains), InflightError> {
        let found = words.count() as u64 * 8;
        let expected = (HEADER_WORDS + ENTRY_WORDS * usize::from(size)) as u64 * 8;
        if found < expected {
            return Err(InflightError::TooSmall { found, expected, size });
        }
        let mut table = InflightTable { words, size, counter: 1, last_head: 0, published: used, has_steps: false };
        let features = table.load(0);
        if features != 0 {
            return Err(InflightError::Header { field: "features", found: features, expected: 0 });
        }
        let [version, entries, last_head, published] = unpack_quarters(table.load(1));
        match version {
            0 => {
                table.reset();
                return Ok((table, RecoveredChains::default()));
            }
            VERSION => {}
            other => {
                return Err(InflightError::Header { field: "version", found: other.into(), expected: VERSION.into() });
            }
        }
        let completed = used.wrapping_sub(published);
        // The ring may have been a packed one before the reset.
        let is_packed = table.load(PACKED_TABLE_MAGIC_WORD) == PACKED_TABLE_MAGIC;
        if entries != size || completed > size || is_packed {
            let discarded = table.reset();
            return Ok((table, RecoveredChains { discarded, ..RecoveredChains::default() }));
        }
        table.last_head = last_head;
        table.finish_interrupted_publish(completed)?;
        let replays = table.collect_replays();
        table.has_steps = replays.iter().any(|replay| replay.step != 0);
        let next_avail = Some(used.wrapping_add(replays.len() as u16));
        Ok((table, RecoveredChains { next_avail, replays, discarded: 0 }))
    }

    fn load(&self, word: usize) -> u64 {
        self.words.get(word).map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// Stores to this word, as [`store`].
    #[inline]
    fn store(&self, word: usize, value: u64) {
        // `open` has checked the size, and heads are below it.
        if let Some(word) = self.words.get(word) {
            store(word, value);
        }
    }

    #[inline]
    fn store_header(&self) {
        self.store(1, pack_quarters([VERSION, self.size, self.last_head, self.published]));
    }

    const fn mark_word(head: u16) -> usize {
        HEADER_WORDS + ENTRY_WORDS * head as usize
    }

    /// Clears all entries, then writes the header. Returns the number of chains that were in flight.
    fn reset(&mut self) -> usize {
        // After a death in between the table is unused.
        self.store(1, 0);
        // Otherwise a packed ring's magic would stay in a counter.
        self.store(PACKED_TABLE_MAGIC_WORD, 0);
        let entries = (self.words.count() - HEADER_WORDS) / ENTRY_WORDS;
        let mut cleared = 0;
        for word in (0..entries).map(|entry| HEADER_WORDS + ENTRY_WORDS * entry) {
            cleared += usize::from(self.load(word) & IN_FLIGHT != 0);
            self.store(word, 0);
        }
        (self.last_head, self.counter) = (0, 1);
        self.store_header();
        cleared
    }

    /// Finishes the publish in which the previous process died: `completed` chains of the list are in the ring.
    fn finish_interrupted_publish(&mut self, completed: u16) -> Result<(), InflightError> {
        let mut head = self.last_head;
        for _ in 0..completed {
            if head >= self.size {
                return Err(InflightError::List { found: head, size: self.size });
            }
            let word = Self::mark_word(head);
            let entry = self.load(word);
            self.store(word, entry & !MARK_MASK);
            head = (entry >> LINK_SHIFT) as u16;
        }
        self.store_header();
        Ok(())
    }

    /// Returns the chains in flight, in the order in which they were taken. The counter continues after theirs.
    fn collect_replays(&mut self) -> Vec<Replay> {
        let mut found: Vec<(u64, Replay)> = (0..self.size)
            .filter_map(|head| {
                let entry = self.load(Self::mark_word(head));
                let replay = Replay { head, step: (entry >> STEP_SHIFT) as u8 };
                (entry & IN_FLIGHT != 0).then(|| (self.load(Self::mark_word(head) + 1), replay))
            })
            .collect();
        found.sort_unstable_by_key(|(counter, replay)| (*counter, replay.head));
        self.counter = found.last().map_or(1, |(counter, _)| counter.wrapping_add(1));
        found.into_iter().map(|(_, replay)| replay).collect()
    }

    /// Marks the chain of this head in flight.
    #[inline]
    pub fn mark_in_flight(&mut self, head: u16) {
        // As in `store`.
        if let Some([mark, counter]) = self.words.get_pair(Self::mark_word(head)) {
            store(counter, self.counter);
            store(mark, IN_FLIGHT);
        }
        self.counter = self.counter.wrapping_add(1);
    }

    /// Records the progress of the request of a chain in flight.
    pub fn record_step(&mut self, head: u16, step: u8) {
        self.has_steps = true;
        self.store(Self::mark_word(head), IN_FLIGHT | u64::from(step) << STEP_SHIFT);
    }

    /// Links the chain of this head, whose used element was written and becomes visible with
    /// [`after_publish`](Self::after_publish).
    #[inline]
    pub fn link_used(&mut self, head: u16) {
        // The step is kept: if the process dies before the publish, the request is replayed from there.
        let step = if self.has_steps { self.load(Self::mark_word(head)) & MARK_MASK << STEP_SHIFT } else { 0 };
        let entry = step | IN_FLIGHT;
        self.store(Self::mark_word(head), u64::from(self.last_head) << LINK_SHIFT | entry);
        self.last_head = head;
    }

    /// Called before the ring's used index moves past all linked chains.
    #[inline]
    pub fn before_publish(&mut self) {
        self.store_header();
    }

    /// Called after the ring's used index has moved to `used`.
    #[inline]
    pub fn after_publish(&mut self, used: u16) {
        let mut head = self.last_head;
        for _ in 0..used.wrapping_sub(self.published) {
            // As in `store`; a frontend that writes into the table harms only itself.
            let Some(mark) = self.words.get(Self::mark_word(head)) else { break };
            let link = mark.load(Ordering::Relaxed) >> LINK_SHIFT;
            store(mark, link << LINK_SHIFT);
            head = link as u16;
        }
        self.published = used;
        self.store_header();
    }
}

#[cfg(test)]
pub(super) mod tests;
