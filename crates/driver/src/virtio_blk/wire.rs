//! virtio-blk wire format. Source: virtio 1.3 section 5.2; offsets checked with Linux's `virtio_blk.h`.

use mqblk_core::Sector512;

/// Feature bits. Source: virtio 1.3 section 5.2.3.
pub(crate) mod feature {
    pub(crate) const SIZE_MAX: u64 = 1 << 1;
    pub(crate) const SEG_MAX: u64 = 1 << 2;
    pub(crate) const RO: u64 = 1 << 5;
    pub(crate) const BLK_SIZE: u64 = 1 << 6;
    pub(crate) const FLUSH: u64 = 1 << 9;
    pub(crate) const TOPOLOGY: u64 = 1 << 10;
    pub(crate) const CONFIG_WCE: u64 = 1 << 11;
    pub(crate) const MQ: u64 = 1 << 12;
    pub(crate) const DISCARD: u64 = 1 << 13;
    pub(crate) const WRITE_ZEROES: u64 = 1 << 14;
    /// Features that this driver supports.
    pub(crate) const ALL: u64 =
        SIZE_MAX | SEG_MAX | RO | BLK_SIZE | FLUSH | TOPOLOGY | CONFIG_WCE | MQ | DISCARD | WRITE_ZEROES;
}

/// Request types. Source: virtio 1.3 section 5.2.6.
pub(crate) mod request_type {
    pub(crate) const IN: u32 = 0;
    pub(crate) const OUT: u32 = 1;
    pub(crate) const FLUSH: u32 = 4;
    pub(crate) const GET_ID: u32 = 8;
    pub(crate) const DISCARD: u32 = 11;
    pub(crate) const WRITE_ZEROES: u32 = 13;
}

/// Bytes of a request's header.
pub(crate) const HEADER_BYTES: u32 = 16;
/// Bytes of one range of a discard or write-zeroes request.
pub(crate) const RANGE_BYTES: u32 = 16;
/// Largest number of ranges in one request of this driver.
pub(crate) const MAX_RANGES: usize = 32;
/// Bytes that GET_ID returns.
pub(crate) const ID_BYTES: u32 = 20;
/// Bytes of the configuration space up to the last field that this driver knows (`write_zeroes_may_unmap` and its
/// padding). Every server has as many: QEMU reads at least 60.
pub(crate) const CONFIG_BYTES: usize = 60;
/// Offset of `writeback` in the configuration space.
pub(crate) const CONFIG_WRITEBACK: u32 = 32;

/// Returns a request's header as two words: type and reserved, then the sector.
#[inline]
pub(crate) const fn header(kind: u32, sector: Sector512) -> [u64; 2] {
    [(kind as u64).to_le(), sector.0.to_le()]
}

/// One range of a discard or write-zeroes request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SectorRange {
    /// First sector.
    pub start: Sector512,
    /// Sectors.
    pub sectors: u32,
    /// For write zeroes: the space may be deallocated.
    pub unmap: bool,
}

impl SectorRange {
    pub(crate) const fn to_words(self) -> [u64; 2] {
        [self.start.0.to_le(), (self.sectors as u64 | (self.unmap as u64) << 32).to_le()]
    }
}

/// The raw configuration space.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlkConfig(pub(crate) [u8; CONFIG_BYTES]);

impl BlkConfig {
    fn bytes<const N: usize>(&self, at: usize) -> [u8; N] {
        std::array::from_fn(|index| self.0[at + index])
    }

    pub(crate) fn u64(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.bytes(at))
    }

    pub(crate) fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.bytes(at))
    }

    pub(crate) fn u16(&self, at: usize) -> u16 {
        u16::from_le_bytes(self.bytes(at))
    }
}
