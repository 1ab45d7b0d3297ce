//! MODE SENSE. Sources: SPC-4 sections 6.11, 6.12 and 7.5, SBC-3 section 6.5.

use crate::context::{BeginResult, CommandContext};
use crate::logical_unit::{LogicalUnit, flag};
use crate::sense::{Sense, SenseKey};

/// Page codes that request all pages and all subpages.
const ALL_PAGES: u8 = 0x3f;
const ALL_SUBPAGES: u8 = 0xff;

/// A mode page. The same definition gives its values and its changeable mask.
pub(crate) struct ModePage {
    pub(crate) code: u8,
    /// All bytes, header included, if no flag is set.
    base: &'static [u8],
    /// Bits that represent flags of the logical unit.
    pub(crate) bits: &'static [ModeBit],
}

pub(crate) struct ModeBit {
    pub(crate) byte: usize,
    pub(crate) mask: u8,
    pub(crate) flag: u8,
    pub(crate) inverted: bool,
}

const fn bit(byte: usize, mask: u8, flag: u8, inverted: bool) -> ModeBit {
    ModeBit { byte, mask, flag, inverted }
}

/// The pages in the order of reporting.
pub(crate) static PAGES: [ModePage; 2] = [
    // Caching: WCE.
    ModePage {
        code: 0x08,
        base: &[0x08, 0x12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        bits: &[bit(2, 0x04, flag::WRITE_THROUGH, true)],
    },
    // Control: one task set for all initiators (TST 0), unrestricted reordering, no aborts beyond the failed command
    // (QERR 0), self-test time unknown. D_SENSE and SWP.
    ModePage {
        code: 0x0a,
        base: &[0x0a, 0x0a, 0, 0x10, 0, 0, 0, 0, 0, 0, 0, 0],
        bits: &[bit(2, 0x04, flag::DESCRIPTOR_SENSE, false), bit(4, 0x08, flag::SOFTWARE_PROTECTED, false)],
    },
];

impl ModePage {
    /// Returns the length of the page.
    pub(crate) fn len(&self) -> usize {
        self.base.len()
    }

    /// Returns the page with these flags.
    pub(crate) fn values(&self, flags: u8) -> Vec<u8> {
        let mut bytes = self.base.to_vec();
        for bit in self.bits {
            if (flags & bit.flag != 0) != bit.inverted {
                bytes[bit.byte] |= bit.mask;
            }
        }
        bytes
    }

    /// Returns the changeable mask: ones for bits that MODE SELECT may change.
    pub(crate) fn changeable(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len()];
        bytes[..2].copy_from_slice(&self.base[..2]);
        for bit in self.bits {
            bytes[bit.byte] |= bit.mask;
        }
        bytes
    }
}

/// WP, and DPOFUA: DPO and FUA are accepted. Source: SBC-3 section 6.5.1.
fn device_specific(flags: u8) -> u8 {
    let protected = flags & (flag::READ_ONLY | flag::SOFTWARE_PROTECTED) != 0;
    u8::from(protected) << 7 | 0x10
}

/// Returns the block descriptor: short (8 bytes) or long (16).
pub(crate) fn block_descriptor(unit: &LogicalUnit, long: bool) -> Vec<u8> {
    let (blocks, block) = (unit.block_count(), unit.block_size());
    let mut bytes = Vec::with_capacity(16);
    if long {
        bytes.extend(blocks.to_be_bytes());
        bytes.extend([0; 4]);
    } else {
        bytes.extend(u32::try_from(blocks).unwrap_or(u32::MAX).to_be_bytes());
    }
    // The short one has a 3-byte length after a reserved byte: block sizes stay below 2^24.
    bytes.extend(block.to_be_bytes());
    bytes
}

/// Appends the requested pages to the data-in bytes.
fn pages(cmd: &mut CommandContext<'_>) -> Result<(), Sense> {
    let (code, subpage) = (cmd.cdb.u8(2) & 0x3f, cmd.cdb.u8(3));
    let flags = cmd.unit.flags();
    let values: &dyn Fn(&ModePage) -> Vec<u8> = match cmd.cdb.u8(2) >> 6 {
        0 => &|page| page.values(flags),
        1 => &ModePage::changeable,
        2 => &|page| page.values(cmd.unit.default_flags()),
        // SAVING PARAMETERS NOT SUPPORTED.
        _ => return Err(Sense::new(SenseKey::IllegalRequest, 0x39, 0x00)),
    };
    let wanted = |page: &&ModePage| code == ALL_PAGES || page.code == code;
    if !PAGES.iter().any(|page| wanted(&page)) {
        return Err(Sense::invalid_cdb_field(2, Some(5)));
    }
    // No page has subpages; subpage 0 is the page itself.
    if subpage != 0 && subpage != ALL_SUBPAGES {
        return Err(Sense::invalid_cdb_field(3, None));
    }
    PAGES.iter().filter(wanted).for_each(|page| cmd.buffers.data_in.extend(values(page)));
    Ok(())
}

/// Returns DBD.
fn no_descriptor(cmd: &CommandContext<'_>) -> bool {
    cmd.cdb.has(1, 0x08)
}

pub(crate) fn sense_6(cmd: &mut CommandContext<'_>) -> BeginResult {
    let descriptor = if no_descriptor(cmd) { Vec::new() } else { block_descriptor(cmd.unit, false) };
    cmd.buffers.data_in.extend([0, 0, device_specific(cmd.unit.flags()), descriptor.len() as u8]);
    cmd.buffers.data_in.extend(descriptor);
    pages(cmd)?;
    cmd.buffers.data_in[0] = (cmd.buffers.data_in.len() - 1) as u8;
    cmd.end_with_data_in(cmd.cdb.u8(4).into())
}

pub(crate) fn sense_10(cmd: &mut CommandContext<'_>) -> BeginResult {
    // LLBAA.
    let long = cmd.cdb.has(1, 0x10);
    let descriptor = if no_descriptor(cmd) { Vec::new() } else { block_descriptor(cmd.unit, long) };
    let longlba = u8::from(long && !descriptor.is_empty());
    cmd.buffers.data_in.extend([0, 0, 0, device_specific(cmd.unit.flags()), longlba, 0, 0, descriptor.len() as u8]);
    cmd.buffers.data_in.extend(descriptor);
    pages(cmd)?;
    let len = (cmd.buffers.data_in.len() - 2) as u16;
    cmd.buffers.data_in[..2].copy_from_slice(&len.to_be_bytes());
    cmd.end_with_data_in(cmd.cdb.u16(7).into())
}
