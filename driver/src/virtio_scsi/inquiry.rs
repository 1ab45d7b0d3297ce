//! What a logical unit says of itself: INQUIRY, its pages, READ CAPACITY(16), MODE SENSE(6). Sources: SPC-4 sections 6.4 and
//! 7.8; SBC-3 sections 5.16 and 6.6. All of it may be short, and is read as far as it goes.

use mqblk_core::{BlockSize, ByteLen, Sector512};

use super::cdb::Lba;
use super::wire::LunAddress;

/// A name of a logical unit (vital product data page 83).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Designator {
    /// What it names: 0 the logical unit, 1 a port, 2 the target device.
    pub association: u8,
    /// Its kind: 1 T10 vendor, 2 EUI-64, 3 NAA, 8 SCSI name, ...
    pub kind: u8,
    /// The name: text of kinds 1 and 8 as it is, others in hexadecimal.
    pub name: String,
}

/// Vital product data page B0. `None`: the unit does not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockLimits {
    /// Most blocks of a command.
    pub max_transfer: Option<u32>,
    /// Best count of blocks of a command.
    pub optimal_transfer: Option<u32>,
    /// Most blocks of an UNMAP; `None`: it takes none.
    pub max_unmap_blocks: Option<u32>,
    /// Most extents of an UNMAP.
    pub max_unmap_extents: Option<u32>,
    /// Most blocks of a WRITE SAME.
    pub max_write_same: Option<u64>,
}

/// A direct-access logical unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogicalUnit {
    /// Where it is.
    pub address: LunAddress,
    /// Vendor, product and revision of the INQUIRY data, without their padding.
    pub vendor: String,
    /// Product.
    pub product: String,
    /// Revision.
    pub revision: String,
    /// Unit serial number (page 80).
    pub serial: Option<String>,
    /// Its names (page 83).
    pub designators: Vec<Designator>,
    /// Logical blocks.
    pub blocks: u64,
    /// Logical block size.
    pub block_size: BlockSize,
    /// Physical block size: logical blocks, as a power of two.
    pub physical_block_exp: u8,
    /// Blocks can be unmapped (LBPME).
    pub thin: bool,
    /// Unmapped blocks read as zeroes (LBPRZ).
    pub zeroed: bool,
    /// Limits (page B0).
    pub limits: BlockLimits,
    /// Writes are refused.
    pub read_only: bool,
    /// It has a volatile write cache that is on; `None`: it does not say.
    pub write_cache: Option<bool>,
}

impl LogicalUnit {
    /// Its size. `None` when that is 2^64 bytes or more.
    pub fn capacity(&self) -> Option<ByteLen> {
        self.blocks.checked_mul(self.block_size.bytes().into()).map(ByteLen)
    }

    /// Sectors of 512 bytes in a logical block.
    #[inline]
    pub fn sectors_per_block(&self) -> u64 {
        ByteLen(self.block_size.bytes().into()).sectors().0
    }

    /// The block at `start`. `None` when none starts there.
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

    /// Takes standard INQUIRY data. `false`: there is no direct-access unit here.
    pub(super) fn set_inquiry(&mut self, data: &[u8]) -> bool {
        let text = |range: std::ops::Range<usize>| data.get(range).map(ascii_text).unwrap_or_default();
        (self.vendor, self.product, self.revision) = (text(8..16), text(16..32), text(32..36));
        // Peripheral qualifier 0 (connected), device type 0 (direct access).
        data.first() == Some(&0)
    }

    /// Takes a page of vital product data.
    pub(super) fn set_vpd_page(&mut self, data: &[u8]) {
        let Some((page, body)) = vpd_page(data) else { return };
        match page {
            0x80 => self.serial = Some(ascii_text(body)).filter(|serial| !serial.is_empty()),
            0x83 => self.designators = parse_designators(body),
            0xb0 => self.limits = parse_block_limits(data),
            _ => {}
        }
    }

    /// Takes READ CAPACITY(16) data. `false`: it is short, or names a block size that cannot be.
    pub(super) fn set_capacity(&mut self, data: &[u8]) -> bool {
        let (Some(last), Some(bytes)) = (quad(data, 0), word(data, 8)) else { return false };
        let Some(block) = BlockSize::new(bytes) else { return false };
        let byte = |at: usize| data.get(at).copied().unwrap_or(0);
        // All ones is no block number: the unit would have 2^64 of them.
        self.blocks = last.saturating_add(1);
        self.block_size = block;
        self.physical_block_exp = byte(13) & 0xf;
        (self.thin, self.zeroed) = (byte(14) & 0x80 != 0, byte(14) & 0x40 != 0);
        true
    }

    /// Takes MODE SENSE(6) data with the caching page.
    pub(super) fn set_mode(&mut self, data: &[u8]) {
        let byte = |at: usize| data.get(at).copied();
        self.read_only = byte(2).is_some_and(|parameter| parameter & 0x80 != 0);
        // Behind the header and the block descriptors.
        let at = 4 + usize::from(byte(3).unwrap_or(0));
        if byte(at).map(|code| code & 0x3f) == Some(0x08) {
            self.write_cache = byte(at + 2).map(|flags| flags & 0x04 != 0);
        }
    }
}

/// The logical unit numbers of REPORT LUNS data that a single-level address names, and how many bytes all of the data has.
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

/// The pages that page 00 lists.
pub(super) fn supported_pages(data: &[u8]) -> &[u8] {
    vpd_page(data).filter(|(page, _)| *page == 0).map_or(&[], |(_, body)| body)
}

/// A page's number and what is behind its header.
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

/// A field's text, without padding; what is not printable ASCII is a question mark.
fn ascii_text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    let shown = |byte: &u8| if (0x20..0x7f).contains(byte) { char::from(*byte) } else { '?' };
    bytes[..end].iter().map(shown).collect::<String>().trim().to_owned()
}

fn parse_block_limits(data: &[u8]) -> BlockLimits {
    let said = |at: usize| word(data, at).filter(|value| *value != 0);
    BlockLimits {
        max_transfer: said(8),
        optimal_transfer: said(12),
        max_unmap_blocks: said(20),
        max_unmap_extents: said(24),
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
    fn lun_lists_are_read() {
        let mut data = vec![0, 0, 0, 40, 0, 0, 0, 0];
        for entry in [[0, 3], [0x40, 200], [0x53, 0x21], [0xc1, 1], [1, 3]] {
            data.extend(entry);
            data.extend([0; 6]);
        }
        assert_eq!(parse_luns(&data), (vec![3, 200, 0x1321], 48));
        // The list may be longer than what was asked for, or cut.
        assert_eq!(parse_luns(&data[..20]), (vec![3], 48));
        assert_eq!(parse_luns(&[0, 0]), (vec![], 8));
    }

    #[test]
    fn a_unit_is_read_and_what_is_short_is_left_out() {
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
