//! The requests that reached storage, in order, and the content that remains after a power cut.

use std::sync::{Mutex, MutexGuard, PoisonError};

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

/// Bytes that a disk writes atomically.
pub const SECTOR: usize = 512;

/// A position in the log: the number of events before it.
pub type Position = usize;

/// The disk's handling of its guarantees. The faulty models show that the tests detect a loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheModel {
    /// Flushes and durable writes are effective.
    Honest,
    /// Flushes that complete at or after this position do nothing.
    IgnoresFlushFrom(Position),
    /// Durable writes are like other writes.
    IgnoresDurable,
}

/// Identifies an event that has not completed.
#[derive(Clone, Copy, Debug)]
pub struct EventId(Position);

#[derive(Debug)]
enum Event {
    Write {
        volume: usize,
        at: usize,
        /// All zeroes if the data is `None`.
        len: usize,
        data: Option<Vec<u8>>,
        durable: bool,
        answered: Option<Position>,
    },
    Flush {
        volume: usize,
        answered: Option<Position>,
    },
    Completion,
    Mark(String),
}

/// The requests that reached the volumes, in order.
#[derive(Debug, Default)]
pub struct PowerLog {
    events: Mutex<Vec<Event>>,
}

impl PowerLog {
    fn events(&self) -> MutexGuard<'_, Vec<Event>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, event: Event) -> EventId {
        let mut events = self.events();
        events.push(event);
        EventId(events.len() - 1)
    }

    /// Returns the current position.
    pub fn position(&self) -> Position {
        self.events().len()
    }

    /// Records a write; `durable` if its completion guarantees durability.
    pub fn write(&self, volume: usize, at: u64, data: Vec<u8>, durable: bool) -> EventId {
        let (at, len) = (at as usize, data.len());
        self.push(Event::Write { volume, at, len, data: Some(data), durable, answered: None })
    }

    /// Records a write of zeroes or a discard.
    pub fn zeroes(&self, volume: usize, at: u64, len: u64, durable: bool) -> EventId {
        self.push(Event::Write { volume, at: at as usize, len: len as usize, data: None, durable, answered: None })
    }

    /// Records a flush.
    pub fn flush(&self, volume: usize) -> EventId {
        self.push(Event::Flush { volume, answered: None })
    }

    /// Records the successful completion of a write or flush, before it is reported.
    pub fn complete(&self, id: EventId) {
        let mut events = self.events();
        let now = events.len();
        events.push(Event::Completion);
        match &mut events[id.0] {
            Event::Write { answered, .. } | Event::Flush { answered, .. } => *answered = Some(now),
            Event::Completion | Event::Mark(_) => {}
        }
    }

    /// Records a text, for example a guest's acknowledgement.
    pub fn mark(&self, text: &str) {
        self.push(Event::Mark(text.to_owned()));
    }

    /// Returns all marks with their positions.
    pub fn marks(&self) -> Vec<(Position, String)> {
        let events = self.events();
        let marks = events.iter().enumerate();
        marks
            .filter_map(|(at, event)| if let Event::Mark(text) = event { Some((at + 1, text.clone())) } else { None })
            .collect()
    }

    /// Returns the number of writes, durable writes and flushes of a volume.
    pub fn counts(&self, of: usize) -> (usize, usize, usize) {
        self.events().iter().fold((0, 0, 0), |(writes, durables, flushes), event| match event {
            Event::Write { volume, durable, .. } if *volume == of => {
                (writes + 1, durables + usize::from(*durable), flushes)
            }
            Event::Flush { volume, .. } if *volume == of => (writes, durables, flushes + 1),
            _ => (writes, durables, flushes),
        })
    }

    /// Returns an image of `size` bytes that a volume, initially all zeroes, may hold after a cut at a position.
    pub fn cut(&self, volume: usize, size: usize, at: Position, cache: CacheModel, seed: u64) -> Vec<u8> {
        let mut image = vec![0; size];
        let events = self.events();
        let events = &events[..at];
        // The last flush that completed by then. It covers all writes that completed before it was sent.
        let by = if let CacheModel::IgnoresFlushFrom(from) = cache { at.min(from) } else { at };
        let flushed = events.iter().rposition(
            |event| matches!(event, Event::Flush { volume: of, answered: Some(end) } if *of == volume && *end < by),
        );
        let flushed = flushed.unwrap_or(0);
        let mut random = SmallRng::seed_from_u64(seed);
        // Some cuts lose all volatile writes, some lose none.
        let survive = [0.0, 0.1, 0.5, 0.9, 1.0][random.random_range(0..5)];
        for event in events {
            let Event::Write { volume: of, at: start, len, data, durable, answered } = event else { continue };
            if *of != volume {
                continue;
            }
            let promised = *durable && cache != CacheModel::IgnoresDurable && answered.is_some_and(|end| end < at);
            let kept = promised || answered.is_some_and(|end| end < flushed);
            let torn = !kept && random.random_bool(0.2);
            let whole = kept || random.random_bool(survive);
            if !whole && !torn {
                continue;
            }
            for from in (0..*len).step_by(SECTOR) {
                if torn && random.random_bool(0.5) {
                    continue;
                }
                let to = (from + SECTOR).min(*len);
                let target = &mut image[start + from..start + to];
                match data {
                    Some(data) => target.copy_from_slice(&data[from..to]),
                    None => target.fill(0),
                }
            }
        }
        image
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns for each write if some image has it, and if all have it, of many cuts at the end.
    fn fates(log: &PowerLog, cache: CacheModel) -> (Vec<bool>, Vec<bool>) {
        let (mut some, mut all) = (vec![false; 4], vec![true; 4]);
        for seed in 0..200 {
            let image = log.cut(0, 4 * SECTOR, log.position(), cache, seed);
            for (index, sector) in image.chunks(SECTOR).enumerate() {
                let there = sector == [index as u8 + 1; SECTOR];
                assert!(there || sector == [0; SECTOR]);
                some[index] |= there;
                all[index] &= there;
            }
        }
        (some, all)
    }

    #[test]
    fn a_flush_covers_writes_completed_before_it_was_sent() {
        let log = PowerLog::default();
        let write = |at: u64, durable| log.write(0, at * SECTOR as u64, vec![at as u8 + 1; SECTOR], durable);
        log.complete(write(0, false));
        let under_way = write(1, false);
        let flush = log.flush(0);
        log.complete(under_way);
        log.complete(flush);
        log.complete(write(2, true));
        log.complete(write(3, false));
        // A flush of another volume, and one that has not completed, guarantee nothing.
        let other = log.flush(1);
        log.complete(other);
        log.flush(0);
        let every = vec![true; 4];
        assert_eq!(fates(&log, CacheModel::Honest), (every.clone(), vec![true, false, true, false]));
        assert_eq!(fates(&log, CacheModel::IgnoresFlushFrom(0)), (every.clone(), vec![false, false, true, false]));
        let end = CacheModel::IgnoresFlushFrom(log.position());
        assert_eq!(fates(&log, end), (every.clone(), vec![true, false, true, false]));
        assert_eq!(fates(&log, CacheModel::IgnoresDurable), (every, vec![true, false, false, false]));
    }

    #[test]
    fn a_durable_write_guarantees_nothing_before_its_completion() {
        let log = PowerLog::default();
        let id = log.write(0, 0, vec![1; SECTOR], true);
        assert!(!fates(&log, CacheModel::Honest).1[0]);
        log.complete(id);
        assert!(fates(&log, CacheModel::Honest).1[0]);
    }

    #[test]
    fn a_write_may_be_torn_at_sectors() {
        let log = PowerLog::default();
        log.write(0, 0, vec![1; 2 * SECTOR], false);
        let halves = |seed| {
            let image = log.cut(0, 2 * SECTOR, 1, CacheModel::Honest, seed);
            (image[0], image[SECTOR])
        };
        let seen: std::collections::BTreeSet<_> = (0..200).map(halves).collect();
        assert_eq!(seen.len(), 4);
    }
}
