//! Whether a worker polls while other threads want its CPU all the time. Pure: time comes in as an argument.
//!
//! A thread that computes keeps an offered CPU for a time slice of milliseconds, and the worker waits that long; a worker that sleeps has the CPU at
//! once when it is woken. So sleeping is better where the others are strangers. Where they are the virtual CPUs of the worker's own guests, polling
//! may be: requests come without kicks, many at a time. From the rings the two look alike, so both are [tried](Tuner), in blocks of several time
//! slices.

use crate::clock::Ticks;
use crate::tuner::{Rule, Tuner};

/// The settings of the tuner.
const CLOSED: usize = 0;
const OPEN: usize = 1;

/// Length of a block, at least, in nanoseconds: about ten time slices.
const BLOCK_NS: u64 = 40_000_000;

/// Polling must bring a tenth, because it takes the CPU from others. Few pairs, because a block is long.
static RULE: Rule =
    Rule { pairs: 4, wins: 3, gain_percent: 10, loss_percent: 1, first_pause: 1, min_pause: 16, max_pause: 256 };

/// So many long absences within a block mean that others want the CPU all the time; fewer, that something ran.
const MANY: u32 = 3;

/// A block that is this much longer than it should be ended long after the load did, in blocks.
const PAUSED: u64 = 8;

/// Whether others want the worker's CPU, and whether it polls nevertheless.
#[derive(Debug)]
pub(crate) struct Contention {
    /// While others want the CPU.
    tuner: Option<Tuner>,
    /// The present block: when it began, when it is to end, the worker's completions before it, and long absences in it.
    began: Ticks,
    until: Ticks,
    before: u64,
    absences: u32,
}

impl Contention {
    pub(crate) fn new() -> Contention {
        Contention { tuner: None, began: Ticks(0), until: Ticks(u64::MAX), before: 0, absences: 0 }
    }

    /// Returns true if others want the CPU.
    #[inline]
    pub(crate) fn is_present(&self) -> bool {
        self.tuner.is_some()
    }

    /// Returns true if windows that may be closed are to be closed.
    #[inline]
    pub(crate) fn closes(&self) -> bool {
        self.tuner.as_ref().is_some_and(|tuner| tuner.setting() == CLOSED)
    }

    /// Another thread kept the CPU for long when the worker offered it. `completions`: of the worker, so far.
    pub(crate) fn was_away(&mut self, completions: u64, now: Ticks) {
        if self.tuner.is_none() && now.since(self.began) >= BLOCK_NS {
            (self.began, self.absences) = (now, 0);
        }
        self.absences += 1;
        if self.tuner.is_none() && self.absences >= MANY {
            self.tuner = Some(Tuner::new(&RULE, OPEN + 1, CLOSED));
            self.begin_block(completions, now);
        }
    }

    /// Returns true if a block is to be [ended](Self::end_block).
    #[inline]
    pub(crate) fn is_due(&self, now: Ticks) -> bool {
        now >= self.until
    }

    /// Ends a block: `completions` of the worker, so far.
    pub(crate) fn end_block(&mut self, completions: u64, now: Ticks) {
        let Some(tuner) = &mut self.tuner else { return };
        let (requests, ns) = (completions - self.before, now.since(self.began));
        let calm = tuner.setting() == OPEN && self.absences < MANY;
        if calm || ns > PAUSED * BLOCK_NS {
            *self = Contention::new();
            return;
        }
        tuner.block(requests.max(1), ns);
        self.begin_block(completions, now);
    }

    fn begin_block(&mut self, completions: u64, now: Ticks) {
        (self.began, self.before, self.absences) = (now, completions, 0);
        self.until = Ticks(now.0.saturating_add(BLOCK_NS));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A load: how many requests of a block are completed while windows are closed and while they are open, and how often the worker is away then.
    struct Load {
        closed: u64,
        open: u64,
        absences: u32,
    }

    /// Serves blocks. Returns how many of them were closed.
    fn serve(contention: &mut Contention, at: &mut (u64, u64), blocks: usize, load: &Load) -> usize {
        let mut closed = 0;
        for _ in 0..blocks {
            let (now, completions) = at;
            if contention.closes() {
                closed += 1;
                *completions += load.closed;
            } else {
                *completions += load.open;
                (0..load.absences).for_each(|_| contention.was_away(*completions, Ticks(*now)));
            }
            *now += BLOCK_NS;
            if contention.is_due(Ticks(*now)) {
                contention.end_block(*completions, Ticks(*now));
            }
        }
        closed
    }

    #[test]
    fn windows_stay_open_while_nobody_wants_the_cpu() {
        let (mut contention, mut at) = (Contention::new(), (0, 0));
        let load = Load { closed: 100, open: 100, absences: MANY - 1 };
        assert_eq!(serve(&mut contention, &mut at, 100, &load), 0);
        assert!(!contention.is_present());
    }

    #[test]
    fn windows_are_closed_where_others_want_the_cpu_and_polling_brings_little() {
        let (mut contention, mut at) = (Contention::new(), (0, 0));
        let closed = serve(&mut contention, &mut at, 2000, &Load { closed: 1000, open: 1080, absences: 10 });
        assert!(contention.is_present() && (1900..2000).contains(&closed), "{closed}");
    }

    #[test]
    fn windows_are_open_where_the_guests_get_more_done() {
        let (mut contention, mut at) = (Contention::new(), (0, 0));
        let closed = serve(&mut contention, &mut at, 20, &Load { closed: 1000, open: 2000, absences: 10 });
        assert!((3..=6).contains(&closed), "{closed}");
        let closed = serve(&mut contention, &mut at, 2000, &Load { closed: 1000, open: 2000, absences: 10 });
        assert!(contention.is_present() && closed < 100, "{closed}");
        // Another load on the same worker.
        serve(&mut contention, &mut at, 2000, &Load { closed: 1000, open: 700, absences: 10 });
        assert!(contention.closes());
    }

    #[test]
    fn windows_are_open_again_when_the_others_have_gone() {
        let (mut contention, mut at) = (Contention::new(), (0, 0));
        serve(&mut contention, &mut at, 2000, &Load { closed: 1000, open: 500, absences: 10 });
        assert!(contention.closes());
        let closed = serve(&mut contention, &mut at, 600, &Load { closed: 1000, open: 500, absences: 0 });
        assert!(!contention.is_present() && closed <= 2 * 256, "{closed}");
        // Or after a pause of the load.
        serve(&mut contention, &mut at, 10, &Load { closed: 1000, open: 500, absences: 10 });
        assert!(contention.is_present());
        at.0 += PAUSED * BLOCK_NS;
        serve(&mut contention, &mut at, 1, &Load { closed: 1, open: 1, absences: 0 });
        assert!(!contention.is_present());
    }
}
