//! VERIFY, WRITE AND VERIFY, COMPARE AND WRITE, ORWRITE: commands that read the medium and compare or combine it.
//! Source: SBC-3 clause 5, under their names.

use std::sync::Arc;

use mqblk_core::ByteLen;

use crate::ask::{Ask, Begun};
use crate::commands::transfer::{Extent, FUA, PROTECT};
use crate::sense::Sense;
use crate::sequence::{Check, Compare, Kind, OrWrite, Sequence, Verify};
use crate::step::{Ending, Step};

/// BYTCHK of VERIFY and WRITE AND VERIFY.
const BYTCHK: u8 = 0x06;

fn begin(kind: Kind) -> Step {
    Step::Sequence(Sequence::new(kind))
}

fn nothing() -> Step {
    Step::End(Ending::good(0))
}

fn verify(cmd: &Ask<'_>, extent: Extent) -> Begun {
    cmd.zero(1, PROTECT)?;
    let bytchk = (cmd.cdb.u8(1) & BYTCHK) >> 1;
    if bytchk == 2 {
        return Err(Sense::in_command(1, Some(2)).into());
    }
    let range = cmd.transfer(extent)?;
    if range.1 == ByteLen::ZERO {
        return Ok(nothing());
    }
    let block = cmd.unit.block_bytes();
    let (check, transferred) = match bytchk {
        0 => (Check::Readable, 0),
        1 => {
            cmd.offered(range.1)?;
            (Check::Blocks, range.1.0)
        }
        _ => (Check::Same(cmd.parameters(block as usize)?), block.into()),
    };
    Ok(begin(Kind::Verify(Verify::new(range, extent.lba, block, check, transferred))))
}

pub(crate) fn verify_10(cmd: &mut Ask<'_>) -> Begun {
    verify(cmd, cmd.extent_10())
}

pub(crate) fn verify_12(cmd: &mut Ask<'_>) -> Begun {
    verify(cmd, cmd.extent_12())
}

pub(crate) fn verify_16(cmd: &mut Ask<'_>) -> Begun {
    verify(cmd, cmd.extent_16())
}

fn write_and_verify(cmd: &Ask<'_>, extent: Extent) -> Begun {
    cmd.zero(1, PROTECT)?;
    let check = match (cmd.cdb.u8(1) & BYTCHK) >> 1 {
        0 => Check::Readable,
        1 => Check::Blocks,
        _ => return Err(Sense::in_command(1, Some(2)).into()),
    };
    let range = cmd.transfer(extent)?;
    cmd.offered(range.1)?;
    if range.1 == ByteLen::ZERO {
        return Ok(nothing());
    }
    let verify = Verify::new(range, extent.lba, cmd.unit.block_bytes(), check, range.1.0);
    Ok(begin(Kind::Verify(verify.after_write(range))))
}

pub(crate) fn write_and_verify_10(cmd: &mut Ask<'_>) -> Begun {
    write_and_verify(cmd, cmd.extent_10())
}

pub(crate) fn write_and_verify_12(cmd: &mut Ask<'_>) -> Begun {
    write_and_verify(cmd, cmd.extent_12())
}

pub(crate) fn write_and_verify_16(cmd: &mut Ask<'_>) -> Begun {
    write_and_verify(cmd, cmd.extent_16())
}

pub(crate) fn compare_and_write(cmd: &mut Ask<'_>) -> Begun {
    cmd.zero(1, PROTECT)?;
    let count = cmd.cdb.u8(13);
    if count > cmd.unit.bounds().compare {
        return Err(Sense::in_command(13, None).into());
    }
    let range = cmd.range(cmd.cdb.u64(2), count.into())?;
    if range.1 == ByteLen::ZERO {
        return Ok(nothing());
    }
    // Twice the blocks: the data to compare with, and the data to write.
    cmd.offered(ByteLen(2 * range.1.0))?;
    let fua = cmd.cdb.has(1, FUA) || cmd.unit.write_through();
    Ok(begin(Kind::Compare(Compare::new(range, fua, Arc::clone(cmd.unit.sections())))))
}

pub(crate) fn orwrite(cmd: &mut Ask<'_>) -> Begun {
    cmd.zero(1, PROTECT)?;
    let range = cmd.transfer(cmd.extent_16())?;
    cmd.offered(range.1)?;
    if range.1 == ByteLen::ZERO {
        return Ok(nothing());
    }
    let fua = cmd.cdb.has(1, FUA) || cmd.unit.write_through();
    Ok(begin(Kind::OrWrite(OrWrite::new(range, fua, Arc::clone(cmd.unit.sections())))))
}
