//! I_T_L nexus: the path from an initiator port to a logical unit, where its commands begin.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use mqblk_core::{Op, Wake};

use crate::ask::{Ask, Refused};
use crate::attention::{Attention, Attentions};
use crate::cdb::Cdb;
use crate::reservation::{Access, NexusName, Party, Ticket};
use crate::sense::{Sense, Status};
use crate::step::{Command, DataOut, Ending, Step, Work};
use crate::table::{self, Medium, Row};
use crate::unit::{LogicalUnit, flag};

/// I_T_L nexus: one initiator port's path through a target port to a logical unit.
#[derive(Debug)]
pub struct Nexus {
    unit: Arc<LogicalUnit>,
    attentions: Arc<Attentions>,
    party: Party,
    tasks: Mutex<Option<Arc<dyn TaskSet>>>,
}

/// Commands of one nexus that are in flight.
pub trait TaskSet: Send + Sync + fmt::Debug {
    /// Aborts them all, for PREEMPT AND ABORT by another nexus. The ticket is resolved when the last has ended, and
    /// then wakes `done`.
    fn abort(&self, done: Arc<dyn Wake>) -> Arc<Ticket>;
}

impl Nexus {
    pub(crate) fn new(unit: Arc<LogicalUnit>, attentions: Arc<Attentions>, party: Party) -> Nexus {
        Nexus { unit, attentions, party, tasks: Mutex::new(None) }
    }

    /// Returns its logical unit.
    pub fn unit(&self) -> &Arc<LogicalUnit> {
        &self.unit
    }

    /// Returns the names of the initiator port and the target port.
    pub fn name(&self) -> &NexusName {
        self.party.name()
    }

    /// Sets where the nexus's commands are aborted. Without a task set PREEMPT AND ABORT works like PREEMPT.
    pub fn set_tasks(&self, tasks: Option<Arc<dyn TaskSet>>) {
        *self.tasks.lock().unwrap_or_else(PoisonError::into_inner) = tasks;
    }

    pub(crate) fn tasks(&self) -> Option<Arc<dyn TaskSet>> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Handles I_T NEXUS RESET: ends a RESERVE of the nexus and raises I_T NEXUS LOSS. Registrations and persistent
    /// reservations stay.
    pub fn lost(&self) {
        self.party.lost();
        self.attention(Attention::NexusLoss);
    }

    /// Handles a reset of the initiator, such as a guest reboot. A logical unit that no other initiator uses is reset
    /// (a guest that stopped it must be able to boot from it); of a shared one only the nexus is lost.
    pub fn initiator_reset(&self) {
        if self.unit.is_used_beside(&self.name().initiator) { self.lost() } else { self.unit.reset() }
    }

    /// Lets an initiator continue that was served before, without noticing: the logical unit was neither switched on
    /// nor reset. A command that it had in flight may have been executed; a unit attention as its status would deny
    /// that. `elsewhere`: another process served it, so no unit attention of this process is news to it.
    pub fn resumed(&self, elsewhere: bool) {
        if elsewhere { self.attentions.clear_all() } else { self.attentions.clear_resets() }
    }

    pub(crate) fn party(&self) -> &Party {
        &self.party
    }

    #[inline]
    pub(crate) fn allows(&self, access: Access) -> bool {
        self.party.allows(access)
    }

    /// Raises a unit attention, which the initiator gets before its next command is executed.
    pub fn attention(&self, attention: Attention) {
        self.attentions.raise(attention);
    }

    pub(crate) fn attentions(&self) -> &Attentions {
        &self.attentions
    }

    /// Begins a command. Returns what the caller must do first. `buffers` may be those of another command; their
    /// contents are replaced.
    #[inline]
    pub fn begin<D: DataOut + ?Sized>(&self, command: &Command<'_>, data_out: &D, buffers: &mut Work) -> Step {
        buffers.reply.clear();
        buffers.ranges.clear();
        match self.transfer(command, data_out.len()) {
            Some(step) => step,
            None => self.begin_any(command, &data_out, buffers),
        }
    }

    /// Fast path for READ and WRITE of 10 and 16 bytes. Returns `None` for all other commands and for every error,
    /// which the opcode table handles.
    #[inline]
    fn transfer(&self, command: &Command<'_>, data_out: u64) -> Option<Step> {
        // A transport's CDB field is longer than these commands; a shorter one goes through the table.
        let cdb = Cdb::whole(command.cdb)?;
        let (lba, count, write, control) = match cdb.opcode() {
            opcode @ (0x28 | 0x2a) => (cdb.u32(2).into(), cdb.u16(7).into(), opcode == 0x2a, cdb.u8(9)),
            opcode @ (0x88 | 0x8a) => (cdb.u64(2), cdb.u32(10), opcode == 0x8a, cdb.u8(15)),
            _ => return None,
        };
        let options = cdb.u8(1);
        let flags = self.unit.flags();
        let barred = if write { flag::STOPPED | flag::READ_ONLY | flag::SOFTWARE_PROTECTED } else { flag::STOPPED };
        let access = if write { Access::Write } else { Access::Read };
        if self.attentions.any() || !self.allows(access) {
            return None;
        }
        if flags & barred != 0 || options & 0xe0 != 0 || control & table::NACA != 0 {
            return None;
        }
        if count == 0 || count > self.unit.bounds().transfer {
            return None;
        }
        let (start, len) = self.unit.range(lba, count.into())?;
        if len.0 > if write { data_out } else { command.data_in } {
            return None;
        }
        let fua = options & 0x08 != 0 || flags & flag::WRITE_THROUGH != 0;
        let op = if write { Op::Write { fua } } else { Op::Read };
        Some(Step::Disk { op, start, len, transferred: len.0 })
    }

    #[cold]
    fn begin_any(&self, command: &Command<'_>, data_out: &dyn DataOut, buffers: &mut Work) -> Step {
        let cdb = Cdb::new(command.cdb);
        let row = match self.admit(&cdb) {
            Ok(row) => row,
            Err(refused) => return refused.into(),
        };
        let cmd = &mut Ask { nexus: self, unit: &self.unit, cdb, data_in: command.data_in, data_out, work: buffers };
        let step = (row.begin)(cmd).unwrap_or_else(Step::from);
        if !matches!(step, Step::End(Ending { status: Status::Good, .. })) {
            cmd.work.reply.clear();
        }
        step
    }

    /// Runs the checks that all commands share, in the order in which they are reported.
    fn admit(&self, cdb: &Cdb) -> Result<&'static Row, Refused> {
        if self.attentions.any()
            && !table::BEFORE_ATTENTIONS.contains(&cdb.opcode())
            && let Some(sense) = self.attentions.take()
        {
            return Err(sense.into());
        }
        let row = table::find(cdb, self.unit.bounds())?;
        if !self.allows(row.access) {
            return Err(Refused::Conflict);
        }
        let control = row.usage.len() - 1;
        if cdb.has(control, table::NACA) {
            return Err(Sense::in_command(control as u16, Some(2)).into());
        }
        let flags = self.unit.flags();
        if row.medium != Medium::Untouched && flags & flag::STOPPED != 0 {
            return Err(Sense::STOPPED.into());
        }
        if row.medium == Medium::Written {
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

impl From<Refused> for Step {
    fn from(refused: Refused) -> Step {
        match refused {
            Refused::Check(sense) => Step::End(Ending::check(sense)),
            Refused::Overrun => Step::Overrun,
            Refused::Conflict => Step::End(Ending::CONFLICT),
        }
    }
}
