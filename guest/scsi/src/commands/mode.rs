//! MODE SENSE. Sources: SPC-4 sections 6.11, 6.12 and 7.5, SBC-3 section 6.5.

use crate::ask::{Ask, Begun};
use crate::sense::{Sense, SenseKey};
use crate::unit::{LogicalUnit, flag};

/// Pages, and all of them.
const ALL_PAGES: u8 = 0x3f;
const ALL_SUBPAGES: u8 = 0xff;

/// A mode page: the same shape for what it is and for what can be changed of it.
pub(crate) struct Page {
    pub(crate) code: u8,
    /// All bytes, header included, as they are when no flag is set.
    base: &'static [u8],
    /// Bits that stand for flags of the unit: byte, mask, flag, and whether the bit is one when the flag is clear.
    pub(crate) bits: &'static [Bit],
}

pub(crate) struct Bit {
    pub(crate) byte: usize,
    pub(crate) mask: u8,
    pub(crate) flag: u8,
    pub(crate) inverted: bool,
}

const fn bit(byte: usize, mask: u8, flag: u8, inverted: bool) -> Bit {
    Bit { byte, mask, flag, inverted }
}

/// The pages in the order in which they are told.
pub(crate) static PAGES: [Page; 2] = [
    // Caching: WCE.
    Page {
        code: 0x08,
        base: &[0x08, 0x12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        bits: &[bit(2, 0x04, flag::WRITE_THROUGH, true)],
    },
    // Control: one task set for all (TST 0), unrestricted reordering, no aborts beyond the failed command (QERR 0), the
    // time that a self-test takes unknown. D_SENSE and SWP.
    Page {
        code: 0x0a,
        base: &[0x0a, 0x0a, 0, 0x10, 0, 0, 0, 0, 0, 0, 0, 0],
        bits: &[bit(2, 0x04, flag::DESCRIPTOR_SENSE, false), bit(4, 0x08, flag::SOFTWARE_PROTECTED, false)],
    },
];

impl Page {
    /// Bytes of the page.
    pub(crate) fn len(&self) -> usize {
        self.base.len()
    }

    /// The page under these flags.
    pub(crate) fn values(&self, flags: u8) -> Vec<u8> {
        let mut bytes = self.base.to_vec();
        for bit in self.bits {
            if (flags & bit.flag != 0) != bit.inverted {
                bytes[bit.byte] |= bit.mask;
            }
        }
        bytes
    }

    /// Ones where MODE SELECT may change a bit.
    pub(crate) fn changeable(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len()];
        bytes[..2].copy_from_slice(&self.base[..2]);
        for bit in self.bits {
            bytes[bit.byte] |= bit.mask;
        }
        bytes
    }
}

/// WP, and DPOFUA: DPO and FUA are taken. Source: SBC-3 section 6.5.1.
fn device_specific(flags: u8) -> u8 {
    let protected = flags & (flag::READ_ONLY | flag::SOFTWARE_PROTECTED) != 0;
    u8::from(protected) << 7 | 0x10
}

/// The block descriptor: short (8 bytes) or long (16).
pub(crate) fn block_descriptor(unit: &LogicalUnit, long: bool) -> Vec<u8> {
    let (blocks, block) = (unit.blocks(), unit.block_bytes());
    let mut bytes = Vec::with_capacity(16);
    if long {
        bytes.extend(blocks.to_be_bytes());
        bytes.extend([0; 4]);
    } else {
        bytes.extend(u32::try_from(blocks).unwrap_or(u32::MAX).to_be_bytes());
    }
    // In the short one the length has 3 bytes, after a reserved one: block sizes stay below 2^24.
    bytes.extend(block.to_be_bytes());
    bytes
}

/// The pages that were asked for, in `reply`.
fn pages(ask: &mut Ask<'_>) -> Result<(), Sense> {
    let (code, subpage) = (ask.cdb.u8(2) & 0x3f, ask.cdb.u8(3));
    let flags = ask.unit.flags();
    let values: &dyn Fn(&Page) -> Vec<u8> = match ask.cdb.u8(2) >> 6 {
        0 => &|page| page.values(flags),
        1 => &Page::changeable,
        2 => &|page| page.values(ask.unit.default_flags()),
        // SAVING PARAMETERS NOT SUPPORTED.
        _ => return Err(Sense::new(SenseKey::IllegalRequest, 0x39, 0x00)),
    };
    let wanted = |page: &&Page| code == ALL_PAGES || page.code == code;
    if !PAGES.iter().any(|page| wanted(&page)) {
        return Err(Sense::in_command(2, Some(5)));
    }
    // No page has subpages; each is subpage 0 of itself.
    if subpage != 0 && subpage != ALL_SUBPAGES {
        return Err(Sense::in_command(3, None));
    }
    PAGES.iter().filter(wanted).for_each(|page| ask.work.reply.extend(values(page)));
    Ok(())
}

/// DBD.
fn no_descriptor(ask: &Ask<'_>) -> bool {
    ask.cdb.has(1, 0x08)
}

pub(crate) fn sense_6(ask: &mut Ask<'_>) -> Begun {
    let descriptor = if no_descriptor(ask) { Vec::new() } else { block_descriptor(ask.unit, false) };
    ask.work.reply.extend([0, 0, device_specific(ask.unit.flags()), descriptor.len() as u8]);
    ask.work.reply.extend(descriptor);
    pages(ask)?;
    ask.work.reply[0] = (ask.work.reply.len() - 1) as u8;
    ask.reply(ask.cdb.u8(4).into())
}

pub(crate) fn sense_10(ask: &mut Ask<'_>) -> Begun {
    // LLBAA.
    let long = ask.cdb.has(1, 0x10);
    let descriptor = if no_descriptor(ask) { Vec::new() } else { block_descriptor(ask.unit, long) };
    let longlba = u8::from(long && !descriptor.is_empty());
    ask.work.reply.extend([0, 0, 0, device_specific(ask.unit.flags()), longlba, 0, 0, descriptor.len() as u8]);
    ask.work.reply.extend(descriptor);
    pages(ask)?;
    let len = (ask.work.reply.len() - 2) as u16;
    ask.work.reply[..2].copy_from_slice(&len.to_be_bytes());
    ask.reply(ask.cdb.u16(7).into())
}
