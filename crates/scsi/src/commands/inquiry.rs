//! INQUIRY. Source: SPC-4 section 6.6.

use crate::commands::text::padded;
use crate::commands::vpd;
use crate::context::{BeginResult, CommandContext};
use crate::sense::Sense;

/// Length of standard INQUIRY data with all version descriptors.
const LEN: usize = 96;

/// Version descriptors. Source: SPC-4 annex E.
const VERSIONS: [u16; 3] = [
    0x00a0, // SAM-5
    0x0460, // SPC-4
    0x04c0, // SBC-3
];

pub(crate) fn inquiry(cmd: &mut CommandContext<'_>) -> BeginResult {
    let allocation = cmd.cdb.u16(3).into();
    // CMDDT, which is obsolete.
    cmd.check_zero(1, 0x02)?;
    let page = cmd.cdb.u8(2);
    if cmd.cdb.has(1, 0x01) {
        vpd::page(page, cmd.unit, &mut cmd.buffers.data_in)?;
    } else if page != 0 {
        return Err(Sense::invalid_cdb_field(2, None).into());
    } else {
        let identity = cmd.unit.identity();
        standard([&identity.vendor, &identity.product, &identity.revision], 0x00, &mut cmd.buffers.data_in);
    }
    cmd.end_with_data_in(allocation)
}

/// Appends standard INQUIRY data. `peripheral`: qualifier and device type.
pub(crate) fn standard(identity: [&str; 3], peripheral: u8, data_in: &mut Vec<u8>) {
    // SPC-4; HISUP and format 2; CMDQUE.
    data_in.extend([peripheral, 0, 0x06, 0x12, (LEN - 5) as u8, 0, 0, 0x02]);
    for (text, width) in identity.into_iter().zip([8, 16, 4]) {
        padded(text, width, data_in);
    }
    data_in.resize(58, 0);
    data_in.extend(VERSIONS.iter().flat_map(|version| version.to_be_bytes()));
    data_in.resize(LEN, 0);
}
