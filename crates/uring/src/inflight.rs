//! The table of operations in flight with their memory and files.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use mqblk_memory::Buffer;

use crate::completion::ClientId;

/// Capacity of a new iovec list; it grows with the longest request.
const PIECES: usize = 32;

/// One operation.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    pub(crate) owner: ClientId,
    pub(crate) cookie: u64,
    /// The memory that the kernel may touch.
    pub(crate) buffer: Option<Buffer>,
    /// Keeps the entry's descriptor open.
    pub(crate) file: Option<Arc<OwnedFd>>,
    /// The iovec list that the entry points to, if it does.
    pub(crate) pieces: Option<Box<PieceList>>,
    pub(crate) busy: bool,
}

/// The memory list of an entry with more than one piece. Boxed, so that its address is constant.
#[derive(Debug)]
pub(crate) struct PieceList {
    pub(crate) iovecs: Vec<libc::iovec>,
    /// Points to the pieces, for sockets.
    pub(crate) message: libc::msghdr,
    /// Memory of a message's header.
    pub(crate) header: Option<Buffer>,
}

impl PieceList {
    fn new() -> Box<PieceList> {
        // SAFETY: plain data for which zeroes mean: no address, no pieces, no control data, no flags.
        let message = unsafe { std::mem::zeroed() };
        Box::new(PieceList { iovecs: Vec::with_capacity(PIECES), message, header: None })
    }
}

/// Slots by index. The index is the entry's user data; only the kernel sees it, so it always comes back valid.
#[derive(Debug, Default)]
pub(crate) struct InFlight {
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Lists that are not in use. They keep their capacity, so that a warm table does not allocate.
    #[expect(clippy::vec_box, reason = "slots hold the boxes, whose addresses the kernel has")]
    spare: Vec<Box<PieceList>>,
}

impl InFlight {
    /// Returns a table of `capacity` slots.
    pub(crate) fn new(capacity: u32) -> InFlight {
        let slots = (0..capacity).map(|_| Slot::default()).collect();
        InFlight { slots, free: (0..capacity).rev().collect(), spare: Vec::with_capacity(capacity as usize) }
    }

    /// Returns the number of free slots.
    #[inline]
    pub(crate) fn room(&self) -> usize {
        self.free.len()
    }

    /// Returns the number of slots.
    #[inline]
    pub(crate) fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// Returns the number of operations in flight.
    pub(crate) fn busy(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Returns true if the kernel may still access a buffer.
    pub(crate) fn holds_buffers(&self) -> bool {
        let has_header = |slot: &Slot| slot.pieces.as_ref().is_some_and(|pieces| pieces.header.is_some());
        self.slots.iter().any(|slot| slot.busy && (slot.buffer.is_some() || has_header(slot)))
    }

    #[inline]
    pub(crate) fn take(&mut self, owner: ClientId, cookie: u64) -> Option<u32> {
        let index = self.free.pop()?;
        let slot = &mut self.slots[index as usize];
        (slot.owner, slot.cookie, slot.busy) = (owner, cookie, true);
        Some(index)
    }

    #[inline]
    pub(crate) fn slot(&mut self, index: u32) -> &mut Slot {
        &mut self.slots[index as usize]
    }

    /// Frees a slot. Returns the buffer of a message's header.
    #[inline]
    pub(crate) fn release(&mut self, index: u32) -> Option<Buffer> {
        let slot = &mut self.slots[index as usize];
        slot.busy = false;
        slot.file = None;
        let mut header = None;
        if let Some(mut pieces) = slot.pieces.take() {
            header = pieces.header.take();
            self.spare.push(pieces);
        }
        self.free.push(index);
        header
    }

    /// Returns an operation's iovec list, to be filled.
    #[inline]
    pub(crate) fn pieces(&mut self, index: u32) -> &mut PieceList {
        let spare = &mut self.spare;
        self.slots[index as usize].pieces.get_or_insert_with(|| spare.pop().unwrap_or_else(PieceList::new))
    }

    /// Returns the indices of a client's operations whose cookie is picked.
    pub(crate) fn pick(&self, owner: ClientId, pick: impl Fn(u64) -> bool) -> Vec<u32> {
        let picked = |slot: &Slot| slot.busy && slot.owner == owner && pick(slot.cookie);
        (0..).zip(&self.slots).filter(|(_, slot)| picked(slot)).map(|(index, _)| index).collect()
    }

    /// Returns the index of a client's operation with `cookie`.
    pub(crate) fn find(&self, owner: ClientId, cookie: u64) -> Option<u32> {
        let found = self.slots.iter().position(|slot| slot.busy && slot.owner == owner && slot.cookie == cookie);
        found.map(|index| index as u32)
    }
}
