//! What a unit takes in one command, in its logical blocks: what the block limits page says and what commands are held to.

use mqblk_core::{ByteLen, Geometry, Limits};

use crate::Sequence;

/// Most block descriptors of one UNMAP.
const MAX_DESCRIPTORS: u32 = 256;

/// WRITE SAME on a disk that can write zeroes only as data.
const SAME_AS_DATA: ByteLen = ByteLen(32 << 20);

/// Bounds of a unit. All counts are of logical blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bounds {
    /// Most blocks of a read, write or verify.
    pub(crate) transfer: u32,
    /// Preferred length of a transfer; 0 when unknown.
    pub(crate) optimal_transfer: u32,
    /// Transfers should be a multiple of this; 0 when unknown.
    pub(crate) granularity: u16,
    /// Most blocks of COMPARE AND WRITE.
    pub(crate) compare: u8,
    /// Most blocks of WRITE SAME.
    pub(crate) same: u32,
    /// Longest WRITE SAME of zeroes that the disk does without data.
    pub(crate) zeroes: Option<u32>,
    /// UNMAP, if there is one.
    pub(crate) unmap: Option<Unmap>,
}

/// Bounds of UNMAP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unmap {
    /// Most blocks of all descriptors together.
    pub(crate) blocks: u32,
    /// Most descriptors.
    pub(crate) descriptors: u32,
    /// Preferred multiple.
    pub(crate) granularity: u32,
}

impl Bounds {
    pub(crate) fn new(geometry: &Geometry, limits: &Limits) -> Bounds {
        let block = geometry.logical_block;
        // All ones means "no limit said" in some of the fields, so a count stays below it.
        let count =
            |len: ByteLen| u32::try_from(block.blocks_in(len)).map_or(u32::MAX - 1, |count| count.min(u32::MAX - 1));
        let transfer = count(limits.max_transfer).max(1);
        let scratch = count(ByteLen(Sequence::SCRATCH as u64));
        // A disk that offers ranges of no block offers none.
        let zeroes = limits.write_zeroes.map(count).filter(|&blocks| blocks > 0);
        let unmap = limits.discard.filter(|_| !geometry.read_only).and_then(|discard| {
            let blocks = count(discard.max_len).min(zeroes.unwrap_or(u32::MAX));
            let granularity = count(discard.granularity).max(1);
            (blocks > 0).then_some(Unmap { blocks, descriptors: MAX_DESCRIPTORS, granularity })
        });
        let min_io = geometry.min_io.0.max(geometry.physical_block.bytes().into());
        Bounds {
            transfer,
            optimal_transfer: count(geometry.opt_io).min(transfer),
            granularity: u16::try_from(block.blocks_in(ByteLen(min_io))).unwrap_or(0),
            compare: u8::try_from(scratch.min(transfer / 2)).unwrap_or(u8::MAX),
            same: zeroes.unwrap_or_else(|| count(SAME_AS_DATA)),
            zeroes,
            unmap,
        }
    }

    /// Unmapped blocks read as zeroes: where the disk can write zeroes without data, UNMAP asks for that. A discard alone
    /// promises nothing of what is read afterwards.
    pub(crate) fn unmapped_reads_zeroes(&self) -> bool {
        self.unmap.is_some() && self.zeroes.is_some()
    }
}
