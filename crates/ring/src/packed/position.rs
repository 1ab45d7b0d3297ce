//! Positions in a packed virtqueue, and the flags of a descriptor that say which end has written it.

/// Equal to the driver's wrap counter in an available descriptor.
pub const DESC_AVAIL: u16 = 1 << 7;
/// The inverse of the driver's wrap counter in an available descriptor; in a used one both flags are equal to the
/// device's wrap counter.
pub const DESC_USED: u16 = 1 << 15;
const DESC_STATE: u16 = DESC_AVAIL | DESC_USED;

/// A position in a ring: a slot, and the lap's wrap counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// The slot.
    pub slot: u16,
    /// The wrap counter.
    pub wrap: bool,
}

impl Position {
    /// The position at which both ends of a new ring start.
    pub const FIRST: Position = Position { slot: 0, wrap: true };

    /// Returns the position `count` slots further, at most a lap, in a ring of `size` entries.
    #[inline]
    pub fn after(self, count: u16, size: u16) -> Position {
        let slot = u32::from(self.slot) + u32::from(count);
        match slot < u32::from(size) {
            true => Position { slot: slot as u16, wrap: self.wrap },
            false => Position { slot: (slot - u32::from(size)) as u16, wrap: !self.wrap },
        }
    }

    /// Encodes it as a slot in bits 0 to 14 and the wrap counter in bit 15: the form of SET_VRING_BASE and of event
    /// suppression.
    #[inline]
    pub const fn to_bits(self) -> u16 {
        self.slot | (self.wrap as u16) << 15
    }

    /// Decodes a value of [`to_bits`](Self::to_bits).
    #[inline]
    pub const fn from_bits(bits: u16) -> Position {
        Position { slot: bits & 0x7fff, wrap: bits >> 15 != 0 }
    }

    /// Returns the flags of a descriptor that is available in this lap.
    #[inline]
    pub const fn available_flags(self) -> u16 {
        if self.wrap { DESC_AVAIL } else { DESC_USED }
    }

    /// Returns the flags of a descriptor that is used in this lap.
    #[inline]
    pub const fn used_flags(self) -> u16 {
        if self.wrap { DESC_STATE } else { 0 }
    }

    /// Returns true if a descriptor with these flags is available in this lap.
    #[inline]
    pub const fn is_available(self, flags: u16) -> bool {
        flags & DESC_STATE == self.available_flags()
    }

    /// Returns true if a descriptor with these flags is used in this lap.
    #[inline]
    pub const fn is_used(self, flags: u16) -> bool {
        flags & DESC_STATE == self.used_flags()
    }
}

/// The read and the write position of a ring's device. Both are equal when nothing is in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Base {
    /// The next descriptor to read.
    pub avail: Position,
    /// The next used descriptor to write.
    pub used: Position,
}

impl Base {
    /// The base of a new ring.
    pub const FIRST: Base = Base { avail: Position::FIRST, used: Position::FIRST };

    /// Encodes it as SET_VRING_BASE does: the available position in the low half, the used one in the high half.
    /// Source: QEMU's `vhost-user.rst`, "Vring state description".
    pub const fn to_bits(self) -> u32 {
        self.avail.to_bits() as u32 | (self.used.to_bits() as u32) << 16
    }

    /// Decodes a value of [`to_bits`](Self::to_bits). Frontends that know only the available position leave the high
    /// half 0: then the used position is equal to it.
    pub const fn from_bits(bits: u32) -> Base {
        let avail = Position::from_bits(bits as u16);
        match (bits >> 16) as u16 {
            0 => Base { avail, used: avail },
            used => Base { avail, used: Position::from_bits(used) },
        }
    }
}
