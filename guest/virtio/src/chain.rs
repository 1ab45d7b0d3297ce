//! A chain of descriptors as a sequence of pieces, whichever way it is laid out.
//!
//! The device must accept any layout: header, data and status may share descriptors or be spread over many (virtio 1.3
//! section 2.7.4.2). So a personality never sees descriptors, only pieces in order.

use mqblk_memory::{BufferPool, GuestAddress, LeaseId};
use mqblk_ring::split::layout::{DESC_BYTES, DESC_INDIRECT, DESC_NEXT, DESC_WRITE};
use mqblk_ring::split::{Broken, Descriptor, DeviceRing};

/// Most entries of an indirect table that are accepted. Linux' drivers use at most the ring's size, or seg_max + 2.
pub const MAX_INDIRECT: u16 = 1024;

/// One stretch of guest memory of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Where.
    pub address: GuestAddress,
    /// Bytes; not 0.
    pub len: u32,
    /// For the device to write (else to read).
    pub writable: bool,
}

/// Why a chain cannot be walked to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainError {
    /// The ring's structure is broken: the queue ends.
    Ring(Broken),
    /// Only this request is bad: it is given back unanswered.
    Request,
}

impl From<Broken> for ChainError {
    fn from(broken: Broken) -> Self {
        ChainError::Ring(broken)
    }
}

/// The first descriptors of a chain, fetched ahead so that the lines they name are on their way.
#[derive(Clone, Copy, Debug, Default)]
pub struct ChainStart {
    /// The chain's head.
    pub head: u16,
    /// The head's descriptor.
    pub first: Descriptor,
    /// With an indirect table: its first entry, if that was read.
    pub entry: Option<Descriptor>,
}

impl ChainStart {
    /// Reads the head's descriptor and starts fetching what it names.
    #[inline]
    pub fn fetch(ring: &DeviceRing, pool: &mut BufferPool, lease: LeaseId, head: u16) -> ChainStart {
        let first = ring.descriptor(head);
        pool.prefetch(lease, GuestAddress(first.address));
        ChainStart { head, first, entry: None }
    }

    /// Reads the first entry of an indirect table and starts fetching what it names.
    #[inline]
    pub fn fetch_indirect(&mut self, pool: &mut BufferPool, lease: LeaseId) {
        if self.first.flags & DESC_INDIRECT != 0 {
            self.entry = pool.read(lease, GuestAddress(self.first.address)).map(Descriptor::from_words);
            if let Some(entry) = self.entry {
                pool.prefetch(lease, GuestAddress(entry.address));
            }
        }
    }
}

/// A table of descriptors outside the ring's.
struct Table {
    address: u64,
    entries: u16,
}

impl Table {
    /// The table that `desc` names.
    fn of(desc: &Descriptor) -> Result<Table, ChainError> {
        let entries = DeviceRing::indirect_entries(desc)?;
        if entries > MAX_INDIRECT {
            return Err(ChainError::Request);
        }
        Ok(Table { address: desc.address, entries })
    }

    /// One read of an entry.
    #[inline]
    fn read(&self, pool: &mut BufferPool, lease: LeaseId, index: u16) -> Result<Descriptor, ChainError> {
        let at = self.address.checked_add(u64::from(index) * DESC_BYTES).ok_or(ChainError::Request)?;
        let words = pool.read(lease, GuestAddress(at)).ok_or(ChainError::Request)?;
        Ok(Descriptor::from_words(words))
    }

    /// The entry that follows `desc`, after `seen` entries.
    #[inline]
    fn follow(
        &self,
        pool: &mut BufferPool,
        lease: LeaseId,
        desc: &Descriptor,
        seen: u16,
    ) -> Result<Descriptor, ChainError> {
        if seen >= self.entries {
            return Err(LOOP.into());
        }
        if desc.next >= self.entries {
            return Err(NEXT.into());
        }
        self.read(pool, lease, desc.next)
    }
}

const ORDER: Broken = Broken("a readable descriptor follows a writable one");
const NESTED: Broken = Broken("an indirect table names another one");
const NEXT: Broken = Broken("an indirect descriptor's next field is outside its table");
const LOOP: Broken = Broken("an indirect table loops");

/// Calls `each` with every piece of the chain, readable pieces first. Descriptors of length 0 are left out.
///
/// # Errors
/// [`ChainError::Ring`] for a chain that leaves its table, loops, nests indirect tables or has a writable descriptor before
/// a readable one; [`ChainError::Request`] for a table that is not mapped, or when `each` says so.
#[inline]
pub fn walk(
    ring: &DeviceRing,
    pool: &mut BufferPool,
    lease: LeaseId,
    start: &ChainStart,
    mut each: impl FnMut(&mut BufferPool, Piece) -> Result<(), ChainError>,
) -> Result<(), ChainError> {
    let mut desc = start.first;
    let mut table: Option<Table> = None;
    // Descriptors of this table so far: bounds the walk.
    let mut seen = 0;
    let mut writing = false;
    loop {
        if DeviceRing::is_indirect(&desc) {
            if table.is_some() {
                return Err(NESTED.into());
            }
            let inside = Table::of(&desc)?;
            desc = match start.entry {
                Some(entry) if seen == 0 => entry,
                _ => inside.read(pool, lease, 0)?,
            };
            (table, seen) = (Some(inside), 0);
            continue;
        }
        let writable = desc.flags & DESC_WRITE != 0;
        if writing && !writable {
            return Err(ORDER.into());
        }
        writing = writable;
        if desc.len != 0 {
            each(pool, Piece { address: GuestAddress(desc.address), len: desc.len, writable })?;
        }
        if desc.flags & DESC_NEXT == 0 {
            return Ok(());
        }
        seen += 1;
        desc = match &table {
            None => ring.follow(&desc, seen)?,
            Some(table) => table.follow(pool, lease, &desc, seen)?,
        };
    }
}
