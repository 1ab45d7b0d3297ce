//! Context of a command that is being started.

use mqblk_core::{ByteLen, ByteOffset, Op};

use crate::action::CommandAction;
use crate::cdb::Cdb;
use crate::command::{CommandBuffers, CommandCompletion, DataOut};
use crate::logical_unit::{LogicalUnit, Nexus};
use crate::reservation::{AccessClass, ReservationError};
use crate::sense::Sense;

/// Context of a command that is being started.
pub(crate) struct CommandContext<'a> {
    pub(crate) nexus: &'a Nexus,
    pub(crate) unit: &'a LogicalUnit,
    pub(crate) cdb: Cdb,
    pub(crate) data_in_len: u64,
    pub(crate) data_out: &'a dyn DataOut,
    pub(crate) buffers: &'a mut CommandBuffers,
}

/// Reason why a command does not start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BeginError {
    /// CHECK CONDITION with this sense data.
    CheckCondition(Sense),
    /// The data exceeds the initiator's buffers.
    Overrun,
    /// Another nexus holds a reservation.
    Conflict,
}

impl From<Sense> for BeginError {
    fn from(sense: Sense) -> BeginError {
        BeginError::CheckCondition(sense)
    }
}

impl From<ReservationError> for BeginError {
    fn from(refusal: ReservationError) -> BeginError {
        match refusal {
            ReservationError::Conflict => BeginError::Conflict,
            ReservationError::CheckCondition(sense) => BeginError::CheckCondition(sense),
            ReservationError::Overrun => BeginError::Overrun,
        }
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

/// Result of a command handler.
pub(crate) type BeginResult = Result<CommandAction, BeginError>;

impl CommandContext<'_> {
    /// Completes the command with the data-in bytes, cut to the allocation length.
    pub(crate) fn end_with_data_in(&mut self, allocation: u32) -> BeginResult {
        end_with_data_in(self.buffers, allocation, self.data_in_len)
    }

    /// Checks that no reservation of another nexus forbids this class of command.
    pub(crate) fn check_access(&self, access: AccessClass) -> Result<(), BeginError> {
        if self.nexus.allows(access) { Ok(()) } else { Err(BeginError::Conflict) }
    }

    /// Completes the command without data.
    pub(crate) fn good(&self) -> BeginResult {
        Ok(CommandAction::Complete(CommandCompletion::good(0)))
    }

    /// Makes completed writes durable; `transferred` is the command's own count.
    pub(crate) fn flush(transferred: u64) -> CommandAction {
        CommandAction::Disk { op: Op::Flush, start: ByteOffset(0), len: ByteLen::ZERO, transferred }
    }

    /// Returns a private copy of the first `len` bytes of the parameter list.
    pub(crate) fn parameter_list(&self, len: usize) -> Result<Vec<u8>, BeginError> {
        let mut bytes = vec![0; len];
        if self.data_out.copy(0, &mut bytes) { Ok(bytes) } else { Err(BeginError::Overrun) }
    }

    /// Checks that the data-out buffer holds `len` bytes.
    pub(crate) fn check_data_out_len(&self, len: ByteLen) -> Result<(), BeginError> {
        if len.0 > self.data_out.len() { Err(BeginError::Overrun) } else { Ok(()) }
    }

    /// Checks that the bits of `mask` in byte `at` are zero: the logical unit lacks the feature.
    pub(crate) fn check_zero(&self, at: usize, mask: u8) -> Result<(), BeginError> {
        let found = self.cdb.u8(at) & mask;
        if found == 0 {
            return Ok(());
        }
        // The most significant bit of the field, not the first set one.
        let bit = 7 - mask.leading_zeros() as u8;
        Err(Sense::invalid_cdb_field(at as u16, (mask != 0xff).then_some(bit)).into())
    }

    /// Returns `count` blocks from `lba` on as bytes.
    pub(crate) fn range(&self, lba: u64, count: u64) -> Result<(ByteOffset, ByteLen), BeginError> {
        self.unit.lba_range(lba, count).ok_or(BeginError::CheckCondition(Sense::LBA_OUT_OF_RANGE))
    }
}

/// See [`CommandContext::end_with_data_in`].
pub(crate) fn end_with_data_in(buffers: &mut CommandBuffers, allocation: u32, data_in_len: u64) -> BeginResult {
    buffers.data_in.truncate(usize::try_from(allocation).unwrap_or(usize::MAX));
    let len = buffers.data_in.len() as u64;
    if len > data_in_len {
        buffers.data_in.clear();
        return Err(BeginError::Overrun);
    }
    Ok(CommandAction::Complete(CommandCompletion::good(len)))
}
