//! A range of mapped memory, and plain byte copies in and out of it.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicUsize, Ordering};

use mqblk_core::{ByteLen, ByteOffset, HeldMappings, MappingBudget};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::sigbus::{self, MemoryLoss};

/// Memory mapped into this process until the value is dropped.
///
/// Other processes may write it at any time, so it is only accessed by copies and by the shared cells of this crate. If
/// the file behind it is truncated, an access reads zeroes and the mapping is marked as lost (see `sigbus.rs`), and the
/// process goes on.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    /// Usable bytes.
    len: usize,
    /// Bytes to unmap: `len` rounded up to the file system's page size.
    mapped: usize,
    slot: Option<sigbus::WatchSlot>,
    /// Watches page slots: files that are mapped here in parts may be truncated by their owner.
    parts: Option<sigbus::WatchSlot>,
    _held: HeldMappings,
}

// SAFETY: a mapping is plain memory that any thread may copy from or to; nothing in it is tied to a thread.
unsafe impl Send for Mapping {}
// SAFETY: all accesses are volatile, atomic, or byte copies that tolerate concurrent writers.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `file` from `offset`, shared and writable. Returns the mapping and the position of `offset`
    /// in it (an offset need not be page aligned).
    ///
    /// # Errors
    /// When the file is shorter than `offset + len` (an access would fault), the system refuses, or there are too many
    /// mappings in the process or to watch.
    pub fn from_file(file: &impl AsFd, offset: u64, len: u64) -> io::Result<(Mapping, usize)> {
        let stat = rustix::fs::fstat(file)?;
        let end = offset.checked_add(len).ok_or(io::ErrorKind::InvalidInput)?;
        if len == 0 || (stat.st_size as u64) < end {
            let text = format!("the file has {} bytes, the region ends at byte {end}", stat.st_size);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let page = page_size_of(file)?;
        let aligned = offset - offset % page;
        let delta = (offset - aligned) as usize;
        let len = usize::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)? + delta;
        let mapped = len.checked_next_multiple_of(page as usize).ok_or(io::ErrorKind::InvalidInput)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let held = MappingBudget::of_process().hold(1)?;
        // SAFETY: a new mapping at an address of the kernel's choice changes no existing memory.
        let base = unsafe { rustix::mm::mmap(null_mut(), mapped, protection, MapFlags::SHARED, file, aligned)? };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let mut mapping = Mapping { base, len, mapped, slot: None, parts: None, _held: held };
        mapping.exclude_from_dumps();
        // Unwatched, an access could end the process. So a mapping that cannot be watched is refused.
        mapping.slot = Some(sigbus::watch(base.as_ptr() as usize, mapped, page as usize)?);
        Ok((mapping, delta))
    }

    /// Maps `len` bytes of private zero memory, page aligned. Pages are allocated on first touch.
    ///
    /// # Errors
    /// When the system refuses, or the process has too many mappings.
    pub fn anonymous(len: usize) -> io::Result<Mapping> {
        let mapped =
            len.max(1).checked_next_multiple_of(rustix::param::page_size()).ok_or(io::ErrorKind::InvalidInput)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let held = MappingBudget::of_process().hold(1)?;
        // SAFETY: a new mapping at an address of the kernel's choice changes no existing memory.
        let base = unsafe { rustix::mm::mmap_anonymous(null_mut(), mapped, protection, flags)? };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let mapping = Mapping { base, len, mapped, slot: None, parts: None, _held: held };
        mapping.exclude_from_dumps();
        Ok(mapping)
    }

    /// Like [`anonymous`](Self::anonymous), at addresses that the system uses only on request: if there is a hole in
    /// the mapping for a moment, no other thread's memory is mapped into it. The system allocates addresses from the
    /// top of the free space (or from a third of it, upwards), and these lie far below. Parts of it may be replaced by
    /// mappings of files, whose owner charges them to the process's budget.
    ///
    /// # Errors
    /// When the system refuses, has no addresses there (less than 48 bits of them), or there are too many mappings in
    /// the process or to watch.
    pub(crate) fn anonymous_isolated(len: usize) -> io::Result<Mapping> {
        /// 32 TiB to 40 TiB: below programs, heaps and mappings on x86_64 and on arm64 with 48 bits.
        const RANGE: std::ops::Range<usize> = 0x2000_0000_0000..0x2800_0000_0000;
        /// Next candidate. Old mappings are likely to be gone when it wraps around.
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let page = rustix::param::page_size();
        let mapped = len.max(1).checked_next_multiple_of(page).ok_or(io::ErrorKind::InvalidInput)?;
        let stride =
            mapped.checked_add(page).filter(|stride| *stride < RANGE.len()).ok_or(io::ErrorKind::OutOfMemory)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE;
        let held = MappingBudget::of_process().hold(1)?;
        for _ in 0..1000 {
            let from = NEXT.fetch_add(stride, Ordering::Relaxed) % (RANGE.len() - stride);
            let start = std::ptr::with_exposed_provenance_mut(RANGE.start + from / page * page);
            // SAFETY: a new mapping that replaces no existing memory: the system refuses if there is any.
            match unsafe { rustix::mm::mmap_anonymous(start, mapped, protection, flags) } {
                Ok(base) => {
                    let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
                    let mapping = Mapping { base, len, mapped, slot: None, parts: None, _held: held };
                    mapping.exclude_from_dumps();
                    return mapping.watch_parts();
                }
                Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let text = format!("found no {mapped} bytes of address space free from {:#x} to {:#x}", RANGE.start, RANGE.end);
        Err(io::Error::new(io::ErrorKind::OutOfMemory, text))
    }

    fn watch_parts(mut self) -> io::Result<Mapping> {
        let page = rustix::param::page_size();
        self.parts = Some(sigbus::watch(self.base.as_ptr() as usize, self.mapped, page)?);
        Ok(self)
    }

    /// Excludes the memory from core dumps: it is the guests', or holds their data.
    fn exclude_from_dumps(&self) {
        let start = self.base.as_ptr().cast();
        // SAFETY: the whole mapping is this value's, and the advice changes no content. If the system refuses, dumps
        // are larger.
        let _ = unsafe { rustix::mm::madvise(start, self.mapped, Advice::LinuxDontDump) };
    }

    /// Returns the number of usable bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if it has no usable bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the reason if an access to it found memory lost.
    pub fn loss(&self) -> Option<MemoryLoss> {
        self.slot.as_ref().and_then(sigbus::WatchSlot::loss)
    }

    /// Returns the address of byte `at`, for this crate and the kernel only.
    ///
    /// # Panics
    /// When `at` is past the end: callers check first.
    pub(crate) fn address(&self, at: usize) -> NonNull<u8> {
        assert!(at <= self.len, "an address is only taken of bytes that were found to lie in the mapping");
        // SAFETY: `at` is inside the mapping or one past it.
        unsafe { self.base.add(at) }
    }

    /// Returns true if `len` bytes at `at` lie inside.
    fn contains_range(&self, at: ByteOffset, len: usize) -> bool {
        mqblk_core::units::in_range(at, ByteLen(len as u64), ByteLen(self.len as u64))
    }

    /// Copies `bytes` to offset `at`. Returns false (and nothing copied) if it does not fit.
    #[must_use]
    pub fn write(&self, at: ByteOffset, bytes: &[u8]) -> bool {
        if !self.contains_range(at, bytes.len()) {
            return false;
        }
        // SAFETY: in bounds as just checked; `bytes` is private memory, so the two do not overlap.
        unsafe { self.base.as_ptr().add(at.0 as usize).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        true
    }

    /// Copies from offset `at` into `bytes`. Returns false (and nothing copied) if it is out of bounds.
    #[must_use]
    pub fn read(&self, at: ByteOffset, bytes: &mut [u8]) -> bool {
        if !self.contains_range(at, bytes.len()) {
            return false;
        }
        // SAFETY: in bounds as just checked; `bytes` is private memory, so the two do not overlap.
        unsafe { self.base.as_ptr().add(at.0 as usize).copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        true
    }

    /// Zeroes a range; whole pages of it are returned to the host. Returns false if it is out of bounds.
    ///
    /// Only for anonymous mappings: for a shared file this would drop the pages but not the file's content.
    #[must_use]
    pub fn clear(&self, at: ByteOffset, len: ByteLen) -> bool {
        let Ok(bytes) = usize::try_from(len.0) else { return false };
        if self.slot.is_some() || !self.contains_range(at, bytes) {
            return false;
        }
        let page = rustix::param::page_size();
        let (start, end) = (at.0 as usize, at.0 as usize + bytes);
        let (first, last) = (start.next_multiple_of(page).min(end), (end - end % page).max(start));
        // SAFETY: both parts are inside the mapping by the check above; `first <= end` and `last >= start`.
        unsafe {
            let base = self.base.as_ptr();
            if first >= last {
                base.add(start).write_bytes(0, bytes);
            } else {
                base.add(start).write_bytes(0, first - start);
                base.add(last).write_bytes(0, end - last);
                let advice = Advice::LinuxDontNeed;
                if rustix::mm::madvise(base.add(first).cast::<c_void>(), last - first, advice).is_err() {
                    base.add(first).write_bytes(0, last - first);
                }
            }
        }
        true
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Before the addresses are anybody else's.
        (self.slot, self.parts) = (None, None);
        // SAFETY: the mapping was created with this length; every lease on it is gone, since leases own it.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.mapped) };
    }
}

/// Returns the page size of the file system that `file` is on: a huge page for hugetlbfs, where lengths must be
/// multiples of it.
fn page_size_of(file: &impl AsFd) -> io::Result<u64> {
    const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;
    let fs = rustix::fs::fstatfs(file)?;
    let huge = fs.f_type as u64 == HUGETLBFS_MAGIC;
    Ok(if huge { fs.f_bsize as u64 } else { rustix::param::page_size() as u64 })
}

/// Creates a memfd of `len` bytes that can be passed to another process.
///
/// # Errors
/// When the system refuses.
pub fn create_memfd(name: &str, len: u64) -> io::Result<File> {
    let fd: OwnedFd = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC)?;
    rustix::fs::ftruncate(&fd, len)?;
    Ok(File::from(fd))
}

/// Makes `file` exactly `len` zero bytes with allocated blocks, so that a store into a mapping of it cannot fail.
///
/// # Errors
/// When the system refuses, or there is no space; the old content is gone then too.
pub fn zero_file(file: &impl AsFd, len: u64) -> io::Result<()> {
    rustix::fs::ftruncate(file, 0)?;
    Ok(rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, len)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn core_dumps_exclude_mappings() {
        let file = create_memfd("t", 4096).unwrap();
        let mappings = [Mapping::from_file(&file, 0, 4096).unwrap().0, Mapping::anonymous(4096).unwrap()];
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        for mapping in &mappings {
            let start = format!("{:x}-", mapping.address(0).as_ptr() as usize);
            let of_it = smaps.lines().skip_while(|line| !line.starts_with(&start));
            let flags = of_it.skip(1).find(|line| line.starts_with("VmFlags:")).unwrap();
            assert!(flags.split(' ').any(|flag| flag == "dd"), "{start} {flags}");
        }
    }

    #[test]
    fn a_zeroed_file_has_the_requested_length() {
        let file = create_memfd("t", 5000).unwrap();
        rustix::io::pwrite(&file, &[1; 5000], 0).unwrap();
        zero_file(&file, 300).unwrap();
        let mut bytes = [9; 301];
        assert_eq!(rustix::io::pread(&file, &mut bytes, 0), Ok(300));
        assert_eq!(bytes[..300], [0; 300]);
        assert!(zero_file(&file, 0).is_err() && zero_file(&file, u64::MAX).is_err());
    }

    #[test]
    fn a_file_shorter_than_the_region_is_refused() {
        let file = create_memfd("t", 4096).unwrap();
        assert!(Mapping::from_file(&file, 0, 4097).is_err());
        assert!(Mapping::from_file(&file, 4096, 1).is_err());
        assert!(Mapping::from_file(&file, u64::MAX, 2).is_err());
        assert!(Mapping::from_file(&file, 0, 0).is_err());
    }

    #[test]
    fn an_unaligned_offset_is_mapped() {
        let file = create_memfd("t", 0x3b10).unwrap();
        let (whole, _) = Mapping::from_file(&file, 0, 0x3b10).unwrap();
        assert!(whole.write(ByteOffset(0x1234), b"here"));
        let (part, delta) = Mapping::from_file(&file, 0x1234, 0x100).unwrap();
        let mut found = [0; 4];
        assert!(part.read(ByteOffset(delta as u64), &mut found));
        assert_eq!(&found, b"here");
    }

    #[test]
    fn copies_are_bounded() {
        let memory = Mapping::anonymous(100).unwrap();
        assert!(memory.write(ByteOffset(96), &[1; 4]));
        assert!(!memory.write(ByteOffset(97), &[1; 4]));
        assert!(!memory.read(ByteOffset(u64::MAX), &mut [0; 4]));
        assert!(!memory.clear(ByteOffset(1), ByteLen(u64::MAX)));
    }

    #[test]
    fn clearing_zeroes_exactly_the_range() {
        let memory = Mapping::anonymous(5 * 4096).unwrap();
        for (start, len) in [(10, 20), (10, 4096), (4000, 9000), (4096, 8192), (0, 5 * 4096), (4090, 6)] {
            assert!(memory.write(ByteOffset(0), &[0xee; 5 * 4096]));
            assert!(memory.clear(ByteOffset(start), ByteLen(len)));
            let mut all = vec![0; 5 * 4096];
            assert!(memory.read(ByteOffset(0), &mut all));
            for (at, byte) in all.iter().enumerate() {
                let inside = (start..start + len).contains(&(at as u64));
                assert_eq!(*byte, if inside { 0 } else { 0xee }, "byte {at} for {start}+{len}");
            }
        }
    }
}
