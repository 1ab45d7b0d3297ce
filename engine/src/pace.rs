//! The pace of a queue's turns: how long the worker leaves a ring alone after it has taken requests from it. Pure: time comes in as an argument.
//!
//! Each look at a ring takes cache lines from a driver that makes requests available one by one, and each publish takes more. While such a driver
//! is the bottleneck, a worker that looks less often gets more requests a second. While the driver waits for completions, each look that is put
//! off is lost time. The worker cannot know which it is, so it [tries](Tuner). Slow queues, for which a hold could not matter, are never tried on.

use crate::clock::Ticks;
use crate::tuner::{SHORT_BLOCKS, Tuner};

/// The holds that are tried, in nanoseconds.
const HOLDS: [u64; 5] = [0, 600, 1200, 2400, 4000];

/// Requests of a block, at least: the last batch may make it longer.
const BLOCK: u64 = 256;

/// A block that takes longer than this for each request, in nanoseconds, is one of a slow queue: turns are not what limits it.
const SLOW: u64 = 2000;

/// A gap between two looks of which others are the cause, in nanoseconds: a preemption, a pause of the driver. Its block is not counted.
const DISTURBED: u64 = 100_000;

/// The pace of one queue.
#[derive(Debug)]
pub(crate) struct Pace {
    /// Until when the ring is left alone.
    until: Ticks,
    /// In force now.
    hold_ns: u64,
    /// When requests were taken last.
    taken_at: Ticks,
    /// Requests that the present block lacks, and when the one before ended. Counted down, so that it is compared with 0.
    lacking: i64,
    began: Ticks,
    disturbed: bool,
    tuner: Tuner,
}

impl Pace {
    pub(crate) fn new() -> Pace {
        Pace {
            until: Ticks(0),
            hold_ns: 0,
            taken_at: Ticks(0),
            lacking: BLOCK as i64,
            began: Ticks(0),
            disturbed: true,
            tuner: Tuner::new(&SHORT_BLOCKS, HOLDS.len(), 0),
        }
    }

    /// Returns true if the ring is to be left alone now.
    #[inline]
    pub(crate) fn holds(&self, now: Ticks) -> bool {
        now < self.until
    }

    /// Returns the hold that is in force between trials, in nanoseconds.
    pub(crate) fn hold_ns(&self) -> u64 {
        HOLDS[self.tuner.best()]
    }

    /// Requests were taken off the ring; `more` are waiting there.
    #[inline]
    pub(crate) fn took(&mut self, requests: u64, more: bool, now: Ticks) {
        if now.0 > self.taken_at.0 + DISTURBED {
            self.disturbed = true;
        }
        self.taken_at = now;
        self.lacking -= requests as i64;
        if self.lacking <= 0 {
            self.end_block();
        }
        // A batch that was full needs no hold.
        self.until = if more { now } else { Ticks(now.0 + self.hold_ns) };
    }

    /// The ring was empty: the driver waits for completions, or has no more work.
    #[inline]
    pub(crate) fn found_nothing(&mut self) {
        self.until = Ticks(0);
    }

    #[inline(never)]
    fn end_block(&mut self) {
        let requests = (BLOCK as i64 - std::mem::replace(&mut self.lacking, BLOCK as i64)) as u64;
        let ns = self.taken_at.since(self.began);
        self.began = self.taken_at;
        if std::mem::take(&mut self.disturbed) {
            self.tuner.disturbed();
        } else if ns > SLOW * requests {
            self.tuner.reset();
        } else {
            self.tuner.block(requests, ns);
        }
        self.hold_ns = HOLDS[self.tuner.setting()];
    }
}

#[cfg(test)]
mod tests;
