//! Computes rates from two samples of a Xen disk's grant counters.

use mqblk_admin::model::GrantCounters;
use serde::Serialize;

const NS_PER_S: f64 = 1e9;

/// Grant operations of a Xen disk's rings in an interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct GrantRates {
    /// Pages copied per second.
    pub copies_per_s: f64,
    /// Mean number of pages copied per hypercall. 0 if there were none.
    pub copies_per_call: f64,
    /// Pages mapped per second.
    pub maps_per_s: f64,
    /// Pages unmapped per second.
    pub unmaps_per_s: f64,
    /// Pages of requests that were already mapped, in percent of the pages looked up. 0 if there were none.
    pub hit_percent: f64,
    /// Requests with indirect segments per second.
    pub indirect_per_s: f64,
    /// Times in the interval that pages were copied because the host's limit of mapped pages was reached.
    pub over_budget: u64,
    /// Times in the interval that pages were copied because the ring's limit of mapped pages was reached.
    pub over_cap: u64,
    /// Failed copies and mappings in the interval.
    pub errors: u64,
    /// Pages mapped at the end of the interval.
    pub held: u64,
}

/// Returns the rates between two samples; `None` if a counter was reset.
pub(crate) fn rates_between(before: &GrantCounters, now: &GrantCounters, interval_ns: u64) -> Option<GrantRates> {
    let delta = |of: fn(&GrantCounters) -> u64| of(now).checked_sub(of(before));
    let seconds = interval_ns as f64 / NS_PER_S;
    let per_s = |count: u64| count as f64 / seconds;
    let ratio = |part: u64, whole: u64| if whole == 0 { 0.0 } else { part as f64 / whole as f64 };
    let (copies, hits) = (delta(|it| it.copies)?, delta(|it| it.persistent_hits)?);
    Some(GrantRates {
        copies_per_s: per_s(copies),
        copies_per_call: ratio(copies, delta(|it| it.copy_calls)?),
        maps_per_s: per_s(delta(|it| it.maps)?),
        unmaps_per_s: per_s(delta(|it| it.unmaps)?),
        hit_percent: 100.0 * ratio(hits, hits + delta(|it| it.persistent_misses)?),
        indirect_per_s: per_s(delta(|it| it.indirect_requests)?),
        over_budget: delta(|it| it.over_budget)?,
        over_cap: delta(|it| it.over_cap)?,
        errors: delta(|it| it.copy_errors)? + delta(|it| it.map_errors)?,
        held: now.mapped_pages,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_cover_the_interval_only() {
        let one = GrantCounters {
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
            mapped_pages: 14,
            indirect_requests: 8,
            ..GrantCounters::default()
        };
        let two =
            GrantCounters { copies: 300, copy_calls: 20, persistent_hits: 120, mapped_pages: 9, over_budget: 5, ..one };
        let want = GrantRates {
            copies_per_s: 100.0,
            copies_per_call: 20.0,
            hit_percent: 100.0,
            over_budget: 1,
            held: 9,
            ..GrantRates::default()
        };
        assert_eq!(rates_between(&one, &two, 2_000_000_000), Some(want));
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
        assert_eq!(rates_between(&GrantCounters::default(), &one, 2_000_000_000), Some(want));
        assert_eq!(rates_between(&two, &one, 1), None, "the counters were reset");
    }
}
