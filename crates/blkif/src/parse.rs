//! Parses and validates requests. Pure: works on private copies only.
//!
//! Source: Xen's `public/io/blkif.h`; where it is silent, Linux's xen-blkback.

use mqblk_core::units::in_range;
use mqblk_core::{BlockSize, ByteLen, ByteOffset, Sector512};
use mqblk_memory::PAGE_BYTES;
use mqblk_ring::blkif::request::{DISCARD_SECURE, MAX_SEGMENTS, SEGMENTS_PER_PAGE};
use mqblk_ring::blkif::{BlkifRequest, IndirectRequest, RequestBody, RwRequest, operation, status};

use crate::options::VbdOptions;
use crate::page_backing::RequestPage;

/// Sectors per page.
pub(crate) const PAGE_SECTORS: u8 = ByteLen(PAGE_BYTES as u64).sectors().0 as u8;

/// Reasons why a request is malformed.
const NOT_OFFERED: &str = "an operation that is not offered";
const WRONG_TRANSFER: &str = "a number of segments that is not offered, or a write to a read-only disk";
pub(crate) const WRONG_RANGE: &str = "a range beyond the end, or of parts of blocks, or on a read-only disk";

/// Type of a request with data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TransferType {
    Read,
    Write,
    /// A write, then a flush.
    WriteFlush,
    /// A write, then a flush, ordered against all other requests of the device.
    Barrier,
}

/// A request, as parsed from its ring entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ParsedRequest {
    /// Completed at once: there is nothing to do.
    Nothing,
    /// Malformed: fails at once, with this status and this reason for the log.
    Refused(i16, &'static str),
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
    Direct(TransferType),
    /// The segments are in indirect pages, not fetched yet.
    Indirect(TransferType),
}

/// Parser of requests by the device's offered features.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestParser {
    block: BlockSize,
    /// A number of sectors with one of these bits set is not a whole number of blocks.
    sub_block_mask: u64,
    max_indirect: u16,
    read_only: bool,
    discard_offered: bool,
    secure_discard_offered: bool,
    /// Transfer type by operation; `None`: not offered.
    transfer_types: [Option<TransferType>; 4],
    write_through: bool,
    max_discard: ByteLen,
}

impl RequestParser {
    pub(crate) fn new(options: &VbdOptions) -> RequestParser {
        let block = options.geometry.logical_block;
        let mut transfer_types = [None; 4];
        transfer_types[usize::from(operation::READ)] = Some(TransferType::Read);
        transfer_types[usize::from(operation::WRITE)] = Some(TransferType::Write);
        transfer_types[usize::from(operation::WRITE_BARRIER)] = options.barrier.then_some(TransferType::Barrier);
        transfer_types[usize::from(operation::FLUSH_DISKCACHE)] = options.flush.then_some(TransferType::WriteFlush);
        RequestParser {
            transfer_types,
            block,
            sub_block_mask: ByteLen(block.bytes().into()).sectors().0 - 1,
            max_indirect: options.max_indirect_segments,
            read_only: options.geometry.read_only,
            discard_offered: options.discard && options.limits.discard.is_some(),
            secure_discard_offered: options.discard_secure,
            write_through: options.write_through,
            max_discard: options.limits.discard.map_or(ByteLen::ZERO, |discard| discard.max_len),
        }
    }

    /// Returns true if every write is durable before its response.
    #[inline]
    pub(crate) fn write_through(&self) -> bool {
        self.write_through
    }

    /// Returns the longest discard that the storage accepts.
    pub(crate) fn max_discard(&self) -> ByteLen {
        self.max_discard
    }

    /// Returns the type of a transfer with its segments in the ring entry, by its first bytes. `None`: needs a full
    /// [`parse`](Self::parse).
    #[inline]
    pub(crate) fn direct_transfer(&self, operation: u8, segments: u8) -> Option<TransferType> {
        let kind = self.transfer_types.get(usize::from(operation)).copied().flatten()?;
        let allowed = matches!(segments, 1..=MAX_DIRECT_SEGMENTS) && !(self.read_only && kind != TransferType::Read);
        allowed.then_some(kind)
    }

    /// Parses a request. `size`: current size of the disk.
    pub(crate) fn parse(&self, request: &BlkifRequest, size: ByteLen) -> ParsedRequest {
        match &request.body {
            RequestBody::Rw(transfer) => self.parse_transfer(request.operation, transfer),
            RequestBody::Indirect(indirect) => self.parse_indirect(indirect),
            RequestBody::Discard { flag, sector, sectors } => self.parse_discard(*flag, *sector, *sectors, size),
            RequestBody::Unknown => ParsedRequest::Refused(status::NOT_SUPPORTED, "an unknown operation"),
        }
    }

    fn parse_transfer(&self, operation: u8, transfer: &RwRequest) -> ParsedRequest {
        let Some(kind) = self.transfer_types.get(usize::from(operation)).copied().flatten() else {
            return ParsedRequest::Refused(status::NOT_SUPPORTED, NOT_OFFERED);
        };
        match (kind, transfer.nr_segments) {
            (TransferType::WriteFlush, 0) => ParsedRequest::Flush,
            (TransferType::Barrier, 0) if !self.read_only => ParsedRequest::EmptyBarrier,
            (_, segments) => self
                .direct_transfer(operation, segments)
                .map_or(ParsedRequest::Refused(status::ERROR, WRONG_TRANSFER), ParsedRequest::Direct),
        }
    }

    fn parse_indirect(&self, indirect: &IndirectRequest) -> ParsedRequest {
        if self.max_indirect == 0 {
            return ParsedRequest::Refused(status::NOT_SUPPORTED, NOT_OFFERED);
        }
        let kind = match indirect.operation {
            operation::READ => TransferType::Read,
            operation::WRITE if !self.read_only => TransferType::Write,
            _ => return ParsedRequest::Refused(status::ERROR, WRONG_TRANSFER),
        };
        let in_range = indirect.nr_segments > 0 && indirect.nr_segments <= self.max_indirect;
        if in_range { ParsedRequest::Indirect(kind) } else { ParsedRequest::Refused(status::ERROR, WRONG_TRANSFER) }
    }

    fn parse_discard(&self, flag: u8, sector: Sector512, sectors: u64, size: ByteLen) -> ParsedRequest {
        if !self.discard_offered {
            return ParsedRequest::Refused(status::NOT_SUPPORTED, NOT_OFFERED);
        }
        let range = self.byte_range(sector, sectors, size).filter(|_| !self.read_only);
        match range {
            Some((_, ByteLen::ZERO)) => ParsedRequest::Nothing,
            Some((start, len)) => {
                ParsedRequest::Discard { secure: self.secure_discard_offered && flag & DISCARD_SECURE != 0, start, len }
            }
            None => ParsedRequest::Refused(status::ERROR, WRONG_RANGE),
        }
    }

    /// Returns a range in bytes, if it consists of whole blocks of the disk.
    #[inline]
    fn byte_range(&self, sector: Sector512, sectors: u64, size: ByteLen) -> Option<(ByteOffset, ByteLen)> {
        let (start, len) = (sector.to_offset()?, Sector512(sectors).to_len()?);
        let whole = start.is_aligned(self.block) && len.is_aligned(self.block);
        (whole && in_range(start, len, size)).then_some((start, len))
    }

    /// Returns the range of a transfer from `sector` on, if all its segments are valid. `size`: current size of the
    /// disk.
    #[inline]
    pub(crate) fn transfer_range(
        &self,
        sector: Sector512,
        pages: &[RequestPage],
        size: ByteLen,
    ) -> Option<(ByteOffset, ByteLen)> {
        let mut sectors = 0;
        for page in pages {
            if page.first_sector > page.last_sector || page.last_sector >= PAGE_SECTORS {
                return None;
            }
            let count = u64::from(page.last_sector - page.first_sector) + 1;
            if count & self.sub_block_mask != 0 {
                return None;
            }
            sectors += count;
        }
        self.byte_range(sector, sectors, size)
    }
}

/// Maximum of segments in a ring entry.
const MAX_DIRECT_SEGMENTS: u8 = MAX_SEGMENTS as u8;

/// Returns the number of indirect pages for this many segments.
#[inline]
pub(crate) fn indirect_pages(segments: u16) -> usize {
    usize::from(segments).div_ceil(SEGMENTS_PER_PAGE)
}

/// Returns the operation of a response: the request's, or the inner operation of an indirect request (a frontend that
/// checks it disables the disk otherwise).
#[inline]
pub(crate) fn response_operation(request: &BlkifRequest) -> u8 {
    match &request.body {
        RequestBody::Indirect(indirect) => indirect.operation,
        _ => request.operation,
    }
}
