//! A command descriptor block, read by field.

/// A private copy of a command descriptor block. No supported command is longer than 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cdb([u8; Cdb::LEN]);

impl Cdb {
    pub(crate) const LEN: usize = 16;

    /// Copies `bytes`; missing bytes are zero.
    pub(crate) fn new(bytes: &[u8]) -> Cdb {
        let mut cdb = [0; Cdb::LEN];
        let len = bytes.len().min(Cdb::LEN);
        cdb[..len].copy_from_slice(&bytes[..len]);
        Cdb(cdb)
    }

    #[inline]
    fn array<const N: usize>(&self, at: usize) -> [u8; N] {
        let mut bytes = [0; N];
        bytes.copy_from_slice(&self.0[at..at + N]);
        bytes
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }

    #[inline]
    pub(crate) fn opcode(&self) -> u8 {
        self.0[0]
    }

    #[inline]
    pub(crate) fn u8(&self, at: usize) -> u8 {
        self.0[at]
    }

    #[inline]
    pub(crate) fn u16(&self, at: usize) -> u16 {
        u16::from_be_bytes(self.array(at))
    }

    #[inline]
    pub(crate) fn u24(&self, at: usize) -> u32 {
        let [high, mid, low] = self.array(at);
        u32::from_be_bytes([0, high, mid, low])
    }

    #[inline]
    pub(crate) fn u32(&self, at: usize) -> u32 {
        u32::from_be_bytes(self.array(at))
    }

    #[inline]
    pub(crate) fn u64(&self, at: usize) -> u64 {
        u64::from_be_bytes(self.array(at))
    }

    /// Returns true if any bit of `mask` is set in byte `at`.
    #[inline]
    pub(crate) fn has(&self, at: usize, mask: u8) -> bool {
        self.0[at] & mask != 0
    }
}
