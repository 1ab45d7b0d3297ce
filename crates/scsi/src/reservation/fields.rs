//! Fields of commands and of parameter lists.

/// Returns a byte of a command; missing bytes are zero.
pub(super) fn byte(cdb: &[u8], at: usize) -> u8 {
    cdb.get(at).copied().unwrap_or(0)
}

/// Returns a big-endian number of `len` bytes, 8 at most.
pub(super) fn number(bytes: &[u8], at: usize, len: usize) -> u64 {
    (at..at + len).fold(0, |number, index| number << 8 | u64::from(byte(bytes, index)))
}
