//! Begins a command of a nexus.

use crate::action::CommandAction;
use crate::cdb::Cdb;
use crate::command::{Command, CommandBuffers, CommandCompletion, DataOut};
use crate::context::{BeginError, CommandContext};
use crate::logical_unit::{Nexus, flag};
use crate::opcode::{self, MediumState, OpcodeRow};
use crate::opcode_table;
use crate::sense::{Sense, Status};
use crate::transfer::Transfer;

impl Nexus {
    /// Begins a command. Returns the caller's first action. `buffers` may be those of another command; their contents
    /// are replaced.
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
            unit: self.unit(),
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
        if self.attentions().has_pending()
            && !opcode::ALLOWED_BEFORE_ATTENTIONS.contains(&cdb.opcode())
            && let Some(sense) = self.attentions().take()
        {
            return Err(sense.into());
        }
        let row = opcode_table::find_row(cdb, self.unit().block_limits())?;
        if !self.allows(row.access) {
            return Err(BeginError::Conflict);
        }
        let control = row.cdb_usage.len() - 1;
        if cdb.has(control, opcode::NACA) {
            return Err(Sense::invalid_cdb_field(control as u16, Some(2)).into());
        }
        let flags = self.unit().flags();
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
