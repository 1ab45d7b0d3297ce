//! The table of operations that the kernel works on, and what each of them owns meanwhile.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use mqblk_memory::Buffer;

use crate::ops::ClientId;

/// Room of a new list of pieces; it grows with the longest request.
const PIECES: usize = 32;

/// One operation.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    pub(crate) owner: ClientId,
    pub(crate) cookie: u64,
    /// The memory that the kernel may touch.
    pub(crate) buffer: Option<Buffer>,
    /// Keeps a descriptor open that the entry names by number.
    pub(crate) file: Option<Arc<OwnedFd>>,
    /// The memory's pieces, where the entry names a list of them.
    pub(crate) pieces: Option<Box<PieceList>>,
    pub(crate) busy: bool,
}

/// What an entry points to that has more than one piece of memory. Boxed, so that it stays in place.
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

/// Slots by index. The index travels as the entry's user data; only the kernel sees it, so it always comes back valid.
#[derive(Debug, Default)]
pub(crate) struct InFlight {
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Lists that are not in use. They keep their capacity, so that a warm table does not allocate.
    #[expect(clippy::vec_box, reason = "slots hold the boxes, whose addresses the kernel has")]
    spare: Vec<Box<PieceList>>,
}

impl InFlight {
    /// Room for `capacity` operations.
    pub(crate) fn new(capacity: u32) -> InFlight {
        let slots = (0..capacity).map(|_| Slot::default()).collect();
        InFlight { slots, free: (0..capacity).rev().collect(), spare: Vec::with_capacity(capacity as usize) }
    }

    /// Free slots.
    #[inline]
    pub(crate) fn room(&self) -> usize {
        self.free.len()
    }

    /// All slots.
    #[inline]
    pub(crate) fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// Operations in flight.
    pub(crate) fn busy(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether the kernel may still touch a buffer.
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

    /// An operation's list of pieces, to be filled.
    #[inline]
    pub(crate) fn pieces(&mut self, index: u32) -> &mut PieceList {
        let spare = &mut self.spare;
        self.slots[index as usize].pieces.get_or_insert_with(|| spare.pop().unwrap_or_else(PieceList::new))
    }

    /// Indices of the operations of `owner` whose cookie is picked.
    pub(crate) fn pick(&self, owner: ClientId, pick: impl Fn(u64) -> bool) -> Vec<u32> {
        let picked = |slot: &Slot| slot.busy && slot.owner == owner && pick(slot.cookie);
        (0..).zip(&self.slots).filter(|(_, slot)| picked(slot)).map(|(index, _)| index).collect()
    }

    /// Index of the operation of `owner` with `cookie`, for cancelling.
    pub(crate) fn find(&self, owner: ClientId, cookie: u64) -> Option<u32> {
        let found = self.slots.iter().position(|slot| slot.busy && slot.owner == owner && slot.cookie == cookie);
        found.map(|index| index as u32)
    }
}
