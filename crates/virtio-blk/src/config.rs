//! The configuration space and the feature bits that belong to it. Source: virtio 1.3 sections 5.2.3 and 5.2.4.

use mqblk_core::units::SECTOR_BYTES;
use mqblk_core::{Geometry, Limits};

/// Feature bits of virtio-blk. Source: virtio 1.3 section 5.2.3.
pub mod features {
    use virtio_bindings::virtio_blk as b;
    /// `size_max` is valid.
    pub const SIZE_MAX: u64 = 1 << b::VIRTIO_BLK_F_SIZE_MAX;
    /// `seg_max` is valid.
    pub const SEG_MAX: u64 = 1 << b::VIRTIO_BLK_F_SEG_MAX;
    /// The disk is read-only.
    pub const RO: u64 = 1 << b::VIRTIO_BLK_F_RO;
    /// `blk_size` is valid.
    pub const BLK_SIZE: u64 = 1 << b::VIRTIO_BLK_F_BLK_SIZE;
    /// Flush is understood.
    pub const FLUSH: u64 = 1 << b::VIRTIO_BLK_F_FLUSH;
    /// `topology` is valid.
    pub const TOPOLOGY: u64 = 1 << b::VIRTIO_BLK_F_TOPOLOGY;
    /// `writeback` can be read and written.
    pub const CONFIG_WCE: u64 = 1 << b::VIRTIO_BLK_F_CONFIG_WCE;
    /// `num_queues` is valid.
    pub const MQ: u64 = 1 << b::VIRTIO_BLK_F_MQ;
    /// Discard is understood.
    pub const DISCARD: u64 = 1 << b::VIRTIO_BLK_F_DISCARD;
    /// Write zeroes is understood.
    pub const WRITE_ZEROES: u64 = 1 << b::VIRTIO_BLK_F_WRITE_ZEROES;
}

/// Offset of `writeback`. Source: virtio 1.3 section 5.2.4, `struct virtio_blk_config`.
pub(crate) const WRITEBACK_OFFSET: u32 = 32;

/// Bytes of the structure up to and including secure erase; later bytes read as zeroes.
const CONFIG_BYTES: usize = 72;

/// SIZE_MAX: bytes of one descriptor of data, as advice. Longer ones are served too.
const SIZE_MAX: u32 = 4 << 20;

/// Most ranges of one discard or write-zeroes request.
pub(crate) const MAX_RANGES: u32 = 64;

/// The values of the configuration space.
#[derive(Clone, Copy, Debug)]
pub struct ConfigSpace {
    /// The disk's geometry.
    pub geometry: Geometry,
    /// The disk's limits.
    pub limits: Limits,
    /// Number of virtqueues.
    pub queues: u16,
    /// Most data segments of one request.
    pub seg_max: u32,
    /// True if the cache is in write-back mode.
    pub writeback: bool,
}

impl ConfigSpace {
    /// Returns the bytes, little-endian. Source: virtio 1.3 section 5.2.4.
    pub fn bytes(&self) -> [u8; CONFIG_BYTES] {
        let mut all = [0; CONFIG_BYTES];
        let mut put = |at: usize, value: &[u8]| all[at..at + value.len()].copy_from_slice(value);
        let block = self.geometry.logical_block.bytes();
        let blocks = |bytes: u64| bytes / u64::from(block);
        put(0, &self.geometry.size.sectors().0.to_le_bytes());
        put(8, &SIZE_MAX.to_le_bytes());
        put(12, &self.seg_max.to_le_bytes());
        put(20, &block.to_le_bytes());
        let exponent = (self.geometry.physical_block.bytes() / block).max(1).ilog2();
        put(24, &[exponent as u8, self.geometry.alignment_offset]);
        put(26, &clamp_u16(blocks(self.geometry.min_io.0)).to_le_bytes());
        put(28, &clamp_u32(blocks(self.geometry.opt_io.0)).to_le_bytes());
        put(32, &[u8::from(self.writeback)]);
        put(34, &self.queues.to_le_bytes());
        if let Some(discard) = self.limits.discard {
            put(36, &clamp_u32(discard.max_len.sectors().0).to_le_bytes());
            put(40, &MAX_RANGES.to_le_bytes());
            let granularity = discard.granularity.0.max(u64::from(block));
            put(44, &clamp_u32(granularity / SECTOR_BYTES).to_le_bytes());
        }
        if let Some(max_len) = self.limits.write_zeroes {
            put(48, &clamp_u32(max_len.sectors().0).to_le_bytes());
            put(52, &MAX_RANGES.to_le_bytes());
            put(56, &[u8::from(self.limits.discard.is_some())]);
        }
        all
    }

    /// Returns the feature bits of the device type that fit this disk.
    pub fn features(&self) -> u64 {
        use features as f;
        let mut bits = f::SIZE_MAX | f::SEG_MAX | f::BLK_SIZE | f::TOPOLOGY | f::FLUSH | f::CONFIG_WCE | f::MQ;
        if self.geometry.read_only {
            return bits | f::RO;
        }
        if self.limits.discard.is_some() {
            bits |= f::DISCARD;
        }
        if self.limits.write_zeroes.is_some() {
            bits |= f::WRITE_ZEROES;
        }
        bits
    }
}

fn clamp_u16(value: u64) -> u16 {
    u16::try_from(value).unwrap_or(u16::MAX)
}

fn clamp_u32(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use mqblk_core::{BlockSize, ByteLen, DiscardLimits};

    fn space() -> ConfigSpace {
        ConfigSpace {
            geometry: Geometry {
                size: ByteLen(1 << 30),
                logical_block: BlockSize::B512,
                physical_block: BlockSize::B4096,
                alignment_offset: 3,
                min_io: ByteLen(4096),
                opt_io: ByteLen(1 << 20),
                read_only: false,
            },
            limits: Limits {
                max_transfer: ByteLen(1 << 20),
                max_segments: 1024,
                discard: Some(DiscardLimits { granularity: ByteLen(4096), max_len: ByteLen(1 << 40) }),
                write_zeroes: Some(ByteLen(1 << 21)),
                volatile_cache: true,
                cost_per_request: true,
                pins_memory: false,
            },
            queues: 5,
            seg_max: 126,
            writeback: true,
        }
    }

    fn u32_at(bytes: &[u8], at: usize) -> u32 {
        u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    #[test]
    fn every_field_is_where_the_specification_puts_it() {
        let bytes = space().bytes();
        assert_eq!(u64::from_le_bytes(bytes[..8].try_into().unwrap()), 1 << 21);
        assert_eq!((u32_at(&bytes, 12), u32_at(&bytes, 20)), (126, 512));
        assert_eq!((bytes[24], bytes[25]), (3, 3));
        assert_eq!(u16::from_le_bytes([bytes[26], bytes[27]]), 8);
        assert_eq!(u32_at(&bytes, 28), 2048);
        assert_eq!((bytes[32], bytes[34]), (1, 5));
        assert_eq!((u32_at(&bytes, 36), u32_at(&bytes, 40), u32_at(&bytes, 44)), (1 << 31, 64, 8));
        assert_eq!((u32_at(&bytes, 48), u32_at(&bytes, 52), bytes[56]), (4096, 64, 1));
    }

    #[test]
    fn a_read_only_disk_offers_nothing_that_writes() {
        let mut space = space();
        space.geometry.read_only = true;
        let bits = space.features();
        assert_ne!(bits & features::RO, 0);
        assert_eq!(bits & (features::DISCARD | features::WRITE_ZEROES), 0);
    }

    #[test]
    fn unsupported_operations_are_not_offered() {
        let mut space = space();
        space.limits.discard = None;
        space.limits.write_zeroes = None;
        assert_eq!(space.features() & (features::DISCARD | features::WRITE_ZEROES), 0);
        let bytes = space.bytes();
        assert!(bytes[36..60].iter().all(|byte| *byte == 0));
    }
}
