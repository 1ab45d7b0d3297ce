//! A request while it is composed.

use mqblk_memory::GuestAddress;

use super::{Head, Shape, SplitDriver};
use crate::split::layout::{DESC_BYTES, DESC_INDIRECT, DESC_NEXT, DESC_WRITE, Descriptor};

/// Why a piece or a request was not taken. The ring is as it was before [`begin`](SplitDriver::begin).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Back-pressure: too few free descriptors until answers are taken.
    #[error("the ring is full")]
    Full,
    /// More pieces than an indirect table holds, or no indirect tables.
    #[error("the request has more pieces than its descriptor table holds ({0})")]
    TooManyPieces(u16),
    /// Readable pieces come before writable ones (virtio 1.3 section 2.7.4.2).
    #[error("a readable piece after a writable one")]
    Order,
    /// A request needs a piece, and a piece a byte.
    #[error("the request has no pieces, or an empty one")]
    Empty,
}

/// A request that is being composed. Dropping it before [`commit`](Self::commit) takes it back.
#[derive(Debug)]
#[must_use = "a request that is not committed is taken back"]
pub struct Chain<'a> {
    driver: &'a mut SplitDriver,
    shape: Shape,
    /// Free descriptors taken so far (direct) or table entries (indirect).
    pieces: u16,
    /// Where the piece that is not yet written goes: a ring descriptor or a table entry.
    at: u16,
    /// The last piece. It is written when the next one comes or at the commit: only then is its `next` flag known.
    pending: Descriptor,
}

impl<'a> Chain<'a> {
    #[inline]
    pub(super) fn new(driver: &'a mut SplitDriver, shape: Shape) -> Chain<'a> {
        Chain { driver, shape, pieces: 0, at: 0, pending: Descriptor::default() }
    }

    /// Adds `len` bytes at `address` for the device to read.
    ///
    /// # Errors
    /// [`Refused::Full`] is back-pressure; the others are the caller's mistakes.
    #[inline(always)] // else the chain would be moved through memory with every piece, which was measured at 12 ns a request
    pub fn readable(self, address: GuestAddress, len: u32) -> Result<Chain<'a>, Refused> {
        if self.pending.flags & DESC_WRITE != 0 {
            return Err(Refused::Order);
        }
        self.piece(Descriptor { address: address.0, len, flags: 0, next: 0 })
    }

    /// Adds `len` bytes at `address` for the device to write.
    ///
    /// # Errors
    /// [`Refused::Full`] is back-pressure; the others are the caller's mistakes.
    #[inline(always)]
    pub fn writable(self, address: GuestAddress, len: u32) -> Result<Chain<'a>, Refused> {
        self.piece(Descriptor { address: address.0, len, flags: DESC_WRITE, next: 0 })
    }

    #[inline(always)]
    fn piece(mut self, piece: Descriptor) -> Result<Chain<'a>, Refused> {
        if piece.len == 0 {
            return Err(Refused::Empty);
        }
        let next = match self.shape {
            Shape::Direct if self.pieces == self.driver.free => return Err(Refused::Full),
            Shape::Direct if self.pieces == 0 => self.driver.free_head,
            Shape::Direct => self.driver.next[usize::from(self.at)],
            Shape::Indirect if self.driver.free == 0 => return Err(Refused::Full),
            Shape::Indirect => {
                let most = self.driver.indirect_pieces();
                if self.pieces == most {
                    return Err(Refused::TooManyPieces(most));
                }
                self.pieces
            }
        };
        if self.pieces != 0 {
            self.pending.flags |= DESC_NEXT;
            self.pending.next = next;
            self.write_pending();
        }
        self.at = next;
        self.pending = piece;
        self.pieces += 1;
        Ok(self)
    }

    /// Completes the request. It is seen by the device at the next [`publish`](SplitDriver::publish); `token` comes back in
    /// its [`Used`](super::Used).
    ///
    /// # Errors
    /// [`Refused::Empty`] without a piece.
    #[inline(always)]
    pub fn commit(mut self, token: u32) -> Result<(), Refused> {
        if self.pieces == 0 {
            return Err(Refused::Empty);
        }
        self.write_pending();
        let driver = self.driver;
        let head = driver.free_head;
        let (last, descriptors) = match self.shape {
            Shape::Direct => (self.at, self.pieces),
            Shape::Indirect => {
                let table = driver.table_address(head);
                let len = u32::from(self.pieces) * DESC_BYTES as u32;
                driver.write(head, Descriptor { address: table.0, len, flags: DESC_INDIRECT, next: 0 });
                (head, 1)
            }
        };
        driver.free_head = driver.next[usize::from(last)];
        driver.free -= descriptors;
        driver.heads[usize::from(head)] = Head { token, descriptors, last };
        driver.in_flight += 1;
        driver.offer(head);
        Ok(())
    }

    #[inline(always)]
    fn write_pending(&mut self) {
        match self.shape {
            Shape::Direct => self.driver.write(self.at, self.pending),
            Shape::Indirect => {
                let head = self.driver.free_head;
                self.driver.write_table(head, self.at, self.pending);
            }
        }
    }
}

impl SplitDriver {
    /// Writes a ring descriptor, unless it holds just that.
    #[inline]
    fn write(&mut self, index: u16, descriptor: Descriptor) {
        let (index, words) = (usize::from(index), descriptor.to_words());
        if self.written[index] != words {
            self.written[index] = words;
            self.ring.desc.set(index, words);
        }
    }

    /// Writes entry `at` of the indirect table that belongs to ring descriptor `head`, unless it holds just that.
    #[inline]
    fn write_table(&mut self, head: u16, at: u16, descriptor: Descriptor) {
        let Some(tables) = &mut self.tables else { return };
        let (index, words) =
            (usize::from(head) * usize::from(tables.area.per_table) + usize::from(at), descriptor.to_words());
        if tables.written[index] != words {
            tables.written[index] = words;
            tables.slots.set(index, words);
        }
    }

    /// Where the indirect table of ring descriptor `head` is.
    #[inline]
    fn table_address(&self, head: u16) -> GuestAddress {
        let Some(tables) = &self.tables else { return GuestAddress(0) };
        GuestAddress(tables.area.start.0 + u64::from(head) * u64::from(tables.area.per_table) * DESC_BYTES)
    }

    /// Puts a head in the available ring, unless its slot holds just that.
    #[inline]
    fn offer(&mut self, head: u16) {
        let slot = usize::from(self.avail) & (self.offered.len() - 1);
        if self.offered[slot] != head {
            self.offered[slot] = head;
            self.ring.avail_ring.set(slot, head.to_le());
        }
        self.avail = self.avail.wrapping_add(1);
    }
}
