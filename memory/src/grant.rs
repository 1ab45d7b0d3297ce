//! Pages of another domain, by grant: what a ring needs of Xen's grant tables, whether they are real or simulated.

use std::io;

use crate::arena::{PageArena, PageSlot};

/// A domain: a virtual machine of Xen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DomainId(pub u16);

/// A reference into a domain's grant table: one page that it shares.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GrantRef(pub u32);

/// How one grant operation ended, as the hypervisor says it. Source: `GNTST_*` of Xen's `public/grant_table.h`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GrantStatus(pub i16);

impl GrantStatus {
    /// Done.
    pub const OKAY: GrantStatus = GrantStatus(0);
    /// GNTST_general_error: not allowed, for one.
    pub const GENERAL_ERROR: GrantStatus = GrantStatus(-1);
    /// GNTST_bad_domain.
    pub const BAD_DOMAIN: GrantStatus = GrantStatus(-2);
    /// GNTST_bad_gntref: there is no such grant.
    pub const BAD_REF: GrantStatus = GrantStatus(-3);
}

/// Which way a copy goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyDirection {
    /// From the granted page to ours.
    FromGrant,
    /// From our page to the granted one.
    ToGrant,
}

/// One copy between a granted page and a slot of an arena.
#[derive(Clone, Copy, Debug)]
pub struct GrantCopy {
    /// The granted page.
    pub gref: GrantRef,
    /// First byte in it. `offset + len` is at most [`PAGE_BYTES`](crate::PAGE_BYTES): the kernel refuses a whole batch with a copy that
    /// leaves its page.
    pub offset: u16,
    /// Bytes.
    pub len: u16,
    /// Our page.
    pub slot: PageSlot,
    /// First byte in it.
    pub slot_offset: u16,
    /// Which way.
    pub direction: CopyDirection,
    /// How it ended.
    pub status: GrantStatus,
}

/// A ring's way to the pages that one domain grants. Used on one thread at a time, and not shared with other rings.
///
/// Every call may cost a hypercall: callers give many operations at once.
pub trait GrantAccess: Send {
    /// Does all the copies, each of which has its own status.
    ///
    /// # Errors
    /// When none was done.
    fn copy(&mut self, arena: &PageArena, copies: &mut [GrantCopy]) -> io::Result<()>;

    /// Maps granted pages into the slots from `first`, one behind the other: all of them or none.
    ///
    /// # Errors
    /// When one of the grants is not there or not (so) allowed, or there is no room for more mappings in this host. The slots hold
    /// then what they held, or zero pages of our own.
    fn map(&mut self, arena: &PageArena, first: PageSlot, refs: &[GrantRef], writable: bool) -> io::Result<()>;

    /// Lets go of what one [`map`](Self::map) put into the slots from `first`; they hold zero pages of our own afterwards. The domain
    /// may take its pages back when this returns.
    ///
    /// # Errors
    /// When the mapping could not be taken out of the slots, which must not be used any more then.
    fn unmap(&mut self, arena: &PageArena, first: PageSlot) -> io::Result<()>;
}
