//! The words of in-flight tables of both formats.

use std::sync::atomic::{AtomicU64, Ordering};

/// One store, after all earlier stores and before all later ones by `store`.
#[inline]
pub(crate) fn store(word: &AtomicU64, value: u64) {
    #[cfg(test)]
    crate::crash_points::crash_point();
    word.store(value, Ordering::Release);
}

/// Splits a word into its four numbers of 16 bits, the lowest first.
pub(crate) fn unpack_quarters(word: u64) -> [u16; 4] {
    [0, 16, 32, 48].map(|shift| (word >> shift) as u16)
}

/// Undoes [`unpack_quarters`].
#[inline]
pub(crate) fn pack_quarters([a, b, c, d]: [u16; 4]) -> u64 {
    u64::from(a) | u64::from(b) << 16 | u64::from(c) << 32 | u64::from(d) << 48
}
