//! READ and WRITE of 10 and 16 bytes, the most frequent commands: checked at once, without the table of commands.

use mqblk_core::{BlockSize, ByteLen, ByteOffset, Op};

use crate::command::Command;
use crate::logical_unit::{Nexus, flag};
use crate::opcode;
use crate::reservation::AccessClass;

/// A disk request with the first `len` bytes of a command's own data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// A read or a write.
    pub op: Op,
    /// Offset on the disk.
    pub start: ByteOffset,
    /// Length, at least 1 block.
    pub len: ByteLen,
}

/// The rules for READ and WRITE commands of a nexus at a moment.
#[derive(Clone, Copy, Debug)]
pub struct TransferRules {
    /// Bits that must be 0 in the first 8 bytes of a read, as a little-endian number. All bits, and so also bits of
    /// its operation code, if valid reads may fail.
    not_in_reads: u64,
    /// Bits that must be 0 in a write, as in `not_in_reads`.
    not_in_writes: u64,
    /// True if every write must be durable before it completes.
    fua: bool,
    /// Most blocks of a command.
    max_blocks: u32,
    /// Logical blocks of the unit.
    blocks: u64,
    block: BlockSize,
}

/// RDPROTECT or WRPROTECT, in the second byte of a READ or WRITE.
const PROTECT: u64 = 0xe0 << 8;
/// FUA, in the same byte.
const FUA: u64 = 0x08 << 8;

impl TransferRules {
    /// The rules without a logical unit: no command begins.
    pub const NONE: TransferRules = TransferRules {
        not_in_reads: u64::MAX,
        not_in_writes: u64::MAX,
        fua: false,
        max_blocks: 0,
        blocks: 0,
        block: BlockSize::B512,
    };

    /// Begins a READ or WRITE of 10 or 16 bytes, given by the first 16 bytes of its CDB as little-endian numbers, as
    /// [`Nexus::begin`] does in more steps. Returns `None` for all other commands and for every error. The caller
    /// compares the length with the command's data buffer.
    #[inline]
    pub fn begin(&self, cdb: [u64; 2]) -> Option<Transfer> {
        let [low, high] = cdb;
        let naca = u64::from(opcode::NACA);
        // LBA, number of blocks, and the control byte's NACA; the fields are big-endian.
        let (lba, count, naca) = match low as u8 & !2 {
            0x28 => {
                let count = (low >> 48) & 0xff00 | high & 0xff;
                (((low >> 16) as u32).swap_bytes().into(), count as u32, high & naca << 8)
            }
            0x88 => ((low >> 16 | high << 48).swap_bytes(), ((high >> 16) as u32).swap_bytes(), high & naca << 56),
            _ => return None,
        };
        let write = low & 2 != 0;
        let barred = if write { self.not_in_writes } else { self.not_in_reads };
        if low & barred | naca != 0 {
            return None;
        }
        // A count of 0 wraps to the largest number.
        if count.wrapping_sub(1) >= self.max_blocks || lba.checked_add(count.into())? > self.blocks {
            return None;
        }
        let (start, len) = (self.block.offset_of(lba)?, self.block.len_of(count.into())?);
        let op = match (write, self.fua || low & FUA != 0) {
            (false, _) => Op::Read,
            (true, false) => Op::Write { fua: false },
            (true, true) => Op::Write { fua: true },
        };
        Some(Transfer { op, start, len })
    }
}

/// Returns the first 16 bytes of a CDB as little-endian numbers.
#[inline]
fn first_words(cdb: &[u8]) -> Option<[u64; 2]> {
    let [low, high] = *cdb.first_chunk::<16>()?.as_chunks::<8>().0 else { return None };
    Some([low, high].map(u64::from_le_bytes))
}

impl Nexus {
    /// Begins a READ or WRITE of 10 or 16 bytes, as [`begin`](Self::begin) does in more steps. Does nothing and returns
    /// `None` for all other commands and for every error.
    #[inline]
    pub(crate) fn begin_transfer(&self, command: &Command<'_>, data_out: u64) -> Option<Transfer> {
        // A transport's CDB field is longer than these commands; a shorter one goes through the table.
        let transfer = self.transfer_rules().begin(first_words(command.cdb)?)?;
        let most = if transfer.op == Op::Read { command.data_in_len } else { data_out };
        (transfer.len.0 <= most).then_some(transfer)
    }

    /// Returns the current rules for transfers of this nexus: looked up once for several commands that came together.
    #[inline]
    pub fn transfer_rules(&self) -> TransferRules {
        let flags = self.unit().flags();
        let barred_bits = |barred, access| {
            let may = flags & barred == 0 && !self.attentions().has_pending() && self.allows(access);
            if may { PROTECT } else { u64::MAX }
        };
        TransferRules {
            not_in_reads: barred_bits(flag::STOPPED, AccessClass::Read),
            not_in_writes: barred_bits(flag::STOPPED | flag::READ_ONLY | flag::SOFTWARE_PROTECTED, AccessClass::Write),
            fua: flags & flag::WRITE_THROUGH != 0,
            max_blocks: self.unit().block_limits().max_transfer,
            blocks: self.unit().block_count(),
            block: self.unit().logical_block(),
        }
    }
}
