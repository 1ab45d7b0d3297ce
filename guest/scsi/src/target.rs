//! What a target answers whatever LUN was addressed: REPORT LUNS, and commands to a LUN where no unit is.
//! Sources: SPC-4 sections 6.33 and 6.4.2, SAM-5 sections 4.7 and 5.13.

use crate::ask::{Ask, Begun, Refused, reply};
use crate::attention::Attention;
use crate::cdb::Cdb;
use crate::commands::inquiry;
use crate::nexus::Nexus;
use crate::sense::Sense;
use crate::step::{Command, DataOut, Step, Work};

const INQUIRY: u8 = 0x12;
const REQUEST_SENSE: u8 = 0x03;
const REPORT_LUNS: u8 = 0xa0;

/// Qualifier 011b, type 1Fh: no unit can be here.
const NOTHING: u8 = 0x7f;

/// Begins a command for a LUN of a target. `nexus` leads to the unit there, if there is one; `luns` are all the LUNs of the
/// target (below 16384), in any order.
#[inline]
pub fn begin<D: DataOut + ?Sized>(
    nexus: Option<&Nexus>,
    luns: &[u16],
    command: &Command<'_>,
    data_out: &D,
    work: &mut Work,
) -> Step {
    match nexus {
        Some(nexus) if command.cdb.first() != Some(&REPORT_LUNS) => nexus.begin(command, data_out, work),
        _ => without_unit(nexus, luns, command, work).unwrap_or_else(Step::from),
    }
}

/// For a command that needs no unit. Only REPORT LUNS gets here where there is one.
#[cold]
fn without_unit(nexus: Option<&Nexus>, luns: &[u16], command: &Command<'_>, work: &mut Work) -> Begun {
    work.reply.clear();
    work.ranges.clear();
    let cdb = Cdb::new(command.cdb);
    match cdb.opcode() {
        REPORT_LUNS => {
            let begun = report_luns(luns, &cdb, command.data_in, work)?;
            if let Some(nexus) = nexus {
                nexus.attentions().clear(Attention::ReportedLunsChanged);
            }
            Ok(begun)
        }
        INQUIRY => absent_inquiry(&cdb, command.data_in, work),
        REQUEST_SENSE => {
            let mut sense = [0; Sense::MAX_LEN];
            let len = Sense::NO_SUCH_UNIT.encode(cdb.has(1, 0x01), &mut sense);
            work.reply.extend(&sense[..len]);
            reply(work, cdb.u8(4).into(), command.data_in)
        }
        _ => Err(Sense::NO_SUCH_UNIT.into()),
    }
}

fn absent_inquiry(cdb: &Cdb, data_in: u64, work: &mut Work) -> Begun {
    if cdb.u8(2) != 0 {
        return Err(Sense::in_command(2, None).into());
    }
    if cdb.has(1, 0x01) {
        work.reply.extend([NOTHING, 0, 0, 1, 0]);
    } else {
        inquiry::standard(["MQBLK", "", ""], NOTHING, &mut work.reply);
    }
    reply(work, cdb.u16(3).into(), data_in)
}

/// REPORT LUNS of a unit that is driven without a target: it is alone, at LUN 0.
pub(crate) fn report_only_this(ask: &mut Ask<'_>) -> Begun {
    report_luns(&[0], &ask.cdb, ask.data_in, ask.work)
}

fn report_luns(luns: &[u16], cdb: &Cdb, data_in: u64, work: &mut Work) -> Begun {
    let allocation = cdb.u32(6);
    if allocation < 16 {
        return Err(Sense::in_command(6, None).into());
    }
    let listed = match cdb.u8(2) {
        // All but the well-known ones; all.
        0x00 | 0x02 => luns,
        // Only well-known ones.
        0x01 => &[],
        _ => return Err(Refused::Check(Sense::in_command(2, None))),
    };
    let mut sorted = listed.to_vec();
    sorted.sort_unstable();
    work.reply.extend((sorted.len() as u32 * 8).to_be_bytes());
    work.reply.extend([0; 4]);
    for lun in sorted {
        // Peripheral device addressing has room for 256, flat space addressing for the rest.
        let field = if lun < 0x100 { lun } else { 0x4000 | lun & 0x3fff };
        work.reply.extend(field.to_be_bytes());
        work.reply.extend([0; 6]);
    }
    reply(work, allocation, data_in)
}
