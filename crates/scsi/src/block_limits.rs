//! Limits of one command, in logical blocks: the content of the Block Limits VPD page, which commands are checked
//! against.

use mqblk_core::{ByteLen, Geometry, Limits};

use crate::MultiStepCommand;

/// Maximum number of UNMAP block descriptors.
const MAX_UNMAP_DESCRIPTORS: u32 = 256;

/// Maximum length of WRITE SAME on a disk that writes zeroes only as data.
const MAX_WRITE_SAME_AS_DATA: ByteLen = ByteLen(32 << 20);

/// Limits of a logical unit. All counts are of logical blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockLimits {
    /// Maximum transfer length of reads, writes and verifies.
    pub(crate) max_transfer: u32,
    /// Optimal transfer length; 0 if unknown.
    pub(crate) optimal_transfer: u32,
    /// Optimal transfer length granularity; 0 if unknown.
    pub(crate) transfer_granularity: u16,
    /// Maximum COMPARE AND WRITE length.
    pub(crate) max_compare_and_write: u8,
    /// Maximum WRITE SAME length.
    pub(crate) max_write_same: u32,
    /// Maximum number of blocks that the disk zeroes without data.
    pub(crate) max_write_zeroes: Option<u32>,
    /// Limits of UNMAP, if it is supported.
    pub(crate) unmap: Option<UnmapLimits>,
}

/// Limits of UNMAP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UnmapLimits {
    /// Maximum number of blocks of all descriptors together.
    pub(crate) max_blocks: u32,
    /// Maximum number of descriptors.
    pub(crate) max_descriptors: u32,
    /// Optimal granularity.
    pub(crate) granularity: u32,
}

impl BlockLimits {
    pub(crate) fn new(geometry: &Geometry, limits: &Limits) -> BlockLimits {
        let block = geometry.logical_block;
        // All ones means "no limit reported" in some of the fields, so a count stays below it.
        let count =
            |len: ByteLen| u32::try_from(block.blocks_in(len)).map_or(u32::MAX - 1, |count| count.min(u32::MAX - 1));
        let max_transfer = count(limits.max_transfer).max(1);
        let scratch = count(ByteLen(MultiStepCommand::SCRATCH as u64));
        // A maximum below one block means that zeroing is not supported.
        let max_write_zeroes = limits.write_zeroes.map(count).filter(|&blocks| blocks > 0);
        let unmap = limits.discard.filter(|_| !geometry.read_only).and_then(|discard| {
            let blocks = count(discard.max_len).min(max_write_zeroes.unwrap_or(u32::MAX));
            let granularity = count(discard.granularity).max(1);
            (blocks > 0).then_some(UnmapLimits {
                max_blocks: blocks,
                max_descriptors: MAX_UNMAP_DESCRIPTORS,
                granularity,
            })
        });
        let min_io = geometry.min_io.0.max(geometry.physical_block.bytes().into());
        BlockLimits {
            max_transfer,
            optimal_transfer: count(geometry.opt_io).min(max_transfer),
            transfer_granularity: u16::try_from(block.blocks_in(ByteLen(min_io))).unwrap_or(0),
            max_compare_and_write: u8::try_from(scratch.min(max_transfer / 2)).unwrap_or(u8::MAX),
            max_write_same: max_write_zeroes.unwrap_or_else(|| count(MAX_WRITE_SAME_AS_DATA)),
            max_write_zeroes,
            unmap,
        }
    }

    /// Returns true if unmapped blocks read as zeroes (LBPRZ): where the disk can write zeroes without data, UNMAP does
    /// that. A discard alone leaves the content undefined.
    pub(crate) fn unmapped_reads_zeroes(&self) -> bool {
        self.unmap.is_some() && self.max_write_zeroes.is_some()
    }
}
