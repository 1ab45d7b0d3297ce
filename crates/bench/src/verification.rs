//! Blocks that can be checked, and the last write of each.
//!
//! A block is `magic, offset, generation, CRC-32C`, and content that follows from offset and generation. A lost, stale,
//! misplaced or torn write differs from a good one.

use mqblk_core::ByteOffset;

/// Bytes of the header.
const HEADER: usize = 32;
const MAGIC: u64 = u64::from_le_bytes(*b"mqblkchk");
const CRC_AT: usize = 24;

/// Generations last written to the blocks of one job, and their I/Os in flight: at most one for each block.
#[derive(Debug)]
pub(crate) struct BlockGenerations {
    first: u64,
    /// Generation; 0: never written. Top bit: in flight.
    blocks: Vec<u32>,
    generation: u32,
}

const BUSY: u32 = 1 << 31;

/// Difference of a block from its last write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BlockMismatch {
    /// It has no header.
    #[error("found no verification header")]
    NoHeader,
    /// It is another block.
    #[error("found the content of offset {0}")]
    WrongOffset(u64),
    /// It is an older (or impossible) write.
    #[error("found generation {found}, expected {expected}")]
    WrongGeneration { found: u64, expected: u32 },
    /// It is torn or changed.
    #[error("found CRC-32C {found:#010x}, expected {expected:#010x} over the content")]
    WrongCrc { found: u64, expected: u32 },
}

impl BlockGenerations {
    /// Creates the generations of blocks `first` to `first + count`, none of them written. Generations start above
    /// `base`, so that those of an earlier run differ.
    pub(crate) fn new(first: u64, count: u64, base: u32) -> BlockGenerations {
        BlockGenerations { first, blocks: vec![0; count as usize], generation: base }
    }

    fn slot(&mut self, block: u64) -> &mut u32 {
        &mut self.blocks[(block - self.first) as usize]
    }

    /// Claims `block`, or the next one (after the last comes the first) that has no I/O in flight. `None` when all
    /// have.
    pub(crate) fn claim(&mut self, block: u64) -> Option<u64> {
        let (start, count) = ((block - self.first) as usize, self.blocks.len());
        let free = (0..count).map(|step| (start + step) % count).find(|at| self.blocks[*at] & BUSY == 0)?;
        self.blocks[free] |= BUSY;
        Some(self.first + free as u64)
    }

    /// Claims `block`, if it exists and has no I/O in flight. Returns true if it does.
    pub(crate) fn try_claim(&mut self, block: u64) -> bool {
        let slot = block.checked_sub(self.first).and_then(|at| self.blocks.get_mut(at as usize));
        let Some(slot) = slot.filter(|slot| **slot & BUSY == 0) else { return false };
        *slot |= BUSY;
        true
    }

    /// Returns the generation for the next write.
    pub(crate) fn next_generation(&mut self) -> u32 {
        self.generation = (self.generation + 1) & !BUSY;
        self.generation
    }

    /// Releases a block after a read or a failed write. `known`: false after a failed write, which may have left any
    /// content.
    pub(crate) fn release(&mut self, block: u64, known: bool) {
        let slot = self.slot(block);
        *slot = if known { *slot & !BUSY } else { 0 };
    }

    /// Releases a block after a write of `generation`.
    pub(crate) fn record_write(&mut self, block: u64, generation: u32) {
        *self.slot(block) = generation;
    }

    /// Returns the generation last written to `block`; `None` if there is none.
    pub(crate) fn generation_of(&mut self, block: u64) -> Option<u32> {
        Some(*self.slot(block) & !BUSY).filter(|generation| *generation != 0)
    }

    /// Returns the next block at or after `block` that was written.
    pub(crate) fn next_written(&self, block: u64) -> Option<u64> {
        let start = (block - self.first) as usize;
        self.blocks.iter().skip(start).position(|slot| slot & !BUSY != 0).map(|found| block + found as u64)
    }

    /// Returns the number of written blocks.
    pub(crate) fn written_count(&self) -> u64 {
        self.blocks.iter().filter(|slot| **slot & !BUSY != 0).count() as u64
    }
}

fn put_u64(bytes: &mut [u8], at: usize, word: u64) {
    bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
}

fn get_u64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|index| bytes[at + index]))
}

/// Fills `bytes` (at least 512) with the block of `offset` and `generation`.
pub(crate) fn fill_block(bytes: &mut [u8], offset: ByteOffset, generation: u32) {
    put_u64(bytes, 0, MAGIC);
    put_u64(bytes, 8, offset.0);
    put_u64(bytes, 16, generation.into());
    put_u64(bytes, CRC_AT, 0);
    let mut state = offset.0 ^ (u64::from(generation) << 32) ^ MAGIC;
    for word in bytes[HEADER..].chunks_exact_mut(8) {
        // A mixed Weyl sequence: fast, and no two blocks are equal.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        word.copy_from_slice(&(state ^ state >> 29).to_le_bytes());
    }
    let crc = crc32c::crc32c(bytes);
    put_u64(bytes, CRC_AT, crc.into());
}

/// Checks a block that was read from `offset`.
///
/// # Errors
/// The first [`BlockMismatch`].
pub(crate) fn check_block(bytes: &mut [u8], offset: ByteOffset, generation: u32) -> Result<(), BlockMismatch> {
    if get_u64(bytes, 0) != MAGIC {
        return Err(BlockMismatch::NoHeader);
    }
    let found = get_u64(bytes, CRC_AT);
    put_u64(bytes, CRC_AT, 0);
    let expected = crc32c::crc32c(bytes);
    if found != u64::from(expected) {
        return Err(BlockMismatch::WrongCrc { found, expected });
    }
    match (get_u64(bytes, 8), get_u64(bytes, 16)) {
        (at, _) if at != offset.0 => Err(BlockMismatch::WrongOffset(at)),
        (_, found) if found != u64::from(generation) => {
            Err(BlockMismatch::WrongGeneration { found, expected: generation })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mismatches_are_distinguished() {
        let mut good = vec![0; 4096];
        fill_block(&mut good, ByteOffset(8192), 7);
        assert_eq!(check_block(&mut good.clone(), ByteOffset(8192), 7), Ok(()));
        assert_eq!(check_block(&mut good.clone(), ByteOffset(4096), 7), Err(BlockMismatch::WrongOffset(8192)));
        let stale = BlockMismatch::WrongGeneration { found: 7, expected: 8 };
        assert_eq!(check_block(&mut good.clone(), ByteOffset(8192), 8), Err(stale));
        assert_eq!(check_block(&mut vec![0; 4096], ByteOffset(8192), 7), Err(BlockMismatch::NoHeader));
        for at in [8, 17, 24, 30, 32, 1000, 4095] {
            let mut bad = good.clone();
            bad[at] ^= 1;
            assert!(
                matches!(check_block(&mut bad, ByteOffset(8192), 7), Err(BlockMismatch::WrongCrc { .. })),
                "byte {at}"
            );
        }
        let mut torn = vec![0; 4096];
        fill_block(&mut torn, ByteOffset(8192), 8);
        torn[2048..].copy_from_slice(&good[2048..]);
        assert!(matches!(check_block(&mut torn, ByteOffset(8192), 8), Err(BlockMismatch::WrongCrc { .. })));
    }

    #[test]
    fn a_block_has_one_request_at_a_time() {
        let mut generations = BlockGenerations::new(10, 3, 0);
        assert_eq!(generations.claim(11), Some(11));
        assert_eq!(generations.claim(11), Some(12));
        assert_eq!(generations.claim(11), Some(10));
        assert_eq!(generations.claim(11), None);
        assert!(!generations.try_claim(11) && !generations.try_claim(9) && !generations.try_claim(13));
        let generation = generations.next_generation();
        generations.record_write(12, generation);
        assert_eq!(generations.generation_of(12), Some(1));
        generations.release(11, true);
        generations.release(10, false);
        assert_eq!((generations.next_written(10), generations.written_count()), (Some(12), 1));
        assert!(generations.try_claim(12));
        assert_eq!(generations.generation_of(12), Some(1));
        generations.release(12, false);
        assert_eq!(generations.next_written(10), None);
    }
}
