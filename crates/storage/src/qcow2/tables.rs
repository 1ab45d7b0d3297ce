//! The changes of tables that are in the file.
//!
//! The library changes tables in memory. A guest outlives this process and does not repeat a completed write. So the
//! entries of a write are written to the host before it completes, but not to the disk: a flush does that. Refcounts
//! are not written: any process that opens the image after a kill repairs missing ones, as the dirty bit requires.
//!
//! The library writes whole tables, and only at a flush; a write needs a few entries. They are written here, from the
//! library's memory. An entry does not change while others share the image, except from none to its cluster, so it may
//! be written twice. A table that the library copied earlier must not overwrite it. It must not be in the file before
//! its data is on the disk, if that is required (`order.rs`). A change therefore holds the tables from before the
//! library makes it until its data and then its entry are in their place. A writer of all tables, or a user of an entry
//! that another change may just have made, waits for the begun changes.
//!
//! | the library writes a table | the copy is not older than entries in the file because |
//! |---|---|
//! | at a flush | changes wait meanwhile, and it waits for them (`whole`) |
//! | to make room in its cache | only an unchanged table, with its place in the cache locked: the copy has all entries |
//! | before the first allocation after clusters were freed | freeing needs exclusive access and leaves no table unwritten; changes without an allocation (zero clusters that have space) need it too, and so do all changes after a failed one, which frees its clusters |

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

use imago::file::File as ImageFile;
use imago::{FormatAccess, Mapping};

use super::header::Header;

/// Position of the L1 table's offset in the header (docs/interop/qcow2.txt of QEMU).
const L1_OFFSET_AT: u64 = 40;
/// Bits of an entry that are an offset.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// The cluster has one user.
const COPIED: u64 = 1 << 63;
const ENTRY: u64 = 8;

/// State of an image's tables.
#[derive(Debug, Default)]
pub(super) struct TableWriter {
    /// Changes that may be in memory only.
    unwritten: AtomicU64,
    /// Shared by changes; exclusive while the library writes tables.
    whole: RwLock<()>,
}

/// A change that may be in memory only, until its end. The entries of a dropped one are not written.
#[must_use = "the change is in memory only"]
pub(super) struct TableChange<'a> {
    writer: &'a TableWriter,
    _shared: RwLockReadGuard<'a, ()>,
}

impl TableChange<'_> {
    /// Ends the change: it is in the file.
    pub(super) fn end(self) {
        self.writer.unwritten.fetch_sub(1, Ordering::SeqCst);
    }
}

impl TableWriter {
    /// Begins a change. Called before the library makes it, so that no thread takes it for written.
    pub(super) fn begin(&self) -> TableChange<'_> {
        let shared = self.whole.read().unwrap_or_else(PoisonError::into_inner);
        self.unwritten.fetch_add(1, Ordering::SeqCst);
        TableChange { writer: self, _shared: shared }
    }

    /// Waits until other threads' changes so far are in the file, if possible.
    pub(super) fn wait_for_changes(&self) {
        if !self.is_written() {
            drop(self.whole.write().unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Returns true if all entries that the caller has seen are in the file.
    pub(super) fn is_written(&self) -> bool {
        self.unwritten.load(Ordering::SeqCst) == 0
    }

    /// Makes the library write its tables.
    ///
    /// # Errors
    /// As `flush`.
    pub(super) fn write_all(&self, flush: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let _alone = self.whole.write().unwrap_or_else(PoisonError::into_inner);
        flush()
    }

    /// Writes the existing entries of a range's clusters in the image itself. Called with the image shared. `change`:
    /// the caller's change that made them, if any.
    ///
    /// # Errors
    /// When the file cannot be read or written, or its tables differ from the library's.
    pub(super) fn write_entries(
        &self,
        file: &File,
        header: &Header,
        format: &FormatAccess<ImageFile>,
        (at, len): (u64, u64),
        change: Option<&TableChange<'_>>,
    ) -> io::Result<()> {
        let _shared = change.is_none().then(|| self.whole.read().unwrap_or_else(PoisonError::into_inner));
        let (cluster, in_table) = (header.cluster(), header.cluster() / ENTRY);
        let l1 = read_entry(file, L1_OFFSET_AT)?;
        let (mut next, end) = (at / cluster, (at + len).div_ceil(cluster));
        while next < end {
            // In one table, consecutively.
            let bound = (next / in_table + 1) * in_table;
            let (mapping, run) = format.get_mapping(next * cluster, (bound.min(end) - next) * cluster)?;
            let count = run.div_ceil(cluster).max(1);
            if let Mapping::Raw { offset, writable: true, .. } = mapping {
                let table = read_entry(file, l1 + next / in_table * ENTRY)? & OFFSET;
                if table == 0 || offset & !OFFSET != 0 {
                    return Err(io::Error::other(format!(
                        "no place in the tables for cluster {next:#x} at {offset:#x}"
                    )));
                }
                let entries = (0..count).flat_map(|number| ((offset + number * cluster) | COPIED).to_be_bytes());
                file.write_all_at(&entries.collect::<Vec<u8>>(), table + next % in_table * ENTRY)?;
            }
            next += count;
        }
        Ok(())
    }
}

fn read_entry(file: &File, at: u64) -> io::Result<u64> {
    let mut bytes = [0; ENTRY as usize];
    file.read_exact_at(&mut bytes, at)?;
    Ok(u64::from_be_bytes(bytes))
}
