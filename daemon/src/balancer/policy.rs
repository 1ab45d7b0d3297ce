//! Which worker serves the queues of a worker that is hindered. Pure: time and samples come in as arguments.
//!
//! From a worker one cannot see whether another one would get more done with its queues: the other polls, and a worker that polls uses its CPU
//! whether it is needed or not. So it is tried, like all ways of waiting: the completions of both workers are counted before and after. A worker
//! lends its queues only if both together complete a tenth more, and takes them back as soon as that costs nothing.

use std::collections::BTreeMap;
use std::time::Duration;

/// For how long completions are counted before and after queues are moved, at least.
const COUNTING: Duration = Duration::from_secs(1);
/// How long after a move they are not counted: workers try then how to poll, and may be slow meanwhile.
const SETTLING: Duration = Duration::from_secs(2);
/// Meanwhile it is checked whether a loan is hopeless: after threads have woken, in slices, of which two in a row have to be bad.
const FIRST_SLICE: Duration = Duration::from_millis(300);
const SLICE: Duration = Duration::from_millis(200);
const BAD_SLICES: u32 = 2;

/// Share of the completions of before, in percent, from which queues are lent, come home, and a trial is ended early.
const WORTH_LENDING: u64 = 110;
const GOOD_AT_HOME: u64 = 95;
const HOPELESS: u64 = 75;

/// How often it is checked whether there is something to try, while workers are hindered or have lent their queues.
const TICK: Duration = Duration::from_secs(2);

/// Between two trials of the same worker: at first, and at most. A trial that changes nothing doubles it.
const FIRST_PAUSE: Duration = Duration::from_secs(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(320);

/// What a worker has done, and whether it is hindered: others want its CPU, or wake it often.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct WorkerSample {
    pub(super) completions: u64,
    pub(super) is_hindered: bool,
}

/// Queues that are to move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Move {
    /// Those of worker `from` that guests use, to worker `to`.
    Lend { from: usize, to: usize },
    /// Those that worker `from` has lent to worker `to`, back.
    Return { from: usize, to: usize },
}

impl Move {
    fn workers(self) -> (usize, usize) {
        match self {
            Move::Lend { from, to } | Move::Return { from, to } => (from, to),
        }
    }

    fn undone(self) -> Move {
        match self {
            Move::Lend { from, to } => Move::Return { from, to },
            Move::Return { from, to } => Move::Lend { from, to },
        }
    }
}

/// How long the thread waits for the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pause {
    /// Until a worker signals that it is hindered.
    UntilSignal,
    /// For so long.
    For(Duration),
}

/// A worker has lent its queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Loan {
    /// The worker that serves them.
    pub(super) to: usize,
    /// Completions of both workers per second, before and after.
    pub(super) rates: (u64, u64),
    /// When it is tried next whether they are as well served at home.
    next: Duration,
}

/// When a worker is tried next, and for how long it is left alone after that.
#[derive(Clone, Copy, Debug)]
struct Backoff {
    next: Duration,
    pause: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Backoff { next: Duration::ZERO, pause: FIRST_PAUSE }
    }
}

impl Backoff {
    /// A trial has ended. `changed`: it changed something.
    fn tried(&mut self, now: Duration, changed: bool) -> Duration {
        self.pause = if changed { self.pause / 2 } else { self.pause * 2 }.clamp(FIRST_PAUSE, LONGEST_PAUSE);
        self.next = now + self.pause;
        self.next
    }
}

/// Completions of the two workers of a trial so far, at a time.
#[derive(Clone, Copy, Debug)]
struct Count {
    at: Duration,
    from: u64,
    both: u64,
}

impl Count {
    fn new(at: Duration, moving: Move, samples: &[WorkerSample]) -> Count {
        let (from, to) = moving.workers();
        let of_from = samples[from].completions;
        Count { at, from: of_from, both: of_from + samples[to].completions }
    }

    /// Returns the completions of both per second since `earlier`.
    fn rate_since(&self, earlier: &Count) -> u64 {
        let ns = (self.at - earlier.at).as_nanos().max(1);
        (u128::from(self.both.saturating_sub(earlier.both)) * 1_000_000_000 / ns) as u64
    }
}

#[derive(Clone, Copy, Debug)]
enum Stage {
    /// Since then completions are counted.
    Before(Count),
    /// The queues were moved at that time, at a `rate`; the last slices were bad.
    Settling { rate: u64, until: Duration, slice: Count, bad: u32 },
    /// Since then completions are counted again.
    After { rate: u64, since: Count },
}

/// What is tried.
#[derive(Clone, Copy, Debug)]
struct Trial {
    moving: Move,
    stage: Stage,
}

/// The loans of all workers, and what is tried.
#[derive(Debug, Default)]
pub(super) struct Policy {
    loans: BTreeMap<usize, Loan>,
    backoffs: BTreeMap<usize, Backoff>,
    trial: Option<Trial>,
    /// Completions of each worker at the last tick.
    last: Option<Vec<u64>>,
}

/// What is to be done now, and when to ask again. A move's result is [told](Policy::moved).
pub(super) type Step = (Option<Move>, Pause);

impl Policy {
    /// Returns the loans, by the worker that has lent its queues.
    pub(super) fn loans(&self) -> &BTreeMap<usize, Loan> {
        &self.loans
    }

    /// Returns true if queues of this worker may be at another one.
    pub(super) fn may_be_away(&self, worker: usize) -> bool {
        self.loans.contains_key(&worker) || self.trial.is_some_and(|trial| trial.moving.workers().0 == worker)
    }

    /// Decides. `samples`: of each worker, by number.
    pub(super) fn step(&mut self, now: Duration, samples: &[WorkerSample]) -> Step {
        self.forget_ended(samples.len());
        match self.trial.take() {
            Some(trial) => self.go_on(trial, now, samples),
            None => self.look(now, samples),
        }
    }

    /// The move of the last step was made, or was not: then all its queues are where they were.
    pub(super) fn moved(&mut self, moving: Move, now: Duration, is_done: bool) {
        if is_done {
            return;
        }
        self.trial = None;
        let (from, to) = moving.workers();
        let next = self.backoffs.entry(from).or_default().tried(now, false);
        match moving {
            Move::Lend { .. } => _ = self.loans.remove(&from),
            Move::Return { .. } => self.loans.entry(from).or_insert(Loan { to, rates: (0, 0), next }).next = next,
        }
    }

    /// Workers from this number on are gone, with what they had.
    fn forget_ended(&mut self, workers: usize) {
        self.loans.retain(|from, loan| *from < workers && loan.to < workers);
        self.backoffs.retain(|from, _| *from < workers);
        let is_there = |trial: &Trial| {
            let (from, to) = trial.moving.workers();
            from < workers && to < workers
        };
        self.trial = self.trial.filter(is_there);
        self.last.take_if(|last| last.len() != workers);
    }

    /// Looks for something to try.
    fn look(&mut self, now: Duration, samples: &[WorkerSample]) -> Step {
        let completions = samples.iter().map(|sample| sample.completions).collect();
        let last = self.last.replace(completions);
        // At first workers try how to poll, and a moment later they are hindered no more.
        let Some(last) = last else { return (None, Pause::For(TICK)) };
        let served = |worker: usize| samples[worker].completions.saturating_sub(last[worker]);
        if let Some((from, loan)) = self.loans.iter().find(|(_, loan)| served(loan.to) == 0) {
            let home = Move::Return { from: *from, to: loan.to };
            return self.return_unused(home);
        }
        if let Some((from, loan)) = self.loans.iter().find(|(_, loan)| loan.next <= now) {
            return self.begin(Move::Return { from: *from, to: loan.to }, now, samples);
        }
        let is_wanted = |worker: &usize| samples[*worker].is_hindered && served(*worker) > 0;
        let may_lend = |worker: &usize| {
            let is_paused = self.backoffs.get(worker).is_some_and(|backoff| backoff.next > now);
            !is_paused && !self.may_be_away(*worker) && self.loans.values().all(|loan| loan.to != *worker)
        };
        let pause = |worker: &usize| self.backoffs.get(worker).map_or(FIRST_PAUSE, |backoff| backoff.pause);
        let from = (0..samples.len()).filter(is_wanted).filter(may_lend).min_by_key(pause);
        // If all are hindered, fewer may still be better: they are threads among others, too.
        let others = (0..samples.len()).filter(|to| Some(*to) != from && !self.may_be_away(*to));
        if let (Some(from), Some(to)) = (from, others.min_by_key(|to| (samples[*to].is_hindered, served(*to)))) {
            return self.begin(Move::Lend { from, to }, now, samples);
        }
        if self.loans.is_empty() && !(0..samples.len()).any(|worker| is_wanted(&worker)) {
            self.last = None;
            return (None, Pause::UntilSignal);
        }
        (None, Pause::For(TICK))
    }

    fn begin(&mut self, moving: Move, now: Duration, samples: &[WorkerSample]) -> Step {
        self.trial = Some(Trial { moving, stage: Stage::Before(Count::new(now, moving, samples)) });
        (None, Pause::For(COUNTING))
    }

    /// No guest uses the queues: nothing is lost by moving them.
    fn return_unused(&mut self, home: Move) -> Step {
        self.loans.remove(&home.workers().0);
        (Some(home), Pause::For(TICK))
    }

    fn go_on(&mut self, trial: Trial, now: Duration, samples: &[WorkerSample]) -> Step {
        let Trial { moving, stage } = trial;
        let count = Count::new(now, moving, samples);
        let mut stay = |stage: Stage, pause: Duration| {
            self.trial = Some(Trial { moving, stage });
            Pause::For(pause)
        };
        match stage {
            Stage::Before(since) if now < since.at + COUNTING => (None, stay(stage, since.at + COUNTING - now)),
            Stage::Before(since) => self.count_before(moving, &since, &count, samples),
            Stage::Settling { rate, until, slice, bad } => {
                let after = count.rate_since(&slice);
                // At home they were better off for longer than a slow start takes.
                let is_bad = matches!(moving, Move::Lend { .. }) && is_below(after, rate, HOPELESS);
                let bad = if is_bad { bad + 1 } else { 0 };
                if bad == BAD_SLICES {
                    return self.end_trial(moving, now, (rate, after));
                }
                let next = match now < until {
                    true => Stage::Settling { rate, until, slice: count, bad },
                    false => Stage::After { rate, since: count },
                };
                (None, stay(next, SLICE))
            }
            Stage::After { since, .. } if now < since.at + COUNTING => (None, stay(stage, since.at + COUNTING - now)),
            Stage::After { rate, since } => self.end_trial(moving, now, (rate, count.rate_since(&since))),
        }
    }

    /// Completions before the move were counted.
    fn count_before(&mut self, moving: Move, since: &Count, count: &Count, samples: &[WorkerSample]) -> Step {
        let rate = count.rate_since(since);
        match moving {
            // Whether it is hindered still does not matter: a client that wanders from CPU to CPU hinders one worker after the other.
            Move::Lend { .. } if count.from == since.from => {
                self.last = Some(samples.iter().map(|sample| sample.completions).collect());
                return (None, Pause::For(TICK));
            }
            Move::Lend { .. } => {}
            Move::Return { .. } if rate == 0 => return self.return_unused(moving),
            Move::Return { .. } => {}
        }
        self.trial =
            Some(Trial { moving, stage: Stage::Settling { rate, until: count.at + SETTLING, slice: *count, bad: 0 } });
        (Some(moving), Pause::For(FIRST_SLICE))
    }

    /// Ends a trial. `rates`: completions per second before and after the move.
    fn end_trial(&mut self, moving: Move, now: Duration, rates: (u64, u64)) -> Step {
        let (from, to) = moving.workers();
        let (before, after) = rates;
        let least = if let Move::Lend { .. } = moving { WORTH_LENDING } else { GOOD_AT_HOME };
        let is_good = !is_below(after, before, least);
        let next = self.backoffs.entry(from).or_default().tried(now, is_good);
        self.last = None;
        match moving {
            Move::Lend { .. } if is_good => _ = self.loans.insert(from, Loan { to, rates, next }),
            Move::Return { .. } if is_good => _ = self.loans.remove(&from),
            Move::Return { .. } => _ = self.loans.entry(from).and_modify(|loan| loan.next = next),
            // The other one would hardly gain by the opposite.
            Move::Lend { .. } => {
                let other = self.backoffs.entry(to).or_default();
                other.next = other.next.max(next);
            }
        }
        ((!is_good).then(|| moving.undone()), Pause::For(TICK))
    }
}

/// Returns true if `rate` is below so many percent of `of`.
fn is_below(rate: u64, of: u64, percent: u64) -> bool {
    u128::from(rate) * 100 < u128::from(of) * u128::from(percent)
}

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
