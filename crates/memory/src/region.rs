//! A region of guest memory: a mapping with its addresses.

use std::fs::File;
use std::io;
use std::ptr::NonNull;

use mqblk_core::{BudgetRefusal, MappingCharge};

use crate::mapping::{Mapping, create_memfd};
use crate::sigbus::MemoryLoss;

/// An address as the guest sees it (in descriptors).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GuestAddress(pub u64);

/// An address in the VMM's own address space (vhost-user identifies rings by it).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UserAddress(pub u64);

/// Error of a memory table.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// A region could not be mapped.
    #[error("memory region at guest address {guest:#x}, {len:#x} bytes: {source}")]
    Map {
        /// Its first guest address.
        guest: u64,
        /// Its length in bytes.
        len: u64,
        /// The system's error.
        source: io::Error,
    },
    /// A region's end does not fit in 64 bits, or it is empty.
    #[error("memory region at {start:#x}: found {len:#x} bytes, expected 1 byte or more that end below 2^64")]
    Range {
        /// First address, guest or user.
        start: u64,
        /// Its length in bytes.
        len: u64,
    },
    /// The tenant's budget refuses it.
    #[error("guest memory: {0}")]
    Budget(#[from] BudgetRefusal),
    /// Two regions cover the same guest addresses.
    #[error("memory regions overlap: one starts at guest address {second:#x}, inside the one at {first:#x}")]
    Overlap {
        /// Start of the first.
        first: u64,
        /// Start of the second.
        second: u64,
    },
    /// There is no such region to remove.
    #[error("no memory region at guest address {guest:#x} with {len:#x} bytes at user address {user:#x}")]
    NoSuchRegion {
        /// The requested guest address.
        guest: u64,
        /// The requested user address.
        user: u64,
        /// The requested length.
        len: u64,
    },
}

/// One mapped region of guest memory.
#[derive(Debug)]
pub struct Region {
    pub(crate) guest: GuestAddress,
    pub(crate) user: UserAddress,
    pub(crate) len: u64,
    pub(crate) mapping: Mapping,
    /// Offset of the region in the mapping.
    pub(crate) delta: usize,
    /// Dropped after the mapping.
    charge: Option<MappingCharge>,
}

impl Region {
    /// Returns the region with the charge of its mapping, which is held until it is unmapped.
    #[must_use]
    pub fn with_charge(mut self, charge: MappingCharge) -> Region {
        self.charge = Some(charge);
        self
    }

    /// Maps `len` bytes of `file` from `offset` as guest memory at `guest`. The VMM has mapped it at `user`.
    ///
    /// # Errors
    /// When the range is impossible or the file cannot be mapped.
    pub fn from_file(
        file: &File,
        offset: u64,
        len: u64,
        guest: GuestAddress,
        user: UserAddress,
    ) -> Result<Region, MemoryError> {
        for start in [guest.0, user.0] {
            if len == 0 || start.checked_add(len).is_none() {
                return Err(MemoryError::Range { start, len });
            }
        }
        let (mapping, delta) =
            Mapping::from_file(file, offset, len).map_err(|source| MemoryError::Map { guest: guest.0, len, source })?;
        Ok(Region { guest, user, len, mapping, delta, charge: None })
    }

    /// Allocates shared memory for a userspace driver: guest address `guest`, user address = the address in this
    /// process. Also returns the file, for the other side to map.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn shared(name: &str, len: u64, guest: GuestAddress) -> Result<(Region, File), MemoryError> {
        let refused = |source| MemoryError::Map { guest: guest.0, len, source };
        let file = create_memfd(name, len).map_err(refused)?;
        let mut region = Region::from_file(&file, 0, len, guest, UserAddress(0))?;
        region.user = UserAddress(region.mapping.address(0).as_ptr() as u64);
        Ok((region, file))
    }

    /// Allocates private memory that behaves like a guest region (bounce buffers).
    pub(crate) fn anonymous(len: usize) -> io::Result<Region> {
        let mapping = Mapping::anonymous(len)?;
        Ok(Region { guest: GuestAddress(0), user: UserAddress(0), len: len as u64, mapping, delta: 0, charge: None })
    }

    /// Like `anonymous`, at isolated addresses: see [`Mapping::anonymous_isolated`].
    pub(crate) fn anonymous_isolated(len: usize) -> io::Result<Region> {
        let mapping = Mapping::anonymous_isolated(len)?;
        Ok(Region { guest: GuestAddress(0), user: UserAddress(0), len: len as u64, mapping, delta: 0, charge: None })
    }

    /// Returns the first guest address.
    pub fn guest(&self) -> GuestAddress {
        self.guest
    }

    /// Returns the first address in the VMM.
    pub fn user(&self) -> UserAddress {
        self.user
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Always false: a region has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the reason if an access to it found memory lost.
    pub fn loss(&self) -> Option<MemoryLoss> {
        self.mapping.loss()
    }

    /// Returns the host address of the region's first byte, for system calls.
    pub fn host_address(&self) -> u64 {
        self.host().as_ptr() as u64
    }

    /// Returns a pointer to the region's first byte.
    pub(crate) fn host(&self) -> NonNull<u8> {
        self.mapping.address(self.delta)
    }
}
