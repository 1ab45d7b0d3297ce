//! Layout of a packed virtqueue: its descriptors, and its two event suppression structures.

use std::sync::atomic::Ordering;

use mqblk_memory::{GuestAddress, GuestMemory, SharedU32, SharedWords};

use super::suppression::Suppression;
use crate::format::{Descriptor, MAX_QUEUE_SIZE, RingAddresses, RingSetupError, SUPPRESSION_BYTES};

/// Bytes of one descriptor.
pub const DESC_BYTES: u64 = 16;
/// Words of one descriptor.
const DESC_WORDS: usize = 2;

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
