//! LOG SENSE: only the lists of supported pages. Source: SPC-4 sections 6.8 and 7.3.

use crate::context::{BeginResult, CommandContext};
use crate::sense::Sense;

/// Supported log pages; with this subpage, supported log pages and subpages.
const SUPPORTED: u8 = 0x00;
const ALL_SUBPAGES: u8 = 0xff;

pub(crate) fn log_sense(cmd: &mut CommandContext<'_>) -> BeginResult {
    // SP: parameters cannot be saved. PPC, obsolete.
    cmd.check_zero(1, 0x01)?;
    cmd.check_zero(1, 0x02)?;
    // Neither page has parameters, so PC is ignored and the parameter pointer must be 0.
    if cmd.cdb.u8(2) & 0x3f != SUPPORTED {
        return Err(Sense::invalid_cdb_field(2, Some(5)).into());
    }
    if cmd.cdb.u16(5) != 0 {
        return Err(Sense::invalid_cdb_field(5, None).into());
    }
    let page: &[u8] = match cmd.cdb.u8(3) {
        0 => &[SUPPORTED, 0, 0, 1, SUPPORTED],
        // SPF, since it has a subpage code.
        ALL_SUBPAGES => &[0x40 | SUPPORTED, ALL_SUBPAGES, 0, 4, SUPPORTED, 0, SUPPORTED, ALL_SUBPAGES],
        _ => return Err(Sense::invalid_cdb_field(3, None).into()),
    };
    cmd.buffers.data_in.extend(page);
    cmd.end_with_data_in(cmd.cdb.u16(7).into())
}
