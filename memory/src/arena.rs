//! Page slots: one stretch of addresses in which single pages come and go.

use std::ffi::c_void;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::guest::{GuestAddress, GuestMemory, Region};
use crate::lost;

/// Bytes of a page that is granted: `XEN_PAGE_SIZE`, whatever the host's own page size is.
pub const PAGE_BYTES: u32 = 4096;

/// One page's place in a [`PageArena`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageSlot(pub u32);

impl PageSlot {
    /// Where byte `at` of the slot is in the arena's [`memory`](PageArena::memory).
    #[inline]
    pub const fn address(self, at: u32) -> GuestAddress {
        GuestAddress(self.0 as u64 * PAGE_BYTES as u64 + at as u64)
    }
}

/// A stretch of addresses divided into page slots. A slot holds a private page of our own, zero at first, or a page of a file that
/// was [placed](Self::place) there (for a grant: of `/dev/xen/gntdev`). A slot is never a hole: whoever touches one that was
/// cleared meanwhile touches other bytes, but nothing else, so *memory is mapped while anything may touch it* holds for all of the
/// arena as long as it lives.
///
/// Slots are the guest addresses of a [`GuestMemory`] table of one region, so buffers, rings and copies work in an arena as in
/// a guest's memory; slots that lie side by side are one piece.
#[derive(Debug)]
pub struct PageArena {
    memory: Arc<GuestMemory>,
    region: Arc<Region>,
    pages: u32,
    /// Files placed here may be cut off by their owner.
    _watched: Option<lost::Slot>,
}

impl PageArena {
    /// Takes addresses for `pages` slots. Pages of our own are taken from the system on first touch.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn reserve(pages: u32) -> io::Result<PageArena> {
        if rustix::param::page_size() != PAGE_BYTES as usize {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "grants need a host with pages of 4096 bytes"));
        }
        let region = Arc::new(Region::apart(pages.max(1) as usize * PAGE_BYTES as usize)?);
        let memory = GuestMemory::new(vec![Arc::clone(&region)]).map_err(io::Error::other)?;
        let _watched = lost::watch(region.host_address() as usize, region.len() as usize);
        Ok(PageArena { memory: Arc::new(memory), region, pages, _watched })
    }

    /// Slots.
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// The slots as a memory table: slot `n` starts at guest address `n` times [`PAGE_BYTES`].
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Puts `count` pages of a file from `offset` into the slots from `first`, in place of what they held.
    ///
    /// # Errors
    /// When the slots are not in the arena, or the system refuses; then they hold what they held, or zero pages of our own.
    pub fn place(&self, first: PageSlot, count: u32, file: &impl AsFd, offset: u64, writable: bool) -> io::Result<()> {
        let (start, len) = self.stretch(first, count)?;
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: `stretch` has checked that the range is inside the arena's own mapping, which lives as long as `self`; what was
        // there is accessed only as plain bytes that may change at any moment.
        let placed =
            unsafe { rustix::mm::mmap(start, len, protection, MapFlags::SHARED | MapFlags::FIXED, file, offset) };
        placed.map(|_| ()).map_err(|error| {
            self.mend(start, len);
            error.into()
        })
    }

    /// Fills the hole that a refused mapping may leave: the kernel takes out what was there before it asks the file, and a file that
    /// refuses then (`gntdev` does, for a grant that is not there) leaves nothing.
    fn mend(&self, start: *mut c_void, len: usize) {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE;
        // SAFETY: the range is in our own addresses. It takes no place but that of a hole, which nobody else can have filled:
        // the addresses are given to nobody who does not ask for them.
        match unsafe { rustix::mm::mmap_anonymous(start, len, protection, flags) } {
            // Nothing had been taken out.
            Ok(_) | Err(Errno::EXIST) => {}
            // A hole would let whoever touches it die later, and elsewhere.
            Err(error) => panic!("the system has no room to fill a hole in page slots: {error}"),
        }
    }

    /// Puts zero pages of our own into the slots, in place of what they held: the memory behind them goes back to the system, and
    /// pages of a file are let go.
    ///
    /// # Errors
    /// When the slots are not in the arena, or the system refuses; then they hold what they held.
    pub fn clear(&self, first: PageSlot, count: u32) -> io::Result<()> {
        let (start, len) = self.stretch(first, count)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: as in `place`.
        unsafe { rustix::mm::mmap_anonymous(start, len, protection, flags)? };
        Ok(())
    }

    /// The address of `len` bytes from byte `at` of a slot in this process, for system calls. They may reach into the slots after
    /// it. `None` when they are not all in the arena.
    #[inline]
    pub fn host_address(&self, slot: PageSlot, at: u32, len: u32) -> Option<u64> {
        let start = slot.address(at).0;
        (start + u64::from(len) <= self.region.len()).then(|| self.region.host_address() + start)
    }

    fn stretch(&self, first: PageSlot, count: u32) -> io::Result<(*mut c_void, usize)> {
        let bytes = count.checked_mul(PAGE_BYTES).filter(|bytes| *bytes > 0);
        let address = bytes.and_then(|bytes| self.host_address(first, 0, bytes));
        match (address, bytes) {
            (Some(address), Some(bytes)) => {
                Ok((std::ptr::with_exposed_provenance_mut(address as usize), bytes as usize))
            }
            _ => {
                let text = format!("found {count} pages at slot {}, expected 1 or more of {}", first.0, self.pages);
                Err(io::Error::new(io::ErrorKind::InvalidInput, text))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::create_memfd;

    fn byte(arena: &PageArena, slot: u32) -> u8 {
        let mut found = [0];
        arena.memory().read(PageSlot(slot).address(7), &mut found).unwrap();
        found[0]
    }

    #[test]
    fn pages_come_and_go_in_slots() {
        let arena = PageArena::reserve(4).unwrap();
        arena.memory().write(GuestAddress(0), &[1; 4 * PAGE_BYTES as usize]).unwrap();
        let file = create_memfd("t", 3 * u64::from(PAGE_BYTES)).unwrap();
        rustix::io::pwrite(&file, &[9; PAGE_BYTES as usize], PAGE_BYTES.into()).unwrap();
        arena.place(PageSlot(2), 2, &file, 0, true).unwrap();
        assert_eq!([0, 1, 2, 3].map(|slot| byte(&arena, slot)), [1, 1, 0, 9]);
        arena.memory().write(PageSlot(2).address(7), &[5]).unwrap();
        let mut found = [0; 8];
        rustix::io::pread(&file, &mut found, 0).unwrap();
        assert_eq!(found[7], 5, "the file's own page");
        arena.clear(PageSlot(1), 2).unwrap();
        assert_eq!([0, 1, 2, 3].map(|slot| byte(&arena, slot)), [1, 0, 0, 9]);
    }

    #[test]
    fn a_file_that_refuses_late_leaves_no_hole() {
        let arena = PageArena::reserve(4).unwrap();
        arena.memory().write(GuestAddress(0), &[1; 4 * PAGE_BYTES as usize]).unwrap();
        // A socket says no only when what was there before is gone.
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        for first in [1, 0, 2] {
            assert!(arena.place(PageSlot(first), 2, &socket, 0, true).is_err());
            // Whoever touches a hole dies.
            assert_eq!([first, first + 1].map(|slot| byte(&arena, slot)), [0, 0]);
        }
        // An error that is found before anything is taken out.
        arena.memory().write(GuestAddress(0), &[1; 4 * PAGE_BYTES as usize]).unwrap();
        let file = create_memfd("t", PAGE_BYTES.into()).unwrap();
        assert!(arena.place(PageSlot(1), 2, &file, 1, true).is_err());
        assert_eq!([0, 1, 2, 3].map(|slot| byte(&arena, slot)), [1; 4]);
    }

    /// A hole that is there for a moment must not be where other threads' memory goes.
    #[test]
    fn arenas_lie_apart_from_what_the_system_places() {
        let arenas: Vec<PageArena> = (0..3).map(|_| PageArena::reserve(64).unwrap()).collect();
        let placed = crate::Mapping::anonymous(4096).unwrap();
        for arena in &arenas {
            let start = arena.host_address(PageSlot(0), 0, 1).unwrap() as usize;
            assert!((0x2000_0000_0000..0x2800_0000_0000).contains(&start), "{start:#x}");
            assert!(start < placed.address(0).as_ptr() as usize);
        }
    }

    #[test]
    fn slots_outside_the_arena_are_refused() {
        let arena = PageArena::reserve(2).unwrap();
        for (first, count) in [(2, 1), (0, 3), (1, 2), (0, 0), (u32::MAX, 1), (1, u32::MAX)] {
            assert!(arena.clear(PageSlot(first), count).is_err(), "{count} at {first}");
        }
        assert!(arena.host_address(PageSlot(1), 4095, 1).is_some());
        assert!(arena.host_address(PageSlot(1), 4095, 2).is_none());
        assert!(arena.host_address(PageSlot(u32::MAX), u32::MAX, u32::MAX).is_none());
    }

    #[test]
    fn a_file_that_is_cut_off_turns_into_zeroes() {
        let arena = PageArena::reserve(2).unwrap();
        let file = create_memfd("t", PAGE_BYTES.into()).unwrap();
        arena.place(PageSlot(1), 1, &file, 0, true).unwrap();
        rustix::fs::ftruncate(&file, 0).unwrap();
        assert_eq!(byte(&arena, 1), 0);
    }
}
