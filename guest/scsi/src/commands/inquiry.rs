//! INQUIRY. Source: SPC-4 section 6.6.

use crate::ask::{Ask, Begun};
use crate::commands::vpd;
use crate::sense::Sense;

/// Bytes of standard INQUIRY data: with all version descriptors.
const LEN: usize = 96;

/// Version descriptors. Source: SPC-4 annex E.
const VERSIONS: [u16; 3] = [
    0x00a0, // SAM-5
    0x0460, // SPC-4
    0x04c0, // SBC-3
];

pub(crate) fn inquiry(ask: &mut Ask<'_>) -> Begun {
    let allocation = ask.cdb.u16(3).into();
    // CMDDT, which is obsolete.
    ask.zero(1, 0x02)?;
    let page = ask.cdb.u8(2);
    if ask.cdb.has(1, 0x01) {
        vpd::page(page, ask.unit, &mut ask.work.reply)?;
    } else if page != 0 {
        return Err(Sense::in_command(2, None).into());
    } else {
        let identity = ask.unit.identity();
        standard([&identity.vendor, &identity.product, &identity.revision], 0x00, &mut ask.work.reply);
    }
    ask.reply(allocation)
}

/// Standard INQUIRY data. `peripheral`: qualifier and device type.
pub(crate) fn standard(identity: [&str; 3], peripheral: u8, reply: &mut Vec<u8>) {
    // SPC-4; HISUP and format 2; CMDQUE.
    reply.extend([peripheral, 0, 0x06, 0x12, (LEN - 5) as u8, 0, 0, 0x02]);
    for (text, width) in identity.into_iter().zip([8, 16, 4]) {
        padded(text, width, reply);
    }
    reply.resize(58, 0);
    reply.extend(VERSIONS.iter().flat_map(|version| version.to_be_bytes()));
    reply.resize(LEN, 0);
}

/// `text` in a field of `width` bytes: left-aligned, filled with spaces, only printable ASCII. Source: SPC-4 section 4.4.1.
pub(crate) fn padded(text: &str, width: usize, reply: &mut Vec<u8>) {
    let end = reply.len() + width;
    reply.extend(printable(text).take(width));
    reply.resize(end, b' ');
}

/// `text` in printable ASCII.
pub(crate) fn printable(text: &str) -> impl Iterator<Item = u8> {
    text.chars().map(|letter| if matches!(letter, ' '..='~') { letter as u8 } else { b' ' })
}
