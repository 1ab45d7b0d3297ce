//! READ CAPACITY. Source: SBC-3 sections 5.15 and 5.16.

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
