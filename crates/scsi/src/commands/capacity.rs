//! READ CAPACITY, GET LBA STATUS and READ DEFECT DATA. Source: SBC-3 clause 5, under their names.

use crate::context::{BeginResult, CommandContext};
use crate::sense::{Sense, SenseKey};

/// Length of READ CAPACITY (16) parameter data.
const LEN_16: usize = 32;

/// Returns the last LBA. A logical unit without blocks is NOT READY, CAUSE NOT REPORTABLE.
fn last_lba(cmd: &CommandContext<'_>) -> Result<u64, Sense> {
    cmd.unit.block_count().checked_sub(1).ok_or(Sense::new(SenseKey::NotReady, 0x04, 0x00))
}

pub(crate) fn read_capacity_10(cmd: &mut CommandContext<'_>) -> BeginResult {
    // PMI asks for the last block before a delay: there is none. Without PMI the LBA must be 0.
    if !cmd.cdb.has(8, 0x01) && cmd.cdb.u32(2) != 0 {
        return Err(Sense::invalid_cdb_field(2, None).into());
    }
    let last = u32::try_from(last_lba(cmd)?).unwrap_or(u32::MAX);
    cmd.buffers.data_in.extend(last.to_be_bytes());
    cmd.buffers.data_in.extend(cmd.unit.block_size().to_be_bytes());
    cmd.end_with_data_in(u32::MAX)
}

pub(crate) fn read_capacity_16(cmd: &mut CommandContext<'_>) -> BeginResult {
    let geometry = cmd.unit.geometry();
    let limits = cmd.unit.block_limits();
    let exponent = (geometry.physical_block.bytes() / geometry.logical_block.bytes()).checked_ilog2().unwrap_or(0);
    // LBPME, LBPRZ. The lowest aligned LBA has 14 bits; its low byte follows.
    let provisioning = u8::from(limits.unmap.is_some()) << 7 | u8::from(limits.unmapped_reads_zeroes()) << 6;
    let last = last_lba(cmd)?;
    let data_in = &mut cmd.buffers.data_in;
    data_in.extend(last.to_be_bytes());
    data_in.extend(geometry.logical_block.bytes().to_be_bytes());
    data_in.extend([0, exponent.min(15) as u8, provisioning, geometry.alignment_offset]);
    data_in.resize(LEN_16, 0);
    cmd.end_with_data_in(cmd.cdb.u32(10))
}

/// One descriptor, from the starting LBA to the end: unmapped blocks are not tracked, so all count as mapped.
pub(crate) fn get_lba_status(cmd: &mut CommandContext<'_>) -> BeginResult {
    let start = cmd.cdb.u64(2);
    let left = cmd.unit.block_count().checked_sub(start).filter(|left| *left > 0).ok_or(Sense::LBA_OUT_OF_RANGE)?;
    let data_in = &mut cmd.buffers.data_in;
    // Parameter data length: the bytes that follow it.
    data_in.extend([0, 0, 0, 20, 0, 0, 0, 0]);
    data_in.extend(start.to_be_bytes());
    data_in.extend(u32::try_from(left).unwrap_or(u32::MAX).to_be_bytes());
    data_in.extend([0; 4]);
    cmd.end_with_data_in(cmd.cdb.u32(10))
}

/// REQ_PLIST and REQ_GLIST, and the defect list format.
const LISTS: u8 = 0x18;
const FORMAT: u8 = 0x07;

/// Returns the header: both lists are empty, in the requested format.
fn defect_header(cmd: &CommandContext<'_>, at: usize) -> Result<[u8; 2], Sense> {
    let requested = cmd.cdb.u8(at);
    if requested & FORMAT == FORMAT {
        return Err(Sense::invalid_cdb_field(at as u16, Some(2)));
    }
    Ok([0, requested & (LISTS | FORMAT)])
}

pub(crate) fn read_defect_data_10(cmd: &mut CommandContext<'_>) -> BeginResult {
    let header = defect_header(cmd, 2)?;
    cmd.buffers.data_in.extend(header);
    cmd.buffers.data_in.extend([0; 2]);
    cmd.end_with_data_in(cmd.cdb.u16(7).into())
}

pub(crate) fn read_defect_data_12(cmd: &mut CommandContext<'_>) -> BeginResult {
    let header = defect_header(cmd, 1)?;
    cmd.buffers.data_in.extend(header);
    cmd.buffers.data_in.extend([0; 6]);
    cmd.end_with_data_in(cmd.cdb.u32(6))
}
