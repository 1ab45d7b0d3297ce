//! One initiator's way to a unit, and where its commands begin.

use std::sync::Arc;

use mqblk_core::Op;

use crate::ask::{Ask, Refused};
use crate::cdb::Cdb;
use crate::sense::Sense;
use crate::step::{Command, DataOut, Ending, Step, Work};
use crate::table::{self, Medium, Row};
use crate::unit::{LogicalUnit, flag};

/// One initiator's way to a unit.
#[derive(Debug)]
pub struct Nexus {
    unit: Arc<LogicalUnit>,
    name: Box<str>,
}

impl Nexus {
    pub(crate) fn new(unit: Arc<LogicalUnit>, name: &str) -> Nexus {
        Nexus { unit, name: name.into() }
    }

    /// The unit it leads to.
    pub fn unit(&self) -> &Arc<LogicalUnit> {
        &self.unit
    }

    /// The initiator's name.
    pub fn name(&self) -> &str {
        &self.name
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
        let (lba, count, write, control) = match *command.cdb {
            [opcode @ (0x28 | 0x2a), _, a, b, c, d, _, high, low, control, ..] => (
                u32::from_be_bytes([a, b, c, d]).into(),
                u16::from_be_bytes([high, low]).into(),
                opcode == 0x2a,
                control,
            ),
            [opcode @ (0x88 | 0x8a), _, a, b, c, d, e, f, g, h, i, j, k, l, _, control, ..] => (
                u64::from_be_bytes([a, b, c, d, e, f, g, h]),
                u32::from_be_bytes([i, j, k, l]),
                opcode == 0x8a,
                control,
            ),
            _ => return None,
        };
        let options = command.cdb[1];
        let flags = self.unit.flags();
        let barred = if write { flag::STOPPED | flag::READ_ONLY | flag::SOFTWARE_PROTECTED } else { flag::STOPPED };
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
        let found = table::find(&cdb);
        let mut ask = Ask { nexus: self, unit: &self.unit, cdb, data_in: command.data_in, data_out, work };
        let begun = found.map_err(Refused::Check).and_then(|row| {
            self.admit(row, &cdb)?;
            (row.begin)(&mut ask)
        });
        begun.unwrap_or_else(Step::from)
    }

    /// What is the same for all commands of a kind.
    fn admit(&self, row: &Row, cdb: &Cdb) -> Result<(), Refused> {
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
        Ok(())
    }
}

impl From<Refused> for Step {
    fn from(refused: Refused) -> Step {
        match refused {
            Refused::Check(sense) => Step::End(Ending::check(sense)),
            Refused::Overrun => Step::Overrun,
        }
    }
}
