//! From two readings of a Xen disk's grants to rates. Pure.

use mqblk_admin::model::GrantStat;
use serde::Serialize;

const NS_PER_S: f64 = 1e9;

/// What the rings of a Xen disk did with the guest's pages in the interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct GrantRates {
    /// Pages copied in a second.
    pub copies_per_s: f64,
    /// Pages that a call copied, on average. 0 without any.
    pub copies_per_call: f64,
    /// Pages mapped in a second.
    pub maps_per_s: f64,
    /// Pages let go in a second.
    pub unmaps_per_s: f64,
    /// Pages of requests that were mapped already, in percent of those that could have been. 0 without any.
    pub hit_percent: f64,
    /// Requests in a second with their segments in pages of their own.
    pub indirect_per_s: f64,
    /// Times in the interval that pages were copied because the host has as many mapped as it may.
    pub over_budget: u64,
    /// The same for a ring.
    pub over_cap: u64,
    /// Copies and mappings that failed, in the interval.
    pub errors: u64,
    /// Pages mapped at the end.
    pub held: u64,
}

/// What happened between two readings. `None`: the counters began anew.
pub fn between(before: &GrantStat, now: &GrantStat, interval_ns: u64) -> Option<GrantRates> {
    let delta = |of: fn(&GrantStat) -> u64| of(now).checked_sub(of(before));
    let seconds = interval_ns as f64 / NS_PER_S;
    let per_s = |count: u64| count as f64 / seconds;
    let share = |part: u64, whole: u64| if whole == 0 { 0.0 } else { part as f64 / whole as f64 };
    let (copies, hits) = (delta(|it| it.copies)?, delta(|it| it.persistent_hits)?);
    Some(GrantRates {
        copies_per_s: per_s(copies),
        copies_per_call: share(copies, delta(|it| it.copy_calls)?),
        maps_per_s: per_s(delta(|it| it.maps)?),
        unmaps_per_s: per_s(delta(|it| it.unmaps)?),
        hit_percent: 100.0 * share(hits, hits + delta(|it| it.persistent_misses)?),
        indirect_per_s: per_s(delta(|it| it.indirect_requests)?),
        over_budget: delta(|it| it.over_budget)?,
        over_cap: delta(|it| it.over_cap)?,
        errors: delta(|it| it.copy_errors)? + delta(|it| it.map_errors)?,
        held: now.held,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_of_the_interval() {
        let one = GrantStat {
            copies: 100,
            copy_calls: 10,
            copy_errors: 1,
            maps: 20,
            map_errors: 2,
            unmaps: 6,
            persistent_hits: 30,
            persistent_misses: 10,
            over_cap: 3,
            over_budget: 4,
            held: 14,
            indirect_requests: 8,
            ..GrantStat::default()
        };
        let two = GrantStat { copies: 300, copy_calls: 20, persistent_hits: 120, held: 9, over_budget: 5, ..one };
        let want = GrantRates {
            copies_per_s: 100.0,
            copies_per_call: 20.0,
            hit_percent: 100.0,
            over_budget: 1,
            held: 9,
            ..GrantRates::default()
        };
        assert_eq!(between(&one, &two, 2_000_000_000), Some(want));
        let want = GrantRates {
            copies_per_s: 50.0,
            copies_per_call: 10.0,
            maps_per_s: 10.0,
            unmaps_per_s: 3.0,
            hit_percent: 75.0,
            indirect_per_s: 4.0,
            over_budget: 4,
            over_cap: 3,
            errors: 3,
            held: 14,
        };
        assert_eq!(between(&GrantStat::default(), &one, 2_000_000_000), Some(want));
        assert_eq!(between(&two, &one, 1), None, "they began anew");
    }
}
