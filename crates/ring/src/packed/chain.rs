//! Chains of a packed virtqueue: taken in batches, and read as segments, for each layout.

use mqblk_memory::{BufferPool, GuestAddress, LeaseAccess, LeaseId};

use super::device::PackedDevice;
use super::layout::{DESC_BYTES, descriptor_from_words};
use crate::format::{
    ChainError, ChainHead, ChainHeader, ChainSegment, DESC_INDIRECT, DESC_WRITE, Descriptor, MAX_INDIRECT_ENTRIES,
    MAX_QUEUE_SIZE, MEMORY_LOST, NESTED_INDIRECT, READABLE_AFTER_WRITABLE, UsualChains, VirtqueueError,
};

const BAD_TABLE: VirtqueueError = VirtqueueError("an indirect table's length is not a multiple of 16 above 0");
const TABLE_TOO_LONG: VirtqueueError = VirtqueueError("an indirect table is too long");

impl ChainHead {
    /// Reads the first entry of an indirect table and prefetches the memory that it refers to.
    #[inline]
    fn read_table(&mut self, pool: &mut BufferPool, lease: LeaseId) {
        if self.first.flags & DESC_INDIRECT != 0 {
            self.first_indirect = pool.read(lease, GuestAddress(self.first.address)).map(descriptor_from_words);
            if let Some(entry) = self.first_indirect {
                pool.prefetch(lease, GuestAddress(entry.address));
            }
        }
    }
}

impl UsualChains for PackedDevice {
    #[inline(always)] // else the segments would travel through memory
    fn three_segments<H: ChainHeader>(
        &self,
        access: &mut LeaseAccess<'_>,
        head: &ChainHead,
    ) -> Option<(H, [ChainSegment; 2])> {
        let three = match head.first_indirect {
            Some(first) => {
                let table = &head.first;
                if table.flags & DESC_INDIRECT == 0 || u64::from(table.len) != 3 * DESC_BYTES {
                    return None;
                }
                let rest = GuestAddress(table.address.checked_add(DESC_BYTES)?);
                let [a, b, c, d] = access.read::<[u64; 4]>(rest)?;
                [first, descriptor_from_words([a, b]), descriptor_from_words([c, d])]
            }
            None => {
                let chain = self.chains.get(usize::from(head.index))?;
                if chain.count != 3 || chain.in_table {
                    return None;
                }
                let next = |at| self.ring.load((chain.slot + at) & (self.size() - 1)).0;
                [head.first, next(1), next(2)]
            }
        };
        let [first, second, third] = three;
        // NEXT has no meaning in a table, and its value in the ring was checked when the chain was taken.
        let is_usual = first.flags & DESC_WRITE == 0
            && third.flags & DESC_WRITE != 0
            && (first.flags | second.flags | third.flags) & DESC_INDIRECT == 0;
        if !is_usual || first.len != H::LEN {
            return None;
        }
        let header = H::read(access, GuestAddress(first.address))?;
        // Values read from lost memory may be zeroes.
        (!access.may_be_lost()).then(|| (header, [second, third].map(ChainSegment::from_descriptor)))
    }
}

impl PackedDevice {
    /// Takes available chains, as many as `heads` has room for and `max` allows: first the chains, then the first
    /// entries of their indirect tables. Chains to replay come before all others. Returns their number, and true if
    /// more are available.
    ///
    /// # Errors
    /// When the ring violates the protocol.
    #[inline(never)] // a queue of split rings has its own inlined
    pub fn fetch<const N: usize>(
        &mut self,
        pool: &mut BufferPool,
        lease: LeaseId,
        heads: &mut [ChainHead; N],
        max: usize,
    ) -> Result<(usize, bool), VirtqueueError> {
        let max = max.min(N);
        if pool.is_lease_lost(lease) {
            return Err(MEMORY_LOST);
        }
        if self.replays() > 0 {
            return Ok(self.fetch_replays(pool, lease, &mut heads[..max]));
        }
        let mut access = pool.access(lease);
        let (mut count, mut flags) = (0, 0);
        for head in &mut heads[..max] {
            let Some((index, first)) = self.take()? else { break };
            access.prefetch(GuestAddress(first.address));
            *head = ChainHead { index, first, first_indirect: None };
            flags |= first.flags;
            count += 1;
        }
        if count > 0 {
            self.record_taken();
        }
        if flags & DESC_INDIRECT != 0 {
            heads[..count].iter_mut().for_each(|head| head.read_table(pool, lease));
        }
        Ok((count, count == max && self.is_waiting()))
    }

    /// Takes chains to replay, which an earlier process did not complete.
    #[cold]
    fn fetch_replays(&mut self, pool: &mut BufferPool, lease: LeaseId, heads: &mut [ChainHead]) -> (usize, bool) {
        let mut count = 0;
        while count < heads.len()
            && let Some(index) = self.take_replay()
        {
            let first = self.recorded(index, 0).unwrap_or_default();
            heads[count] = ChainHead { index, first, first_indirect: None };
            heads[count].read_table(pool, lease);
            count += 1;
        }
        (count, self.replays() > 0 || self.is_waiting())
    }

    /// Returns descriptor `at` of a chain from the in-flight table.
    #[cold]
    fn recorded(&self, id: u16, at: u16) -> Option<Descriptor> {
        let chain = self.chains.get(usize::from(id))?;
        self.inflight.as_ref()?.descriptor(chain.entry, at)
    }

    /// Calls `each` with every segment of the chain, readable segments first. Descriptors of length 0 are skipped.
    ///
    /// # Errors
    /// [`ChainError::BrokenRing`] for a chain with a writable descriptor before a readable one, or an invalid indirect
    /// table, or when guest memory was lost; [`ChainError::BadRequest`] for a table that is not mapped, or when
    /// `each` returns it.
    #[inline]
    pub fn walk(
        &self,
        pool: &mut BufferPool,
        lease: LeaseId,
        head: &ChainHead,
        mut each: impl FnMut(&mut BufferPool, ChainSegment) -> Result<(), ChainError>,
    ) -> Result<(), ChainError> {
        let mut writing = false;
        let mut visit = |pool: &mut BufferPool, desc: &Descriptor| {
            let writable = desc.flags & DESC_WRITE != 0;
            if writing && !writable {
                return Err(READABLE_AFTER_WRITABLE.into());
            }
            writing = writable;
            match desc.len {
                0 => Ok(()),
                len => each(pool, ChainSegment { address: GuestAddress(desc.address), len, writable }),
            }
        };
        if head.first.flags & DESC_INDIRECT != 0 {
            let entries = table_entries(&head.first)?;
            let mut entry = match head.first_indirect {
                Some(entry) => entry,
                None => read_entry(pool, lease, &head.first, 0)?,
            };
            for at in 1..=entries {
                if entry.flags & DESC_INDIRECT != 0 {
                    return Err(NESTED_INDIRECT.into());
                }
                visit(pool, &entry)?;
                if at < entries {
                    entry = read_entry(pool, lease, &head.first, at)?;
                }
            }
        } else {
            visit(pool, &head.first)?;
            let Some(chain) = self.chains.get(usize::from(head.index)) else { return Ok(()) };
            // The number of descriptors is the one from when the chain was taken; later changes of their flags have no
            // effect.
            for at in 1..chain.count {
                let desc = match chain.in_table {
                    false => self.ring.load((chain.slot + at) & (self.size() - 1)).0,
                    true => self.recorded(head.index, at).unwrap_or_default(),
                };
                visit(pool, &desc)?;
            }
        }
        // Descriptors and data that `each` has read may be zeroes from lost memory.
        if pool.is_lease_lost(lease) { Err(MEMORY_LOST.into()) } else { Ok(()) }
    }
}

/// Returns the number of entries of the indirect table of `desc`. Source: virtio 1.3 section 2.8.7.
#[inline]
fn table_entries(desc: &Descriptor) -> Result<u16, ChainError> {
    let (len, entry) = (desc.len, DESC_BYTES as u32);
    if len == 0 || !len.is_multiple_of(entry) {
        return Err(BAD_TABLE.into());
    }
    match u16::try_from(len / entry).ok().filter(|entries| *entries <= MAX_QUEUE_SIZE) {
        None => Err(TABLE_TOO_LONG.into()),
        Some(entries) if entries > MAX_INDIRECT_ENTRIES => Err(ChainError::BadRequest),
        Some(entries) => Ok(entries),
    }
}

/// Reads entry `at` of an indirect table once.
#[inline]
fn read_entry(pool: &mut BufferPool, lease: LeaseId, table: &Descriptor, at: u16) -> Result<Descriptor, ChainError> {
    let address = table.address.checked_add(u64::from(at) * DESC_BYTES).ok_or(ChainError::BadRequest)?;
    let words = pool.read(lease, GuestAddress(address)).ok_or(ChainError::BadRequest)?;
    Ok(descriptor_from_words(words))
}
