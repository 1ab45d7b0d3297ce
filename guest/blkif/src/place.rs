//! A request's pages, one by one: which part of which page, and where it is.

use mqblk_core::Sector512;
use mqblk_memory::{CopyDirection, GrantCopy, GrantRef, GrantStatus, GuestAddress, PageSlot};
use mqblk_ring::blkif::Segment;

use crate::ranges::Range;

/// A segment of a request, and where its page is. `first` and `last` are judged before anything else is asked of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageUse {
    pub(crate) gref: GrantRef,
    pub(crate) slot: PageSlot,
    /// First sector in the page.
    pub(crate) first: u8,
    /// Last sector in it.
    pub(crate) last: u8,
}

/// Sectors of a page in bytes.
#[inline]
fn bytes(sectors: u8) -> u16 {
    Sector512(sectors.into()).to_len().map_or(0, |len| len.0 as u16)
}

impl PageUse {
    pub(crate) const NONE: PageUse = PageUse { gref: GrantRef(0), slot: PageSlot(0), first: 0, last: 0 };

    #[inline]
    pub(crate) fn of(segment: Segment) -> PageUse {
        let Segment { gref, first_sect, last_sect } = segment;
        PageUse { gref, slot: PageSlot(0), first: first_sect, last: last_sect }
    }

    /// Its first byte in the page.
    #[inline]
    fn offset(&self) -> u16 {
        bytes(self.first)
    }

    /// Its bytes.
    #[inline]
    pub(crate) fn len(&self) -> u32 {
        bytes(self.last - self.first + 1).into()
    }

    /// Where its first byte is in the arena.
    #[inline]
    pub(crate) fn address(&self) -> GuestAddress {
        self.slot.address(self.offset().into())
    }

    #[inline]
    pub(crate) fn copy(&self, direction: CopyDirection) -> GrantCopy {
        GrantCopy {
            gref: self.gref,
            offset: self.offset(),
            len: self.len() as u16,
            slot: self.slot,
            slot_offset: self.offset(),
            direction,
            // Of a copy that nobody looks at.
            status: GrantStatus::GENERAL_ERROR,
        }
    }
}

/// Where the pages of a request are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Nowhere: it has none.
    None,
    /// In own pages.
    Copy(Range),
    /// Mapped, for this request.
    Map(Range),
    /// Mapped, each for itself, for good.
    Persistent,
    /// The same, with data in own pages.
    Bounce(Range),
}
