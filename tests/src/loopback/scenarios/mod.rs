//! Attacks of hostile frontends, with their expected results. No scenario may leak resources: the daemon's are compared
//! before and after it, and the good disk is served throughout.

mod disconnects;
mod drivers;
mod fuzz;
mod keys;
mod requests;
mod rewriting;
mod rings;
mod states;
mod transfers;

use anyhow::Result;

use super::fixture::LoopbackFixture;

/// A scenario.
#[derive(Clone, Copy)]
pub struct Scenario {
    /// Name in the output.
    pub name: &'static str,
    /// Needs a simulated machine: it destroys a domain, or makes the hypervisor fail.
    pub simulated: bool,
    /// Runs it.
    pub run: fn(&mut LoopbackFixture) -> Result<()>,
}

const fn anywhere(name: &'static str, run: fn(&mut LoopbackFixture) -> Result<()>) -> Scenario {
    Scenario { name, simulated: false, run }
}

const fn simulated_only(name: &'static str, run: fn(&mut LoopbackFixture) -> Result<()>) -> Scenario {
    Scenario { name, simulated: true, run }
}

/// All scenarios.
pub const SCENARIOS: &[Scenario] = &[
    anywhere("transfers in every layout and mode", transfers::every_layout),
    anywhere("256 segments", transfers::many_segments),
    anywhere("flushes and barriers, with data and without", transfers::flushes_and_barriers),
    anywhere("discards", transfers::discards),
    anywhere("requests that break a rule", requests::invalid),
    anywhere("more segments than are offered", requests::more_segments_than_offered),
    anywhere("requests to a disk that may only be read", requests::to_a_read_only_disk),
    anywhere("requests that do not fit its blocks", requests::misaligned),
    anywhere("unknown operations", requests::unknown_operations),
    anywhere("grants that are not what they should be", requests::bad_grants),
    anywhere("grants that end in flight", requests::grants_that_end),
    anywhere("pages of segments that are data too", requests::tables_that_are_data),
    anywhere("the ring's own pages as data", requests::the_ring_as_data),
    anywhere("entries rewritten in flight", rewriting::entries),
    anywhere("pages of segments rewritten in flight", rewriting::tables),
    anywhere("random entries", fuzz::random_entries),
    anywhere("entries with a few wrong bits", fuzz::flipped_bits),
    anywhere("a producer that jumps", rings::producer_jumps),
    anywhere("floods of events", rings::event_floods),
    anywhere("indices scribbled over", rings::scribbled_indices),
    anywhere("responses that nobody reads", rings::unread_responses),
    anywhere("a ring whose pages are taken back", rings::revoked_pages),
    anywhere("rings that cannot be mapped or bound", rings::unusable_rings),
    anywhere("one page for two rings", rings::shared_page),
    anywhere("keys of other systems' drivers", drivers::keys_of_other_systems),
    anywhere("keys that make no sense", keys::malformed_keys),
    anywhere("keys rewritten while they are read", keys::keys_rewritten),
    anywhere("keys rewritten while connected", keys::keys_rewritten_while_connected),
    anywhere("a thousand changes of state", states::states_flipped),
    anywhere("a thousand changes of state under load", states::states_flipped_under_load),
    anywhere("a frontend that restarts without closing", states::restarted_frontend),
    anywhere("directories removed in the middle of requests", disconnects::directories_removed),
    anywhere("closed in the middle of requests", disconnects::closed_under_load),
    simulated_only("a domain destroyed in the middle of requests", disconnects::domain_destroyed),
    simulated_only("a hypervisor that refuses", disconnects::refused_mappings),
];

/// Returns the scenario with this name.
///
/// # Panics
/// When there is none.
pub fn scenario(name: &str) -> &'static Scenario {
    SCENARIOS.iter().find(|scenario| scenario.name == name).unwrap_or_else(|| panic!("no scenario {name:?}"))
}
