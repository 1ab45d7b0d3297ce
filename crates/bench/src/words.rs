//! Values that options take: words, sizes, lists.

mod sizes;
mod values;

use clap::ValueEnum;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use mqblk_core::ByteLen;
use mqblk_driver::DescriptorLayout;

pub(crate) use sizes::{BlockSizes, IoSizes, parse_block_sizes, parse_mixed_sizes, parse_size};
pub(crate) use values::{parse_cpus, parse_distribution, parse_seconds};

/// Larger I/Os use indirect descriptors: they may have several segments.
const INDIRECT_ABOVE: ByteLen = ByteLen(64 << 10);

/// CPUs in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuList(pub Vec<u16>);

/// A word that an option takes: the word, its line in the help, and its value.
pub(crate) type Choice<T> = (&'static str, &'static str, T);

/// Returns the parser of an option that takes one of a table, by its word.
pub(crate) fn one_of<T: Sync>(
    table: &'static [T],
    word: fn(&T) -> PossibleValue,
) -> impl TypedValueParser<Value = &'static T> {
    PossibleValuesParser::new(table.iter().map(word))
        .try_map(move |found| table.iter().find(|one| word(one).matches(&found, false)).ok_or("no such word"))
}

/// Returns a choice's word.
pub(crate) fn word<T>((word, about, _): &Choice<T>) -> PossibleValue {
    PossibleValue::new(*word).help(*about)
}

/// Operation and order of a job's I/Os.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Rw {
    /// Reads in sequence.
    Read,
    /// Writes in sequence.
    Write,
    /// Reads in sequence and writes in sequence, mixed.
    #[value(name = "rw", alias = "readwrite")]
    Mixed,
    /// Reads at random.
    Randread,
    /// Writes at random.
    Randwrite,
    /// Reads and writes at random.
    Randrw,
    /// Discards in sequence.
    Trim,
    /// Discards at random.
    Randtrim,
}

impl Rw {
    /// Returns the name on the command line and in the results.
    pub fn name(self) -> &'static str {
        match self {
            Rw::Read => "read",
            Rw::Write => "write",
            Rw::Mixed => "rw",
            Rw::Randread => "randread",
            Rw::Randwrite => "randwrite",
            Rw::Randrw => "randrw",
            Rw::Trim => "trim",
            Rw::Randtrim => "randtrim",
        }
    }

    /// Returns true if it changes the disk: it writes or discards.
    pub fn writes(self) -> bool {
        !matches!(self, Rw::Read | Rw::Randread)
    }

    /// Returns true if it discards.
    pub fn trims(self) -> bool {
        matches!(self, Rw::Trim | Rw::Randtrim)
    }

    /// Returns true if it reads in the measured time.
    pub fn reads(self) -> bool {
        !matches!(self, Rw::Write | Rw::Randwrite) && !self.trims()
    }

    /// Returns true if it reads and writes.
    pub fn is_mixed(self) -> bool {
        self.reads() && self.writes()
    }

    /// Returns true if it goes through the range in order.
    pub fn is_sequential(self) -> bool {
        matches!(self, Rw::Read | Rw::Write | Rw::Mixed | Rw::Trim)
    }
}

/// How the client learns about completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ClientMode {
    /// Polls for completions.
    #[value(help = "Polls without a pause")]
    Poll,
    /// Asks to be called, and sleeps.
    Wait,
}

/// How written blocks are checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Verify {
    /// A CRC-32C over each block, with its offset and generation.
    Crc32c,
}

/// Descriptor layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Descriptors {
    /// Direct if the ring has room for three descriptors for each request, else indirect.
    Auto,
    /// Always direct.
    Direct,
    /// Always indirect, if the server can.
    Indirect,
}

impl Descriptors {
    /// Returns the driver's layout, for I/Os of at most `bs`.
    pub fn shape(self, bs: ByteLen) -> DescriptorLayout {
        match self {
            // A table for each is cheap beside this much data, and keeps a disk with small segments from filling the
            // ring with descriptors.
            Descriptors::Auto if bs > INDIRECT_ABOVE => DescriptorLayout::Indirect,
            Descriptors::Auto => DescriptorLayout::Auto,
            Descriptors::Direct => DescriptorLayout::Direct,
            Descriptors::Indirect => DescriptorLayout::Indirect,
        }
    }
}

/// Distribution of random blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Distribution {
    /// All are as likely.
    #[default]
    Uniform,
    /// By Zipf's law: the block of rank R is as likely as 1 / R^theta.
    Zipf(f64),
}

impl std::fmt::Display for Distribution {
    /// Writes the value as the option takes it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Distribution::Uniform => write!(f, "random"),
            Distribution::Zipf(theta) => write!(f, "zipf:{theta}"),
        }
    }
}

/// Returns text with its first letter in upper case.
pub(crate) fn capitalised(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or(String::new(), |first| first.to_uppercase().chain(chars).collect())
}
