//! A request while it is being built.

use mqblk_memory::GuestAddress;

use super::{ChainLayout, IdState, PackedDriver};
use crate::format::{DESC_INDIRECT, DESC_NEXT, DESC_WRITE, Descriptor};
use crate::packed::layout::{DESC_BYTES, state_word};
use crate::split::driver::ChainRefused;

/// A request that is being built. Dropping it before [`commit`](Self::commit) cancels it.
#[derive(Debug)]
#[must_use = "a request that is not committed is cancelled"]
pub struct PackedChain<'a> {
    driver: &'a mut PackedDriver,
    layout: ChainLayout,
    segments: u16,
    writing: bool,
}

impl PackedDriver {
    /// Starts a request. It needs as many free ring descriptors as it has segments, or one with
    /// [`ChainLayout::Indirect`].
    #[inline]
    pub fn begin(&mut self, layout: ChainLayout) -> PackedChain<'_> {
        PackedChain { driver: self, layout, segments: 0, writing: false }
    }
}

impl<'a> PackedChain<'a> {
    /// Adds `len` bytes at `address` for the device to read.
    ///
    /// # Errors
    /// [`ChainRefused::Full`] is back-pressure; the others are the caller's mistakes.
    #[inline(always)]
    pub fn readable(self, address: GuestAddress, len: u32) -> Result<PackedChain<'a>, ChainRefused> {
        if self.writing {
            return Err(ChainRefused::ReadableAfterWritable);
        }
        self.push(Descriptor { address: address.0, len, flags: 0, next: 0 })
    }

    /// Adds `len` bytes at `address` for the device to write.
    ///
    /// # Errors
    /// [`ChainRefused::Full`] is back-pressure; the others are the caller's mistakes.
    #[inline(always)]
    pub fn writable(mut self, address: GuestAddress, len: u32) -> Result<PackedChain<'a>, ChainRefused> {
        self.writing = true;
        self.push(Descriptor { address: address.0, len, flags: DESC_WRITE, next: 0 })
    }

    #[inline(always)]
    fn push(mut self, segment: Descriptor) -> Result<PackedChain<'a>, ChainRefused> {
        if segment.len == 0 {
            return Err(ChainRefused::Empty);
        }
        let driver = &mut *self.driver;
        match self.layout {
            ChainLayout::Direct if self.segments == driver.free => return Err(ChainRefused::Full),
            ChainLayout::Direct => driver.segments[usize::from(self.segments)] = segment,
            ChainLayout::Indirect if driver.free == 0 => return Err(ChainRefused::Full),
            ChainLayout::Indirect => {
                let max = driver.max_indirect_segments();
                if self.segments == max {
                    return Err(ChainRefused::TooManySegments(max));
                }
                driver.write_table_entry(driver.free_id, self.segments, &segment);
            }
        }
        self.segments += 1;
        Ok(self)
    }

    /// Commits the request. It becomes visible to the device at the next [`publish`](PackedDriver::publish); its
    /// [`UsedRequest`](crate::split::driver::UsedRequest) returns `token`.
    ///
    /// # Errors
    /// [`ChainRefused::Empty`] without a segment.
    #[inline(always)]
    pub fn commit(self, token: u32) -> Result<(), ChainRefused> {
        if self.segments == 0 {
            return Err(ChainRefused::Empty);
        }
        let driver = self.driver;
        let id = driver.free_id;
        let descriptors = match self.layout {
            ChainLayout::Indirect => {
                let address = driver.tables.as_ref().map_or(0, |tables| tables.address(id).0);
                let len = u32::from(self.segments) * DESC_BYTES as u32;
                let table = Descriptor { address, len, flags: DESC_INDIRECT, next: 0 };
                driver.write_descriptor(driver.avail, &table, id);
                1
            }
            ChainLayout::Direct => {
                let size = driver.size();
                for index in 0..self.segments {
                    let mut segment = driver.segments[usize::from(index)];
                    if index + 1 < self.segments {
                        segment.flags |= DESC_NEXT;
                    }
                    driver.write_descriptor(driver.avail.after(index, size), &segment, id);
                }
                self.segments
            }
        };
        driver.avail = driver.avail.after(descriptors, driver.size());
        driver.unpublished_slots += descriptors;
        driver.free_id = driver.next_id[usize::from(id)];
        driver.least = if driver.in_flight == 0 { descriptors } else { driver.least.min(descriptors) };
        driver.free -= descriptors;
        driver.in_flight += 1;
        driver.ids[usize::from(id)] = IdState { token, descriptors, sequence: driver.committed };
        driver.committed = driver.committed.wrapping_add(1);
        Ok(())
    }
}

impl PackedDriver {
    /// Writes entry `at` of the indirect table of buffer id `id`, unless it already holds the value.
    #[inline]
    fn write_table_entry(&mut self, id: u16, at: u16, descriptor: &Descriptor) {
        let Some(tables) = &mut self.tables else { return };
        let words = [descriptor.address.to_le(), state_word(descriptor.len, 0, descriptor.flags)];
        let index = usize::from(id) * usize::from(tables.area.per_table) + usize::from(at);
        if tables.shadow[index] != words {
            tables.shadow[index] = words;
            tables.slots.set(index, words);
        }
    }
}
