//! Attacks of hostile frontends, with their expected results. No scenario may leak resources: the daemon's are compared before and after
//! it, and the good disk is served all the while.

mod fuzz;
mod keys;
mod lives;
mod requests;
mod rewriting;
mod rings;
mod states;
mod transfers;

use anyhow::Result;

use super::rig::Rig;

/// A scenario.
#[derive(Clone, Copy)]
pub struct Scenario {
    /// Name in the output.
    pub name: &'static str,
    /// Needs a simulated machine: it destroys a domain, or makes the hypervisor fail.
    pub simulated: bool,
    /// Runs it.
    pub run: fn(&mut Rig) -> Result<()>,
}

const fn any(name: &'static str, run: fn(&mut Rig) -> Result<()>) -> Scenario {
    Scenario { name, simulated: false, run }
}

const fn simulated(name: &'static str, run: fn(&mut Rig) -> Result<()>) -> Scenario {
    Scenario { name, simulated: true, run }
}

/// All scenarios.
pub const ALL: &[Scenario] = &[
    any("transfers in every layout and mode", transfers::every_layout),
    any("256 segments", transfers::many_segments),
    any("flushes and barriers, with data and without", transfers::flushes_and_barriers),
    any("discards", transfers::discards),
    any("requests that break a rule", requests::that_break_a_rule),
    any("more segments than are offered", requests::more_segments_than_offered),
    any("requests to a disk that may only be read", requests::to_a_read_only_disk),
    any("requests that do not fit its blocks", requests::misaligned),
    any("unknown operations", requests::unknown_operations),
    any("grants that are not what they should be", requests::bad_grants),
    any("grants that end in flight", requests::grants_that_end),
    any("pages of segments that are data too", requests::tables_that_are_data),
    any("the ring's own pages as data", requests::the_ring_as_data),
    any("entries rewritten in flight", rewriting::entries),
    any("pages of segments rewritten in flight", rewriting::tables),
    any("random entries", fuzz::entries),
    any("entries with a few wrong bits", fuzz::bits),
    any("a producer that jumps", rings::producer_jumps),
    any("floods of events", rings::event_floods),
    any("indices scribbled over", rings::scribbled_indices),
    any("responses that nobody reads", rings::unread_responses),
    any("a ring whose pages are taken back", rings::revoked_pages),
    any("rings that cannot be mapped or bound", rings::unusable),
    any("one page for two rings", rings::shared_page),
    any("keys that make no sense", keys::malformed),
    any("keys rewritten while they are read", keys::rewritten),
    any("keys rewritten while connected", keys::rewritten_later),
    any("a thousand changes of state", states::flipped),
    any("a thousand changes of state under load", states::flipped_under_load),
    any("a frontend that starts anew without closing", states::anew),
    any("directories removed in the middle of requests", lives::directories_removed),
    any("closed in the middle of requests", lives::closed_under_load),
    simulated("a domain destroyed in the middle of requests", lives::domain_destroyed),
    simulated("a hypervisor that refuses", lives::refused_mappings),
];

/// Returns the scenario with this name.
///
/// # Panics
/// When there is none.
pub fn named(name: &str) -> &'static Scenario {
    ALL.iter().find(|scenario| scenario.name == name).unwrap_or_else(|| panic!("no scenario {name:?}"))
}
