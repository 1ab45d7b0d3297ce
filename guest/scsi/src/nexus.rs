//! I_T_L nexus: the path from an initiator port to a logical unit, where its commands begin.

use std::fmt;
use std::sync::{Arc, Mutex};

use mqblk_core::lock::lock;
use mqblk_core::{BlockSize, ByteLen, ByteOffset, Op, Wake};

use crate::cdb::Cdb;
use crate::command::{Command, CommandAction, CommandBuffers, CommandCompletion, DataOut};
use crate::context::{BeginError, CommandContext};
use crate::logical_unit::{LogicalUnit, flag};
use crate::opcode_table::{self, MediumState, OpcodeRow};
use crate::reservation::{AccessClass, NexusName, ReservationHandle, Ticket};
use crate::sense::{Sense, Status};
use crate::unit_attention::{UnitAttention, UnitAttentionQueue};

/// I_T_L nexus: one initiator port's path through a target port to a logical unit.
#[derive(Debug)]
pub struct Nexus {
    unit: Arc<LogicalUnit>,
    attentions: Arc<UnitAttentionQueue>,
    reservation: ReservationHandle,
    task_set: Mutex<Option<Arc<dyn TaskSet>>>,
}

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

/// What holds for the READ and WRITE commands of a nexus at a moment.
#[derive(Clone, Copy, Debug)]
pub struct TransferRules {
    /// Bits that a read has not, of its first 8 bytes as a little-endian number. All of them, and so also bits of its operation code, where a
    /// read needs more than to be valid.
    not_in_reads: u64,
    /// The same of a write.
    not_in_writes: u64,
    /// Every write must be durable before it completes.
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
    /// Those of no logical unit: no command begins.
    pub const NONE: TransferRules = TransferRules {
        not_in_reads: u64::MAX,
        not_in_writes: u64::MAX,
        fua: false,
        max_blocks: 0,
        blocks: 0,
        block: BlockSize::B512,
    };

    /// Begins a READ or WRITE of 10 or 16 bytes, given by the first 16 bytes of its CDB as little-endian numbers, as [`Nexus::begin`] does in
    /// more steps. Returns `None` for all other commands and for every error. The caller compares the length with the command's data buffer.
    #[inline]
    pub fn begin(&self, cdb: [u64; 2]) -> Option<Transfer> {
        let [low, high] = cdb;
        let naca = u64::from(opcode_table::NACA);
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
        // Of 0 blocks there are more than of any number.
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

/// Commands of one nexus that are in flight.
pub trait TaskSet: Send + Sync + fmt::Debug {
    /// Aborts them all, for PREEMPT AND ABORT by another nexus. The ticket is resolved when the last has ended, and
    /// then wakes `done`.
    fn abort(&self, done: Arc<dyn Wake>) -> Arc<Ticket>;
}

impl Nexus {
    pub(crate) fn new(
        unit: Arc<LogicalUnit>,
        attentions: Arc<UnitAttentionQueue>,
        reservation: ReservationHandle,
    ) -> Nexus {
        Nexus { unit, attentions, reservation, task_set: Mutex::new(None) }
    }

    /// Returns its logical unit.
    pub fn unit(&self) -> &Arc<LogicalUnit> {
        &self.unit
    }

    /// Returns the names of the initiator port and the target port.
    pub fn name(&self) -> &NexusName {
        self.reservation.name()
    }

    /// Sets where the nexus's commands are aborted. Without a task set PREEMPT AND ABORT works like PREEMPT.
    pub fn set_task_set(&self, tasks: Option<Arc<dyn TaskSet>>) {
        *lock(&self.task_set) = tasks;
    }

    pub(crate) fn task_set(&self) -> Option<Arc<dyn TaskSet>> {
        lock(&self.task_set).clone()
    }

    /// Handles I_T NEXUS RESET: ends a RESERVE of the nexus and raises I_T NEXUS LOSS. Registrations and persistent
    /// reservations stay.
    pub fn nexus_lost(&self) {
        self.reservation.nexus_lost();
        self.raise_attention(UnitAttention::NexusLoss);
    }

    /// Handles a reset of the initiator, such as a guest reboot. A logical unit that no other initiator uses is reset
    /// (a guest that stopped it must be able to boot from it); of a shared one only the nexus is lost.
    pub fn initiator_reset(&self) {
        if self.unit.has_other_initiators(&self.name().initiator) { self.nexus_lost() } else { self.unit.reset() }
    }

    /// Lets an initiator continue that was served before, without noticing: the logical unit was neither switched on
    /// nor reset. A command that it had in flight may have been executed; a unit attention as its status would deny
    /// that. `elsewhere`: another process served it, so no unit attention of this process is news to it.
    pub fn initiator_resumed(&self, elsewhere: bool) {
        if elsewhere { self.attentions.clear_all() } else { self.attentions.clear_resets() }
    }

    pub(crate) fn reservation(&self) -> &ReservationHandle {
        &self.reservation
    }

    #[inline]
    pub(crate) fn allows(&self, access: AccessClass) -> bool {
        self.reservation.allows(access)
    }

    /// Raises a unit attention, which the initiator gets before its next command is executed.
    pub fn raise_attention(&self, attention: UnitAttention) {
        self.attentions.raise(attention);
    }

    pub(crate) fn attentions(&self) -> &UnitAttentionQueue {
        &self.attentions
    }

    /// Begins a command. Returns what the caller must do first. `buffers` may be those of another command; their
    /// contents are replaced.
    #[inline]
    pub fn begin<D: DataOut + ?Sized>(
        &self,
        command: &Command<'_>,
        data_out: &D,
        buffers: &mut CommandBuffers,
    ) -> CommandAction {
        buffers.data_in.clear();
        buffers.ranges.clear();
        match self.begin_transfer(command, data_out.len()) {
            Some(Transfer { op, start, len }) => CommandAction::Disk { op, start, len, transferred: len.0 },
            None => self.begin_by_table(command, &data_out, buffers),
        }
    }

    /// Begins a READ or WRITE of 10 or 16 bytes, as [`begin`](Self::begin) does in more steps. Returns `None`, and has done nothing, for all
    /// other commands and for every error.
    #[inline]
    fn begin_transfer(&self, command: &Command<'_>, data_out: u64) -> Option<Transfer> {
        // A transport's CDB field is longer than these commands; a shorter one goes through the table.
        let transfer = self.transfer_rules().begin(first_words(command.cdb)?)?;
        let most = if transfer.op == Op::Read { command.data_in_len } else { data_out };
        (transfer.len.0 <= most).then_some(transfer)
    }

    /// Returns what holds for the transfers of this nexus at this moment: looked up once for several commands that came together.
    #[inline]
    pub fn transfer_rules(&self) -> TransferRules {
        let flags = self.unit.flags();
        let barred_bits = |barred, access| {
            let may = flags & barred == 0 && !self.attentions.has_pending() && self.allows(access);
            if may { PROTECT } else { u64::MAX }
        };
        TransferRules {
            not_in_reads: barred_bits(flag::STOPPED, AccessClass::Read),
            not_in_writes: barred_bits(flag::STOPPED | flag::READ_ONLY | flag::SOFTWARE_PROTECTED, AccessClass::Write),
            fua: flags & flag::WRITE_THROUGH != 0,
            max_blocks: self.unit.block_limits().max_transfer,
            blocks: self.unit.block_count(),
            block: self.unit.logical_block(),
        }
    }

    #[cold]
    fn begin_by_table(
        &self,
        command: &Command<'_>,
        data_out: &dyn DataOut,
        buffers: &mut CommandBuffers,
    ) -> CommandAction {
        let cdb = Cdb::new(command.cdb);
        let row = match self.check_command(&cdb) {
            Ok(row) => row,
            Err(refused) => return refused.into(),
        };
        let cmd = &mut CommandContext {
            nexus: self,
            unit: &self.unit,
            cdb,
            data_in_len: command.data_in_len,
            data_out,
            buffers,
        };
        let step = (row.handler)(cmd).unwrap_or_else(CommandAction::from);
        if !matches!(step, CommandAction::Complete(CommandCompletion { status: Status::Good, .. })) {
            cmd.buffers.data_in.clear();
        }
        step
    }

    /// Runs the checks that all commands share, in the order in which they are reported.
    fn check_command(&self, cdb: &Cdb) -> Result<&'static OpcodeRow, BeginError> {
        if self.attentions.has_pending()
            && !opcode_table::ALLOWED_BEFORE_ATTENTIONS.contains(&cdb.opcode())
            && let Some(sense) = self.attentions.take()
        {
            return Err(sense.into());
        }
        let row = opcode_table::find_row(cdb, self.unit.block_limits())?;
        if !self.allows(row.access) {
            return Err(BeginError::Conflict);
        }
        let control = row.cdb_usage.len() - 1;
        if cdb.has(control, opcode_table::NACA) {
            return Err(Sense::invalid_cdb_field(control as u16, Some(2)).into());
        }
        let flags = self.unit.flags();
        if row.medium != MediumState::Any && flags & flag::STOPPED != 0 {
            return Err(Sense::INITIALIZING_COMMAND_REQUIRED.into());
        }
        if row.medium == MediumState::Writable {
            if flags & flag::READ_ONLY != 0 {
                return Err(Sense::WRITE_PROTECTED.into());
            }
            if flags & flag::SOFTWARE_PROTECTED != 0 {
                return Err(Sense::SOFTWARE_WRITE_PROTECTED.into());
            }
        }
        Ok(row)
    }
}

impl From<BeginError> for CommandAction {
    fn from(refused: BeginError) -> CommandAction {
        match refused {
            BeginError::CheckCondition(sense) => CommandAction::Complete(CommandCompletion::check_condition(sense)),
            BeginError::Overrun => CommandAction::Overrun,
            BeginError::Conflict => CommandAction::Complete(CommandCompletion::RESERVATION_CONFLICT),
        }
    }
}
