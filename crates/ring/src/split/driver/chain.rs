//! A request while it is being built.

use mqblk_memory::GuestAddress;

use super::{ChainLayout, HeadState, SplitDriver};
use crate::split::layout::{DESC_BYTES, DESC_INDIRECT, DESC_NEXT, DESC_WRITE, Descriptor};

/// Refusal of a segment or a request. The ring is as before [`begin`](SplitDriver::begin).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChainRefused {
    /// Back-pressure: too few free descriptors until completions are taken.
    #[error("the ring is full")]
    Full,
    /// More segments than an indirect table holds, or no indirect tables.
    #[error("the request has more segments than its descriptor table holds ({0})")]
    TooManySegments(u16),
    /// Readable segments come before writable ones (virtio 1.3 section 2.7.4.2).
    #[error("a readable segment after a writable one")]
    ReadableAfterWritable,
    /// A request needs a segment, and a segment a byte.
    #[error("the request has no segments, or an empty one")]
    Empty,
}

/// A request that is being built. Dropping it before [`commit`](Self::commit) cancels it.
#[derive(Debug)]
#[must_use = "a request that is not committed is cancelled"]
pub struct ChainBuilder<'a> {
    driver: &'a mut SplitDriver,
    layout: ChainLayout,
    /// Free descriptors used so far (direct) or table entries (indirect).
    segments: u16,
    /// Index of the segment that is not yet written: a ring descriptor or a table entry.
    at: u16,
    /// The last segment. It is written with the next one or at the commit: only then is its `next` flag known.
    pending: Descriptor,
}

impl SplitDriver {
    /// Starts a request. It needs as many free ring descriptors as it has segments, or one with
    /// [`ChainLayout::Indirect`].
    #[inline]
    pub fn begin(&mut self, layout: ChainLayout) -> ChainBuilder<'_> {
        ChainBuilder { driver: self, layout, segments: 0, at: 0, pending: Descriptor::default() }
    }
}

impl<'a> ChainBuilder<'a> {
    /// Adds `len` bytes at `address` for the device to read.
    ///
    /// # Errors
    /// [`ChainRefused::Full`] is back-pressure; the others are the caller's mistakes.
    #[inline(always)] // else the chain would be moved through memory with every segment: measured at 12 ns a request
    pub fn readable(self, address: GuestAddress, len: u32) -> Result<ChainBuilder<'a>, ChainRefused> {
        if self.pending.flags & DESC_WRITE != 0 {
            return Err(ChainRefused::ReadableAfterWritable);
        }
        self.push(Descriptor { address: address.0, len, flags: 0, next: 0 })
    }

    /// Adds `len` bytes at `address` for the device to write.
    ///
    /// # Errors
    /// [`ChainRefused::Full`] is back-pressure; the others are the caller's mistakes.
    #[inline(always)]
    pub fn writable(self, address: GuestAddress, len: u32) -> Result<ChainBuilder<'a>, ChainRefused> {
        self.push(Descriptor { address: address.0, len, flags: DESC_WRITE, next: 0 })
    }

    #[inline(always)]
    fn push(mut self, segment: Descriptor) -> Result<ChainBuilder<'a>, ChainRefused> {
        if segment.len == 0 {
            return Err(ChainRefused::Empty);
        }
        let next = match self.layout {
            ChainLayout::Direct if self.segments == self.driver.free => return Err(ChainRefused::Full),
            ChainLayout::Direct if self.segments == 0 => self.driver.free_head,
            ChainLayout::Direct => self.driver.next[usize::from(self.at)],
            ChainLayout::Indirect if self.driver.free == 0 => return Err(ChainRefused::Full),
            ChainLayout::Indirect => {
                let max = self.driver.max_indirect_segments();
                if self.segments == max {
                    return Err(ChainRefused::TooManySegments(max));
                }
                self.segments
            }
        };
        if self.segments != 0 {
            self.pending.flags |= DESC_NEXT;
            self.pending.next = next;
            self.write_pending();
        }
        self.at = next;
        self.pending = segment;
        self.segments += 1;
        Ok(self)
    }

    /// Commits the request. It becomes visible to the device at the next [`publish`](SplitDriver::publish); its
    /// [`UsedRequest`](super::UsedRequest) returns `token`.
    ///
    /// # Errors
    /// [`ChainRefused::Empty`] without a segment.
    #[inline(always)]
    pub fn commit(mut self, token: u32) -> Result<(), ChainRefused> {
        if self.segments == 0 {
            return Err(ChainRefused::Empty);
        }
        self.write_pending();
        let driver = self.driver;
        let head = driver.free_head;
        let (last, descriptors) = match self.layout {
            ChainLayout::Direct => (self.at, self.segments),
            ChainLayout::Indirect => {
                let table = driver.table_address(head);
                let len = u32::from(self.segments) * DESC_BYTES as u32;
                let table = Descriptor { address: table.0, len, flags: DESC_INDIRECT, next: 0 };
                let [address, rest] = table.to_words();
                driver.write_descriptor(head, address, rest);
                (head, 1)
            }
        };
        driver.free_head = driver.next[usize::from(last)];
        driver.free -= descriptors;
        driver.heads[usize::from(head)] = HeadState { token, descriptors, last };
        driver.in_flight += 1;
        driver.put_available(head);
        Ok(())
    }

    #[inline(always)]
    fn write_pending(&mut self) {
        let [address, rest] = self.pending.to_words();
        match self.layout {
            ChainLayout::Direct => self.driver.write_descriptor(self.at, address, rest),
            ChainLayout::Indirect => self.driver.write_table_entry(self.at, address, rest),
        }
    }
}

impl SplitDriver {
    /// Writes a ring descriptor, unless it already holds the value. Its two words are separate arguments. As one they
    /// would be passed in memory, to which the fields were stored one by one, and a load of several stores waits until
    /// all are in the cache.
    #[inline]
    fn write_descriptor(&mut self, index: u16, address: u64, rest: u64) {
        let (index, words) = (usize::from(index), [address, rest]);
        if self.desc_shadow[index] != words {
            self.desc_shadow[index] = words;
            self.ring.desc.set(index, words);
        }
    }

    /// Writes entry `at` of the indirect table that belongs to the first free ring descriptor, unless it already holds
    /// the value. Arguments as of [`write_descriptor`](Self::write_descriptor).
    #[inline]
    fn write_table_entry(&mut self, at: u16, address: u64, rest: u64) {
        let Some(tables) = &mut self.tables else { return };
        let table = usize::from(self.free_head) * usize::from(tables.area.per_table);
        let (index, words) = (table + usize::from(at), [address, rest]);
        if tables.shadow[index] != words {
            tables.shadow[index] = words;
            tables.slots.set(index, words);
        }
    }

    /// Returns the address of the indirect table of ring descriptor `head`.
    #[inline]
    fn table_address(&self, head: u16) -> GuestAddress {
        let Some(tables) = &self.tables else { return GuestAddress(0) };
        GuestAddress(tables.area.start.0 + u64::from(head) * u64::from(tables.area.per_table) * DESC_BYTES)
    }

    /// Puts a head into the available ring, unless its slot already holds it.
    #[inline]
    fn put_available(&mut self, head: u16) {
        let slot = usize::from(self.avail) & (self.avail_shadow.len() - 1);
        if self.avail_shadow[slot] != head {
            self.avail_shadow[slot] = head;
            self.ring.avail_ring.set(slot, head.to_le());
        }
        self.avail = self.avail.wrapping_add(1);
    }
}
