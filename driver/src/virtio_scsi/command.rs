//! Commands: where they go, what they are, and their data.

use mqblk_memory::GuestMemory;

use super::cdb::{Cdb, Extent, Lba, unmap_bytes, unmap_list};
use super::wire::LunAddress;
use crate::DataSegment;

/// A command's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandData {
    /// None.
    None,
    /// The device writes it: a read.
    In(DataSegment),
    /// The device reads it: a write.
    Out(DataSegment),
}

/// A command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command {
    /// Where it goes.
    pub address: LunAddress,
    /// What it is.
    pub cdb: Cdb,
    /// Its data.
    pub data: CommandData,
}

/// Most extents of one UNMAP: what its length field holds.
pub const MAX_EXTENTS: usize = 4095;

impl Command {
    /// Reads `blocks` from `start` into `data`, which has room for just those.
    #[inline]
    pub fn read(address: LunAddress, start: Lba, blocks: u32, data: DataSegment) -> Command {
        Command { address, cdb: Cdb::read(start, blocks), data: CommandData::In(data) }
    }

    /// Writes `blocks` of `data` at `start`. `fua`: they are on the medium before the answer.
    #[inline]
    pub fn write(address: LunAddress, start: Lba, blocks: u32, data: DataSegment, fua: bool) -> Command {
        Command { address, cdb: Cdb::write(start, blocks, fua), data: CommandData::Out(data) }
    }

    /// Makes all writes that have been reaped durable (SYNCHRONIZE CACHE).
    pub fn flush(address: LunAddress) -> Command {
        Command { address, cdb: Cdb::flush(), data: CommandData::None }
    }

    /// Says that the extents' content is no longer needed. Their list is put where `scratch` is, which belongs to the command
    /// until its end. `None` when it does not fit there, does not lie in `memory`, or is longer than [`MAX_EXTENTS`].
    pub fn unmap(to: LunAddress, extents: &[Extent], memory: &GuestMemory, scratch: DataSegment) -> Option<Command> {
        let len = unmap_bytes(extents.len());
        if extents.len() > MAX_EXTENTS || len > scratch.len as usize {
            return None;
        }
        let mut list = vec![0; len];
        unmap_list(extents, &mut list);
        memory.write(scratch.address, &list)?;
        let data = CommandData::Out(DataSegment { address: scratch.address, len: len as u32 });
        Some(Command { address: to, cdb: Cdb::unmap(extents.len()), data })
    }

    /// Writes the one block of `data` to all of `blocks` from `start`. `unmap`: the space may be given back, if it then reads as
    /// the data.
    pub fn write_same(address: LunAddress, start: Lba, blocks: u32, data: DataSegment, unmap: bool) -> Command {
        Command { address, cdb: Cdb::write_same(start, blocks, unmap), data: CommandData::Out(data) }
    }
}
