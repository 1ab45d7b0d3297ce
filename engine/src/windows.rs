//! Whether a worker opens the windows of `auto` at all, where that is not plain. Pure: time comes in as an argument.
//!
//! *Contention.* A thread that computes keeps an offered CPU for a time slice of milliseconds, and the worker waits that long; a worker that sleeps
//! has the CPU at once when it is woken. So sleeping is better where the others are strangers. Where they are the virtual CPUs of the worker's own
//! guests, polling may be: requests come without kicks, many at a time. From the rings the two look alike.
//!
//! *Any load.* While a disk works, polling saves wake-ups and takes a whole CPU. And a scheduler that sees a worker and a guest's thread sleep and wake each
//! other keeps both on one CPU, where sleeping is the better way, though polling on two is faster by far.
//!
//! *Looks by a timer.* A thread that is woken has the CPU at once: a worker on the CPU of a guest's thread is woken by the first request that this makes,
//! serves it alone and sleeps. One that sleeps for a moment and looks finds what has gathered meanwhile, and is not kicked.
//!
//! So the three are [tried](Tuner), in blocks that are long enough for several time slices. After each change threads are moved, and a hypervisor
//! learns how long a CPU is idle: a disk's load has half as many requests in the first 80 ms after windows are closed as later, another one twenty
//! times as many. So the first 120 ms do not count.

use std::time::Duration;

use crate::clock::Ticks;
use crate::poll::{PollReason, WindowMode};
use crate::tuner::{Rule, Test, Tuner, UNEVEN_BLOCKS, UNEVEN_SLOW_BLOCKS, of_a_thousand};

/// The settings of the tuner, the one that takes the least CPU time first.
const CLOSED: usize = 0;
const TIMER: usize = 1;
const OPEN: usize = 2;
const SETTINGS: usize = 3;

/// Length of a block, at least, in nanoseconds: about twenty time slices.
const BLOCK_NS: u64 = 80_000_000;

/// After windows are used in another way, so many steps do not count, each of which takes so long, in nanoseconds.
const SETTLING_STEPS: u32 = HOPELESS.len() as u32;
const STEP_NS: u64 = 40_000_000;

/// How many times as long as usual requests take in such a step if the way is given up, by the steps that are left: it settles meanwhile.
const HOPELESS: [u64; 3] = [2, 3, 4];

/// Polling must bring a tenth, because it takes the CPU from others. Few pairs, because a block is long.
static CONTENTION: Rule = Rule {
    pairs: 4,
    test: Test::Wins(3),
    gain_percent: 10,
    loss_percent: 1,
    first_pause: 1,
    min_pause: 8,
    max_pause: 128,
    tries_all: true,
};

/// So many long absences within a step mean that others want the CPU all the time; fewer, that something ran.
const MANY: u32 = 3;

/// A block that is this much longer than it should be ended long after the load did, in blocks.
const PAUSED: u64 = 4;

/// Strangers are there if there were [`MANY`] long absences again after so long at most, in steps: what ran for a moment is gone by then.
const AGAIN: u64 = 3;

/// How many blocks lie between two changes of the load that are acted upon: at least, after one that came soon, and at most. Where loads change all the
/// time, what is tried for each of them would take a quarter of it.
const MIN_BACKOFF: u32 = 16;
const MAX_BACKOFF: u32 = 256;

/// For how long a worker sleeps between two looks by its timer: guests on its CPU make requests meanwhile. A thread that slept for 12 us does not
/// preempt another one when it is woken (Linux 6.18), and waits for the end of its time slice.
pub(crate) const TIMER_PERIOD: Duration = Duration::from_micros(25);

/// Looks by a timer are not tried where a thousand requests take so many nanoseconds: most looks would find nothing.
const SLOW_FOR_TIMER: u64 = 2000 * TIMER_PERIOD.as_nanos() as u64;

/// Polling is not tried where they take so many: a wake-up takes 50 us at most, which is less than [`UNEVEN_SLOW_BLOCKS`] asks for.
const SLOW_FOR_POLLING: u64 = 1000 * 625_000;

/// A request that takes so many times as long as before, or as short, is one of another load.
const ANOTHER: u64 = 4;

/// Why ways to use windows are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    Contention,
    Load,
}

/// Which changes of the load are acted upon.
#[derive(Clone, Copy, Debug, Default)]
struct Backoff {
    /// Blocks since the last one, and how many there have to be.
    since: u32,
    least: u32,
}

impl Backoff {
    fn block(&mut self) {
        self.since = self.since.saturating_add(1);
    }

    /// The load has changed. Returns true if that is to be acted upon.
    fn is_over(&mut self) -> bool {
        if self.since < self.least {
            return false;
        }
        let was_steady = self.since >= 4 * self.least;
        self.least = if was_steady { MIN_BACKOFF } else { (2 * self.least).min(MAX_BACKOFF) };
        self.since = 0;
        true
    }
}

/// How the windows of `auto` are used, and why that is tried.
#[derive(Debug)]
pub(crate) struct Windows {
    /// While they are compared; otherwise windows may be open.
    trials: Option<(Cause, Tuner)>,
    /// How windows are to be used, as the trials say: asked in each turn.
    mode: WindowMode,
    /// The present block or step: when it began, when it is to end, the worker's completions before it, and long absences in it.
    began: Ticks,
    until: Ticks,
    before: u64,
    absences: u32,
    /// Steps that are left before blocks count.
    settling: u32,
    /// Since when long absences are counted, a step at most, and how many there were: whatever a block is.
    lately: (Ticks, u32),
    /// When there were many of these first, if that was lately.
    suspected: Option<Ticks>,
    backoff: Backoff,
    /// Requests were served since there are no trials.
    is_busy: bool,
    /// What a thousand requests took on average since the trials began, or one changed the setting, in nanoseconds.
    usual_ns: Option<u64>,
}

impl Windows {
    pub(crate) fn new() -> Windows {
        Windows {
            trials: None,
            mode: WindowMode::Open,
            began: Ticks(0),
            until: Ticks(u64::MAX),
            before: 0,
            absences: 0,
            settling: 0,
            lately: (Ticks(0), 0),
            suspected: None,
            backoff: Backoff::default(),
            is_busy: false,
            usual_ns: None,
        }
    }

    /// Returns true while others want the CPU.
    #[inline]
    pub(crate) fn are_contended(&self) -> bool {
        matches!(self.trials, Some((Cause::Contention, _)))
    }

    /// Returns how windows are to be used.
    #[inline]
    pub(crate) fn mode(&self) -> WindowMode {
        self.mode
    }

    /// Another thread kept the CPU for long when the worker offered it. `completions`: of the worker, so far.
    pub(crate) fn was_away(&mut self, completions: u64, now: Ticks) {
        self.absences += 1;
        if now.since(self.lately.0) >= STEP_NS {
            self.lately = (now, 0);
        }
        self.lately.1 += 1;
        if self.are_contended() || self.lately.1 < MANY {
            return;
        }
        match self.suspected.map(|at| now.since(at)) {
            Some(..STEP_NS) => {}
            Some(since) if since <= AGAIN * STEP_NS => {
                (self.suspected, self.usual_ns) = (None, None);
                // Open windows are tried first, and at once: the others may be gone.
                self.trials = Some((Cause::Contention, Tuner::trying(&CONTENTION, SETTINGS, CLOSED, OPEN)));
                self.begin_block(completions, now);
            }
            _ => self.suspected = Some(now),
        }
    }

    /// Forgets what was tried.
    fn forget(&mut self) {
        *self = Windows { backoff: self.backoff, ..Windows::new() };
    }

    /// Goes on after a time that says nothing. `completions` of the worker, so far.
    pub(crate) fn resume(&mut self, completions: u64, now: Ticks) {
        (self.lately, self.suspected) = ((now, 0), None);
        if self.trials.is_some() {
            self.begin_block(completions, now);
            self.settling = SETTLING_STEPS;
            self.until = Ticks(now.0.saturating_add(STEP_NS));
        }
    }

    /// The worker has served some requests. `completions`: its own, so far. `is_slow`: one of them took longer than wake-ups do, so that polling takes much
    /// time and brings little; the first requests may have come long after those before them, so the next ones are judged.
    pub(crate) fn busy(&mut self, completions: u64, is_slow: bool, now: Ticks) {
        if self.trials.is_some() {
            return;
        }
        if !std::mem::replace(&mut self.is_busy, true) {
            return;
        }
        let (rule, first) = if is_slow { (&UNEVEN_SLOW_BLOCKS, CLOSED) } else { (&UNEVEN_BLOCKS, OPEN) };
        self.trials = Some((Cause::Load, Tuner::new(rule, SETTINGS, first)));
        self.begin_block(completions, now);
    }

    /// Returns true if a block is to be [ended](Self::end_block).
    #[inline]
    pub(crate) fn is_due(&self, now: Ticks) -> bool {
        now >= self.until
    }

    /// Ends a block or a step: `completions` of the worker, so far.
    pub(crate) fn end_block(&mut self, completions: u64, now: Ticks) {
        let Some((cause, tuner)) = &mut self.trials else { return };
        let (requests, ns) = ((completions - self.before).max(1), now.since(self.began));
        let thousand_ns = of_a_thousand(requests, ns);
        let others_are_gone = *cause == Cause::Contention
            && tuner.setting() == OPEN
            && u64::from(self.absences) * STEP_NS < u64::from(MANY) * ns;
        if others_are_gone || ns > PAUSED * BLOCK_NS {
            return self.forget();
        }
        if self.settling > 0 {
            self.settling -= 1;
            let times = HOPELESS[self.settling as usize];
            let is_hopeless = self.usual_ns.is_some_and(|usual_ns| thousand_ns > usual_ns.saturating_mul(times));
            if is_hopeless && tuner.setting() != tuner.best() {
                tuner.give_up();
            }
            return self.begin_block(completions, now);
        }
        self.backoff.block();
        let best = tuner.best();
        if tuner.setting() == best {
            let has_changed = self.usual_ns.is_some_and(|usual_ns| match cause {
                // Threads were moved, or others came: the setting won under conditions that are gone.
                Cause::Contention => thousand_ns > usual_ns.saturating_mul(ANOTHER),
                Cause::Load => is_another(usual_ns, thousand_ns),
            });
            if has_changed && self.backoff.is_over() {
                if *cause == Cause::Load {
                    return self.forget();
                }
                tuner.hurry();
                self.usual_ns = None;
            } else {
                // Slowly, else a block in which the load changed would hide that.
                self.usual_ns =
                    Some(self.usual_ns.map_or(thousand_ns, |usual_ns| usual_ns - usual_ns / 8 + thousand_ns / 8));
            }
        }
        tuner.block(requests, ns);
        let is_useless = match tuner.setting() {
            TIMER => thousand_ns > SLOW_FOR_TIMER,
            OPEN => thousand_ns > SLOW_FOR_POLLING,
            _ => false,
        };
        if is_useless && *cause == Cause::Load && tuner.setting() != tuner.best() {
            tuner.give_up();
        }
        if tuner.best() != best {
            self.usual_ns = None;
        }
        self.begin_block(completions, now);
    }

    /// Returns windows that are used in this way and stay so.
    #[cfg(test)]
    pub(crate) fn fixed(mode: WindowMode) -> Windows {
        let first = match mode {
            WindowMode::Closed(_) => CLOSED,
            WindowMode::Timer => TIMER,
            WindowMode::Open => OPEN,
        };
        Windows { trials: Some((Cause::Contention, Tuner::new(&CONTENTION, SETTINGS, first))), mode, ..Windows::new() }
    }

    fn begin_block(&mut self, completions: u64, now: Ticks) {
        (self.began, self.before, self.absences) = (now, completions, 0);
        let mode = self.tried_mode();
        if std::mem::replace(&mut self.mode, mode) != mode {
            self.settling = SETTLING_STEPS;
        }
        let length = if self.settling > 0 { STEP_NS } else { BLOCK_NS };
        self.until = Ticks(now.0.saturating_add(length));
    }

    /// Returns how windows are to be used in the present block.
    fn tried_mode(&self) -> WindowMode {
        let Some((cause, tuner)) = &self.trials else { return WindowMode::Open };
        match (tuner.setting(), cause) {
            (CLOSED, Cause::Contention) => WindowMode::Closed(PollReason::CpuWanted),
            (CLOSED, Cause::Load) => WindowMode::Closed(PollReason::NoGain),
            (TIMER, _) => WindowMode::Timer,
            _ => WindowMode::Open,
        }
    }
}

/// Returns true if one is [`ANOTHER`] times the other.
fn is_another(one: u64, other: u64) -> bool {
    one > other.saturating_mul(ANOTHER) || other > one.saturating_mul(ANOTHER)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A load: how many requests of a step are completed while windows are closed, by a timer, and while they are open, and how often the worker is
    /// away then. By a timer: 0 is as many as while they are closed.
    #[derive(Clone, Copy, Default)]
    struct Load {
        closed: u64,
        timer: u64,
        open: u64,
        absences: u32,
    }

    /// Returns why windows are closed, if they are.
    fn reason(windows: &Windows) -> Option<PollReason> {
        match windows.mode() {
            WindowMode::Closed(reason) => Some(reason),
            WindowMode::Timer | WindowMode::Open => None,
        }
    }

    /// Returns the way that is used between trials.
    fn best(windows: &Windows) -> Option<usize> {
        windows.trials.as_ref().map(|(_, tuner)| tuner.best())
    }

    /// Begins the trials of a load.
    fn busy(windows: &mut Windows, is_slow: bool, (now, completions): (u64, u64)) {
        windows.busy(completions, !is_slow, Ticks(now));
        assert!(windows.trials.is_none(), "a pause may be in the first requests' time");
        windows.busy(completions, is_slow, Ticks(now));
    }

    /// Serves for so many steps. Returns how many of them were closed.
    fn serve(windows: &mut Windows, at: &mut (u64, u64), steps: usize, load: &Load) -> usize {
        let mut closed = 0;
        for _ in 0..steps {
            let (now, completions) = at;
            match windows.mode() {
                WindowMode::Closed(_) => {
                    closed += 1;
                    *completions += load.closed;
                }
                WindowMode::Timer => *completions += if load.timer == 0 { load.closed } else { load.timer },
                WindowMode::Open => {
                    *completions += load.open;
                    (0..load.absences).for_each(|_| windows.was_away(*completions, Ticks(*now)));
                }
            }
            *now += STEP_NS;
            if windows.is_due(Ticks(*now)) {
                windows.end_block(*completions, Ticks(*now));
            }
        }
        closed
    }

    #[test]
    fn windows_stay_open_while_nobody_wants_the_cpu() {
        let (mut windows, mut at) = (Windows::new(), (0, 0));
        let load = Load { closed: 100, open: 100, absences: MANY - 1, ..Load::default() };
        assert_eq!(serve(&mut windows, &mut at, 100, &load), 0);
        assert!(!windows.are_contended());
    }

    #[test]
    fn what_runs_for_a_moment_closes_windows_for_a_few_blocks() {
        let (mut windows, mut at) = (Windows::new(), (0, 0));
        let quiet = Load { closed: 700, timer: 500, open: 1000, absences: 0 };
        // Something runs three times a second, in one of eight blocks.
        for _ in 0..100 {
            serve(&mut windows, &mut at, 1, &Load { absences: MANY, ..quiet });
            serve(&mut windows, &mut at, 7, &quiet);
        }
        assert!(at.1 > 790_000, "{} requests of 800,000", at.1);
    }

    #[test]
    fn windows_are_closed_where_others_want_the_cpu_and_polling_brings_little() {
        let (mut windows, mut at) = (Windows::new(), (0, 0));
        let closed =
            serve(&mut windows, &mut at, 2000, &Load { closed: 1000, open: 1080, absences: 10, ..Load::default() });
        assert!(windows.are_contended() && (1850..2000).contains(&closed), "{closed}");
    }

    #[test]
    fn windows_are_open_where_the_guests_get_more_done() {
        let (mut windows, mut at) = (Windows::new(), (0, 0));
        let closed =
            serve(&mut windows, &mut at, 40, &Load { closed: 1000, open: 2000, absences: 10, ..Load::default() });
        assert!((2..=15).contains(&closed), "{closed}");
        let closed =
            serve(&mut windows, &mut at, 2000, &Load { closed: 1000, open: 2000, absences: 10, ..Load::default() });
        assert!(windows.are_contended() && closed < 100, "{closed}");
        // Another load on the same worker.
        serve(&mut windows, &mut at, 2000, &Load { closed: 1000, open: 700, absences: 10, ..Load::default() });
        assert!(reason(&windows).is_some());
    }

    #[test]
    fn windows_are_open_again_when_the_others_have_gone() {
        let (mut windows, mut at) = (Windows::new(), (0, 0));
        serve(&mut windows, &mut at, 2000, &Load { closed: 1000, open: 500, absences: 10, ..Load::default() });
        assert_eq!(best(&windows), Some(CLOSED));
        let closed =
            serve(&mut windows, &mut at, 600, &Load { closed: 1000, open: 500, absences: 0, ..Load::default() });
        assert!(!windows.are_contended() && closed <= 2 * 256, "{closed}");
        // Or after a pause of the load.
        serve(&mut windows, &mut at, 10, &Load { closed: 1000, open: 500, absences: 10, ..Load::default() });
        assert!(windows.are_contended());
        at.0 += PAUSED * BLOCK_NS;
        serve(&mut windows, &mut at, 1, &Load { closed: 1, open: 1, absences: 0, ..Load::default() });
        assert!(!windows.are_contended());
    }

    #[test]
    fn windows_are_closed_where_polling_brings_nothing() {
        // Blocks vary by a tenth, without a pattern.
        let load = |block: u64, open: u64| Load {
            closed: 400 + noise(block),
            open: open + noise(block),
            absences: 0,
            ..Load::default()
        };
        let noise_of = |open| {
            let (mut windows, mut at) = (Windows::new(), (0, 0));
            busy(&mut windows, false, (0, 0));
            let closed: usize = (0..1000).map(|block| serve(&mut windows, &mut at, 1, &load(block, open))).sum();
            assert!(windows.trials.is_some() && !windows.are_contended());
            (closed, reason(&windows))
        };
        let (closed, reason) = noise_of(400);
        assert!(closed > 700 && reason.is_none_or(|reason| reason == PollReason::NoGain), "{closed}");
        assert!(noise_of(500).0 < 200);
    }

    #[test]
    fn a_slow_load_is_not_polled_for_before_that_has_shown_what_it_brings() {
        let used = |open: u64| {
            let (mut windows, mut at) = (Windows::new(), (0, 0));
            busy(&mut windows, true, (0, 0));
            let mut modes = vec![];
            for block in 0..1000 {
                modes.push(windows.mode());
                let noise = noise(block);
                serve(&mut windows, &mut at, 1, &Load { closed: 300 + noise, open: open + noise, ..Load::default() });
            }
            assert!(!modes.contains(&WindowMode::Timer), "its looks would find nothing");
            modes.iter().filter(|mode| **mode == WindowMode::Open).count()
        };
        let (useless, useful) = (used(300), used(340));
        assert!(useless < 60 && useful > 900, "open in {useless} and {useful} of 1000 blocks");
    }

    #[test]
    fn polling_is_not_tried_for_requests_of_milliseconds() {
        let modes_at = |requests: u64| {
            let (mut windows, mut at) = (Windows::new(), (0, 0));
            busy(&mut windows, true, (0, 0));
            let load = Load { closed: requests, open: 2 * requests, ..Load::default() };
            let modes = |_| {
                serve(&mut windows, &mut at, 1, &load);
                windows.mode()
            };
            (0..500).map(modes).collect::<Vec<_>>()
        };
        let limit = STEP_NS * 1000 / SLOW_FOR_POLLING;
        assert!(modes_at(limit - 1).iter().all(|mode| matches!(mode, WindowMode::Closed(_))));
        assert!(modes_at(limit + 1).contains(&WindowMode::Open));
    }

    /// A number up to 40, without a pattern.
    fn noise(block: u64) -> u64 {
        (block.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) % 40
    }

    #[test]
    fn another_load_and_strangers_end_the_trials() {
        let (mut windows, mut at) = (Windows::new(), (0, 0));
        busy(&mut windows, false, (0, 0));
        let closed =
            serve(&mut windows, &mut at, 500, &Load { closed: 100, open: 100, absences: 0, ..Load::default() });
        assert!(closed > 400 && reason(&windows) == Some(PollReason::NoGain), "{closed}");
        let faster = Load { closed: 500, open: 500, ..Load::default() };
        let ended = (0..20).any(|_| {
            serve(&mut windows, &mut at, 1, &faster);
            windows.trials.is_none()
        });
        assert!(ended);
        busy(&mut windows, false, at);
        let strangers = Load { closed: 100, open: 100, absences: MANY, ..Load::default() };
        serve(&mut windows, &mut at, 1, &strangers);
        assert!(!windows.are_contended(), "they may be gone");
        serve(&mut windows, &mut at, 1, &strangers);
        assert!(windows.are_contended());
    }

    #[test]
    fn a_load_that_changes_all_the_time_is_hardly_tried_on() {
        let (mut windows, mut at) = (Windows::new(), (0, 0));
        let mut others = 0;
        for block in 0..4000 {
            if windows.trials.is_none() {
                busy(&mut windows, false, at);
            }
            others += usize::from(windows.mode() != WindowMode::Open);
            // From block to block ten times as many requests, or as few.
            let open = [1000, 10_000, 300, 3000][(noise(block) % 4) as usize];
            serve(&mut windows, &mut at, 1, &Load { closed: 10, timer: 10, open, absences: 0 });
        }
        assert!((10..100).contains(&others), "{others} of 4000 blocks without polling");
        // One that was steady for long is believed at once.
        let steady = Load { closed: 10, timer: 10, open: 3000, absences: 0 };
        serve(&mut windows, &mut at, 4 * MAX_BACKOFF as usize, &steady);
        serve(&mut windows, &mut at, 100, &Load { open: 300, ..steady });
        assert!(windows.trials.is_none(), "another load");
    }

    #[test]
    fn a_timer_is_used_where_it_serves_most() {
        let (mut windows, mut at) = (Windows::new(), (0, 0));
        let shared = Load { closed: 100, timer: 1700, open: 40, absences: 10 };
        serve(&mut windows, &mut at, 40, &shared);
        assert_eq!(windows.mode(), WindowMode::Timer);
        let others = serve(&mut windows, &mut at, 2000, &shared);
        assert!(others < 20, "{others} of 2000 blocks");
        // Without strangers; the neighbour of open windows brings less than closed ones.
        let (mut windows, mut at) = (Windows::new(), (0, 0));
        busy(&mut windows, false, (0, 0));
        serve(&mut windows, &mut at, 200, &Load { closed: 1000, timer: 300, open: 1000, absences: 0 });
        assert_eq!(best(&windows), Some(CLOSED));
    }

    #[test]
    fn a_way_that_becomes_slow_is_compared_again_soon() {
        let (mut windows, mut at) = (Windows::new(), (0, 0));
        // While threads are placed well, closed windows are the best.
        let well = Load { closed: 3000, timer: 2400, open: 2000, absences: 10 };
        serve(&mut windows, &mut at, 2000, &well);
        assert!(windows.are_contended() && reason(&windows).is_some());
        let closed = serve(&mut windows, &mut at, 60, &Load { closed: 120, ..well });
        assert!(closed <= 12 && windows.mode() == WindowMode::Timer, "{closed}");
    }

    #[test]
    fn a_worker_that_sleeps_finds_that_polling_has_become_faster() {
        let (mut windows, mut at) = (Windows::new(), (0, 0));
        busy(&mut windows, false, (0, 0));
        serve(&mut windows, &mut at, 500, &Load { closed: 600, open: 500, absences: 0, ..Load::default() });
        assert!(reason(&windows).is_some());
        let closed =
            serve(&mut windows, &mut at, 2000, &Load { closed: 600, open: 9000, absences: 0, ..Load::default() });
        assert!(reason(&windows).is_none() && closed < 300, "{closed}");
    }
}
