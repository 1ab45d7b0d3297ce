//! Readiness and pending conditions: TEST UNIT READY, REQUEST SENSE, START STOP UNIT, PREVENT ALLOW MEDIUM REMOVAL.

use crate::ask::{Ask, Begun};
use crate::reservation::Access;
use crate::sense::Sense;
use crate::unit::flag;

/// Source: SPC-4 section 6.47. The shared checks have established that the logical unit is ready.
pub(crate) fn test_unit_ready(cmd: &mut Ask<'_>) -> Begun {
    cmd.good()
}

/// REQUEST SENSE returns the pending unit attention, which this reports, or that the logical unit is stopped. Source:
/// SPC-4 section 6.39.
pub(crate) fn request_sense(cmd: &mut Ask<'_>) -> Begun {
    let stopped = cmd.unit.flags() & flag::STOPPED != 0;
    let otherwise = if stopped { Sense::STOPPED } else { Sense::NONE };
    let mut bytes = [0; Sense::MAX_LEN];
    let pending = cmd.nexus.attentions().peek();
    let len = pending.unwrap_or(otherwise).encode(cmd.cdb.has(1, 0x01), &mut bytes);
    cmd.work.reply.extend(&bytes[..len]);
    let begun = cmd.reply(cmd.cdb.u8(4).into())?;
    if let Some(sense) = pending {
        cmd.nexus.attentions().told(sense);
    }
    Ok(begun)
}

/// A stopped logical unit rejects commands that need its medium until it is started. There are no power conditions
/// and nothing to load or eject; every operation is short, so IMMED does not matter. Source: SBC-3 clause 5, "START
/// STOP UNIT".
pub(crate) fn start_stop(cmd: &mut Ask<'_>) -> Begun {
    let start = cmd.cdb.has(4, 0x01);
    // POWER CONDITION, LOEJ.
    let unchanged = cmd.cdb.u8(4) & 0xf0 == 0;
    cmd.permitted(if start && unchanged { Access::Always } else { Access::Write })?;
    cmd.zero(4, 0xf0)?;
    cmd.zero(4, 0x02)?;
    cmd.unit.set_flags(flag::STOPPED, !start);
    // Without NO_FLUSH a stop writes back what is cached.
    if start || cmd.cdb.has(4, 0x04) { cmd.good() } else { Ok(Ask::flush(0)) }
}

/// The medium cannot be removed, so there is nothing to prevent. Source: SBC-3 clause 5, "PREVENT ALLOW MEDIUM REMOVAL".
pub(crate) fn prevent_allow(cmd: &mut Ask<'_>) -> Begun {
    let prevent = cmd.cdb.u8(4) & 0x03;
    cmd.permitted(if prevent == 0 { Access::Always } else { Access::Write })?;
    // 10b and 11b are obsolete.
    cmd.zero(4, 0x02)?;
    cmd.good()
}
