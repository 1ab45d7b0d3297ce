//! Readiness and pending conditions: TEST UNIT READY, REQUEST SENSE, START STOP UNIT, PREVENT ALLOW MEDIUM REMOVAL.

use crate::context::{BeginResult, CommandContext};
use crate::logical_unit::flag;
use crate::reservation::AccessClass;
use crate::sense::Sense;

/// Source: SPC-4 section 6.47. The shared checks have established that the logical unit is ready.
pub(crate) fn test_unit_ready(cmd: &mut CommandContext<'_>) -> BeginResult {
    cmd.good()
}

/// REQUEST SENSE returns the pending unit attention, which it thereby reports, or that the logical unit is stopped.
/// Source: SPC-4 section 6.39.
pub(crate) fn request_sense(cmd: &mut CommandContext<'_>) -> BeginResult {
    let stopped = cmd.unit.flags() & flag::STOPPED != 0;
    let otherwise = if stopped { Sense::INITIALIZING_COMMAND_REQUIRED } else { Sense::NONE };
    let mut bytes = [0; Sense::MAX_LEN];
    let pending = cmd.nexus.attentions().peek();
    let len = pending.unwrap_or(otherwise).encode(cmd.cdb.has(1, 0x01), &mut bytes);
    cmd.buffers.data_in.extend(&bytes[..len]);
    let begun = cmd.end_with_data_in(cmd.cdb.u8(4).into())?;
    if let Some(sense) = pending {
        cmd.nexus.attentions().clear_reported(sense);
    }
    Ok(begun)
}

/// A stopped logical unit rejects commands that need its medium until it is started. There are no power conditions
/// and nothing to load or eject; every operation is short, so IMMED does not matter. Source: SBC-3 clause 5, "START
/// STOP UNIT".
pub(crate) fn start_stop(cmd: &mut CommandContext<'_>) -> BeginResult {
    let start = cmd.cdb.has(4, 0x01);
    // POWER CONDITION, LOEJ.
    let unchanged = cmd.cdb.u8(4) & 0xf0 == 0;
    cmd.check_access(if start && unchanged { AccessClass::Always } else { AccessClass::Write })?;
    cmd.check_zero(4, 0xf0)?;
    cmd.check_zero(4, 0x02)?;
    cmd.unit.set_flags(flag::STOPPED, !start);
    // Without NO_FLUSH a stop writes back the cache.
    if start || cmd.cdb.has(4, 0x04) { cmd.good() } else { Ok(CommandContext::flush(0)) }
}

/// The medium cannot be removed, so there is nothing to prevent. Source: SBC-3 clause 5, "PREVENT ALLOW MEDIUM
/// REMOVAL".
pub(crate) fn prevent_allow(cmd: &mut CommandContext<'_>) -> BeginResult {
    let prevent = cmd.cdb.u8(4) & 0x03;
    cmd.check_access(if prevent == 0 { AccessClass::Always } else { AccessClass::Write })?;
    // 10b and 11b are obsolete.
    cmd.check_zero(4, 0x02)?;
    cmd.good()
}
