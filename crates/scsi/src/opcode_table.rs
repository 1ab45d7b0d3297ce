//! The supported commands, one row each. A row has the length of the command, its evaluated bits, its class under a
//! reservation of another nexus, the required state of the medium, and its handler. Dispatch, reservations and REPORT
//! SUPPORTED OPERATION CODES read the same rows.

use crate::block_limits::BlockLimits;
use crate::cdb::Cdb;
use crate::commands::{
    capacity, inquiry, log, mode, mode_select, power, report, report_luns, reserve, transfer, unmap, verify,
};
use crate::context::{BeginResult, CommandContext};
use crate::opcode::{Handler, MediumState, NACA, OpcodeRow};
use crate::reservation::AccessClass;
use crate::sense::Sense;

const fn row(usage: &'static [u8], access: AccessClass, medium: MediumState, begin: Handler) -> OpcodeRow {
    OpcodeRow { service_action: None, cdb_usage: usage, access, medium, handler: begin }
}

/// A command whose service action is in the usage data, in the lower five bits of byte 1.
const fn action(usage: &'static [u8], access: AccessClass, medium: MediumState, begin: Handler) -> OpcodeRow {
    OpcodeRow { service_action: Some(usage[1] as u16 & ACTION), cdb_usage: usage, access, medium, handler: begin }
}

/// SERVICE ACTION in byte 1.
const ACTION: u16 = 0x1f;

/// Usage data of an LBA and a length in 10, 12 or 16 bytes; `$flags` are the bits of byte 1.
macro_rules! extent {
    (10, $opcode:literal, $flags:literal) => {
        &[$opcode, $flags, 0xff, 0xff, 0xff, 0xff, 0, 0xff, 0xff, NACA]
    };
    (12, $opcode:literal, $flags:literal) => {
        &[$opcode, $flags, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, NACA]
    };
    (16, $opcode:literal, $flags:literal) => {
        &[$opcode, $flags, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, NACA]
    };
}

/// Usage data of a 10-byte CDB with a 2-byte length at its end; `$one` to `$three` are the bits of bytes 1 to 3.
macro_rules! allocation {
    ($opcode:literal, $one:literal, $two:literal, $three:literal) => {
        &[$opcode, $one, $two, $three, 0, 0, 0, 0xff, 0xff, NACA]
    };
}

/// Usage data of PERSISTENT RESERVE OUT: a parameter list length, and SCOPE and TYPE if the service action evaluates
/// them.
macro_rules! persistent_out {
    ($action:literal, $kind:literal) => {
        &[0x5f, $action, $kind, 0, 0, 0xff, 0xff, 0xff, 0xff, NACA]
    };
}

use AccessClass::{Always, Read, Status, Write};
use MediumState::{Any, Ready, Writable};

/// All commands, by operation code and service action. Commands that are [`Always`] allowed although reservations
/// affect them (RESERVE, PERSISTENT RESERVE OUT, START STOP UNIT, ...) check reservations in their handlers.
#[rustfmt::skip]
pub(crate) static OPCODE_TABLE: &[OpcodeRow] = &[
    row(&[0x00, 0, 0, 0, 0, NACA], Status, Ready, power::test_unit_ready),
    row(&[0x03, 0x01, 0, 0, 0xff, NACA], Always, Any, power::request_sense),
    row(&[0x08, 0x1f, 0xff, 0xff, 0xff, NACA], Read, Ready, transfer::read_6),
    row(&[0x0a, 0x1f, 0xff, 0xff, 0xff, NACA], Write, Writable, transfer::write_6),
    row(&[0x12, 0x03, 0xff, 0xff, 0xff, NACA], Always, Any, inquiry::inquiry),
    row(&[0x15, 0x11, 0, 0, 0xff, NACA], Write, Any, mode_select::select_6),
    row(&[0x16, 0x11, 0, 0, 0, NACA], Always, Any, reserve::reserve_or_release),
    row(&[0x17, 0x11, 0, 0, 0, NACA], Always, Any, reserve::reserve_or_release),
    row(&[0x1a, 0x08, 0xff, 0xff, 0xff, NACA], Read, Any, mode::sense_6),
    row(&[0x1b, 0x01, 0, 0, 0xf7, NACA], Always, Any, power::start_stop),
    row(&[0x1e, 0, 0, 0, 0x03, NACA], Always, Any, power::prevent_allow),
    row(&[0x25, 0, 0xff, 0xff, 0xff, 0xff, 0, 0, 0x01, NACA], Always, Any, capacity::read_capacity_10),
    row(extent!(10, 0x28, 0xf8), Read, Ready, transfer::read_10),
    row(extent!(10, 0x2a, 0xf8), Write, Writable, transfer::write_10),
    row(extent!(10, 0x2e, 0xf6), Write, Writable, verify::write_and_verify_10),
    row(extent!(10, 0x2f, 0xf6), Read, Ready, verify::verify_10),
    row(extent!(10, 0x35, 0x02), Write, Ready, transfer::synchronize_10),
    row(allocation!(0x37, 0, 0x1f, 0), Read, Any, capacity::read_defect_data_10),
    row(extent!(10, 0x41, 0xff), Write, Writable, unmap::write_same_10),
    row(allocation!(0x42, 0x01, 0, 0), Write, Writable, unmap::unmap),
    row(&[0x4d, 0x03, 0xff, 0xff, 0, 0xff, 0xff, 0xff, 0xff, NACA], Always, Any, log::log_sense),
    row(allocation!(0x55, 0x11, 0, 0), Write, Any, mode_select::select_10),
    row(&[0x56, 0x13, 0, 0, 0, 0, 0, 0, 0, NACA], Always, Any, reserve::reserve_or_release),
    row(&[0x57, 0x13, 0, 0, 0, 0, 0, 0, 0, NACA], Always, Any, reserve::reserve_or_release),
    row(allocation!(0x5a, 0x18, 0xff, 0xff), Read, Any, mode::sense_10),
    action(allocation!(0x5e, 0x00, 0, 0), Always, Any, reserve::persistent_in),
    action(allocation!(0x5e, 0x01, 0, 0), Always, Any, reserve::persistent_in),
    action(allocation!(0x5e, 0x02, 0, 0), Always, Any, reserve::persistent_in),
    action(allocation!(0x5e, 0x03, 0, 0), Always, Any, reserve::persistent_in),
    action(persistent_out!(0x00, 0x00), Always, Any, reserve::persistent_out),
    action(persistent_out!(0x01, 0xff), Always, Any, reserve::persistent_out),
    action(persistent_out!(0x02, 0xff), Always, Any, reserve::persistent_out),
    action(persistent_out!(0x03, 0x00), Always, Any, reserve::persistent_out),
    action(persistent_out!(0x04, 0xff), Always, Any, reserve::persistent_out),
    action(persistent_out!(0x05, 0xff), Always, Any, reserve::persistent_out),
    action(persistent_out!(0x06, 0x00), Always, Any, reserve::persistent_out),
    action(persistent_out!(0x07, 0x00), Always, Any, reserve::persistent_out),
    row(extent!(16, 0x88, 0xf8), Read, Ready, transfer::read_16),
    row(&[0x89, 0xf8, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0xff, 0, NACA], Write, Writable, verify::compare_and_write),
    row(extent!(16, 0x8a, 0xf8), Write, Writable, transfer::write_16),
    row(extent!(16, 0x8b, 0xf8), Write, Writable, verify::orwrite),
    row(extent!(16, 0x8e, 0xf6), Write, Writable, verify::write_and_verify_16),
    row(extent!(16, 0x8f, 0xf6), Read, Ready, verify::verify_16),
    row(extent!(16, 0x91, 0x02), Write, Ready, transfer::synchronize_16),
    row(extent!(16, 0x93, 0xff), Write, Writable, unmap::write_same_16),
    action(&[0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, NACA], Always, Any, capacity::read_capacity_16),
    action(extent!(16, 0x9e, 0x12), Read, Ready, capacity::get_lba_status),
    row(&[0xa0, 0, 0xff, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, NACA], Always, Any, report_luns::of_single_unit),
    action(&[0xa3, 0x0c, 0x87, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, NACA], Read, Any, operation_codes),
    action(&[0xa3, 0x0d, 0x80, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, NACA], Read, Any, report::task_management_functions),
    row(extent!(12, 0xa8, 0xf8), Read, Ready, transfer::read_12),
    row(extent!(12, 0xaa, 0xf8), Write, Writable, transfer::write_12),
    row(extent!(12, 0xae, 0xf6), Write, Writable, verify::write_and_verify_12),
    row(extent!(12, 0xaf, 0xf6), Read, Ready, verify::verify_12),
    row(&[0xb7, 0x1f, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, NACA], Read, Any, capacity::read_defect_data_12),
];

fn operation_codes(cmd: &mut CommandContext<'_>) -> BeginResult {
    report::operation_codes(cmd, opcode_rows(cmd.cdb.u8(3)), OPCODE_TABLE)
}

/// For each operation code the index of its first row in [`OPCODE_TABLE`] and the number of its rows, which are
/// adjacent.
static INDEX: [(u8, u8); 256] = index();

const fn index() -> [(u8, u8); 256] {
    let mut index = [(0, 0); 256];
    let mut at = 0;
    while at < OPCODE_TABLE.len() {
        let opcode = OPCODE_TABLE[at].opcode() as usize;
        if index[opcode].1 == 0 {
            index[opcode].0 = at as u8;
        }
        index[opcode].1 += 1;
        at += 1;
    }
    index
}

/// Returns the rows of an operation code: none, one without a service action, or one for each service action.
pub(crate) fn opcode_rows(opcode: u8) -> &'static [OpcodeRow] {
    let (start, count) = INDEX[usize::from(opcode)];
    &OPCODE_TABLE[usize::from(start)..][..usize::from(count)]
}

/// Returns the row of a command.
pub(crate) fn find_row(cdb: &Cdb, limits: &BlockLimits) -> Result<&'static OpcodeRow, Sense> {
    match opcode_rows(cdb.opcode()) {
        [] => Err(Sense::INVALID_OPCODE),
        [row] if row.service_action.is_none() => {
            if row.is_supported(limits) {
                Ok(row)
            } else {
                Err(Sense::INVALID_OPCODE)
            }
        }
        rows => {
            let service_action = u16::from(cdb.u8(1)) & ACTION;
            rows.iter()
                .find(|row| row.service_action == Some(service_action))
                .ok_or(Sense::invalid_cdb_field(1, Some(4)))
        }
    }
}
