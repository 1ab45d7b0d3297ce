//! virtio-blk requests as segments of memory, in any layout. Source: virtio 1.3 section 5.2.6.

use super::memory::SharedMemory;
use super::ring::{HostileRing, INDIRECT, NEXT, RawDescriptor, WRITE};

/// Request types.
#[allow(missing_docs, reason = "the specification's own names")]
pub mod request_type {
    pub const IN: u32 = 0;
    pub const OUT: u32 = 1;
    pub const FLUSH: u32 = 4;
    pub const GET_ID: u32 = 8;
    pub const DISCARD: u32 = 11;
    pub const WRITE_ZEROES: u32 = 13;
    pub const SECURE_ERASE: u32 = 14;
}

/// Status: VIRTIO_BLK_S_OK.
pub const STATUS_OK: u8 = 0;
/// Status: VIRTIO_BLK_S_IOERR.
pub const STATUS_IOERR: u8 = 1;
/// Status: VIRTIO_BLK_S_UNSUPP.
pub const STATUS_UNSUPP: u8 = 2;
/// Value of a status byte before the device writes it.
pub const STATUS_POISON: u8 = 0xee;

/// Bytes of a sector.
pub const SECTOR: usize = 512;

/// A segment of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemorySegment {
    /// Guest address.
    pub address: u64,
    /// Bytes.
    pub len: u32,
    /// Writable by the device.
    pub writable: bool,
}

/// Returns a segment that the device reads.
pub fn readable(address: u64, len: u32) -> MemorySegment {
    MemorySegment { address, len, writable: false }
}

/// Returns a segment that the device writes.
pub fn writable(address: u64, len: u32) -> MemorySegment {
    MemorySegment { address, len, writable: true }
}

/// Returns the 16 bytes of a header.
pub fn header(kind: u32, sector: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&kind.to_le_bytes());
    bytes[8..].copy_from_slice(&sector.to_le_bytes());
    bytes
}

/// Returns one range of a discard or a write of zeroes.
pub fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
}

fn descriptor(segment: &MemorySegment, next: Option<u16>) -> RawDescriptor {
    let flags = if segment.writable { WRITE } else { 0 } | if next.is_some() { NEXT } else { 0 };
    RawDescriptor { address: segment.address, len: segment.len, flags, next: next.unwrap_or(0) }
}

/// Writes segments as direct descriptors, to the entries `slots` in that order. Returns the head.
///
/// # Panics
/// When there are fewer slots than segments, or no segment.
pub fn write_direct(ring: &HostileRing, slots: &[u16], segments: &[MemorySegment]) -> u16 {
    for (at, segment) in segments.iter().enumerate() {
        ring.write_descriptor(slots[at], descriptor(segment, (at + 1 < segments.len()).then(|| slots[at + 1])));
    }
    slots[0]
}

/// Writes segments to an indirect table of `entries` entries at `address`, to the entries `slots` in that order; the
/// first must be 0. Returns the descriptor of the table.
pub fn write_indirect(
    memory: &SharedMemory,
    address: u64,
    entries: u16,
    slots: &[u16],
    segments: &[MemorySegment],
) -> RawDescriptor {
    for (at, segment) in segments.iter().enumerate() {
        let next = (at + 1 < segments.len()).then(|| slots[at + 1]);
        memory.write(address + 16 * u64::from(slots[at]), &descriptor(segment, next).bytes());
    }
    RawDescriptor { address, len: 16 * u32::from(entries), flags: INDIRECT, next: 0 }
}
