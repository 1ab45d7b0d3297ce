//! UNMAP and WRITE SAME. Source: SBC-3 clause 5, under their names.

use mqblk_core::{ByteLen, Op};

use crate::action::CommandAction;
use crate::command::CommandCompletion;
use crate::commands::transfer::{Extent, PROTECT};
use crate::context::{BeginError, BeginResult, CommandContext};
use crate::multi_step::{MultiStepCommand, MultiStepKind, WriteSame};
use crate::sense::Sense;

/// Lengths of the parameter list header and of an UNMAP block descriptor.
const HEADER: usize = 8;
const DESCRIPTOR: usize = 16;

pub(crate) fn unmap(cmd: &mut CommandContext<'_>) -> BeginResult {
    let limits = cmd.unit.block_limits().unmap.ok_or(Sense::INVALID_OPCODE)?;
    // ANCHOR.
    cmd.check_zero(1, 0x01)?;
    let list_len = usize::from(cmd.cdb.u16(7));
    if list_len == 0 {
        return cmd.good();
    }
    if list_len < HEADER {
        return Err(Sense::PARAMETER_LIST_LENGTH.with_cdb_field(7, None).into());
    }
    cmd.check_data_out_len(ByteLen(list_len as u64))?;
    let mut header = [0; HEADER];
    if !cmd.data_out.copy(0, &mut header) {
        return Err(BeginError::Overrun);
    }
    let data_len = usize::from(u16::from_be_bytes([header[0], header[1]]));
    let descriptors_len = usize::from(u16::from_be_bytes([header[2], header[3]]));
    if data_len + 2 > list_len || descriptors_len + HEADER > list_len {
        return Err(Sense::PARAMETER_LIST_LENGTH.with_cdb_field(7, None).into());
    }
    // A truncated descriptor is ignored.
    let count = descriptors_len / DESCRIPTOR;
    if count as u64 > limits.max_descriptors.into() {
        return Err(Sense::invalid_parameter_field(2, None).into());
    }
    let mut list = vec![0; count * DESCRIPTOR];
    if !cmd.data_out.copy(HEADER as u64, &mut list) {
        return Err(BeginError::Overrun);
    }
    let mut total: u64 = 0;
    for (index, descriptor) in list.chunks_exact(DESCRIPTOR).enumerate() {
        let [lba, blocks, _] = parse_descriptor(descriptor);
        if blocks == 0 {
            continue;
        }
        total += blocks;
        if total > limits.max_blocks.into() {
            return Err(Sense::invalid_parameter_field((HEADER + index * DESCRIPTOR + 8) as u16, None).into());
        }
        let range = cmd.range(lba, blocks)?;
        cmd.buffers.ranges.push(range);
    }
    let transferred = list_len as u64;
    if cmd.buffers.ranges.is_empty() {
        return Ok(CommandAction::Complete(CommandCompletion::good(transferred)));
    }
    let op = if cmd.unit.block_limits().unmapped_reads_zeroes() {
        Op::WriteZeroes { may_unmap: true, fua: cmd.unit.write_through() }
    } else {
        Op::Discard { secure: false }
    };
    Ok(CommandAction::Ranges { op, transferred })
}

/// Returns the LBA, the number of blocks and the reserved bytes.
fn parse_descriptor(descriptor: &[u8]) -> [u64; 3] {
    let number = |bytes: &[u8]| bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte));
    [number(&descriptor[..8]), number(&descriptor[8..12]), number(&descriptor[12..])]
}

fn write_same(cmd: &CommandContext<'_>, extent: Extent, no_data: bool) -> BeginResult {
    let limits = *cmd.unit.block_limits();
    // WRPROTECT; ANCHOR.
    cmd.check_zero(1, PROTECT)?;
    cmd.check_zero(1, 0x10)?;
    let unmap = cmd.cdb.has(1, 0x08);
    if unmap && !limits.unmapped_reads_zeroes() {
        return Err(Sense::invalid_cdb_field(1, Some(3)).into());
    }
    // Zero blocks would mean "to the end", which WSNZ of the Block Limits page excludes.
    if extent.count == 0 || extent.count > limits.max_write_same {
        return Err(Sense::invalid_cdb_field(extent.count_at, None).into());
    }
    let (start, len) = cmd.range(extent.lba, extent.count.into())?;
    let block = cmd.unit.block_size() as usize;
    let (pattern, transferred) = if no_data { (vec![0; block], 0) } else { (cmd.parameter_list(block)?, block as u64) };
    let fua = cmd.unit.write_through();
    // Blocks may only be unmapped if the pattern is zeroes.
    if limits.max_write_zeroes.is_some() && pattern.iter().all(|byte| *byte == 0) {
        return Ok(CommandAction::Disk { op: Op::WriteZeroes { may_unmap: unmap, fua }, start, len, transferred });
    }
    Ok(CommandAction::MultiStep(MultiStepCommand::new(MultiStepKind::WriteSame(WriteSame::new(
        (start, len),
        pattern,
        fua,
        transferred,
    )))))
}

pub(crate) fn write_same_10(cmd: &mut CommandContext<'_>) -> BeginResult {
    // PBDATA, LBDATA and RELADR, which are obsolete.
    cmd.check_zero(1, 0x07)?;
    write_same(cmd, cmd.extent_10(), false)
}

pub(crate) fn write_same_16(cmd: &mut CommandContext<'_>) -> BeginResult {
    cmd.check_zero(1, 0x06)?;
    write_same(cmd, cmd.extent_16(), cmd.cdb.has(1, 0x01))
}
