//! Properties of logical units: INQUIRY, vital product data, READ CAPACITY(16), MODE SENSE(6). Sources: SPC-4 sections
//! 6.4 and 7.8; SBC-3 sections 5.16 and 6.6. All data may be truncated; the available part is parsed.

use mqblk_core::{BlockSize, ByteLen, Sector512};

use super::cdb::Lba;
use super::wire::LunAddress;

/// A designator of a logical unit (vital product data page 83).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Designator {
    /// Association: 0 the logical unit, 1 a target port, 2 the target device.
    pub association: u8,
    /// Designator type: 1 T10 vendor ID, 2 EUI-64, 3 NAA, 8 SCSI name string, ...
    pub kind: u8,
    /// The designator: types 1 and 8 as text, others in hexadecimal.
    pub name: String,
}

/// Block limits (vital product data page B0). `None`: not reported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockLimits {
    /// Largest number of blocks of a command.
    pub max_transfer: Option<u32>,
    /// Optimal number of blocks of a command.
    pub optimal_transfer: Option<u32>,
    /// Largest number of blocks of an UNMAP. `None`: not supported.
    pub max_unmap_blocks: Option<u32>,
    /// Largest number of extents of an UNMAP.
    pub max_unmap_extents: Option<u32>,
    /// Largest number of blocks of a WRITE SAME.
    pub max_write_same: Option<u64>,
}

/// A direct-access logical unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogicalUnit {
    /// Its address.
    pub address: LunAddress,
    /// Vendor of the INQUIRY data, without padding, like product and revision.
    pub vendor: String,
    /// Product.
    pub product: String,
    /// Revision.
    pub revision: String,
    /// Unit serial number (page 80).
    pub serial: Option<String>,
    /// Designators (page 83).
    pub designators: Vec<Designator>,
    /// Logical blocks.
    pub blocks: u64,
    /// Logical block size.
    pub block_size: BlockSize,
    /// Logical blocks in a physical block, as a power of two.
    pub physical_block_exp: u8,
    /// Blocks can be unmapped (LBPME).
    pub thin: bool,
    /// Unmapped blocks read as zeroes (LBPRZ).
    pub zeroed: bool,
    /// Limits (page B0).
    pub limits: BlockLimits,
    /// The logical unit is read-only.
    pub read_only: bool,
    /// The volatile write cache is enabled. `None`: not reported.
    pub write_cache: Option<bool>,
}

impl LogicalUnit {
    /// Returns the size. `None` if it is 2^64 bytes or more.
    pub fn capacity(&self) -> Option<ByteLen> {
        self.blocks.checked_mul(self.block_size.bytes().into()).map(ByteLen)
    }

    /// Returns the number of 512-byte sectors in a logical block.
    #[inline]
    pub fn sectors_per_block(&self) -> u64 {
        ByteLen(self.block_size.bytes().into()).sectors().0
    }

    /// Returns the block at `start`. `None` if no block starts there.
    #[inline]
    pub fn lba(&self, start: Sector512) -> Option<Lba> {
        let per_block = self.sectors_per_block();
        start.0.is_multiple_of(per_block).then(|| Lba(start.0 / per_block))
    }

    pub(super) fn new(address: LunAddress) -> LogicalUnit {
        LogicalUnit {
            address,
            vendor: String::new(),
            product: String::new(),
            revision: String::new(),
            serial: None,
            designators: vec![],
            blocks: 0,
            block_size: BlockSize::B512,
            physical_block_exp: 0,
            thin: false,
            zeroed: false,
            limits: BlockLimits::default(),
            read_only: false,
            write_cache: None,
        }
    }

    /// Parses standard INQUIRY data. Returns false if there is no direct-access logical unit.
    pub(super) fn set_inquiry(&mut self, data: &[u8]) -> bool {
        let text = |range: std::ops::Range<usize>| data.get(range).map(ascii_text).unwrap_or_default();
        (self.vendor, self.product, self.revision) = (text(8..16), text(16..32), text(32..36));
        // Peripheral qualifier 0 (connected), device type 0 (direct access).
        data.first() == Some(&0)
    }

    /// Parses a page of vital product data.
    pub(super) fn set_vpd_page(&mut self, data: &[u8]) {
        let Some((page, body)) = vpd_page(data) else { return };
        match page {
            0x80 => self.serial = Some(ascii_text(body)).filter(|serial| !serial.is_empty()),
            0x83 => self.designators = parse_designators(body),
            0xb0 => self.limits = parse_block_limits(data),
            _ => {}
        }
    }

    /// Parses READ CAPACITY(16) data. Returns false if it is truncated or the block size is invalid.
    pub(super) fn set_capacity(&mut self, data: &[u8]) -> bool {
        let (Some(last), Some(bytes)) = (quad(data, 0), word(data, 8)) else { return false };
        let Some(block) = BlockSize::new(bytes) else { return false };
        let byte = |at: usize| data.get(at).copied().unwrap_or(0);
        // The last block cannot be 2^64 - 1: there would be 2^64 blocks.
        self.blocks = last.saturating_add(1);
        self.block_size = block;
        self.physical_block_exp = byte(13) & 0xf;
        (self.thin, self.zeroed) = (byte(14) & 0x80 != 0, byte(14) & 0x40 != 0);
        true
    }

    /// Parses MODE SENSE(6) data with the caching page.
    pub(super) fn set_mode(&mut self, data: &[u8]) {
        let byte = |at: usize| data.get(at).copied();
        self.read_only = byte(2).is_some_and(|parameter| parameter & 0x80 != 0);
        // The page is behind the header and the block descriptors.
        let at = 4 + usize::from(byte(3).unwrap_or(0));
        if byte(at).map(|code| code & 0x3f) == Some(0x08) {
            self.write_cache = byte(at + 2).map(|flags| flags & 0x04 != 0);
        }
    }
}

/// Parses REPORT LUNS data. Returns the LUNs with single-level addresses, and the length of the complete data.
pub(super) fn parse_luns(data: &[u8]) -> (Vec<u16>, usize) {
    let len = word(data, 0).unwrap_or(0) as usize;
    let entries = data.get(8..).unwrap_or_default();
    let lun = |entry: &[u8]| match entry {
        // Peripheral device addressing on bus 0, or flat space addressing.
        [0, low, 0, 0, 0, 0, 0, 0] => Some(u16::from(*low)),
        [high @ 0x40..0x80, low, 0, 0, 0, 0, 0, 0] => Some(u16::from_be_bytes([high & 0x3f, *low])),
        _ => None,
    };
    let entries = &entries[..entries.len().min(len)];
    (entries.chunks_exact(8).filter_map(lun).collect(), len.saturating_add(8))
}

/// Returns the pages that page 00 lists.
pub(super) fn supported_pages(data: &[u8]) -> &[u8] {
    vpd_page(data).filter(|(page, _)| *page == 0).map_or(&[], |(_, body)| body)
}

/// Returns a page's number and its content after the header.
fn vpd_page(data: &[u8]) -> Option<(u8, &[u8])> {
    let [_, page, high, low, body @ ..] = data else { return None };
    let len = usize::from(u16::from_be_bytes([*high, *low]));
    Some((*page, &body[..body.len().min(len)]))
}

fn word(data: &[u8], at: usize) -> Option<u32> {
    data.get(at..at + 4).map(|bytes| u32::from_be_bytes(std::array::from_fn(|index| bytes[index])))
}

fn quad(data: &[u8], at: usize) -> Option<u64> {
    data.get(at..at + 8).map(|bytes| u64::from_be_bytes(std::array::from_fn(|index| bytes[index])))
}

/// Returns a field's text without padding. Bytes that are not printable ASCII become question marks.
fn ascii_text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    let printable = |byte: &u8| if (0x20..0x7f).contains(byte) { char::from(*byte) } else { '?' };
    bytes[..end].iter().map(printable).collect::<String>().trim().to_owned()
}

fn parse_block_limits(data: &[u8]) -> BlockLimits {
    let reported = |at: usize| word(data, at).filter(|value| *value != 0);
    BlockLimits {
        max_transfer: reported(8),
        optimal_transfer: reported(12),
        max_unmap_blocks: reported(20),
        max_unmap_extents: reported(24),
        max_write_same: quad(data, 36).filter(|value| *value != 0),
    }
}

fn parse_designators(mut body: &[u8]) -> Vec<Designator> {
    let mut found = vec![];
    while let [_, second, _, len, rest @ ..] = body {
        let Some((name, next)) = rest.split_at_checked((*len).into()) else { break };
        let kind = second & 0xf;
        let name = match kind {
            1 | 8 => ascii_text(name),
            _ => name.iter().map(|byte| format!("{byte:02x}")).collect(),
        };
        found.push(Designator { association: second >> 4 & 3, kind, name });
        body = next;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lun_lists_are_parsed() {
        let mut data = vec![0, 0, 0, 40, 0, 0, 0, 0];
        for entry in [[0, 3], [0x40, 200], [0x53, 0x21], [0xc1, 1], [1, 3]] {
            data.extend(entry);
            data.extend([0; 6]);
        }
        assert_eq!(parse_luns(&data), (vec![3, 200, 0x1321], 48));
        // The list may be longer than the allocation length, or truncated.
        assert_eq!(parse_luns(&data[..20]), (vec![3], 48));
        assert_eq!(parse_luns(&[0, 0]), (vec![], 8));
    }

    #[test]
    fn a_logical_unit_is_parsed_and_truncated_data_is_ignored() {
        let mut unit = LogicalUnit::new(LunAddress { target: 1, lun: 2 });
        let mut data = vec![0; 36];
        data[8..].copy_from_slice(b"MQBLK   virtual disk    0.1 ");
        assert!(unit.set_inquiry(&data));
        assert_eq!(
            (unit.vendor.as_str(), unit.product.as_str(), unit.revision.as_str()),
            ("MQBLK", "virtual disk", "0.1")
        );
        assert!(!unit.set_inquiry(&[0x7f]) && !unit.set_inquiry(&[]) && !unit.set_inquiry(&[5; 36]));
        unit.set_vpd_page(&[0, 0x80, 0, 4, b'a', b'b', b' ', 0, 9]);
        assert_eq!(unit.serial.as_deref(), Some("ab"));
        unit.set_vpd_page(&[0, 0x83, 0, 15, 2, 1, 0, 3, b'x', b'y', b'z', 1, 3, 0, 4, 0x6a, 0xbc, 0, 1, 99]);
        let named = |kind, name: &str| Designator { association: 0, kind, name: name.into() };
        assert_eq!(unit.designators, [named(1, "xyz"), named(3, "6abc0001")]);
        unit.set_vpd_page(&[0, 0x83, 0, 99, 2, 1, 0, 30, b'x']);
        assert_eq!(unit.designators, []);
        let mut data = [0; 64];
        (data[1], data[3], data[11], data[23], data[27], data[43]) = (0xb0, 60, 8, 9, 10, 11);
        unit.set_vpd_page(&data);
        let expected = BlockLimits {
            max_transfer: Some(8),
            optimal_transfer: None,
            max_unmap_blocks: Some(9),
            max_unmap_extents: Some(10),
            max_write_same: Some(11),
        };
        assert_eq!(unit.limits, expected);
        let mut data = [0; 32];
        (data[6], data[10], data[13], data[14]) = (1, 0x10, 3, 0xc0);
        assert!(unit.set_capacity(&data));
        assert_eq!(
            (unit.blocks, unit.block_size, unit.physical_block_exp, unit.thin),
            (257, BlockSize::B4096, 3, true)
        );
        assert_eq!(
            (unit.capacity(), unit.lba(Sector512(16)), unit.lba(Sector512(3))),
            (Some(ByteLen(257 << 12)), Some(Lba(2)), None)
        );
        data[10] = 0x11;
        assert!(!unit.set_capacity(&data) && !unit.set_capacity(&data[..11]));
        unit.set_mode(&[0, 0, 0x80, 8, 0, 0, 0, 0, 0, 0, 0, 0, 8, 18, 4]);
        assert_eq!((unit.read_only, unit.write_cache), (true, Some(true)));
        unit.set_mode(&[0, 0, 0, 0, 8, 18, 0]);
        assert_eq!((unit.read_only, unit.write_cache), (false, Some(false)));
    }

    #[test]
    fn pages_are_listed() {
        assert_eq!(supported_pages(&[0, 0, 0, 3, 0, 0x80, 0xb0, 0xb1]), [0, 0x80, 0xb0]);
        assert_eq!((supported_pages(&[0, 0x80, 0, 1, 1]), supported_pages(&[0, 0])), (&[][..], &[][..]));
    }
}
