//! UNMAP and WRITE SAME. Source: SBC-3 clause 5, under their names.

use mqblk_core::{ByteLen, Op};

use crate::ask::{Ask, Begun, Refused};
use crate::commands::transfer::{Extent, PROTECT};
use crate::sense::Sense;
use crate::sequence::{Kind, Same, Sequence};
use crate::step::{Ending, Step};

/// Bytes before the first UNMAP block descriptor, and of each.
const HEADER: usize = 8;
const DESCRIPTOR: usize = 16;

pub(crate) fn unmap(ask: &mut Ask<'_>) -> Begun {
    let limits = ask.unit.bounds().unmap.ok_or(Sense::INVALID_OPCODE)?;
    // ANCHOR.
    ask.zero(1, 0x01)?;
    let list_len = usize::from(ask.cdb.u16(7));
    if list_len == 0 {
        return ask.good();
    }
    if list_len < HEADER {
        return Err(Sense::PARAMETER_LIST_LENGTH.at(7, None).into());
    }
    ask.offered(ByteLen(list_len as u64))?;
    let mut header = [0; HEADER];
    if !ask.data_out.copy(0, &mut header) {
        return Err(Refused::Overrun);
    }
    let data_len = usize::from(u16::from_be_bytes([header[0], header[1]]));
    let descriptors_len = usize::from(u16::from_be_bytes([header[2], header[3]]));
    if data_len + 2 > list_len || descriptors_len + HEADER > list_len {
        return Err(Sense::PARAMETER_LIST_LENGTH.at(7, None).into());
    }
    // A descriptor that is not whole is ignored.
    let count = descriptors_len / DESCRIPTOR;
    if count as u64 > limits.descriptors.into() {
        return Err(Sense::in_parameters(2, None).into());
    }
    let mut list = vec![0; count * DESCRIPTOR];
    if !ask.data_out.copy(HEADER as u64, &mut list) {
        return Err(Refused::Overrun);
    }
    let mut total: u64 = 0;
    for (index, descriptor) in list.chunks_exact(DESCRIPTOR).enumerate() {
        let [lba, blocks, _] = words(descriptor);
        if blocks == 0 {
            continue;
        }
        total += blocks;
        if total > limits.blocks.into() {
            return Err(Sense::in_parameters((HEADER + index * DESCRIPTOR + 8) as u16, None).into());
        }
        let range = ask.range(lba, blocks)?;
        ask.work.ranges.push(range);
    }
    let transferred = list_len as u64;
    if ask.work.ranges.is_empty() {
        return Ok(Step::End(Ending::good(transferred)));
    }
    let op = if ask.unit.bounds().unmapped_reads_zeroes() {
        Op::WriteZeroes { may_unmap: true, fua: ask.unit.write_through() }
    } else {
        Op::Discard { secure: false }
    };
    Ok(Step::Ranges { op, transferred })
}

/// LBA, number of blocks, and what is reserved.
fn words(descriptor: &[u8]) -> [u64; 3] {
    let number = |bytes: &[u8]| bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte));
    [number(&descriptor[..8]), number(&descriptor[8..12]), number(&descriptor[12..])]
}

fn write_same(ask: &Ask<'_>, extent: Extent, no_data: bool) -> Begun {
    let bounds = *ask.unit.bounds();
    // WRPROTECT; ANCHOR.
    ask.zero(1, PROTECT)?;
    ask.zero(1, 0x10)?;
    let unmap = ask.cdb.has(1, 0x08);
    if unmap && !bounds.unmapped_reads_zeroes() {
        return Err(Sense::in_command(1, Some(3)).into());
    }
    // No blocks would mean all up to the end, which the block limits page (WSNZ) excludes.
    if extent.count == 0 || extent.count > bounds.same {
        return Err(Sense::in_command(extent.count_at, None).into());
    }
    let (start, len) = ask.range(extent.lba, extent.count.into())?;
    let block = ask.unit.block_bytes() as usize;
    let (pattern, transferred) = if no_data { (vec![0; block], 0) } else { (ask.parameters(block)?, block as u64) };
    let fua = ask.unit.write_through();
    // Blocks that would not read as the pattern must not be unmapped.
    if bounds.zeroes.is_some() && pattern.iter().all(|byte| *byte == 0) {
        return Ok(Step::Disk { op: Op::WriteZeroes { may_unmap: unmap, fua }, start, len, transferred });
    }
    Ok(Step::Sequence(Sequence::new(Kind::Same(Same::new((start, len), pattern, fua, transferred)))))
}

pub(crate) fn write_same_10(ask: &mut Ask<'_>) -> Begun {
    // PBDATA, LBDATA and RELADR, which are obsolete.
    ask.zero(1, 0x07)?;
    write_same(ask, ask.extent_10(), false)
}

pub(crate) fn write_same_16(ask: &mut Ask<'_>) -> Begun {
    ask.zero(1, 0x06)?;
    write_same(ask, ask.extent_16(), ask.cdb.has(1, 0x01))
}
