//! VERIFY, WRITE AND VERIFY, COMPARE AND WRITE, ORWRITE: commands that read what is there and look at it.
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

fn verify(ask: &Ask<'_>, extent: Extent) -> Begun {
    ask.zero(1, PROTECT)?;
    let bytchk = (ask.cdb.u8(1) & BYTCHK) >> 1;
    if bytchk == 2 {
        return Err(Sense::in_command(1, Some(2)).into());
    }
    let range = ask.transfer(extent)?;
    if range.1 == ByteLen::ZERO {
        return Ok(nothing());
    }
    let block = ask.unit.block_bytes();
    let (check, transferred) = match bytchk {
        0 => (Check::Readable, 0),
        1 => {
            ask.offered(range.1)?;
            (Check::Blocks, range.1.0)
        }
        _ => (Check::Same(ask.parameters(block as usize)?), block.into()),
    };
    Ok(begin(Kind::Verify(Verify::new(range, extent.lba, block, check, transferred))))
}

pub(crate) fn verify_10(ask: &mut Ask<'_>) -> Begun {
    verify(ask, ask.extent_10())
}

pub(crate) fn verify_12(ask: &mut Ask<'_>) -> Begun {
    verify(ask, ask.extent_12())
}

pub(crate) fn verify_16(ask: &mut Ask<'_>) -> Begun {
    verify(ask, ask.extent_16())
}

fn write_and_verify(ask: &Ask<'_>, extent: Extent) -> Begun {
    ask.zero(1, PROTECT)?;
    let check = match (ask.cdb.u8(1) & BYTCHK) >> 1 {
        0 => Check::Readable,
        1 => Check::Blocks,
        _ => return Err(Sense::in_command(1, Some(2)).into()),
    };
    let range = ask.transfer(extent)?;
    ask.offered(range.1)?;
    if range.1 == ByteLen::ZERO {
        return Ok(nothing());
    }
    let verify = Verify::new(range, extent.lba, ask.unit.block_bytes(), check, range.1.0);
    Ok(begin(Kind::Verify(verify.after_write(range))))
}

pub(crate) fn write_and_verify_10(ask: &mut Ask<'_>) -> Begun {
    write_and_verify(ask, ask.extent_10())
}

pub(crate) fn write_and_verify_12(ask: &mut Ask<'_>) -> Begun {
    write_and_verify(ask, ask.extent_12())
}

pub(crate) fn write_and_verify_16(ask: &mut Ask<'_>) -> Begun {
    write_and_verify(ask, ask.extent_16())
}

pub(crate) fn compare_and_write(ask: &mut Ask<'_>) -> Begun {
    ask.zero(1, PROTECT)?;
    let count = ask.cdb.u8(13);
    if count > ask.unit.bounds().compare {
        return Err(Sense::in_command(13, None).into());
    }
    let range = ask.range(ask.cdb.u64(2), count.into())?;
    if range.1 == ByteLen::ZERO {
        return Ok(nothing());
    }
    // Twice the blocks: what is expected, and what is to be written.
    ask.offered(ByteLen(2 * range.1.0))?;
    let fua = ask.cdb.has(1, FUA) || ask.unit.write_through();
    Ok(begin(Kind::Compare(Compare::new(range, fua, Arc::clone(ask.unit.sections())))))
}

pub(crate) fn orwrite(ask: &mut Ask<'_>) -> Begun {
    ask.zero(1, PROTECT)?;
    let range = ask.transfer(ask.extent_16())?;
    ask.offered(range.1)?;
    if range.1 == ByteLen::ZERO {
        return Ok(nothing());
    }
    let fua = ask.cdb.has(1, FUA) || ask.unit.write_through();
    Ok(begin(Kind::OrWrite(OrWrite::new(range, fua, Arc::clone(ask.unit.sections())))))
}
