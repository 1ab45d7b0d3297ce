//! Commands: logical unit, command descriptor block, and data.

use mqblk_memory::GuestMemory;

use super::cdb::{Cdb, Extent, Lba, unmap_bytes, unmap_list};
use super::wire::LunAddress;
use crate::DataSegment;

/// A command's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandData {
    /// None.
    None,
    /// Data-in: the device writes it.
    In(DataSegment),
    /// Data-out: the device reads it.
    Out(DataSegment),
}

/// A command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command {
    /// Its logical unit.
    pub address: LunAddress,
    /// Its command descriptor block.
    pub cdb: Cdb,
    /// Its data.
    pub data: CommandData,
}

/// Largest number of extents of an UNMAP: the limit of its length field.
const MAX_EXTENTS: usize = 4095;

/// This many extents need no allocation.
const FEW_EXTENTS: usize = 4;

impl Command {
    /// Reads `blocks` from `start` into `data`, which has exactly their size.
    #[inline]
    pub fn read(address: LunAddress, start: Lba, blocks: u32, data: DataSegment) -> Command {
        Command { address, cdb: Cdb::read(start, blocks), data: CommandData::In(data) }
    }

    /// Writes `blocks` of `data` at `start`. `fua`: they are durable at completion.
    #[inline]
    pub fn write(address: LunAddress, start: Lba, blocks: u32, data: DataSegment, fua: bool) -> Command {
        Command { address, cdb: Cdb::write(start, blocks, fua), data: CommandData::Out(data) }
    }

    /// Makes all reaped writes durable (SYNCHRONIZE CACHE).
    pub fn flush(address: LunAddress) -> Command {
        Command { address, cdb: Cdb::flush(), data: CommandData::None }
    }

    /// Unmaps extents. Writes their list to `scratch`, which belongs to the command until it is completed. `None` if
    /// the list does not fit there, `scratch` is outside of `memory`, or there are more than 4095.
    pub fn unmap(to: LunAddress, extents: &[Extent], memory: &GuestMemory, scratch: DataSegment) -> Option<Command> {
        let len = unmap_bytes(extents.len());
        if extents.len() > MAX_EXTENTS || len > scratch.len as usize {
            return None;
        }
        let (mut few, mut many) = ([0; unmap_bytes(FEW_EXTENTS)], vec![]);
        let list = match few.get_mut(..len) {
            Some(list) => list,
            None => {
                many.resize(len, 0);
                &mut many[..]
            }
        };
        unmap_list(extents, list);
        memory.write(scratch.address, list)?;
        let data = CommandData::Out(DataSegment { address: scratch.address, len: len as u32 });
        Some(Command { address: to, cdb: Cdb::unmap(extents.len()), data })
    }

    /// Writes the one block of `data` to all of `blocks` from `start`. `unmap`: the blocks may be unmapped, if they
    /// then read as the data.
    pub fn write_same(address: LunAddress, start: Lba, blocks: u32, data: DataSegment, unmap: bool) -> Command {
        Command { address, cdb: Cdb::write_same(start, blocks, unmap), data: CommandData::Out(data) }
    }
}
