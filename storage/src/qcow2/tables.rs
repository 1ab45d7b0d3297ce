//! When the library's tables are in the file.
//!
//! The library changes tables in memory. A guest outlives this process and is never asked to repeat a completed write: so the tables that a
//! write relies on are given to the host before it completes. Not to the disk: that is a flush. Writers share a write-out: one of them carries
//! it out, for all that were done when it began.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// What is known of the tables of an image.
#[derive(Debug, Default)]
pub(super) struct TableWriter {
    /// Changes that may be in memory only.
    unwritten: AtomicU64,
    rounds: Mutex<Rounds>,
    ended: Condvar,
}

/// Write-outs, counted.
#[derive(Debug, Default)]
struct Rounds {
    begun: u64,
    /// The last one that succeeded.
    written: u64,
    running: bool,
    /// A write-out panicked: there are no more.
    broken: bool,
}

/// A change that may be in memory only, until [`write_out`](Self::write_out) succeeds. Dropping it leaves the tables unwritten: later writes
/// to the image write them.
#[must_use = "the change is in memory only"]
pub(super) struct TableChange<'a>(&'a TableWriter);

impl TableChange<'_> {
    /// Writes out the tables. `flush` writes all that were changed in memory.
    ///
    /// # Errors
    /// As `flush`.
    pub(super) fn write_out(self, flush: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        self.0.write_out(flush)?;
        self.0.unwritten.fetch_sub(1, Ordering::SeqCst);
        Ok(())
    }
}

impl TableWriter {
    /// Begins a change. Called before the library makes it, so that nobody sees it and takes it for written.
    pub(super) fn begin(&self) -> TableChange<'_> {
        self.unwritten.fetch_add(1, Ordering::SeqCst);
        TableChange(self)
    }

    /// Writes out the tables if some may be in memory only: afterwards all that the caller has seen in them is in the file.
    ///
    /// # Errors
    /// As `flush`.
    pub(super) fn settle(&self, flush: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        if self.unwritten.load(Ordering::SeqCst) == 0 { Ok(()) } else { self.write_out(flush) }
    }

    fn lock(&self) -> MutexGuard<'_, Rounds> {
        self.rounds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a write-out that begins from now on, or carries it out. After a failed one each waiter carries out its own, and has its error.
    fn write_out(&self, flush: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let mut rounds = self.lock();
        let wanted = rounds.begun + 1;
        while rounds.running && rounds.written < wanted {
            rounds = self.ended.wait(rounds).unwrap_or_else(PoisonError::into_inner);
        }
        if rounds.written >= wanted {
            return Ok(());
        }
        if rounds.broken {
            return Err(super::image::gone());
        }
        rounds.begun += 1;
        rounds.running = true;
        let mut round = Round { writer: self, number: rounds.begun, result: None };
        drop(rounds);
        let result = flush();
        round.result = Some(result.is_ok());
        result
    }
}

/// A write-out that is carried out. Its end is told when it is dropped.
struct Round<'a> {
    writer: &'a TableWriter,
    number: u64,
    /// `None`: it panicked.
    result: Option<bool>,
}

impl Drop for Round<'_> {
    fn drop(&mut self) {
        let mut rounds = self.writer.lock();
        rounds.running = false;
        match self.result {
            Some(true) => rounds.written = self.number,
            Some(false) => {}
            None => rounds.broken = true,
        }
        drop(rounds);
        self.writer.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRITERS: usize = 8;
    const CHANGES: u64 = 2000;

    /// A table in memory and its file, one entry for each writer.
    #[derive(Default)]
    struct Table {
        memory: [AtomicU64; WRITERS],
        file: [AtomicU64; WRITERS],
        flushes: AtomicU64,
    }

    impl Table {
        /// Copies entry by entry, as the library does beside writers. Every seventh fails.
        fn flush(&self) -> io::Result<()> {
            let number = self.flushes.fetch_add(1, Ordering::Relaxed);
            for (memory, file) in self.memory.iter().zip(&self.file) {
                file.store(memory.load(Ordering::SeqCst), Ordering::SeqCst);
                std::thread::yield_now();
            }
            if number % 7 == 6 { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
        }
    }

    #[test]
    fn a_change_is_in_the_file_when_it_is_written_out() {
        let (writer, table) = (TableWriter::default(), Table::default());
        let failed = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for own in 0..WRITERS {
                let (writer, table, failed) = (&writer, &table, &failed);
                scope.spawn(move || {
                    for value in 1..=CHANGES {
                        let change = writer.begin();
                        table.memory[own].store(value, Ordering::SeqCst);
                        match change.write_out(|| table.flush()) {
                            Ok(()) => assert_eq!(table.file[own].load(Ordering::SeqCst), value),
                            Err(_) => drop(failed.fetch_add(1, Ordering::Relaxed)),
                        }
                        // Of another writer: what was seen in memory is in the file.
                        let other = (own + 1) % WRITERS;
                        let seen = table.memory[other].load(Ordering::SeqCst);
                        if writer.settle(|| table.flush()).is_ok() {
                            assert!(table.file[other].load(Ordering::SeqCst) >= seen);
                        }
                    }
                });
            }
        });
        let flushes = table.flushes.into_inner();
        assert!(flushes < 2 * WRITERS as u64 * CHANGES, "writers share a flush: {flushes}");
        // What was not written counts for ever.
        assert_eq!(writer.unwritten.into_inner(), failed.into_inner());
    }

    #[test]
    fn nothing_is_written_out_without_a_change_or_after_a_panic() {
        let writer = TableWriter::default();
        assert!(writer.settle(|| panic!("nothing was changed")).is_ok());
        let change = writer.begin();
        let panicked =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| change.write_out(|| panic!("a library"))));
        assert!(panicked.is_err());
        assert!(writer.settle(|| panic!("nothing of it may be written")).is_err());
    }
}
