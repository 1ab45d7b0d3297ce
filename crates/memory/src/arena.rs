//! Page slots: a range of addresses in which single pages are mapped and unmapped.

use std::ffi::c_void;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::guest::GuestMemory;
use crate::region::{GuestAddress, Region};

/// Bytes of a granted page: `XEN_PAGE_SIZE`, independent of the host's page size.
pub const PAGE_BYTES: u32 = 4096;

/// Number of attempts to fill a hole, and the pause between two attempts.
const FILL_ATTEMPTS: u32 = 100;
const FILL_PAUSE: Duration = Duration::from_millis(1);

/// Index of one page in a [`PageArena`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageSlot(pub u32);

impl PageSlot {
    /// Returns the address of byte `at` of the slot in the arena's [`memory`](PageArena::memory).
    #[inline]
    pub const fn address(self, at: u32) -> GuestAddress {
        GuestAddress(self.0 as u64 * PAGE_BYTES as u64 + at as u64)
    }
}

/// A range of addresses divided into page slots. A slot holds a private page, zero at first, or a page of a file that
/// [`map_file`](Self::map_file) mapped there (for a grant: of `/dev/xen/gntdev`). A slot is never a hole: an access to
/// a slot that was cleared meanwhile hits other bytes, but never faults and never hits other memory. So *memory is
/// mapped while anything may touch it* holds for the whole arena as long as it lives.
///
/// Slots are the guest addresses of a [`GuestMemory`] table with one region, so buffers, rings and copies work in an
/// arena as in a guest's memory. Adjacent slots are contiguous.
#[derive(Debug)]
pub struct PageArena {
    memory: Arc<GuestMemory>,
    region: Arc<Region>,
    pages: u32,
}

impl PageArena {
    /// Reserves addresses for `pages` slots. Private pages are allocated on first touch.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn reserve(pages: u32) -> io::Result<PageArena> {
        if rustix::param::page_size() != PAGE_BYTES as usize {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "grants need a host with pages of 4096 bytes"));
        }
        let region = Arc::new(Region::anonymous_isolated(pages.max(1) as usize * PAGE_BYTES as usize)?);
        let memory = GuestMemory::new(vec![Arc::clone(&region)]).map_err(io::Error::other)?;
        Ok(PageArena { memory: Arc::new(memory), region, pages })
    }

    /// Returns the number of slots.
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// Returns the slots as a memory table: slot `n` starts at guest address `n` times [`PAGE_BYTES`].
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Maps `count` pages of a file from `offset` into the slots from `first`, replacing their content.
    ///
    /// # Errors
    /// When the slots are not in the arena, or the system refuses. The slots then hold what they held before, or
    /// private zero pages.
    pub fn map_file(
        &self,
        first: PageSlot,
        count: u32,
        file: &impl AsFd,
        offset: u64,
        writable: bool,
    ) -> io::Result<()> {
        let (start, len) = self.slot_range(first, count)?;
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: `slot_range` has checked that the range is inside the arena's own mapping, which lives as long as
        // `self`. The old content is only accessed as plain bytes that may change at any moment.
        let placed =
            unsafe { rustix::mm::mmap(start, len, protection, MapFlags::SHARED | MapFlags::FIXED, file, offset) };
        placed.map(|_| ()).map_err(|error| {
            self.fill_hole(start, len);
            error.into()
        })
    }

    /// Fills the hole that a refused mapping may leave. The kernel unmaps the old content before it calls the file, and
    /// a file that refuses then (`gntdev` does, for a grant that does not exist) leaves nothing mapped.
    fn fill_hole(&self, start: *mut c_void, len: usize) {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE;
        // SAFETY: the range is inside the arena's own addresses. FIXED_NOREPLACE only fills a hole, which nobody else
        // can have filled: the kernel does not place other mappings there (see `Mapping::anonymous_isolated`).
        let fill = || unsafe { rustix::mm::mmap_anonymous(start, len, protection, flags) };
        for _ in 0..FILL_ATTEMPTS {
            match fill() {
                // `EXIST`: nothing had been unmapped.
                Ok(_) | Err(Errno::EXIST) => return,
                // At the limit of mappings (vm.max_map_count) the kernel refuses both calls before it checks the
                // addresses.
                Err(_) if is_mapped(start, len) => return,
                // Others have taken the mappings that the hole has freed. They release them, or run into the limit and
                // give up.
                Err(_) => std::thread::sleep(FILL_PAUSE),
            }
        }
        // A later access to a hole would crash the process.
        panic!(
            "page slots stay a hole: found no mapping free for it (vm.max_map_count, or a limit of address space), expected one"
        );
    }

    /// Maps private zero pages into the slots, replacing their content: their memory is returned to the system, and
    /// pages of a file are unmapped.
    ///
    /// # Errors
    /// When the slots are not in the arena, or the system refuses. The slots are unchanged then.
    pub fn map_zero_pages(&self, first: PageSlot, count: u32) -> io::Result<()> {
        let (start, len) = self.slot_range(first, count)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: as in `map_file`.
        unsafe { rustix::mm::mmap_anonymous(start, len, protection, flags)? };
        Ok(())
    }

    /// Returns the host address of `len` bytes from byte `at` of a slot, for system calls. They may extend into the
    /// following slots. `None` unless all of them are in the arena.
    #[inline]
    pub fn host_address(&self, slot: PageSlot, at: u32, len: u32) -> Option<u64> {
        let start = slot.address(at).0;
        (start + u64::from(len) <= self.region.len()).then(|| self.region.host_address() + start)
    }

    fn slot_range(&self, first: PageSlot, count: u32) -> io::Result<(*mut c_void, usize)> {
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

/// Returns true if no page of the range is a hole: `ENOMEM` of madvise(2), by a call that the sandbox allows. The
/// advice changes nothing.
fn is_mapped(start: *mut c_void, len: usize) -> bool {
    // SAFETY: the advice changes no content, and the kernel checks the addresses.
    unsafe { rustix::mm::madvise(start, len, Advice::Normal) }.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::create_memfd;

    /// Returns an arena. `None`: pages of this host are longer than Xen's, and it is refused.
    fn reserve(pages: u32) -> Option<PageArena> {
        let arena = PageArena::reserve(pages);
        if rustix::param::page_size() == PAGE_BYTES as usize {
            return Some(arena.unwrap());
        }
        assert_eq!(arena.unwrap_err().kind(), io::ErrorKind::Unsupported);
        None
    }

    fn byte(arena: &PageArena, slot: u32) -> u8 {
        let mut found = [0];
        arena.memory().read(PageSlot(slot).address(7), &mut found).unwrap();
        found[0]
    }

    #[test]
    fn pages_are_mapped_and_cleared_in_slots() {
        let Some(arena) = reserve(4) else { return };
        arena.memory().write(GuestAddress(0), &[1; 4 * PAGE_BYTES as usize]).unwrap();
        let file = create_memfd("t", 3 * u64::from(PAGE_BYTES)).unwrap();
        rustix::io::pwrite(&file, &[9; PAGE_BYTES as usize], PAGE_BYTES.into()).unwrap();
        arena.map_file(PageSlot(2), 2, &file, 0, true).unwrap();
        assert_eq!([0, 1, 2, 3].map(|slot| byte(&arena, slot)), [1, 1, 0, 9]);
        arena.memory().write(PageSlot(2).address(7), &[5]).unwrap();
        let mut found = [0; 8];
        rustix::io::pread(&file, &mut found, 0).unwrap();
        assert_eq!(found[7], 5, "the file's own page");
        arena.map_zero_pages(PageSlot(1), 2).unwrap();
        assert_eq!([0, 1, 2, 3].map(|slot| byte(&arena, slot)), [1, 0, 0, 9]);
    }

    /// Access to memory that outlives its arena does not crash.
    #[test]
    fn memory_that_outlives_its_arena_is_watched() {
        let Some(arena) = reserve(2) else { return };
        let file = create_memfd("t", u64::from(PAGE_BYTES)).unwrap();
        arena.map_file(PageSlot(1), 1, &file, 0, true).unwrap();
        let memory = Arc::clone(arena.memory());
        drop(arena);
        file.set_len(0).unwrap();
        let mut found = [1];
        // Lost, or zeroes.
        let _ = memory.read(PageSlot(1).address(0), &mut found);
        assert_eq!(found, [0]);
    }

    #[test]
    fn a_file_that_refuses_late_leaves_no_hole() {
        let Some(arena) = reserve(4) else { return };
        arena.memory().write(GuestAddress(0), &[1; 4 * PAGE_BYTES as usize]).unwrap();
        // A socket refuses only after the old content was unmapped.
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        for first in [1, 0, 2] {
            assert!(arena.map_file(PageSlot(first), 2, &socket, 0, true).is_err());
            // An access to a hole would crash.
            assert_eq!([first, first + 1].map(|slot| byte(&arena, slot)), [0, 0]);
        }
        // An error that is detected before anything is unmapped.
        arena.memory().write(GuestAddress(0), &[1; 4 * PAGE_BYTES as usize]).unwrap();
        let file = create_memfd("t", PAGE_BYTES.into()).unwrap();
        assert!(arena.map_file(PageSlot(1), 2, &file, 1, true).is_err());
        assert_eq!([0, 1, 2, 3].map(|slot| byte(&arena, slot)), [1; 4]);
    }

    /// In a process of its own, because no other test could map anything meanwhile.
    #[test]
    fn at_the_limit_of_mappings_a_page_is_refused_and_the_slots_stay() {
        const CHILD: &str = "MQBLK_TEST_MAPPING_LIMIT";
        const NAME: &str = "arena::tests::at_the_limit_of_mappings_a_page_is_refused_and_the_slots_stay";
        if std::env::var_os(CHILD).is_none() {
            let program = std::env::current_exe().unwrap();
            let mut child = std::process::Command::new(program);
            let out =
                child.args(["--exact", NAME, "--nocapture", "--test-threads=1"]).env(CHILD, "1").output().unwrap();
            let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
            assert!(out.status.success() && text.contains("1 passed"), "{text}");
            return;
        }
        let Some(arena) = reserve(4) else { return };
        arena.memory().write(GuestAddress(0), &[1; 4 * PAGE_BYTES as usize]).unwrap();
        let file = create_memfd("t", 2 * u64::from(PAGE_BYTES)).unwrap();
        let mut placed = Vec::with_capacity(4 << 20);
        let refused = loop {
            // Neighbours that differ are not merged into one mapping.
            let protection = if placed.len() % 2 == 0 { ProtFlags::READ } else { ProtFlags::READ | ProtFlags::WRITE };
            let len = PAGE_BYTES as usize;
            // SAFETY: a new mapping at an address of the kernel's choice changes no existing memory.
            match unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, protection, MapFlags::PRIVATE) } {
                Ok(at) => placed.push(at),
                Err(error) => break error,
            }
        };
        assert_eq!(refused, Errno::NOMEM, "after {}", placed.len());
        let error = arena.map_file(PageSlot(1), 2, &file, 0, true).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::OutOfMemory);
        assert_eq!([0, 1, 2, 3].map(|slot| byte(&arena, slot)), [1; 4]);
        for at in placed.drain(..64) {
            // SAFETY: a mapping of this test, to which nothing refers.
            unsafe { rustix::mm::munmap(at, PAGE_BYTES as usize) }.unwrap();
        }
        arena.map_file(PageSlot(1), 2, &file, 0, true).unwrap();
        assert_eq!([0, 1, 2, 3].map(|slot| byte(&arena, slot)), [1, 0, 0, 1]);
    }

    /// Memory of other threads must never be mapped into a temporary hole.
    #[test]
    fn arenas_are_isolated_from_other_mappings() {
        let Some(arenas) = (0..3).map(|_| reserve(64)).collect::<Option<Vec<PageArena>>>() else { return };
        let placed = crate::Mapping::anonymous(4096).unwrap();
        for arena in &arenas {
            let start = arena.host_address(PageSlot(0), 0, 1).unwrap() as usize;
            assert!((0x2000_0000_0000..0x2800_0000_0000).contains(&start), "{start:#x}");
            assert!(start < placed.address(0).as_ptr() as usize);
        }
    }

    #[test]
    fn slots_outside_the_arena_are_refused() {
        let Some(arena) = reserve(2) else { return };
        for (first, count) in [(2, 1), (0, 3), (1, 2), (0, 0), (u32::MAX, 1), (1, u32::MAX)] {
            assert!(arena.map_zero_pages(PageSlot(first), count).is_err(), "{count} at {first}");
        }
        assert!(arena.host_address(PageSlot(1), 4095, 1).is_some());
        assert!(arena.host_address(PageSlot(1), 4095, 2).is_none());
        assert!(arena.host_address(PageSlot(u32::MAX), u32::MAX, u32::MAX).is_none());
    }

    #[test]
    fn a_truncated_file_reads_as_zeroes() {
        let Some(arena) = reserve(2) else { return };
        let file = create_memfd("t", PAGE_BYTES.into()).unwrap();
        arena.map_file(PageSlot(1), 1, &file, 0, true).unwrap();
        rustix::fs::ftruncate(&file, 0).unwrap();
        assert_eq!(byte(&arena, 1), 0);
    }
}
