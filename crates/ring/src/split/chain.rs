//! Chains of a split virtqueue: taken in batches, and read as segments, for each layout.

use mqblk_memory::{BufferPool, GuestAddress, LeaseAccess, LeaseId};

use super::device::SplitDevice;
use super::layout::{DESC_BYTES, DESC_INDIRECT, DESC_NEXT, DESC_WRITE};
use crate::format::{
    ChainError, ChainHead, ChainHeader, ChainSegment, Descriptor, MAX_INDIRECT_ENTRIES, MEMORY_LOST, NESTED_INDIRECT,
    READABLE_AFTER_WRITABLE, UsualChains, VirtqueueError,
};

impl ChainHead {
    /// Reads the head descriptor and prefetches the memory that it refers to.
    #[inline]
    fn read(ring: &SplitDevice, access: &mut LeaseAccess<'_>, index: u16) -> ChainHead {
        let first = ring.descriptor(index);
        access.prefetch(GuestAddress(first.address));
        ChainHead { index, first, first_indirect: None }
    }

    /// Reads the first entry of an indirect table and prefetches the memory that it refers to.
    #[inline]
    fn read_indirect(&mut self, pool: &mut BufferPool, lease: LeaseId) {
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
    /// Returns the table of `desc`.
    fn of(desc: &Descriptor) -> Result<IndirectTable, ChainError> {
        let entries = SplitDevice::indirect_entries(desc)?;
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

const BAD_INDIRECT_NEXT: VirtqueueError = VirtqueueError("an indirect descriptor's next field is outside its table");
const INDIRECT_LOOP: VirtqueueError = VirtqueueError("an indirect table loops");

impl UsualChains for SplitDevice {
    #[inline(always)] // else the segments would travel through memory
    fn three_segments<H: ChainHeader>(
        &self,
        access: &mut LeaseAccess<'_>,
        head: &ChainHead,
    ) -> Option<(H, [ChainSegment; 2])> {
        // The header is read as soon as its address is known: a lookup of its region then keeps few values alive.
        let (first, header, second, third) = if head.first.flags & DESC_INDIRECT == 0 {
            if head.first.len != H::LEN {
                return None;
            }
            let header = H::read(access, GuestAddress(head.first.address))?;
            let second = self.descriptor_within(head.first.next)?;
            (head.first.flags, header, second, self.descriptor_within(second.next)?)
        } else {
            let table = &head.first;
            if table.flags != DESC_INDIRECT || u64::from(table.len) != 3 * DESC_BYTES {
                return None;
            }
            let rest = GuestAddress(table.address.checked_add(DESC_BYTES)?);
            let first = match head.first_indirect {
                Some(first) => first,
                None => Descriptor::from_words(access.read(GuestAddress(table.address))?),
            };
            let [a, b, c, d] = access.read::<[u64; 4]>(rest)?;
            let [second, third] = [[a, b], [c, d]].map(Descriptor::from_words);
            if first.len != H::LEN || first.next != 1 || second.next != 2 {
                return None;
            }
            (first.flags, H::read(access, GuestAddress(first.address))?, second, third)
        };
        // Both in one comparison, as the high and the low half of a number.
        let links = u32::from(second.flags & !DESC_WRITE) << 16 | u32::from(first);
        let linked = links == u32::from(DESC_NEXT) << 16 | u32::from(DESC_NEXT) && third.flags == DESC_WRITE;
        // Values read from lost memory may be zeroes.
        (linked && !access.may_be_lost()).then(|| (header, [second, third].map(ChainSegment::from_descriptor)))
    }
}

impl SplitDevice {
    /// Takes available chains, as many as `heads` has room for and `max` allows: heads first, then their descriptors,
    /// then the first entries of indirect tables. Chains to replay come before all others. Returns their number, and
    /// true if more are available.
    ///
    /// # Errors
    /// When the ring violates the protocol.
    #[inline(always)] // a device type has one or two places that call it, and a batch may be one chain
    pub fn fetch<const N: usize>(
        &mut self,
        pool: &mut BufferPool,
        lease: LeaseId,
        heads: &mut [ChainHead; N],
        max: usize,
    ) -> Result<(usize, bool), VirtqueueError> {
        let waiting = self.waiting();
        if pool.is_lease_lost(lease) {
            return Err(MEMORY_LOST);
        }
        let waiting = usize::from(waiting?);
        if self.replays() > 0 {
            return Ok(self.fetch_replays(pool, lease, &mut heads[..max.min(N)], waiting));
        }
        let count = waiting.min(N).min(max);
        let heads = &mut heads[..count];
        for (ahead, head) in (0..).zip(&mut *heads) {
            head.index = self.peek(ahead);
        }
        let mut access = pool.access(lease);
        let mut flags = 0;
        for head in &mut *heads {
            self.take(head.index)?;
            *head = ChainHead::read(self, &mut access, head.index);
            flags |= head.first.flags;
        }
        if flags & DESC_INDIRECT != 0 {
            heads.iter_mut().for_each(|head| head.read_indirect(pool, lease));
        }
        Ok((count, waiting > count))
    }

    /// Takes chains to replay, which an earlier process did not complete.
    #[cold]
    fn fetch_replays(
        &mut self,
        pool: &mut BufferPool,
        lease: LeaseId,
        heads: &mut [ChainHead],
        waiting: usize,
    ) -> (usize, bool) {
        let mut count = 0;
        while count < heads.len()
            && let Some(head) = self.take_replay()
        {
            heads[count] = ChainHead::read(self, &mut pool.access(lease), head);
            heads[count].read_indirect(pool, lease);
            count += 1;
        }
        (count, self.replays() > 0 || waiting > 0)
    }

    /// Calls `each` with every segment of the chain, readable segments first. Descriptors of length 0 are skipped.
    ///
    /// # Errors
    /// [`ChainError::BrokenRing`] for a chain that leaves its table, loops, nests indirect tables or has a writable
    /// descriptor before a readable one, or when guest memory was lost; [`ChainError::BadRequest`] for a table that
    /// is not mapped, or when `each` returns it.
    #[inline]
    pub fn walk(
        &self,
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
            if SplitDevice::is_indirect(&desc) {
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
                // Descriptors and data that `each` has read may be zeroes from lost memory.
                return if pool.is_lease_lost(lease) { Err(MEMORY_LOST.into()) } else { Ok(()) };
            }
            seen += 1;
            desc = match &table {
                None => self.next_descriptor(&desc, seen)?,
                Some(table) => table.next_entry(pool, lease, &desc, seen)?,
            };
        }
    }
}
