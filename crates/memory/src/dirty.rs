//! The dirty log of a live migration: the written pages of a guest's memory. Source: QEMU's `vhost-user.rst`,
//! "Migration": bit `page % 8` of byte `page / 8` stands for the 4 KiB page `page` of guest addresses.
//!
//! A page is marked *after* it was written. A reader of the log first clears marks, then copies the pages: a write
//! before the mark is either in that copy or in the next.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU8, Ordering};

use mqblk_core::{BudgetRefusal, MappingCharge};

use crate::guest::GuestMemory;
use crate::mapping::Mapping;
use crate::region::GuestAddress;
use crate::rules::SharedFileRules;

/// Bytes of guest memory that one bit stands for.
const LOG_PAGE: u64 = 4096;
/// Bytes of guest memory that one byte of a log stands for.
const LOG_BYTE_SPAN: u64 = 8 * LOG_PAGE;

/// Error of a dirty log.
#[derive(Debug, thiserror::Error)]
pub enum DirtyLogError {
    /// It could not be mapped.
    #[error(
        "dirty log: found {len} bytes at offset {offset:#x} of a file, expected ones that can be mapped for writing: {source}"
    )]
    Map {
        /// Its offset in the file, as given.
        offset: u64,
        /// Its length, as given.
        len: u64,
        /// The system's error.
        source: io::Error,
    },
    /// The tenant's budget refuses it.
    #[error("dirty log: {0}")]
    Budget(#[from] BudgetRefusal),
    /// It does not cover all of the memory.
    #[error("dirty log: found {found} bytes, expected at least {expected} for guest memory up to {last:#x}")]
    TooShort {
        /// Its length in bytes.
        found: u64,
        /// Required length in bytes.
        expected: u64,
        /// The last address that it has to cover.
        last: u64,
    },
}

/// A dirty log shared with the VMM. Marks are atomic, so any number of threads and processes may set and clear them.
#[derive(Debug)]
pub struct DirtyLog {
    mapping: Mapping,
    /// Offset of the log in the mapping.
    delta: usize,
    /// Length in bytes.
    len: u64,
    /// Dropped after the mapping.
    charge: Option<MappingCharge>,
}

impl DirtyLog {
    /// Returns the log with the charge of its mapping, which is held until it is unmapped.
    #[must_use]
    pub fn with_charge(mut self, charge: MappingCharge) -> DirtyLog {
        self.charge = Some(charge);
        self
    }

    /// Maps `len` bytes of `file` from `offset` as a log.
    ///
    /// # Errors
    /// When the rules refuse the file, it is shorter than that or the system refuses.
    pub fn from_file(file: &File, rules: SharedFileRules, offset: u64, len: u64) -> Result<DirtyLog, DirtyLogError> {
        let mapped = rules.check(file).and_then(|()| Mapping::from_file(file, offset, len));
        let (mapping, delta) = mapped.map_err(|source| DirtyLogError::Map { offset, len, source })?;
        Ok(DirtyLog { mapping, delta, len, charge: None })
    }

    /// Checks that the log covers `address`.
    ///
    /// # Errors
    /// When it is too short for that.
    pub fn check_covers_address(&self, address: GuestAddress) -> Result<(), DirtyLogError> {
        let byte = address.0 / LOG_BYTE_SPAN;
        if byte < self.len {
            return Ok(());
        }
        Err(DirtyLogError::TooShort { found: self.len, expected: byte + 1, last: address.0 })
    }

    /// Checks that the log covers each page of a memory table.
    ///
    /// # Errors
    /// When it is too short for that.
    pub fn check_covers(&self, memory: &GuestMemory) -> Result<(), DirtyLogError> {
        // Regions are sorted, not empty, and end below 2^64.
        match memory.regions().last() {
            Some(region) => self.check_covers_address(GuestAddress(region.guest().0 + (region.len() - 1))),
            None => Ok(()),
        }
    }

    /// Marks the pages of `len` bytes at `address`, which have been written. Pages that the log does not cover are
    /// skipped.
    pub fn mark(&self, address: GuestAddress, len: u64) {
        if len == 0 {
            return;
        }
        let first = address.0 / LOG_PAGE;
        let last = address.0.saturating_add(len - 1) / LOG_PAGE;
        let end = (last / 8).min(self.len.saturating_sub(1));
        for byte in first / 8..=end {
            let low = first.saturating_sub(byte * 8).min(8) as u32;
            let high = (last - byte * 8).min(7) as u32;
            let bits = (0xff_u32 << low) & (0xff_u32 >> (7 - high));
            self.set_bits(byte, bits as u8);
        }
    }

    fn set_bits(&self, byte: u64, bits: u8) {
        if byte >= self.len {
            return;
        }
        let place = self.mapping.address(self.delta + byte as usize);
        // SAFETY: inside the mapping, as just checked, which `self` keeps; all accesses to it in this process are
        // atomic. A full barrier on purpose: the write to the page is visible before the mark.
        unsafe { AtomicU8::from_ptr(place.as_ptr()) }.fetch_or(bits, Ordering::SeqCst);
    }

    /// Returns true if the page of `address` is marked. False for pages that the log does not cover.
    pub fn is_marked(&self, address: GuestAddress) -> bool {
        self.with_bit(address, |byte, bit| byte.load(Ordering::SeqCst) & bit != 0)
    }

    /// Clears the mark of the page of `address`, as a VMM does before it copies the page. Returns true if it was set.
    pub fn test_and_clear(&self, address: GuestAddress) -> bool {
        self.with_bit(address, |byte, bit| byte.fetch_and(!bit, Ordering::SeqCst) & bit != 0)
    }

    fn with_bit(&self, address: GuestAddress, access: impl FnOnce(&AtomicU8, u8) -> bool) -> bool {
        let byte = address.0 / LOG_BYTE_SPAN;
        if byte >= self.len {
            return false;
        }
        let place = self.mapping.address(self.delta + byte as usize);
        // SAFETY: as in `set_bits`.
        access(unsafe { AtomicU8::from_ptr(place.as_ptr()) }, 1 << (address.0 / LOG_PAGE % 8))
    }

    /// Returns true if the file behind it was truncated: its marks are lost.
    pub fn is_lost(&self) -> bool {
        self.mapping.loss().is_some()
    }
}

#[cfg(test)]
mod tests;
