//! Commands that a target handles whatever its LUN: REPORT LUNS, and commands to a LUN without a logical unit.
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

/// PERIPHERAL QUALIFIER 011b, device type 1Fh: no logical unit can be here.
const NOTHING: u8 = 0x7f;

/// Begins a command for a LUN of a target. `nexus` is that of the logical unit at the LUN, if there is one; `luns`
/// are all LUNs of the target (below 16384), in any order.
#[inline]
pub fn begin<D: DataOut + ?Sized>(
    nexus: Option<&Nexus>,
    luns: &[u16],
    command: &Command<'_>,
    data_out: &D,
    buffers: &mut Work,
) -> Step {
    match nexus {
        Some(nexus) if command.cdb.first() != Some(&REPORT_LUNS) => nexus.begin(command, data_out, buffers),
        _ => without_unit(nexus, luns, command, buffers).unwrap_or_else(Step::from),
    }
}

/// Begins a command that needs no logical unit. If the LUN has one, only REPORT LUNS gets here.
#[cold]
fn without_unit(nexus: Option<&Nexus>, luns: &[u16], command: &Command<'_>, buffers: &mut Work) -> Begun {
    buffers.reply.clear();
    buffers.ranges.clear();
    let cdb = Cdb::new(command.cdb);
    match cdb.opcode() {
        REPORT_LUNS => {
            let begun = report_luns(luns, &cdb, command.data_in, buffers)?;
            if let Some(nexus) = nexus {
                nexus.attentions().clear(Attention::ReportedLunsChanged);
            }
            Ok(begun)
        }
        INQUIRY => absent_inquiry(&cdb, command.data_in, buffers),
        REQUEST_SENSE => {
            let mut sense = [0; Sense::MAX_LEN];
            let len = Sense::NO_SUCH_UNIT.encode(cdb.has(1, 0x01), &mut sense);
            buffers.reply.extend(&sense[..len]);
            reply(buffers, cdb.u8(4).into(), command.data_in)
        }
        _ => Err(Sense::NO_SUCH_UNIT.into()),
    }
}

fn absent_inquiry(cdb: &Cdb, data_in_len: u64, buffers: &mut Work) -> Begun {
    if cdb.u8(2) != 0 {
        return Err(Sense::in_command(2, None).into());
    }
    if cdb.has(1, 0x01) {
        buffers.reply.extend([NOTHING, 0, 0, 1, 0]);
    } else {
        inquiry::standard(["MQBLK", "", ""], NOTHING, &mut buffers.reply);
    }
    reply(buffers, cdb.u16(3).into(), data_in_len)
}

/// REPORT LUNS of a logical unit without a target: it is the only one, at LUN 0.
pub(crate) fn report_only_this(cmd: &mut Ask<'_>) -> Begun {
    report_luns(&[0], &cmd.cdb, cmd.data_in, cmd.work)
}

fn report_luns(luns: &[u16], cdb: &Cdb, data_in_len: u64, buffers: &mut Work) -> Begun {
    let allocation = cdb.u32(6);
    if allocation < 16 {
        return Err(Sense::in_command(6, None).into());
    }
    let listed = match cdb.u8(2) {
        // All but the well-known LUNs; all LUNs.
        0x00 | 0x02 => luns,
        // Well-known LUNs only.
        0x01 => &[],
        _ => return Err(Refused::Check(Sense::in_command(2, None))),
    };
    let mut sorted = listed.to_vec();
    sorted.sort_unstable();
    buffers.reply.extend((sorted.len() as u32 * 8).to_be_bytes());
    buffers.reply.extend([0; 4]);
    for lun in sorted {
        // Peripheral device addressing covers 256 LUNs; the others use flat space addressing.
        let field = if lun < 0x100 { lun } else { 0x4000 | lun & 0x3fff };
        buffers.reply.extend(field.to_be_bytes());
        buffers.reply.extend([0; 6]);
    }
    reply(buffers, allocation, data_in_len)
}
