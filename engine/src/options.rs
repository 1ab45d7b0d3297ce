//! What a user may choose about a disk's requests on their way: merged or not, held back or not, called for at once or not.

use std::time::Duration;

use mqblk_core::ByteLen;

/// Whether requests whose ranges touch are merged before they go to the storage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MergeMode {
    /// Where a request costs the storage something of its own ([`Limits::cost_per_request`](mqblk_core::Limits)).
    #[default]
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

impl MergeMode {
    /// The words that a user writes, in the order of [`MergeMode::from_word`].
    pub const WORDS: &'static [&'static str] = &["auto", "on", "off"];

    /// The mode of one of [`MergeMode::WORDS`].
    pub fn from_word(word: &str) -> MergeMode {
        match word {
            "on" => MergeMode::On,
            "off" => MergeMode::Off,
            _ => MergeMode::Auto,
        }
    }

    /// The word that a user writes for this mode.
    pub const fn word(self) -> &'static str {
        match self {
            MergeMode::Auto => "auto",
            MergeMode::On => "on",
            MergeMode::Off => "off",
        }
    }
}

/// How a worker plugs the requests of a disk. The same for all queues of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlugOptions {
    /// Whether requests are merged.
    pub merge: MergeMode,
    /// Longest merged request.
    pub merge_bytes: ByteLen,
    /// Most memory segments of a merged request.
    pub merge_segments: u32,
    /// Most requests of the disk that a worker has in its channel; the others wait in the plug. 0: as many as the channel takes,
    /// but no more than a quarter of the context while the worker has other disks, and of the context's last eighth only a few: so a
    /// slow disk leaves room for the others.
    pub depth: u32,
}

impl Default for PlugOptions {
    fn default() -> Self {
        PlugOptions { merge: MergeMode::Auto, merge_bytes: ByteLen(1 << 20), merge_segments: 1024, depth: 0 }
    }
}

/// How calls to the guest are put off, so that one call tells of several answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Coalesce {
    /// Longest time from an answer to its call. Zero: each turn that answers calls.
    pub delay: Duration,
    /// Answers that make a call due at once; 0: any number may wait.
    pub answers: u32,
}
