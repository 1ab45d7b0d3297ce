//! The check of an image's tables before it is used.
//!
//! The library trusts the entries of L1 and L2 tables. With an entry that names another table, a guest's write would
//! change that table, and a cluster with a wrong refcount would be allocated twice. So the active tables are checked
//! here, once, when the image is opened: each entry lies in the file, tables overlap nothing, and for writing each
//! cluster has a refcount that allows its entry. From then on only the library changes them, and allocates only
//! clusters with refcount 0 and without an entry.
//!
//! It takes as long as reading the tables: 128 KiB for each GiB with clusters of 64 KiB.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use mqblk_core::Sector512;

use super::header::{Header, be32, be64};

/// Bits of an entry that are an offset.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// The cluster has one user: it may be written in place.
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
/// Reads as zeroes with any offset (version 3).
const ZERO: u64 = 1;
/// Most clusters of a file that is written: a bit for each is kept during the check (64 MiB).
const MAX_CLUSTERS: u64 = 1 << 29;
/// Refcount blocks that are kept during the check, in bytes.
const BLOCK_BYTES: u64 = 8 << 20;
/// Bytes of a snapshot's entry without its variable part (`docs/interop/qcow2.txt`, Snapshots).
const SNAPSHOT_LEN: u64 = 40;
/// Longest accepted entry of a snapshot: QEMU's names are far shorter.
const MAX_SNAPSHOT_LEN: u64 = 1 << 20;
/// QEMU's `QCOW_MAX_L1_SIZE`, in entries.
const MAX_L1_ENTRIES: u64 = 4 << 20;

/// Most free parts of a file in the list: 16 MiB.
const MAX_FREE: usize = 1 << 20;

/// Error of the tables.
#[derive(Debug)]
pub(super) enum TableError {
    Io(io::Error),
    /// The entry and its fault, in words.
    Damaged(String),
}

impl From<io::Error> for TableError {
    fn from(error: io::Error) -> TableError {
        TableError::Io(error)
    }
}

pub(super) type Checked<T = ()> = Result<T, TableError>;

/// Type of a metadata cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Table {
    Header,
    L1,
    L2,
    ReferenceCounts,
    RefcountBlock,
    Snapshots,
    SnapshotL1,
    SnapshotL2,
}

/// Checks the active tables of an image of `file_len` bytes; for writing (`write`) also its refcounts and all other
/// tables.
///
/// Returns properties that the header does not have.
///
/// # Errors
/// At the first entry that is wrong, or if the file cannot be read.
pub(super) fn check_tables(file: &File, header: &Header, file_len: u64, write: bool) -> Checked<CheckedTables> {
    let mut check = walk(file, header, file_len, write, None)?;
    let free = if write { check.free()? } else { Some(Vec::new()) };
    Ok(CheckedTables { writes_free: check.writes_free, free })
}

/// Properties of an image's tables.
pub(super) struct CheckedTables {
    /// True if a write can free a cluster: a compressed one, or one without another user although its entry is not
    /// marked so.
    pub(super) writes_free: bool,
    /// Parts of the file outside of all tables, without an entry, and with refcount 0. Only for writing. `None`: too
    /// many to list.
    pub(super) free: Option<Vec<Range<u64>>>,
}

/// Follows all tables. With `missing`, refcounts of 0 are counted there instead of being errors.
pub(super) fn walk<'a>(
    file: &'a File,
    header: &'a Header,
    file_len: u64,
    write: bool,
    missing: Option<HashMap<u64, u64>>,
) -> Checked<TableCheck<'a>> {
    let clusters = file_len.div_ceil(header.cluster());
    if write && clusters > MAX_CLUSTERS {
        let bytes = MAX_CLUSTERS << header.cluster_bits;
        return Err(TableError::Damaged(format!("the file has {file_len} bytes, more than {bytes}: readonly=on only")));
    }
    let (tables, blocks) = (HashMap::new(), Refcounts::default());
    let names = Names { once: vec![0; if write { clusters.div_ceil(64) as usize } else { 0 }], more: HashMap::new() };
    let mut check = TableCheck { file, header, file_len, write, tables, blocks, names, missing, writes_free: false };
    let l1 = check.read_table(header.l1_offset, u64::from(header.l1_entries))?;
    check.add_metadata(header.l1_offset, l1.len() as u64 * 8, Table::L1)?;
    check.add(0, Table::Header)?;
    if write {
        check.add_refcounts()?;
        check.add_snapshots()?;
    }
    for (index, entry) in l1.iter().enumerate() {
        if entry & !(OFFSET | COPIED) != 0 {
            return Err(TableError::Damaged(format!("L1 entry {index} is {entry:#x}: it has reserved bits")));
        }
        if entry & OFFSET != 0 {
            let cluster = check.cluster_of(entry & OFFSET, || format!("L1 entry {index}"))?;
            check.add(cluster, Table::L2)?;
        }
    }
    if write {
        check.check_metadata_refcounts()?;
    }
    for (index, entry) in l1.iter().enumerate().filter(|(_, entry)| *entry & OFFSET != 0) {
        if write && entry & COPIED != 0 && check.refcount((entry & OFFSET) >> header.cluster_bits)? > 1 {
            return Err(TableError::Damaged(format!("the L2 table of L1 entry {index} is shared, and not to be")));
        }
        check.check_l2(index as u64, entry & OFFSET)?;
    }
    Ok(check)
}

pub(super) struct TableCheck<'a> {
    pub(super) file: &'a File,
    pub(super) header: &'a Header,
    pub(super) file_len: u64,
    /// True if refcounts are checked too.
    write: bool,
    /// Type of each metadata cluster, by its number in the file.
    tables: HashMap<u64, Table>,
    pub(super) blocks: Refcounts,
    /// Number of entries of each cluster; for writing only.
    names: Names,
    /// Number of entries of clusters with refcount 0, if these are repaired.
    pub(super) missing: Option<HashMap<u64, u64>>,
    /// True if a write can free a cluster.
    writes_free: bool,
}

/// The refcount blocks.
#[derive(Debug, Default)]
pub(super) struct Refcounts {
    /// Their offsets.
    pub(super) offsets: Vec<u64>,
    /// The last read ones.
    cached: HashMap<u64, Vec<u8>>,
}

/// Number of entries of each cluster.
#[derive(Debug, Default)]
struct Names {
    /// A bit for each cluster with an entry.
    once: Vec<u64>,
    /// Number of entries of clusters with more than one.
    more: HashMap<u64, u64>,
}

impl Names {
    /// Counts an entry of a cluster that lies in the file. Returns the cluster's entries so far.
    fn add(&mut self, cluster: u64) -> u64 {
        let (word, bit) = ((cluster / 64) as usize, 1 << (cluster % 64));
        if self.once[word] & bit == 0 {
            self.once[word] |= bit;
            return 1;
        }
        let count = self.more.entry(cluster).or_insert(1);
        *count += 1;
        *count
    }

    fn has(&self, cluster: u64) -> bool {
        self.once[(cluster / 64) as usize] & 1 << (cluster % 64) != 0
    }

    fn count(&self, cluster: u64) -> u64 {
        self.more.get(&cluster).copied().unwrap_or(1)
    }
}

impl TableCheck<'_> {
    /// Returns the parts of the file that are free. `None`: there are too many.
    fn free(&mut self) -> Checked<Option<Vec<Range<u64>>>> {
        let bits = self.header.cluster_bits;
        let mut free: Vec<Range<u64>> = Vec::new();
        for cluster in 0..self.file_len.div_ceil(self.header.cluster()) {
            // Refcounts are read for clusters without an entry: those of snapshots, those that a killed writer has
            // left, and free ones.
            if self.names.has(cluster) || self.refcount(cluster)? != 0 {
                continue;
            }
            let range = cluster << bits..(cluster + 1) << bits;
            let is_full = free.len() == MAX_FREE;
            match free.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ if is_full => return Ok(None),
                _ => free.push(range),
            }
        }
        Ok(Some(free))
    }

    /// Reads a table of `entries` numbers. Its bounds were checked: it lies in the file.
    fn read_table(&self, offset: u64, entries: u64) -> Checked<Vec<u64>> {
        let mut bytes = vec![0; entries as usize * 8];
        self.file.read_exact_at(&mut bytes, offset)?;
        Ok(bytes.chunks_exact(8).map(|entry| be64(entry, 0)).collect())
    }

    /// Returns the number of the cluster at `offset`, which must be aligned and begin in the file.
    fn cluster_of(&self, offset: u64, what: impl Fn() -> String) -> Checked<u64> {
        if !offset.is_multiple_of(self.header.cluster()) || offset >= self.file_len {
            let len = self.file_len;
            return Err(TableError::Damaged(format!("{} names {offset:#x}: no cluster of {len} bytes", what())));
        }
        Ok(offset >> self.header.cluster_bits)
    }

    fn add_metadata(&mut self, offset: u64, bytes: u64, table: Table) -> Checked {
        let first = self.cluster_of(offset, || format!("the place of {table:?}"))?;
        let count = bytes.div_ceil(self.header.cluster());
        if bytes > self.file_len - offset {
            return Err(TableError::Damaged(format!("{table:?} at {offset:#x} ends beyond the file")));
        }
        (first..first + count).try_for_each(|cluster| self.add(cluster, table))
    }

    fn add(&mut self, cluster: u64, table: Table) -> Checked {
        let shared = |before| match (before, table) {
            // Snapshots share tables with each other and with the active one.
            (Table::SnapshotL2, Table::L2 | Table::SnapshotL2) => true,
            _ => false,
        };
        if self.write {
            self.names.add(cluster);
        }
        match self.tables.insert(cluster, table) {
            Some(before) if !shared(before) => {
                let offset = cluster << self.header.cluster_bits;
                Err(TableError::Damaged(format!("the cluster at {offset:#x} is {before:?} and {table:?}")))
            }
            _ => Ok(()),
        }
    }

    fn add_refcounts(&mut self) -> Checked {
        let header = self.header;
        let bytes = u64::from(header.refcount_table_clusters) << header.cluster_bits;
        let table = self.read_table(header.refcount_table_offset, bytes / 8)?;
        self.add_metadata(header.refcount_table_offset, bytes, Table::ReferenceCounts)?;
        for (index, entry) in table.iter().enumerate().filter(|(_, entry)| **entry != 0) {
            let cluster = self.cluster_of(*entry, || format!("refcount table entry {index}"))?;
            self.add(cluster, Table::RefcountBlock)?;
        }
        self.blocks.offsets = table;
        Ok(())
    }

    /// Adds the tables of internal snapshots: writes must not reach them.
    fn add_snapshots(&mut self) -> Checked {
        let header = self.header;
        let (mut at, mut end) = (header.snapshots_offset, header.snapshots_offset);
        for number in 0..header.snapshots {
            let damaged = |what: &str| TableError::Damaged(format!("snapshot {number} at {at:#x}: {what}"));
            let mut bytes = [0; SNAPSHOT_LEN as usize];
            if at.checked_add(SNAPSHOT_LEN).is_none_or(|end| end > self.file_len) {
                return Err(damaged("beyond the end of the file"));
            }
            self.file.read_exact_at(&mut bytes, at)?;
            let (l1_offset, l1_entries) = (be64(&bytes, 0), u64::from(be32(&bytes, 8)));
            let id_and_name = be64(&bytes, 8) & 0xffff_ffff;
            let extra = u64::from(be32(&bytes, 36));
            let len = SNAPSHOT_LEN + extra + (id_and_name >> 16) + (id_and_name & 0xffff);
            if l1_entries > MAX_L1_ENTRIES || len > MAX_SNAPSHOT_LEN {
                return Err(damaged("its L1 table or its entry is too long"));
            }
            if l1_entries > 0 {
                self.add_metadata(l1_offset, l1_entries * 8, Table::SnapshotL1)?;
                for entry in self.read_table(l1_offset, l1_entries)? {
                    if entry & OFFSET != 0 {
                        let cluster =
                            self.cluster_of(entry & OFFSET, || format!("the L1 table of snapshot {number}"))?;
                        self.add(cluster, Table::SnapshotL2)?;
                    }
                }
            }
            // The file may end without the padding of the last entry.
            end = at + len;
            at += len.next_multiple_of(8);
        }
        let bytes = end - header.snapshots_offset;
        if bytes > 0 { self.add_metadata(header.snapshots_offset, bytes, Table::Snapshots) } else { Ok(()) }
    }

    fn check_metadata_refcounts(&mut self) -> Checked {
        let mut clusters: Vec<_> = self.tables.iter().map(|(cluster, table)| (*cluster, *table)).collect();
        clusters.sort_unstable_by_key(|(cluster, _)| *cluster);
        for (cluster, table) in clusters {
            let (count, names) = (self.refcount(cluster)?, self.names.count(cluster));
            let offset = cluster << self.header.cluster_bits;
            self.compare(cluster, count, names, || format!("the place of {table:?}, {offset:#x},"))?;
        }
        Ok(())
    }

    fn check_l2(&mut self, l1_index: u64, offset: u64) -> Checked {
        let header = self.header;
        let entries = header.cluster() / 8;
        let whole = offset + header.cluster() <= self.file_len;
        if !whole {
            return Err(TableError::Damaged(format!("the L2 table at {offset:#x} ends beyond the file")));
        }
        for (index, entry) in self.read_table(offset, entries)?.into_iter().enumerate() {
            if entry != 0 {
                let guest = (l1_index * entries + index as u64) << header.cluster_bits;
                self.check_entry(guest, entry)?;
            }
        }
        Ok(())
    }

    fn check_entry(&mut self, guest: u64, entry: u64) -> Checked {
        let header = self.header;
        let what = || format!("the L2 entry {entry:#x} of the disk's {guest:#x}");
        if entry & COMPRESSED != 0 {
            return self.check_compressed(entry, what);
        }
        let (offset, zero) = (entry & OFFSET, entry & ZERO != 0);
        if entry & !(OFFSET | COPIED | ZERO) != 0 || zero && header.version < 3 {
            return Err(TableError::Damaged(format!("{} has reserved bits", what())));
        }
        if header.external_data {
            let allocated = offset != 0 || entry & COPIED != 0;
            let elsewhere = allocated && offset != guest;
            return if elsewhere { Err(TableError::Damaged(format!("{} names {offset:#x}", what()))) } else { Ok(()) };
        }
        if offset == 0 {
            let copied = entry & COPIED != 0;
            return if copied { Err(TableError::Damaged(format!("{} names the header", what()))) } else { Ok(()) };
        }
        let cluster = self.data_cluster(offset, what)?;
        let Some(count) = self.add_name(cluster, what)? else { return Ok(()) };
        let copied = entry & COPIED != 0;
        self.writes_free |= !copied && count < 2;
        if copied && count > 1 {
            let why = format!("{} has a cluster for itself that has refcount {count}", what());
            return Err(TableError::Damaged(why));
        }
        Ok(())
    }

    fn check_compressed(&mut self, entry: u64, what: impl Fn() -> String + Copy) -> Checked {
        self.writes_free = true;
        let header = self.header;
        let bits = 62 - (header.cluster_bits - 8);
        let offset = entry & ((1 << bits) - 1) & !(0xff << 56);
        // Sectors besides the first. The end of the file may truncate the last one.
        let more = Sector512((entry & !(COMPRESSED | COPIED)) >> bits).to_len().map_or(u64::MAX, |len| len.0);
        let last = (offset | 511).saturating_add(more) & !511;
        if entry & COPIED != 0 || header.external_data || last >= self.file_len {
            return Err(TableError::Damaged(format!("{} is compressed, and not to be", what())));
        }
        for cluster in offset >> header.cluster_bits..=last >> header.cluster_bits {
            self.data_cluster(cluster << header.cluster_bits, what)?;
            self.add_name(cluster, what)?;
        }
        Ok(())
    }

    /// Returns the number of a data cluster: in the file, outside of all tables.
    fn data_cluster(&self, offset: u64, what: impl Fn() -> String) -> Checked<u64> {
        let cluster = self.cluster_of(offset, &what)?;
        match self.tables.get(&cluster) {
            Some(table) => Err(TableError::Damaged(format!("{} names {table:?} at {offset:#x}", what()))),
            None => Ok(cluster),
        }
    }

    /// Counts an entry of a data cluster, compares the count with the refcount, and returns the refcount. Only for
    /// writing.
    fn add_name(&mut self, cluster: u64, what: impl Fn() -> String) -> Checked<Option<u64>> {
        if !self.write {
            return Ok(None);
        }
        let names = self.names.add(cluster);
        let count = self.refcount(cluster)?;
        self.compare(cluster, count, names, what)?;
        Ok(Some(count))
    }

    /// Checks that a cluster's refcount is not below its number of entries: otherwise it would be allocated while in
    /// use.
    fn compare(&mut self, cluster: u64, count: u64, names: u64, what: impl Fn() -> String) -> Checked {
        match &mut self.missing {
            _ if count >= names => Ok(()),
            Some(missing) if count == 0 => {
                missing.insert(cluster, names);
                Ok(())
            }
            _ => {
                let why = format!("{} has a cluster with refcount {count} that is named {names} times", what());
                Err(TableError::Damaged(why))
            }
        }
    }

    fn refcount(&mut self, cluster: u64) -> io::Result<u64> {
        let header = self.header;
        let order = header.refcount_order;
        let entries_bits = header.cluster_bits + 3 - order;
        let block = cluster >> entries_bits;
        let offset = match self.blocks.offsets.get(block as usize) {
            None | Some(0) => return Ok(0),
            Some(offset) => *offset,
        };
        let cached = &mut self.blocks.cached;
        if !cached.contains_key(&block) {
            if cached.len() as u64 >= (BLOCK_BYTES >> header.cluster_bits).max(4) {
                cached.clear();
            }
            let mut bytes = vec![0; header.cluster() as usize];
            self.file.read_exact_at(&mut bytes, offset)?;
            cached.insert(block, bytes);
        }
        let bytes = &cached[&block];
        let index = cluster & ((1 << entries_bits) - 1);
        let (bit, width) = (index << order, 1_usize << order);
        let at = (bit / 8) as usize;
        Ok(match width {
            // The lowest bits of a byte are the first.
            1 | 2 | 4 => u64::from(bytes[at] >> (bit % 8)) & ((1 << width) - 1),
            _ => bytes[at..at + width / 8].iter().fold(0, |value, byte| value << 8 | u64::from(*byte)),
        })
    }
}
