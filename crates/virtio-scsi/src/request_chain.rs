//! Parser from a descriptor chain to a command. Source: virtio 1.3 section 5.6.6.1, `struct virtio_scsi_req_cmd`; its
//! parts may share descriptors or be spread over many (section 2.7.4).

use mqblk_memory::{Buffer, BufferFault, BufferPool, GuestAddress, LeaseAccess, LeaseId};
use mqblk_ring::virtqueue::{
    ChainError, ChainHead, ChainHeader, ChainSegment, DeviceRing, UsualChains, VirtqueueError,
};

use crate::config::{DriverSizes, REQUEST_BYTES, RESPONSE_BYTES};

/// Maximum number of data segments of one command: the host's limit of one vectored transfer (UIO_MAXIOV).
const MAX_SEGMENTS: u16 = 1024;

const UNMAPPED: &str = BufferFault::Unmapped.why();
/// INOUT is not offered.
pub(crate) const BOTH_WAYS: &str = "data in both directions";

/// Length of the request header with the CDB size that a driver finds after a reset.
const DEFAULT_HEADER_BYTES: usize = REQUEST_BYTES + DriverSizes::DEFAULT.cdb as usize;

/// Response buffer: the first writable bytes of the chain.
#[derive(Debug)]
pub(crate) struct ResponseBuffer {
    /// Capacity in bytes.
    pub capacity: u32,
    place: ResponsePlace,
}

#[derive(Debug)]
enum ResponsePlace {
    /// It is contiguous, as drivers usually lay it out.
    Address(GuestAddress),
    /// It has several segments.
    Segments(Buffer),
    /// The status of the command's data buffer.
    BesideData(Buffer),
}

impl ResponseBuffer {
    /// Returns the response buffer of a command whose data buffer has a status.
    pub(crate) fn beside_data(pool: &BufferPool, data: Buffer) -> ResponseBuffer {
        ResponseBuffer { capacity: pool.status_len(&data), place: ResponsePlace::BesideData(data) }
    }

    /// Writes the response, cut to its capacity, and releases the buffer. Bytes that are no longer mapped are dropped.
    pub(crate) fn write(self, pool: &mut BufferPool, lease: LeaseId, bytes: &[u8]) {
        let bytes = &bytes[..bytes.len().min(self.capacity as usize)];
        match self.place {
            ResponsePlace::Address(address) => _ = pool.write_bytes(lease, address, bytes),
            ResponsePlace::Segments(segments) => {
                let _ = pool.copy_in(&segments, 0, bytes);
                pool.release(segments);
            }
            ResponsePlace::BesideData(data) => {
                pool.write_status_bytes(&data, bytes);
                pool.release(data);
            }
        }
    }

    /// As [`write`](Self::write), for the fixed part of a response.
    #[inline]
    pub(crate) fn write_fixed(self, pool: &mut BufferPool, lease: LeaseId, words: [u32; RESPONSE_BYTES / 4]) {
        let is_written = match self.place {
            ResponsePlace::Address(address) if self.capacity as usize >= RESPONSE_BYTES => {
                pool.write(lease, address, words)
            }
            _ => false,
        };
        if !is_written {
            self.write(pool, lease, words.map(u32::to_ne_bytes).as_flattened());
        }
    }

    /// Releases the buffer without writing.
    pub(crate) fn release(self, pool: &mut BufferPool) {
        match self.place {
            ResponsePlace::Address(_) => {}
            ResponsePlace::Segments(buffer) | ResponsePlace::BesideData(buffer) => pool.release(buffer),
        }
    }
}

/// Address of a header. It is read last: its four numbers would need registers while the other segments are read.
struct HeaderAddress(GuestAddress);

impl ChainHeader for HeaderAddress {
    const LEN: u32 = DEFAULT_HEADER_BYTES as u32;

    #[inline(always)] // else it would travel through memory
    fn read(_: &mut LeaseAccess<'_>, address: GuestAddress) -> Option<HeaderAddress> {
        Some(HeaderAddress(address))
    }
}

/// A chain of header, response and one data segment, the form of most commands, with the fields of its header for a
/// READ or WRITE.
pub(crate) struct TransferChain {
    /// The `lun` field, as a little-endian number.
    pub lun: u64,
    pub id: u64,
    /// The first 16 bytes of the CDB, as little-endian numbers.
    pub cdb: [u64; 2],
    pub data: ChainSegment,
    pub response: ChainSegment,
}

impl TransferChain {
    /// Reads a chain. `None` for any other or invalid chain: [`RequestChain`] then reads it again.
    #[inline(always)] // else it would travel through memory
    pub(crate) fn read(
        ring: &impl UsualChains,
        access: &mut LeaseAccess<'_>,
        head: &ChainHead,
        response_len: u8,
    ) -> Option<TransferChain> {
        let (HeaderAddress(header), [second, third]) = ring.three_segments(access, head)?;
        // Data that the device writes comes after the response, data that it reads before.
        let (response, data) = if second.writable {
            // A shorter response continues in the third segment.
            if second.len != u32::from(response_len) {
                return None;
            }
            (second, third)
        } else {
            if !(RESPONSE_BYTES as u32..=u32::from(response_len)).contains(&third.len) {
                return None;
            }
            (third, second)
        };
        // Task attribute, priority and crn are between them.
        let cdb = GuestAddress(header.0.checked_add(REQUEST_BYTES as u64)?);
        let [lun, id] = access.read::<[u64; 2]>(header)?.map(u64::from_le);
        let cdb = access.read::<[u64; 2]>(cdb)?.map(u64::from_le);
        Some(TransferChain { lun, id, cdb, data, response })
    }
}

/// A request chain, parsed but not validated.
#[derive(Debug)]
pub(crate) struct RequestChain {
    /// Number of header bytes found.
    pub header_len: usize,
    /// Data segments, of the direction that came first.
    pub data: Buffer,
    /// Length of the device-readable data.
    pub data_out: u64,
    /// Length of the device-writable data.
    pub data_in: u64,
    /// Response buffer.
    pub response: ResponseBuffer,
    /// The reason why it is malformed.
    pub fault: Option<&'static str>,
}

impl RequestChain {
    /// Returns an empty request with this data buffer.
    #[inline]
    pub(crate) fn new(data: Buffer) -> RequestChain {
        let response = ResponseBuffer { capacity: 0, place: ResponsePlace::Address(GuestAddress(0)) };
        RequestChain { header_len: 0, data, data_out: 0, data_in: 0, response, fault: None }
    }

    /// Releases its buffers.
    pub(crate) fn release(self, pool: &mut BufferPool) {
        pool.release(self.data);
        self.response.release(pool);
    }

    /// Walks the chain once: fills `header` first; the first `response_len` writable bytes are the response buffer.
    ///
    /// # Errors
    /// If the ring is broken; the caller must release the request.
    #[inline]
    pub(crate) fn read(
        &mut self,
        ring: &DeviceRing,
        pool: &mut BufferPool,
        lease: LeaseId,
        start: &ChainHead,
        header: &mut [u8],
        response_len: u32,
    ) -> Result<(), VirtqueueError> {
        let walked = ring.walk(pool, lease, start, |pool, segment| {
            if segment.writable {
                self.take_writable(pool, lease, segment, response_len);
            } else {
                self.take_readable(pool, lease, segment, header);
            }
            Ok(())
        });
        match walked {
            Ok(()) => Ok(()),
            Err(ChainError::BadRequest) => {
                self.fault = Some("an indirect table that is too long, or outside of the guest's memory");
                Ok(())
            }
            Err(ChainError::BrokenRing(broken)) => Err(broken),
        }
    }

    #[inline]
    fn take_readable(&mut self, pool: &mut BufferPool, lease: LeaseId, segment: ChainSegment, header: &mut [u8]) {
        let missing = &mut header[self.header_len..];
        let used = missing.len().min(segment.len as usize);
        if used == DEFAULT_HEADER_BYTES && missing.len() == DEFAULT_HEADER_BYTES {
            // The layout of Linux: a copy of known length.
            self.header_len += used;
            match pool.read::<[u8; DEFAULT_HEADER_BYTES]>(lease, segment.address) {
                Some(header) => missing.copy_from_slice(&header),
                None => self.fault = Some(UNMAPPED),
            }
        } else if used > 0 {
            self.header_len += used;
            if !pool.read_bytes(lease, segment.address, &mut missing[..used]) {
                self.fault = Some(UNMAPPED);
            }
        }
        let rest = segment.len - used as u32;
        if rest > 0 {
            self.data_out += u64::from(rest);
            self.push(pool, segment.address, used as u64, rest);
        }
    }

    #[inline]
    fn take_writable(&mut self, pool: &mut BufferPool, lease: LeaseId, segment: ChainSegment, response_len: u32) {
        let used = (response_len - self.response.capacity).min(segment.len);
        if used > 0 {
            if self.response.capacity == 0 {
                self.response.place = ResponsePlace::Address(segment.address);
            } else {
                self.add_response_segment(pool, lease, segment.address, used);
            }
            self.response.capacity += used;
        }
        let rest = segment.len - used;
        if rest > 0 {
            self.data_in += u64::from(rest);
            // A response is still possible, so data in both directions is an error of the command, not of the chain.
            if self.data_out > 0 {
                self.fault = Some(BOTH_WAYS);
            } else {
                pool.set_writable(&self.data);
                self.push(pool, segment.address, used.into(), rest);
            }
        }
    }

    /// Adds a further segment of the response buffer.
    fn add_response_segment(&mut self, pool: &mut BufferPool, lease: LeaseId, address: GuestAddress, len: u32) {
        if let ResponsePlace::Address(first) = self.response.place {
            let segments = pool.take(lease);
            pool.set_writable(&segments);
            self.fault = self.fault.or(push(pool, &segments, first, self.response.capacity));
            self.response.place = ResponsePlace::Segments(segments);
        }
        if let ResponsePlace::Segments(segments) = &self.response.place {
            self.fault = self.fault.or(push(pool, segments, address, len));
        }
    }

    #[inline]
    fn push(&mut self, pool: &mut BufferPool, address: GuestAddress, skip: u64, len: u32) {
        let fault = match address.0.checked_add(skip) {
            Some(at) => push(pool, &self.data, GuestAddress(at), len),
            None => Some(UNMAPPED),
        };
        self.fault = self.fault.or(fault);
    }
}

/// Adds a piece of guest memory to `buffer`. Returns what is wrong with it.
#[inline]
fn push(pool: &mut BufferPool, buffer: &Buffer, address: GuestAddress, len: u32) -> Option<&'static str> {
    pool.push(buffer, address, len, MAX_SEGMENTS).err().map(BufferFault::why)
}
