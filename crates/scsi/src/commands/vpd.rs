//! Vital product data. Sources: SPC-4 section 7.8, SBC-3 section 6.6.

use crate::commands::text::{padded, printable};
use crate::logical_unit::LogicalUnit;
use crate::reservation::locally_assigned;
use crate::sense::Sense;

const SUPPORTED: u8 = 0x00;
const SERIAL: u8 = 0x80;
const IDENTIFICATION: u8 = 0x83;
const BLOCK_LIMITS: u8 = 0xb0;
const CHARACTERISTICS: u8 = 0xb1;
const PROVISIONING: u8 = 0xb2;

const PAGES: [u8; 6] = [SUPPORTED, SERIAL, IDENTIFICATION, BLOCK_LIMITS, CHARACTERISTICS, PROVISIONING];

/// Maximum length of a reported serial number: a page must be readable in 255 bytes.
const MAX_TEXT: usize = 64;

/// Page length of the SBC-3 pages.
const BLOCK_PAGE: usize = 0x3c;

/// Appends page `code` to `data_in`.
pub(crate) fn page(code: u8, unit: &LogicalUnit, data_in: &mut Vec<u8>) -> Result<(), Sense> {
    data_in.extend([0, code, 0, 0]);
    match code {
        SUPPORTED => data_in.extend(PAGES),
        SERIAL => data_in.extend(printable(&unit.identity().serial).take(MAX_TEXT)),
        IDENTIFICATION => identification(unit, data_in),
        BLOCK_LIMITS => block_limits(unit, data_in),
        CHARACTERISTICS => {
            // Non-rotating medium.
            data_in.extend([0x00, 0x01]);
            data_in.resize(4 + BLOCK_PAGE, 0);
        }
        PROVISIONING => provisioning(unit, data_in),
        _ => {
            data_in.clear();
            return Err(Sense::invalid_cdb_field(2, None));
        }
    }
    let len = (data_in.len() - 4) as u16;
    data_in[2..4].copy_from_slice(&len.to_be_bytes());
    Ok(())
}

/// Device Identification page: a locally assigned NAA designator, and a T10 vendor ID designator with the same
/// digits. The name itself is not reported, as it may reveal something of the host.
fn identification(unit: &LogicalUnit, data_in: &mut Vec<u8>) {
    let identity = unit.identity();
    let number = locally_assigned(&identity.name);
    data_in.extend([0x01, 0x03, 0, 8]);
    data_in.extend(number.to_be_bytes());
    data_in.extend([0x02, 0x01, 0, 8 + 16]);
    padded(&identity.vendor, 8, data_in);
    data_in.extend(format!("{number:016x}").bytes());
}

fn block_limits(unit: &LogicalUnit, data_in: &mut Vec<u8>) {
    let limits = unit.block_limits();
    // WSNZ: WRITE SAME of zero blocks does not mean "to the end".
    data_in.extend([0x01, limits.max_compare_and_write]);
    data_in.extend(limits.transfer_granularity.to_be_bytes());
    data_in.extend(limits.max_transfer.to_be_bytes());
    data_in.extend(limits.optimal_transfer.to_be_bytes());
    data_in.extend([0; 4]);
    if let Some(unmap) = limits.unmap {
        data_in.extend(unmap.max_blocks.to_be_bytes());
        data_in.extend(unmap.max_descriptors.to_be_bytes());
        data_in.extend(unmap.granularity.to_be_bytes());
        // UGAVALID, and the alignment, which is 0.
        data_in.extend([0x80, 0, 0, 0]);
    } else {
        data_in.extend([0; 16]);
    }
    data_in.extend(u64::from(limits.max_write_same).to_be_bytes());
    data_in.resize(4 + BLOCK_PAGE, 0);
}

fn provisioning(unit: &LogicalUnit, data_in: &mut Vec<u8>) {
    let limits = unit.block_limits();
    let unmap = limits.unmap.is_some();
    // WRITE SAME can unmap if unmapped blocks read as zeroes.
    let same = limits.unmapped_reads_zeroes();
    let flags = u8::from(unmap) << 7 | u8::from(same) << 6 | u8::from(same) << 5 | u8::from(same) << 2;
    // Thin provisioned, or fully provisioned.
    data_in.extend([0, flags, if unmap { 2 } else { 0 }, 0]);
}
