//! READ CAPACITY, GET LBA STATUS and READ DEFECT DATA. Source: SBC-3 clause 5, under their names.

use crate::ask::{Ask, Begun};
use crate::sense::{Sense, SenseKey};

/// Bytes of READ CAPACITY (16) parameter data.
const LEN_16: usize = 32;

/// The last LBA; a unit without blocks is not ready for reasons it cannot tell.
fn last_lba(ask: &Ask<'_>) -> Result<u64, Sense> {
    ask.unit.blocks().checked_sub(1).ok_or(Sense::new(SenseKey::NotReady, 0x04, 0x00))
}

pub(crate) fn read_capacity_10(ask: &mut Ask<'_>) -> Begun {
    // PMI asks for the last block before a delay: there is none. Without it the LBA must be 0.
    if !ask.cdb.has(8, 0x01) && ask.cdb.u32(2) != 0 {
        return Err(Sense::in_command(2, None).into());
    }
    let last = u32::try_from(last_lba(ask)?).unwrap_or(u32::MAX);
    ask.work.reply.extend(last.to_be_bytes());
    ask.work.reply.extend(ask.unit.block_bytes().to_be_bytes());
    ask.reply(u32::MAX)
}

pub(crate) fn read_capacity_16(ask: &mut Ask<'_>) -> Begun {
    let geometry = ask.unit.geometry();
    let bounds = ask.unit.bounds();
    let exponent = (geometry.physical_block.bytes() / geometry.logical_block.bytes()).checked_ilog2().unwrap_or(0);
    // LBPME, LBPRZ; the lowest aligned LBA has 14 bits and comes from a byte.
    let provisioning = u8::from(bounds.unmap.is_some()) << 7 | u8::from(bounds.unmapped_reads_zeroes()) << 6;
    let last = last_lba(ask)?;
    let reply = &mut ask.work.reply;
    reply.extend(last.to_be_bytes());
    reply.extend(geometry.logical_block.bytes().to_be_bytes());
    reply.extend([0, exponent.min(15) as u8, provisioning, geometry.alignment_offset]);
    reply.resize(LEN_16, 0);
    ask.reply(ask.cdb.u32(10))
}

/// One descriptor, from the starting LBA to the end: no map is kept of what is unmapped, so all of it counts as mapped.
pub(crate) fn get_lba_status(ask: &mut Ask<'_>) -> Begun {
    let start = ask.cdb.u64(2);
    let left = ask.unit.blocks().checked_sub(start).filter(|left| *left > 0).ok_or(Sense::OUT_OF_RANGE)?;
    let reply = &mut ask.work.reply;
    // Parameter data length: what follows it.
    reply.extend([0, 0, 0, 20, 0, 0, 0, 0]);
    reply.extend(start.to_be_bytes());
    reply.extend(u32::try_from(left).unwrap_or(u32::MAX).to_be_bytes());
    reply.extend([0; 4]);
    ask.reply(ask.cdb.u32(10))
}

/// REQ_PLIST and REQ_GLIST, and the list's format.
const LISTS: u8 = 0x18;
const FORMAT: u8 = 0x07;

/// Both lists are empty, in whichever format they were asked for.
fn defect_header(ask: &Ask<'_>, at: usize) -> Result<[u8; 2], Sense> {
    let asked = ask.cdb.u8(at);
    if asked & FORMAT == FORMAT {
        return Err(Sense::in_command(at as u16, Some(2)));
    }
    Ok([0, asked & (LISTS | FORMAT)])
}

pub(crate) fn read_defect_data_10(ask: &mut Ask<'_>) -> Begun {
    let header = defect_header(ask, 2)?;
    ask.work.reply.extend(header);
    ask.work.reply.extend([0; 2]);
    ask.reply(ask.cdb.u16(7).into())
}

pub(crate) fn read_defect_data_12(ask: &mut Ask<'_>) -> Begun {
    let header = defect_header(ask, 1)?;
    ask.work.reply.extend(header);
    ask.work.reply.extend([0; 6]);
    ask.reply(ask.cdb.u32(6))
}
