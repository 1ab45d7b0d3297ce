//! SIGBUS handling: keeps the process alive when memory behind a mapping is lost, because its owner has truncated the
//! file or the hardware has failed.
//!
//! An access to a page past the end of a file raises SIGBUS. Its default action would end the daemon and with it all
//! disks of other guests, because of one hostile or crashed VMM. The handler finds the mapping in a table, marks it as
//! lost and maps a private zero page over the accessed page, so that the access returns. Other lost pages stay as they
//! are: the kernel refuses I/O to them. Readers of memory check [`losses`] afterwards, and so never take the zeroes for
//! data.
//!
//! A SIGBUS that a process has sent is ignored. Any other SIGBUS goes to the handler that was installed before (by
//! default: the process ends with a core dump).

use std::ffi::{c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU64, AtomicUsize, Ordering, compiler_fence, fence};
use std::sync::{Mutex, Once, OnceLock};

use mqblk_core::MappingBudget;
use mqblk_core::lock::lock;

/// Slots of a chunk of the table.
const CHUNK_SLOTS: usize = 4096;
/// Maximum of chunks: 1 Mi mappings. The kernel's default (`vm.max_map_count`) allows a process 65,530.
const MAX_CHUNKS: usize = 256;

/// Reason of a loss of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryLoss {
    /// The file behind it is shorter than the mapping.
    Truncated,
    /// The hardware has reported an error in it (BUS_MCEERR_AR).
    HardwareError,
}

impl std::fmt::Display for MemoryLoss {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            MemoryLoss::Truncated => "the file behind it was truncated",
            MemoryLoss::HardwareError => "the hardware reported a memory error",
        })
    }
}

const NO_LOSS: u8 = 0;
const TRUNCATED: u8 = 1;
const HARDWARE_ERROR: u8 = 2;

/// A watched mapping. Written under the lock of the free list, except `loss`, and read by the handler without it.
struct WatchedRange {
    /// Odd while `start`, `len` and `page` are being changed: a reader compares it before and after.
    version: AtomicUsize,
    /// 0: the slot is free.
    start: AtomicUsize,
    len: AtomicUsize,
    /// Page size of the mapping.
    page: AtomicUsize,
    loss: AtomicU8,
    /// Mappings of the pages that replace lost ones: held until the slot is free.
    held: AtomicU64,
}

/// The range of a slot, as one consistent copy.
#[derive(Clone, Copy)]
struct Range {
    start: usize,
    len: usize,
    page: usize,
}

impl WatchedRange {
    fn free() -> WatchedRange {
        WatchedRange {
            version: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            page: AtomicUsize::new(0),
            loss: AtomicU8::new(NO_LOSS),
            held: AtomicU64::new(0),
        }
    }

    /// Sets the range. One thread at a time.
    fn set(&self, range: Range) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(range.start, Ordering::Relaxed);
        self.len.store(range.len, Ordering::Relaxed);
        self.page.store(range.page, Ordering::Relaxed);
        self.version.store(version.wrapping_add(2), Ordering::Release);
    }

    /// Returns the range if `address` is in it. `None` for a slot that is being changed: an access to its mapping is
    /// then impossible, since a mapping is watched before its first access and until after its last one.
    fn find(&self, address: usize) -> Option<Range> {
        let version = self.version.load(Ordering::Acquire);
        let range = Range {
            start: self.start.load(Ordering::Relaxed),
            len: self.len.load(Ordering::Relaxed),
            page: self.page.load(Ordering::Relaxed),
        };
        fence(Ordering::Acquire);
        let consistent = version.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == version;
        (consistent && range.start != 0 && address.wrapping_sub(range.start) < range.len).then_some(range)
    }
}

type Chunk = [WatchedRange; CHUNK_SLOTS];

/// The table grows by chunks, which are never freed: the handler may read them at any time.
static CHUNKS: [AtomicPtr<Chunk>; MAX_CHUNKS] = [const { AtomicPtr::new(null_mut()) }; MAX_CHUNKS];

/// Indices of free slots of the chunks that exist.
static FREE_SLOTS: Mutex<Vec<u32>> = Mutex::new(Vec::new());

/// Number of accesses that found memory lost.
static LOSSES: AtomicUsize = AtomicUsize::new(0);

/// Returns the number of accesses of this process that found memory lost. After a change between two calls in one
/// thread, an access between them, of this or another thread, has read zeroes in the place of data.
#[inline]
pub(crate) fn losses() -> usize {
    // The handler runs in the thread that accesses: only the compiler could move the access past this load.
    compiler_fence(Ordering::SeqCst);
    LOSSES.load(Ordering::Acquire)
}

/// Returns a chunk, if it exists.
fn chunk(chunk: &'static AtomicPtr<Chunk>) -> Option<&'static Chunk> {
    // SAFETY: a chunk is null, or was leaked by `add_chunk` and is never freed.
    unsafe { chunk.load(Ordering::Acquire).as_ref() }
}

fn slot(index: u32) -> Option<&'static WatchedRange> {
    let index = index as usize;
    Some(&chunk(CHUNKS.get(index / CHUNK_SLOTS)?)?[index % CHUNK_SLOTS])
}

/// Returns the slot of the watched mapping that contains `address`, and its range. Mappings do not overlap, so there is
/// at most one.
fn find(address: usize) -> Option<(&'static WatchedRange, Range)> {
    let mut slots = CHUNKS.iter().map_while(chunk).flatten();
    slots.find_map(|slot| Some((slot, slot.find(address)?)))
}

/// Adds a chunk. Returns false at the maximum.
fn add_chunk(free: &mut Vec<u32>) -> bool {
    let Some(number) = CHUNKS.iter().position(|chunk| chunk.load(Ordering::Relaxed).is_null()) else { return false };
    let slots: Box<[WatchedRange]> = (0..CHUNK_SLOTS).map(|_| WatchedRange::free()).collect();
    let Ok(chunk) = Box::<Chunk>::try_from(slots) else { return false };
    CHUNKS[number].store(Box::into_raw(chunk), Ordering::Release);
    let first = (number * CHUNK_SLOTS) as u32;
    free.extend((first..first + CHUNK_SLOTS as u32).rev());
    true
}

/// A slot of the table, freed on drop.
#[derive(Debug)]
pub(crate) struct WatchSlot(u32);

impl WatchSlot {
    /// Returns the reason if memory of the mapping was lost.
    pub(crate) fn loss(&self) -> Option<MemoryLoss> {
        match slot(self.0)?.loss.load(Ordering::Relaxed) {
            TRUNCATED => Some(MemoryLoss::Truncated),
            HARDWARE_ERROR => Some(MemoryLoss::HardwareError),
            _ => None,
        }
    }
}

impl Drop for WatchSlot {
    fn drop(&mut self) {
        let mut free = lock(&FREE_SLOTS);
        if let Some(range) = slot(self.0) {
            range.set(Range { start: 0, len: 0, page: 0 });
            MappingBudget::of_process().release(range.held.swap(0, Ordering::Relaxed));
        }
        free.push(self.0);
    }
}

/// Watches `len` bytes at `start`, a mapping of pages of `page` bytes, until the slot is dropped.
///
/// # Errors
/// When the table is full.
pub(crate) fn watch(start: usize, len: usize, page: usize) -> io::Result<WatchSlot> {
    static INSTALL: Once = Once::new();
    INSTALL.call_once(install);
    let mut free = lock(&FREE_SLOTS);
    if free.is_empty() && !add_chunk(&mut free) {
        let text = format!("found {} mappings of shared memory, expected at most as many", MAX_CHUNKS * CHUNK_SLOTS);
        return Err(io::Error::new(io::ErrorKind::OutOfMemory, text));
    }
    let index = free.pop().ok_or(io::ErrorKind::OutOfMemory)?;
    let range = slot(index).ok_or(io::ErrorKind::OutOfMemory)?;
    range.loss.store(NO_LOSS, Ordering::Relaxed);
    range.set(Range { start, len, page });
    Ok(WatchSlot(index))
}

/// Returns true if an access has found memory of the mapping that contains a host address lost. For users of lent
/// addresses.
#[inline]
pub fn is_address_lost(address: u64) -> bool {
    losses() != 0 && find_loss(address as usize)
}

#[cold]
fn find_loss(address: usize) -> bool {
    find(address).is_some_and(|(slot, _)| slot.loss.load(Ordering::Relaxed) != NO_LOSS)
}

/// The SIGBUS action that was installed before.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

fn install() {
    // SAFETY: called once, before any mapping is watched. The handler only uses atomics, mmap and sigaction, all of
    // which are allowed in a signal handler. All-zero is a valid sigaction (default action, empty mask).
    unsafe {
        let mut action: libc::sigaction = MaybeUninit::zeroed().assume_init();
        let mut previous: libc::sigaction = MaybeUninit::zeroed().assume_init();
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigaction(libc::SIGBUS, null(), &mut previous);
        PREVIOUS.get_or_init(|| previous);
        libc::sigaction(libc::SIGBUS, &action, null_mut());
    }
}

/// Maps private zero pages at `start`, which is in a watched mapping. Returns false if the system refuses.
fn place_zeroes(start: usize, len: usize) -> bool {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: only pages of a watched mapping are replaced. Its users copy bytes and hold no references into it.
    let placed = unsafe { libc::mmap(start as *mut c_void, len, protection, flags, -1, 0) };
    placed != libc::MAP_FAILED
}

/// Marks the watched mapping that contains `address` as lost, and makes the address accessible. Returns false if there
/// is none. Called for an access of this thread, which keeps the mapping.
fn mark_lost(address: usize, loss: u8) -> bool {
    let Some((slot, range)) = find(address) else { return false };
    let _ = slot.loss.compare_exchange(NO_LOSS, loss, Ordering::Relaxed, Ordering::Relaxed);
    LOSSES.fetch_add(1, Ordering::Release);
    let page = range.start + (address - range.start) / range.page * range.page;
    if MappingBudget::of_process().try_take(MappingBudget::OF_PAGE) {
        slot.held.fetch_add(MappingBudget::OF_PAGE, Ordering::Relaxed);
        if place_zeroes(page, range.page) {
            return true;
        }
    }
    // All of it if no mappings are left for parts.
    place_zeroes(range.start, range.len)
}

extern "C" fn handler(signal: c_int, info: *mut libc::siginfo_t, _context: *mut c_void) {
    // SAFETY: the kernel passes a valid siginfo for SIGBUS.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    // Sent by a process, not by an access (sigaction(2): codes of kill, sigqueue and tgkill are 0 or negative).
    if code <= 0 {
        return;
    }
    // SAFETY: returns this thread's errno, which the interrupted code may be about to read.
    let (errno, saved) = unsafe { (libc::__errno_location(), *libc::__errno_location()) };
    let loss = match code {
        libc::BUS_MCEERR_AR => HARDWARE_ERROR,
        _ => TRUNCATED,
    };
    // An error without an access is advice. Its mapping may be dropped and its addresses reused while it is being
    // marked. An access to the page is reported again (BUS_MCEERR_AR).
    if code == libc::BUS_MCEERR_AO || mark_lost(address, loss) {
        // SAFETY: as above.
        unsafe { *errno = saved };
        return;
    }
    let Some(previous) = PREVIOUS.get() else { std::process::abort() };
    // SAFETY: a valid action. Restoring it and returning repeats the access, which then runs the previous action.
    unsafe { libc::sigaction(signal, previous, null_mut()) };
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use mqblk_core::ByteOffset;

    use super::{MemoryLoss, losses};
    use crate::{Mapping, create_memfd};

    /// Bytes of a page of the host.
    fn page_bytes() -> u64 {
        rustix::param::page_size() as u64
    }

    fn byte(mapping: &Mapping, at: u64) -> u8 {
        let mut found = [1];
        assert!(mapping.read(ByteOffset(at), &mut found));
        found[0]
    }

    #[test]
    fn a_truncated_file_is_marked_lost_and_reads_as_zeroes() {
        let file = create_memfd("t", 3 * page_bytes()).unwrap();
        let (mapping, _) = Mapping::from_file(&file, 0, 3 * page_bytes()).unwrap();
        assert!(mapping.write(ByteOffset(0), &[5]) && mapping.write(ByteOffset(2 * page_bytes()), &[7; 16]));
        file.set_len(page_bytes()).unwrap();
        assert_eq!(mapping.loss(), None, "not before an access");
        let before = losses();
        let mut found = [1; 16];
        assert!(mapping.read(ByteOffset(2 * page_bytes()), &mut found));
        assert_eq!(found, [0; 16]);
        assert_eq!(mapping.loss(), Some(MemoryLoss::Truncated));
        assert!(losses() > before);
        assert_eq!(byte(&mapping, 0), 5, "what is not lost stays");
        assert!(mapping.write(ByteOffset(page_bytes()), &[1; 16]), "the mapping stays usable");
    }

    #[test]
    fn all_of_many_mappings_are_watched() {
        const COUNT: usize = 9000;
        let file = create_memfd("t", 2 * page_bytes()).unwrap();
        let mappings: Vec<Mapping> =
            (0..COUNT).map(|_| Mapping::from_file(&file, 0, 2 * page_bytes()).expect("a mapping").0).collect();
        file.set_len(page_bytes()).unwrap();
        for mapping in &mappings {
            assert_eq!(byte(mapping, page_bytes()), 0);
            assert_eq!(mapping.loss(), Some(MemoryLoss::Truncated));
        }
    }

    #[test]
    fn a_signal_from_a_process_is_ignored() {
        let file = create_memfd("t", page_bytes()).unwrap();
        let (mapping, _) = Mapping::from_file(&file, 0, page_bytes()).unwrap();
        for _ in 0..2 {
            // SAFETY: raising a signal whose handler is installed.
            assert_eq!(unsafe { libc::raise(libc::SIGBUS) }, 0);
        }
        assert_eq!(mapping.loss(), None);
        file.set_len(0).unwrap();
        assert_eq!(byte(&mapping, 0), 0, "accesses are handled as before");
        assert_eq!(mapping.loss(), Some(MemoryLoss::Truncated));
    }

    /// Slots are reused by mappings of other sizes while accesses fault: only the faulting page may change.
    #[test]
    fn slots_are_reused_while_memory_is_lost() {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for pages in [1, 7, 64] {
                let stop = &stop;
                scope.spawn(move || {
                    let file = create_memfd("kept", pages * page_bytes()).unwrap();
                    while !stop.load(Ordering::Relaxed) {
                        let (mapping, _) = Mapping::from_file(&file, 0, pages * page_bytes()).unwrap();
                        for page in 0..pages {
                            assert!(mapping.write(ByteOffset(page * page_bytes()), &[9]));
                        }
                        for page in 0..pages {
                            assert_eq!(byte(&mapping, page * page_bytes()), 9, "page {page} of {pages}");
                        }
                        assert_eq!(mapping.loss(), None);
                    }
                });
            }
            for round in 0..1000_u64 {
                let pages = 2 + round % 30;
                let file = create_memfd("lost", pages * page_bytes()).unwrap();
                let (mapping, _) = Mapping::from_file(&file, 0, pages * page_bytes()).unwrap();
                file.set_len(page_bytes()).unwrap();
                for page in 1..pages {
                    assert_eq!(byte(&mapping, page * page_bytes()), 0);
                }
                assert_eq!(mapping.loss(), Some(MemoryLoss::Truncated));
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}
