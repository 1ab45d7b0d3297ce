//! Chooses between settings by what they bring: pure, time comes in as an argument.
//!
//! Some settings pay on one host and under one load, and cost on others, for reasons that no part of the program sees: cache lines, other threads,
//! a hypervisor. So they are tried: pairs of blocks of requests are served with the present setting and with its neighbour, every other pair in the
//! reverse order, which halves the changes, and the neighbour is kept if it won enough of these pairs, as its [`Rule`] says, and over all of them: a setting that costs much, but seldom, wins most. Trials that
//! change nothing become rare.

/// A setting with which a block takes so many times as long is given up at once.
const HOPELESS: u64 = 2;

/// How many standard errors a mean must be from its limit, squared.
const ERRORS_SQUARED: i128 = 6;

/// Where means count, a setting that is slower by this much in two pairs and more is given up, and one that is faster by this much is used, in percent.
const CLEARLY_SLOWER: u64 = 15;
const CLEARLY_FASTER: u64 = 50;

/// What a setting must show, and how often that is tried.
#[derive(Debug)]
pub(crate) struct Rule {
    /// Pairs of blocks of a trial, at most.
    pub(crate) pairs: u32,
    /// What ends it, and how.
    pub(crate) test: Test,
    /// A dearer setting must be faster by this much, in percent; a cheaper one may be slower by this much.
    pub(crate) gain_percent: i64,
    pub(crate) loss_percent: i64,
    /// Blocks before the first trial.
    pub(crate) first_pause: u32,
    /// Blocks between two trials: after a change, and at most. Doubled after trials that change nothing, four times as many after hopeless ones.
    pub(crate) min_pause: u32,
    pub(crate) max_pause: u32,
    /// All other settings are tried one after the other, not only the neighbours of the present one.
    pub(crate) tries_all: bool,
}

/// How a trial is decided.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Test {
    /// The other setting must win so many pairs, and over their sum.
    Wins(u32),
    /// The mean of the pairs' differences counts, from `least` pairs on, as soon as chance hardly explains on which side of the limit it is. The dearer setting
    /// has to show what it brings: after `enough` pairs the cheaper one is used where the mean is on its side, and after all of them in any case.
    Mean { least: u32, enough: u32 },
}

/// For blocks that are over soon. By chance the other setting wins 1 of 94 trials.
pub(crate) static SHORT_BLOCKS: Rule = Rule {
    pairs: 16,
    test: Test::Wins(13),
    gain_percent: 3,
    loss_percent: 1,
    first_pause: 16,
    min_pause: 16,
    max_pause: 2048,
    tries_all: false,
};

/// For blocks of [80 ms](crate::windows), which are uneven where a disk is: their pairs are many, 7 s of them at most.
pub(crate) static UNEVEN_BLOCKS: Rule = Rule {
    pairs: 24,
    test: Test::Mean { least: 4, enough: 6 },
    gain_percent: 3,
    loss_percent: 2,
    first_pause: 1,
    min_pause: 16,
    max_pause: 512,
    tries_all: true,
};

/// The same of slow requests: polling for them takes most of a CPU, also while it is tried, and what it brings is soon less than what a disk varies by.
pub(crate) static UNEVEN_SLOW_BLOCKS: Rule =
    Rule { test: Test::Mean { least: 3, enough: 3 }, gain_percent: 8, loss_percent: 6, min_pause: 64, ..UNEVEN_BLOCKS };

/// A comparison of the present setting with another one.
#[derive(Clone, Copy, Debug)]
struct Trial {
    other: usize,
    pairs: u32,
    wins: u32,
    /// Time of a thousand requests of the pair's first block.
    first_ns: Option<u64>,
    /// Sums of the pairs' times with the present setting and with the other one.
    present_sum: u64,
    other_sum: u64,
    /// Sums of the pairs' differences, by which the other setting is faster, in 1/10000 of the pair's mean, and of their squares.
    faster: i64,
    squares: i64,
}

impl Trial {
    fn new(other: usize) -> Trial {
        Trial { other, pairs: 0, wins: 0, first_ns: None, present_sum: 0, other_sum: 0, faster: 0, squares: 0 }
    }

    /// Returns true if the next block is to be served with the other setting: the second one of every other pair, and the first one of those between.
    fn is_others_turn(&self) -> bool {
        self.first_ns.is_some() != (self.pairs % 2 == 1)
    }

    fn add(&mut self, present_ns: u64, other_ns: u64) {
        self.pairs += 1;
        self.present_sum = self.present_sum.saturating_add(present_ns);
        self.other_sum = self.other_sum.saturating_add(other_ns);
        let (present, other) = (i128::from(present_ns), i128::from(other_ns));
        // At most 20000, if one of them took no time.
        let faster = ((present - other) * 20_000 / (present + other).max(1)) as i64;
        self.faster += faster;
        self.squares += faster * faster;
    }

    /// Returns true if the mean of the differences is at least `percent`, and true if that is hardly chance.
    fn is_faster_by(&self, percent: i64) -> (bool, bool) {
        let (pairs, faster, squares) = (i128::from(self.pairs), i128::from(self.faster), i128::from(self.squares));
        let above = faster - i128::from(percent) * 100 * pairs;
        // The variance of the sum, times the number of pairs less one.
        let variance = pairs * squares - faster * faster;
        (above >= 0, above * above * (pairs - 1) > ERRORS_SQUARED * variance)
    }

    /// Returns true if the rest of the pairs would hardly turn the sums.
    fn is_clearly_slower(&self) -> bool {
        self.pairs >= 2 && self.other_sum.saturating_mul(100) > self.present_sum.saturating_mul(100 + CLEARLY_SLOWER)
    }

    /// The same of the other setting's gain.
    fn is_clearly_faster(&self) -> bool {
        self.pairs >= 2 && self.present_sum.saturating_mul(100) > self.other_sum.saturating_mul(100 + CLEARLY_FASTER)
    }
}

/// How a trial ended: the other setting is better, or worse, or so much worse that it will hardly be better soon.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ending {
    Better,
    Worse,
    Hopeless,
}

/// Returns what a thousand requests took, of `requests` that took `ns` nanoseconds.
pub(crate) fn of_a_thousand(requests: u64, ns: u64) -> u64 {
    ns * 1000 / requests
}

/// Chooses one of some settings, which are numbered from the cheapest on.
#[derive(Debug)]
pub(crate) struct Tuner {
    rule: &'static Rule,
    settings: usize,
    first: usize,
    best: usize,
    trial: Option<Trial>,
    /// Blocks until the next trial.
    pause: u32,
    next_pause: u32,
    /// The setting that was tried last, or the first one.
    tried: usize,
    /// How many others are to be tried before the next pause.
    left: usize,
    /// A trial since the last pause changed the setting.
    changed: bool,
    /// All trials since the last pause were of settings that cannot be better.
    all_hopeless: bool,
}

impl Tuner {
    /// Returns a tuner of so many settings that begins with one of them.
    pub(crate) fn new(rule: &'static Rule, settings: usize, first: usize) -> Tuner {
        Tuner {
            rule,
            settings,
            first,
            best: first,
            trial: None,
            pause: rule.first_pause,
            next_pause: rule.min_pause,
            tried: first,
            left: 0,
            changed: false,
            all_hopeless: false,
        }
    }

    /// As [`new`](Self::new), of a rule that tries all settings: another one at once.
    pub(crate) fn trying(rule: &'static Rule, settings: usize, first: usize, next: usize) -> Tuner {
        let mut tuner = Tuner { tried: (next + settings - 1) % settings, ..Tuner::new(rule, settings, first) };
        tuner.begin_trial();
        tuner
    }

    /// Returns the setting to use until the next block ends.
    #[inline]
    pub(crate) fn setting(&self) -> usize {
        match self.trial {
            Some(trial) if trial.is_others_turn() => trial.other,
            _ => self.best,
        }
    }

    /// Returns the setting that is used between trials.
    pub(crate) fn best(&self) -> usize {
        self.best
    }

    /// Forgets what was tried: the load is not one on which settings can be compared.
    pub(crate) fn reset(&mut self) {
        *self = Tuner::new(self.rule, self.settings, self.first);
    }

    /// The present setting has become slow: the next trial begins soon.
    pub(crate) fn hurry(&mut self) {
        self.next_pause = self.rule.min_pause;
        // Those that lost in this round lost to what the setting was before.
        self.left = if self.trial.is_some() { self.settings } else { 0 };
        self.pause = self.pause.min(self.rule.first_pause);
    }

    /// The setting that is tried cannot be better, and the trial of it ends.
    pub(crate) fn give_up(&mut self) {
        if self.trial.is_some() {
            self.end_trial(Ending::Hopeless);
        }
    }

    /// A block was disturbed, and says nothing: the pair begins again.
    pub(crate) fn disturbed(&mut self) {
        if let Some(trial) = &mut self.trial {
            trial.first_ns = None;
        }
    }

    /// A block of `requests` ended, which took `ns` nanoseconds. Blocks are compared by what a thousand requests took.
    pub(crate) fn block(&mut self, requests: u64, ns: u64) {
        let ns = of_a_thousand(requests, ns);
        let Some(trial) = &mut self.trial else {
            self.pause = self.pause.saturating_sub(1);
            if self.pause == 0 && self.settings > 1 {
                self.begin_trial();
            }
            return;
        };
        let is_other = trial.is_others_turn();
        let Some(first_ns) = trial.first_ns.take() else {
            trial.first_ns = Some(ns);
            return;
        };
        let (present_ns, ns) = if is_other { (first_ns, ns) } else { (ns, first_ns) };
        let Rule { pairs, test, gain_percent, loss_percent, .. } = *self.rule;
        let percent = if trial.other > self.best { gain_percent } else { -loss_percent };
        let is_better = |present: u64, other: u64| {
            present.saturating_mul(100) >= other.saturating_mul(100_u64.saturating_add_signed(percent))
        };
        trial.add(present_ns, ns);
        trial.wins += u32::from(is_better(present_ns, ns));
        let losses = trial.pairs - trial.wins;
        let decision = match test {
            _ if ns >= present_ns.saturating_mul(HOPELESS) => return self.end_trial(Ending::Hopeless),
            Test::Wins(wins) if losses > pairs - wins => Some(false),
            Test::Wins(wins) => (trial.wins >= wins).then(|| is_better(trial.present_sum, trial.other_sum)),
            Test::Mean { .. } if trial.is_clearly_slower() => Some(false),
            Test::Mean { .. } if trial.is_clearly_faster() => Some(true),
            Test::Mean { least, .. } if trial.pairs < least => None,
            Test::Mean { enough, .. } => match (trial.is_faster_by(percent), trial.other < self.best) {
                ((is_faster, true), _) => Some(is_faster),
                ((is_faster, _), is_cheaper) if is_faster == is_cheaper && trial.pairs >= enough => Some(is_cheaper),
                (_, is_cheaper) => (trial.pairs >= pairs).then_some(is_cheaper),
            },
        };
        if let Some(is_better) = decision {
            self.end_trial(if is_better { Ending::Better } else { Ending::Worse });
        }
    }

    fn begin_trial(&mut self) {
        if self.left == 0 {
            self.left = if self.rule.tries_all { self.settings - 1 } else { 1 };
            (self.changed, self.all_hopeless) = (false, true);
        }
        self.tried = if self.rule.tries_all { self.next_of_all() } else { self.next_neighbour() };
        self.trial = Some(Trial::new(self.tried));
    }

    /// Returns the setting after the one that was tried last, or after the last one the first.
    fn next_of_all(&self) -> usize {
        let after = |at: usize| (at + 1) % self.settings;
        let next = after(self.tried);
        if next == self.best { after(next) } else { next }
    }

    /// Returns the dearer neighbour if a cheaper setting was tried last, and the reverse.
    fn next_neighbour(&self) -> usize {
        let (best, dearest) = (self.best, self.settings - 1);
        let dearer = best == 0 || best < dearest && self.tried <= best;
        if dearer { best + 1 } else { best - 1 }
    }

    fn end_trial(&mut self, ending: Ending) {
        let Some(trial) = self.trial.take() else { return };
        self.left -= 1;
        self.all_hopeless &= ending == Ending::Hopeless;
        if ending == Ending::Better {
            // The one that it won against needs no trial.
            (self.best, self.changed, self.tried) = (trial.other, true, self.best);
        }
        if self.left > 0 {
            self.pause = self.rule.first_pause;
            return;
        }
        self.next_pause = match (self.changed, self.all_hopeless) {
            (true, _) => self.rule.min_pause,
            (_, is_certain) => (self.next_pause * if is_certain { 4 } else { 2 }).min(self.rule.max_pause),
        };
        self.pause = self.next_pause;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Serves blocks that take `ns(setting, block)`. Returns the settings that they were served with.
    fn serve(tuner: &mut Tuner, blocks: u64, ns: impl Fn(usize, u64) -> u64) -> Vec<usize> {
        (0..blocks)
            .map(|block| {
                let setting = tuner.setting();
                tuner.block(1000, ns(setting, block));
                setting
            })
            .collect()
    }

    /// A number that varies by 10 percent around 1000, without a pattern.
    fn noise(block: u64) -> u64 {
        900 + (block.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) % 200
    }

    #[test]
    fn the_fastest_setting_is_found_and_mostly_used() {
        for fastest in 0..4 {
            let mut tuner = Tuner::new(&SHORT_BLOCKS, 4, 2);
            let used = serve(&mut tuner, 4000, |setting, _| 1000 + 200 * setting.abs_diff(fastest) as u64);
            assert_eq!(tuner.best(), fastest);
            let others = used[2000..].iter().filter(|setting| **setting != fastest).count();
            assert!(others < 20, "{others} of 2000 blocks were trials of slower settings");
        }
    }

    #[test]
    fn a_setting_between_which_and_the_present_one_is_a_worse_one_is_found_if_all_are_tried() {
        static ALL: Rule = Rule { tries_all: true, ..SHORT_BLOCKS };
        for (first, fastest) in [(0, 2), (2, 0), (1, 0), (1, 2), (0, 1)] {
            let mut tuner = Tuner::new(&ALL, 3, first);
            let used = serve(
                &mut tuner,
                4000,
                |setting, _| if setting == fastest { 1000 } else { 1500 - 100 * setting as u64 },
            );
            assert_eq!(tuner.best(), fastest);
            let others = used[2000..].iter().filter(|setting| **setting != fastest).count();
            assert!(others < 40, "{others} of 2000 blocks");
        }
    }

    #[test]
    fn a_setting_that_has_become_slow_is_compared_again_at_once() {
        let mut tuner = Tuner::new(&SHORT_BLOCKS, 2, 0);
        serve(&mut tuner, 20_000, |setting, _| 1000 + 500 * setting as u64);
        while tuner.trial.is_some() || tuner.pause < 100 {
            serve(&mut tuner, 1, |setting, _| 1000 + 500 * setting as u64);
        }
        tuner.hurry();
        let used = serve(&mut tuner, 80, |setting, _| 9000 - 500 * setting as u64);
        assert!(used.contains(&1) && tuner.best() == 1);
    }

    #[test]
    fn of_equal_settings_the_cheapest_is_used() {
        let mut tuner = Tuner::new(&SHORT_BLOCKS, 3, 2);
        serve(&mut tuner, 1000, |_, _| 1000);
        assert_eq!(tuner.best(), 0);
    }

    #[test]
    fn noise_changes_nothing_and_trials_become_rare() {
        let mut tuner = Tuner::new(&SHORT_BLOCKS, 2, 0);
        let used = serve(&mut tuner, 20_000, |_, block| noise(block));
        let others = used.iter().filter(|setting| **setting == 1).count();
        assert_eq!(tuner.best(), 0);
        assert!(others < 200, "{others} of 20000 blocks");
    }

    /// Returns of 100 tuners of two settings, the dearer of which is faster by so many percent, how many use the dearer one after 2000 blocks that
    /// vary by 13 percent in either direction, as those of 80 ms do where a disk is.
    fn dearer_of_100(percent: u64) -> usize {
        let uses_dearer = |seed: u64| {
            let mut tuner = Tuner::new(&UNEVEN_BLOCKS, 2, 1);
            let noise = |block: u64| (block + 5000 * seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
            serve(&mut tuner, 2000, |setting, block| {
                let usual = if setting == 1 { 100_000 } else { 100_000 + 1000 * percent };
                usual * (870 + noise(block) % 260) / 1000
            });
            tuner.best() == 1
        };
        (0..100).filter(|seed| uses_dearer(*seed)).count()
    }

    #[test]
    fn uneven_blocks_are_compared_until_chance_does_not_decide() {
        let found = [0, 2, 10, 30].map(dearer_of_100);
        assert!(found[0] <= 5 && found[2] >= 90 && found[3] == 100, "{found:?}");
    }

    #[test]
    fn even_blocks_are_compared_in_few_pairs() {
        let mut tuner = Tuner::new(&UNEVEN_BLOCKS, 2, 1);
        let used = serve(&mut tuner, 40, |setting, block| if setting == 1 { noise(block) / 50 + 1000 } else { 1080 });
        assert_eq!(used.iter().filter(|setting| **setting == 0).count(), 4, "{used:?}");
    }

    #[test]
    fn a_cheaper_setting_that_seldom_costs_much_is_not_kept() {
        let mut tuner = Tuner::new(&SHORT_BLOCKS, 2, 1);
        // Every seventh block of the cheaper one takes 1.7 times as long: it loses 3 of 16 pairs at most.
        serve(&mut tuner, 20_000, |setting, block| if setting == 0 && block / 2 % 7 == 0 { 1700 } else { 1000 });
        assert_eq!(tuner.best(), 1);
    }

    #[test]
    fn a_hopeless_setting_is_tried_for_one_block() {
        let mut tuner = Tuner::new(&SHORT_BLOCKS, 2, 0);
        let used = serve(&mut tuner, 40, |setting, _| if setting == 1 { 5000 } else { 1000 });
        assert_eq!(used.iter().filter(|setting| **setting == 1).count(), 1);
    }

    #[test]
    fn hopeless_settings_are_tried_less_often() {
        let trials_with = |ns: u64| {
            let mut tuner = Tuner::new(&UNEVEN_BLOCKS, 3, 0);
            let used = serve(&mut tuner, 400, |setting, _| if setting == 0 { 1000 } else { ns });
            assert_eq!(tuner.best(), 0);
            used.windows(2).filter(|pair| pair[0] != 1 && pair[1] == 1).count()
        };
        let (hopeless, worse) = (trials_with(3000), trials_with(1500));
        assert!(hopeless < worse, "{hopeless} {worse}");
    }

    #[test]
    fn a_change_of_the_load_changes_the_setting_back() {
        let mut tuner = Tuner::new(&SHORT_BLOCKS, 3, 0);
        serve(&mut tuner, 1000, |setting, _| 1000 - 100 * setting as u64);
        assert_eq!(tuner.best(), 2);
        serve(&mut tuner, 10_000, |setting, _| 1000 + 100 * setting as u64);
        assert_eq!(tuner.best(), 0);
        tuner.disturbed();
        tuner.reset();
        assert_eq!((tuner.setting(), tuner.best()), (0, 0));
    }
}
