//! LOG SENSE: only the lists of what there is. Source: SPC-4 sections 6.8 and 7.3.

use crate::ask::{Ask, Begun};
use crate::sense::Sense;

/// Supported log pages; with this subpage, supported log pages and subpages.
const SUPPORTED: u8 = 0x00;
const ALL_SUBPAGES: u8 = 0xff;

pub(crate) fn log_sense(ask: &mut Ask<'_>) -> Begun {
    // SP: nothing is kept. PPC, obsolete.
    ask.zero(1, 0x01)?;
    ask.zero(1, 0x02)?;
    // Neither page has values or parameters, so any kind of value may be asked for, from the first parameter on.
    if ask.cdb.u8(2) & 0x3f != SUPPORTED {
        return Err(Sense::in_command(2, Some(5)).into());
    }
    if ask.cdb.u16(5) != 0 {
        return Err(Sense::in_command(5, None).into());
    }
    let page: &[u8] = match ask.cdb.u8(3) {
        0 => &[SUPPORTED, 0, 0, 1, SUPPORTED],
        // SPF, since it has a subpage code.
        ALL_SUBPAGES => &[0x40 | SUPPORTED, ALL_SUBPAGES, 0, 4, SUPPORTED, 0, SUPPORTED, ALL_SUBPAGES],
        _ => return Err(Sense::in_command(3, None).into()),
    };
    ask.work.reply.extend(page);
    ask.reply(ask.cdb.u16(7).into())
}
