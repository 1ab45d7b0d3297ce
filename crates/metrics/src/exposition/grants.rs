//! Statistics of grants of a Xen disk's rings.

use mqblk_admin::model::GrantCounters;

use super::family::Family;
use super::load::number;

pub(super) const GRANTS: &[Family<GrantCounters>] = &[
    Family::counter("grant_copied_pages", "Pages copied by the hypervisor", |it| number(it.copies)),
    Family::counter("grant_copy_calls", "Grant copy calls", |it| number(it.copy_calls)),
    Family::counter("grant_copy_errors", "Pages whose copy failed", |it| number(it.copy_errors)),
    Family::counter("grant_mapped_pages", "Pages that were mapped", |it| number(it.maps)),
    Family::counter("grant_map_calls", "Grant map calls", |it| number(it.map_calls)),
    Family::counter("grant_map_errors", "Grant map calls that failed", |it| number(it.map_errors)),
    Family::counter("grant_unmapped_pages", "Pages that were unmapped", |it| number(it.unmaps)),
    Family::counter("grant_unmap_calls", "Grant unmap calls", |it| number(it.unmap_calls)),
    Family::counter("persistent_grant_hits", "Pages of requests that were mapped already", |it| {
        number(it.persistent_hits)
    }),
    Family::counter("persistent_grant_misses", "Pages of requests that were not mapped", |it| {
        number(it.persistent_misses)
    }),
    Family::counter("persistent_grants_purged", "Pages unmapped because they were idle or to make space", |it| {
        number(it.persistent_purged)
    }),
    Family::counter(
        "grant_ring_limit_copies",
        "Times that pages were copied because the ring had mapped as many as it may",
        |it| number(it.over_cap),
    ),
    Family::counter(
        "grant_host_limit_copies",
        "Times that pages were copied because the host had mapped as many as it may",
        |it| number(it.over_budget),
    ),
    Family::gauge("grant_pages", "Pages that are mapped", |it| number(it.mapped_pages)),
    Family::gauge("grant_stuck_pages", "Pages that could not be unmapped", |it| number(it.stuck_pages)),
    Family::gauge("grant_buffer_pages", "Pages of the daemon's own that hold memory", |it| number(it.buffer_pages)),
    Family::counter("indirect_requests", "Indirect requests", |it| number(it.indirect_requests)),
    Family::counter("barriers", "Barriers executed", |it| number(it.barriers)),
    Family::counter("events_sent", "Events sent to the guest", |it| number(it.events_sent)),
    Family::counter("events_received", "Events received from the guest", |it| number(it.events_received)),
];
