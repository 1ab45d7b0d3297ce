//! The driver's side of a split ring, without any checks. Source: virtio 1.3 section 2.7.

use std::sync::Arc;

use super::memory::Memory;

/// VIRTQ_DESC_F_NEXT.
pub const NEXT: u16 = 1;
/// VIRTQ_DESC_F_WRITE.
pub const WRITE: u16 = 2;
/// VIRTQ_DESC_F_INDIRECT.
pub const INDIRECT: u16 = 4;

/// A descriptor with any content.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Desc {
    /// Guest address.
    pub address: u64,
    /// Bytes.
    pub len: u32,
    /// [`NEXT`], [`WRITE`], [`INDIRECT`], or others.
    pub flags: u16,
    /// Index of the next descriptor.
    pub next: u16,
}

impl Desc {
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
pub struct Places {
    /// Descriptor table.
    pub desc: u64,
    /// Available ring.
    pub avail: u64,
    /// Used ring.
    pub used: u64,
}

impl Places {
    /// Returns three pages from `start` on, for at most 256 entries.
    pub fn pages(start: u64) -> Places {
        Places { desc: start, avail: start + 0x1000, used: start + 0x2000 }
    }
}

/// A split ring.
#[derive(Debug)]
pub struct Ring {
    /// Guest memory of the ring.
    pub memory: Arc<Memory>,
    /// Its addresses.
    pub at: Places,
    /// Number of entries.
    pub size: u16,
    /// The next available index to publish.
    pub avail: u16,
    /// The used index up to which completions were taken.
    pub taken: u16,
}

impl Ring {
    /// Creates a ring whose indices start at 0.
    pub fn new(memory: Arc<Memory>, at: Places, size: u16) -> Ring {
        Ring { memory, at, size, avail: 0, taken: 0 }
    }

    /// Writes descriptor `index`.
    pub fn put(&self, index: u16, desc: Desc) {
        self.memory.write(self.at.desc + 16 * u64::from(index), &desc.bytes());
    }

    /// Puts `head` into the next entry of the available ring; not visible before [`publish`](Self::publish).
    pub fn offer(&mut self, head: u16) {
        let entry = self.at.avail + 4 + 2 * u64::from(self.avail % self.size);
        self.memory.write(entry, &head.to_le_bytes());
        self.avail = self.avail.wrapping_add(1);
    }

    /// Stores the available index.
    pub fn publish(&self) {
        self.memory.write(self.at.avail + 2, &self.avail.to_le_bytes());
    }

    /// Returns the device's used index.
    pub fn used(&self) -> u16 {
        self.memory.u16(self.at.used + 2)
    }

    /// Sets `used_event`: requests a call when the used index passes `event` (with EVENT_IDX).
    pub fn call_after(&self, event: u16) {
        self.memory.write(self.at.avail + 4 + 2 * u64::from(self.size), &event.to_le_bytes());
    }

    /// Returns `avail_event`: the index for which the device requests a kick (with EVENT_IDX).
    pub fn kick_after(&self) -> u16 {
        self.memory.u16(self.at.used + 4 + 8 * u64::from(self.size))
    }

    /// Takes the next completion: head and length.
    pub fn take(&mut self) -> Option<(u32, u32)> {
        if self.used() == self.taken {
            return None;
        }
        let entry = self.at.used + 4 + 8 * u64::from(self.taken % self.size);
        self.taken = self.taken.wrapping_add(1);
        Some((self.memory.u32(entry), self.memory.u32(entry + 4)))
    }
}
