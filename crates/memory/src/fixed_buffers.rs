//! Use of guest memory as fixed buffers of the kernel.

/// Registration of guest memory as fixed buffers, which pins it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FixedBufferUse {
    /// If it is at most 64 MiB and the kernel allows it; otherwise ordinary buffers.
    Auto,
    /// Always: a guest whose memory cannot be registered is refused.
    On,
    /// Never.
    Off,
}

impl FixedBufferUse {
    /// The words that a user writes.
    pub const WORDS: &'static [&'static str] = &["auto", "on", "off"];

    /// Returns the choice of one of [`FixedBufferUse::WORDS`].
    pub fn from_word(word: &str) -> FixedBufferUse {
        match word {
            "on" => FixedBufferUse::On,
            "off" => FixedBufferUse::Off,
            _ => FixedBufferUse::Auto,
        }
    }

    /// Returns the word that a user writes for this choice.
    pub const fn word(self) -> &'static str {
        match self {
            FixedBufferUse::Auto => "auto",
            FixedBufferUse::On => "on",
            FixedBufferUse::Off => "off",
        }
    }
}
