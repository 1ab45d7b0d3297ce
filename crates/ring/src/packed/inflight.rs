//! The in-flight region of a packed ring: its chains in flight, in memory that outlives the process. The frontend keeps
//! this table and sets it (SET_INFLIGHT_FD) for the next process that serves the ring. The table has copies of the
//! descriptors of these chains, since used descriptors are written over those in the ring. Source: QEMU's
//! `vhost-user.rst`, "Inflight I/O tracking", the packed layout.
//!
//! Entries that are not in use form a list. It survives a kill of the process at any store, but not a power loss. The
//! order of the stores, each visible before the next:
//!
//! ```text
//! take:    the chain's descriptors, its counter, its in-flight mark; for all chains of a fetch: THE FREE LIST'S HEAD
//! publish: the chains' links to the free list, its head and the used position (the old ones are kept), THE FIRST USED DESCRIPTOR,
//!          clear in-flight marks, the list's head as the old one, the used position as the old one
//! ```
//!
//! If the used position differs from the old one, the process died inside a publish. If the descriptor in the ring at
//! the old position is used, the driver sees that batch and the new values hold, else the old ones.

use std::sync::atomic::Ordering;

use mqblk_memory::SharedWords;

use super::layout::{PackedRing, from_state_word, state_word};
use super::position::{Base, Position};
use crate::format::{Descriptor, PACKED_TABLE_MAGIC as MAGIC, PACKED_TABLE_MAGIC_WORD as MAGIC_WORD};
use crate::inflight_words::{pack_quarters, store, unpack_quarters};
use crate::split::InflightError;

/// The layout's version, in the table's header; 0 means unused memory.
const VERSION: u16 = 1;
/// Words before the entries: features; then version, entries, head of the free list and its old head in 16 bits each;
/// then the used slots, now and old, in 16 bits each, and their wrap counters in 8 bits each; then padding.
const HEADER_WORDS: usize = 4;
/// Words of an entry: mark, step, next, last and number; counter; length, buffer id and flags; address.
const ENTRY_WORDS: usize = 4;

/// Mark of an entry in which a chain in flight starts.
const IN_FLIGHT: u64 = 1;
/// Position of the step's byte: padding in the specification's layout.
const STEP_SHIFT: u32 = 8;

/// A chain to replay: taken off the ring by a process that died before it completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedReplay {
    /// Its buffer id.
    pub id: u16,
    /// Its first entry.
    pub entry: u16,
    /// Its descriptors.
    pub count: u16,
    /// Progress of the request, as recorded by [`PackedInflight::record_step`]; 0 if none was recorded.
    pub step: u8,
}

/// The state of a ring, recovered from its table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecoveredPacked {
    /// The position at which the ring is resumed. `None` if the table is unused or from before a reset of the ring.
    pub base: Option<Base>,
    /// Chains in flight, in the order in which they were taken.
    pub replays: Vec<PackedReplay>,
    /// Number of discarded chains: marked in flight before a reset of the ring.
    pub discarded: usize,
    /// True if descriptors in the ring were written.
    pub repaired: bool,
}

/// This process's state of an entry. Only the descriptors of replayed chains are read back from the table.
#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    /// The next entry of the chain or of the free list.
    next: u16,
    /// Of a chain's first entry: the chain's last one.
    last: u16,
    /// Of a chain's first entry: the number of its descriptors.
    count: u16,
    /// Of a completed chain's first entry: the first entry of the chain completed before.
    completed_before: u16,
    step: u8,
}

/// A ring's table.
#[derive(Debug)]
pub struct PackedInflight {
    words: SharedWords,
    size: u16,
    entries: Box<[Entry]>,
    /// First entry of the free list; the ring's size if there is none.
    free: u16,
    /// As stored in the table.
    stored_free: u16,
    /// The chain that is being taken: its first and its last entry, and the next free one.
    begun: [u16; 3],
    /// First entry of the chain completed last, and the number of completed chains that are not published.
    completed: (u16, u16),
    /// Position of the next used descriptor, as of the last publish.
    used: Position,
    /// Counter value of the next chain.
    counter: u64,
}

impl PackedInflight {
    /// Returns the bytes of the table of a ring with `size` entries: whole cache lines, so that two queues share none.
    pub const fn bytes(size: u16) -> u64 {
        let bytes = (HEADER_WORDS + ENTRY_WORDS * size as usize) as u64 * 8;
        bytes.next_multiple_of(64)
    }

    /// Resumes from the table in `words` for `ring`, which the frontend starts at `base`.
    ///
    /// A table of another size or format, or one that the ring contradicts, is from before a reset of the device by the
    /// guest. It is reset too.
    ///
    /// # Errors
    /// When it is too small, has another layout, or contradicts itself.
    pub fn open(
        words: SharedWords,
        ring: &PackedRing,
        base: Base,
    ) -> Result<(PackedInflight, RecoveredPacked), InflightError> {
        let size = ring.size();
        let found = words.count() as u64 * 8;
        let expected = (HEADER_WORDS + ENTRY_WORDS * usize::from(size)) as u64 * 8;
        if found < expected {
            return Err(InflightError::TooSmall { found, expected, size });
        }
        let mut table = PackedInflight {
            words,
            size,
            entries: vec![Entry::default(); size.into()].into(),
            free: 0,
            stored_free: 0,
            begun: [0; 3],
            completed: (0, 0),
            used: base.used,
            counter: 1,
        };
        let features = table.load(0);
        if features != 0 {
            return Err(InflightError::Header { field: "features", found: features, expected: 0 });
        }
        let [version, entries, free, old_free] = unpack_quarters(table.load(1));
        if version > VERSION {
            return Err(InflightError::Header { field: "version", found: version.into(), expected: VERSION.into() });
        }
        if version == 0 || entries != size || table.load(MAGIC_WORD) != MAGIC {
            let discarded = table.reset(version != 0);
            return Ok((table, RecoveredPacked { discarded, ..RecoveredPacked::default() }));
        }
        table.finish_interrupted_publish(ring, [free, old_free])?;
        let replays = table.collect_replays()?;
        let taken = replays.iter().map(|replay| replay.count).sum::<u16>();
        if table.is_stale(ring, taken) {
            table.used = base.used;
            table.reset(true);
            return Ok((table, RecoveredPacked { discarded: replays.len(), ..RecoveredPacked::default() }));
        }
        let repaired = table.repair_ring(ring, taken);
        let base = Base { avail: table.used.after(taken, size), used: table.used };
        Ok((table, RecoveredPacked { base: Some(base), replays, discarded: 0, repaired }))
    }

    fn load(&self, word: usize) -> u64 {
        self.words.get(word).map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// Stores to this word, as [`store`].
    #[inline]
    fn store(&self, word: usize, value: u64) {
        // `open` has checked the size, and entries are below it.
        if let Some(word) = self.words.get(word) {
            store(word, value);
        }
    }

    const fn entry_word(entry: u16) -> usize {
        HEADER_WORDS + ENTRY_WORDS * entry as usize
    }

    /// Stores the free list's head, and the old one.
    #[inline]
    fn store_free(&mut self, old: u16) {
        self.stored_free = self.free;
        self.store(1, pack_quarters([VERSION, self.size, self.free, old]));
    }

    /// Stores the used position, and the old one.
    #[inline]
    fn store_used(&self, old: Position) {
        let now = self.used;
        let wraps = u64::from(now.wrap) << 32 | u64::from(old.wrap) << 40;
        self.store(2, u64::from(now.slot) | u64::from(old.slot) << 16 | wraps);
    }

    /// Stores the first word of an entry with this mark and the entry's step.
    #[inline]
    fn store_entry(&self, entry: u16, mark: u64) {
        let Entry { next, last, count, step, .. } = self.entries[usize::from(entry)];
        let low = mark | u64::from(step) << STEP_SHIFT;
        self.store(Self::entry_word(entry), pack_quarters([low as u16, next, last, count]));
    }

    /// Puts all entries in the free list, then writes the header. Returns the number of chains that were in flight, if
    /// the table was used.
    fn reset(&mut self, was_used: bool) -> usize {
        // After a death in between the table is unused.
        self.store(1, 0);
        let mut cleared = 0;
        for entry in 0..self.size {
            cleared += usize::from(was_used && self.load(Self::entry_word(entry)) & IN_FLIGHT != 0);
            self.entries[usize::from(entry)] = Entry { next: entry + 1, ..Entry::default() };
            self.store_entry(entry, 0);
        }
        (self.free, self.counter) = (0, 1);
        self.store(MAGIC_WORD, MAGIC);
        self.store_used(self.used);
        self.store_free(0);
        cleared
    }

    /// Commits or undoes the publish in which the previous process died.
    fn finish_interrupted_publish(
        &mut self,
        ring: &PackedRing,
        [free, old_free]: [u16; 2],
    ) -> Result<(), InflightError> {
        let word = self.load(2);
        let [now, before] = [word as u16, (word >> 16) as u16];
        if let Some(found) = [now, before].into_iter().find(|slot| *slot >= self.size) {
            return Err(InflightError::Header {
                field: "used position",
                found: found.into(),
                expected: (self.size - 1).into(),
            });
        }
        let now = Position { slot: now, wrap: word >> 32 & 0xff != 0 };
        let before = Position { slot: before, wrap: word >> 40 & 0xff != 0 };
        let is_visible = now != before && !before.is_available(ring.load_state(before.slot).2);
        (self.free, self.used) = if is_visible { (free, now) } else { (old_free, before) };
        self.stored_free = self.free;
        Ok(())
    }

    /// Returns the chains in flight, in the order in which they were taken. The counter continues after theirs, and the
    /// header is the one of the recovered state.
    fn collect_replays(&mut self) -> Result<Vec<PackedReplay>, InflightError> {
        let size = self.size;
        let bad = |found| InflightError::Entry { found, size };
        let first_words: Vec<u64> = (0..size).map(|entry| self.load(Self::entry_word(entry))).collect();
        for (entry, word) in self.entries.iter_mut().zip(&first_words) {
            let [low, next, last, count] = unpack_quarters(*word);
            *entry = Entry { next, last, count, completed_before: 0, step: (low >> STEP_SHIFT) as u8 };
        }
        let mut seen = vec![false; size.into()];
        let mut visit = |entry: u16| {
            let seen = seen.get_mut(usize::from(entry)).ok_or(bad(entry))?;
            if std::mem::replace(seen, true) { Err(bad(entry)) } else { Ok(()) }
        };
        // Entries of the free list may still be marked in flight.
        let mut is_free = vec![false; size.into()];
        let mut entry = self.free;
        while entry < size {
            visit(entry)?;
            is_free[usize::from(entry)] = true;
            entry = self.entries[usize::from(entry)].next;
        }
        let mut found: Vec<(u64, PackedReplay)> = Vec::new();
        let mut ids = vec![false; size.into()];
        for first in (0..size).filter(|entry| !is_free[usize::from(*entry)]) {
            if first_words[usize::from(first)] & IN_FLIGHT == 0 {
                continue;
            }
            let Entry { count, step, .. } = self.entries[usize::from(first)];
            let mut last = first;
            visit(first)?;
            for _ in 1..count {
                last = self.entries[usize::from(last)].next;
                visit(last)?;
            }
            let (_, id, _) = from_state_word(self.load(Self::entry_word(last) + 2).to_le());
            match ids.get_mut(usize::from(id)) {
                Some(known) if !*known && count > 0 => *known = true,
                _ => return Err(bad(id)),
            }
            self.entries[usize::from(first)].last = last;
            let replay = PackedReplay { id, entry: first, count, step };
            found.push((self.load(Self::entry_word(first) + 1), replay));
        }
        if let Some(lost) = seen.iter().position(|seen| !seen) {
            return Err(bad(lost as u16));
        }
        for entry in (0..size).filter(|entry| is_free[usize::from(*entry)]) {
            self.entries[usize::from(entry)].step = 0;
            self.store_entry(entry, 0);
        }
        // As after a publish: the free list's head before the position, which decides.
        self.store_free(self.free);
        self.store_used(self.used);
        found.sort_unstable_by_key(|(counter, replay)| (*counter, replay.entry));
        self.counter = found.last().map_or(1, |(counter, _)| counter.wrapping_add(1));
        Ok(found.into_iter().map(|(_, replay)| replay).collect())
    }

    /// Returns true if the ring has been reset since the table was written: it cannot be at this position. `taken`
    /// descriptors are in flight by the table. The base does not show it: a frontend that has lost its backend starts
    /// the ring at that backend's start.
    fn is_stale(&self, ring: &PackedRing, taken: u16) -> bool {
        let used = self.used;
        if taken > 0 && !used.is_available(ring.load_state(used.slot).2) {
            return true;
        }
        // A driver clears its ring, so unwritten slots look used in a lap whose wrap counter is 0. In a ring at this
        // position, slots that were passed in a lap of 1, and slots that the device has not reached in a lap of 0,
        // cannot look used. Slots in flight may, if a batch was not finished.
        let end = u32::from(used.slot) + u32::from(taken);
        let written = match used.wrap {
            true => end.saturating_sub(self.size.into()) as u16..used.slot,
            false => end.min(self.size.into()) as u16..self.size,
        };
        let unwritten = Position { slot: 0, wrap: false };
        written.into_iter().any(|slot| unwritten.is_used(ring.load_state(slot).2))
    }

    /// Makes used descriptors available again that the previous process wrote for a batch that the driver does not see.
    /// Otherwise the driver would see them when it reaches them. Returns true if there were any.
    fn repair_ring(&self, ring: &PackedRing, taken: u16) -> bool {
        let mut repaired = false;
        for ahead in 0..taken {
            let at = self.used.after(ahead, self.size);
            let (len, id, flags) = ring.load_state(at.slot);
            if at.is_used(flags) {
                ring.store_state(at.slot, state_word(len, id, at.available_flags()));
                repaired = true;
            }
        }
        repaired
    }

    /// Begins to take a chain.
    #[inline]
    pub fn begin_chain(&mut self) {
        self.begun = [self.free; 3];
    }

    /// Copies a descriptor of the chain, whose buffer id field is `id`. There are as many entries as the ring has
    /// descriptors.
    #[inline]
    pub fn add_descriptor(&mut self, descriptor: &Descriptor, id: u16) {
        let [_, last, free] = &mut self.begun;
        let Some(entry) = self.entries.get(usize::from(*free)) else { return };
        *last = *free;
        *free = entry.next;
        let word = Self::entry_word(*last);
        if let Some([state, address]) = self.words.get_pair(word + 2) {
            store(state, u64::from_le(state_word(descriptor.len, id, descriptor.flags)));
            store(address, descriptor.address);
        }
    }

    /// Marks the chain in flight, of `count` descriptors. Returns its first entry.
    #[inline]
    pub fn end_chain(&mut self, count: u16) -> u16 {
        let [first, last, free] = self.begun;
        if let Some(entry) = self.entries.get_mut(usize::from(first)) {
            *entry = Entry { last, count, step: 0, ..*entry };
            self.free = free;
            self.store(Self::entry_word(first) + 1, self.counter);
            self.store_entry(first, IN_FLIGHT);
            self.counter = self.counter.wrapping_add(1);
        }
        first
    }

    /// Makes the taken chains recoverable. Before, they are in the ring only.
    #[inline]
    pub fn store_taken(&mut self) {
        self.store_free(self.free);
    }

    /// Returns descriptor `at` of a chain.
    pub fn descriptor(&self, first: u16, at: u16) -> Option<Descriptor> {
        let mut entry = first;
        for _ in 0..at {
            entry = self.entries.get(usize::from(entry))?.next;
        }
        let [state, address] = self.words.get_pair(Self::entry_word(entry) + 2)?;
        let (len, _, flags) = from_state_word(state.load(Ordering::Acquire).to_le());
        Some(Descriptor { address: address.load(Ordering::Acquire), len, flags, next: 0 })
    }

    /// Records the progress of the request of a chain in flight.
    pub fn record_step(&mut self, first: u16, step: u8) {
        if let Some(entry) = self.entries.get_mut(usize::from(first)) {
            entry.step = step;
            self.store_entry(first, IN_FLIGHT);
        }
    }

    /// Records that a chain is completed. It stays in flight, with its step, until the publish: if the process dies
    /// before, it is replayed.
    #[inline]
    pub fn complete(&mut self, first: u16) {
        let (before, count) = self.completed;
        if let Some(entry) = self.entries.get_mut(usize::from(first)) {
            entry.completed_before = before;
            self.completed = (first, count + 1);
        }
    }

    /// Called before the first used descriptor of the completed chains is stored. The next batch starts at `used`.
    #[inline]
    pub fn before_publish(&mut self, used: Position) {
        let (old_free, old_used) = (self.stored_free, self.used);
        let (mut first, count) = self.completed;
        for _ in 0..count {
            let Entry { last, completed_before, .. } = self.entries[usize::from(first)];
            self.entries[usize::from(last)].next = self.free;
            self.store_entry(last, if last == first { IN_FLIGHT } else { 0 });
            self.free = first;
            first = completed_before;
        }
        self.used = used;
        self.store_free(old_free);
        self.store_used(old_used);
    }

    /// Called after the first used descriptor is stored.
    #[inline]
    pub fn after_publish(&mut self) {
        let (mut first, count) = std::mem::take(&mut self.completed);
        for _ in 0..count {
            self.entries[usize::from(first)].step = 0;
            self.store_entry(first, 0);
            first = self.entries[usize::from(first)].completed_before;
        }
        self.store_free(self.free);
        self.store_used(self.used);
    }
}

#[cfg(test)]
pub(super) mod tests;
