//! Dirty logging of writes through a pool's buffers.

use super::*;

impl BufferPool {
    /// Marks the buffer's segments as written to: by a read from storage, or by copying into it. Their pages are marked
    /// in the guest's dirty log when the buffer is released.
    #[inline]
    pub fn set_writable(&mut self, buffer: &Buffer) {
        let index = self.unchecked_index(buffer);
        self.entries[index].writable = true;
    }

    /// Returns true if the buffer is [set writable](Self::set_writable).
    pub fn is_writable(&self, buffer: &Buffer) -> bool {
        self.entries[self.index(buffer)].writable
    }

    /// Starts, changes or ends dirty logging of a guest's memory: for this lease and all leases that it [inherited
    /// from](Self::inherit_log), so that requests already in flight are logged when they end.
    pub fn set_log(&mut self, lease: LeaseId, log: Option<&Arc<DirtyLog>>) {
        let Some(family) = self.log_group(lease) else { return };
        for lease in self.leases.iter_mut().flatten().filter(|lease| lease.log_group == family) {
            lease.log = log.cloned();
        }
    }

    /// Puts `new` into the log group of `old`, after the memory table of `old` was replaced by that of `new`, of the
    /// same guest.
    pub fn inherit_log(&mut self, old: LeaseId, new: LeaseId) {
        let Some(family) = self.log_group(old) else { return };
        let log = self.lease(old.index).log.clone();
        if let Some(lease) = self.find_lease(new) {
            (lease.log_group, lease.log) = (family, log);
        }
    }

    /// Returns true if writes to the buffer will be logged or need not be: it is set writable, or its lease has no log.
    /// The members of a merged buffer are checked on their own.
    pub fn will_be_logged(&self, buffer: &Buffer) -> bool {
        let entry = &self.entries[self.index(buffer)];
        let lease = self.leases.get(entry.lease as usize).and_then(Option::as_ref);
        entry.writable || lease.is_none_or(|lease| lease.log.is_none())
    }

    fn find_lease(&mut self, id: LeaseId) -> Option<&mut Lease> {
        let slot = self.leases.get_mut(id.index as usize)?.as_mut();
        slot.filter(|lease| lease.generation == id.generation)
    }

    fn log_group(&mut self, id: LeaseId) -> Option<u32> {
        self.find_lease(id).map(|lease| lease.log_group)
    }
}

impl Lease {
    /// Marks the pages written through a buffer that is being released.
    #[cold]
    #[inline(never)]
    pub(super) fn mark_buffer(&self, entry: &BufferEntry, spills: &[Vec<Segment>]) {
        if entry.status_len > 0 {
            self.mark_host_range(entry.status, entry.status_len.into());
        }
        if entry.writable {
            let segments = match entry.spill {
                NO_SPILL => &entry.inline[..usize::from(entry.segments)],
                spill => &spills[spill as usize],
            };
            for segment in segments {
                self.mark_host_range(segment.address, segment.len.into());
            }
        }
    }

    /// Marks the pages written at a guest address.
    #[cold]
    #[inline(never)]
    pub(super) fn mark_guest_range(&self, address: GuestAddress, len: u64) {
        if let Some(log) = &self.log {
            log.mark(address, len);
        }
    }

    /// Marks the pages written at a host address. The range lies in one region.
    fn mark_host_range(&self, address: u64, len: u64) {
        let regions = self.memory.regions();
        let found = regions.iter().find(|region| address.wrapping_sub(region.host_address()) < region.len());
        if let Some(region) = found {
            self.mark_guest_range(GuestAddress(region.guest().0 + (address - region.host_address())), len);
        }
    }
}

#[cfg(test)]
mod tests;
