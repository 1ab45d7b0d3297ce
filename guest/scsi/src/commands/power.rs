//! Whether the unit is there and what it would say: TEST UNIT READY, REQUEST SENSE, START STOP UNIT, PREVENT ALLOW MEDIUM
//! REMOVAL.

use crate::ask::{Ask, Begun};
use crate::reservation::Access;
use crate::sense::Sense;
use crate::unit::flag;

/// Source: SPC-4 section 6.47. It was asked already whether the unit is ready.
pub(crate) fn test_unit_ready(ask: &mut Ask<'_>) -> Begun {
    ask.good()
}

/// What a command would be told now: a unit attention, which is told by this, or that the unit is stopped.
/// Source: SPC-4 section 6.39.
pub(crate) fn request_sense(ask: &mut Ask<'_>) -> Begun {
    let stopped = ask.unit.flags() & flag::STOPPED != 0;
    let otherwise = if stopped { Sense::STOPPED } else { Sense::NONE };
    let mut bytes = [0; Sense::MAX_LEN];
    let pending = ask.nexus.attentions().peek();
    let len = pending.unwrap_or(otherwise).encode(ask.cdb.has(1, 0x01), &mut bytes);
    ask.work.reply.extend(&bytes[..len]);
    let begun = ask.reply(ask.cdb.u8(4).into())?;
    if let Some(told) = pending {
        ask.nexus.attentions().told(told);
    }
    Ok(begun)
}

/// A stopped unit refuses commands that need its medium until it is started. There are no power conditions and nothing to
/// load or eject; nothing takes long enough for IMMED to matter. Source: SBC-3 clause 5, "START STOP UNIT".
pub(crate) fn start_stop(ask: &mut Ask<'_>) -> Begun {
    let start = ask.cdb.has(4, 0x01);
    // POWER CONDITION, LOEJ.
    let kept = ask.cdb.u8(4) & 0xf0 == 0;
    ask.permitted(if start && kept { Access::Always } else { Access::Write })?;
    ask.zero(4, 0xf0)?;
    ask.zero(4, 0x02)?;
    ask.unit.set_flags(flag::STOPPED, !start);
    // Without NO_FLUSH a stop writes back what is cached.
    if start || ask.cdb.has(4, 0x04) { ask.good() } else { Ok(Ask::flush(0)) }
}

/// The medium cannot be removed, so there is nothing to prevent. Source: SBC-3 clause 5, "PREVENT ALLOW MEDIUM REMOVAL".
pub(crate) fn prevent_allow(ask: &mut Ask<'_>) -> Begun {
    let prevent = ask.cdb.u8(4) & 0x03;
    ask.permitted(if prevent == 0 { Access::Always } else { Access::Write })?;
    // 10b and 11b are obsolete.
    ask.zero(4, 0x02)?;
    ask.good()
}
