//! ABIs of frontends: the layout of their compilers' structures.

use mqblk_memory::PAGE_BYTES;

/// Offset of the first entry in the first page.
pub(super) const ENTRIES_OFFSET: u64 = 64;

/// ABI of a frontend: the layout of its compiler's structures. Source: Xen's `public/io/protocols.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Abi {
    /// `x86_64-abi`: 64-bit fields at multiples of 8.
    X86_64,
    /// `x86_32-abi`: 64-bit fields at multiples of 4.
    X86_32,
    /// `arm-abi`: as `x86_64-abi`.
    Arm,
}

impl Abi {
    /// All ABIs.
    pub const ALL: [Abi; 3] = [Abi::X86_64, Abi::X86_32, Abi::Arm];

    /// Returns the value of the frontend's `protocol` node in xenstore.
    pub const fn protocol(self) -> &'static str {
        match self {
            Abi::X86_64 => "x86_64-abi",
            Abi::X86_32 => "x86_32-abi",
            Abi::Arm => "arm-abi",
        }
    }

    /// Returns the ABI with this `protocol` name.
    pub fn from_protocol(name: &str) -> Option<Abi> {
        Abi::ALL.into_iter().find(|abi| abi.protocol() == name)
    }

    /// Returns true if 64-bit fields are aligned to 8.
    #[inline]
    pub(super) const fn aligns_u64_to_8(self) -> bool {
        !matches!(self, Abi::X86_32)
    }

    /// Returns the bytes of an entry.
    pub const fn entry_bytes(self) -> u32 {
        if self.aligns_u64_to_8() { 112 } else { 108 }
    }

    /// Returns the number of entries of a ring of `pages` pages: the largest power of two that fits.
    pub const fn entries(self, pages: u32) -> u32 {
        let fit = (pages * PAGE_BYTES - ENTRIES_OFFSET as u32) / self.entry_bytes();
        1 << fit.ilog2()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_have_as_many_entries_as_linux_gives_them() {
        for abi in Abi::ALL {
            assert_eq!([1, 2, 4, 8, 16].map(|pages| abi.entries(pages)), [32, 64, 128, 256, 512]);
            assert_eq!(Abi::from_protocol(abi.protocol()), Some(abi));
        }
        assert_eq!(Abi::from_protocol("x86_64"), None);
    }
}
