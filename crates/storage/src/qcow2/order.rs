//! Content of a new cluster of the disk after a loss of power.
//!
//! The entry of a completed write is in the file and not on the disk, and the host writes data and tables in any order.
//! If the entry reaches the disk and the data of its cluster does not, the unwritten parts of the cluster read as old
//! bytes of the file, instead of the durable zeroes or the backing file's data from before. A new table would be read
//! from such bytes too.
//!
//! So free clusters are *holes*: clusters that are free at the first change, or freed later, are punched out of the
//! file, durably, before they are allocated. A lost write then leaves zeroes, the content of a range without a cluster.
//! If the content was different (a backing file), or clusters may not be holes (a file system without holes, a data
//! file, a freed compressed cluster), the data of a write is made durable before its entry is written, as QEMU does for
//! parts of clusters (`qcow2_cache_depends_on_flush`). This holds for whole ones too: each sector of a lost write is
//! the old or the new one, as on a disk.

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
    /// Parts of the file that are free at the opening, until the first change.
    free: Mutex<Vec<Range<u64>>>,
    /// True if a write to a new cluster waits for its data.
    waits: AtomicBool,
    syncs: SharedSync,
}

impl DataOrder {
    /// Creates it for a checked image. `free`: the free parts of its file; `None`: unknown.
    pub(super) fn new(header: &Header, free: Option<Vec<Range<u64>>>) -> DataOrder {
        let waits = header.backing.is_some() || header.external_data || free.is_none();
        DataOrder {
            cluster: header.cluster(),
            free: Mutex::new(free.unwrap_or_default()),
            waits: AtomicBool::new(waits),
            syncs: SharedSync::default(),
        }
    }

    /// Punches holes for free parts, durably. Called before the first change, and again if that fails.
    pub(super) fn punch_free(&self, file: &File) -> io::Result<()> {
        let mut free = lock(&self.free);
        if free.is_empty() {
            return Ok(());
        }
        // Holes left by another process cost no sync.
        free.retain(|range| has_data(file, range));
        if !free.is_empty() {
            free.iter().try_for_each(|range| self.punch(file, range.clone(), false))?;
            file.sync_data()?;
        }
        *free = Vec::new();
        Ok(())
    }

    /// Punches holes for the clusters of a range, before their entries change: a discard or zeroes may be visible
    /// early. `file` has the data. `keeps_space`: zeroes without releasing the host's space. Requires exclusive access;
    /// the caller makes it durable later.
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
            // Shared clusters stay.
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

    /// Records that clusters without holes become free.
    pub(super) fn frees_others(&self) {
        self.waits.store(true, Ordering::Relaxed);
    }

    /// Returns true if the data of a write must be durable before its entry is in the file.
    pub(super) fn waits(&self) -> bool {
        self.waits.load(Ordering::Relaxed)
    }

    /// Makes the data of a write durable before its entry is written, if needed. `fills`: a cluster of zeroes gets
    /// data; it may still hold old data.
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

/// A sync shared by all waiters: it covers writes from before its start.
#[derive(Debug, Default)]
struct SharedSync {
    state: Mutex<SyncState>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct SyncState {
    begun: u64,
    ended: u64,
    /// The last failed one: the kernel reports an error once.
    failed: u64,
    runs: bool,
}

impl SharedSync {
    fn state(&self) -> MutexGuard<'_, SyncState> {
        lock(&self.state)
    }

    /// Returns after a sync that began after this call.
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
            // The first one ends when others may wait for the second, which fails: only once, as in the kernel.
            let sync = || match runs.fetch_add(1, Ordering::SeqCst) {
                0 => {
                    std::thread::sleep(std::time::Duration::from_millis(1));
                    Ok(())
                }
                1 => Err(io::ErrorKind::StorageFull.into()),
                _ => Ok(()),
            };
            at_once(3, || _ = failed.fetch_add(u64::from(shared.run(sync).is_err()), Ordering::SeqCst));
            // Threads that did not share a sync ran their own.
            let (runs, failed) = (runs.into_inner(), failed.into_inner());
            assert_eq!(failed, if runs == 1 { 0 } else { 4 - runs }, "{runs} syncs of three threads");
            shared_once |= failed == 2;
            shared.run(|| Ok(())).unwrap();
        }
        assert!(shared_once, "two threads never waited for the same sync");
    }
}
