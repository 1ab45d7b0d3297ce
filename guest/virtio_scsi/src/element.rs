//! From a chain of descriptors to a command. Source: virtio 1.3 section 5.6.6.1, `struct virtio_scsi_req_cmd`; its parts may share
//! descriptors or be spread over many (section 2.7.4).

use mqblk_memory::{Buffer, BufferPool, GuestAddress, LeaseId};
use mqblk_ring::split::{Broken, DeviceRing};
use mqblk_virtio::chain::{ChainError, ChainStart, Piece, walk};

use crate::config::{COMMAND_BYTES, Sizes};

/// Most pieces of one command's data: what one vectored transfer of the host takes (UIO_MAXIOV).
const MAX_PIECES: u16 = 1024;

/// Bytes of a command whose CDB has the size that a driver finds after a reset.
const PLAIN_HEADER: usize = COMMAND_BYTES + Sizes::DEFAULT.cdb as usize;

/// Where the answer goes: the first writable bytes of the chain.
#[derive(Debug)]
pub struct Answer {
    /// How many bytes it may have.
    pub room: u32,
    /// All in one piece, as drivers lay it out.
    address: GuestAddress,
    /// In several.
    pieces: Option<Buffer>,
}

impl Answer {
    /// Writes it, cut to its room, and ends it. What is not mapped any more is the driver's loss.
    #[inline]
    pub fn write(self, pool: &mut BufferPool, lease: LeaseId, bytes: &[u8]) {
        let bytes = &bytes[..bytes.len().min(self.room as usize)];
        match self.pieces {
            None => _ = pool.write_bytes(lease, self.address, bytes),
            Some(pieces) => {
                let _ = pool.copy_in(&pieces, 0, bytes);
                pool.release(pieces);
            }
        }
    }

    /// Ends it unwritten.
    pub fn release(self, pool: &mut BufferPool) {
        if let Some(pieces) = self.pieces {
            pool.release(pieces);
        }
    }
}

/// A chain, read but not yet judged.
#[derive(Debug)]
pub struct Element {
    /// Bytes of the header that were found.
    pub header_len: usize,
    /// Data pieces, of the direction that came first.
    pub data: Buffer,
    /// Bytes of data for the device to read.
    pub data_out: u64,
    /// Bytes of data for the device to write.
    pub data_in: u64,
    /// Where the answer goes.
    pub answer: Answer,
    /// An address is not mapped, there are too many pieces, or data both ways (INOUT is not offered).
    pub fault: bool,
}

impl Element {
    /// Nothing read yet.
    #[inline]
    pub fn new(data: Buffer) -> Element {
        let answer = Answer { room: 0, address: GuestAddress(0), pieces: None };
        Element { header_len: 0, data, data_out: 0, data_in: 0, answer, fault: false }
    }

    /// Gives back all that it holds.
    pub fn release(self, pool: &mut BufferPool) {
        pool.release(self.data);
        self.answer.release(pool);
    }

    /// Walks the chain once and sorts its bytes: `header` is filled first, the first `answer` writable bytes are for the answer.
    ///
    /// # Errors
    /// When the ring is broken; the element is to be released.
    #[inline]
    pub fn read(
        &mut self,
        ring: &DeviceRing,
        pool: &mut BufferPool,
        lease: LeaseId,
        start: &ChainStart,
        header: &mut [u8],
        answer: u32,
    ) -> Result<(), Broken> {
        let walked = walk(ring, pool, lease, start, |pool, piece| {
            if piece.writable {
                self.take_writable(pool, lease, piece, answer);
            } else {
                self.take_readable(pool, lease, piece, header);
            }
            Ok(())
        });
        match walked {
            Ok(()) => Ok(()),
            Err(ChainError::Request) => {
                self.fault = true;
                Ok(())
            }
            Err(ChainError::Ring(broken)) => Err(broken),
        }
    }

    #[inline]
    fn take_readable(&mut self, pool: &mut BufferPool, lease: LeaseId, piece: Piece, header: &mut [u8]) {
        let missing = &mut header[self.header_len..];
        let used = missing.len().min(piece.len as usize);
        if used == PLAIN_HEADER && missing.len() == PLAIN_HEADER {
            // As Linux lays it out: a copy of known length.
            self.header_len = used;
            match pool.read::<[u8; PLAIN_HEADER]>(lease, piece.address) {
                Some(header) => missing.copy_from_slice(&header),
                None => self.fault = true,
            }
        } else if used > 0 {
            self.header_len += used;
            self.fault |= !pool.read_bytes(lease, piece.address, &mut missing[..used]);
        }
        let rest = piece.len - used as u32;
        if rest > 0 {
            self.data_out += u64::from(rest);
            self.push(pool, piece.address, used as u64, rest);
        }
    }

    #[inline]
    fn take_writable(&mut self, pool: &mut BufferPool, lease: LeaseId, piece: Piece, answer: u32) {
        let used = (answer - self.answer.room).min(piece.len);
        if used > 0 {
            if self.answer.room == 0 {
                self.answer.address = piece.address;
            } else {
                self.spread_answer(pool, lease, piece.address, used);
            }
            self.answer.room += used;
        }
        let rest = piece.len - used;
        if rest > 0 {
            self.data_in += u64::from(rest);
            // The answer can still be given, so data both ways is the command's fault, not the chain's.
            if self.data_out > 0 {
                self.fault = true;
            } else {
                pool.set_writable(&self.data);
                self.push(pool, piece.address, used.into(), rest);
            }
        }
    }

    /// A further piece of the answer.
    #[cold]
    fn spread_answer(&mut self, pool: &mut BufferPool, lease: LeaseId, address: GuestAddress, len: u32) {
        if self.answer.pieces.is_none() {
            let pieces = pool.take(lease);
            pool.set_writable(&pieces);
            self.fault |= pool.push(&pieces, self.answer.address, self.answer.room, MAX_PIECES).is_err();
            self.answer.pieces = Some(pieces);
        }
        if let Some(pieces) = &self.answer.pieces {
            self.fault |= pool.push(pieces, address, len, MAX_PIECES).is_err();
        }
    }

    #[inline]
    fn push(&mut self, pool: &mut BufferPool, address: GuestAddress, skip: u64, len: u32) {
        let at = address.0.checked_add(skip).map(GuestAddress);
        self.fault |= at.is_none_or(|at| pool.push(&self.data, at, len, MAX_PIECES).is_err());
    }
}
