//! READ, WRITE and SYNCHRONIZE CACHE. Source: SBC-3 clause 5, under their names.

use mqblk_core::{ByteLen, ByteOffset, Op};

use crate::ask::{Ask, Begun, Refused};
use crate::sense::Sense;
use crate::step::{Ending, Step};

/// RDPROTECT, WRPROTECT and their kin: the unit has no protection information.
pub(crate) const PROTECT: u8 = 0xe0;
/// Force unit access.
pub(crate) const FUA: u8 = 0x08;

/// Which blocks a command names, and where it does.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    pub(crate) lba: u64,
    pub(crate) count: u32,
    /// The byte of the command that `count` starts in.
    pub(crate) count_at: u16,
}

impl Ask<'_> {
    /// LBA and length of a command of 10 bytes.
    pub(crate) fn extent_10(&self) -> Extent {
        Extent { lba: self.cdb.u32(2).into(), count: self.cdb.u16(7).into(), count_at: 7 }
    }

    /// Of 12 bytes.
    pub(crate) fn extent_12(&self) -> Extent {
        Extent { lba: self.cdb.u32(2).into(), count: self.cdb.u32(6), count_at: 6 }
    }

    /// Of 16 bytes.
    pub(crate) fn extent_16(&self) -> Extent {
        Extent { lba: self.cdb.u64(2), count: self.cdb.u32(10), count_at: 10 }
    }

    /// The extent as bytes, held to the maximum transfer length.
    pub(crate) fn transfer(&self, extent: Extent) -> Result<(ByteOffset, ByteLen), Refused> {
        if extent.count > self.unit.bounds().transfer {
            return Err(Sense::in_command(extent.count_at, None).into());
        }
        self.range(extent.lba, extent.count.into())
    }
}

fn read(ask: &Ask<'_>, extent: Extent) -> Begun {
    let (start, len) = ask.transfer(extent)?;
    if len.0 > ask.data_in {
        return Err(Refused::Overrun);
    }
    Ok(one(Op::Read, start, len))
}

fn write(ask: &Ask<'_>, extent: Extent, fua: bool) -> Begun {
    let (start, len) = ask.transfer(extent)?;
    ask.offered(len)?;
    Ok(one(Op::Write { fua: fua || ask.unit.write_through() }, start, len))
}

fn one(op: Op, start: ByteOffset, len: ByteLen) -> Step {
    match len {
        ByteLen::ZERO => Step::End(Ending::good(0)),
        _ => Step::Disk { op, start, len, transferred: len.0 },
    }
}

/// An LBA of 21 bits; a length of 0 means 256 blocks.
fn extent_6(ask: &Ask<'_>) -> Extent {
    let count = match ask.cdb.u8(4) {
        0 => 256,
        count => count.into(),
    };
    Extent { lba: (ask.cdb.u24(1) & 0x1f_ffff).into(), count, count_at: 4 }
}

pub(crate) fn read_6(ask: &mut Ask<'_>) -> Begun {
    read(ask, extent_6(ask))
}

// FUA of a read asks for what is on the medium: the disk below gives what was written last, from wherever it is.
pub(crate) fn read_10(ask: &mut Ask<'_>) -> Begun {
    ask.zero(1, PROTECT)?;
    read(ask, ask.extent_10())
}

pub(crate) fn read_12(ask: &mut Ask<'_>) -> Begun {
    ask.zero(1, PROTECT)?;
    read(ask, ask.extent_12())
}

pub(crate) fn read_16(ask: &mut Ask<'_>) -> Begun {
    ask.zero(1, PROTECT)?;
    read(ask, ask.extent_16())
}

pub(crate) fn write_6(ask: &mut Ask<'_>) -> Begun {
    write(ask, extent_6(ask), false)
}

pub(crate) fn write_10(ask: &mut Ask<'_>) -> Begun {
    ask.zero(1, PROTECT)?;
    write(ask, ask.extent_10(), ask.cdb.has(1, FUA))
}

pub(crate) fn write_12(ask: &mut Ask<'_>) -> Begun {
    ask.zero(1, PROTECT)?;
    write(ask, ask.extent_12(), ask.cdb.has(1, FUA))
}

pub(crate) fn write_16(ask: &mut Ask<'_>) -> Begun {
    ask.zero(1, PROTECT)?;
    write(ask, ask.extent_16(), ask.cdb.has(1, FUA))
}

/// The whole cache, which covers any range of it. The answer is given when the data is durable also with IMMED set, so that
/// nothing is left to do without a command.
fn synchronize(ask: &Ask<'_>, extent: Extent) -> Begun {
    ask.range(extent.lba, extent.count.into())?;
    Ok(Ask::flush(0))
}

pub(crate) fn synchronize_10(ask: &mut Ask<'_>) -> Begun {
    synchronize(ask, ask.extent_10())
}

pub(crate) fn synchronize_16(ask: &mut Ask<'_>) -> Begun {
    synchronize(ask, ask.extent_16())
}
