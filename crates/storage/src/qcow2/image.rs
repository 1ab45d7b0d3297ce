//! Requests to an open image. Called by the threads of the disk.

use std::fs::File;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Display;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use imago::file::File as ImageFile;
use imago::format::PreallocateMode;
use imago::{FormatAccess, Mapping};
use mqblk_core::lock::lock;
use mqblk_core::{ByteLen, ByteOffset};

use super::direct::Direct;
use super::direct::gate::ShutGate;
use super::header::Header;
use super::layers::{ChainFiles, Loaded};
use super::tables::TableChange;
use crate::blocking::BlockingStorage;
use crate::file::lock;

/// Zeroes of one write if the image has no zero clusters.
static ZEROES: [u8; 1 << 16] = [0; 1 << 16];

/// The process that has an image.
#[derive(Debug, Default)]
pub(super) struct Holder {
    /// Number of users here: devices whose queues run.
    pub(super) users: usize,
    /// True if the other process that has its files may have it loaded.
    pub(super) has_left: bool,
}

/// An open image.
///
/// The library updates tables in memory and writes them at a flush or for lack of room. It writes the L1 table at once,
/// even before its refcounts. So a killed writer leaves refcounts missing. Therefore the dirty bit is set, durably,
/// before the first change, and cleared when the image is [closed](Self::close): any process (QEMU too) that opens it
/// meanwhile repairs the refcounts first. The tables of a completed write are in the file, though not on the disk
/// ([`TableWriter`](super::tables::TableWriter)).
pub(super) struct Image {
    /// Shared by reads and writes; exclusive for operations that remove mappings (discard, resize, close). `None`: not
    /// loaded.
    loaded: RwLock<Option<Loaded>>,
    pub(super) files: ChainFiles,
    /// True if the image may be changed: the dirty bit is set, and free clusters are holes.
    dirty: AtomicBool,
    /// Serialises the preparation of the first change.
    marking: Mutex<()>,
    /// True if the library panicked: its memory may be corrupt, and must not be written.
    failed: AtomicBool,
    /// Requests of workers that bypass the library. `None`: there are none.
    direct: Option<Arc<Direct>>,
    pub(super) holder: Mutex<Holder>,
    /// While locked, writes do not make their data durable.
    #[cfg(test)]
    pub(super) data_syncs: Mutex<()>,
}

/// Effect of a write on tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WriteEffect {
    Nothing,
    Allocates,
    /// It turns a zero cluster into data, perhaps without an allocation; or this is unknown.
    FillsZeroes,
}

/// Exclusive access to an image.
pub(super) struct Alone<'a> {
    pub(super) loaded: RwLockWriteGuard<'a, Option<Loaded>>,
    /// Opens after the lock is released.
    _shut: Option<ShutGate<'a>>,
}

impl Image {
    /// Creates it from its files, not loaded.
    pub(super) fn new(files: ChainFiles, direct: Option<Direct>) -> Image {
        let (dirty, failed) = (AtomicBool::new(false), AtomicBool::new(false));
        let (loaded, marking, holder) = (RwLock::new(None), Mutex::new(()), Mutex::default());
        let direct = direct.map(Arc::new);
        Image {
            loaded,
            files,
            dirty,
            marking,
            failed,
            direct,
            holder,
            #[cfg(test)]
            data_syncs: Mutex::default(),
        }
    }

    fn header(&self) -> &Header {
        &self.files.header
    }

    fn file(&self) -> &File {
        &self.files.own.file
    }

    fn data(&self) -> Option<&File> {
        self.files.own.data.as_ref().map(|(_, file)| file)
    }

    pub(super) fn path(&self) -> Display<'_> {
        self.files.own.path.display()
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    pub(super) fn cluster(&self) -> u64 {
        self.header().cluster()
    }

    /// Returns true if clusters can be discarded. Version 2 has no zero clusters: a backing file would show through.
    pub(super) fn discards(&self) -> bool {
        self.header().version >= 3 || self.header().backing.is_none()
    }

    fn shared(&self) -> RwLockReadGuard<'_, Option<Loaded>> {
        self.loaded.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn alone(&self) -> Alone<'_> {
        let shut = self.direct.as_ref().map(|direct| direct.gate.shut());
        Alone { loaded: self.loaded.write().unwrap_or_else(PoisonError::into_inner), _shut: shut }
    }

    /// Returns the data for requests that bypass the library.
    pub(super) fn direct(&self) -> Option<&Arc<Direct>> {
        self.direct.as_ref()
    }

    /// Returns true if the image may be changed.
    #[inline]
    pub(super) fn is_dirty(&self) -> bool {
        self.dirty.load(Ordering::Acquire)
    }

    /// Calls the library. After a panic of it all requests fail.
    fn guarded<T>(&self, call: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        if self.failed.load(Ordering::Acquire) {
            return Err(gone());
        }
        catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|_| {
            if !self.failed.swap(true, Ordering::AcqRel) {
                if let Some(direct) = &self.direct {
                    direct.gate.shut_for_ever();
                }
                tracing::error!(
                    "{}: the qcow2 library panicked: all requests fail from now on, and nothing more is written; `qemu-img check` \
                     says what is damaged",
                    self.path()
                );
            }
            Err(gone())
        })
    }

    fn with<T>(&self, call: impl FnOnce(&Loaded) -> io::Result<T>) -> io::Result<T> {
        self.guarded(|| call(self.shared().as_ref().ok_or_else(not_loaded)?))
    }

    /// As [`with`](Self::with), for changes of the image.
    fn change<T>(&self, call: impl FnOnce(&Loaded) -> io::Result<T>) -> io::Result<T> {
        self.guarded(|| {
            let loaded = self.shared();
            let loaded = loaded.as_ref().ok_or_else(not_loaded)?;
            self.mark_dirty(loaded)?;
            call(loaded)
        })
    }

    /// As [`change`](Self::change), for a write to a range: it is done when its entries are in the file, also those of
    /// an unfinished neighbour that has allocated the cluster.
    fn write_shared(
        &self,
        (at, len): (u64, u64),
        write: impl Fn(&FormatAccess<ImageFile>) -> io::Result<()>,
    ) -> io::Result<()> {
        let is_done = self.change(|loaded| match Image::effect(&loaded.format, at, len) {
            effect @ WriteEffect::Nothing => {
                if loaded.order.waits() {
                    loaded.tables.wait_for_changes();
                }
                self.write_out((at, len), loaded, (effect, None), &write).map(|()| true)
            }
            effect @ WriteEffect::Allocates if !loaded.has_failed.load(Ordering::Acquire) => {
                let change = Some(loaded.tables.begin());
                self.write_out((at, len), loaded, (effect, change), &write).map(|()| true)
            }
            WriteEffect::Allocates | WriteEffect::FillsZeroes => Ok(false),
        })?;
        if is_done {
            return Ok(());
        }
        self.change_alone(|loaded| {
            let change = (Image::effect(&loaded.format, at, len), Some(loaded.tables.begin()));
            self.write_out((at, len), loaded, change, &write)
        })
    }

    /// Writes the data, then the range's entries to the file, with the data on the disk where required, then publishes
    /// the location to workers.
    fn write_out(
        &self,
        (at, len): (u64, u64),
        loaded: &Loaded,
        (effect, change): (WriteEffect, Option<TableChange<'_>>),
        write: impl Fn(&FormatAccess<ImageFile>) -> io::Result<()>,
    ) -> io::Result<()> {
        let Loaded { format, tables, order, .. } = loaded;
        let done = write(format).and_then(|()| match effect {
            WriteEffect::Nothing => Ok(()),
            _ => order.data_first(effect == WriteEffect::FillsZeroes, || self.sync_data()),
        });
        if done.is_err() {
            loaded.has_failed.store(true, Ordering::Release);
            order.frees_others();
        }
        let found = self.direct.as_ref().map(|direct| direct.look_up(format, at, len, true));
        let in_file = match change.is_none() && tables.is_written() {
            true => Ok(()),
            false => tables.write_entries(self.file(), self.header(), format, (at, len), change.as_ref()),
        };
        if in_file.is_ok() {
            change.into_iter().for_each(TableChange::end);
        }
        if let (Some(direct), Some(found)) = (&self.direct, found) {
            direct.enter(match &in_file {
                Ok(()) if tables.is_written() => found,
                Ok(()) => found.own(),
                Err(_) => found.readable(),
            });
        }
        done.and(in_file)
    }

    /// As [`change`](Self::change), with exclusive access to the library.
    fn change_alone<T>(&self, call: impl FnOnce(&mut Loaded) -> io::Result<T>) -> io::Result<T> {
        self.guarded(|| {
            let mut alone = self.alone();
            let loaded = alone.loaded.as_mut().ok_or_else(not_loaded)?;
            self.mark_dirty(loaded)?;
            call(loaded)
        })
    }

    /// As [`change_alone`](Self::change_alone), for operations that free clusters: afterwards all tables are durable.
    ///
    /// The library allocates a free cluster again while the table without its old entry may be in memory only. A kill
    /// or a loss of power in between would leave an entry for foreign data, or for a table. So access is exclusive
    /// until it is written. `range`: the clusters whose locations are forgotten.
    fn free_alone(&self, (start, end): (u64, u64), call: impl FnOnce(&mut Loaded) -> io::Result<()>) -> io::Result<()> {
        self.change_alone(|loaded| {
            if let Some(direct) = &self.direct {
                direct.forget(start, end);
            }
            let freed = call(loaded);
            // Also after an error, which may be halfway.
            self.write_tables_after_data(loaded)?;
            self.sync_files()?;
            freed
        })
    }

    /// Calls `free` for the parts of a range. Each lies between multiples of `most` bytes, a table's at most: the next
    /// part may reuse clusters that the first one freed. A part of a cluster is apart: it may allocate a cluster, whose
    /// data comes before its entry.
    fn by_part(
        &self,
        loaded: &mut Loaded,
        (start, end): (u64, u64),
        most: u64,
        free: impl Fn(&mut FormatAccess<ImageFile>, u64, u64) -> io::Result<()>,
    ) -> io::Result<()> {
        let cluster = self.cluster();
        let mut at = start;
        while at < end {
            let next = match at % cluster {
                0 if end - at < cluster => end,
                0 => (at + 1).next_multiple_of(most).min(end & !(cluster - 1)),
                _ => at.next_multiple_of(cluster).min(end),
            };
            free(&mut loaded.format, at, next - at)?;
            if next < end {
                self.write_tables_after_data(loaded)?;
            }
            at = next;
        }
        Ok(())
    }

    /// Writes all tables to the file, after the data of new clusters is on the disk where required. Called with
    /// exclusive access.
    fn write_tables_after_data(&self, loaded: &Loaded) -> io::Result<()> {
        let synced = loaded.order.data_first(false, || self.sync_data());
        // Also after an error: a freed cluster must not be allocated again while its old entry is in the file.
        loaded.format.flush().and(synced)
    }

    /// Returns the effect of a write to a range on tables. A write with an effect can free a cluster, in an image where
    /// some can; such a range does not arise later. Users that share the image free no cluster: allocated ones stay.
    fn effect(format: &FormatAccess<ImageFile>, at: u64, len: u64) -> WriteEffect {
        let (mut done, mut effect) = (0, WriteEffect::Nothing);
        while done < len {
            match format.get_mapping(at + done, len - done) {
                Ok((_, 0)) | Err(_) => return WriteEffect::FillsZeroes,
                Ok((Mapping::Raw { writable: true, .. }, run)) => done += run,
                Ok((Mapping::Zero { explicit: true, .. }, _)) => return WriteEffect::FillsZeroes,
                Ok((_, run)) => (done, effect) = (done + run, WriteEffect::Allocates),
            }
        }
        effect
    }

    /// Sets the dirty bit before the first change. Called with the format locked, so that it is not cleared before the
    /// change.
    fn mark_dirty(&self, loaded: &Loaded) -> io::Result<()> {
        if self.dirty.load(Ordering::Acquire) {
            return Ok(());
        }
        let _one = lock(&self.marking);
        if !self.dirty.load(Ordering::Acquire) {
            loaded.order.punch_free(self.file())?;
            self.header().write_dirty(self.file(), true)?;
            loaded.is_marked.store(true, Ordering::Relaxed);
            self.dirty.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Makes everything durable and clears the dirty bit. The next change sets it again. Does nothing while the image
    /// is not loaded.
    pub(super) fn close(&self) -> io::Result<()> {
        if self.files.read_only {
            return Ok(());
        }
        self.guarded(|| {
            let alone = self.alone();
            let Some(loaded) = alone.loaded.as_ref() else { return Ok(()) };
            if loaded.is_marked.load(Ordering::Relaxed) {
                loaded.format.flush()?;
                self.sync_files()?;
                self.header().write_dirty(self.file(), false)?;
                loaded.is_marked.store(false, Ordering::Relaxed);
                self.dirty.store(false, Ordering::Release);
            }
            Ok(())
        })
    }

    /// Writes all tables to the file for another process, not to the disk: the dirty bit stays. Nothing changes
    /// afterwards.
    pub(super) fn write_tables(&self) -> io::Result<()> {
        self.guarded(|| {
            let alone = self.alone();
            let Some(loaded) = alone.loaded.as_ref() else { return Ok(()) };
            if self.dirty.load(Ordering::Acquire) {
                loaded.format.flush()?;
                self.dirty.store(false, Ordering::Release);
            }
            Ok(())
        })
    }

    pub(super) fn size(&self) -> io::Result<ByteLen> {
        self.with(|loaded| Ok(ByteLen(loaded.format.size())))
    }

    /// Resizes the disk durably. The added part of a larger one reads as zeroes.
    pub(super) fn set_size(&self, size: ByteLen) -> io::Result<()> {
        if self.header().version < 3 && self.header().snapshots > 0 {
            let why =
                "version 2 with internal snapshots keeps its size: `qemu-img amend -o compat=1.1` makes it version 3";
            return Err(io::Error::new(io::ErrorKind::Unsupported, why));
        }
        // The part beyond the new end, and the cluster with the old or the new end. Access is exclusive.
        self.free_alone((0, u64::MAX), |loaded| {
            let before = loaded.format.size();
            match size.0 < before {
                true => {
                    self.punch(loaded, (size.0, before), false)?;
                    loaded.format.resize_shrink(size.0)
                }
                false => {
                    // Tables that move.
                    loaded.order.frees_others();
                    self.grow(&mut loaded.format, before, size.0)
                }
            }
        })
    }

    /// Punches holes for the clusters of a range, which are freed next.
    fn punch(&self, loaded: &Loaded, range: (u64, u64), keeps_space: bool) -> io::Result<()> {
        loaded.order.punch_range(&loaded.format, self.data().unwrap_or(self.file()), range, keeps_space)
    }

    /// Writes to a range whose old clusters may be freed, which are not holes. Cluster by cluster: the library writes
    /// its tables before it allocates a cluster after it has freed one.
    fn write_freeing(
        &self,
        (at, len): (u64, u64),
        write: impl Fn(&FormatAccess<ImageFile>, u64, u64) -> io::Result<()>,
    ) -> io::Result<()> {
        self.free_alone((at, at + len), |loaded| {
            loaded.order.frees_others();
            self.by_part(loaded, (at, at + len), self.cluster(), |format, at, len| write(format, at, len))
        })
    }

    /// Makes the files' data durable.
    fn sync_files(&self) -> io::Result<()> {
        // The library's own sync would keep all other requests waiting.
        self.data().into_iter().chain([self.file()]).try_for_each(File::sync_data)
    }

    /// As [`sync_files`](Self::sync_files), before an entry.
    fn sync_data(&self) -> io::Result<()> {
        #[cfg(test)]
        drop(self.data_syncs.lock());
        self.sync_files()
    }

    /// Blocks all requests that need the library.
    #[cfg(test)]
    pub(super) fn keep_library(&self) -> impl Drop + '_ {
        self.loaded.write().unwrap()
    }

    /// Makes the library panic.
    #[cfg(test)]
    pub(super) fn panics_for_tests(&self) {
        let result: io::Result<()> = self.change_alone(|_| panic!("a library that panics"));
        assert!(result.is_err());
    }

    fn write_plain_zeroes(format: &FormatAccess<ImageFile>, at: u64, len: u64) -> io::Result<()> {
        let mut done = 0;
        while done < len {
            let run = (len - done).min(ZEROES.len() as u64);
            format.write(&ZEROES[..run as usize], at + done)?;
            done += run;
        }
        Ok(())
    }

    fn grow(&self, format: &mut FormatAccess<ImageFile>, from: u64, to: u64) -> io::Result<()> {
        // The backing file's data beyond the old end must not show. Only the library knows its length, so it always
        // zeroes.
        let zeroes = self.header().backing.is_some();
        if zeroes && self.header().version < 3 {
            let why = "version 2 with a backing file cannot grow: `qemu-img amend -o compat=1.1` makes it version 3";
            return Err(io::Error::new(io::ErrorKind::Unsupported, why));
        }
        format.resize_grow(to, if zeroes { PreallocateMode::Zero } else { PreallocateMode::None })?;
        // The rest of the last cluster has data from before a shrink, or the backing file's.
        let rest = from.next_multiple_of(self.cluster()).min(to) - from;
        let zeroed = match self.header().version {
            _ if rest == 0 => Ok(()),
            2 => Image::write_plain_zeroes(format, from, rest),
            _ => format.write_zeroes(from, rest),
        };
        if zeroed.is_err() {
            // Best effort: the caller reports the first error.
            let _ = format.resize_shrink(from);
        }
        zeroed
    }
}

/// Returns the error of requests while another process has the image.
fn not_loaded() -> io::Error {
    io::Error::other("the qcow2 image is not loaded: no guest is served with it here")
}

/// Returns the error of all requests after a failure of the library.
fn gone() -> io::Error {
    io::Error::other("the image was given up after a fault of the qcow2 library")
}

impl BlockingStorage for Arc<Image> {
    fn size(&self) -> io::Result<ByteLen> {
        Image::size(self)
    }

    fn read_at(&self, bytes: &mut [u8], at: ByteOffset) -> io::Result<()> {
        let len = bytes.len() as u64;
        self.with(|loaded| {
            let done = loaded.format.read(bytes, at.0);
            if let Some(direct) = &self.direct {
                let found = direct.look_up(&loaded.format, at.0, len, false);
                // New clusters of an unfinished writer are not entered: a write there would complete before its entry
                // is in the file.
                direct.enter(if loaded.tables.is_written() { found } else { found.readable() });
            }
            done
        })
    }

    fn write_at(&self, bytes: &[u8], at: ByteOffset) -> io::Result<()> {
        let len = bytes.len() as u64;
        let frees = |loaded: &Loaded| {
            Ok(loaded.writes_free && Image::effect(&loaded.format, at.0, len) != WriteEffect::Nothing)
        };
        if self.with(frees)? {
            return self.write_freeing((at.0, len), |format, from, len| {
                let skip = (from - at.0) as usize;
                format.write(&bytes[skip..skip + len as usize], from)
            });
        }
        self.write_shared((at.0, len), |format| format.write(bytes, at.0))
    }

    fn flush(&self) -> io::Result<()> {
        if self.files.read_only {
            return Ok(());
        }
        self.with(|loaded| loaded.tables.write_all(|| loaded.format.flush()))?;
        self.sync_files()
    }

    fn discard(&self, at: ByteOffset, len: ByteLen) -> io::Result<()> {
        self.free_alone((at.0, at.0 + len.0), |loaded| {
            // Parts of clusters keep their content.
            let (start, end) = (at.0.next_multiple_of(self.cluster()), at.0 + len.0);
            let end = if end == loaded.format.size() { end } else { end & !(self.cluster() - 1) };
            if start >= end {
                return Ok(());
            }
            self.punch(loaded, (start, end), false)?;
            let table = self.header().l2_coverage();
            self.by_part(loaded, (start, end), table, |format, at, len| match self.header().version {
                2 => format.discard_to_backing(at, len),
                _ => format.discard_to_any(at, len),
            })
        })
    }

    fn write_zeroes(&self, at: ByteOffset, len: ByteLen, may_unmap: bool) -> io::Result<()> {
        if self.header().version < 3 {
            if self.with(|loaded| Ok(loaded.writes_free))? {
                return self.write_freeing((at.0, len.0), Image::write_plain_zeroes);
            }
            let zero = |format: &FormatAccess<ImageFile>| Image::write_plain_zeroes(format, at.0, len.0);
            return self.write_shared((at.0, len.0), zero);
        }
        // Exclusive: the library turns a cluster whose other parts are zero into a zero cluster, and a concurrent write
        // may change those.
        self.free_alone((at.0, at.0 + len.0), |loaded| {
            self.punch(loaded, (at.0, at.0 + len.0), !may_unmap)?;
            let table = self.header().l2_coverage();
            self.by_part(loaded, (at.0, at.0 + len.0), table, |format, at, len| match may_unmap {
                true => format.discard_to_zero(at, len),
                false => format.write_zeroes(at, len),
            })
        })
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            tracing::error!("{}: closing: {error}; its dirty bit stays", self.path());
        }
        self.unload();
        // A worker's ring may keep a file, and so the lock, briefly after it was unregistered.
        self.data().into_iter().chain([self.file()]).for_each(lock::unlock_closed);
        if let Some(direct) = &self.direct {
            direct.unlock();
        }
    }
}
