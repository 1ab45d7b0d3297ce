//! Sizes of I/Os.

use mqblk_core::ByteLen;
use mqblk_core::settings::EXPECTED_SIZE;

/// Sizes of an I/O in bytes: multiples of the smallest, up to the largest. Mostly one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoSizes {
    /// The smallest; all others are multiples of it.
    pub min: ByteLen,
    /// The largest.
    pub max: ByteLen,
}

impl IoSizes {
    /// One size.
    pub fn single(bs: ByteLen) -> IoSizes {
        IoSizes { min: bs, max: bs }
    }

    /// Returns true if there are several.
    pub fn is_mixed(self) -> bool {
        self.min != self.max
    }

    /// Returns the largest as a multiple of the smallest.
    pub fn max_blocks(self) -> u32 {
        // Benchmark has checked that it is at most 1 GiB of at least 512.
        (self.max.0 / self.min.0.max(1)) as u32
    }
}

impl std::fmt::Display for IoSizes {
    /// Writes the value as the option takes it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.is_mixed() {
            false => write!(f, "{}", self.min),
            true => write!(f, "{}-{}", self.min, self.max),
        }
    }
}

/// One word of `--bs`: a size, or the powers of two of a range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockSizes(pub Vec<ByteLen>);

/// Parses a size, or a range of powers of two.
pub(crate) fn parse_block_sizes(text: &str) -> Result<BlockSizes, String> {
    let Some((from, to)) = text.split_once('-') else { return Ok(BlockSizes(vec![parse_size(text)?])) };
    let (from, to) = (parse_size(from)?, parse_size(to)?);
    if !from.0.is_power_of_two() || !to.0.is_power_of_two() || from > to {
        return Err("expected a range of powers of two, the smaller first, such as 512-4M".into());
    }
    let next = |size: &ByteLen| size.0.checked_mul(2).filter(|double| *double <= to.0).map(ByteLen);
    Ok(BlockSizes(std::iter::successors(Some(from), next).collect()))
}

/// Parses a range of mixed sizes.
pub(crate) fn parse_mixed_sizes(text: &str) -> Result<IoSizes, String> {
    let wrong = || "expected two sizes, the larger a multiple of the smaller one, such as 4k-64k".to_owned();
    let (min, max) = text.split_once('-').ok_or_else(wrong)?;
    let (min, max) = (parse_size(min)?, parse_size(max)?);
    // Each multiple of the smaller size up to the larger is then equally likely.
    if min.0 == 0 || max < min || !max.0.is_multiple_of(min.0) {
        return Err(wrong());
    }
    Ok(IoSizes { min, max })
}

/// Parses a size.
pub(crate) fn parse_size(text: &str) -> Result<ByteLen, String> {
    mqblk_core::settings::parse_size(text).ok_or_else(|| format!("expected {EXPECTED_SIZE}"))
}
