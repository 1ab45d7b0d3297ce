//! How large a machine's domains are, and what is counted of them.

/// How large domains are, and what they may have.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Pages that a domain has to share. Memory is taken on first touch.
    pub pages: u32,
    /// References in a grant table. Xen's own default, `gnttab_max_frames` of 64, makes 32768.
    pub refs: u32,
    /// Pages of others that a domain may have mapped at once. Xen's `gnttab_max_maptrack_frames`.
    pub maptrack: u32,
}

impl Default for Sizes {
    fn default() -> Sizes {
        Sizes { pages: 1 << 20, refs: 1 << 20, maptrack: 32768 }
    }
}

/// What has been done on a machine since it started, and what there is now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Calls that mapped something.
    pub map_calls: u64,
    /// Pages that they mapped.
    pub maps: u64,
    /// Calls that were refused.
    pub map_failures: u64,
    /// Calls that ended a mapping, and mappings that ended with their connection.
    pub unmap_calls: u64,
    /// Pages of those.
    pub unmaps: u64,
    /// Calls that copied.
    pub copy_calls: u64,
    /// Copies in them, whatever their status.
    pub copies: u64,
    /// Bytes that were copied.
    pub copied_bytes: u64,
    /// Events sent.
    pub events_sent: u64,
    /// Events of those that the other side was woken for: it had taken the one before, and did not have its port masked.
    pub events_delivered: u64,
    /// Pages that are mapped now.
    pub live_mappings: u64,
    /// Grants that there are now.
    pub live_grants: u64,
    /// Ports that are open now.
    pub open_ports: u64,
    /// Connections that there are now: one for each [`Xen`](crate::Xen) and one for each [`GrantAccess`](mqblk_memory::GrantAccess).
    pub connections: u64,
}
