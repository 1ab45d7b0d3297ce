//! Command descriptor blocks. Source: SPC-4 chapter 6, SBC-3 chapter 5.

use super::wire::CDB_BYTES;

/// A command descriptor block, padded with zeroes. Stored as words, each with its first byte in the lowest bits: a READ
/// or WRITE is built in registers. A load of bytes that were stored one by one would wait until all are in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cdb([u64; CDB_BYTES / 8]);

/// A logical block address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lba(pub u64);

/// A range of logical blocks, for UNMAP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First block.
    pub start: Lba,
    /// Blocks.
    pub blocks: u32,
}

/// Returns the length of the parameter list of an UNMAP with `extents` extents.
pub(super) const fn unmap_bytes(extents: usize) -> usize {
    8 + 16 * extents
}

/// Writes the parameter list of an UNMAP into `list`, which is [`unmap_bytes`] long.
pub(crate) fn unmap_list(extents: &[Extent], list: &mut [u8]) {
    let blocks = 16 * extents.len() as u16;
    list.fill(0);
    list[..2].copy_from_slice(&(blocks + 6).to_be_bytes());
    list[2..4].copy_from_slice(&blocks.to_be_bytes());
    for (extent, bytes) in extents.iter().zip(list[8..].chunks_exact_mut(16)) {
        bytes[..8].copy_from_slice(&extent.start.0.to_be_bytes());
        bytes[8..12].copy_from_slice(&extent.blocks.to_be_bytes());
    }
}

/// Force unit access: the blocks are durable at completion.
const FUA: u8 = 1 << 3;

impl Cdb {
    /// Returns any command: `bytes`, truncated to 32 bytes.
    pub fn raw(bytes: &[u8]) -> Cdb {
        let mut cdb = [0; CDB_BYTES];
        let len = bytes.len().min(CDB_BYTES);
        cdb[..len].copy_from_slice(&bytes[..len]);
        Cdb::from_bytes(cdb)
    }

    fn from_bytes(cdb: [u8; CDB_BYTES]) -> Cdb {
        let word = |word: usize| u64::from_le_bytes(std::array::from_fn(|byte| cdb[8 * word + byte]));
        Cdb(std::array::from_fn(word))
    }

    /// Returns the bytes of the descriptor block.
    pub fn bytes(&self) -> [u8; CDB_BYTES] {
        std::array::from_fn(|byte| self.0[byte / 8].to_le_bytes()[byte % 8])
    }

    /// Returns the words of the descriptor block: eight bytes each, the first in the lowest bits.
    #[inline]
    pub(super) fn words(&self) -> [u64; CDB_BYTES / 8] {
        self.0
    }

    /// Returns a command with these bytes at these offsets, and zeroes elsewhere.
    fn with<const N: usize>(operation: u8, fields: [(usize, &[u8]); N]) -> Cdb {
        let mut cdb = [0; CDB_BYTES];
        cdb[0] = operation;
        for (at, field) in fields {
            cdb[at..at + field.len()].copy_from_slice(field);
        }
        Cdb::from_bytes(cdb)
    }

    /// Returns a 10-byte command, or its 16-byte form if the block address or count needs it.
    #[inline]
    fn sized(short: u8, long: u8, flags: u8, start: Lba, blocks: u32) -> Cdb {
        let head = |operation: u8| u64::from(operation) | u64::from(flags) << 8;
        if start.0 <= u64::from(u32::MAX) && blocks <= u32::from(u16::MAX) {
            // The block address is in bytes 2 to 5, the count in 7 and 8, of which the low byte is in the second word.
            let (lba, count) = (u64::from((start.0 as u32).swap_bytes()), u64::from((blocks as u16).swap_bytes()));
            Cdb([head(short) | lba << 16 | count << 56, count >> 8, 0, 0])
        } else {
            // The block address is in bytes 2 to 9, the count in 10 to 13.
            let (lba, count) = (start.0.swap_bytes(), u64::from(blocks.swap_bytes()));
            Cdb([head(long) | lba << 16, lba >> 48 | count << 16, 0, 0])
        }
    }

    /// Returns READ(10), or READ(16) if needed.
    #[inline]
    pub(super) fn read(start: Lba, blocks: u32) -> Cdb {
        Cdb::sized(0x28, 0x88, 0, start, blocks)
    }

    /// Returns WRITE(10), or WRITE(16) if needed.
    #[inline]
    pub(super) fn write(start: Lba, blocks: u32, fua: bool) -> Cdb {
        Cdb::sized(0x2a, 0x8a, if fua { FUA } else { 0 }, start, blocks)
    }

    /// Returns SYNCHRONIZE CACHE(10) of all blocks.
    pub(super) fn flush() -> Cdb {
        Cdb::with(0x35, [])
    }

    /// Returns UNMAP with `extents` extents.
    pub(super) fn unmap(extents: usize) -> Cdb {
        Cdb::with(0x42, [(7, &(unmap_bytes(extents) as u16).to_be_bytes())])
    }

    /// Returns WRITE SAME(16) with one block of data. `unmap`: the blocks may be unmapped.
    pub(super) fn write_same(start: Lba, blocks: u32, unmap: bool) -> Cdb {
        let flags = u8::from(unmap) << 3;
        Cdb::with(0x93, [(1, &[flags]), (2, &start.0.to_be_bytes()), (10, &blocks.to_be_bytes())])
    }

    /// Returns INQUIRY for standard data of at most `len` bytes.
    pub(super) fn inquiry(len: u16) -> Cdb {
        Cdb::with(0x12, [(3, &len.to_be_bytes())])
    }

    /// Returns INQUIRY for a page of vital product data.
    pub(super) fn vital_product_data(page: u8, len: u16) -> Cdb {
        Cdb::with(0x12, [(1, &[1, page]), (3, &len.to_be_bytes())])
    }

    /// Returns READ CAPACITY(16).
    pub(super) fn read_capacity(len: u32) -> Cdb {
        Cdb::with(0x9e, [(1, &[0x10]), (10, &len.to_be_bytes())])
    }

    /// Returns REPORT LUNS without the well-known logical units.
    pub(super) fn report_luns(len: u32) -> Cdb {
        Cdb::with(0xa0, [(6, &len.to_be_bytes())])
    }

    /// Returns MODE SENSE(6) for a page's current values.
    pub(super) fn mode_sense(page: u8, len: u8) -> Cdb {
        Cdb::with(0x1a, [(2, &[page]), (4, &[len])])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_short_form_is_used_if_it_fits() {
        let cdb = Cdb::read(Lba(0x1234_5678), 0xffff);
        assert_eq!(cdb.bytes()[..10], [0x28, 0, 0x12, 0x34, 0x56, 0x78, 0, 0xff, 0xff, 0]);
        let cdb = Cdb::write(Lba(1 << 32), 8, true);
        assert_eq!(cdb.bytes()[..16], [0x8a, 8, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0]);
        let (start, blocks) = (Lba(0x0123_4567_89ab_cdef), 0x1234_5678);
        let expected = [0x88, 0, 1, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef, 0x12, 0x34, 0x56, 0x78, 0, 0];
        assert_eq!(Cdb::read(start, blocks).bytes()[..16], expected);
        assert_eq!(Cdb::write(Lba(7), 0x0102, false).bytes()[..10], [0x2a, 0, 0, 0, 0, 7, 0, 1, 2, 0]);
        assert_eq!(Cdb::raw(&expected), Cdb::read(start, blocks));
        assert_eq!(Cdb::read(Lba(0), 0x10000).bytes()[..14], [0x88, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0]);
    }

    #[test]
    fn an_unmap_has_its_length() {
        let extents = [Extent { start: Lba(5), blocks: 6 }, Extent { start: Lba(1 << 40), blocks: 1 }];
        let mut list = vec![0xff; unmap_bytes(2)];
        unmap_list(&extents, &mut list);
        assert_eq!(list[..8], [0, 38, 0, 32, 0, 0, 0, 0]);
        assert_eq!(list[8..24], [0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 6, 0, 0, 0, 0]);
        assert_eq!(list[24..36], [0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
        assert_eq!(Cdb::unmap(2).bytes()[..10], [0x42, 0, 0, 0, 0, 0, 0, 0, 40, 0]);
    }
}
