//! Parses and validates requests. Pure: works on private copies only.
//!
//! Source: Xen's `public/io/blkif.h`; where it is silent, Linux's xen-blkback.

use mqblk_core::units::in_range;
use mqblk_core::{BlockSize, ByteLen, ByteOffset, Sector512};
use mqblk_memory::PAGE_BYTES;
use mqblk_ring::blkif::request::{DISCARD_SECURE, MAX_SEGMENTS, SEGMENTS_PER_PAGE};
use mqblk_ring::blkif::{BlkifRequest, IndirectRequest, RequestBody, RwRequest, operation, status};

use crate::options::VbdOptions;
use crate::place::PageUse;

/// Sectors per page.
pub(crate) const PAGE_SECTORS: u8 = ByteLen(PAGE_BYTES as u64).sectors().0 as u8;

/// Type of a request with data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Write,
    /// A write, then a flush.
    WriteFlush,
    /// A write, then a flush, ordered against all other requests of the device.
    Barrier,
}

/// A request, as parsed from its ring entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    /// Completed at once, with this status.
    Answer(i16),
    /// A flush without data.
    Flush,
    /// A barrier without data.
    EmptyBarrier,
    Discard {
        secure: bool,
        start: ByteOffset,
        len: ByteLen,
    },
    /// The segments are in the ring entry, not validated yet.
    Direct(Kind),
    /// The segments are in indirect pages, not fetched yet.
    Indirect(Kind),
}

/// Parser of requests by what the device offers to its frontend.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    block: BlockSize,
    /// A number of sectors with one of these bits set is not a whole number of blocks.
    odd_sectors: u64,
    max_indirect: u16,
    read_only: bool,
    discard: bool,
    discard_secure: bool,
    /// Transfer type by operation; `None`: not offered.
    kinds: [Option<Kind>; 4],
}

impl Rules {
    pub(crate) fn new(options: &VbdOptions) -> Rules {
        let block = options.geometry.logical_block;
        let mut kinds = [None; 4];
        kinds[usize::from(operation::READ)] = Some(Kind::Read);
        kinds[usize::from(operation::WRITE)] = Some(Kind::Write);
        kinds[usize::from(operation::WRITE_BARRIER)] = options.barrier.then_some(Kind::Barrier);
        kinds[usize::from(operation::FLUSH_DISKCACHE)] = options.flush.then_some(Kind::WriteFlush);
        Rules {
            kinds,
            block,
            odd_sectors: ByteLen(block.bytes().into()).sectors().0 - 1,
            max_indirect: options.max_indirect_segments,
            read_only: options.geometry.read_only,
            discard: options.discard && options.limits.discard.is_some(),
            discard_secure: options.discard_secure,
        }
    }

    /// Returns the type of a transfer with its segments in the ring entry, by its first bytes. `None`: needs a full
    /// [`parse`](Self::parse).
    #[inline]
    pub(crate) fn direct(&self, operation: u8, segments: u8) -> Option<Kind> {
        let kind = self.kinds.get(usize::from(operation)).copied().flatten()?;
        let allowed = matches!(segments, 1..=DIRECT) && !(self.read_only && kind != Kind::Read);
        allowed.then_some(kind)
    }

    /// Parses a request. `size`: current size of the disk.
    pub(crate) fn judge(&self, request: &BlkifRequest, size: ByteLen) -> Asked {
        match &request.body {
            RequestBody::Rw(transfer) => self.transfer(request.operation, transfer),
            RequestBody::Indirect(indirect) => self.indirect(indirect),
            RequestBody::Discard { flag, sector, sectors } => self.discard(*flag, *sector, *sectors, size),
            RequestBody::Unknown => Asked::Answer(status::NOT_SUPPORTED),
        }
    }

    fn transfer(&self, operation: u8, transfer: &RwRequest) -> Asked {
        let Some(kind) = self.kinds.get(usize::from(operation)).copied().flatten() else {
            return Asked::Answer(status::NOT_SUPPORTED);
        };
        match (kind, transfer.nr_segments) {
            (Kind::WriteFlush, 0) => Asked::Flush,
            (Kind::Barrier, 0) if !self.read_only => Asked::EmptyBarrier,
            (_, segments) => self.direct(operation, segments).map_or(Asked::Answer(status::ERROR), Asked::Direct),
        }
    }

    fn indirect(&self, indirect: &IndirectRequest) -> Asked {
        if self.max_indirect == 0 {
            return Asked::Answer(status::NOT_SUPPORTED);
        }
        let kind = match indirect.operation {
            operation::READ => Kind::Read,
            operation::WRITE if !self.read_only => Kind::Write,
            _ => return Asked::Answer(status::ERROR),
        };
        let in_range = indirect.nr_segments > 0 && indirect.nr_segments <= self.max_indirect;
        if in_range { Asked::Indirect(kind) } else { Asked::Answer(status::ERROR) }
    }

    fn discard(&self, flag: u8, sector: Sector512, sectors: u64, size: ByteLen) -> Asked {
        if !self.discard {
            return Asked::Answer(status::NOT_SUPPORTED);
        }
        let range = self.range(sector, sectors, size).filter(|_| !self.read_only);
        match range {
            Some((_, ByteLen::ZERO)) => Asked::Answer(status::OKAY),
            Some((start, len)) => {
                Asked::Discard { secure: self.discard_secure && flag & DISCARD_SECURE != 0, start, len }
            }
            None => Asked::Answer(status::ERROR),
        }
    }

    /// Returns a range in bytes, if it consists of whole blocks of the disk.
    #[inline]
    fn range(&self, sector: Sector512, sectors: u64, size: ByteLen) -> Option<(ByteOffset, ByteLen)> {
        let (start, len) = (sector.to_offset()?, Sector512(sectors).to_len()?);
        let whole = start.is_aligned(self.block) && len.is_aligned(self.block);
        (whole && in_range(start, len, size)).then_some((start, len))
    }

    /// Returns the range of a transfer from `sector` on, if all its segments are valid. `size`: current size of the disk.
    #[inline]
    pub(crate) fn extent(&self, sector: Sector512, pages: &[PageUse], size: ByteLen) -> Option<(ByteOffset, ByteLen)> {
        let mut sectors = 0;
        for page in pages {
            if page.first > page.last || page.last >= PAGE_SECTORS {
                return None;
            }
            let count = u64::from(page.last - page.first) + 1;
            if count & self.odd_sectors != 0 {
                return None;
            }
            sectors += count;
        }
        self.range(sector, sectors, size)
    }
}

/// Maximum of segments in a ring entry.
const DIRECT: u8 = MAX_SEGMENTS as u8;

/// Returns the number of indirect pages for this many segments.
#[inline]
pub(crate) fn indirect_pages(segments: u16) -> usize {
    usize::from(segments).div_ceil(SEGMENTS_PER_PAGE)
}

/// Returns the operation of a response: the request's, or the inner operation of an indirect request (a frontend that checks it
/// disables the disk otherwise).
#[inline]
pub(crate) fn answered_operation(request: &BlkifRequest) -> u8 {
    match &request.body {
        RequestBody::Indirect(indirect) => indirect.operation,
        _ => request.operation,
    }
}
