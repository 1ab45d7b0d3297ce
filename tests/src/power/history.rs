//! What a driver wrote, what it was promised, and whether an image keeps the promises.

use std::collections::BTreeMap;

use super::log::{Position, SECTOR};

/// Names a write of a [`History`].
#[derive(Clone, Copy, Debug)]
pub struct WriteId(usize);

#[derive(Debug)]
struct Written {
    /// The sectors.
    first: u64,
    count: u64,
    /// What each of its sectors holds; 0 for zeroes.
    stamp: u64,
    sent: Position,
    /// In the driver's own order of steps.
    answered: Option<u64>,
    /// From when on it must be there.
    durable: Option<Position>,
}

/// A driver's writes. It must not have two of the same sector in flight at once.
#[derive(Debug, Default)]
pub struct History {
    writes: Vec<Written>,
    sectors: BTreeMap<u64, Vec<usize>>,
    step: u64,
}

impl History {
    /// The bytes of a sector with this stamp: its number and the stamp, over and over.
    pub fn content(sector: u64, stamp: u64) -> Vec<u8> {
        if stamp == 0 {
            return vec![0; SECTOR];
        }
        [sector.to_le_bytes(), stamp.to_le_bytes()].concat().repeat(SECTOR / 16)
    }

    /// A write is about to be sent. `stamp` is another for each, and 0 for zeroes.
    pub fn send(&mut self, first: u64, count: u64, stamp: u64, now: Position) -> WriteId {
        self.writes.push(Written { first, count, stamp, sent: now, answered: None, durable: None });
        let id = self.writes.len() - 1;
        for sector in first..first + count {
            self.sectors.entry(sector).or_default().push(id);
        }
        WriteId(id)
    }

    /// A write was answered well; `durable` when that promises that it is kept.
    pub fn answered(&mut self, WriteId(id): WriteId, durable: bool, now: Position) {
        self.step += 1;
        self.writes[id].answered = Some(self.step);
        if durable {
            self.writes[id].durable = Some(now);
        }
    }

    /// A flush is about to be sent: what it promises.
    pub fn flush(&self) -> u64 {
        self.step
    }

    /// A flush was answered well.
    pub fn flushed(&mut self, promise: u64, now: Position) {
        for write in &mut self.writes {
            if write.durable.is_none() && write.answered.is_some_and(|step| step <= promise) {
                write.durable = Some(now);
            }
        }
    }

    /// Sectors of an image after a cut that hold what they must not: older than promised, newer than sent, or what was never
    /// written there. At first all sectors are zero.
    pub fn faults(&self, image: &[u8], cut: Position) -> Vec<String> {
        let mut faults = vec![];
        for (&sector, ids) in &self.sectors {
            let found = &image[sector as usize * SECTOR..][..SECTOR];
            let oldest = ids.iter().rposition(|&id| self.writes[id].durable.is_some_and(|from| from <= cut));
            let sent = ids.iter().take_while(|&&id| self.writes[id].sent <= cut).count();
            let fits = |&id: &usize| found == History::content(sector, self.writes[id].stamp);
            let zero = oldest.is_none() && found == [0; SECTOR];
            if !zero && !ids[oldest.unwrap_or(0)..sent].iter().any(fits) {
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

    /// How many writes are promised to be on an image after the cut.
    pub fn promised(&self, cut: Position) -> usize {
        self.writes.iter().filter(|write| write.durable.is_some_and(|from| from <= cut)).count()
    }
}
