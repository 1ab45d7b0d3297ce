//! Options of a disk's requests: merging and queue depth. Options of a queue: polling and call coalescing.

use std::time::Duration;

use mqblk_core::ByteLen;

use crate::poll::PollPolicy;

/// Merging of requests whose ranges touch, before they are submitted to the storage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MergeMode {
    /// If each request has a cost at the storage ([`Limits::cost_per_request`](mqblk_core::Limits)).
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

    /// Returns the mode of one of [`MergeMode::WORDS`].
    pub fn from_word(word: &str) -> MergeMode {
        match word {
            "on" => MergeMode::On,
            "off" => MergeMode::Off,
            _ => MergeMode::Auto,
        }
    }

    /// Returns the word that a user writes for this mode.
    pub const fn word(self) -> &'static str {
        match self {
            MergeMode::Auto => "auto",
            MergeMode::On => "on",
            MergeMode::Off => "off",
        }
    }
}

/// Plugging and merging of a disk's requests. Equal for all queues of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlugOptions {
    /// When requests are merged.
    pub merge: MergeMode,
    /// Longest merged request.
    pub merge_bytes: ByteLen,
    /// Most memory segments of a merged request.
    pub merge_segments: u32,
    /// Most requests of the disk that a worker has outstanding; the others wait in the plug. 0: as many as the channel
    /// takes. While the worker has other disks it is at most a quarter of its context, and only a few of the context's
    /// last eighth: so a slow disk leaves space for the others.
    pub depth: u32,
}

impl Default for PlugOptions {
    fn default() -> Self {
        PlugOptions { merge: MergeMode::Auto, merge_bytes: ByteLen(1 << 20), merge_segments: 1024, depth: 0 }
    }
}

/// A queue's polling, and the coalescing of its calls: what an operator may change while its guest uses it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueuePolicy {
    /// Its polling.
    pub poll: PollPolicy,
    /// Coalescing of calls to its guest.
    pub coalesce: Coalesce,
}

/// A polling whose calls are not deferred.
impl From<PollPolicy> for QueuePolicy {
    fn from(poll: PollPolicy) -> QueuePolicy {
        QueuePolicy { poll, coalesce: Coalesce::default() }
    }
}

/// Call coalescing: calls to the guest are deferred so that one covers several completions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Coalesce {
    /// Longest time from a completion to its call. Zero: no call is deferred.
    pub delay: Duration,
    /// Completions that make a call due at once; 0: any number may wait.
    pub answers: u32,
}
