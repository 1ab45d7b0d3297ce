//! The process's budget of mappings.
//!
//! Linux allows a process `vm.max_map_count` ranges of memory, 65,530 by default. When there are no more, `mmap` fails
//! for everybody: for another VMM's memory, for a grant, and for the signal stack of a new thread, where the standard
//! library ends the process. So everything that guests can multiply is held here first: mappings of their memory,
//! mapped grants and the threads that serve them. The unit is the kernel's range of memory, not the region, page or
//! thread that causes it.
//!
//! The last eighth is for threads, a quarter of that for mappings that are not counted: programs, libraries, the
//! allocator, rings.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// The default of `vm.max_map_count`.
const MAX_MAP_COUNT: u64 = 65_530;

/// Ranges of a thread: stack, signal stack and allocator arena, each with its guard.
const OF_THREAD: u64 = 6;

/// A budget of mappings, in ranges of memory. Shared by all threads; usable in a signal handler.
#[derive(Debug)]
pub struct MappingBudget {
    limit: u64,
    held: AtomicU64,
}

/// Mappings that are held until the value is dropped.
#[derive(Debug)]
pub struct HeldMappings {
    budget: &'static MappingBudget,
    count: u64,
}

static OF_PROCESS: OnceLock<MappingBudget> = OnceLock::new();

impl MappingBudget {
    /// Ranges of a page that is mapped among others: its own, and that of the pages behind it, which it separates from
    /// those before.
    pub const OF_PAGE: u64 = 2;

    /// Creates a budget of `limit` mappings.
    pub const fn new(limit: u64) -> MappingBudget {
        MappingBudget { limit, held: AtomicU64::new(0) }
    }

    /// Returns the process's budget: `vm.max_map_count` read at the first call, before a sandbox hides the file.
    pub fn of_process() -> &'static MappingBudget {
        OF_PROCESS.get_or_init(|| {
            let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
            MappingBudget::new(text.and_then(|text| text.trim().parse().ok()).unwrap_or(MAX_MAP_COUNT))
        })
    }

    /// Limits the process's budget to `limit` mappings, if it is not used yet: for tests.
    pub fn limit_process(limit: u64) {
        let _ = OF_PROCESS.set(MappingBudget::new(limit));
    }

    /// Returns the largest number of mappings.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Returns the number of mappings that are held.
    pub fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// Takes `count` mappings of the guests' part. Returns false, and takes none, if there are fewer.
    pub fn try_take(&self, count: u64) -> bool {
        self.take_of(count, self.limit - self.limit / 8)
    }

    /// Releases `count` mappings.
    pub fn release(&self, count: u64) {
        let before = self.held.fetch_sub(count, Ordering::Relaxed);
        debug_assert!(before >= count, "more is released than was taken");
    }

    /// Holds `count` mappings of the guests' part.
    ///
    /// # Errors
    /// When there are fewer; it names the limit to raise.
    pub fn hold(&'static self, count: u64) -> io::Result<HeldMappings> {
        if self.try_take(count) { Ok(HeldMappings { budget: self, count }) } else { Err(self.refused(count)) }
    }

    /// Holds the mappings of a thread.
    ///
    /// # Errors
    /// As [`hold`](Self::hold).
    pub fn hold_thread(&'static self) -> io::Result<HeldMappings> {
        match self.take_of(OF_THREAD, self.limit - self.limit / 32) {
            true => Ok(HeldMappings { budget: self, count: OF_THREAD }),
            false => Err(self.refused(OF_THREAD)),
        }
    }

    fn take_of(&self, count: u64, limit: u64) -> bool {
        let more = |held: u64| held.checked_add(count).filter(|held| *held <= limit);
        self.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    fn refused(&self, count: u64) -> io::Error {
        let (held, limit) = (self.held(), self.limit);
        let text = format!(
            "mappings: found {held} of the process's {limit} in use, expected room for {count} more (sysctl vm.max_map_count)"
        );
        io::Error::new(io::ErrorKind::OutOfMemory, text)
    }
}

impl Drop for HeldMappings {
    fn drop(&mut self) {
        self.budget.release(self.count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_guests_use_leaves_threads_theirs() {
        static BUDGET: MappingBudget = MappingBudget::new(800);
        let of_guests = BUDGET.hold(700).unwrap();
        let refused = BUDGET.hold(1).unwrap_err().to_string();
        let expected =
            "mappings: found 700 of the process's 800 in use, expected room for 1 more (sysctl vm.max_map_count)";
        assert_eq!(refused, expected);
        let mut threads: Vec<_> = (0..12).map(|_| BUDGET.hold_thread().unwrap()).collect();
        assert!(BUDGET.hold_thread().is_err(), "the rest is for what is not counted");
        threads.pop();
        assert!(BUDGET.hold_thread().is_ok() && BUDGET.hold(1).is_err());
        drop(of_guests);
        assert!(BUDGET.hold(600).is_ok());
        drop(threads);
        assert_eq!(BUDGET.held(), 0);
    }

    #[test]
    fn what_cannot_be_counted_is_refused() {
        let budget = MappingBudget::new(80);
        assert!(budget.try_take(70) && !budget.try_take(u64::MAX) && !budget.try_take(1));
        budget.release(70);
        assert_eq!(budget.held(), 0);
    }

    #[test]
    fn the_process_has_what_the_system_says() {
        let allowed = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
        assert_eq!(MappingBudget::of_process().limit().to_string(), allowed.trim());
    }
}
