//! The writes of a driver, the guarantees of their completions, and the check of an image against them.

use std::collections::BTreeMap;

use super::log::{Position, SECTOR};

/// Index of a write of a [`WriteHistory`].
#[derive(Clone, Copy, Debug)]
pub struct WriteId(usize);

#[derive(Debug)]
struct RecordedWrite {
    /// Its sectors.
    first: u64,
    count: u64,
    /// Pattern of each of its sectors; 0 for zeroes.
    stamp: u64,
    sent: Position,
    /// Completion, as a step of the driver.
    completed: Option<u64>,
    /// The first position at which it must be on the image.
    durable: Option<Position>,
}

/// The writes of a driver. No two writes of the same sector may be in flight at once.
#[derive(Debug, Default)]
pub struct WriteHistory {
    writes: Vec<RecordedWrite>,
    sectors: BTreeMap<u64, Vec<usize>>,
    step: u64,
    /// Initial pattern of all sectors; 0 for zeroes.
    initial: u64,
}

impl WriteHistory {
    /// Creates the history of a disk whose sectors initially have this stamp.
    pub fn of_disk_with(stamp: u64) -> WriteHistory {
        WriteHistory { initial: stamp, ..WriteHistory::default() }
    }

    /// Returns the bytes of a sector with this stamp: its number and the stamp, repeated.
    pub fn content(sector: u64, stamp: u64) -> Vec<u8> {
        if stamp == 0 {
            return vec![0; SECTOR];
        }
        [sector.to_le_bytes(), stamp.to_le_bytes()].concat().repeat(SECTOR / 16)
    }

    /// Records a write before it is sent. `stamp` is unique, and 0 for zeroes.
    pub fn send(&mut self, first: u64, count: u64, stamp: u64, now: Position) -> WriteId {
        self.writes.push(RecordedWrite { first, count, stamp, sent: now, completed: None, durable: None });
        let id = self.writes.len() - 1;
        for sector in first..first + count {
            self.sectors.entry(sector).or_default().push(id);
        }
        WriteId(id)
    }

    /// Records a successful write; `durable` if its completion guarantees durability.
    pub fn complete_write(&mut self, WriteId(id): WriteId, durable: bool, now: Position) {
        self.step += 1;
        self.writes[id].completed = Some(self.step);
        if durable {
            self.writes[id].durable = Some(now);
        }
    }

    /// Records a flush before it is sent. Returns its token for [`complete_flush`](Self::complete_flush).
    pub fn send_flush(&self) -> u64 {
        self.step
    }

    /// Records a successful flush.
    pub fn complete_flush(&mut self, promise: u64, now: Position) {
        for write in &mut self.writes {
            if write.durable.is_none() && write.completed.is_some_and(|step| step <= promise) {
                write.durable = Some(now);
            }
        }
    }

    /// Returns the sectors of an image after a cut with wrong content: older than guaranteed, newer than sent, or never
    /// written there.
    pub fn faults(&self, image: &[u8], cut: Position) -> Vec<String> {
        let mut faults = vec![];
        for (&sector, ids) in &self.sectors {
            let found = &image[sector as usize * SECTOR..][..SECTOR];
            let oldest = ids.iter().rposition(|&id| self.writes[id].durable.is_some_and(|from| from <= cut));
            let sent = ids.iter().take_while(|&&id| self.writes[id].sent <= cut).count();
            let fits = |&id: &usize| found == WriteHistory::content(sector, self.writes[id].stamp);
            let untouched = oldest.is_none() && found == WriteHistory::content(sector, self.initial);
            if !untouched && !ids[oldest.unwrap_or(0)..sent].iter().any(fits) {
                let was = ids.iter().position(fits);
                let name = |at: Option<usize>| {
                    at.map_or("none".to_owned(), |at| {
                        let write = &self.writes[ids[at]];
                        format!("number {at} (sectors {}+{}, stamp {})", write.first, write.count, write.stamp)
                    })
                };
                faults.push(format!(
                    "cut at {cut}, sector {sector}: found write {}, promised was {}, sent were {sent}",
                    name(was),
                    name(oldest)
                ));
            }
        }
        faults
    }

    /// Returns the number of writes that must be on an image after the cut.
    pub fn guaranteed_writes(&self, cut: Position) -> usize {
        self.writes.iter().filter(|write| write.durable.is_some_and(|from| from <= cut)).count()
    }
}
