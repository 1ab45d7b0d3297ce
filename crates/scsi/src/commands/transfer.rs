//! READ, WRITE and SYNCHRONIZE CACHE. Source: SBC-3 clause 5, under their names.

use mqblk_core::{ByteLen, ByteOffset, Op};

use crate::action::CommandAction;
use crate::command::CommandCompletion;
use crate::context::{BeginError, BeginResult, CommandContext};
use crate::sense::Sense;

/// RDPROTECT, WRPROTECT, VRPROTECT: protection information is not supported.
pub(crate) const PROTECT: u8 = 0xe0;
/// Force unit access.
pub(crate) const FUA: u8 = 0x08;

/// The blocks of a command.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    pub(crate) lba: u64,
    pub(crate) count: u32,
    /// Offset of `count` in the CDB.
    pub(crate) count_at: u16,
}

impl CommandContext<'_> {
    /// Returns LBA and length of a 10-byte CDB.
    pub(crate) fn extent_10(&self) -> Extent {
        Extent { lba: self.cdb.u32(2).into(), count: self.cdb.u16(7).into(), count_at: 7 }
    }

    /// Returns LBA and length of a 12-byte CDB.
    pub(crate) fn extent_12(&self) -> Extent {
        Extent { lba: self.cdb.u32(2).into(), count: self.cdb.u32(6), count_at: 6 }
    }

    /// Returns LBA and length of a 16-byte CDB.
    pub(crate) fn extent_16(&self) -> Extent {
        Extent { lba: self.cdb.u64(2), count: self.cdb.u32(10), count_at: 10 }
    }

    /// Returns the extent as bytes, checked against the maximum transfer length.
    pub(crate) fn transfer(&self, extent: Extent) -> Result<(ByteOffset, ByteLen), BeginError> {
        if extent.count > self.unit.block_limits().max_transfer {
            return Err(Sense::invalid_cdb_field(extent.count_at, None).into());
        }
        self.range(extent.lba, extent.count.into())
    }
}

fn read(cmd: &CommandContext<'_>, extent: Extent) -> BeginResult {
    let (start, len) = cmd.transfer(extent)?;
    if len.0 > cmd.data_in_len {
        return Err(BeginError::Overrun);
    }
    Ok(disk_action(Op::Read, start, len))
}

fn write(cmd: &CommandContext<'_>, extent: Extent, fua: bool) -> BeginResult {
    let (start, len) = cmd.transfer(extent)?;
    cmd.check_data_out_len(len)?;
    Ok(disk_action(Op::Write { fua: fua || cmd.unit.write_through() }, start, len))
}

fn disk_action(op: Op, start: ByteOffset, len: ByteLen) -> CommandAction {
    match len {
        ByteLen::ZERO => CommandAction::Complete(CommandCompletion::good(0)),
        _ => CommandAction::Disk { op, start, len, transferred: len.0 },
    }
}

/// Returns LBA and length of a 6-byte CDB: an LBA of 21 bits; a length of 0 means 256 blocks.
fn extent_6(cmd: &CommandContext<'_>) -> Extent {
    let count = match cmd.cdb.u8(4) {
        0 => 256,
        count => count.into(),
    };
    Extent { lba: (cmd.cdb.u24(1) & 0x1f_ffff).into(), count, count_at: 4 }
}

pub(crate) fn read_6(cmd: &mut CommandContext<'_>) -> BeginResult {
    read(cmd, extent_6(cmd))
}

// FUA of a read has no effect: the disk returns the data written last.
pub(crate) fn read_10(cmd: &mut CommandContext<'_>) -> BeginResult {
    cmd.check_zero(1, PROTECT)?;
    read(cmd, cmd.extent_10())
}

pub(crate) fn read_12(cmd: &mut CommandContext<'_>) -> BeginResult {
    cmd.check_zero(1, PROTECT)?;
    read(cmd, cmd.extent_12())
}

pub(crate) fn read_16(cmd: &mut CommandContext<'_>) -> BeginResult {
    cmd.check_zero(1, PROTECT)?;
    read(cmd, cmd.extent_16())
}

pub(crate) fn write_6(cmd: &mut CommandContext<'_>) -> BeginResult {
    write(cmd, extent_6(cmd), false)
}

pub(crate) fn write_10(cmd: &mut CommandContext<'_>) -> BeginResult {
    cmd.check_zero(1, PROTECT)?;
    write(cmd, cmd.extent_10(), cmd.cdb.has(1, FUA))
}

pub(crate) fn write_12(cmd: &mut CommandContext<'_>) -> BeginResult {
    cmd.check_zero(1, PROTECT)?;
    write(cmd, cmd.extent_12(), cmd.cdb.has(1, FUA))
}

pub(crate) fn write_16(cmd: &mut CommandContext<'_>) -> BeginResult {
    cmd.check_zero(1, PROTECT)?;
    write(cmd, cmd.extent_16(), cmd.cdb.has(1, FUA))
}

/// Flushes the whole cache, which covers any range. The command completes when the data is durable even if IMMED is
/// set, so that no work is left without a command.
fn synchronize(cmd: &CommandContext<'_>, extent: Extent) -> BeginResult {
    cmd.range(extent.lba, extent.count.into())?;
    Ok(CommandContext::flush(0))
}

pub(crate) fn synchronize_10(cmd: &mut CommandContext<'_>) -> BeginResult {
    synchronize(cmd, cmd.extent_10())
}

pub(crate) fn synchronize_16(cmd: &mut CommandContext<'_>) -> BeginResult {
    synchronize(cmd, cmd.extent_16())
}
