//! REPORT LUNS. Source: SPC-4 section 6.33.

use crate::cdb::Cdb;
use crate::command::CommandBuffers;
use crate::context::{BeginError, BeginResult, CommandContext, end_with_data_in};
use crate::sense::Sense;

/// REPORT LUNS of a logical unit without a target: it is the only one, at LUN 0.
pub(crate) fn of_single_unit(cmd: &mut CommandContext<'_>) -> BeginResult {
    report_luns(&[0], &cmd.cdb, cmd.data_in_len, cmd.buffers)
}

pub(crate) fn report_luns(luns: &[u16], cdb: &Cdb, data_in_len: u64, buffers: &mut CommandBuffers) -> BeginResult {
    let allocation = cdb.u32(6);
    if allocation < 16 {
        return Err(Sense::invalid_cdb_field(6, None).into());
    }
    let listed = match cdb.u8(2) {
        // All but the well-known LUNs; all LUNs.
        0x00 | 0x02 => luns,
        // Well-known LUNs only.
        0x01 => &[],
        _ => return Err(BeginError::CheckCondition(Sense::invalid_cdb_field(2, None))),
    };
    let mut sorted = listed.to_vec();
    sorted.sort_unstable();
    buffers.data_in.extend((sorted.len() as u32 * 8).to_be_bytes());
    buffers.data_in.extend([0; 4]);
    for lun in sorted {
        // Peripheral device addressing covers 256 LUNs; the others use flat space addressing.
        let field = if lun < 0x100 { lun } else { 0x4000 | lun & 0x3fff };
        buffers.data_in.extend(field.to_be_bytes());
        buffers.data_in.extend([0; 6]);
    }
    end_with_data_in(buffers, allocation, data_in_len)
}
