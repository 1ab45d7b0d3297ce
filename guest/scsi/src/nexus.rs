//! One initiator's way to a unit, and where its commands begin.

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

/// One initiator's way to a unit.
#[derive(Debug)]
pub struct Nexus {
    unit: Arc<LogicalUnit>,
    attentions: Arc<Attentions>,
    party: Party,
    tasks: Mutex<Option<Arc<dyn TaskSet>>>,
}

/// The commands of one nexus that are in flight, in the hands of whoever drives them.
pub trait TaskSet: Send + Sync + fmt::Debug {
    /// Ends them all without executing them further: another nexus preempted this one and asked for that (PREEMPT AND ABORT).
    /// The ticket is resolved when the last has ended, and rings `done` then.
    fn abort(&self, done: Arc<dyn Wake>) -> Arc<Ticket>;
}

impl Nexus {
    pub(crate) fn new(unit: Arc<LogicalUnit>, attentions: Arc<Attentions>, party: Party) -> Nexus {
        Nexus { unit, attentions, party, tasks: Mutex::new(None) }
    }

    /// The unit it leads to.
    pub fn unit(&self) -> &Arc<LogicalUnit> {
        &self.unit
    }

    /// Initiator port and target port.
    pub fn name(&self) -> &NexusName {
        self.party.name()
    }

    /// Where the nexus's commands can be aborted. Without one none are: PREEMPT AND ABORT is then a PREEMPT.
    pub fn set_tasks(&self, tasks: Option<Arc<dyn TaskSet>>) {
        *self.tasks.lock().unwrap_or_else(PoisonError::into_inner) = tasks;
    }

    pub(crate) fn tasks(&self) -> Option<Arc<dyn TaskSet>> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The nexus was reset by a task management function: a RESERVE of it ends. Registrations and persistent reservations stay.
    pub fn lost(&self) {
        self.party.lost();
        self.attention(Attention::NexusLoss);
    }

    /// The initiator itself was reset: a guest that boots anew. A unit that no other initiator uses is as it was when it was made
    /// (a guest that stopped it must be able to boot from it); of a shared one only the nexus is lost.
    pub fn initiator_reset(&self) {
        if self.unit.is_used_beside(&self.name().initiator) { self.lost() } else { self.unit.reset() }
    }

    /// The initiator goes on where it was served before, and shall not notice: to it the unit was neither switched on nor reset. A
    /// command that it had under way then may have been carried out, which an attention in its answer would deny. `elsewhere`: it
    /// was served by another process, so that nothing that happened in this one is news to it.
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

    /// Queues a unit attention: the initiator hears of it before its next command is executed.
    pub fn attention(&self, attention: Attention) {
        self.attentions.raise(attention);
    }

    pub(crate) fn attentions(&self) -> &Attentions {
        &self.attentions
    }

    /// Begins a command: what its driver must do first. `work` may come from another command; what is in it is replaced.
    #[inline]
    pub fn begin<D: DataOut + ?Sized>(&self, command: &Command<'_>, data_out: &D, work: &mut Work) -> Step {
        work.reply.clear();
        work.ranges.clear();
        match self.transfer(command, data_out.len()) {
            Some(step) => step,
            None => self.begin_any(command, &data_out, work),
        }
    }

    /// READ and WRITE of 10 and 16 bytes when nothing stands in their way. All else, and every mistake, is left to the table.
    #[inline]
    fn transfer(&self, command: &Command<'_>, data_out: u64) -> Option<Step> {
        // A transport's CDB field has more bytes than these commands; a shorter one goes by the table.
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
    fn begin_any(&self, command: &Command<'_>, data_out: &dyn DataOut, work: &mut Work) -> Step {
        let cdb = Cdb::new(command.cdb);
        let row = match self.admit(&cdb) {
            Ok(row) => row,
            Err(refused) => return refused.into(),
        };
        let ask = &mut Ask { nexus: self, unit: &self.unit, cdb, data_in: command.data_in, data_out, work };
        let step = (row.begin)(ask).unwrap_or_else(Step::from);
        if !matches!(step, Step::End(Ending { status: Status::Good, .. })) {
            ask.work.reply.clear();
        }
        step
    }

    /// What is the same for all commands of a kind, in the order in which it is told.
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
