//! A chain of descriptors as a sequence of segments, whatever its layout.
//!
//! The device must accept any layout: header, data and status may share descriptors or be spread over many (virtio 1.3 section 2.7.4.2). So
//! a device type never sees descriptors, only segments in order.

use mqblk_memory::{BufferPool, GuestAddress, LeaseId};
use mqblk_ring::split::layout::{DESC_BYTES, DESC_INDIRECT, DESC_NEXT, DESC_WRITE};
use mqblk_ring::split::{Descriptor, DeviceRing, VirtqueueError};

/// Most entries of an indirect table that are accepted. Linux's drivers use at most the ring's size, or seg_max + 2.
pub const MAX_INDIRECT_ENTRIES: u16 = 1024;

/// A segment of a chain: a range of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChainSegment {
    /// Guest address.
    pub address: GuestAddress,
    /// Length in bytes; not 0.
    pub len: u32,
    /// Device-writable (else device-readable).
    pub writable: bool,
}

/// Error of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainError {
    /// The ring violates the protocol: the queue stops.
    BrokenRing(VirtqueueError),
    /// Only this request is invalid: the chain is returned to the driver with no bytes written.
    BadRequest,
}

impl From<VirtqueueError> for ChainError {
    fn from(broken: VirtqueueError) -> Self {
        ChainError::BrokenRing(broken)
    }
}

/// The first descriptors of a chain, fetched ahead so that the lines they refer to are prefetched.
#[derive(Clone, Copy, Debug, Default)]
pub struct ChainHead {
    /// Index of the head descriptor.
    pub index: u16,
    /// The head descriptor.
    pub first: Descriptor,
    /// The first entry of its indirect table, if that was read.
    pub first_indirect: Option<Descriptor>,
}

impl ChainHead {
    /// Reads the head descriptor and prefetches the memory that it names.
    #[inline]
    pub fn fetch(ring: &DeviceRing, pool: &mut BufferPool, lease: LeaseId, index: u16) -> ChainHead {
        let first = ring.descriptor(index);
        pool.prefetch(lease, GuestAddress(first.address));
        ChainHead { index, first, first_indirect: None }
    }

    /// Reads the first entry of an indirect table and prefetches the memory that it names.
    #[inline]
    pub fn fetch_indirect(&mut self, pool: &mut BufferPool, lease: LeaseId) {
        if self.first.flags & DESC_INDIRECT != 0 {
            self.first_indirect = pool.read(lease, GuestAddress(self.first.address)).map(Descriptor::from_words);
            if let Some(entry) = self.first_indirect {
                pool.prefetch(lease, GuestAddress(entry.address));
            }
        }
    }
}

/// An indirect table.
struct IndirectTable {
    address: u64,
    entries: u16,
}

impl IndirectTable {
    /// Returns the table that `desc` names.
    fn of(desc: &Descriptor) -> Result<IndirectTable, ChainError> {
        let entries = DeviceRing::indirect_entries(desc)?;
        if entries > MAX_INDIRECT_ENTRIES {
            return Err(ChainError::BadRequest);
        }
        Ok(IndirectTable { address: desc.address, entries })
    }

    /// Reads an entry once.
    #[inline]
    fn read(&self, pool: &mut BufferPool, lease: LeaseId, index: u16) -> Result<Descriptor, ChainError> {
        let at = self.address.checked_add(u64::from(index) * DESC_BYTES).ok_or(ChainError::BadRequest)?;
        let words = pool.read(lease, GuestAddress(at)).ok_or(ChainError::BadRequest)?;
        Ok(Descriptor::from_words(words))
    }

    /// Returns the entry that follows `desc`, after `seen` entries.
    #[inline]
    fn next_entry(
        &self,
        pool: &mut BufferPool,
        lease: LeaseId,
        desc: &Descriptor,
        seen: u16,
    ) -> Result<Descriptor, ChainError> {
        if seen >= self.entries {
            return Err(INDIRECT_LOOP.into());
        }
        if desc.next >= self.entries {
            return Err(BAD_INDIRECT_NEXT.into());
        }
        self.read(pool, lease, desc.next)
    }
}

const READABLE_AFTER_WRITABLE: VirtqueueError = VirtqueueError("a readable descriptor follows a writable one");
const NESTED_INDIRECT: VirtqueueError = VirtqueueError("an indirect table names another one");
const BAD_INDIRECT_NEXT: VirtqueueError = VirtqueueError("an indirect descriptor's next field is outside its table");
const INDIRECT_LOOP: VirtqueueError = VirtqueueError("an indirect table loops");

/// Calls `each` with every segment of the chain, readable segments first. Descriptors of length 0 are skipped.
///
/// # Errors
/// [`ChainError::BrokenRing`] for a chain that leaves its table, loops, nests indirect tables or has a writable descriptor before a
/// readable one; [`ChainError::BadRequest`] for a table that is not mapped, or when `each` returns it.
#[inline]
pub fn walk_chain(
    ring: &DeviceRing,
    pool: &mut BufferPool,
    lease: LeaseId,
    head: &ChainHead,
    mut each: impl FnMut(&mut BufferPool, ChainSegment) -> Result<(), ChainError>,
) -> Result<(), ChainError> {
    let mut desc = head.first;
    let mut table: Option<IndirectTable> = None;
    // Descriptors of this table so far: bounds the walk.
    let mut seen = 0;
    let mut writing = false;
    loop {
        if DeviceRing::is_indirect(&desc) {
            if table.is_some() {
                return Err(NESTED_INDIRECT.into());
            }
            let inside = IndirectTable::of(&desc)?;
            desc = match head.first_indirect {
                Some(entry) if seen == 0 => entry,
                _ => inside.read(pool, lease, 0)?,
            };
            (table, seen) = (Some(inside), 0);
            continue;
        }
        let writable = desc.flags & DESC_WRITE != 0;
        if writing && !writable {
            return Err(READABLE_AFTER_WRITABLE.into());
        }
        writing = writable;
        if desc.len != 0 {
            each(pool, ChainSegment { address: GuestAddress(desc.address), len: desc.len, writable })?;
        }
        if desc.flags & DESC_NEXT == 0 {
            return Ok(());
        }
        seen += 1;
        desc = match &table {
            None => ring.next_descriptor(&desc, seen)?,
            Some(table) => table.next_entry(pool, lease, &desc, seen)?,
        };
    }
}
