//! Layout of a packed virtqueue: its descriptors, its two event suppression structures, and positions in it.

use std::sync::atomic::Ordering;

use mqblk_memory::{GuestAddress, GuestMemory, SharedU32, SharedWords};

use super::suppression::Suppression;
use crate::format::{Descriptor, MAX_QUEUE_SIZE, RingAddresses, RingSetupError, SUPPRESSION_BYTES};

/// Bytes of one descriptor.
pub const DESC_BYTES: u64 = 16;
/// Words of one descriptor.
const DESC_WORDS: usize = 2;

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

/// Returns the second word of a descriptor.
#[inline]
pub(super) const fn state_word(len: u32, id: u16, flags: u16) -> u64 {
    (len as u64 | (id as u64) << 32 | (flags as u64) << 48).to_le()
}

/// Decodes the second word of a descriptor as its length, its buffer id and its flags.
#[inline]
pub(super) const fn from_state_word(word: u64) -> (u32, u16, u16) {
    let word = u64::from_le(word);
    (word as u32, (word >> 32) as u16, (word >> 48) as u16)
}

/// Decodes a descriptor, as two little-endian words. Without its buffer id.
#[inline]
pub(super) fn descriptor_from_words([address, state]: [u64; 2]) -> Descriptor {
    let (len, _, flags) = from_state_word(state);
    Descriptor { address: u64::from_le(address), len, flags, next: 0 }
}

/// A ring in shared memory. All fields are little-endian.
#[derive(Debug)]
pub struct PackedRing {
    /// The descriptors: an address, then length, buffer id and flags in a word that is always loaded and stored at
    /// once.
    words: SharedWords,
    size: u16,
    /// The driver's event suppression, for calls.
    driver_event: SharedU32,
    /// The device's event suppression, for kicks.
    device_event: SharedU32,
    /// Guest address of the descriptors, for the dirty log.
    pub(super) desc: GuestAddress,
    /// Guest address of the device's event suppression.
    pub(super) device_area: GuestAddress,
}

impl PackedRing {
    /// Resolves all parts of a ring of `size` entries. `avail` is the driver area, `used` the device area.
    ///
    /// # Errors
    /// [`RingSetupError`] with the invalid part.
    pub fn resolve(memory: &GuestMemory, at: &RingAddresses, size: u16) -> Result<PackedRing, RingSetupError> {
        // The specification allows any size. All known VMMs and drivers use powers of two, which split rings require.
        if !size.is_power_of_two() || size > MAX_QUEUE_SIZE {
            return Err(RingSetupError::Size(size));
        }
        let bad =
            |part, address: GuestAddress, len, align| RingSetupError::Part { part, address: address.0, len, align };
        let no_desc = bad("descriptor ring", at.desc, DESC_BYTES * u64::from(size), 16);
        if !at.desc.0.is_multiple_of(16) {
            return Err(no_desc);
        }
        let cell = |part, at| memory.shared_u32(at).ok_or(bad(part, at, SUPPRESSION_BYTES, 4));
        Ok(PackedRing {
            words: memory.shared_words(at.desc, DESC_WORDS * usize::from(size)).ok_or(no_desc)?,
            size,
            driver_event: cell("driver event suppression", at.avail)?,
            device_event: cell("device event suppression", at.used)?,
            desc: at.desc,
            device_area: at.used,
        })
    }

    /// Returns the number of entries.
    #[inline]
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Loads the length, buffer id and flags of the descriptor in this slot. Data written before its flags is visible.
    #[inline]
    pub fn load_state(&self, slot: u16) -> (u32, u16, u16) {
        // A slot is below the size.
        from_state_word(
            self.words.get(DESC_WORDS * usize::from(slot) + 1).map_or(0, |word| word.load(Ordering::Acquire)),
        )
    }

    /// Loads the address of the descriptor in this slot.
    #[inline]
    pub fn load_address(&self, slot: u16) -> u64 {
        self.words.get(DESC_WORDS * usize::from(slot)).map_or(0, |word| u64::from_le(word.load(Ordering::Relaxed)))
    }

    /// Loads the descriptor in this slot, and its buffer id.
    #[inline]
    pub(super) fn load(&self, slot: u16) -> (Descriptor, u16) {
        let Some([address, state]) = self.words.get_pair(DESC_WORDS * usize::from(slot)) else {
            return (Descriptor::default(), 0);
        };
        // The state first: the address is valid only with it.
        let (len, id, flags) = from_state_word(state.load(Ordering::Acquire));
        (Descriptor { address: u64::from_le(address.load(Ordering::Relaxed)), len, flags, next: 0 }, id)
    }

    /// Stores the length, buffer id and flags of the descriptor in this slot. Earlier stores are visible with it.
    #[inline]
    pub(super) fn store_state(&self, slot: u16, word: u64) {
        if let Some(state) = self.words.get(DESC_WORDS * usize::from(slot) + 1) {
            state.store(word, Ordering::Release);
        }
    }

    /// Stores the address of the descriptor in this slot.
    #[inline]
    pub(super) fn store_address(&self, slot: u16, address: u64) {
        if let Some(word) = self.words.get(DESC_WORDS * usize::from(slot)) {
            word.store(address.to_le(), Ordering::Relaxed);
        }
    }

    /// Makes a new ring's suppressions request every notification.
    pub(super) fn clear_suppression(&self) {
        self.driver_event.store(0, Ordering::Relaxed);
        self.device_event.store(0, Ordering::Relaxed);
    }

    /// Returns the suppression of kicks, which the device writes.
    #[inline]
    pub(super) fn kicks(&self) -> Suppression<'_, SharedU32> {
        Suppression { cell: &self.device_event }
    }

    /// Returns the suppression of calls, which the driver writes.
    #[inline]
    pub(super) fn calls(&self) -> Suppression<'_, SharedU32> {
        Suppression { cell: &self.driver_event }
    }
}
