//! What a loss of power may leave in a cluster that was just given to a range of the disk.
//!
//! The entry of a completed write is in the file and not on the disk, and the host writes data and tables in any order. If the entry reaches
//! the disk and the data of its cluster does not, the parts of the cluster that nobody has written read as whatever was in that place of the
//! file, where durable zeroes or the backing file's data were before. A new table would be read from such a place, too.
//!
//! So free clusters are *holes*: what is free when the image is changed first, and what is freed later, is punched out of the file, durably,
//! before it is given away. A lost write leaves zeroes then, which is what a range without a cluster was. Where it was something else (a
//! backing file), or clusters may be no holes (a file system that has none, a data file, a freed compressed cluster), the data of a write
//! is made durable before the entry is written, as QEMU does for parts of clusters (`qcow2_cache_depends_on_flush`). For whole ones, too: each
//! sector of a write that is lost is the old or the new one, as on a disk.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use imago::file::File as ImageFile;
use imago::{FormatAccess, Mapping};
use mqblk_core::lock::lock;
use rustix::fs::{FallocateFlags, SeekFrom, fallocate};
use rustix::io::Errno;

use super::header::Header;

/// Keeps data and tables of an image in the order that a loss of power needs.
#[derive(Debug)]
pub(super) struct DataOrder {
    cluster: u64,
    /// Parts of the file that are free since the image was opened, until the first change.
    free: Mutex<Vec<Range<u64>>>,
    /// A write to a cluster that is new waits for its data.
    waits: AtomicBool,
    syncs: SharedSync,
}

impl DataOrder {
    /// Creates it for an image that was checked. `free`: the parts of its file that are free; `None`: nobody knows.
    pub(super) fn new(header: &Header, free: Option<Vec<Range<u64>>>) -> DataOrder {
        let waits = header.backing.is_some() || header.external_data || free.is_none();
        DataOrder {
            cluster: header.cluster(),
            free: Mutex::new(free.unwrap_or_default()),
            waits: AtomicBool::new(waits),
            syncs: SharedSync::default(),
        }
    }

    /// Makes what is free a hole, durably. Called before the first change, and again if that fails.
    pub(super) fn punch_free(&self, file: &File) -> io::Result<()> {
        let mut free = lock(&self.free);
        if free.is_empty() {
            return Ok(());
        }
        // What is a hole already, as another process has left it, costs no sync.
        free.retain(|range| has_data(file, range));
        if !free.is_empty() {
            free.iter().try_for_each(|range| self.punch(file, range.clone(), false))?;
            file.sync_data()?;
        }
        *free = Vec::new();
        Ok(())
    }

    /// Makes the clusters of a range holes, before the entries that name them change: a discard or zeroes may be there early. `file` has the
    /// data. `keeps_space`: zeroes without giving the host's space back. Called by who has the image alone, and makes it durable later.
    pub(super) fn punch_range(
        &self,
        format: &FormatAccess<ImageFile>,
        file: &File,
        (start, end): (u64, u64),
        keeps_space: bool,
    ) -> io::Result<()> {
        let size = format.size();
        let end = if end >= size { size } else { end & !(self.cluster - 1) };
        let mut at = start.next_multiple_of(self.cluster);
        while at < end {
            let (mapping, len) = format.get_mapping(at, end - at)?;
            if len == 0 {
                break;
            }
            // What others use as well stays.
            if let Mapping::Raw { offset, writable: true, .. } = mapping {
                self.punch(file, offset..offset + len.next_multiple_of(self.cluster), keeps_space)?;
            }
            at += len;
        }
        Ok(())
    }

    fn punch(&self, file: &File, range: Range<u64>, keeps_space: bool) -> io::Result<()> {
        let how = if keeps_space { FallocateFlags::ZERO_RANGE } else { FallocateFlags::PUNCH_HOLE };
        let (at, len) = (range.start, range.end - range.start);
        match fallocate(file, how | FallocateFlags::KEEP_SIZE, at, len) {
            Err(Errno::OPNOTSUPP) if keeps_space => self.punch(file, range, false),
            Err(Errno::OPNOTSUPP) => {
                self.waits.store(true, Ordering::Relaxed);
                Ok(())
            }
            done => Ok(done?),
        }
    }

    /// Clusters become free that are no holes.
    pub(super) fn frees_others(&self) {
        self.waits.store(true, Ordering::Relaxed);
    }

    /// Returns true if the data of a write has to be durable before its entry is in the file.
    pub(super) fn waits(&self) -> bool {
        self.waits.load(Ordering::Relaxed)
    }

    /// Makes the data of a write durable, before its entry is written, if that is needed. `fills`: a cluster of zeroes gets data, which may be one
    /// that has its old data still.
    ///
    /// # Errors
    /// As `sync`.
    pub(super) fn data_first(&self, fills: bool, sync: impl Fn() -> io::Result<()>) -> io::Result<()> {
        if fills || self.waits() { self.syncs.run(sync) } else { Ok(()) }
    }
}

/// Returns true unless a range of a file is a hole.
fn has_data(file: &File, range: &Range<u64>) -> bool {
    match rustix::fs::seek(file, SeekFrom::Data(range.start)) {
        Ok(at) => at < range.end,
        Err(error) => error != Errno::NXIO,
    }
}

/// A sync that all who wait for one share: it covers what was written before it began.
#[derive(Debug, Default)]
struct SharedSync {
    state: Mutex<SyncState>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct SyncState {
    begun: u64,
    ended: u64,
    /// The last one that has failed: the kernel reports an error once.
    failed: u64,
    runs: bool,
}

impl SharedSync {
    fn state(&self) -> MutexGuard<'_, SyncState> {
        lock(&self.state)
    }

    /// Returns when a sync has ended that began after this call.
    fn run(&self, sync: impl Fn() -> io::Result<()>) -> io::Result<()> {
        let mut state = self.state();
        let needed = state.begun + 1;
        while state.ended < needed {
            if state.runs {
                state = self.ended.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            state.begun += 1;
            state.runs = true;
            let number = state.begun;
            drop(state);
            let done = sync();
            state = self.state();
            (state.runs, state.ended) = (false, number);
            if done.is_err() {
                state.failed = number;
            }
            self.ended.notify_all();
            done?;
        }
        match state.failed >= needed {
            true => Err(io::Error::other("the data could not be made durable before its table")),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    /// Calls `work` in several threads at once.
    fn at_once(threads: u64, work: impl Fn() + Sync) {
        std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(&work))));
    }

    #[test]
    fn a_sync_is_shared_by_those_who_came_before_it_began() {
        let (shared, runs) = (SharedSync::default(), AtomicU64::new(0));
        at_once(8, || {
            for _ in 0..100 {
                let before = runs.load(Ordering::SeqCst);
                let sync = || {
                    std::thread::yield_now();
                    runs.fetch_add(1, Ordering::SeqCst);
                    Ok(())
                };
                shared.run(sync).unwrap();
                assert!(runs.load(Ordering::SeqCst) > before, "one has ended since");
            }
        });
        assert!((100..=800).contains(&runs.into_inner()));
    }

    #[test]
    fn a_sync_that_fails_fails_for_all_who_shared_it() {
        let mut shared_once = false;
        for _ in 0..200 {
            let (shared, runs, failed) = (SharedSync::default(), AtomicU64::new(0), AtomicU64::new(0));
            // The first one ends when others may wait for the second, which is the one that fails: as with the kernel, only once.
            let sync = || match runs.fetch_add(1, Ordering::SeqCst) {
                0 => {
                    std::thread::sleep(std::time::Duration::from_millis(1));
                    Ok(())
                }
                1 => Err(io::ErrorKind::StorageFull.into()),
                _ => Ok(()),
            };
            at_once(3, || _ = failed.fetch_add(u64::from(shared.run(sync).is_err()), Ordering::SeqCst));
            // Who did not share a sync ran one of its own.
            let (runs, failed) = (runs.into_inner(), failed.into_inner());
            assert_eq!(failed, if runs == 1 { 0 } else { 4 - runs }, "{runs} syncs of three threads");
            shared_once |= failed == 2;
            shared.run(|| Ok(())).unwrap();
        }
        assert!(shared_once, "two threads never waited for the same sync");
    }
}
