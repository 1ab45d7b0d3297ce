//! How a worker waits while a poll window is open. Pure: time comes in as an argument.
//!
//! Polling is the fastest where the guests' threads have CPUs of their own, and the slowest where they need the worker's. So the worker offers its
//! CPU while it polls, and [tries](Tuner) whether its guests get more done if it offers it sooner; and, [in longer blocks](Windows), if it sleeps at
//! once, or looks by a timer.

use crate::clock::Ticks;
use crate::poll::{AWAY, WindowMode};
use crate::tuner::{SHORT_BLOCKS, Tuner};
use crate::windows::Windows;

/// The settings of the tuner, the cheapest first.
const OFFER_AT_ONCE: usize = 0;
const OFFER_LATER: usize = 1;

/// Completions of a block, at least: the last turn may make it longer.
const BLOCK: u64 = 256;

/// Completions of a block that takes as long as one of slow requests.
const SLOW_BLOCK: u64 = 16;

/// A block that takes longer than this for each request, in nanoseconds, is one of a load on which ways to offer the CPU cannot be compared.
const SLOW: u64 = 50_000;

/// For how long a worker polls without finding anything before it offers the CPU to other threads, in nanoseconds: while others take it, and at
/// most, while nobody does. A guest's thread on another CPU answers within the shorter time.
const MIN_OFFER: u64 = 5_000;
const MAX_OFFER: u64 = 64_000;

/// From when on another thread took the CPU, in nanoseconds: two switches take longer, an offer that nobody takes is over sooner.
const TAKEN: u64 = 1_500;

/// How a worker waits.
#[derive(Debug)]
pub(crate) struct Waiting {
    tuner: Tuner,
    windows: Windows,
    /// Completions of the worker when it began to wait so.
    from: u64,
    /// Completions so far and before the present block, and when that began.
    completions: u64,
    before: u64,
    block_began: Ticks,
    /// When it ends as one of slow requests, if it has enough of them.
    slow_at: Ticks,
    /// A window that may be closed was open in an idle turn of this block.
    window_was_open: bool,
    /// Something happened in the turn before this one.
    was_active: bool,
    /// When the CPU was last offered to other threads, or something happened.
    offered_at: Ticks,
    /// For how long the worker polls before it offers the CPU, if it offers it later.
    offer_after: u64,
}

impl Waiting {
    pub(crate) fn new() -> Waiting {
        Waiting {
            tuner: Tuner::new(&SHORT_BLOCKS, OFFER_LATER + 1, OFFER_LATER),
            windows: Windows::new(),
            from: 0,
            completions: 0,
            before: 0,
            block_began: Ticks(0),
            slow_at: Ticks(0),
            window_was_open: false,
            was_active: false,
            offered_at: Ticks(0),
            offer_after: MIN_OFFER,
        }
    }

    /// Returns a state in which windows are used in this way for ever.
    #[cfg(test)]
    pub(crate) fn fixed(mode: WindowMode) -> Waiting {
        Waiting { windows: Windows::fixed(mode), ..Waiting::new() }
    }

    /// Returns how windows are used.
    #[inline]
    pub(crate) fn mode(&self) -> WindowMode {
        self.windows.mode()
    }

    /// Goes on after a time in which the worker had other queues. `completions`: those of the worker so far.
    fn resume(&mut self, completions: u64, now: Ticks) {
        (self.completions, self.before, self.block_began) = (completions, completions, now);
        self.tuner.disturbed();
        self.windows.resume(completions, now);
    }

    /// In this turn, which was idle, a window is open that may be closed.
    #[inline]
    pub(crate) fn window_open(&mut self) {
        self.window_was_open = true;
    }

    /// Something happened in this turn.
    #[inline]
    pub(crate) fn active(&mut self) {
        self.was_active = true;
    }

    /// Requests were completed.
    #[inline]
    pub(crate) fn completed(&mut self, requests: usize) {
        self.completions += requests as u64;
    }

    /// The completions of a turn were published.
    #[inline]
    pub(crate) fn published(&mut self, now: Ticks) {
        if self.completions - self.before >= BLOCK || now >= self.slow_at {
            self.end_block_or_go_on(now);
        }
        if self.windows.is_due(now) {
            let mode = self.mode();
            self.windows.end_block(self.completions, now);
            if self.mode() != mode {
                (self.before, self.block_began) = (self.completions, now);
                self.tuner.disturbed();
            }
        }
    }

    #[inline(never)]
    fn end_block_or_go_on(&mut self, now: Ticks) {
        let (requests, ns) = (self.completions - self.before, now.since(self.block_began));
        self.slow_at = Ticks(now.0.saturating_add(BLOCK * SLOW));
        if requests < SLOW_BLOCK {
            return;
        }
        (self.before, self.block_began) = (self.completions, now);
        // Else it does not matter whether windows are open.
        if std::mem::take(&mut self.window_was_open) {
            self.windows.busy(self.completions, ns > SLOW * requests, now);
        }
        if self.mode() != WindowMode::Open || self.windows.are_contended() {
            self.tuner.disturbed();
        } else if ns > SLOW * requests {
            self.tuner.reset();
        } else {
            self.tuner.block(requests, ns);
        }
    }

    /// Returns true if the CPU is to be offered in this idle turn, in which a window is open.
    #[inline]
    pub(crate) fn should_offer(&mut self, now: Ticks) -> bool {
        let later = !self.windows.are_contended() && self.tuner.setting() != OFFER_AT_ONCE;
        if std::mem::take(&mut self.was_active) {
            self.offered_at = now;
            return !later;
        }
        !later || now.since(self.offered_at) >= self.offer_after
    }

    /// The CPU was offered, and the worker had it again after `away` nanoseconds. Returns true if another thread kept it for long: one that has
    /// other work than to wait for this worker.
    pub(crate) fn offered(&mut self, away: u64, now: Ticks) -> bool {
        self.offered_at = now;
        self.offer_after = if away >= TAKEN { MIN_OFFER } else { (self.offer_after * 2).min(MAX_OFFER) };
        let long = away >= AWAY;
        if long {
            self.windows.was_away(self.completions, now);
        }
        long
    }
}

/// What is kept of how to wait with other numbers of queues.
const MAX_LEARNT: usize = 4;

/// From so many completions on it is worth keeping: queues move one by one.
const LEARNT: u64 = 16 * BLOCK;

/// What a worker has learnt about waiting, by the number of its queues. Queues that move are another load, for the worker that they leave, too; when they
/// are back, it is the one of before.
#[derive(Debug, Default)]
pub(crate) struct LearntWaiting(Vec<(usize, Waiting)>);

impl LearntWaiting {
    /// Queues came from another worker, or went there: the worker had `before`, and has `after`.
    pub(crate) fn queues_moved(&mut self, waiting: &mut Waiting, before: usize, after: usize, now: Ticks) {
        let completions = waiting.completions;
        let kept = self.0.iter().position(|(queues, _)| *queues == after).map(|at| self.0.remove(at).1);
        let mut next = kept.unwrap_or_else(|| Waiting { from: completions, ..Waiting::new() });
        next.resume(completions, now);
        let left = std::mem::replace(waiting, next);
        if left.completions - left.from >= LEARNT {
            self.0.retain(|(queues, _)| *queues != before);
            if self.0.len() == MAX_LEARNT {
                self.0.remove(0);
            }
            self.0.push((before, left));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::poll::PollReason;

    fn us(us: u64) -> Ticks {
        Ticks(us * 1000)
    }

    /// Serves blocks for 12 s and more, each request of which takes this many nanoseconds where the worker sleeps at once, offers the CPU at once, or later, or
    /// looks by a timer. Returns the share of blocks in percent that were served in each of these ways in the last quarter.
    fn serve(waiting: &mut Waiting, now: &mut u64, ns: [u64; 4]) -> [usize; 4] {
        let (began, mut ways) = (*now, Vec::new());
        while *now < began + 12_000_000_000 {
            let way = match waiting.mode() {
                WindowMode::Closed(_) => 0,
                WindowMode::Open => 1 + waiting.tuner.setting(),
                WindowMode::Timer => 3,
            };
            ways.push(way);
            *now += BLOCK * ns[way];
            waiting.window_open();
            waiting.completed(BLOCK as usize);
            waiting.published(Ticks(*now));
        }
        let last = &ways[ways.len() / 4 * 3..];
        [0, 1, 2, 3].map(|way| last.iter().filter(|used| **used == way).count() * 100 / last.len())
    }

    #[test]
    fn the_cpu_is_offered_rarely_while_nobody_takes_it() {
        let mut waiting = Waiting::new();
        waiting.active();
        assert!(!waiting.should_offer(us(100)) && !waiting.should_offer(us(104)) && waiting.should_offer(us(105)));
        let mut now = 105;
        for after in [10, 20, 40, 64, 64] {
            assert!(!waiting.offered(TAKEN - 1, us(now)));
            assert!(!waiting.should_offer(us(now + after - 1)) && waiting.should_offer(us(now + after)));
            now += after;
        }
        assert!(!waiting.offered(TAKEN, us(now)));
        assert!(waiting.should_offer(us(now + 5)), "others take it");
        assert!(waiting.offered(AWAY, us(now + 105)));
    }

    #[test]
    fn a_worker_whose_cpu_the_guests_need_offers_it_at_once_or_sleeps() {
        let (mut waiting, mut now) = (Waiting::new(), 0);
        let ways = serve(&mut waiting, &mut now, [3400, 3500, 5000, 6000]);
        assert!(ways[0] > 70, "{ways:?}");
        assert_ne!(waiting.mode(), WindowMode::Closed(PollReason::CpuWanted));
        let (mut waiting, mut now) = (Waiting::new(), 0);
        let ways = serve(&mut waiting, &mut now, [4000, 3000, 3500, 6000]);
        assert!(ways[1] > 80, "{ways:?}");
    }

    #[test]
    fn a_worker_with_a_cpu_of_its_own_polls() {
        let (mut waiting, mut now) = (Waiting::new(), 0);
        let ways = serve(&mut waiting, &mut now, [40_000, 3400, 2800, 30_000]);
        assert!(ways[2] > 80, "{ways:?}");
    }

    #[test]
    fn requests_of_milliseconds_are_soon_not_polled_for() {
        let (mut waiting, mut now) = (Waiting::new(), 0);
        let mut served = 0;
        while waiting.mode() == WindowMode::Open {
            waiting.active();
            waiting.window_open();
            waiting.completed(1);
            now += 2000;
            waiting.published(us(now));
            served += 1;
        }
        assert!((SLOW_BLOCK..=3 * SLOW_BLOCK).contains(&served), "{served}");
        assert_eq!(waiting.mode(), WindowMode::Closed(PollReason::NoGain));
    }

    #[test]
    fn what_was_learnt_is_kept_while_queues_are_away() {
        let (mut waiting, mut learnt, mut now) = (Waiting::new(), LearntWaiting::default(), 0);
        let sleeps = |waiting: &mut Waiting, now: &mut u64| serve(waiting, now, [3400, 3500, 5000, 6000]);
        assert!(sleeps(&mut waiting, &mut now)[0] > 70);
        // Two queues leave, one by one, and come back.
        for (before, after) in [(2, 1), (1, 0), (0, 1), (1, 2)] {
            now += 10_000_000_000;
            learnt.queues_moved(&mut waiting, before, after, Ticks(now));
            assert!(after == 2 || waiting.mode() == WindowMode::Open, "{after} queues");
        }
        let completions = waiting.completions;
        assert_ne!(waiting.mode(), WindowMode::Open, "it sleeps at once");
        waiting.window_open();
        waiting.completed(BLOCK as usize);
        waiting.published(Ticks(now));
        assert_ne!(waiting.mode(), WindowMode::Open, "the time away is not that of a block");
        assert_eq!(waiting.completions, completions + BLOCK);
        for queues in 3..10 {
            sleeps(&mut waiting, &mut now);
            learnt.queues_moved(&mut waiting, queues - 1, queues, Ticks(now));
        }
        assert_eq!(learnt.0.iter().map(|(queues, _)| *queues).collect::<Vec<_>>(), [5, 6, 7, 8]);
    }

    #[test]
    fn a_slow_load_says_nothing_of_offers() {
        let (mut waiting, mut now) = (Waiting::new(), 0);
        serve(&mut waiting, &mut now, [9000, 3000, 3500, 9000]);
        assert_eq!(waiting.tuner.best(), OFFER_AT_ONCE);
        serve(&mut waiting, &mut now, [2 * SLOW, SLOW + 1, SLOW + 1, 2 * SLOW]);
        assert_eq!(waiting.tuner.best(), OFFER_LATER);
    }
}
