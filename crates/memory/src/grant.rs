//! Pages of another domain, by grant reference: a ring's operations on Xen's grant tables, real or simulated.

use std::io;

use crate::arena::{PageArena, PageSlot};

/// A domain: a virtual machine of Xen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DomainId(pub u16);

/// A reference into a domain's grant table: one page that it shares.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GrantRef(pub u32);

/// Status of one grant operation, as the hypervisor returns it. Source: `GNTST_*` of Xen's `public/grant_table.h`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GrantStatus(pub i16);

impl GrantStatus {
    /// Done.
    pub const OKAY: GrantStatus = GrantStatus(0);
    /// GNTST_general_error, for example: not allowed.
    pub const GENERAL_ERROR: GrantStatus = GrantStatus(-1);
    /// GNTST_bad_domain.
    pub const BAD_DOMAIN: GrantStatus = GrantStatus(-2);
    /// GNTST_bad_gntref: there is no such grant.
    pub const BAD_REF: GrantStatus = GrantStatus(-3);
}

/// Direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyDirection {
    /// From the granted page to the local one.
    FromGrant,
    /// From the local page to the granted one.
    ToGrant,
}

/// One copy between a granted page and a slot of an arena.
#[derive(Clone, Copy, Debug)]
pub struct GrantCopy {
    /// The granted page.
    pub gref: GrantRef,
    /// Offset of the first byte in it. `offset + len` is at most [`PAGE_BYTES`](crate::PAGE_BYTES): the kernel refuses
    /// a whole batch if one copy leaves its page.
    pub offset: u16,
    /// Length in bytes.
    pub len: u16,
    /// The local page.
    pub slot: PageSlot,
    /// Offset of the first byte in it.
    pub slot_offset: u16,
    /// Direction.
    pub direction: CopyDirection,
    /// Status; set by the copy.
    pub status: GrantStatus,
}

/// A ring's access to the pages that one domain grants. Used by one thread at a time; not shared between rings.
///
/// Each call may cost a hypercall, so callers batch operations.
pub trait GrantAccess: Send {
    /// Performs all copies. Each has its own status.
    ///
    /// # Errors
    /// When none was performed.
    fn copy(&mut self, arena: &PageArena, copies: &mut [GrantCopy]) -> io::Result<()>;

    /// Maps granted pages into consecutive slots starting at `first`: all of them or none.
    ///
    /// # Errors
    /// When a grant does not exist or does not allow the access, or the host has no space for more mappings. The slots
    /// then hold what they held before, or private zero pages.
    fn map(&mut self, arena: &PageArena, first: PageSlot, refs: &[GrantRef], writable: bool) -> io::Result<()>;

    /// Unmaps the pages that one [`map`](Self::map) mapped into the slots from `first`; they hold private zero pages
    /// afterwards. When this returns, the domain may revoke the grants.
    ///
    /// # Errors
    /// When the pages could not be unmapped. The slots must not be used again.
    fn unmap(&mut self, arena: &PageArena, first: PageSlot) -> io::Result<()>;
}
