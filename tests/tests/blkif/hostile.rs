//! Hostile frontends of Xen block devices on a simulated machine, against a real daemon. Each test is one scenario with
//! a machine and a daemon of its own; `xen_loopback` runs the same ones on a real Xen.

use mqblk_tests::hostile::daemon::mqblk_bench_binary;
use mqblk_tests::loopback::fixture::LoopbackFixture;
use mqblk_tests::loopback::scenarios::{SCENARIOS, scenario};

/// Runs one scenario, then stops the daemon and checks for leaks.
fn run(name: &str) {
    let mut rig = LoopbackFixture::simulated(&mqblk_bench_binary()).unwrap_or_else(|error| panic!("{error:#}"));
    rig.run(scenario(name)).unwrap_or_else(|error| panic!("{name}: {error:#}"));
    rig.finish().unwrap_or_else(|error| panic!("{name}, at the end: {error:#}"));
}

macro_rules! scenarios {
    ($($test:ident: $name:literal,)*) => {
        const TESTED: &[&str] = &[$($name,)*];
        $(
            #[test]
            fn $test() {
                run($name);
            }
        )*
    };
}

scenarios! {
    transfers: "transfers in every layout and mode",
    many_segments: "256 segments",
    flushes_and_barriers: "flushes and barriers, with data and without",
    discards: "discards",
    requests_that_break_a_rule: "requests that break a rule",
    more_segments_than_offered: "more segments than are offered",
    read_only_disk: "requests to a disk that may only be read",
    misaligned_requests: "requests that do not fit its blocks",
    unknown_operations: "unknown operations",
    bad_grants: "grants that are not what they should be",
    grants_that_end: "grants that end in flight",
    tables_that_are_data: "pages of segments that are data too",
    the_ring_as_data: "the ring's own pages as data",
    rewritten_entries: "entries rewritten in flight",
    rewritten_tables: "pages of segments rewritten in flight",
    random_entries: "random entries",
    wrong_bits: "entries with a few wrong bits",
    producer_jumps: "a producer that jumps",
    event_floods: "floods of events",
    scribbled_indices: "indices scribbled over",
    unread_responses: "responses that nobody reads",
    revoked_ring_pages: "a ring whose pages are taken back",
    unusable_rings: "rings that cannot be mapped or bound",
    shared_page: "one page for two rings",
    keys_of_other_systems: "keys of other systems' drivers",
    malformed_keys: "keys that make no sense",
    rewritten_keys: "keys rewritten while they are read",
    keys_rewritten_later: "keys rewritten while connected",
    flipped_states: "a thousand changes of state",
    states_flipped_under_load: "a thousand changes of state under load",
    starting_anew: "a frontend that restarts without closing",
    directories_removed: "directories removed in the middle of requests",
    closed_under_load: "closed in the middle of requests",
    domain_destroyed: "a domain destroyed in the middle of requests",
    refused_mappings: "a hypervisor that refuses",
}

#[test]
fn every_scenario_is_tested() {
    let missing: Vec<_> =
        SCENARIOS.iter().map(|scenario| scenario.name).filter(|name| !TESTED.contains(name)).collect();
    assert!(missing.is_empty(), "no test runs {missing:?}");
}

/// Runs all scenarios one after the other on one machine, so that each meets the leftovers of those before.
#[test]
fn one_daemon_for_all() {
    let mut rig = LoopbackFixture::simulated(&mqblk_bench_binary()).unwrap_or_else(|error| panic!("{error:#}"));
    rig.reduce_repetitions();
    for scenario in SCENARIOS {
        rig.run(scenario).unwrap_or_else(|error| panic!("{}: {error:#}", scenario.name));
    }
    rig.finish().unwrap_or_else(|error| panic!("at the end: {error:#}"));
}
