//! Parses a chain of descriptors into a request. Source: virtio 1.3 section 5.2.6.

use std::num::NonZeroU32;

use mqblk_core::{ByteLen, ByteOffset, Op, Sector512};
use mqblk_memory::{Buffer, BufferFault, BufferPool, GuestAddress, LeaseAccess, LeaseId};
use mqblk_ring::virtqueue::{
    ChainError, ChainHead, ChainHeader, ChainSegment, DeviceRing, UsualChains, VirtqueueError,
};
use virtio_bindings::virtio_blk as b;

use crate::config::MAX_RANGES;
use crate::device::VirtioBlk;

/// The status byte of a request. Source: virtio 1.3 section 5.2.6.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlkStatus(pub u8);

impl BlkStatus {
    /// Success.
    pub(crate) const OK: BlkStatus = BlkStatus(b::VIRTIO_BLK_S_OK as u8);
    /// Device or driver error.
    pub(crate) const IOERR: BlkStatus = BlkStatus(b::VIRTIO_BLK_S_IOERR as u8);
    /// Request type not supported.
    pub(crate) const UNSUPP: BlkStatus = BlkStatus(b::VIRTIO_BLK_S_UNSUPP as u8);
}

/// Most segments of one request: the host's limit of one vectored transfer (UIO_MAXIOV). SEG_MAX and SIZE_MAX of the
/// configuration space are advice: Windows' driver sends up to 515 segments of any size.
const MAX_SEGMENTS: u16 = 1024;
const HEADER_BYTES: usize = 16;
const RANGE_BYTES: usize = 16;
const FLAG_UNMAP: u32 = 1;

/// Reasons why a request is malformed.
const UNMAPPED: &str = BufferFault::Unmapped.why();
const WRONG_TABLE: &str = "an indirect table that is too long, or outside of the guest's memory";
const NOT_OFFERED: &str = "a type that is not offered";
const WRONG_WAY: &str = "data in the wrong direction";
const READ_ONLY: &str = "a change of a read-only disk";
const NO_BLOCKS: &str = "a start or a length that is not a multiple of the block size";
const BEYOND_END: &str = "a range beyond the end of the disk";

/// A header: its type, with the reserved word, and its sector.
struct Header([u64; 2]);

impl ChainHeader for Header {
    const LEN: u32 = HEADER_BYTES as u32;

    #[inline(always)] // else it would travel through memory
    fn read(access: &mut LeaseAccess<'_>, address: GuestAddress) -> Option<Header> {
        Some(Header(access.read::<[u64; 2]>(address)?.map(u64::from_le)))
    }
}

/// A read or write of one segment, in a chain of header, data and status: the most frequent request.
pub(crate) struct Transfer {
    pub op: Op,
    pub start: ByteOffset,
    pub len: ByteLen,
    pub buffer: Buffer,
    /// Bytes written to the guest if it succeeds.
    pub written: NonZeroU32,
}

impl Transfer {
    /// Reads a chain. `None` for any other or invalid chain: [`RequestChain`] then reads it again.
    #[inline(always)] // else it would travel through memory
    pub(crate) fn read(
        ring: &impl UsualChains,
        head: &ChainHead,
        access: &mut LeaseAccess<'_>,
        device: &VirtioBlk,
    ) -> Option<Transfer> {
        let (Header([kind, sector]), [data, status]) = ring.three_segments(access, head)?;
        if status.len != 1 {
            return None;
        }
        // The upper half is reserved.
        if kind as u32 != if data.writable { b::VIRTIO_BLK_T_IN } else { b::VIRTIO_BLK_T_OUT } {
            return None;
        }
        if !data.writable && device.is_read_only() {
            return None;
        }
        let (start, len) = (Sector512(sector).to_offset()?, ByteLen(data.len.into()));
        if !ByteOffset(start.0 | len.0).is_aligned(device.block()) {
            return None;
        }
        let buffer = access.take_transfer((data.address, data.len), data.writable, (status.address, 1))?;
        let written = NonZeroU32::MIN.saturating_add(if data.writable { data.len } else { 0 });
        let op = if data.writable { Op::Read } else { write(device) };
        Some(Transfer { op, start, len, buffer, written })
    }
}

/// Returns the operation of a write. One of two constants: a value composed of its parts would carry unused bytes.
#[inline]
fn write(device: &VirtioBlk) -> Op {
    if device.is_write_through() { Op::Write { fua: true } } else { Op::Write { fua: false } }
}

/// A chain that was read but not yet parsed.
#[derive(Debug)]
pub(crate) struct RequestChain {
    /// Header bytes: type u32, reserved u32, sector u64.
    header: [u8; HEADER_BYTES],
    header_len: usize,
    /// Data segments and the status byte.
    pub buffer: Buffer,
    /// Bytes of data for the device to read.
    data_out: u64,
    /// Bytes of data for the device to write.
    data_in: u64,
    /// The reason why the chain is malformed.
    fault: Option<&'static str>,
    has_status: bool,
}

/// The parsed content of a chain.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ParsedRequest {
    /// One disk range, with data for reads and writes.
    Disk {
        /// Operation.
        op: Op,
        /// Start on the disk.
        start: ByteOffset,
        /// Length.
        len: ByteLen,
    },
    /// `count` disk ranges, in the parser's list.
    Ranges {
        /// Operation on each of them.
        op: Op,
        /// Number of ranges.
        count: usize,
    },
    /// A request for the device's ID string.
    GetId,
    /// A request that completes at once: there is nothing to do.
    Nothing,
    /// A malformed request: it fails at once with this status, for this reason.
    Refused(BlkStatus, &'static str),
    /// There is no status byte: the chain is returned with no bytes written.
    NoStatusByte,
}

/// The ranges of one discard or write-zeroes request; reused.
pub(crate) type Ranges = Vec<(ByteOffset, ByteLen)>;

impl RequestChain {
    /// Creates an empty chain.
    #[inline]
    pub(crate) fn new(buffer: Buffer) -> RequestChain {
        RequestChain {
            header: [0; HEADER_BYTES],
            header_len: 0,
            buffer,
            data_out: 0,
            data_in: 0,
            fault: None,
            has_status: false,
        }
    }

    /// Walks the chain once and divides its bytes into header, data and status.
    ///
    /// # Errors
    /// When the ring violates the protocol; the caller must release the buffer.
    #[inline]
    pub(crate) fn read(
        &mut self,
        ring: &DeviceRing,
        pool: &mut BufferPool,
        lease: LeaseId,
        head: &ChainHead,
    ) -> Result<(), VirtqueueError> {
        // The last writable byte is the status, so the last writable segment is kept until the next one.
        let mut last: Option<ChainSegment> = None;
        let walked = ring.walk(pool, lease, head, |pool, segment| {
            if !segment.writable {
                self.take_readable(pool, lease, segment);
            } else if let Some(before) = last.replace(segment) {
                self.data_in += u64::from(before.len);
                self.push(pool, before.address, before.len);
            }
            Ok(())
        });
        match walked {
            Ok(()) => {}
            Err(ChainError::BadRequest) => self.fault = Some(WRONG_TABLE),
            Err(ChainError::BrokenRing(broken)) => return Err(broken),
        }
        if let Some(last) = last {
            self.take_status(pool, last);
        }
        Ok(())
    }

    #[inline]
    fn take_readable(&mut self, pool: &mut BufferPool, lease: LeaseId, segment: ChainSegment) {
        if self.header_len == HEADER_BYTES {
            self.data_out += u64::from(segment.len);
            self.push(pool, segment.address, segment.len);
        } else if self.header_len == 0 && segment.len as usize == HEADER_BYTES {
            // The usual layout.
            self.header_len = HEADER_BYTES;
            match pool.read::<[u64; 2]>(lease, segment.address) {
                Some([first, second]) => {
                    let (start, end) = self.header.split_at_mut(HEADER_BYTES / 2);
                    start.copy_from_slice(&first.to_ne_bytes());
                    end.copy_from_slice(&second.to_ne_bytes());
                }
                None => self.fault = Some(UNMAPPED),
            }
        } else {
            self.take_split_header(pool, lease, segment);
        }
    }

    /// A segment with a part of the header, or with the header and data.
    fn take_split_header(&mut self, pool: &mut BufferPool, lease: LeaseId, segment: ChainSegment) {
        let used = (HEADER_BYTES - self.header_len).min(segment.len as usize);
        let into = &mut self.header[self.header_len..self.header_len + used];
        if !pool.read_bytes(lease, segment.address, into) {
            self.fault = Some(UNMAPPED);
        }
        self.header_len += used;
        let rest = segment.len - used as u32;
        if rest > 0 {
            self.data_out += u64::from(rest);
            match segment.address.0.checked_add(used as u64) {
                Some(address) => self.push(pool, GuestAddress(address), rest),
                None => self.fault = Some(UNMAPPED),
            }
        }
    }

    #[inline]
    fn take_status(&mut self, pool: &mut BufferPool, last: ChainSegment) {
        let data = last.len - 1;
        if data > 0 {
            self.data_in += u64::from(data);
            self.push(pool, last.address, data);
        }
        if self.data_in > 0 {
            pool.set_writable(&self.buffer);
        }
        let address = last.address.0.checked_add(u64::from(data));
        self.has_status = address.is_some_and(|at| pool.set_status(&self.buffer, GuestAddress(at)).is_ok());
    }

    #[inline]
    fn push(&mut self, pool: &mut BufferPool, address: GuestAddress, len: u32) {
        if let Err(fault) = pool.push(&self.buffer, address, len, MAX_SEGMENTS) {
            self.fault = Some(fault.why());
        }
    }

    /// Returns the bytes that the device writes if the request succeeds: data and status.
    #[inline]
    pub(crate) fn written(&self) -> NonZeroU32 {
        NonZeroU32::MIN.saturating_add(u32::try_from(self.data_in).unwrap_or(u32::MAX))
    }

    /// Parses the private copy of the header. Ranges of discards are read (once) into `ranges`.
    #[inline]
    pub(crate) fn parse(&self, device: &VirtioBlk, fua: bool, pool: &BufferPool, ranges: &mut Ranges) -> ParsedRequest {
        if !self.has_status {
            return ParsedRequest::NoStatusByte;
        }
        if let Some(why) = self.fault.or((self.header_len < HEADER_BYTES).then_some("no whole header")) {
            return ParsedRequest::Refused(BlkStatus::IOERR, why);
        }
        let kind = u32::from_le_bytes([self.header[0], self.header[1], self.header[2], self.header[3]]);
        let [_, _, _, _, _, _, _, _, sector @ ..] = self.header;
        let sector = Sector512(u64::from_le_bytes(sector));
        match kind {
            b::VIRTIO_BLK_T_IN => self.transfer(device, Op::Read, sector, self.data_in, self.data_out),
            b::VIRTIO_BLK_T_OUT => self.transfer(device, Op::Write { fua }, sector, self.data_out, self.data_in),
            b::VIRTIO_BLK_T_FLUSH => ParsedRequest::Disk { op: Op::Flush, start: ByteOffset(0), len: ByteLen::ZERO },
            b::VIRTIO_BLK_T_GET_ID if self.data_out == 0 => ParsedRequest::GetId,
            b::VIRTIO_BLK_T_GET_ID => ParsedRequest::Refused(BlkStatus::IOERR, WRONG_WAY),
            b::VIRTIO_BLK_T_DISCARD => match device.limits().discard {
                Some(limits) => self.ranges(device, limits.max_len, pool, ranges, |flags| {
                    (flags == 0).then_some(Op::Discard { secure: false })
                }),
                None => ParsedRequest::Refused(BlkStatus::UNSUPP, NOT_OFFERED),
            },
            b::VIRTIO_BLK_T_WRITE_ZEROES => match device.limits().write_zeroes {
                Some(max_len) => self.ranges(device, max_len, pool, ranges, |flags| {
                    let may_unmap = flags & FLAG_UNMAP != 0 && device.limits().discard.is_some();
                    (flags & !FLAG_UNMAP == 0).then_some(Op::WriteZeroes { may_unmap, fua })
                }),
                None => ParsedRequest::Refused(BlkStatus::UNSUPP, NOT_OFFERED),
            },
            _ => ParsedRequest::Refused(BlkStatus::UNSUPP, NOT_OFFERED),
        }
    }

    #[inline]
    fn transfer(&self, device: &VirtioBlk, op: Op, sector: Sector512, len: u64, wrong_way: u64) -> ParsedRequest {
        let (block, len) = (device.block(), ByteLen(len));
        let refused = |why| ParsedRequest::Refused(BlkStatus::IOERR, why);
        match sector.to_offset().filter(|start| start.is_aligned(block) && len.is_aligned(block)) {
            _ if wrong_way != 0 => refused(WRONG_WAY),
            _ if op.modifies() && device.is_read_only() => refused(READ_ONLY),
            None => refused(NO_BLOCKS),
            Some(start) if len == ByteLen::ZERO => {
                let inside = mqblk_core::units::in_range(start, len, device.size());
                if inside { ParsedRequest::Nothing } else { refused(BEYOND_END) }
            }
            Some(start) => ParsedRequest::Disk { op, start, len },
        }
    }

    /// Reads the list of ranges. `op` maps each range's flags to an operation; all must agree, so that the request is
    /// one operation.
    fn ranges(
        &self,
        device: &VirtioBlk,
        max_len: ByteLen,
        pool: &BufferPool,
        ranges: &mut Ranges,
        op: impl Fn(u32) -> Option<Op>,
    ) -> ParsedRequest {
        ranges.clear();
        let refused = |why| ParsedRequest::Refused(BlkStatus::IOERR, why);
        let count = self.data_out / RANGE_BYTES as u64;
        let whole = self.data_out.is_multiple_of(RANGE_BYTES as u64);
        if device.is_read_only() {
            return refused(READ_ONLY);
        }
        if !whole || count == 0 || count > u64::from(MAX_RANGES) || self.data_in != 0 {
            return refused("a list of ranges of a wrong length");
        }
        let mut found: Option<Op> = None;
        for index in 0..count {
            let mut bytes = [0; RANGE_BYTES];
            if !pool.copy_out(&self.buffer, index * RANGE_BYTES as u64, &mut bytes) {
                return refused(UNMAPPED);
            }
            let [s0, s1, s2, s3, s4, s5, s6, s7, n0, n1, n2, n3, f0, f1, f2, f3] = bytes;
            let Some(this) = op(u32::from_le_bytes([f0, f1, f2, f3])) else {
                return ParsedRequest::Refused(BlkStatus::UNSUPP, "a flag of a range that does not exist");
            };
            // If ranges that may be unmapped are mixed with ranges that may not, none is unmapped.
            found = Some(match (found, this) {
                (Some(Op::WriteZeroes { may_unmap: a, fua }), Op::WriteZeroes { may_unmap: b, .. }) => {
                    Op::WriteZeroes { may_unmap: a && b, fua }
                }
                _ => this,
            });
            let start = Sector512(u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7])).to_offset();
            let len = Sector512(u32::from_le_bytes([n0, n1, n2, n3]).into()).to_len();
            let block = device.block();
            match (start, len) {
                (Some(start), Some(len)) if len <= max_len && start.is_aligned(block) && len.is_aligned(block) => {
                    if !mqblk_core::units::in_range(start, len, device.size()) {
                        return refused(BEYOND_END);
                    }
                    if len > ByteLen::ZERO {
                        ranges.push((start, len));
                    }
                }
                _ => return refused("a range that is too long, or of parts of blocks"),
            }
        }
        match found {
            Some(op) if !ranges.is_empty() => ParsedRequest::Ranges { op, count: ranges.len() },
            _ => ParsedRequest::Nothing,
        }
    }
}
