//! The possible contents of a disk: for each sector, the writes that a read may return.
//!
//! Time is a count of events: a request is *sent* before the device can see it, and *completed* after the driver has
//! seen its completion. A read may return write W only if W was sent before the read completed, and if no other write
//! W2 was sent after W completed and completed before the read was sent. Requests may overlap in any way, and replayed
//! writes are checked like all others.

use crate::load_queues::SectorRange;
use std::collections::HashMap;

use mqblk_core::units::SECTOR_BYTES;

/// Bytes of a sector.
pub const SECTOR: usize = SECTOR_BYTES as usize;

/// Later than all times.
const NEVER: u64 = u64::MAX;

/// Fills a sector with the pattern of write `id`; 0 is the zeroes of discards and writes of zeroes.
pub fn fill(id: u64, sector: u64, bytes: &mut [u8]) {
    for (at, word) in (0..).zip(bytes.as_chunks_mut::<8>().0) {
        *word = self::pattern_word(id, sector, at).to_le_bytes();
    }
}

fn pattern_word(id: u64, sector: u64, at: u64) -> u64 {
    match (id, at) {
        (0, _) => 0,
        (_, 0) => id,
        _ => id.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(at) ^ sector << 32,
    }
}

/// Returns the write whose pattern fills the whole sector.
pub fn writer_of(sector: u64, bytes: &[u8]) -> Option<u64> {
    let id = u64::from_le_bytes(*bytes.first_chunk()?);
    // One comparison of memory: in a build with few optimisations, word by word costs several times as much.
    let mut pattern = [0; SECTOR];
    fill(id, sector, &mut pattern);
    (bytes == pattern).then_some(id)
}

/// A write to one sector.
#[derive(Clone, Copy, Debug)]
struct WriteRecord {
    /// The request.
    request: u64,
    /// Its pattern: the identifier of the write, or 0 for zeroes.
    content: u64,
    sent: u64,
    completed: u64,
    /// True: the old content is gone on completion. False for a discard, which may have no effect.
    replaces: bool,
}

/// Outcome of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteOutcome {
    /// It completed.
    Completed,
    /// It was cancelled, perhaps in part.
    Cancelled,
    /// It has no effect.
    Refused,
}

/// The history of a disk's sectors, pruned to the writes that a read can still return.
#[derive(Debug)]
pub struct DiskOracle {
    now: u64,
    sectors: Vec<Vec<WriteRecord>>,
    /// Send times of the requests in flight.
    in_flight: HashMap<u64, u64>,
    /// Writes whose driver died before their completion.
    orphans: Vec<(u64, Vec<SectorRange>)>,
}

impl DiskOracle {
    /// Creates the oracle of a disk of this many sectors, all zeroes.
    pub fn new(sectors: u64) -> DiskOracle {
        let zeroes = WriteRecord { request: 0, content: 0, sent: 0, completed: 0, replaces: true };
        let sectors = (0..sectors).map(|_| vec![zeroes]).collect();
        DiskOracle { now: 1, sectors, in_flight: HashMap::new(), orphans: Vec::new() }
    }

    /// Returns the number of sectors.
    pub fn len(&self) -> u64 {
        self.sectors.len() as u64
    }

    /// Returns true if there are no sectors.
    pub fn is_empty(&self) -> bool {
        self.sectors.is_empty()
    }

    fn tick(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    /// Calls `work` with each sector's history, twice where ranges overlap.
    fn for_each_sector(&mut self, ranges: &[SectorRange], mut work: impl FnMut(&mut Vec<WriteRecord>)) {
        for (first, count) in ranges {
            let first = *first as usize;
            self.sectors[first..first + *count as usize].iter_mut().for_each(&mut work);
        }
    }

    /// Records a request that changes nothing, before it is sent.
    pub fn send(&mut self, request: u64) -> u64 {
        let now = self.tick();
        self.in_flight.insert(request, now);
        now
    }

    /// Records a write of `content` to `ranges`, before it is sent. Without `replaces` it may have no effect.
    pub fn send_write(&mut self, request: u64, content: u64, ranges: &[SectorRange], replaces: bool) {
        let sent = self.send(request);
        let entry = WriteRecord { request, content, sent, completed: NEVER, replaces };
        self.for_each_sector(ranges, |entries| entries.push(entry));
    }

    /// Records the completion of a request that writes nothing. Returns its send and completion times, for
    /// [`check_read`](Self::check_read).
    pub fn complete(&mut self, request: u64) -> (u64, u64) {
        self.end_orphans();
        let sent = self.in_flight.remove(&request).unwrap_or(self.now);
        (sent, self.tick())
    }

    /// Records the completion of a write.
    pub fn complete_write(&mut self, request: u64, ranges: &[SectorRange], outcome: WriteOutcome) {
        let (_, now) = self.complete(request);
        let floor = self.in_flight.values().copied().min().unwrap_or(now + 1);
        self.for_each_sector(ranges, |entries| {
            for entry in entries.iter_mut().filter(|entry| entry.request == request) {
                entry.completed = now;
                entry.replaces &= outcome == WriteOutcome::Completed;
            }
            if outcome == WriteOutcome::Refused {
                entries.retain(|entry| entry.request != request);
            }
            prune(entries, floor);
        });
    }

    /// Records that the driver died before this write completed. The device ends its work on the write before the first
    /// completion of the next connection.
    pub fn orphan(&mut self, request: u64, ranges: &[SectorRange]) {
        self.in_flight.remove(&request);
        self.orphans.push((request, ranges.to_vec()));
    }

    fn end_orphans(&mut self) {
        for (request, ranges) in std::mem::take(&mut self.orphans) {
            let now = self.tick();
            self.for_each_sector(&ranges, |entries| {
                for entry in entries.iter_mut().filter(|entry| entry.request == request) {
                    (entry.completed, entry.replaces) = (now, false);
                }
            });
        }
    }

    /// Checks that a read with these send and completion times may return these bytes of a sector.
    ///
    /// A sector has the content of one write, unless one of the writes was in flight: a host's page cache may be
    /// written during the read.
    ///
    /// # Errors
    /// The reason why it may not.
    pub fn check_read(&self, sector: u64, bytes: &[u8], (sent, answered): (u64, u64)) -> Result<(), String> {
        let entries = &self.sectors[sector as usize];
        let replaced = |entry: &WriteRecord| {
            entries.iter().any(|other| other.replaces && entry.completed < other.sent && other.completed < sent)
        };
        let may_be = |entry: &&WriteRecord| entry.sent < answered && !replaced(entry);
        if let Some(content) = writer_of(sector, bytes) {
            return match entries.iter().filter(may_be).any(|entry| entry.content == content) {
                true => Ok(()),
                false => Err(format!(
                    "sector {sector} holds what {content:#x} wrote, in a read from {sent:#x} to {answered:#x}, but was written by {entries:x?}"
                )),
            };
        }
        let mut under_way = false;
        let explained = (0..).zip(bytes.as_chunks::<8>().0).all(|(at, found)| {
            let found = u64::from_le_bytes(*found);
            let by = |entry: &&WriteRecord| pattern_word(entry.content, sector, at) == found;
            let mut authors = entries.iter().filter(may_be).filter(by).peekable();
            let is_explained = authors.peek().is_some();
            under_way |= authors.any(|entry| entry.completed > sent);
            is_explained
        });
        match explained && under_way {
            true => Ok(()),
            false => Err(format!(
                "sector {sector} is torn or foreign, in a read from {sent:#x} to {answered:#x}: {:x?}, of {entries:x?}",
                bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect::<Vec<_>>()
            )),
        }
    }

    /// Drops the other possible writes of a sector after a read, sent at `sent`, has found this content: cancelled ones
    /// without effect. Does nothing if a write of the sector was in flight during the read.
    pub fn exclude_others(&mut self, sector: u64, bytes: &[u8], sent: u64) {
        let entries = &mut self.sectors[sector as usize];
        if let Some(found) = writer_of(sector, bytes)
            && entries.iter().all(|entry| entry.completed < sent)
        {
            entries.retain(|entry| entry.content == found);
        }
    }

    /// Returns the contents that a sector may have.
    pub fn possible(&self, sector: u64) -> Vec<u64> {
        let entries = &self.sectors[sector as usize];
        let is_replaced = |entry: &&WriteRecord| {
            entries.iter().any(|other| other.replaces && entry.completed < other.sent && other.completed < NEVER)
        };
        let mut contents: Vec<u64> =
            entries.iter().filter(|entry| !is_replaced(entry)).map(|entry| entry.content).collect();
        contents.sort_unstable();
        contents.dedup();
        contents
    }

    /// Checks the disk's content, with nothing in flight.
    ///
    /// # Errors
    /// The first wrong sector.
    pub fn check_disk(&mut self, bytes: &[u8]) -> Result<(), String> {
        self.end_orphans();
        let when = (self.tick(), self.tick());
        (0..)
            .zip(bytes.chunks_exact(SECTOR))
            .take(self.sectors.len())
            .try_for_each(|(at, bytes)| self.check_read(at, bytes, when))
    }
}

/// Removes entries that a read sent at `floor` or later cannot return.
fn prune(entries: &mut Vec<WriteRecord>, floor: u64) {
    let replacing = entries.iter().filter(|entry| entry.replaces && entry.completed < floor);
    let last = replacing.map(|entry| entry.sent).max().unwrap_or(0);
    entries.retain(|entry| entry.completed >= last);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holds(oracle: &DiskOracle, content: u64, when: (u64, u64)) -> bool {
        let mut bytes = [0; SECTOR];
        fill(content, 3, &mut bytes);
        oracle.check_read(3, &bytes, when).is_ok()
    }

    fn read(oracle: &mut DiskOracle) -> (u64, u64) {
        oracle.send(99);
        oracle.complete(99)
    }

    const AT: [SectorRange; 1] = [(3, 1)];

    #[test]
    fn a_completed_write_replaces_the_old_content() {
        let mut oracle = DiskOracle::new(8);
        oracle.send_write(1, 1, &AT, true);
        let during = read(&mut oracle);
        assert!(holds(&oracle, 0, during) && holds(&oracle, 1, during));
        oracle.complete_write(1, &AT, WriteOutcome::Completed);
        let after = read(&mut oracle);
        assert!(!holds(&oracle, 0, after) && holds(&oracle, 1, after) && !holds(&oracle, 2, after));
    }

    #[test]
    fn overlapping_writes_may_end_in_any_order() {
        let mut oracle = DiskOracle::new(8);
        oracle.send_write(1, 1, &AT, true);
        oracle.send_write(2, 2, &AT, true);
        oracle.complete_write(2, &AT, WriteOutcome::Completed);
        oracle.complete_write(1, &AT, WriteOutcome::Completed);
        let after = read(&mut oracle);
        assert!(holds(&oracle, 1, after) && holds(&oracle, 2, after) && !holds(&oracle, 0, after));
    }

    #[test]
    fn a_read_in_flight_may_return_content_that_is_replaced_meanwhile() {
        let mut oracle = DiskOracle::new(8);
        oracle.send(50);
        oracle.send_write(1, 1, &AT, true);
        oracle.complete_write(1, &AT, WriteOutcome::Completed);
        oracle.send_write(2, 2, &AT, true);
        oracle.complete_write(2, &AT, WriteOutcome::Completed);
        let long = oracle.complete(50);
        assert!([0, 1, 2].into_iter().all(|content| holds(&oracle, content, long)));
        let after = read(&mut oracle);
        assert!(!holds(&oracle, 1, after) && holds(&oracle, 2, after));
    }

    #[test]
    fn a_discard_may_do_nothing_and_a_cancelled_write_too() {
        let mut oracle = DiskOracle::new(8);
        oracle.send_write(1, 1, &AT, true);
        oracle.complete_write(1, &AT, WriteOutcome::Completed);
        oracle.send_write(2, 0, &AT, false);
        oracle.complete_write(2, &AT, WriteOutcome::Completed);
        oracle.send_write(3, 3, &AT, true);
        oracle.complete_write(3, &AT, WriteOutcome::Cancelled);
        let after = read(&mut oracle);
        assert!([0, 1, 3].into_iter().all(|content| holds(&oracle, content, after)));
        oracle.send_write(4, 4, &AT, true);
        oracle.complete_write(4, &AT, WriteOutcome::Completed);
        let last = read(&mut oracle);
        assert!(![0, 1, 3].into_iter().any(|content| holds(&oracle, content, last)), "it came after its answer");
    }

    #[test]
    fn a_refused_write_has_changed_nothing_and_a_read_tells_which_cancelled_one_has() {
        let mut oracle = DiskOracle::new(8);
        oracle.send_write(1, 1, &AT, true);
        oracle.complete_write(1, &AT, WriteOutcome::Refused);
        assert_eq!(oracle.possible(3), [0]);
        oracle.send_write(2, 2, &AT, true);
        oracle.complete_write(2, &AT, WriteOutcome::Cancelled);
        assert_eq!(oracle.possible(3), [0, 2]);
        let (sent, _) = read(&mut oracle);
        let mut bytes = [0; SECTOR];
        fill(2, 3, &mut bytes);
        oracle.exclude_others(3, &bytes, sent);
        let after = read(&mut oracle);
        assert!(!holds(&oracle, 0, after) && holds(&oracle, 2, after));
        // While a write is in flight, nothing is certain.
        oracle.send_write(4, 4, &AT, true);
        let (sent, _) = read(&mut oracle);
        oracle.exclude_others(3, &bytes, sent);
        assert_eq!(oracle.possible(3), [2, 4]);
    }

    #[test]
    fn an_orphan_ends_before_the_next_completion() {
        let mut oracle = DiskOracle::new(8);
        oracle.send_write(1, 1, &AT, true);
        oracle.orphan(1, &AT);
        oracle.send_write(2, 2, &AT, true);
        oracle.complete_write(2, &AT, WriteOutcome::Completed);
        let overlapped = read(&mut oracle);
        assert!(holds(&oracle, 1, overlapped), "it may have come before or after");
        oracle.send_write(3, 3, &AT, true);
        oracle.complete_write(3, &AT, WriteOutcome::Completed);
        let late = read(&mut oracle);
        assert!(!holds(&oracle, 1, late) && holds(&oracle, 3, late));
    }

    #[test]
    fn a_sector_of_two_writes_is_torn_unless_one_is_under_way_and_one_from_elsewhere_is_foreign() {
        let mut oracle = DiskOracle::new(8);
        oracle.send_write(1, 1, &AT, true);
        oracle.send_write(2, 2, &AT, true);
        let during = read(&mut oracle);
        oracle.complete_write(1, &AT, WriteOutcome::Completed);
        oracle.complete_write(2, &AT, WriteOutcome::Completed);
        let after = read(&mut oracle);
        let mut bytes = [0; SECTOR];
        fill(1, 3, &mut bytes);
        let mut other = [0; SECTOR];
        fill(2, 3, &mut other);
        bytes[256..].copy_from_slice(&other[256..]);
        assert!(oracle.check_read(3, &bytes, during).is_ok());
        assert!(oracle.check_read(3, &bytes, after).unwrap_err().contains("torn"));
        fill(3, 3, &mut other);
        bytes[256..].copy_from_slice(&other[256..]);
        assert!(oracle.check_read(3, &bytes, during).unwrap_err().contains("torn"));
        fill(1, 4, &mut bytes);
        assert!(oracle.check_read(3, &bytes, during).unwrap_err().contains("foreign"));
    }

    #[test]
    fn the_history_stays_short() {
        let mut oracle = DiskOracle::new(8);
        for id in 1..10_000 {
            oracle.send_write(id, id, &AT, true);
            if id > 4 {
                oracle.complete_write(id - 4, &AT, WriteOutcome::Completed);
            }
        }
        assert!(oracle.sectors[3].len() < 20, "{}", oracle.sectors[3].len());
    }
}
