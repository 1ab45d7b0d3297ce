//! Vital product data. Sources: SPC-4 section 7.8, SBC-3 section 6.6.

use crate::commands::inquiry::{padded, printable};
use crate::reservation::locally_assigned;
use crate::sense::Sense;
use crate::unit::LogicalUnit;

const SUPPORTED: u8 = 0x00;
const SERIAL: u8 = 0x80;
const IDENTIFICATION: u8 = 0x83;
const BLOCK_LIMITS: u8 = 0xb0;
const CHARACTERISTICS: u8 = 0xb1;
const PROVISIONING: u8 = 0xb2;

const PAGES: [u8; 6] = [SUPPORTED, SERIAL, IDENTIFICATION, BLOCK_LIMITS, CHARACTERISTICS, PROVISIONING];

/// Most bytes of a serial number that are told: a page must stay readable in 255 bytes.
const MAX_TEXT: usize = 64;

/// Bytes after the header of the pages of SBC-3.
const BLOCK_PAGE: usize = 0x3c;

/// Puts page `code` in `reply`.
pub(crate) fn page(code: u8, unit: &LogicalUnit, reply: &mut Vec<u8>) -> Result<(), Sense> {
    reply.extend([0, code, 0, 0]);
    match code {
        SUPPORTED => reply.extend(PAGES),
        SERIAL => reply.extend(printable(&unit.identity().serial).take(MAX_TEXT)),
        IDENTIFICATION => identification(unit, reply),
        BLOCK_LIMITS => block_limits(unit, reply),
        CHARACTERISTICS => {
            // A medium that does not rotate.
            reply.extend([0x00, 0x01]);
            reply.resize(4 + BLOCK_PAGE, 0);
        }
        PROVISIONING => provisioning(unit, reply),
        _ => {
            reply.clear();
            return Err(Sense::in_command(2, None));
        }
    }
    let len = (reply.len() - 4) as u16;
    reply[2..4].copy_from_slice(&len.to_be_bytes());
    Ok(())
}

/// Designators of the unit: a locally assigned NAA, and the same digits behind the vendor. Not the name itself, which may tell a
/// guest of its host.
fn identification(unit: &LogicalUnit, reply: &mut Vec<u8>) {
    let identity = unit.identity();
    let number = locally_assigned(&identity.name);
    reply.extend([0x01, 0x03, 0, 8]);
    reply.extend(number.to_be_bytes());
    reply.extend([0x02, 0x01, 0, 8 + 16]);
    padded(&identity.vendor, 8, reply);
    reply.extend(format!("{number:016x}").bytes());
}

fn block_limits(unit: &LogicalUnit, reply: &mut Vec<u8>) {
    let bounds = unit.bounds();
    // WSNZ: WRITE SAME of no blocks does not mean "to the end".
    reply.extend([0x01, bounds.compare]);
    reply.extend(bounds.granularity.to_be_bytes());
    reply.extend(bounds.transfer.to_be_bytes());
    reply.extend(bounds.optimal_transfer.to_be_bytes());
    reply.extend([0; 4]);
    if let Some(unmap) = bounds.unmap {
        reply.extend(unmap.blocks.to_be_bytes());
        reply.extend(unmap.descriptors.to_be_bytes());
        reply.extend(unmap.granularity.to_be_bytes());
        // UGAVALID, and the alignment, which is 0.
        reply.extend([0x80, 0, 0, 0]);
    } else {
        reply.extend([0; 16]);
    }
    reply.extend(u64::from(bounds.same).to_be_bytes());
    reply.resize(4 + BLOCK_PAGE, 0);
}

fn provisioning(unit: &LogicalUnit, reply: &mut Vec<u8>) {
    let bounds = unit.bounds();
    let unmap = bounds.unmap.is_some();
    // WRITE SAME can unmap where what it leaves reads as it must.
    let same = bounds.unmapped_reads_zeroes();
    let flags = u8::from(unmap) << 7 | u8::from(same) << 6 | u8::from(same) << 5 | u8::from(same) << 2;
    // Thin provisioned, or not provisioned by blocks at all.
    reply.extend([0, flags, if unmap { 2 } else { 0 }, 0]);
}
