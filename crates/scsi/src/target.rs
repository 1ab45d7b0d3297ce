//! Commands that a target handles for any LUN: REPORT LUNS, and commands to a LUN without a logical unit. Sources:
//! SPC-4 sections 6.33 and 6.4.2, SAM-5 sections 4.7 and 5.13.

use crate::action::CommandAction;
use crate::cdb::Cdb;
use crate::command::{Command, CommandBuffers, DataOut};
use crate::commands::{inquiry, report_luns};
use crate::context::{BeginResult, end_with_data_in};
use crate::logical_unit::Nexus;
use crate::sense::Sense;
use crate::unit_attention::UnitAttention;

const INQUIRY: u8 = 0x12;
const REQUEST_SENSE: u8 = 0x03;
const REPORT_LUNS: u8 = 0xa0;

/// PERIPHERAL QUALIFIER 011b, device type 1Fh: no logical unit can be here.
const NO_DEVICE: u8 = 0x7f;

/// Begins a command for a LUN of a target. `nexus` is the one of the logical unit at the LUN, if there is one; `luns`
/// are all LUNs of the target (below 16384), in any order.
#[inline]
pub fn begin<D: DataOut + ?Sized>(
    nexus: Option<&Nexus>,
    luns: &[u16],
    command: &Command<'_>,
    data_out: &D,
    buffers: &mut CommandBuffers,
) -> CommandAction {
    match nexus {
        Some(nexus) if command.cdb.first() != Some(&REPORT_LUNS) => nexus.begin(command, data_out, buffers),
        _ => begin_without_unit(nexus, luns, command, buffers).unwrap_or_else(CommandAction::from),
    }
}

/// Begins a command that needs no logical unit. If the LUN has one, only for REPORT LUNS.
fn begin_without_unit(
    nexus: Option<&Nexus>,
    luns: &[u16],
    command: &Command<'_>,
    buffers: &mut CommandBuffers,
) -> BeginResult {
    buffers.data_in.clear();
    buffers.ranges.clear();
    let cdb = Cdb::new(command.cdb);
    match cdb.opcode() {
        REPORT_LUNS => {
            let begun = report_luns::report_luns(luns, &cdb, command.data_in_len, buffers)?;
            if let Some(nexus) = nexus {
                nexus.attentions().clear(UnitAttention::ReportedLunsChanged);
            }
            Ok(begun)
        }
        INQUIRY => inquiry_without_unit(&cdb, command.data_in_len, buffers),
        REQUEST_SENSE => {
            let mut sense = [0; Sense::MAX_LEN];
            let len = Sense::LOGICAL_UNIT_NOT_SUPPORTED.encode(cdb.has(1, 0x01), &mut sense);
            buffers.data_in.extend(&sense[..len]);
            end_with_data_in(buffers, cdb.u8(4).into(), command.data_in_len)
        }
        _ => Err(Sense::LOGICAL_UNIT_NOT_SUPPORTED.into()),
    }
}

fn inquiry_without_unit(cdb: &Cdb, data_in_len: u64, buffers: &mut CommandBuffers) -> BeginResult {
    if cdb.u8(2) != 0 {
        return Err(Sense::invalid_cdb_field(2, None).into());
    }
    if cdb.has(1, 0x01) {
        buffers.data_in.extend([NO_DEVICE, 0, 0, 1, 0]);
    } else {
        inquiry::standard(["MQBLK", "", ""], NO_DEVICE, &mut buffers.data_in);
    }
    end_with_data_in(buffers, cdb.u16(3).into(), data_in_len)
}
