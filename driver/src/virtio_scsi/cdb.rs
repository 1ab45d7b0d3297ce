//! Command descriptor blocks. Source: SPC-4 chapter 6, SBC-3 chapter 5.

use super::wire::CDB_BYTES;

/// A command descriptor block, padded with zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cdb(pub(crate) [u8; CDB_BYTES]);

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
        Cdb(cdb)
    }

    /// Returns the bytes of the descriptor block.
    pub fn bytes(&self) -> &[u8; CDB_BYTES] {
        &self.0
    }

    const fn new(operation: u8) -> Cdb {
        let mut cdb = [0; CDB_BYTES];
        cdb[0] = operation;
        Cdb(cdb)
    }

    /// Returns a 10-byte command, or its 16-byte form if the block address or count needs it.
    #[inline]
    fn sized(short: u8, long: u8, flags: u8, start: Lba, blocks: u32) -> Cdb {
        let mut cdb = [0; CDB_BYTES];
        if start.0 <= u64::from(u32::MAX) && blocks <= u32::from(u16::MAX) {
            let lba = (start.0 as u32).to_be_bytes();
            let count = (blocks as u16).to_be_bytes();
            (cdb[0], cdb[1]) = (short, flags);
            cdb[2..6].copy_from_slice(&lba);
            cdb[7..9].copy_from_slice(&count);
        } else {
            (cdb[0], cdb[1]) = (long, flags);
            cdb[2..10].copy_from_slice(&start.0.to_be_bytes());
            cdb[10..14].copy_from_slice(&blocks.to_be_bytes());
        }
        Cdb(cdb)
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
        Cdb::new(0x35)
    }

    /// Returns UNMAP with `extents` extents.
    pub(super) fn unmap(extents: usize) -> Cdb {
        let mut cdb = Cdb::new(0x42);
        cdb.0[7..9].copy_from_slice(&(unmap_bytes(extents) as u16).to_be_bytes());
        cdb
    }

    /// Returns WRITE SAME(16) with one block of data. `unmap`: the blocks may be unmapped.
    pub(super) fn write_same(start: Lba, blocks: u32, unmap: bool) -> Cdb {
        let mut cdb = Cdb::new(0x93);
        cdb.0[1] = u8::from(unmap) << 3;
        cdb.0[2..10].copy_from_slice(&start.0.to_be_bytes());
        cdb.0[10..14].copy_from_slice(&blocks.to_be_bytes());
        cdb
    }

    /// Returns INQUIRY for standard data of at most `len` bytes.
    pub(super) fn inquiry(len: u16) -> Cdb {
        let mut cdb = Cdb::new(0x12);
        cdb.0[3..5].copy_from_slice(&len.to_be_bytes());
        cdb
    }

    /// Returns INQUIRY for a page of vital product data.
    pub(super) fn vital_product_data(page: u8, len: u16) -> Cdb {
        let mut cdb = Cdb::inquiry(len);
        (cdb.0[1], cdb.0[2]) = (1, page);
        cdb
    }

    /// Returns READ CAPACITY(16).
    pub(super) fn read_capacity(len: u32) -> Cdb {
        let mut cdb = Cdb::new(0x9e);
        cdb.0[1] = 0x10;
        cdb.0[10..14].copy_from_slice(&len.to_be_bytes());
        cdb
    }

    /// Returns REPORT LUNS without the well-known logical units.
    pub(super) fn report_luns(len: u32) -> Cdb {
        let mut cdb = Cdb::new(0xa0);
        cdb.0[6..10].copy_from_slice(&len.to_be_bytes());
        cdb
    }

    /// Returns MODE SENSE(6) for a page's current values.
    pub(super) fn mode_sense(page: u8, len: u8) -> Cdb {
        let mut cdb = Cdb::new(0x1a);
        (cdb.0[2], cdb.0[4]) = (page, len);
        cdb
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_short_form_is_used_if_it_fits() {
        let cdb = Cdb::read(Lba(0x1234_5678), 0xffff);
        assert_eq!(cdb.0[..10], [0x28, 0, 0x12, 0x34, 0x56, 0x78, 0, 0xff, 0xff, 0]);
        let cdb = Cdb::write(Lba(1 << 32), 8, true);
        assert_eq!(cdb.0[..16], [0x8a, 8, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0]);
        assert_eq!(Cdb::read(Lba(0), 0x10000).0[..14], [0x88, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0]);
    }

    #[test]
    fn an_unmap_has_its_length() {
        let extents = [Extent { start: Lba(5), blocks: 6 }, Extent { start: Lba(1 << 40), blocks: 1 }];
        let mut list = vec![0xff; unmap_bytes(2)];
        unmap_list(&extents, &mut list);
        assert_eq!(list[..8], [0, 38, 0, 32, 0, 0, 0, 0]);
        assert_eq!(list[8..24], [0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 6, 0, 0, 0, 0]);
        assert_eq!(list[24..36], [0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
        assert_eq!(Cdb::unmap(2).0[..10], [0x42, 0, 0, 0, 0, 0, 0, 0, 40, 0]);
    }
}
