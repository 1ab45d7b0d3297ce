//! REPORT SUPPORTED OPERATION CODES and REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS. Source: SPC-4 sections 6.34 and 6.35.

use crate::ask::{Ask, Begun};
use crate::sense::Sense;
use crate::table::{self, Row};

/// A command timeouts descriptor that says nothing. Source: SPC-4 section 6.34.4.
const NO_TIMEOUTS: [u8; 12] = [0, 0x0a, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

pub(crate) fn operation_codes(ask: &mut Ask<'_>) -> Begun {
    let timeouts = ask.cdb.has(2, 0x80);
    let opcode = ask.cdb.u8(3);
    let action = ask.cdb.u16(4);
    let rows = table::rows(opcode);
    let by_action = rows.iter().any(|row| row.action.is_some());
    let found = match ask.cdb.u8(2) & 0x07 {
        0 => {
            all(ask, timeouts);
            return ask.reply(ask.cdb.u32(6));
        }
        // One operation code that has no service actions.
        1 if by_action => return Err(Sense::in_command(2, Some(2)).into()),
        1 => rows.first(),
        // One that has.
        2 if !by_action && !rows.is_empty() => return Err(Sense::in_command(4, None).into()),
        2 => rows.iter().find(|row| row.action == Some(action)),
        // Either; without service actions only with 0 for one.
        3 => rows.iter().find(|row| row.action.unwrap_or(0) == action),
        _ => return Err(Sense::in_command(2, Some(2)).into()),
    };
    let bounds = ask.unit.bounds();
    one(found.filter(|row| row.offered(bounds)), timeouts, &mut ask.work.reply);
    ask.reply(ask.cdb.u32(6))
}

fn all(ask: &mut Ask<'_>, timeouts: bool) {
    let reply = &mut ask.work.reply;
    reply.extend([0; 4]);
    for row in table::ROWS.iter().filter(|row| row.offered(ask.unit.bounds())) {
        let [high, low] = row.action.unwrap_or(0).to_be_bytes();
        // CTDP, SERVACTV.
        let flags = u8::from(timeouts) << 1 | u8::from(row.action.is_some());
        reply.extend([row.opcode(), 0, high, low, 0, flags, 0, row.usage.len() as u8]);
        if timeouts {
            reply.extend(NO_TIMEOUTS);
        }
    }
    let len = (reply.len() - 4) as u32;
    reply[..4].copy_from_slice(&len.to_be_bytes());
}

fn one(row: Option<&Row>, timeouts: bool, reply: &mut Vec<u8>) {
    // SUPPORT: 1 no, 3 as the standard says.
    let Some(row) = row else { return reply.extend([0, 1, 0, 0]) };
    reply.extend([0, u8::from(timeouts) << 7 | 3, 0, row.usage.len() as u8]);
    reply.extend(row.usage);
    if timeouts {
        reply.extend(NO_TIMEOUTS);
    }
}

pub(crate) fn task_management_functions(ask: &mut Ask<'_>) -> Begun {
    // ATS, ATSS, CTSS, LURS, QTS; QTSS, ITNRS.
    ask.work.reply.extend([0xdc, 0x03, 0, 0]);
    // REPD: no timeouts to tell.
    if ask.cdb.has(2, 0x80) {
        ask.work.reply[3] = 12;
        ask.work.reply.extend([0; 12]);
    }
    ask.reply(ask.cdb.u32(6))
}
