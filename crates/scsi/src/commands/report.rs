//! REPORT SUPPORTED OPERATION CODES and REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS. Source: SPC-4 sections 6.34 and
//! 6.35.

use crate::context::{BeginResult, CommandContext};
use crate::opcode::OpcodeRow;
use crate::sense::Sense;

/// A command timeouts descriptor without values. Source: SPC-4 section 6.34.4.
const NO_TIMEOUTS: [u8; 12] = [0, 0x0a, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// `rows` are those of the command's operation code, `table` has all.
pub(crate) fn operation_codes(
    cmd: &mut CommandContext<'_>,
    rows: &'static [OpcodeRow],
    table: &'static [OpcodeRow],
) -> BeginResult {
    let timeouts = cmd.cdb.has(2, 0x80);
    let action = cmd.cdb.u16(4);
    let by_action = rows.iter().any(|row| row.service_action.is_some());
    let found = match cmd.cdb.u8(2) & 0x07 {
        0 => {
            all(cmd, table, timeouts);
            return cmd.end_with_data_in(cmd.cdb.u32(6));
        }
        // One operation code without service actions.
        1 if by_action => return Err(Sense::invalid_cdb_field(2, Some(2)).into()),
        1 => rows.first(),
        // One operation code and service action.
        2 if !by_action && !rows.is_empty() => return Err(Sense::invalid_cdb_field(4, None).into()),
        2 => rows.iter().find(|row| row.service_action == Some(action)),
        // Either; an operation code without service actions only with service action 0.
        3 => rows.iter().find(|row| row.service_action.unwrap_or(0) == action),
        _ => return Err(Sense::invalid_cdb_field(2, Some(2)).into()),
    };
    let limits = cmd.unit.block_limits();
    one(found.filter(|row| row.is_supported(limits)), timeouts, &mut cmd.buffers.data_in);
    cmd.end_with_data_in(cmd.cdb.u32(6))
}

fn all(cmd: &mut CommandContext<'_>, table: &[OpcodeRow], timeouts: bool) {
    let data_in = &mut cmd.buffers.data_in;
    data_in.extend([0; 4]);
    for row in table.iter().filter(|row| row.is_supported(cmd.unit.block_limits())) {
        let [high, low] = row.service_action.unwrap_or(0).to_be_bytes();
        // CTDP, SERVACTV.
        let flags = u8::from(timeouts) << 1 | u8::from(row.service_action.is_some());
        data_in.extend([row.opcode(), 0, high, low, 0, flags, 0, row.cdb_usage.len() as u8]);
        if timeouts {
            data_in.extend(NO_TIMEOUTS);
        }
    }
    let len = (data_in.len() - 4) as u32;
    data_in[..4].copy_from_slice(&len.to_be_bytes());
}

fn one(row: Option<&OpcodeRow>, timeouts: bool, data_in: &mut Vec<u8>) {
    // SUPPORT: 1 not supported, 3 supported in conformance with the standard.
    let Some(row) = row else { return data_in.extend([0, 1, 0, 0]) };
    data_in.extend([0, u8::from(timeouts) << 7 | 3, 0, row.cdb_usage.len() as u8]);
    data_in.extend(row.cdb_usage);
    if timeouts {
        data_in.extend(NO_TIMEOUTS);
    }
}

pub(crate) fn task_management_functions(cmd: &mut CommandContext<'_>) -> BeginResult {
    // ATS, ATSS, CTSS, LURS, QTS; QTSS, ITNRS.
    cmd.buffers.data_in.extend([0xdc, 0x03, 0, 0]);
    // REPD: no timeouts are reported.
    if cmd.cdb.has(2, 0x80) {
        cmd.buffers.data_in[3] = 12;
        cmd.buffers.data_in.extend([0; 12]);
    }
    cmd.end_with_data_in(cmd.cdb.u32(6))
}
