//! The granted pages of a request: the sectors used of each page, and the slots that back them.

use mqblk_core::Sector512;
use mqblk_memory::{CopyDirection, GrantCopy, GrantRef, GrantStatus, GuestAddress, PageSlot};
use mqblk_ring::blkif::Segment;

use crate::slot_ranges::SlotRange;

/// A granted page of a request (one segment) and the page slot that backs it. `first_sector` and `last_sector` are
/// validated before any other method is called.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestPage {
    pub(crate) gref: GrantRef,
    pub(crate) slot: PageSlot,
    /// First sector used in the page.
    pub(crate) first_sector: u8,
    /// Last sector used in the page.
    pub(crate) last_sector: u8,
}

/// Converts sectors of a page to bytes.
#[inline]
fn sector_bytes(sectors: u8) -> u16 {
    Sector512(sectors.into()).to_len().map_or(0, |len| len.0 as u16)
}

impl RequestPage {
    pub(crate) const EMPTY: RequestPage =
        RequestPage { gref: GrantRef(0), slot: PageSlot(0), first_sector: 0, last_sector: 0 };

    #[inline]
    pub(crate) fn from_segment(segment: Segment) -> RequestPage {
        let Segment { gref, first_sect, last_sect } = segment;
        RequestPage { gref, slot: PageSlot(0), first_sector: first_sect, last_sector: last_sect }
    }

    /// Returns the offset of the first byte in the page.
    #[inline]
    fn offset(&self) -> u16 {
        sector_bytes(self.first_sector)
    }

    /// Returns the length in bytes.
    #[inline]
    pub(crate) fn len(&self) -> u32 {
        sector_bytes(self.last_sector - self.first_sector + 1).into()
    }

    /// Returns the address of the first byte in the arena.
    #[inline]
    pub(crate) fn address(&self) -> GuestAddress {
        self.slot.address(self.offset().into())
    }

    #[inline]
    pub(crate) fn grant_copy(&self, direction: CopyDirection) -> GrantCopy {
        GrantCopy {
            gref: self.gref,
            offset: self.offset(),
            len: self.len() as u16,
            slot: self.slot,
            slot_offset: self.offset(),
            direction,
            // Stays if the copy is not executed.
            status: GrantStatus::GENERAL_ERROR,
        }
    }
}

/// Backing of the pages of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageBacking {
    /// The request has no data.
    None,
    /// Buffer pages; the hypervisor copies.
    Copy(SlotRange),
    /// Pages mapped for this request.
    Map(SlotRange),
    /// Persistent grants.
    Persistent,
    /// Persistent grants, with the data in buffer pages.
    Bounce(SlotRange),
}
