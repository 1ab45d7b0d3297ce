//! Units as types. All conversions between them are here and are checked: three well-known codebases have overflow bugs
//! in `sector << 9`.

use std::fmt;

/// Bytes in a sector as virtio-blk and blkif count them, independent of the disk's logical block size.
/// Source: virtio 1.3 section 5.2.6 ("512-byte sectors"), Xen `io/blkif.h`.
pub const SECTOR_BYTES: u64 = 512;

/// A position on a disk or a capacity, in 512-byte sectors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sector512(pub u64);

/// A position on a disk, in bytes from its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteOffset(pub u64);

/// A length, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteLen(pub u64);

/// A logical block size: a power of two from 512 to 65536 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockSize(u32);

impl Sector512 {
    /// Returns the byte offset of this sector; `None` when it does not fit in 64 bits.
    #[inline]
    pub const fn to_offset(self) -> Option<ByteOffset> {
        match self.0.checked_mul(SECTOR_BYTES) {
            Some(bytes) => Some(ByteOffset(bytes)),
            None => None,
        }
    }

    /// Returns this number of sectors as a length; `None` when it does not fit in 64 bits.
    #[inline]
    pub const fn to_len(self) -> Option<ByteLen> {
        match self.0.checked_mul(SECTOR_BYTES) {
            Some(bytes) => Some(ByteLen(bytes)),
            None => None,
        }
    }
}

impl ByteOffset {
    /// Returns the offset just past `len` bytes from here; `None` on overflow.
    #[inline]
    pub const fn end(self, len: ByteLen) -> Option<ByteOffset> {
        match self.0.checked_add(len.0) {
            Some(end) => Some(ByteOffset(end)),
            None => None,
        }
    }

    /// Returns true if this offset is a multiple of `block`.
    #[inline]
    pub const fn is_aligned(self, block: BlockSize) -> bool {
        self.0 & (block.0 as u64 - 1) == 0
    }

    /// Returns the sector that starts here; `None` when the offset is not a multiple of 512.
    #[inline]
    pub const fn to_sector(self) -> Option<Sector512> {
        if self.0.is_multiple_of(SECTOR_BYTES) { Some(Sector512(self.0 / SECTOR_BYTES)) } else { None }
    }
}

impl ByteLen {
    /// No bytes.
    pub const ZERO: ByteLen = ByteLen(0);

    /// Returns the whole 512-byte sectors in this length, rounded down.
    #[inline]
    pub const fn sectors(self) -> Sector512 {
        Sector512(self.0 / SECTOR_BYTES)
    }

    /// Returns true if this length is a multiple of `block`.
    #[inline]
    pub const fn is_aligned(self, block: BlockSize) -> bool {
        self.0 & (block.0 as u64 - 1) == 0
    }
}

impl BlockSize {
    /// 512 bytes.
    pub const B512: BlockSize = BlockSize(512);
    /// 4096 bytes.
    pub const B4096: BlockSize = BlockSize(4096);

    /// Returns a block size; `None` unless `bytes` is a power of two from 512 to 65536.
    pub const fn new(bytes: u32) -> Option<BlockSize> {
        if bytes.is_power_of_two() && bytes >= 512 && bytes <= 65536 { Some(BlockSize(bytes)) } else { None }
    }

    /// Returns the size in bytes.
    #[inline]
    pub const fn bytes(self) -> u32 {
        self.0
    }

    /// Returns the start of block `lba`; `None` when it does not fit in 64 bits.
    #[inline]
    pub const fn offset_of(self, lba: u64) -> Option<ByteOffset> {
        match lba.checked_mul(self.0 as u64) {
            Some(bytes) => Some(ByteOffset(bytes)),
            None => None,
        }
    }

    /// Returns the length of `blocks` blocks; `None` when it does not fit in 64 bits.
    #[inline]
    pub const fn len_of(self, blocks: u64) -> Option<ByteLen> {
        match blocks.checked_mul(self.0 as u64) {
            Some(bytes) => Some(ByteLen(bytes)),
            None => None,
        }
    }

    /// Returns the whole blocks in `len`, rounded down.
    #[inline]
    pub const fn blocks_in(self, len: ByteLen) -> u64 {
        len.0 >> self.0.trailing_zeros()
    }
}

/// Returns true if `len` bytes at `start` lie inside a disk of `size` bytes. No input overflows.
#[inline]
pub const fn in_range(start: ByteOffset, len: ByteLen, size: ByteLen) -> bool {
    match start.end(len) {
        Some(end) => end.0 <= size.0,
        None => false,
    }
}

impl fmt::Display for ByteLen {
    /// Exact: the largest power-of-1024 suffix that divides the length, for example `1G` or `1536K`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (shift, suffix) in [(60, "E"), (50, "P"), (40, "T"), (30, "G"), (20, "M"), (10, "K")] {
            if self.0 != 0 && self.0.trailing_zeros() >= shift {
                return write!(f, "{}{}", self.0 >> shift, suffix);
            }
        }
        write!(f, "{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_sector_that_does_not_fit_is_refused() {
        assert_eq!(Sector512(1 << 55).to_offset(), None);
        assert_eq!(Sector512((1 << 55) - 1).to_offset(), Some(ByteOffset(((1 << 55) - 1) * 512)));
        assert_eq!(Sector512(u64::MAX).to_len(), None);
    }

    #[test]
    fn block_sizes_are_powers_of_two_in_range() {
        for good in [512, 1024, 4096, 65536] {
            assert_eq!(BlockSize::new(good).map(BlockSize::bytes), Some(good));
        }
        for bad in [0, 1, 256, 513, 1000, 131072, u32::MAX] {
            assert_eq!(BlockSize::new(bad), None);
        }
    }

    #[test]
    fn blocks_and_bytes_convert_both_ways_or_not_at_all() {
        assert_eq!(BlockSize::B4096.offset_of(3), Some(ByteOffset(12288)));
        assert_eq!(BlockSize::B4096.len_of(u64::MAX / 4096), Some(ByteLen(u64::MAX - 4095)));
        assert_eq!(BlockSize::B4096.len_of(u64::MAX / 4096 + 1), None);
        assert_eq!(BlockSize::B512.offset_of(1 << 55), None);
        assert_eq!(BlockSize::B512.blocks_in(ByteLen(1535)), 2);
    }

    proptest! {
        #[test]
        fn range_check_agrees_with_wide_arithmetic(start: u64, len: u64, size: u64) {
            let wide = u128::from(start) + u128::from(len);
            prop_assert_eq!(in_range(ByteOffset(start), ByteLen(len), ByteLen(size)), wide <= u128::from(size));
        }

        #[test]
        fn displayed_lengths_parse_back(len: u64) {
            let text = ByteLen(len).to_string();
            prop_assert_eq!(crate::settings::parse_size(&text), Some(ByteLen(len)));
        }
    }
}
