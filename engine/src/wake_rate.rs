//! How often a worker is woken. Pure: time comes in as an argument.

use crate::clock::Ticks;

/// The rate is computed so often, in nanoseconds.
const PERIOD_NS: u64 = 100_000_000;

/// A worker that is woken so many times a second does little else: each time takes 5 to 20 us, and a part of that from the thread that wakes it.
const OFTEN_PER_S: u64 = 20_000;

/// Counts how often a worker wakes.
#[derive(Debug, Default)]
pub(crate) struct WakeRate {
    since: Ticks,
    wakes: u64,
}

impl WakeRate {
    /// The worker was woken. Returns true if that happens often, once in a while.
    #[inline]
    pub(crate) fn woke(&mut self, now: Ticks) -> bool {
        self.wakes += 1;
        let ns = now.since(self.since);
        ns >= PERIOD_NS && self.end_period(now, ns)
    }

    #[cold]
    fn end_period(&mut self, now: Ticks, ns: u64) -> bool {
        let wakes = u128::from(std::mem::take(&mut self.wakes));
        self.since = now;
        wakes * 1_000_000_000 >= u128::from(OFTEN_PER_S) * u128::from(ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_that_is_woken_often_is_told_from_one_that_is_not() {
        let mut rate = WakeRate::default();
        let mut now = 10 * PERIOD_NS;
        let mut wake = |every_ns: u64, wakes: u64| {
            let told = (0..wakes).filter(|_| {
                now += every_ns;
                rate.woke(Ticks(now))
            });
            told.count()
        };
        assert_eq!(wake(51_000, 10_000), 0);
        let told = wake(50_000, 10_000);
        assert!((4..=5).contains(&told), "{told}");
        assert_eq!(wake(10 * PERIOD_NS, 1), 0, "it slept since");
    }
}
