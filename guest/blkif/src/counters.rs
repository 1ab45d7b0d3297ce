//! Counters of a ring's grants and events.

/// Counters of a ring's grants and events. All only grow, except [`mapped_pages`](Self::mapped_pages),
/// [`stuck_pages`](Self::stuck_pages) and [`buffer_pages`](Self::buffer_pages).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GrantCounters {
    /// Pages copied by the hypervisor, in either direction.
    pub copies: u64,
    /// Grant copy calls.
    pub copy_calls: u64,
    /// Pages whose copy failed.
    pub copy_errors: u64,
    /// Pages mapped.
    pub maps: u64,
    /// Map calls.
    pub map_calls: u64,
    /// Failed map calls; their pages were copied instead.
    pub map_errors: u64,
    /// Pages unmapped.
    pub unmaps: u64,
    /// Unmap calls.
    pub unmap_calls: u64,
    /// Pages of requests that were mapped before the request.
    pub persistent_hits: u64,
    /// Pages of requests that were not mapped before the request.
    pub persistent_misses: u64,
    /// Persistent grants unmapped because they were idle or to make space for others.
    pub persistent_purged: u64,
    /// Times that pages were copied because the ring had reached its limit of persistent grants.
    pub over_cap: u64,
    /// Times that pages were copied because the host's budget was exhausted.
    pub over_budget: u64,
    /// Pages mapped now. Where rings share a pool: by all of them.
    pub mapped_pages: u64,
    /// Pages whose unmap failed. They stay mapped and are not used again.
    pub stuck_pages: u64,
    /// Buffer pages that hold memory now.
    pub buffer_pages: u64,
    /// Indirect requests.
    pub indirect_requests: u64,
    /// Barriers executed.
    pub barriers: u64,
    /// Events sent.
    pub events_sent: u64,
    /// Events received.
    pub events_received: u64,
}

impl GrantCounters {
    /// Adds the counters of another ring.
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
            (&mut self.mapped_pages, other.mapped_pages),
            (&mut self.stuck_pages, other.stuck_pages),
            (&mut self.buffer_pages, other.buffer_pages),
            (&mut self.indirect_requests, other.indirect_requests),
            (&mut self.barriers, other.barriers),
            (&mut self.events_sent, other.events_sent),
            (&mut self.events_received, other.events_received),
        ] {
            *sum += more;
        }
    }
}
