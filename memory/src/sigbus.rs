//! SIGBUS handling: keeps the process alive when the file behind a mapping is truncated by its owner.
//!
//! An access to a page past the end raises SIGBUS, whose default action would end the daemon and with it every other guest's disks: one
//! hostile or crashed VMM must not do that. The handler looks the address up in a fixed table of watched mappings and replaces the whole
//! mapping with zero pages. The queue then finds a malformed ring and is stopped.
//!
//! Any other SIGBUS goes to the handler that was installed before (by default: the process ends with a core dump).

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Once, OnceLock};

/// Maximum number of watched mappings. Further mappings work but are not protected. 64 guests of 64 regions each fit.
const MAX_WATCHED: usize = 4096;

struct WatchedRange {
    /// 0: the slot is free. 1: being filled. Otherwise the start address.
    start: AtomicUsize,
    len: AtomicUsize,
    truncated: AtomicBool,
}

static TABLE: [WatchedRange; MAX_WATCHED] = [const {
    WatchedRange { start: AtomicUsize::new(0), len: AtomicUsize::new(0), truncated: AtomicBool::new(false) }
}; MAX_WATCHED];

/// A slot of the table, freed on drop.
#[derive(Debug)]
pub(crate) struct WatchSlot(usize);

impl WatchSlot {
    /// Returns true if the mapping was replaced by zero pages.
    pub(crate) fn is_truncated(&self) -> bool {
        TABLE[self.0].truncated.load(Ordering::Relaxed)
    }
}

impl Drop for WatchSlot {
    fn drop(&mut self) {
        TABLE[self.0].start.store(0, Ordering::Release);
    }
}

/// Watches `len` bytes at `start` until the slot is dropped. `None` when the table is full.
pub(crate) fn watch(start: usize, len: usize) -> Option<WatchSlot> {
    static INSTALL: Once = Once::new();
    INSTALL.call_once(install);
    let index = TABLE.iter().position(|slot| {
        slot.start.load(Ordering::Relaxed) == 0
            && slot.start.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok()
    })?;
    TABLE[index].truncated.store(false, Ordering::Relaxed);
    TABLE[index].len.store(len, Ordering::Relaxed);
    TABLE[index].start.store(start, Ordering::Release);
    Some(WatchSlot(index))
}

/// The SIGBUS action that was installed before.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

fn install() {
    // SAFETY: called once, before any mapping is watched. The handler only uses atomics, mmap and sigaction, all of which
    // are allowed in a signal handler. All-zero is a valid sigaction (default action, empty mask).
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

extern "C" fn handler(signal: c_int, info: *mut libc::siginfo_t, _context: *mut c_void) {
    // SAFETY: the kernel passes a valid siginfo for SIGBUS.
    let address = unsafe { (*info).si_addr() } as usize;
    for slot in &TABLE {
        let start = slot.start.load(Ordering::Acquire);
        if start > 1 && address.wrapping_sub(start) < slot.len.load(Ordering::Relaxed) {
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            let len = slot.len.load(Ordering::Relaxed);
            // SAFETY: only the watched mapping is replaced. Its users copy bytes and hold no references into it.
            let new = unsafe { libc::mmap(start as *mut c_void, len, protection, flags, -1, 0) };
            if new != libc::MAP_FAILED {
                slot.truncated.store(true, Ordering::Relaxed);
                return;
            }
        }
    }
    let Some(previous) = PREVIOUS.get() else { std::process::abort() };
    // SAFETY: a valid action. Restoring it and returning repeats the access, which then runs the previous action.
    unsafe { libc::sigaction(signal, previous, null_mut()) };
}

#[cfg(test)]
mod tests {
    use crate::{Mapping, create_memfd};
    use mqblk_core::ByteOffset;

    #[test]
    fn a_truncated_file_becomes_zeroes() {
        let file = create_memfd("t", 3 * 4096).unwrap();
        let (mapping, _) = Mapping::from_file(&file, 0, 3 * 4096).unwrap();
        assert!(mapping.write(ByteOffset(8192), &[7; 16]));
        file.set_len(4096).unwrap();
        let mut found = [1; 16];
        assert!(mapping.read(ByteOffset(8192), &mut found));
        assert_eq!(found, [0; 16]);
        assert!(mapping.is_truncated());
        assert!(mapping.write(ByteOffset(0), &[1; 16]), "the mapping stays usable");
    }
}
