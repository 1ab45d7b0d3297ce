//! VERIFY, WRITE AND VERIFY, COMPARE AND WRITE, ORWRITE: commands that read the medium and compare or combine it.
//! Source: SBC-3 clause 5, under their names.

use std::sync::Arc;

use mqblk_core::ByteLen;

use crate::action::CommandAction;
use crate::command::CommandCompletion;
use crate::commands::transfer::{Extent, FUA, PROTECT};
use crate::context::{BeginResult, CommandContext};
use crate::multi_step::{CompareAndWrite, MultiStepCommand, MultiStepKind, OrWrite, Verify, VerifyMode};
use crate::sense::Sense;

/// BYTCHK of VERIFY and WRITE AND VERIFY.
const BYTCHK: u8 = 0x06;

fn multi_step(kind: MultiStepKind) -> CommandAction {
    CommandAction::MultiStep(MultiStepCommand::new(kind))
}

fn nothing() -> CommandAction {
    CommandAction::Complete(CommandCompletion::good(0))
}

fn verify(cmd: &CommandContext<'_>, extent: Extent) -> BeginResult {
    cmd.check_zero(1, PROTECT)?;
    let bytchk = (cmd.cdb.u8(1) & BYTCHK) >> 1;
    if bytchk == 2 {
        return Err(Sense::invalid_cdb_field(1, Some(2)).into());
    }
    let range = cmd.transfer(extent)?;
    if range.1 == ByteLen::ZERO {
        return Ok(nothing());
    }
    let block = cmd.unit.block_size();
    let (check, transferred) = match bytchk {
        0 => (VerifyMode::Readable, 0),
        1 => {
            cmd.check_data_out_len(range.1)?;
            (VerifyMode::Blocks, range.1.0)
        }
        _ => (VerifyMode::SameBlock(cmd.parameter_list(block as usize)?), block.into()),
    };
    Ok(multi_step(MultiStepKind::Verify(Verify::new(range, extent.lba, block, check, transferred))))
}

pub(crate) fn verify_10(cmd: &mut CommandContext<'_>) -> BeginResult {
    verify(cmd, cmd.extent_10())
}

pub(crate) fn verify_12(cmd: &mut CommandContext<'_>) -> BeginResult {
    verify(cmd, cmd.extent_12())
}

pub(crate) fn verify_16(cmd: &mut CommandContext<'_>) -> BeginResult {
    verify(cmd, cmd.extent_16())
}

fn write_and_verify(cmd: &CommandContext<'_>, extent: Extent) -> BeginResult {
    cmd.check_zero(1, PROTECT)?;
    let check = match (cmd.cdb.u8(1) & BYTCHK) >> 1 {
        0 => VerifyMode::Readable,
        1 => VerifyMode::Blocks,
        _ => return Err(Sense::invalid_cdb_field(1, Some(2)).into()),
    };
    let range = cmd.transfer(extent)?;
    cmd.check_data_out_len(range.1)?;
    if range.1 == ByteLen::ZERO {
        return Ok(nothing());
    }
    let verify = Verify::new(range, extent.lba, cmd.unit.block_size(), check, range.1.0);
    Ok(multi_step(MultiStepKind::Verify(verify.after_write(range))))
}

pub(crate) fn write_and_verify_10(cmd: &mut CommandContext<'_>) -> BeginResult {
    write_and_verify(cmd, cmd.extent_10())
}

pub(crate) fn write_and_verify_12(cmd: &mut CommandContext<'_>) -> BeginResult {
    write_and_verify(cmd, cmd.extent_12())
}

pub(crate) fn write_and_verify_16(cmd: &mut CommandContext<'_>) -> BeginResult {
    write_and_verify(cmd, cmd.extent_16())
}

pub(crate) fn compare_and_write(cmd: &mut CommandContext<'_>) -> BeginResult {
    cmd.check_zero(1, PROTECT)?;
    let count = cmd.cdb.u8(13);
    if count > cmd.unit.block_limits().max_compare_and_write {
        return Err(Sense::invalid_cdb_field(13, None).into());
    }
    let range = cmd.range(cmd.cdb.u64(2), count.into())?;
    if range.1 == ByteLen::ZERO {
        return Ok(nothing());
    }
    // Twice the blocks: the data to compare with, and the data to write.
    cmd.check_data_out_len(ByteLen(2 * range.1.0))?;
    let fua = cmd.cdb.has(1, FUA) || cmd.unit.write_through();
    Ok(multi_step(MultiStepKind::CompareAndWrite(CompareAndWrite::new(range, fua, Arc::clone(cmd.unit.range_locks())))))
}

pub(crate) fn orwrite(cmd: &mut CommandContext<'_>) -> BeginResult {
    cmd.check_zero(1, PROTECT)?;
    let range = cmd.transfer(cmd.extent_16())?;
    cmd.check_data_out_len(range.1)?;
    if range.1 == ByteLen::ZERO {
        return Ok(nothing());
    }
    let fua = cmd.cdb.has(1, FUA) || cmd.unit.write_through();
    Ok(multi_step(MultiStepKind::OrWrite(OrWrite::new(range, fua, Arc::clone(cmd.unit.range_locks())))))
}
