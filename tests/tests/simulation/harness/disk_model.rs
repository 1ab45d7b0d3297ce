//! The possible contents of a disk's blocks, and the blocks that requests in flight use.

use mqblk_tests::crash::oracle::{DiskOracle, SECTOR, WriteOutcome, fill};
use mqblk_tests::load_queues::SectorRange;

/// Returns the content that write `id` writes into these sectors, one after another.
pub(crate) fn contents(id: u64, ranges: &[SectorRange]) -> Vec<u8> {
    let sectors: Vec<u64> = sectors(ranges).collect();
    let mut bytes = vec![0; sectors.len() * SECTOR];
    for (sector, bytes) in sectors.into_iter().zip(bytes.as_chunks_mut::<SECTOR>().0) {
        fill(id, sector, bytes);
    }
    bytes
}

/// Returns the sectors of these ranges.
pub(crate) fn sectors(ranges: &[SectorRange]) -> impl Iterator<Item = u64> + Clone + '_ {
    ranges.iter().flat_map(|(first, count)| *first..*first + u64::from(*count))
}

/// A disk as its guest knows it. Requests do not overlap unless both read, or the test wants overlaps, so that the set
/// of possible contents stays small.
pub(crate) struct DiskModel {
    oracle: DiskOracle,
    readers: Vec<u32>,
    writers: Vec<u32>,
    overlaps: bool,
}

impl DiskModel {
    /// Returns the model of a disk of this many sectors, all zeroes.
    pub(crate) fn new(sectors: u64, overlaps: bool) -> DiskModel {
        let none = vec![0; sectors as usize];
        DiskModel { oracle: DiskOracle::new(sectors), readers: none.clone(), writers: none, overlaps }
    }

    /// Adds a read to the requests in flight. Returns false if it may not overlap with one of them.
    pub(crate) fn send_read(&mut self, id: u64, ranges: &[SectorRange]) -> bool {
        if !self.overlaps && sectors(ranges).any(|sector| self.writers[sector as usize] > 0) {
            return false;
        }
        sectors(ranges).for_each(|sector| self.readers[sector as usize] += 1);
        self.oracle.send(id);
        true
    }

    /// Adds a write of `content`, an identifier or 0 for zeroes. Returns false if it may not overlap with a request in
    /// flight.
    pub(crate) fn send_write(&mut self, id: u64, content: u64, ranges: &[SectorRange]) -> bool {
        let is_used = |sector: u64| self.writers[sector as usize] + self.readers[sector as usize] > 0;
        if !self.overlaps && sectors(ranges).any(is_used) {
            return false;
        }
        sectors(ranges).for_each(|sector| self.writers[sector as usize] += 1);
        self.oracle.send_write(id, content, ranges, true);
        true
    }

    /// Ends a read. `data` is its result, if it was successful.
    ///
    /// # Panics
    /// When that content was not possible.
    pub(crate) fn complete_read(&mut self, id: u64, ranges: &[SectorRange], data: Option<&[u8]>) {
        sectors(ranges).for_each(|sector| self.readers[sector as usize] -= 1);
        let when = self.oracle.complete(id);
        if let Some(data) = data {
            self.check(ranges, data, when);
        }
    }

    /// Ends a write.
    pub(crate) fn complete_write(&mut self, id: u64, ranges: &[SectorRange], outcome: WriteOutcome) {
        sectors(ranges).for_each(|sector| self.writers[sector as usize] -= 1);
        self.oracle.complete_write(id, ranges, outcome);
    }

    /// Checks the result of a read that was sent after all completed requests had completed.
    ///
    /// # Panics
    /// When that content was not possible.
    pub(crate) fn check_now(&mut self, ranges: &[SectorRange], data: &[u8]) {
        let id = u64::MAX;
        self.oracle.send(id);
        let when = self.oracle.complete(id);
        self.check(ranges, data, when);
    }

    fn check(&mut self, ranges: &[SectorRange], data: &[u8], when: (u64, u64)) {
        let (found, rest) = data.as_chunks::<SECTOR>();
        assert!(found.len() == sectors(ranges).count() && rest.is_empty(), "{} bytes of {ranges:?}", data.len());
        for (sector, found) in sectors(ranges).zip(found) {
            self.oracle.check_read(sector, found, when).unwrap_or_else(|why| panic!("{why}"));
            self.oracle.exclude_others(sector, found, when.0);
        }
    }

    /// Returns the writes whose content a sector may hold: more than one after a cancelled or failed write.
    pub(crate) fn possible(&self, sector: u64) -> Vec<u64> {
        self.oracle.possible(sector)
    }
}
