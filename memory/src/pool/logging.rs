//! What the pool does while a guest's memory is being logged.

use super::*;

impl BufferPool {
    /// Says that the buffer's pieces are written to: by a read from storage, or by copying into it. They are marked in the guest's dirty
    /// log when the buffer is released.
    #[inline]
    pub fn set_writable(&mut self, buffer: &Buffer) {
        self.entries[buffer.index()].writable = true;
    }

    /// Starts, changes or ends the logging of a guest's memory: of this lease and of all that it [succeeded](Self::succeed), so that
    /// what is in flight is logged too when it ends.
    pub fn set_log(&mut self, lease: LeaseId, log: Option<&Arc<DirtyLog>>) {
        let Some(family) = self.family(lease) else { return };
        for held in self.leases.iter_mut().flatten().filter(|held| held.family == family) {
            held.log = log.cloned();
        }
    }

    /// The memory table of `old` was replaced by that of `new`, of the same guest: it is logged in the same way.
    pub fn succeed(&mut self, old: LeaseId, new: LeaseId) {
        let Some(family) = self.family(old) else { return };
        let log = self.lease(old.index).log.clone();
        if let Some(held) = self.found(new) {
            (held.family, held.log) = (family, log);
        }
    }

    /// Whether whoever takes a buffer remembered to say that it is written to, where that matters. Members of a joined buffer are
    /// asked for themselves.
    pub fn will_be_logged(&self, buffer: &Buffer) -> bool {
        let entry = &self.entries[buffer.index()];
        let lease = self.leases.get(entry.lease as usize).and_then(Option::as_ref);
        entry.writable || lease.is_none_or(|lease| lease.log.is_none())
    }

    fn found(&mut self, id: LeaseId) -> Option<&mut Lease> {
        let slot = self.leases.get_mut(id.index as usize)?.as_mut();
        slot.filter(|lease| lease.generation == id.generation)
    }

    fn family(&mut self, id: LeaseId) -> Option<u32> {
        self.found(id).map(|lease| lease.family)
    }
}

impl Lease {
    /// Marks what was written to a buffer that ends.
    #[cold]
    #[inline(never)]
    pub(super) fn log_entry(&self, entry: &Entry, spills: &[Vec<Segment>]) {
        if entry.status != 0 {
            self.log_host(entry.status, 1);
        }
        if entry.writable {
            let pieces = match entry.spill {
                NO_SPILL => &entry.inline[..usize::from(entry.pieces)],
                spill => &spills[spill as usize],
            };
            for piece in pieces {
                self.log_host(piece.address, piece.len.into());
            }
        }
    }

    /// Marks what was written at a guest address.
    #[cold]
    #[inline(never)]
    pub(super) fn log_range(&self, address: GuestAddress, len: u64) {
        if let Some(log) = &self.log {
            log.mark(address, len);
        }
    }

    /// Marks what was written at an address of this process, which lies in one region.
    fn log_host(&self, address: u64, len: u64) {
        let regions = self.memory.regions();
        let found = regions.iter().find(|region| address.wrapping_sub(region.host_address()) < region.len());
        if let Some(region) = found {
            self.log_range(GuestAddress(region.guest().0 + (address - region.host_address())), len);
        }
    }
}

#[cfg(test)]
mod tests;
