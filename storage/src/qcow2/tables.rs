//! Which changes of tables are in the file.
//!
//! The library changes tables in memory. A guest outlives this process and is never asked to repeat a completed write: so the entries that a
//! write relies on are given to the host before it completes. Not to the disk: that is a flush. And not the refcounts: those that are missing
//! are repaired, as the dirty bit demands, by whoever opens the image after a kill.
//!
//! The library writes whole tables, and only when it is told to; a write needs a few entries. They are written here, as the library has them in
//! memory. An entry never changes while others share the image, except from none to its cluster, so it may be written twice. It must not be
//! overwritten by a table that the library copied before it was made, nor be in the file before its data is on the disk, where that matters
//! (`order.rs`): a change has the tables from before the library makes it until its data and then its entry are where they have to be. Whoever
//! has all tables written, or relies on an entry that another one's change may just have made, waits for the changes that have begun.
//!
//!
//! | the library writes a table | what keeps it from being older than entries in the file |
//! |---|---|
//! | when it is told to flush | changes wait meanwhile, and it waits for them (`whole`) |
//! | to make room in its cache | only one that nobody changes, with its place in the cache locked: the copy has all entries that were made |
//! | before the first allocation after clusters were freed | what frees has the image alone, and leaves no table unwritten; what is changed without an allocation (zero clusters that have space) has it alone, too, and so has every change once one has failed, which frees what it had |

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

use imago::file::File as ImageFile;
use imago::{FormatAccess, Mapping};

use super::header::Header;

/// Where the header has the offset of the L1 table (docs/interop/qcow2.txt of QEMU).
const L1_OFFSET_AT: u64 = 40;
/// Bits of an entry that are an offset.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// The cluster has one user.
const COPIED: u64 = 1 << 63;
const ENTRY: u64 = 8;

/// What is known of the tables of an image.
#[derive(Debug, Default)]
pub(super) struct TableWriter {
    /// Changes that may be in memory only.
    unwritten: AtomicU64,
    /// A change shares it, whoever has the library write tables has it alone.
    whole: RwLock<()>,
}

/// A change that may be in memory only, until its end. The entries of one that is dropped never get there by themselves.
#[must_use = "the change is in memory only"]
pub(super) struct TableChange<'a> {
    writer: &'a TableWriter,
    _shared: RwLockReadGuard<'a, ()>,
}

impl TableChange<'_> {
    /// The change is in the file.
    pub(super) fn end(self) {
        self.writer.unwritten.fetch_sub(1, Ordering::SeqCst);
    }
}

impl TableWriter {
    /// Begins a change. Called before the library makes it, so that nobody sees it and takes it for written.
    pub(super) fn begin(&self) -> TableChange<'_> {
        let shared = self.whole.read().unwrap_or_else(PoisonError::into_inner);
        self.unwritten.fetch_add(1, Ordering::SeqCst);
        TableChange { writer: self, _shared: shared }
    }

    /// Waits until what others have changed so far is in the file, if it can be.
    pub(super) fn wait_for_changes(&self) {
        if !self.is_written() {
            drop(self.whole.write().unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Returns true if all that the caller has seen in the tables is in the file.
    pub(super) fn is_written(&self) -> bool {
        self.unwritten.load(Ordering::SeqCst) == 0
    }

    /// Has the library write its tables.
    ///
    /// # Errors
    /// As `flush`.
    pub(super) fn write_all(&self, flush: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let _alone = self.whole.write().unwrap_or_else(PoisonError::into_inner);
        flush()
    }

    /// Writes the entries of the clusters of a range that the image itself has, as far as they are made. Called by who shares the image.
    /// `change`: what has made them, if it was the caller.
    ///
    /// # Errors
    /// When the file cannot be read or written, or its tables are not those of the library.
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
            // In one table, one after the other.
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
