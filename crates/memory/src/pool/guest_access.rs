//! Guest memory read and written by address, without a buffer: headers, descriptor tables, responses.
//!
//! Data is checked, and used after the check, so it is read once: by a volatile load, or by a copy that is passed to
//! [`keep_copy`]. Otherwise a compiler may replace a use of the copy by a second read of the guest's memory.

use std::ptr::NonNull;

use super::{BufferFault, BufferPool, LeaseId};
use crate::region::GuestAddress;
use crate::shared::{Pod, keep_copy, prefetch};

/// Reads a value as bytes, once.
///
/// # Safety
/// `place` is mapped for its whole size.
#[inline]
unsafe fn copy_once<T: Pod>(place: *const T) -> T {
    let mut value = std::mem::MaybeUninit::<T>::uninit();
    // SAFETY: mapped, as the caller says; bytes are copied into private memory; any bit pattern is a `T`.
    unsafe {
        place.cast::<u8>().copy_to_nonoverlapping(value.as_mut_ptr().cast(), size_of::<T>());
        keep_copy(value.as_mut_ptr().cast());
        value.assume_init()
    }
}

/// A value at any address: a driver may align its headers in any way.
#[repr(C, packed)]
pub(super) struct Unaligned<T>(pub(super) T);

/// Reads the value at a host address, once.
///
/// # Safety
/// It is mapped for its whole size.
#[inline]
pub(super) unsafe fn read_once<T: Pod>(host: u64) -> T {
    let place = std::ptr::with_exposed_provenance::<T>(host as usize);
    // SAFETY: mapped, as the caller says, and `Unaligned` needs no alignment; any bit pattern is a `T`.
    unsafe {
        match align_of::<T>() {
            // An array of bytes would be read byte by byte.
            1 if size_of::<T>() > 1 => copy_once(place),
            _ => place.cast::<Unaligned<T>>().read_volatile().0,
        }
    }
}

impl BufferPool {
    /// Reads a value from guest memory, once. `None` when a byte of it is not mapped.
    #[inline]
    pub fn read<T: Pod>(&mut self, lease: LeaseId, address: GuestAddress) -> Option<T> {
        let Some(host) = self.host_address(lease.index, address.0, size_of::<T>() as u64) else {
            return self.read_across_regions(lease, address);
        };
        // SAFETY: mapped for its whole size by the lease.
        Some(unsafe { read_once(host) })
    }

    /// Reads a value that spans regions.
    #[cold]
    fn read_across_regions<T: Pod>(&mut self, lease: LeaseId, address: GuestAddress) -> Option<T> {
        let mut value = std::mem::MaybeUninit::<T>::zeroed();
        // SAFETY: a zeroed `T` is that many initialised bytes, and nothing else refers to them.
        let bytes = unsafe { std::slice::from_raw_parts_mut(value.as_mut_ptr().cast::<u8>(), size_of::<T>()) };
        // SAFETY: any bit pattern is a `T`.
        self.read_bytes(lease, address, bytes).then(|| unsafe { value.assume_init() })
    }

    /// Reads bytes from guest memory, once. They may span regions. Returns false if a byte is not mapped; the bytes
    /// before it may then have been read.
    #[must_use]
    pub fn read_bytes(&mut self, lease: LeaseId, address: GuestAddress, into: &mut [u8]) -> bool {
        let Some(host) = self.host_address(lease.index, address.0, into.len() as u64) else {
            return self.read_bytes_across_regions(lease, address, into);
        };
        let place = std::ptr::with_exposed_provenance::<u8>(host as usize);
        // SAFETY: mapped for `into.len()` bytes by the lease; `into` is private memory.
        unsafe { place.copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) };
        keep_copy(into.as_mut_ptr());
        true
    }

    /// Reads bytes that span regions or are not mapped.
    #[cold]
    fn read_bytes_across_regions(&mut self, lease: LeaseId, address: GuestAddress, into: &mut [u8]) -> bool {
        let (mut address, mut left) = (address.0, into);
        while !left.is_empty() {
            let Some((region, at)) = self.locate(lease.index, address) else { return false };
            let (host, run) = (region.host_start + at, (region.len - at).min(left.len() as u64));
            let (now, later) = left.split_at_mut(run as usize);
            let place = std::ptr::with_exposed_provenance::<u8>(host as usize);
            // SAFETY: mapped for `run` bytes by the lease; `now` is private memory.
            unsafe { place.copy_to_nonoverlapping(now.as_mut_ptr(), now.len()) };
            keep_copy(now.as_mut_ptr());
            left = later;
            match address.checked_add(run) {
                Some(next) => address = next,
                None => return left.is_empty(),
            }
        }
        true
    }

    /// Writes a value to guest memory. Returns false unless it is mapped in one region: then
    /// [`write_bytes`](Self::write_bytes) may write it.
    #[must_use]
    #[inline]
    pub fn write<T: Pod>(&mut self, lease: LeaseId, address: GuestAddress, value: T) -> bool {
        let own = self.lease(lease.index);
        let at = address.0.wrapping_sub(own.cached_region.guest_start);
        if at >= own.cached_region.len || size_of::<T>() as u64 > own.cached_region.len - at || own.log.is_some() {
            return false;
        }
        let place = std::ptr::with_exposed_provenance_mut::<Unaligned<T>>((own.cached_region.host_start + at) as usize);
        // SAFETY: mapped for its whole size by the lease, and `Unaligned` needs no alignment.
        unsafe { place.write_volatile(Unaligned(value)) };
        true
    }

    /// Writes bytes to guest memory. They may span regions. Returns false if a byte is not mapped; the bytes before it
    /// may then have been written.
    #[must_use]
    #[inline]
    pub fn write_bytes(&mut self, lease: LeaseId, address: GuestAddress, bytes: &[u8]) -> bool {
        let Some(host) = self.host_address(lease.index, address.0, bytes.len() as u64) else {
            return self.write_bytes_across_regions(lease, address, bytes);
        };
        let place = std::ptr::with_exposed_provenance_mut::<u8>(host as usize);
        // SAFETY: mapped for `bytes.len()` bytes by the lease; `bytes` is private memory.
        unsafe { place.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        let lease = self.lease(lease.index);
        if lease.log.is_some() {
            lease.mark_guest_range(address, bytes.len() as u64);
        }
        true
    }

    /// Writes bytes that span regions or are not mapped.
    #[cold]
    fn write_bytes_across_regions(&mut self, lease: LeaseId, address: GuestAddress, bytes: &[u8]) -> bool {
        let buffer = self.take(lease);
        self.set_writable(&buffer);
        let pushed = u32::try_from(bytes.len())
            .map_err(|_| BufferFault::Unmapped)
            .and_then(|len| self.push(&buffer, address, len, u16::MAX));
        let written = pushed.is_ok() && self.copy_in(&buffer, 0, bytes);
        self.release(buffer);
        written
    }

    /// Prefetches the line at `address` into this core's cache, if it is mapped.
    #[inline]
    pub fn prefetch(&mut self, lease: LeaseId, address: GuestAddress) {
        let host = self.host_address(lease.index, address.0, 1);
        if let Some(place) =
            host.and_then(|host| NonNull::new(std::ptr::with_exposed_provenance_mut::<u8>(host as usize)))
        {
            prefetch(place);
        }
    }
}
