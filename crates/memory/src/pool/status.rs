//! The status of a request: a few bytes of guest memory beside its segments, which are written when it ends.

use super::guest_access::Unaligned;
use super::*;
use crate::shared::Pod;

impl BufferPool {
    /// Sets the guest address of the request's status byte.
    ///
    /// # Errors
    /// [`BufferFault`] when it is not mapped.
    #[inline]
    pub fn set_status(&mut self, buffer: &Buffer, address: GuestAddress) -> Result<(), BufferFault> {
        let lease = self.entries[self.unchecked_index(buffer)].lease;
        let host = self.host_address(lease, address.0, 1).ok_or(BufferFault::Unmapped)?;
        let index = self.unchecked_index(buffer);
        let entry = &mut self.entries[index];
        (entry.status, entry.status_len) = (host, 1);
        Ok(())
    }

    /// Returns the length of the status, in bytes; 0 if there is none.
    #[inline]
    pub fn status_len(&self, buffer: &Buffer) -> u32 {
        self.entries[self.index(buffer)].status_len.into()
    }

    /// Writes a status, if its length is sufficient.
    #[inline]
    pub fn write_status<T: Pod>(&self, buffer: &Buffer, status: T) {
        self.write_status_of(self.index(buffer), status);
    }

    #[inline(always)]
    pub(super) fn write_status_of<T: Pod>(&self, index: usize, status: T) {
        let entry = &self.entries[index];
        if usize::from(entry.status_len) >= size_of::<T>() {
            let place = std::ptr::with_exposed_provenance_mut::<T>(entry.status as usize);
            // SAFETY: `status_len` bytes were translated in the buffer's lease, which keeps them mapped; neither type
            // needs alignment.
            unsafe {
                match align_of::<T>() {
                    // Inside `Unaligned` it would be put on the stack first.
                    1 => place.write_volatile(status),
                    _ => place.cast::<Unaligned<T>>().write_volatile(Unaligned(status)),
                }
            }
        }
    }

    /// Writes the bytes of a status, as many as fit.
    pub fn write_status_bytes(&self, buffer: &Buffer, bytes: &[u8]) {
        let entry = &self.entries[self.index(buffer)];
        let len = bytes.len().min(entry.status_len.into());
        let place = std::ptr::with_exposed_provenance_mut::<u8>(entry.status as usize);
        if len > 0 {
            // SAFETY: `status_len` bytes were translated in the buffer's lease, which keeps them mapped; `bytes` is
            // private memory.
            unsafe { place.copy_from_nonoverlapping(bytes.as_ptr(), len) };
        }
    }
}
