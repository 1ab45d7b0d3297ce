//! The repair of an image that was not closed, before it is [checked](super::check).

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;

use super::check::{Checked, TableCheck, TableError, walk};
use super::header::Header;

/// Gives each cluster with an entry in the active tables and refcount 0 its refcount, in a new refcount block if
/// necessary. A kill or a loss of power leaves nothing else, besides clusters without an entry: tables may be written
/// before refcounts (docs/design/0017-qcow2.md). Returns the number of repaired clusters. The caller checks the tables
/// afterwards.
///
/// # Errors
/// If tables are damaged, the refcount table is too short, or the file cannot be read or written.
pub(super) fn repair_refcounts(file: &File, header: &Header, file_len: u64) -> Checked<u64> {
    let check = walk(file, header, file_len, true, Some(HashMap::new()))?;
    let mut repair = Repair { check, added: Vec::new() };
    let missing = repair.check.missing.take().unwrap_or_default();
    for (cluster, count) in &missing {
        repair.set_refcount(*cluster, *count)?;
    }
    if missing.is_empty() {
        return Ok(0);
    }
    file.sync_data()?;
    // The references to the blocks, after their content. A block without a reference after a kill is harmless.
    if !repair.added.is_empty() {
        for index in repair.added {
            let offset = repair.check.blocks.offsets[index as usize];
            file.write_all_at(&offset.to_be_bytes(), header.refcount_table_offset + index * 8)?;
        }
        file.sync_data()?;
    }
    Ok(missing.len() as u64)
}

struct Repair<'a> {
    check: TableCheck<'a>,
    /// Indices of blocks that the refcount table does not have yet.
    added: Vec<u64>,
}

impl Repair<'_> {
    /// Writes a refcount to its block.
    fn set_refcount(&mut self, cluster: u64, count: u64) -> Checked {
        let (header, file) = (self.check.header, self.check.file);
        let entries_bits = header.cluster_bits + 3 - header.refcount_order;
        let width = 1_u64 << header.refcount_order;
        if width < 64 && count >> width != 0 {
            return Err(TableError::Damaged(format!("the cluster {cluster:#x} is named too often")));
        }
        let block = self.block(cluster >> entries_bits, cluster)?;
        let bit = (cluster & ((1 << entries_bits) - 1)) << header.refcount_order;
        let at = block + bit / 8;
        if width >= 8 {
            let bytes = count.to_be_bytes();
            file.write_all_at(&bytes[8 - (width / 8) as usize..], at)?;
        } else {
            let mut byte = [0];
            file.read_exact_at(&mut byte, at)?;
            byte[0] |= (count as u8) << (bit % 8);
            file.write_all_at(&byte, at)?;
        }
        Ok(())
    }

    /// Returns the offset of the refcount block of this index, for a cluster. A new one is behind the end of the file.
    fn block(&mut self, index: u64, cluster: u64) -> Checked<u64> {
        match self.check.blocks.offsets.get(index as usize) {
            None => Err(TableError::Damaged(format!("the cluster {cluster:#x} is beyond the refcount table"))),
            Some(0) => {
                let header = self.check.header;
                let offset = self.check.file_len.next_multiple_of(header.cluster());
                self.check.file.write_all_at(&vec![0; header.cluster() as usize], offset)?;
                self.check.file_len = offset + header.cluster();
                self.check.blocks.offsets[index as usize] = offset;
                self.added.push(index);
                self.set_refcount(offset >> header.cluster_bits, 1)?;
                Ok(offset)
            }
            Some(offset) => Ok(*offset),
        }
    }
}
