//! What a ring counts of its grants.

/// What a ring counted of its grants and events. All but [`held`](Self::held) and [`stuck`](Self::stuck) only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GrantCounters {
    /// Pages copied, either way.
    pub copies: u64,
    /// Calls that copied them.
    pub copy_calls: u64,
    /// Pages that could not be copied.
    pub copy_errors: u64,
    /// Pages mapped.
    pub maps: u64,
    /// Calls that mapped them.
    pub map_calls: u64,
    /// Calls that failed to; the pages were copied instead.
    pub map_errors: u64,
    /// Pages let go.
    pub unmaps: u64,
    /// Calls that let them go.
    pub unmap_calls: u64,
    /// Pages of requests that were mapped already.
    pub persistent_hits: u64,
    /// Pages of requests that were not.
    pub persistent_misses: u64,
    /// Pages let go because they were not used for long, or for others.
    pub persistent_purged: u64,
    /// Times that a page was copied because the ring has as many mapped as it may.
    pub over_cap: u64,
    /// Times that pages were copied because the host has as many mapped as it may.
    pub over_budget: u64,
    /// Pages that are mapped now. (All rings together, where they share their pages.)
    pub held: u64,
    /// Pages that could not be let go. They are not used any more.
    pub stuck: u64,
    /// Own pages that hold memory now.
    pub buffer_pages: u64,
    /// Requests with their segments in pages of their own.
    pub indirect_requests: u64,
    /// Barriers carried out.
    pub barriers: u64,
    /// Events sent.
    pub events_sent: u64,
    /// Events taken.
    pub events_taken: u64,
}

impl GrantCounters {
    /// Adds what another ring counted.
    pub fn add(&mut self, other: &GrantCounters) {
        for (sum, more) in [
            (&mut self.copies, other.copies),
            (&mut self.copy_calls, other.copy_calls),
            (&mut self.copy_errors, other.copy_errors),
            (&mut self.maps, other.maps),
            (&mut self.map_calls, other.map_calls),
            (&mut self.map_errors, other.map_errors),
            (&mut self.unmaps, other.unmaps),
            (&mut self.unmap_calls, other.unmap_calls),
            (&mut self.persistent_hits, other.persistent_hits),
            (&mut self.persistent_misses, other.persistent_misses),
            (&mut self.persistent_purged, other.persistent_purged),
            (&mut self.over_cap, other.over_cap),
            (&mut self.over_budget, other.over_budget),
            (&mut self.held, other.held),
            (&mut self.stuck, other.stuck),
            (&mut self.buffer_pages, other.buffer_pages),
            (&mut self.indirect_requests, other.indirect_requests),
            (&mut self.barriers, other.barriers),
            (&mut self.events_sent, other.events_sent),
            (&mut self.events_taken, other.events_taken),
        ] {
            *sum += more;
        }
    }
}
