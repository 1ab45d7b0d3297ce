//! What a request asks for, and whether it may. Pure: it sees private copies only.
//!
//! Source: Xen's `public/io/blkif.h`; where that says nothing, what Linux's blkback does.

use mqblk_core::units::in_range;
use mqblk_core::{BlockSize, ByteLen, ByteOffset, Sector512};
use mqblk_memory::PAGE_BYTES;
use mqblk_ring::blkif::request::{DISCARD_SECURE, MAX_SEGMENTS, SEGMENTS_PER_PAGE};
use mqblk_ring::blkif::{BlkifRequest, IndirectRequest, RequestBody, RwRequest, operation, status};

use crate::options::VbdOptions;
use crate::place::PageUse;

/// Sectors of a page.
pub(crate) const PAGE_SECTORS: u8 = ByteLen(PAGE_BYTES as u64).sectors().0 as u8;

/// What is done with a request's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Write,
    /// Written, then all that was written is made durable.
    WriteFlush,
    /// The same, alone: after all requests of the device that came before it, before all that come after it.
    Barrier,
}

/// What a request is, as far as its entry tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    /// Answered at once.
    Answer(i16),
    /// No data, only a flush.
    Flush,
    /// No data, only the order.
    EmptyBarrier,
    Discard {
        secure: bool,
        start: ByteOffset,
        len: ByteLen,
    },
    /// The segments are in the entry; they are still to be judged.
    Direct(Kind),
    /// The segments are in pages that are still to be read.
    Indirect(Kind),
}

/// What a device lets its frontend do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    block: BlockSize,
    /// A number of sectors that has one of these bits is no number of blocks.
    odd_sectors: u64,
    max_indirect: u16,
    read_only: bool,
    discard: bool,
    discard_secure: bool,
    /// By operation: what a transfer is, if it is offered.
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

    /// What a transfer with its segments in the entry is, as far as its first bytes tell. `None`: it is to be [judged](Self::judge) as
    /// a whole.
    #[inline]
    pub(crate) fn direct(&self, operation: u8, segments: u8) -> Option<Kind> {
        let kind = self.kinds.get(usize::from(operation)).copied().flatten()?;
        let may = matches!(segments, 1..=DIRECT) && !(self.read_only && kind != Kind::Read);
        may.then_some(kind)
    }

    /// Judges an entry. `size`: of the disk, now.
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
        let some = indirect.nr_segments > 0 && indirect.nr_segments <= self.max_indirect;
        if some { Asked::Indirect(kind) } else { Asked::Answer(status::ERROR) }
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

    /// A range in bytes, if it is made of whole blocks of the disk.
    #[inline]
    fn range(&self, sector: Sector512, sectors: u64, size: ByteLen) -> Option<(ByteOffset, ByteLen)> {
        let (start, len) = (sector.to_offset()?, Sector512(sectors).to_len()?);
        let whole = start.is_aligned(self.block) && len.is_aligned(self.block);
        (whole && in_range(start, len, size)).then_some((start, len))
    }

    /// The range of a transfer from `sector` on, if all its segments are right. `size`: of the disk, now.
    #[inline]
    pub(crate) fn extent(&self, sector: Sector512, pages: &[PageUse], size: ByteLen) -> Option<(ByteOffset, ByteLen)> {
        let mut sectors = 0;
        for page in pages {
            if page.first > page.last || page.last >= PAGE_SECTORS {
                return None;
            }
            let here = u64::from(page.last - page.first) + 1;
            if here & self.odd_sectors != 0 {
                return None;
            }
            sectors += here;
        }
        self.range(sector, sectors, size)
    }
}

/// Most segments in an entry.
const DIRECT: u8 = MAX_SEGMENTS as u8;

/// Pages that hold so many segments.
#[inline]
pub(crate) fn indirect_pages(segments: u16) -> usize {
    usize::from(segments).div_ceil(SEGMENTS_PER_PAGE)
}

/// What a response calls its request: the operation; of an indirect one, the inner one (a frontend that checks takes the disk
/// out of service otherwise).
#[inline]
pub(crate) fn answered_operation(request: &BlkifRequest) -> u8 {
    match &request.body {
        RequestBody::Indirect(indirect) => indirect.operation,
        _ => request.operation,
    }
}
