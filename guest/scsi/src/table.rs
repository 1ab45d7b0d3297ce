//! The commands: one row each. A row says how long the command is, which of its bits are looked at, what a reservation of
//! another nexus means for it, what state of the medium it needs, and who executes it. Dispatch, reservations and REPORT
//! SUPPORTED OPERATION CODES all read the same rows.

use crate::ask::{Ask, Begun};
use crate::cdb::Cdb;
use crate::commands::{capacity, inquiry, power, transfer};
use crate::sense::Sense;
use crate::target;

/// NACA, in the CONTROL byte that ends every command. Source: SAM-5 section 5.2.
pub(crate) const NACA: u8 = 0x04;

/// What a command is to a reservation. Sources: SPC-4 table 65, SBC-3 table 13, SPC-2 section 5.5.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Allowed whoever holds what.
    Always,
    /// Does not touch the medium: allowed but where RESERVE reserved the whole unit.
    Information,
    /// Reads.
    Read,
    /// Writes, or changes what others see.
    Write,
    /// The command decides by its fields.
    Fields,
}

/// What a command needs of the medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Medium {
    /// Nothing.
    Untouched,
    /// A unit that was not stopped.
    Ready,
    /// And one that is not write protected.
    Written,
}

/// A command.
pub(crate) struct Row {
    /// SERVICE ACTION, where one tells commands of an operation code apart.
    pub(crate) action: Option<u16>,
    /// CDB usage data: the operation code, the service action in its place, and a one for every other bit that is looked at.
    /// As long as the command. Source: SPC-4 section 6.34.3.
    pub(crate) usage: &'static [u8],
    pub(crate) access: Access,
    pub(crate) medium: Medium,
    pub(crate) begin: fn(&mut Ask<'_>) -> Begun,
}

impl Row {
    pub(crate) const fn opcode(&self) -> u8 {
        self.usage[0]
    }
}

type Begin = fn(&mut Ask<'_>) -> Begun;

const fn row(usage: &'static [u8], access: Access, medium: Medium, begin: Begin) -> Row {
    Row { action: None, usage, access, medium, begin }
}

const fn action(action: u16, usage: &'static [u8], access: Access, medium: Medium, begin: Begin) -> Row {
    Row { action: Some(action), usage, access, medium, begin }
}

use Access::{Always, Fields, Information, Read, Write};
use Medium::{Ready, Untouched, Written};

/// All commands, by operation code and service action.
#[rustfmt::skip]
pub(crate) static ROWS: &[Row] = &[
    row(&[0x00, 0, 0, 0, 0, NACA], Information, Ready, power::test_unit_ready),
    row(&[0x08, 0x1f, 0xff, 0xff, 0xff, NACA], Read, Ready, transfer::read_6),
    row(&[0x0a, 0x1f, 0xff, 0xff, 0xff, NACA], Write, Written, transfer::write_6),
    row(&[0x12, 0x03, 0xff, 0xff, 0xff, NACA], Always, Untouched, inquiry::inquiry),
    row(&[0x25, 0, 0xff, 0xff, 0xff, 0xff, 0, 0, 0x01, NACA], Always, Ready, capacity::read_capacity_10),
    row(&[0x28, 0xf8, 0xff, 0xff, 0xff, 0xff, 0, 0xff, 0xff, NACA], Read, Ready, transfer::read_10),
    row(&[0x2a, 0xf8, 0xff, 0xff, 0xff, 0xff, 0, 0xff, 0xff, NACA], Write, Written, transfer::write_10),
    row(&[0x88, 0xf8, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, NACA], Read, Ready, transfer::read_16),
    row(&[0x8a, 0xf8, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, NACA], Write, Written, transfer::write_16),
    action(0x10, &[0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, NACA], Always, Ready, capacity::read_capacity_16),
    row(&[0xa0, 0, 0xff, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, NACA], Always, Untouched, target::report_only_this),
    row(&[0xa8, 0xf8, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, NACA], Read, Ready, transfer::read_12),
    row(&[0xaa, 0xf8, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, NACA], Write, Written, transfer::write_12),
];

/// Rows of one operation code: where they start in [`ROWS`], and how many. They stand together.
static INDEX: [(u8, u8); 256] = index();

const fn index() -> [(u8, u8); 256] {
    let mut index = [(0, 0); 256];
    let mut at = 0;
    while at < ROWS.len() {
        let opcode = ROWS[at].opcode() as usize;
        if index[opcode].1 == 0 {
            index[opcode].0 = at as u8;
        }
        index[opcode].1 += 1;
        at += 1;
    }
    index
}

/// The rows of an operation code: none, one without a service action, or several with one each.
pub(crate) fn rows(opcode: u8) -> &'static [Row] {
    let (start, count) = INDEX[usize::from(opcode)];
    &ROWS[usize::from(start)..][..usize::from(count)]
}

/// The row of a command.
pub(crate) fn find(cdb: &Cdb) -> Result<&'static Row, Sense> {
    match rows(cdb.opcode()) {
        [] => Err(Sense::INVALID_OPCODE),
        [row] if row.action.is_none() => Ok(row),
        rows => {
            let action = u16::from(cdb.u8(1) & 0x1f);
            rows.iter().find(|row| row.action == Some(action)).ok_or(Sense::in_command(1, Some(4)))
        }
    }
}
