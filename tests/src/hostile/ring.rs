//! The driver's side of a split ring, without any checks. Source: virtio 1.3 section 2.7.

use std::sync::Arc;

use super::memory::SharedMemory;

/// VIRTQ_DESC_F_NEXT.
pub const NEXT: u16 = 1;
/// VIRTQ_DESC_F_WRITE.
pub const WRITE: u16 = 2;
/// VIRTQ_DESC_F_INDIRECT.
pub const INDIRECT: u16 = 4;

/// A descriptor with any content.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RawDescriptor {
    /// Guest address.
    pub address: u64,
    /// Bytes.
    pub len: u32,
    /// [`NEXT`], [`WRITE`], [`INDIRECT`], or others.
    pub flags: u16,
    /// Index of the next descriptor.
    pub next: u16,
}

impl RawDescriptor {
    /// Returns its 16 bytes.
    pub fn bytes(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.len.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.flags.to_le_bytes());
        bytes[14..].copy_from_slice(&self.next.to_le_bytes());
        bytes
    }
}

/// Guest addresses of a ring.
#[derive(Clone, Copy, Debug)]
pub struct RingAddresses {
    /// Descriptor table.
    pub desc: u64,
    /// Available ring.
    pub avail: u64,
    /// Used ring.
    pub used: u64,
}

impl RingAddresses {
    /// Returns three pages from `start` on, for at most 256 entries.
    pub fn pages(start: u64) -> RingAddresses {
        RingAddresses { desc: start, avail: start + 0x1000, used: start + 0x2000 }
    }
}

/// A split ring.
#[derive(Debug)]
pub struct HostileRing {
    /// Guest memory of the ring.
    pub memory: Arc<SharedMemory>,
    /// Its addresses.
    pub addresses: RingAddresses,
    /// Number of entries.
    pub size: u16,
    /// The next available index.
    pub avail: u16,
    /// The used index of the next completion to take.
    pub last_used: u16,
}

impl HostileRing {
    /// Creates a ring whose indices start at 0.
    pub fn new(memory: Arc<SharedMemory>, addresses: RingAddresses, size: u16) -> HostileRing {
        HostileRing { memory, addresses, size, avail: 0, last_used: 0 }
    }

    /// Writes descriptor `index`.
    pub fn write_descriptor(&self, index: u16, desc: RawDescriptor) {
        self.memory.write(self.addresses.desc + 16 * u64::from(index), &desc.bytes());
    }

    /// Puts `head` into the next entry of the available ring, invisible until [`publish`](Self::publish).
    pub fn offer(&mut self, head: u16) {
        let entry = self.addresses.avail + 4 + 2 * u64::from(self.avail % self.size);
        self.memory.write(entry, &head.to_le_bytes());
        self.avail = self.avail.wrapping_add(1);
    }

    /// Stores the available index.
    pub fn publish(&self) {
        self.memory.write(self.addresses.avail + 2, &self.avail.to_le_bytes());
    }

    /// Returns the device's used index.
    pub fn used(&self) -> u16 {
        self.memory.read_u16(self.addresses.used + 2)
    }

    /// Sets `used_event`: requests a call when the used index passes `event` (with EVENT_IDX).
    pub fn set_used_event(&self, event: u16) {
        self.memory.write(self.addresses.avail + 4 + 2 * u64::from(self.size), &event.to_le_bytes());
    }

    /// Returns `avail_event`: the device requests a kick for this index (with EVENT_IDX).
    pub fn avail_event(&self) -> u16 {
        self.memory.read_u16(self.addresses.used + 4 + 8 * u64::from(self.size))
    }

    /// Takes the next completion: head and length.
    pub fn take(&mut self) -> Option<(u32, u32)> {
        if self.used() == self.last_used {
            return None;
        }
        let entry = self.addresses.used + 4 + 8 * u64::from(self.last_used % self.size);
        self.last_used = self.last_used.wrapping_add(1);
        Some((self.memory.read_u32(entry), self.memory.read_u32(entry + 4)))
    }
}
