//! A simulation's run, and the loop over seeds.

use std::fmt::Debug;
use std::ops::Range;

use mqblk_tests::crash::stats::{CrashStats, print_uncaptured};

/// Counters of the coverage of runs. They show that a simulation is not trivial.
pub(crate) trait Counts: Default + Debug {
    /// Adds the counters of another run.
    fn add(&mut self, other: &Self);
}

/// Declares a struct of counters.
macro_rules! counters {
    ($(#[$attribute:meta])* $visibility:vis struct $name:ident { $($(#[$doc:meta])* $field:ident),* $(,)? }) => {
        $(#[$attribute])*
        #[derive(Clone, Copy, Debug, Default)]
        $visibility struct $name {
            $($(#[$doc])* pub $field: u64,)*
        }

        impl $crate::harness::seeds::Counts for $name {
            fn add(&mut self, other: &Self) {
                $(self.$field += other.$field;)*
            }
        }
    };
}
pub(crate) use counters;

impl Counts for CrashStats {
    fn add(&mut self, other: &Self) {
        CrashStats::add(self, other);
    }
}

impl<A: Counts, B: Counts> Counts for (A, B) {
    fn add(&mut self, other: &Self) {
        self.0.add(&other.0);
        self.1.add(&other.1);
    }
}

/// A world determined by a seed.
pub(crate) trait Simulation: Sized {
    /// Coverage of a run.
    type Counts: Counts;
    /// Steps of a run, after which nothing new is submitted.
    const STEPS: u32;

    /// Runs one of the events that may happen at any time.
    fn step(&mut self);
    /// Lets requests in flight go on.
    fn settle(&mut self);
    /// Returns the number of requests that are not complete.
    fn in_flight(&self) -> usize;
    /// Checks the final state when all requests are complete.
    fn finish(self) -> Self::Counts;

    /// Runs all of it.
    fn run(mut self) -> Self::Counts {
        (0..Self::STEPS).for_each(|_| self.step());
        self.settle_all();
        self.finish()
    }

    /// Lets all requests in flight complete.
    fn settle_all(&mut self) {
        /// Far above the time of the slowest storage.
        const MOST: u32 = 2_000_000;
        let mut steps = 0;
        while self.in_flight() > 0 {
            self.settle();
            steps += 1;
            assert!(steps < MOST, "{} requests are never completed", self.in_flight());
        }
    }
}

/// Runs a simulation for its usual seeds, or for those of the environment: `MQBLK_name_SEED=7` for one,
/// `MQBLK_name_SEEDS=600` for this many, `MQBLK_name_SEEDS=100..200` for these. Returns their coverage, unless they are
/// fewer than usual.
pub(crate) fn run_seeds<C: Counts>(name: &str, usual: Range<u64>, run: impl Fn(u64) -> C) -> Option<C> {
    let one = format!("MQBLK_{name}_SEED");
    let given = |variable: &str| std::env::var(variable).ok();
    let seeds = choose_seeds(usual.clone(), given(&one).as_deref(), given(&format!("{one}S")).as_deref());
    let enough = seeds.end - seeds.start >= usual.end - usual.start;
    let mut sum = C::default();
    for seed in seeds {
        let _printed = PrintedOnPanic(&one, seed);
        sum.add(&run(seed));
    }
    print_uncaptured(&format!("{name}: {sum:?}"));
    enough.then_some(sum)
}

fn choose_seeds(usual: Range<u64>, one: Option<&str>, many: Option<&str>) -> Range<u64> {
    let number = |text: &str| text.parse().unwrap_or_else(|_| panic!("found the seed {text:?}, expected a number"));
    match (one, many.map(|many| many.split_once("..").ok_or(many))) {
        (Some(seed), _) => number(seed)..number(seed) + 1,
        (None, Some(Ok((from, to)))) => number(from)..number(to),
        (None, Some(Err(count))) => usual.start..usual.start + number(count),
        (None, None) => usual,
    }
}

/// Prints the seed if its run panics.
struct PrintedOnPanic<'a>(&'a str, u64);

impl Drop for PrintedOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            print_uncaptured(&format!("{}={}", self.0, self.1));
        }
    }
}

#[test]
fn seeds_are_chosen_by_number_and_by_range() {
    assert_eq!(choose_seeds(100..124, None, None), 100..124);
    assert_eq!(choose_seeds(100..124, Some("7"), Some("3")), 7..8);
    assert_eq!(choose_seeds(100..124, None, Some("600")), 100..700);
    assert_eq!(choose_seeds(100..124, None, Some("3..9")), 3..9);
}
