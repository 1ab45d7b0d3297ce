//! Limits of a machine's domains, and statistics of a machine.

/// Limits of each domain.
#[derive(Clone, Copy, Debug)]
pub struct DomainLimits {
    /// Pages of memory that a domain can share. Allocated on first access.
    pub pages: u32,
    /// Entries of a grant table. Xen's default of 64 `gnttab_max_frames` gives 32768.
    pub refs: u32,
    /// Foreign pages that a domain may have mapped at once. Cf. Xen's `gnttab_max_maptrack_frames`.
    pub maptrack: u32,
}

impl Default for DomainLimits {
    fn default() -> DomainLimits {
        DomainLimits { pages: 1 << 20, refs: 1 << 20, maptrack: 32768 }
    }
}

/// Statistics of a machine: totals since its start, and current numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MachineStats {
    /// Successful map calls.
    pub map_calls: u64,
    /// Pages mapped by them.
    pub maps: u64,
    /// Refused map calls.
    pub map_failures: u64,
    /// Unmap calls, and mappings that ended with their connection.
    pub unmap_calls: u64,
    /// Pages unmapped by them.
    pub unmaps: u64,
    /// Copy calls.
    pub copy_calls: u64,
    /// Copies in them, of any status.
    pub copies: u64,
    /// Bytes copied.
    pub copied_bytes: u64,
    /// Events sent.
    pub events_sent: u64,
    /// Events that made the receiver's descriptor readable: none was pending and the port was not masked.
    pub events_delivered: u64,
    /// Current mapped pages.
    pub live_mappings: u64,
    /// Current grants.
    pub live_grants: u64,
    /// Current open ports.
    pub open_ports: u64,
    /// Current connections: one for each [`Xen`](mqblk_xen::Xen) and one for each
    /// [`GrantAccess`](mqblk_memory::GrantAccess).
    pub connections: u64,
}
