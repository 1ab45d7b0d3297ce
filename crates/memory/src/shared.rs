//! Ring fields that the other side writes concurrently: resolved once at set-up, bounded, volatile or atomic.

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

use crate::region::Region;

/// Plain old data: every bit pattern is a value, and there is no padding.
///
/// # Safety
/// Implementations guarantee exactly that.
pub unsafe trait Pod: Copy + 'static {}
// SAFETY: integers and arrays of them have no padding and no invalid patterns.
unsafe impl Pod for u8 {}
// SAFETY: as above.
unsafe impl Pod for u16 {}
// SAFETY: as above.
unsafe impl Pod for u32 {}
// SAFETY: as above.
unsafe impl Pod for u64 {}
// SAFETY: as above.
unsafe impl<T: Pod, const N: usize> Pod for [T; N] {}

/// An array of `T` in shared memory whose length is a power of two. Indices wrap, so no index is out of bounds.
#[derive(Debug)]
pub struct SharedArray<T> {
    base: NonNull<T>,
    mask: usize,
    _region: Arc<Region>,
    _type: PhantomData<T>,
}

// SAFETY: the memory is shared with another process anyway; the region is kept alive by the Arc.
unsafe impl<T: Pod> Send for SharedArray<T> {}

impl<T: Pod> SharedArray<T> {
    /// `base` must point to `count` values inside `region`, aligned for `T`; `count` is a power of two.
    pub(crate) fn new(base: NonNull<u8>, count: usize, region: Arc<Region>) -> Self {
        assert!(
            count.is_power_of_two() && base.cast::<T>().is_aligned(),
            "`GuestMemory` refuses what a guest has misplaced"
        );
        SharedArray { base: base.cast(), mask: count - 1, _region: region, _type: PhantomData }
    }

    /// Returns the length of the array.
    #[inline]
    pub fn count(&self) -> usize {
        self.mask + 1
    }

    /// Reads entry `index` (modulo the length) with one volatile load.
    #[inline]
    pub fn get(&self, index: usize) -> T {
        // SAFETY: the masked index is inside the array, which the region keeps mapped.
        unsafe { self.base.add(index & self.mask).read_volatile() }
    }

    /// Reads entry `index` with one volatile load; `None` past the end.
    #[inline]
    pub fn get_within(&self, index: usize) -> Option<T> {
        // SAFETY: inside the array (just checked), which the region keeps mapped.
        (index <= self.mask).then(|| unsafe { self.base.add(index).read_volatile() })
    }

    /// Writes entry `index` (modulo the length) with one volatile store.
    #[inline]
    pub fn set(&self, index: usize, value: T) {
        // SAFETY: the masked index is inside the array, which the region keeps mapped.
        unsafe { self.base.add(index & self.mask).write_volatile(value) }
    }

    /// Reads the first bytes of entry `index` (modulo the length) with one volatile load.
    #[inline]
    pub fn get_prefix<H: Pod>(&self, index: usize) -> H {
        const { assert!(size_of::<H>() <= size_of::<T>() && align_of::<H>() <= align_of::<T>()) };
        // SAFETY: the masked index is inside the array, which the region keeps mapped; the prefix lies in the entry
        // with the same alignment.
        unsafe { self.base.add(index & self.mask).cast::<H>().read_volatile() }
    }

    /// Writes the first bytes of entry `index` (modulo the length) with one volatile store.
    #[inline]
    pub fn set_prefix<H: Pod>(&self, index: usize, head: H) {
        const { assert!(size_of::<H>() <= size_of::<T>() && align_of::<H>() <= align_of::<T>()) };
        // SAFETY: as in `get_prefix`.
        unsafe { self.base.add(index & self.mask).cast::<H>().write_volatile(head) }
    }

    /// Prefetches entry `index` (modulo the length) into this core's cache.
    #[inline]
    pub fn prefetch(&self, index: usize) {
        // SAFETY: the masked index is inside the array.
        prefetch(unsafe { self.base.add(index & self.mask) }.cast());
    }
}

impl<T: Pod, const N: usize> SharedArray<[T; N]> {
    /// Writes the elements of entry `index` (modulo the length), each with one volatile store: an array would be put on
    /// the stack first.
    #[inline]
    pub fn set_elements(&self, index: usize, elements: [T; N]) {
        // SAFETY: the masked index is inside the array, which the region keeps mapped.
        let entry = unsafe { self.base.add(index & self.mask).cast::<T>() };
        for (at, element) in elements.into_iter().enumerate() {
            // SAFETY: the element lies in the entry, aligned.
            unsafe { entry.add(at).write_volatile(element) };
        }
    }

    /// Reads element `at` of entry `index` (modulo the length) with one volatile load.
    ///
    /// # Panics
    /// When `at` is not below `N`.
    #[inline]
    pub fn element(&self, index: usize, at: usize) -> T {
        assert!(at < N, "an entry has {N} elements");
        // SAFETY: the masked index is inside the array, which the region keeps mapped; the element lies in the entry,
        // aligned.
        unsafe { self.base.add(index & self.mask).cast::<T>().add(at).read_volatile() }
    }
}

/// An index or a flag in shared memory that both sides access.
macro_rules! shared_cell {
    ($name:ident, $atomic:ident, $value:ty, $what:literal) => {
        #[doc = $what]
        #[derive(Debug)]
        pub struct $name {
            cell: NonNull<$value>,
            _region: Arc<Region>,
        }

        // SAFETY: accessed atomically only; the region is kept alive by the Arc.
        unsafe impl Send for $name {}

        impl $name {
            /// `cell` must point to an aligned value inside `region`.
            pub(crate) fn new(cell: NonNull<u8>, region: Arc<Region>) -> Self {
                assert!(cell.cast::<$value>().is_aligned(), "`GuestMemory` refuses what a guest has misplaced");
                $name { cell: cell.cast(), _region: region }
            }

            /// Loads the value atomically.
            #[inline]
            pub fn load(&self, order: Ordering) -> $value {
                // SAFETY: aligned and mapped (constructor); all our accesses to it are atomic.
                unsafe { $atomic::from_ptr(self.cell.as_ptr()) }.load(order)
            }

            /// Stores the value atomically.
            #[inline]
            pub fn store(&self, value: $value, order: Ordering) {
                // SAFETY: aligned and mapped (constructor); all our accesses to it are atomic.
                unsafe { $atomic::from_ptr(self.cell.as_ptr()) }.store(value, order);
            }
        }
    };
}

shared_cell!(SharedU16, AtomicU16, u16, "A 16-bit index or flag in shared memory.");
shared_cell!(SharedU32, AtomicU32, u32, "A 32-bit index or flag in shared memory.");

/// An array of 64-bit words in shared memory. All accesses to them are atomic.
#[derive(Debug)]
pub struct SharedWords {
    base: NonNull<u64>,
    count: usize,
    _region: Arc<Region>,
}

// SAFETY: accessed atomically only; the region is kept alive by the Arc.
unsafe impl Send for SharedWords {}
// SAFETY: as above.
unsafe impl Sync for SharedWords {}

impl SharedWords {
    /// `base` must point to `count` aligned words inside `region`.
    pub(crate) fn new(base: NonNull<u8>, count: usize, region: Arc<Region>) -> Self {
        assert!(base.cast::<u64>().is_aligned(), "`GuestMemory` refuses what a guest has misplaced");
        SharedWords { base: base.cast(), count, _region: region }
    }

    /// Returns the number of words.
    #[inline]
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns word `index`, for any atomic operation. `None` past the end.
    #[inline]
    pub fn get(&self, index: usize) -> Option<&AtomicU64> {
        // SAFETY: inside the array (just checked), aligned and mapped for as long as `self` lives (constructor); all
        // our accesses to it are atomic.
        (index < self.count).then(|| unsafe { AtomicU64::from_ptr(self.base.add(index).as_ptr()) })
    }

    /// Returns words `index` and `index + 1`, as [`get`](Self::get).
    #[inline]
    pub fn get_pair(&self, index: usize) -> Option<[&AtomicU64; 2]> {
        // SAFETY: as in `get`: both are inside, since `index + 1` is.
        let word = |index| unsafe { AtomicU64::from_ptr(self.base.add(index).as_ptr()) };
        let next = index.checked_add(1).filter(|next| *next < self.count)?;
        Some([word(index), word(next)])
    }
}

/// A full memory barrier. "Publish, then read the other side's event suppression" and "arm, then re-check" need it
/// between their two halves (virtio 1.3 sections 2.7.10 and 2.7.7.2).
#[inline]
pub fn full_fence() {
    fence(Ordering::SeqCst);
}

/// Makes the compiler keep a private copy of shared memory that was just written to `copy`: later reads use the copy.
/// Otherwise it may read the shared memory a second time, since it knows of no other writer, and the other side may
/// have changed it after a check. No instruction is generated.
#[inline(always)]
pub(crate) fn keep_copy(copy: *mut u8) {
    // SAFETY: an empty text. To the compiler it may access all memory that it is given a pointer to, and all that
    // others may access.
    unsafe { std::arch::asm!("/* {0} */", in(reg) copy, options(nostack, preserves_flags)) };
}

/// Prefetches a line for writing. Cannot fault.
#[inline(always)]
pub(crate) fn prefetch_for_write(address: u64) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: prefetching is a hint; any address is allowed. Processors without PREFETCHW take it for an instruction
    // that does nothing.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) address, options(nomem, nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Prefetches a line into this core's cache. Cannot fault.
#[inline]
pub(crate) fn prefetch(address: NonNull<u8>) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: prefetching is a hint; any address is allowed.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(address.as_ptr().cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
