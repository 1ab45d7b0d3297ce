//! Computes the rates of a disk's rate limits from two samples.

use mqblk_admin::model::ThrottleStat;
use serde::Serialize;

/// Rates of the rate limits of a disk or LUN in an interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct ThrottleRates {
    /// Requests per second that waited for a limit and were then submitted.
    pub throttled_per_s: f64,
    /// Mean time that these waited, in microseconds. 0 if there were none.
    pub throttled_await_us: f64,
    /// Requests that wait for a limit at the end of the interval.
    pub waiting: u64,
}

/// Returns the rates between two samples. `before` is `None` if the first sample has no limits; its counters are then
/// zero or unknown. Returns `None` without limits, or if a counter was reset.
pub(crate) fn rates_between(
    before: Option<&ThrottleStat>,
    now: Option<&ThrottleStat>,
    interval_ns: u64,
) -> Option<ThrottleRates> {
    let nothing = ThrottleStat::default();
    let (before, now) = (before.unwrap_or(&nothing), now?);
    let throttled = now.throttled.checked_sub(before.throttled)?;
    let waited_ns = now.throttled_ns.checked_sub(before.throttled_ns)?;
    Some(ThrottleRates {
        throttled_per_s: throttled as f64 * 1e9 / interval_ns as f64,
        throttled_await_us: waited_ns as f64 / 1e3 / throttled.max(1) as f64,
        waiting: now.waiting,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stat(throttled: u64, throttled_ns: u64, waiting: u64) -> ThrottleStat {
        ThrottleStat { throttled, throttled_ns, waiting, ..ThrottleStat::default() }
    }

    #[test]
    fn counters_become_rates() {
        let rates = rates_between(Some(&stat(10, 1000, 9)), Some(&stat(30, 61_000, 4)), 2_000_000_000).unwrap();
        assert_eq!(rates, ThrottleRates { throttled_per_s: 10.0, throttled_await_us: 3.0, waiting: 4 });
        let none = rates_between(Some(&stat(10, 1000, 9)), Some(&stat(10, 1000, 2)), 1).unwrap();
        assert_eq!(none, ThrottleRates { waiting: 2, ..ThrottleRates::default() });
        assert_eq!(rates_between(None, Some(&stat(4, 4000, 0)), 1_000_000_000).unwrap().throttled_per_s, 4.0);
        assert_eq!(rates_between(Some(&stat(5, 0, 0)), Some(&stat(4, 0, 0)), 1), None);
        assert_eq!(rates_between(Some(&stat(5, 0, 0)), None, 1), None);
    }
}
