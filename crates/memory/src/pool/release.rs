//! Release of buffers.

use super::{Buffer, BufferPool, FREE, NO_SPILL};
use crate::shared::Pod;

impl BufferPool {
    /// Writes the status, if its length is sufficient, and releases the buffer.
    #[inline(always)] // for the place where most requests end
    pub fn release_with_status<T: Pod>(&mut self, buffer: Buffer, status: T) {
        let index = self.index(&buffer);
        self.write_status_of(index, status);
        self.release_index(index);
    }

    /// As [`release`](Self::release), inlined.
    #[inline(always)] // for the place where most requests end
    pub fn release_usual(&mut self, buffer: Buffer) {
        let index = self.index(&buffer);
        self.release_index(index);
    }

    /// Releases a buffer, and the members of a merged one. A retired lease ends with its last buffer.
    #[inline]
    pub fn release(&mut self, buffer: Buffer) {
        self.release_usual(buffer);
    }

    #[inline(always)]
    fn release_index(&mut self, index: usize) {
        let lease_index = self.free_entry(index) as usize;
        let Some(slot) = self.leases.get_mut(lease_index) else { return self.release_members(index) };
        let lease = slot.as_mut().expect("a live buffer holds its lease");
        if lease.log.is_some() {
            lease.mark_buffer(&self.entries[index], &self.spills);
        }
        lease.buffers -= 1;
        if lease.retired && lease.buffers == 0 {
            *slot = None;
        }
    }

    /// Frees an entry. Returns its lease.
    #[inline(always)] // for the place where most requests end
    pub(super) fn free_entry(&mut self, index: usize) -> u32 {
        let entry = &mut self.entries[index];
        let lease = std::mem::replace(&mut entry.lease, FREE);
        assert!(lease != FREE, "a buffer is released once: handles cannot be copied");
        if entry.spill != NO_SPILL {
            self.free_spills.push(entry.spill);
        }
        entry.total = self.first_free.into();
        self.first_free = index as u32;
        lease
    }

    /// Returns the number of free entries.
    #[cfg(test)]
    pub(super) fn free_entries(&self) -> usize {
        let next = |at: &u32| Some(self.entries.get(*at as usize)?.total as u32);
        std::iter::successors(Some(self.first_free), next).take_while(|at| *at != super::NO_ENTRY).count()
    }
}
